//! Two third-party kernels. The calls that they support were read from the sources of their versions 0.11.

use std::sync::{Mutex, PoisonError};

use candle_core::{DType, Device, DeviceLocation, Result, Tensor};

use super::super::bands::{BandWindow, Bands, Span};
use super::super::call::{Call, Dims};
use super::{CumulativeLengths, Inputs, Operation, ScaleRange, Sequences, Supported, first_line};
use candle_attention_modules::base::rowwise::to_vec;

/// candle-flash-attn: f16 and bf16 on CUDA, behind the feature `flash-attn`.
pub(in crate::sdpa) const FLASH_ATTN: Operation = Operation {
    name: "candle-flash-attn",
    dtypes: &[DType::F16, DType::BF16],
    has_alibi: true,
    has_softcap: true,
    has_packed_sequences: true,
    // It computes the maximum before it scales: a scale below zero makes infinities, a scale of zero NaN.
    scales: NORMAL,
    sequences: flash_attn_sequences,
    runs_on: runs_flash_attn,
    is_sequence_first: true,
    reads: |tensor, _| is_aligned(tensor),
    run: flash_attn,
};

/// Numbers that are normal in f32, as are their doubles.
const NORMAL: ScaleRange = ScaleRange { least: f32::MIN_POSITIVE as f64, most: f32::MAX as f64 / 2.0 };

/// CUDA's limit on the second and third dimension of a grid, in which the kernel lays out sequences and heads.
const GRID: usize = 65_535;

/// Checks widths, softcaps and sizes, and returns how candle-flash-attn reads the sequences.
fn flash_attn_sequences(call: &Call, bands: &Bands) -> Supported<Sequences> {
    let (Dims { b, h, t_q, t_kv, d, .. }, scale) = (call.dims, call.scale());
    if !d.is_multiple_of(8) || d > 256 {
        return Err(format!("takes D in multiples of 8 up to 256, and D is {d}"));
    }
    if let Some(softcap) = call.options.softcap {
        // It folds the softcap into the scale, and reads a scale of zero as no softcap.
        let is_normal = |x: f64| (NORMAL.least..=NORMAL.most).contains(&x);
        if !is_normal(softcap) || !is_normal(scale / softcap) {
            return Err(format!("drops a softcap of {softcap:?} at a scale of {scale:?}"));
        }
    }
    let longest = t_q.max(t_kv);
    let rows = b.checked_mul(longest).and_then(|rows| i32::try_from(rows).ok());
    let stride = longest.checked_mul(h).and_then(|all| u32::try_from(all.checked_mul(d)?).ok());
    if rows.is_none() || stride.is_none() {
        return Err("counts in 32 bits, and the call is larger".into());
    }
    let (sequences, count) = match bands.common_keys(call) {
        Some(keys) if call.sequences.is_none() => (Sequences::Alike { keys, rest: 0 }, b),
        _ => {
            let cu_seqlens = cumulative(bands, b * t_q, b * t_kv);
            let count = cu_seqlens.queries.len() - 1;
            (Sequences::Varlen(cu_seqlens), count)
        }
    };
    // candle-flash-attn does not notice a launch that fails: the result would be uninitialised memory.
    match h.max(count) {
        0..=GRID => Ok(sequences),
        _ => Err(format!("launches {GRID} sequences and heads at most, and there are {count} and {h}")),
    }
}

/// Returns the cumulative lengths of all spans, and of the rows between them: queries without keys, whose output is
/// zeros, and keys without queries.
fn cumulative(bands: &Bands, total_queries: usize, total_keys: usize) -> CumulativeLengths {
    let mut ends = vec![(0, 0)];
    let mut last_key = 0;
    for Span { queries, keys } in &bands.spans {
        ends.extend([(queries.start, last_key), (queries.start, keys.start), (queries.end, keys.end)]);
        last_key = keys.end;
    }
    ends.extend([(total_queries, last_key), (total_queries, total_keys)]);
    ends.dedup();
    let (queries, keys) = ends.into_iter().map(|(queries, keys)| (queries as u32, keys as u32)).unzip();
    CumulativeLengths { queries, keys }
}

/// Returns whether candle-flash-attn can read a tensor (B, T, H, D): it loads 8 elements at a time, from addresses that
/// are multiples of 16 bytes, and has strides of 32 bits.
fn is_aligned(tensor: &Tensor) -> bool {
    let fits = |n: &usize| n.is_multiple_of(8) && u32::try_from(*n).is_ok();
    let [strides @ .., last] = tensor.stride() else { return true };
    *last == 1 && strides.iter().all(fits) && tensor.layout().start_offset().is_multiple_of(8)
}

/// Runs candle-flash-attn. The output is contiguous and has q's shape.
#[cfg(feature = "flash-attn")]
fn flash_attn(inputs: &Inputs) -> Result<Tensor> {
    use candle_flash_attn::{flash_attn_alibi_windowed_softcap, flash_attn_varlen_alibi_windowed_softcap};
    let &Inputs { ref q, ref k, ref v, ref lengths, ref alibi_slopes, scale, softcap, window } = inputs;
    let BandWindow { left, right } = window;
    let slopes = alibi_slopes.as_ref();
    let Some(super::Lengths { cu_seqlens_q, cu_seqlens_kv, most_queries, most_keys }) = lengths else {
        return flash_attn_alibi_windowed_softcap(q, k, v, slopes, scale, left, right, softcap);
    };
    let (max_q, max_kv) = (*most_queries, *most_keys);
    flash_attn_varlen_alibi_windowed_softcap(
        q,
        k,
        v,
        slopes,
        cu_seqlens_q,
        cu_seqlens_kv,
        max_q,
        max_kv,
        scale,
        left,
        right,
        softcap,
    )
}

#[cfg(not(feature = "flash-attn"))]
fn flash_attn(_: &Inputs) -> Result<Tensor> {
    candle_core::bail!("[flash_attn] this build lacks the feature `flash-attn`")
}

/// Checks that candle-flash-attn runs on a device.
///
/// Its kernels are compiled for the compute capability of the machine that built them, or for `CUDA_COMPUTE_CAP`. On
/// another device their launch fails, which candle-flash-attn does not check: it returns uninitialised memory. So the
/// first call on a device is preceded by one whose result is known. An error of that call, such as a lack of memory,
/// may not happen again, and is not remembered.
fn runs_flash_attn(device: &Device) -> Supported<()> {
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

/// Checks by one call, the first time for each device, that a kernel runs there.
pub(super) fn probe_once(
    found: &Mutex<Vec<(DeviceLocation, bool)>>,
    device: &Device,
    op: fn(&Inputs) -> Result<Tensor>,
) -> Supported<()> {
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

/// Returns whether the output of four queries of zeros is the mean of three values.
fn probe(device: &Device, op: fn(&Inputs) -> Result<Tensor>) -> Result<bool> {
    let zeros = |t: usize| Tensor::zeros((1, t, 1, 32), DType::F16, device);
    let values = Tensor::new(&[2f32, 3.0, 7.0], &Device::Cpu)?.reshape((1, 3, 1, 1))?.broadcast_as((1, 3, 1, 32))?;
    let values = values.to_dtype(DType::F16)?.contiguous()?.to_device(device)?;
    let output = op(&Inputs {
        q: zeros(4)?,
        k: zeros(3)?,
        v: values,
        lengths: None,
        alibi_slopes: None,
        scale: 1.0,
        softcap: 0.0,
        window: BandWindow::default(),
    })?;
    let numbers = to_vec::<f32>(&output)?;
    Ok(numbers.len() == 128 && numbers.iter().all(|x| (x - 4.0).abs() < 0.01))
}

/// Returns the compute capability of a device, for an error.
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
/// `candle-metal-kernels/src/kernels/sdpa.rs` and its Metal source). For one query it ignores mask tensors; for
/// several, a bias is multiplied by log2 e, and fully masked rows are NaN (issues 3690 and 3388 of huggingface/candle).
pub(in crate::sdpa) const METAL: Operation = Operation {
    name: "candle_nn::ops::sdpa",
    dtypes: &[DType::F32, DType::F16, DType::BF16],
    has_alibi: false,
    // It has a softcap for one query alone, and reads 1.0 as no softcap.
    has_softcap: false,
    has_packed_sequences: false,
    // The queries are multiplied by scale · log2 e in their own dtype, in which they have to remain finite and normal.
    scales: ScaleRange { least: 1e-4, most: 1.0 },
    sequences: metal_sequences,
    runs_on: |_| Ok(()),
    is_sequence_first: false,
    reads: is_contiguous,
    run: sdpa,
};

/// The queries and keys of the kernel's largest blocks.
pub(super) const BLOCK: usize = 32;

/// Checks widths and masks, and returns how `candle_nn::ops::sdpa` reads the sequences.
///
/// Its causal mask is right if blocks of queries end with blocks of keys. Otherwise it checks one block too few for
/// masked keys, or continues to keys that do not exist. It reads other masks as tensors as large as the scores, with
/// the faults above.
fn metal_sequences(call: &Call, bands: &Bands) -> Supported<Sequences> {
    let Dims { t_q, d, .. } = call.dims;
    // There are kernels of 72 and 80 for several queries only, and none of 512 in F32.
    let has_kernel = matches!(d, 32 | 64 | 96 | 128 | 256) || matches!(d, 72 | 80) && t_q > 1;
    if !has_kernel {
        return Err(format!("has no kernel for D of {d} and {t_q} queries"));
    }
    let keys = bands.common_keys(call).ok_or("takes sequences that all attend to the same keys")?;
    let rest = match bands.window {
        BandWindow { left: None, right: None } => 0,
        BandWindow { left: None, right: Some(0) } if t_q >= BLOCK && (keys.len() - t_q).is_multiple_of(BLOCK) => {
            t_q % BLOCK
        }
        BandWindow { left: None, right: Some(0) } => {
            return Err(format!("has causal masks of {BLOCK} queries or more after a multiple of {BLOCK} keys"));
        }
        _ => return Err("takes no mask and causal masks".into()),
    };
    Ok(Sequences::Alike { keys, rest })
}

/// Runs `candle_nn::ops::sdpa`. The output is contiguous, (B, H, T_q, D).
fn sdpa(inputs: &Inputs) -> Result<Tensor> {
    let Inputs { q, k, v, window, scale, .. } = inputs;
    candle_nn::ops::sdpa(q, k, v, None, window.right == Some(0), *scale, 1.0)
}

/// Returns whether `candle_nn::ops::sdpa` reads a tensor (B, H, T, D) without a copy. For one query it uses only the
/// stride of the heads of keys and values (issue 3703 of huggingface/candle): each head has contiguous rows, and heads
/// have one distance from each other, as in a view into a cache.
pub(super) fn is_contiguous(tensor: &Tensor, t_q: usize) -> bool {
    let (&[b, h, t, d], &[b_stride, h_stride, t_stride, d_stride]) = (tensor.dims(), tensor.stride()) else {
        return false;
    };
    let has_contiguous_rows = d_stride == 1 && (t == 1 || t_stride == d);
    has_contiguous_rows && (b == 1 || b_stride == h * h_stride) && (t_q == 1 || b * h == 1 || h_stride == t * d)
}
