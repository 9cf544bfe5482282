//! The adapter to candle-flash-attn: f16 and bf16 on CUDA, behind the feature `flash-attn`.
//!
//! [`decide`] lists what the operation computes rightly, read from candle-flash-attn 0.11; all else takes the reference
//! path.

use std::fmt;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, DeviceLocation, Result, Tensor};

use super::plan::{Wanted, obstacle_of_every_gpu};
use super::rows::{Bands, Window};
use super::validate::{Call, Dims};
use super::{OutputOrder, first_line};

/// A call that the operation takes.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// All queries of all sequences see the same keys, up to the window.
    Dense { keys: Range<usize>, window: Window },
    /// Sequences of different lengths, by their cumulative lengths.
    Varlen { cu_seqlens_q: Vec<u32>, cu_seqlens_kv: Vec<u32>, window: Window },
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dense { .. } => write!(f, "candle-flash-attn"),
            Self::Varlen { .. } => write!(f, "candle-flash-attn on sequences of different lengths"),
        }
    }
}

/// CUDA's limit on the second and third dimension of a grid, in which the kernel lays out sequences and heads.
const GRID: usize = 65_535;

/// How a call goes to candle-flash-attn, or why it does not.
///
/// # Errors
/// As [`AttentionMask::resolve`](crate::AttentionMask::resolve).
pub(super) fn decide(call: &Call, wanted: Wanted) -> Result<std::result::Result<Plan, String>> {
    let refuse = |reason: String| Ok(Err(format!("candle-flash-attn {reason}")));
    let (Dims { b, h, t_q, t_kv, d, .. }, options, scale) = (call.dims, call.options, call.scale());
    if let Some(obstacle) = obstacle_of_every_gpu(call, wanted, &[DType::F16, DType::BF16]) {
        return refuse(obstacle);
    }
    if !d.is_multiple_of(8) || d > 256 {
        return refuse(format!("takes D in multiples of 8 up to 256, and D is {d}"));
    }
    // It takes the maximum before it scales: a scale below zero makes infinities, one of zero NaN.
    let normal = |x: f64| (f64::from(f32::MIN_POSITIVE)..f64::from(f32::MAX) / 2.0).contains(&x);
    if !normal(scale) {
        return refuse(format!("takes finite scales above zero, and this one is {scale:?}"));
    }
    // It folds the softcap into the scale, and takes a scale of zero for no softcap.
    if let Some(softcap) = options.softcap.filter(|&softcap| !normal(softcap) || !normal(scale / softcap)) {
        return refuse(format!("drops a softcap of {softcap:?} at a scale of {scale:?}"));
    }
    // A launch that fails is not noticed: the result would be whatever lay in memory.
    if h > GRID || b > GRID || call.sequences.is_some_and(|sequences| sequences.len() > GRID) {
        return refuse(format!("launches {GRID} sequences and heads at most, and there are {b} and {h}"));
    }
    let rows = b.checked_mul(t_q.max(t_kv)).is_some_and(|rows| i32::try_from(rows).is_ok());
    let strides = t_q.max(t_kv).checked_mul(h).and_then(|rows| rows.checked_mul(d));
    if !rows || strides.is_none_or(|stride| u32::try_from(stride).is_err()) {
        return refuse("counts in 32 bits, and the call is larger".into());
    }
    let Some(bands) = Bands::new(call)? else {
        return refuse("takes causal masks and windows that end with the last query and key, ALiBi from there".into());
    };
    let window = bands.window;
    if bands.spans.is_empty() {
        return Ok(Err("no query sees a key".into()));
    }
    if let (None, Some(keys)) = (call.sequences, bands.common_keys(call)) {
        return Ok(Ok(Plan::Dense { keys, window }));
    }
    let (cu_seqlens_q, cu_seqlens_kv) = cumulative(&bands, b * t_q, b * t_kv);
    if cu_seqlens_q.len() > GRID + 1 {
        return refuse(format!("launches {GRID} sequences at most, and there are {}", cu_seqlens_q.len() - 1));
    }
    Ok(Ok(Plan::Varlen { cu_seqlens_q, cu_seqlens_kv, window }))
}

/// The cumulative lengths of all spans, and of what lies between them: queries without keys, which get zeros, and keys
/// without queries.
fn cumulative(bands: &Bands, total_q: usize, total_kv: usize) -> (Vec<u32>, Vec<u32>) {
    let (mut cu_seqlens_q, mut cu_seqlens_kv) = (vec![0], vec![0]);
    let (mut last_q, mut last_kv) = (0, 0);
    let mut end_at = |q: usize, kv: usize| {
        if (q, kv) != (last_q, last_kv) {
            cu_seqlens_q.push(q as u32);
            cu_seqlens_kv.push(kv as u32);
            (last_q, last_kv) = (q, kv);
        }
    };
    let mut before = 0;
    for span in &bands.spans {
        end_at(span.queries.start, before);
        end_at(span.queries.start, span.keys.start);
        end_at(span.queries.end, span.keys.end);
        before = span.keys.end;
    }
    end_at(total_q, before);
    end_at(total_q, total_kv);
    (cu_seqlens_q, cu_seqlens_kv)
}

/// What the operation reads.
#[cfg_attr(
    not(any(feature = "flash-attn", test)),
    expect(dead_code, reason = "read by candle-flash-attn and by the tests")
)]
pub(super) struct Inputs {
    /// (B, T_q, H, D) and twice (B, T_kv, H_kv, D), or without B where there are cumulative lengths.
    qkv: [Tensor; 3],
    lengths: Option<Lengths>,
    /// (H,) in f32.
    alibi_slopes: Option<Tensor>,
    scale: f32,
    /// 0 is none.
    softcap: f32,
    window: Window,
}

/// (n + 1,) in u32 each, and the longest sequence of each kind.
#[cfg_attr(
    not(any(feature = "flash-attn", test)),
    expect(dead_code, reason = "read by candle-flash-attn and by the tests")
)]
struct Lengths {
    cu_seqlens: [Tensor; 2],
    max: [usize; 2],
}

/// The operation itself: a contiguous tensor of q's shape.
#[cfg(feature = "flash-attn")]
pub(super) fn flash_attn(inputs: &Inputs) -> Result<Tensor> {
    let Inputs { qkv: [q, k, v], lengths, alibi_slopes, scale, softcap, window } = inputs;
    let slopes = alibi_slopes.as_ref();
    match lengths {
        None => candle_flash_attn::flash_attn_alibi_windowed_softcap(
            q,
            k,
            v,
            slopes,
            *scale,
            window.left,
            window.right,
            *softcap,
        ),
        Some(Lengths { cu_seqlens: [of_q, of_kv], max: [max_q, max_kv] }) => {
            candle_flash_attn::flash_attn_varlen_alibi_windowed_softcap(
                q,
                k,
                v,
                slopes,
                of_q,
                of_kv,
                *max_q,
                *max_kv,
                *scale,
                window.left,
                window.right,
                *softcap,
            )
        }
    }
}

#[cfg(not(feature = "flash-attn"))]
pub(super) fn flash_attn(_: &Inputs) -> Result<Tensor> {
    candle_core::bail!("[flash_attn] this build lacks the feature `flash-attn`")
}

/// Context (B, H, T_q, D) in the order asked for, by `op` in the place of [`flash_attn`].
pub(super) fn attend(call: &Call, plan: &Plan, op: impl Fn(&Inputs) -> Result<Tensor>) -> Result<Tensor> {
    let (options, shape) = (call.options, call.q.transpose(1, 2)?.shape().clone());
    let slopes = |slopes: &Tensor| slopes.to_dtype(DType::F32)?.contiguous();
    let (qkv, lengths, window) = match plan {
        Plan::Dense { keys, window } => {
            let keys = |tensor: &Tensor| sequence_first(&tensor.narrow(2, keys.start, keys.len())?);
            ([sequence_first(&call.q)?, keys(&call.k)?, keys(&call.v)?], None, *window)
        }
        Plan::Varlen { cu_seqlens_q, cu_seqlens_kv, window } => {
            let joined = |tensor: &Tensor| sequence_first(tensor)?.flatten(0, 1);
            let device = call.q.device();
            let tensor = |lens: &[u32]| Tensor::new(lens, device);
            let longest = |lens: &[u32]| lens.windows(2).map(|pair| (pair[1] - pair[0]) as usize).max().unwrap_or(0);
            let lengths = Lengths {
                cu_seqlens: [tensor(cu_seqlens_q)?, tensor(cu_seqlens_kv)?],
                max: [longest(cu_seqlens_q), longest(cu_seqlens_kv)],
            };
            ([joined(&call.q)?, joined(&call.k)?, joined(&call.v)?], Some(lengths), *window)
        }
    };
    let context = op(&Inputs {
        qkv,
        lengths,
        alibi_slopes: options.alibi_slopes.as_ref().map(slopes).transpose()?,
        scale: call.scale() as f32,
        softcap: options.softcap.unwrap_or(0.0) as f32,
        window,
    })?;
    let context = context.reshape(shape)?.transpose(1, 2)?;
    match call.output_order {
        OutputOrder::Bhtd => context.contiguous(),
        OutputOrder::Bthd => Ok(context),
    }
}

/// (B, H, T, D) as (B, T, H, D), a copy where the kernel cannot read it: it loads 8 elements at a time, from addresses
/// that are multiples of 16 bytes, and has strides of 32 bits.
fn sequence_first(tensor: &Tensor) -> Result<Tensor> {
    let tensor = tensor.transpose(1, 2)?;
    let [strides @ .., last] = tensor.stride() else { return Ok(tensor) };
    let aligned = |n: &usize| n.is_multiple_of(8) && u32::try_from(*n).is_ok();
    if *last == 1 && strides.iter().all(aligned) && tensor.layout().start_offset().is_multiple_of(8) {
        return Ok(tensor);
    }
    // Not `contiguous`, which leaves a view that begins at an odd element as it is.
    tensor.force_contiguous()
}

/// What keeps candle-flash-attn from a device.
///
/// Its kernels are compiled for the compute capability of the machine that built them, or that `CUDA_COMPUTE_CAP`
/// named. On another device their launch fails, which candle-flash-attn does not look at: it returns memory that
/// nothing was written to. So the first call on a device is preceded by one whose result is known. An error of that
/// call (out of memory, say) may be gone the next time, and is not remembered.
pub(super) fn obstacle(device: &Device) -> Option<String> {
    static FOUND: Mutex<Vec<(DeviceLocation, bool)>> = Mutex::new(Vec::new());
    if !cfg!(feature = "flash-attn") {
        return Some(
            "this build lacks the feature `flash-attn`, with which candle-flash-attn would run the call".into(),
        );
    }
    probe_once(&FOUND, device, flash_attn).err().map(|cause| {
        format!(
            "candle-flash-attn does not run on this device ({}): {cause}; it takes compute capability 8.0 and later, and \
             only what CUDA_COMPUTE_CAP was when it was built",
            capability(device)
        )
    })
}

fn probe_once(
    found: &Mutex<Vec<(DeviceLocation, bool)>>,
    device: &Device,
    op: impl Fn(&Inputs) -> Result<Tensor>,
) -> std::result::Result<(), String> {
    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
    let location = device.location();
    let runs = match found.iter().find(|(known, _)| *known == location) {
        Some(&(_, runs)) => runs,
        None => {
            let runs = probe(device, op).map_err(|error| first_line(&error))?;
            found.push((location, runs));
            runs
        }
    };
    if runs { Ok(()) } else { Err("it returns memory to which no kernel wrote".into()) }
}

/// Whether four queries of zeros get the mean of three values.
fn probe(device: &Device, op: impl Fn(&Inputs) -> Result<Tensor>) -> Result<bool> {
    let zeros = |t: usize| Tensor::zeros((1, t, 1, 32), DType::F16, device);
    let values = Tensor::new(&[2f32, 3.0, 7.0], &Device::Cpu)?.reshape((1, 3, 1, 1))?.broadcast_as((1, 3, 1, 32))?;
    let values = values.to_dtype(DType::F16)?.contiguous()?.to_device(device)?;
    let qkv = [zeros(4)?, zeros(3)?, values];
    let window = Window::default();
    let context = op(&Inputs { qkv, lengths: None, alibi_slopes: None, scale: 1.0, softcap: 0.0, window })?;
    let context = context.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(context.len() == 128 && context.iter().all(|x| (x - 4.0).abs() < 0.01))
}

#[cfg(feature = "flash-attn")]
fn capability(device: &Device) -> String {
    let capability = device
        .as_cuda_device()
        .and_then(|device| device.cuda_stream().context().compute_capability().map_err(candle_core::Error::wrap));
    match capability {
        Ok((major, minor)) => format!("compute capability {major}.{minor}"),
        Err(error) => first_line(&error),
    }
}

#[cfg(not(feature = "flash-attn"))]
fn capability(_: &Device) -> String {
    "compute capability unknown".into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mask::{AttentionMask, ValidLens};
    use crate::sdpa::{PackedSequences, SdpaOptions, reference};

    /// B 2, H 4 and 2, D 16 in f16: a transposed q, and views of longer buffers, k at an odd offset.
    fn qkv(t_q: usize, t_kv: usize) -> Result<[Tensor; 3]> {
        let draw = |dims: [usize; 4]| Tensor::randn(0f32, 1., &dims, &Device::Cpu)?.to_dtype(DType::F16);
        let k = draw([2, 2, t_kv + 3, 18])?.narrow(2, 0, t_kv)?.narrow(3, 1, 16)?;
        Ok([draw([2, t_q, 4, 16])?.transpose(1, 2)?, k, draw([2, 2, t_kv + 3, 16])?.narrow(2, 0, t_kv)?])
    }

    fn shaped(q: [usize; 4], kv: [usize; 4], dtype: DType) -> Result<[Tensor; 3]> {
        let zero = |dims: [usize; 4]| Tensor::zeros(1, dtype, &Device::Cpu)?.broadcast_as(&dims);
        Ok([zero(q)?, zero(kv)?, zero(kv)?])
    }

    fn reason(qkv: &[Tensor; 3], mask: &AttentionMask, options: &SdpaOptions, wanted: Wanted) -> Result<String> {
        let call = Call::new("test", qkv.each_ref(), mask, options)?;
        Ok(decide(&call, wanted)?.expect_err("refused"))
    }

    #[test]
    fn what_is_not_on_the_list_is_refused_with_its_reason() -> Result<()> {
        let (none, plain) = (AttentionMask::none(), SdpaOptions::default());
        let half = |q, kv| shaped(q, kv, DType::F16);
        let usual = half([2, 4, 5, 64], [2, 2, 9, 64])?;
        let heads = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
        let (q, kv) = ([2, 4, 5, 64], [2, 2, 9, 64]);
        let narrow = [usual[0].clone(), usual[1].clone(), usual[2].narrow(3, 0, 32)?];
        for (qkv, options, expected) in [
            (shaped(q, kv, DType::F32)?, plain.clone(), "computes in [F16, BF16], and the inputs are F32"),
            (usual.clone(), plain.clone().with_sinks(&heads), "has no sinks"),
            (narrow, plain.clone(), "takes values as wide as keys, and D_v is 32 where D is 64"),
            (half([1, 1, 2, 60], [1, 1, 2, 60])?, plain.clone(), "takes D in multiples of 8 up to 256, and D is 60"),
            (half([1, 1, 2, 264], [1, 1, 2, 264])?, plain.clone(), "takes D in multiples of 8 up to 256, and D is 264"),
            (usual.clone(), plain.clone().with_scale(-0.5), "takes finite scales above zero, and this one is -0.5"),
            (usual.clone(), plain.clone().with_scale(0.0), "takes finite scales above zero, and this one is 0.0"),
            (
                usual.clone(),
                plain.clone().with_scale(1e-20).with_softcap(1e30),
                "drops a softcap of 1e30 at a scale of 1e-20",
            ),
            (
                half([65_536, 1, 1, 8], [65_536, 1, 1, 8])?,
                plain.clone(),
                "launches 65535 sequences and heads at most, and there are 65536 and 1",
            ),
            (half([1, 1, 1, 8], [1, 1, 1 << 31, 8])?, plain.clone(), "counts in 32 bits, and the call is larger"),
        ] {
            let reason = reason(&qkv, &none, &options, Wanted::Context)?;
            assert_eq!(reason, format!("candle-flash-attn {expected}"));
        }
        assert_eq!(reason(&usual, &none, &plain, Wanted::LogSumExp)?, "candle-flash-attn has no log-sum-exp");
        let ones = Tensor::ones((5, 9), DType::U8, &Device::Cpu)?;
        let bands = "takes causal masks and windows that end with the last query and key, ALiBi from there";
        for (mask, expected) in [
            (none.clone().with_keep(&ones), "takes no keep tensor"),
            (none.clone().with_bias(&ones.to_dtype(DType::F32)?), "takes no bias tensor"),
            (AttentionMask::causal().with_prefix(vec![7, 8]), bands),
            // Right padding moves the key from which the operation counts.
            (AttentionMask::causal().with_valid_lens(vec![5, 7]), bands),
            (none.clone().with_valid_lens(ValidLens::from(vec![vec![1, 2, 3, 4, 4]; 2])), bands),
        ] {
            let reason = reason(&usual, &mask, &plain, Wanted::Context)?;
            assert_eq!(reason, format!("candle-flash-attn {expected}"), "{mask:?}");
        }
        let hidden = reason(&usual, &none.clone().with_valid_lens(vec![0, 0]), &plain, Wanted::Context)?;
        assert_eq!(hidden, "no query sees a key");
        let alibi = plain.with_alibi_slopes(&heads);
        let reason = reason(&usual, &none.with_valid_lens(vec![7, 7]), &alibi, Wanted::Context)?;
        assert_eq!(reason, format!("candle-flash-attn {bands}"));
        Ok(())
    }

    /// The operation in Candle's own: each sequence by itself.
    fn stand_in(inputs: &Inputs) -> Result<Tensor> {
        let [q, k, v] = &inputs.qkv;
        let Window { left, right } = inputs.window;
        let mask = AttentionMask::none().with_band(left.unwrap_or(usize::MAX), right.unwrap_or(usize::MAX));
        let mut options = SdpaOptions::default().with_scale(inputs.scale.into());
        options.alibi_slopes = inputs.alibi_slopes.clone();
        options.softcap = (inputs.softcap != 0.0).then_some(inputs.softcap.into());
        let attend = |qkv: [Tensor; 3]| -> Result<Tensor> {
            for x in &qkv {
                assert!(x.stride()[..3].iter().all(|n| n % 8 == 0) && x.stride()[3] == 1, "{:?}", x.layout());
            }
            let [q, k, v] = qkv.map(|x| x.transpose(1, 2));
            let call = Call::new("test", [&q?, &k?, &v?], &mask, &options).map(|call| reference::attend(&call));
            call??.context.transpose(1, 2)?.contiguous()
        };
        let Some(Lengths { cu_seqlens, max }) = &inputs.lengths else {
            return attend([q.clone(), k.clone(), v.clone()]);
        };
        let (of_q, of_kv) = (cu_seqlens[0].to_vec1::<u32>()?, cu_seqlens[1].to_vec1::<u32>()?);
        let mut contexts = Vec::new();
        for (q_ends, kv_ends) in of_q.windows(2).zip(of_kv.windows(2)) {
            let part = |x: &Tensor, ends: &[u32]| {
                x.narrow(0, ends[0] as usize, (ends[1] - ends[0]) as usize)?.unsqueeze(0)?.contiguous()
            };
            assert!(q_ends[1] - q_ends[0] <= max[0] as u32 && kv_ends[1] - kv_ends[0] <= max[1] as u32);
            if q_ends[0] < q_ends[1] {
                contexts.push(attend([part(q, q_ends)?, part(k, kv_ends)?, part(v, kv_ends)?])?.squeeze(0)?);
            }
        }
        Tensor::cat(&contexts, 0)
    }

    fn assert_near(got: &Tensor, expected: &Tensor, what: &str) -> Result<()> {
        let difference = (got.to_dtype(DType::F32)? - expected.to_dtype(DType::F32)?)?.abs()?;
        let most = difference.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        assert!(most < 4e-3, "{most}: {what}");
        Ok(())
    }

    #[test]
    fn what_is_on_the_list_has_the_reference_paths_numbers() -> Result<()> {
        let none = AttentionMask::none;
        let slopes = Tensor::new(&[0.1f32, 0.5, 1.0, 0.0], &Device::Cpu)?;
        let plain = SdpaOptions::default;
        let mut taken = [0; 2];
        for (mask, (t_q, t_kv), options, varlen) in [
            (none(), (5, 9), plain(), false),
            (none(), (9, 5), plain().with_softcap(2.0), false),
            (AttentionMask::causal(), (5, 9), plain().with_alibi_slopes(&slopes), false),
            (AttentionMask::causal().with_window(3), (5, 9), plain().with_scale(0.5), false),
            (none().with_band(1, 2), (9, 9), plain(), false),
            (AttentionMask::causal_upper_left(), (5, 9), plain(), false),
            (AttentionMask::causal(), (1, 9), plain().with_output_order(OutputOrder::Bthd), false),
            // A cache that is filled to 7, and caches that are filled differently.
            (none().with_valid_lens(vec![7, 7]), (1, 9), plain(), false),
            (none().with_valid_lens(vec![3, 7]), (1, 9), plain(), true),
            (none().with_valid_lens(vec![0, 7]), (5, 9), plain().with_output_order(OutputOrder::Bthd), true),
            // Left padding, and more queries than keys.
            (AttentionMask::causal().with_starts(vec![4, 1]), (9, 9), plain(), true),
            (AttentionMask::causal(), (9, 5), plain(), true),
            (AttentionMask::causal().with_window(2).with_starts(vec![0, 3]), (9, 9), plain(), true),
        ] {
            let qkv = qkv(t_q, t_kv)?;
            let call = Call::new("test", qkv.each_ref(), &mask, &options)?;
            let plan = decide(&call, Wanted::Context)?.expect("taken");
            assert_eq!(matches!(plan, Plan::Varlen { .. }), varlen, "{mask:?}");
            taken[usize::from(varlen)] += 1;
            let context = attend(&call, &plan, stand_in)?;
            let in_order = match options.output_order {
                OutputOrder::Bhtd => context.is_contiguous(),
                OutputOrder::Bthd => context.transpose(1, 2)?.is_contiguous(),
            };
            assert!(in_order);
            assert_near(&context, &reference::attend(&call)?.context, &format!("{mask:?}"))?;
        }
        assert_eq!(taken, [8, 5]);
        Ok(())
    }

    #[test]
    fn packed_sequences_are_taken() -> Result<()> {
        let sequences = PackedSequences::from_lens(&[3, 1, 0, 2], &[5, 1, 2, 0])?;
        let draw = |t: usize, h: usize| Tensor::randn(0f32, 1., (t, h, 16), &Device::Cpu)?.to_dtype(DType::F16);
        let (q, kv) = (draw(6, 4)?, draw(8, 2)?);
        for mask in [AttentionMask::none(), AttentionMask::causal(), AttentionMask::causal().with_window(2)] {
            let options = SdpaOptions::default();
            let call = Call::packed("test", [&q, &kv, &kv], &sequences, &mask, &options)?;
            let plan = decide(&call, Wanted::Context)?.expect("taken");
            let context = attend(&call, &plan, stand_in)?;
            assert!(context.transpose(1, 2)?.is_contiguous());
            assert_near(&context, &reference::attend(&call)?.context, &format!("{mask:?}"))?;
        }
        Ok(())
    }

    /// A device that is short of memory once is asked again; one to whose memory nothing was written is not.
    #[test]
    fn only_what_a_probe_found_out_is_remembered() {
        let found = Mutex::new(Vec::new());
        let failed = |_: &Inputs| candle_core::bail!("DriverError(CUDA_ERROR_OUT_OF_MEMORY)\nbacktrace");
        let never_launched = |inputs: &Inputs| inputs.qkv[0].zeros_like();
        let cause = "DriverError(CUDA_ERROR_OUT_OF_MEMORY)".to_string();
        assert_eq!(probe_once(&found, &Device::Cpu, failed), Err(cause));
        assert_eq!(probe_once(&found, &Device::Cpu, stand_in), Ok(()));
        assert_eq!(probe_once(&found, &Device::Cpu, failed), Ok(()), "it runs, and is not asked again");
        let found = Mutex::new(Vec::new());
        for _ in 0..2 {
            let cause = "it returns memory to which no kernel wrote".to_string();
            assert_eq!(probe_once(&found, &Device::Cpu, never_launched), Err(cause));
        }
    }
}
