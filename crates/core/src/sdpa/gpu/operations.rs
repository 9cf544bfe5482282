//! Two operations of other libraries. What they compute rightly was read from their versions 0.11.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, DeviceLocation, Result, Tensor};

use super::{Decided, Inputs, Operation, Sequences, none_of};
use crate::sdpa::bands::{Bands, Window};
use crate::sdpa::first_line;
use crate::sdpa::validate::{Call, Dims};
use candle_attention_modules::base::rowwise::to_vec;

/// candle-flash-attn: f16 and bf16 on CUDA, behind the feature `flash-attn`.
pub(in crate::sdpa) const FLASH_ATTN: Operation = Operation {
    name: "candle-flash-attn",
    dtypes: &[DType::F16, DType::BF16],
    alibi: true,
    softcap: true,
    packed: true,
    // It takes the maximum before it scales: a scale below zero makes infinities, one of zero NaN.
    scales: NORMAL,
    sequences: flash_attn_sequences,
    runs_on: runs_flash_attn,
    sequence_first: true,
    reads: |tensor, _| is_aligned(tensor),
    run: flash_attn,
};

/// Normal numbers in f32, and their doubles.
const NORMAL: [f64; 2] = [f32::MIN_POSITIVE as f64, f32::MAX as f64 / 2.0];

/// CUDA's limit on the second and third dimension of a grid, in which the kernel lays out sequences and heads.
const GRID: usize = 65_535;

fn flash_attn_sequences(call: &Call, bands: &Bands) -> Decided<Sequences> {
    let (Dims { b, h, t_q, t_kv, d, .. }, scale, softcap) = (call.dims, call.scale(), call.options.softcap);
    // It folds the softcap into the scale, and takes a scale of zero for no softcap.
    let is_normal = |x: f64| (NORMAL[0]..=NORMAL[1]).contains(&x);
    let is_dropped = softcap.is_some_and(|softcap| !is_normal(softcap) || !is_normal(scale / softcap));
    let longest = t_q.max(t_kv);
    let rows = b.checked_mul(longest).and_then(|rows| i32::try_from(rows).ok());
    let stride = longest.checked_mul(h).and_then(|rows| u32::try_from(rows.checked_mul(d)?).ok());
    none_of(&[
        (!d.is_multiple_of(8) || d > 256, format_args!("takes D in multiples of 8 up to 256, and D is {d}")),
        (is_dropped, format_args!("drops a softcap of {:?} at a scale of {scale:?}", softcap.unwrap_or_default())),
        (rows.is_none() || stride.is_none(), format_args!("counts in 32 bits, and the call is larger")),
    ])?;
    let (sequences, count) = match bands.common_keys(call) {
        Some(keys) if call.sequences.is_none() => (Sequences::Alike { keys, rest: 0 }, b),
        _ => {
            let cu_seqlens = cumulative(bands, b * t_q, b * t_kv);
            let count = cu_seqlens[0].len() - 1;
            (Sequences::Varlen { cu_seqlens }, count)
        }
    };
    // A launch that fails is not noticed: the result would be whatever lay in memory.
    match h.max(count) {
        0..=GRID => Ok(sequences),
        _ => Err(format!("launches {GRID} sequences and heads at most, and there are {count} and {h}")),
    }
}

/// The cumulative lengths of all spans, and of what lies between them: queries without keys, which get zeros, and keys
/// without queries.
fn cumulative(bands: &Bands, total_q: usize, total_kv: usize) -> [Vec<u32>; 2] {
    let (mut ends, mut before) = (vec![[0, 0]], 0);
    for [queries, keys] in &bands.spans {
        ends.extend([[queries.start, before], [queries.start, keys.start], [queries.end, keys.end]]);
        before = keys.end;
    }
    ends.extend([[total_q, before], [total_q, total_kv]]);
    ends.dedup();
    [0, 1].map(|of| ends.iter().map(|end| end[of] as u32).collect())
}

/// Whether the kernel can read a tensor (B, T, H, D): it loads 8 elements at a time, from addresses that are multiples
/// of 16 bytes, and has strides of 32 bits.
fn is_aligned(tensor: &Tensor) -> bool {
    let fits = |n: &usize| n.is_multiple_of(8) && u32::try_from(*n).is_ok();
    let [strides @ .., last] = tensor.stride() else { return true };
    *last == 1 && strides.iter().all(fits) && tensor.layout().start_offset().is_multiple_of(8)
}

/// The operation itself: a contiguous tensor of q's shape.
#[cfg(feature = "flash-attn")]
fn flash_attn(inputs: &Inputs) -> Result<Tensor> {
    use candle_flash_attn::{flash_attn_alibi_windowed_softcap, flash_attn_varlen_alibi_windowed_softcap};
    let Inputs { qkv: [q, k, v], lengths, alibi_slopes, scale, softcap, window: Window { left, right } } = inputs;
    let (slopes, scale, left, right, softcap) = (alibi_slopes.as_ref(), *scale, *left, *right, *softcap);
    let Some([(of_q, max_q), (of_kv, max_kv)]) = lengths else {
        return flash_attn_alibi_windowed_softcap(q, k, v, slopes, scale, left, right, softcap);
    };
    flash_attn_varlen_alibi_windowed_softcap(q, k, v, slopes, of_q, of_kv, *max_q, *max_kv, scale, left, right, softcap)
}

#[cfg(not(feature = "flash-attn"))]
fn flash_attn(_: &Inputs) -> Result<Tensor> {
    candle_core::bail!("[flash_attn] this build lacks the feature `flash-attn`")
}

/// Whether candle-flash-attn runs on a device.
///
/// Its kernels are compiled for the compute capability of the machine that built them, or that `CUDA_COMPUTE_CAP`
/// named. On another device their launch fails, which candle-flash-attn does not look at: it returns memory that
/// nothing was written to. So the first call on a device is preceded by one whose result is known. An error of that
/// call (out of memory, say) may be gone the next time, and is not remembered.
fn runs_flash_attn(device: &Device) -> Decided<()> {
    static FOUND: Mutex<Vec<(DeviceLocation, bool)>> = Mutex::new(Vec::new());
    if !cfg!(feature = "flash-attn") {
        return Err("this build lacks the feature `flash-attn`, with which candle-flash-attn would run the call".into());
    }
    probe_once(&FOUND, device, flash_attn).map_err(|cause| {
        format!(
            "candle-flash-attn does not run on this device ({}): {cause}; it takes compute capability 8.0 and later, and \
             only what CUDA_COMPUTE_CAP was when it was built",
            capability(device)
        )
    })
}

pub(super) fn probe_once(
    found: &Mutex<Vec<(DeviceLocation, bool)>>,
    device: &Device,
    op: fn(&Inputs) -> Result<Tensor>,
) -> Decided<()> {
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
fn probe(device: &Device, op: fn(&Inputs) -> Result<Tensor>) -> Result<bool> {
    let zeros = |t: usize| Tensor::zeros((1, t, 1, 32), DType::F16, device);
    let values = Tensor::new(&[2f32, 3.0, 7.0], &Device::Cpu)?.reshape((1, 3, 1, 1))?.broadcast_as((1, 3, 1, 32))?;
    let values = values.to_dtype(DType::F16)?.contiguous()?.to_device(device)?;
    let qkv = [zeros(4)?, zeros(3)?, values];
    let window = Window::default();
    let context = op(&Inputs { qkv, lengths: None, alibi_slopes: None, scale: 1.0, softcap: 0.0, window })?;
    let context = to_vec::<f32>(&context)?;
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

/// `candle_nn::ops::sdpa`: f32, f16 and bf16 on Metal (`candle-nn/src/ops.rs`,
/// `candle-metal-kernels/src/kernels/sdpa.rs` and its Metal source); issues are huggingface/candle's. Of one query it
/// ignores mask tensors; of more, a bias is multiplied by log2 e, and rows without a key are NaN (#3690, #3388).
pub(in crate::sdpa) const METAL: Operation = Operation {
    name: "candle_nn::ops::sdpa",
    dtypes: &[DType::F32, DType::F16, DType::BF16],
    alibi: false,
    // It has one for one query, and takes 1.0 for none.
    softcap: false,
    packed: false,
    // The queries are multiplied by scale · log2 e in their own dtype, which has to leave them finite and normal.
    scales: [1e-4, 1.0],
    sequences: metal_sequences,
    runs_on: |_| Ok(()),
    sequence_first: false,
    reads: is_contiguous,
    run: sdpa,
};

/// The queries and keys of the kernel's largest blocks.
pub(super) const BLOCK: usize = 32;

/// Its causal mask is right where blocks of queries end with blocks of keys: elsewhere it looks at one block too few
/// for hidden keys, or walks on to keys that are not there. Other masks it takes as tensors as large as the scores,
/// with the faults above.
fn metal_sequences(call: &Call, bands: &Bands) -> Decided<Sequences> {
    let Dims { t_q, d, .. } = call.dims;
    // Of 72 and 80 there is a kernel for several queries only; 512 has none in F32.
    let is_there = matches!(d, 32 | 64 | 96 | 128 | 256) || matches!(d, 72 | 80) && t_q > 1;
    none_of(&[(!is_there, format_args!("has no kernel for D of {d} and {t_q} queries"))])?;
    let keys = bands.common_keys(call).ok_or("takes sequences that all see the same keys")?;
    let rest = match bands.window {
        Window { left: None, right: None } => 0,
        Window { left: None, right: Some(0) } if t_q >= BLOCK && (keys.len() - t_q).is_multiple_of(BLOCK) => {
            t_q % BLOCK
        }
        Window { left: None, right: Some(0) } => {
            return Err(format!("has causal masks of {BLOCK} queries or more after a multiple of {BLOCK} keys"));
        }
        _ => return Err("takes no mask and causal masks".into()),
    };
    Ok(Sequences::Alike { keys, rest })
}

/// The operation itself: a contiguous (B, H, T_q, D).
fn sdpa(inputs: &Inputs) -> Result<Tensor> {
    let Inputs { qkv: [q, k, v], window, scale, .. } = inputs;
    candle_nn::ops::sdpa(q, k, v, None, window.right == Some(0), *scale, 1.0)
}

/// Whether the operation reads a tensor (B, H, T, D) as it is. Of the keys and values of one query it reads the stride
/// of heads alone (#3703): rows that follow one another in heads at one distance, such as a view into a cache.
pub(super) fn is_contiguous(tensor: &Tensor, t_q: usize) -> bool {
    let (&[b, h, t, d], &[of_b, of_h, of_t, of_d]) = (tensor.dims(), tensor.stride()) else { return false };
    let rows = of_d == 1 && (t == 1 || of_t == d);
    rows && (b == 1 || of_b == h * of_h) && (t_q == 1 || b * h == 1 || of_h == t * d)
}
