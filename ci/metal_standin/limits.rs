//! The limits of the Metal backend of Candle 0.11.1, read from its sources and never run.
//!
//! Each limit names the line that it was read from. "mod.rs" is candle-core/src/metal_backend/mod.rs. Which kernels
//! there are was read from the preprocessed Metal sources of candle-metal-kernels 0.11.1 (`cpp -D__HAVE_BFLOAT__
//! -D__METAL_VERSION__=310`, then the host names). Errors have the texts of the real backend, except in
//! `silent`: where the real backend returns wrong numbers or aborts, the stand-in returns an error.
//!
//! The variable `METAL_STANDIN_LOG` names a file to which these errors are appended with their callers; the stand-in
//! then returns the numbers of the CPU, so that one run finds all of them.
use crate::backend::BackendStorage;
use crate::{DType, Layout, Result};
use DType::*;

const FLOATS: [DType; 3] = [F32, F16, BF16];

fn word(contiguous: bool) -> &'static str {
    if contiguous { "contiguous" } else { "strided" }
}

/// Returns an error for what the real backend does wrong without one.
pub fn silent(text: String) -> Result<()> {
    if record(&text) {
        return Ok(());
    }
    crate::bail!("[metal stand-in] Metal {text}")
}

/// Appends a line to the file of `METAL_STANDIN_LOG`. Returns whether there is such a file.
fn record(text: &str) -> bool {
    use std::io::Write;
    let Some(path) = std::env::var_os("METAL_STANDIN_LOG") else { return false };
    let trace = std::backtrace::Backtrace::force_capture().to_string();
    let frames = trace.lines().map(str::trim).filter(|line| !line.starts_with("at "));
    let callers = frames.filter_map(|line| line.split_once(": ").map(|(_, name)| name));
    let is_ours =
        |name: &&str| name.contains("attention") || name.contains("candle_core::tensor") || name.contains("backprop");
    let callers: Vec<_> = callers.filter(is_ours).take(7).collect();
    let file = std::fs::OpenOptions::new().append(true).create(true).open(path);
    file.and_then(|mut file| writeln!(file, "{text} <- {}", callers.join(" <- "))).is_ok()
}

/// Refuses to copy a slice without entries: `newBufferWithBytes:length:` of 0 is nil on Metal, device.rs:244 and
/// candle-metal-kernels/src/metal/device.rs:96.
pub fn from_slice(len: usize) -> Result<()> {
    if len == 0 && !record("copies an empty slice") {
        let error = crate::MetalError::from("Failed to create metal resource: Buffer".to_string());
        return Err(crate::Error::from(error).bt());
    }
    Ok(())
}

/// Checks `affine` (mod.rs:122), which computes in f32 for every dtype (affine.metal:48).
pub fn affine(dtype: DType, contiguous: bool) -> Result<()> {
    match dtype {
        F32 | F16 | BF16 | U8 | U32 | I64 => Ok(()),
        _ => crate::bail!("Metal {} affine {dtype:?} not implemented", word(contiguous)),
    }
}

/// Checks `powf` (mod.rs:186) and `elu` (mod.rs:242).
pub fn powf_elu(op: &str, dtype: DType, contiguous: bool) -> Result<()> {
    match dtype {
        F32 | F16 | BF16 => Ok(()),
        _ => crate::bail!("Metal {} {op} {dtype:?} not implemented", word(contiguous)),
    }
}

/// Checks `reduce_op` (mod.rs:298): all five operations for six dtypes, contiguous and strided.
pub fn reduce(op: crate::op::ReduceOp, dtype: DType, contiguous: bool) -> Result<()> {
    match dtype {
        F32 | F16 | BF16 | U8 | U32 | I64 => Ok(()),
        _ => crate::bail!("Metal {} reduce op {op:?} {dtype:?} not implemented", word(contiguous)),
    }
}

/// Checks `const_set` (mod.rs:456).
pub fn const_set(dtype: DType) -> Result<()> {
    match dtype {
        F16 | BF16 | F32 | I64 | U32 | U8 => Ok(()),
        F8E4M3 => crate::bail!("unsupported const-set f8e4m3"),
        F64 => crate::bail!("unsupported const-set f64"),
        _ => Err(crate::Error::UnsupportedDTypeForOp(dtype, "const-set").bt()),
    }
}

/// Checks `to_dtype` (mod.rs:547): all pairs of six dtypes that differ, contiguous and strided.
pub fn cast(from: DType, to: DType, contiguous: bool) -> Result<()> {
    let has = |dtype| matches!(dtype, F32 | F16 | BF16 | U8 | U32 | I64);
    if has(from) && has(to) && from != to {
        return Ok(());
    }
    crate::bail!("Metal {} to_dtype {from:?} {to:?} not implemented", word(contiguous))
}

/// Checks `unary_impl` (mod.rs:668), which runs `urecip` and `usign` on contiguous tensors only (mod.rs:761-813).
pub fn unary(kernel: &str, dtype: DType, contiguous: bool) -> Result<()> {
    let in_both = matches!(
        kernel,
        "uabs"
            | "uceil"
            | "ucos"
            | "uerf"
            | "uexp"
            | "ufloor"
            | "ugelu_erf"
            | "ugelu"
            | "ulog"
            | "uneg"
            | "urelu"
            | "uround"
            | "usilu"
            | "usin"
            | "usqr"
            | "usqrt"
            | "utanh"
    );
    let contiguous_only = matches!(kernel, "urecip" | "usign");
    if FLOATS.contains(&dtype) && (in_both || contiguous && contiguous_only) {
        return Ok(());
    }
    // mod.rs:741 names sign::I64, and unary.metal has no kernel of this name.
    if kernel == "usign" && dtype == I64 && contiguous {
        return missing("sign_i64");
    }
    crate::bail!("Metal {} unary {kernel} {dtype:?} not implemented", word(contiguous))
}

/// Checks `binary` (mod.rs:1920), which asks for a kernel of any name; binary.metal:200-212 has the six operations and
/// six comparisons for six dtypes, in all nine combinations of layouts.
pub fn binary(kernel: &str, dtype: DType) -> Result<()> {
    match dtype {
        F32 | F16 | BF16 | U8 | U32 | I64 => Ok(()),
        _ => missing(&format!("{kernel}_{}", dtype.as_str())),
    }
}

/// Returns the error for a kernel that no Metal source has.
fn missing(kernel: &str) -> Result<()> {
    Err(crate::MetalError::from(format!("Error while loading function: Function '{kernel}' does not exist")).into())
}

/// Checks `where_cond` (mod.rs:845).
pub fn where_cond(condition: DType, values: DType) -> Result<()> {
    match (condition, values) {
        (U8, F32 | BF16 | F16 | I64 | U32 | U8) | (U32, F32) => Ok(()),
        (left, right) => crate::bail!("Metal where_cond {left:?} {right:?} not implemented"),
    }
}

/// Checks `gather` (mod.rs:1455), whose kernel reads the source as contiguous without a check (pull request 3706 of
/// huggingface/candle).
pub fn gather(ids: DType, dtype: DType, ids_l: &Layout, src_l: &Layout) -> Result<()> {
    if !ids_l.is_contiguous() {
        return Err(crate::Error::RequiresContiguous { op: "gather" }.bt());
    }
    match (ids, dtype) {
        (U8, U8 | F32 | F16 | BF16 | U32 | I64) => {}
        (U32 | I64, F32 | F16 | BF16 | U32 | I64) => {}
        (left, right) => crate::bail!("Metal gather {left:?} {right:?} not implemented"),
    }
    if !src_l.is_contiguous() {
        silent(format!("gathers wrong numbers from a strided source {src_l:?}"))?
    }
    Ok(())
}

/// Checks `scatter_set` (mod.rs:1506) and `scatter_add_set` (mod.rs:1555).
pub fn scatter(op: &'static str, ids: DType, dtype: DType, layouts: [&Layout; 3]) -> Result<()> {
    if layouts.iter().any(|layout| !layout.is_contiguous()) {
        return Err(crate::Error::RequiresContiguous { op }.bt());
    }
    match (ids, dtype) {
        (U8 | U32 | I64, F32 | F16 | BF16) | (U32, U32) => Ok(()),
        _ => Err(unexpected(&format!("{op} ids should be u8/u32/i64"), ids)),
    }
}

/// Returns the error `MetalError::UnexpectedDType` (mod.rs:64).
fn unexpected(text: &str, got: DType) -> crate::Error {
    crate::MetalError::from(format!("{text}, expected: U32, got: {got:?}")).into()
}

/// Checks `index_select` (mod.rs:1604). Its kernel (indexing.metal:68) takes the size of the dimension for the rank, so
/// that it misreads a strided source (pull request 3706 of huggingface/candle); there is no `is_i64_u8` and no
/// `is_i64_u32`.
pub fn index_select(ids: DType, dtype: DType, ids_l: &Layout, src_l: &Layout, dim: usize) -> Result<()> {
    if !ids_l.is_contiguous() {
        crate::bail!("Metal index_select requires contiguous ids")
    }
    match (ids, dtype) {
        (I64, U8) => return missing("is_i64_u8"),
        (I64, U32) => return missing("is_i64_u32"),
        (U8 | U32 | I64, U8 | U32 | I64 | BF16 | F32 | F16) => {}
        (left, right) => crate::bail!("Metal contiguous index_select {left:?} {right:?} not implemented"),
    }
    if !src_l.is_contiguous() && src_l.dims()[dim] != src_l.dims().len() {
        silent(format!("selects wrong numbers from a strided source {src_l:?}, dim {dim}"))?
    }
    Ok(())
}

/// Checks `index_add` (mod.rs:1667).
pub fn index_add(ids: DType, dtype: DType, ids_l: &Layout, src_l: &Layout) -> Result<()> {
    if !ids_l.is_contiguous() || !src_l.is_contiguous() {
        return Err(crate::Error::RequiresContiguous { op: "index-add" }.bt());
    }
    match (ids, dtype) {
        (I64 | U32 | U8, BF16 | F16 | F32 | I64 | U32 | U8) => Ok(()),
        _ => Err(unexpected("index-add ids should be u8/u32/i64", ids)),
    }
}

/// Checks the dtype of `matmul` (mod.rs:1729).
pub fn matmul(dtype: DType) -> Result<()> {
    match dtype {
        F32 | F16 | BF16 => Ok(()),
        _ => Err(crate::MetalError::from(format!("mlx matmul doesn't support {dtype:?}")).into()),
    }
}

/// A factor as the kernels of products read it: candle-metal-kernels/src/kernels/mlx_gemm.rs:487-515 (`call_mlx_gemm`,
/// and `call_mlx_gemv` by the same rule) and :574 on, mlx_gemm.metal:1137. Of the strides of several batch dimensions
/// they use the last one alone.
pub struct Factor {
    pub batch_stride: usize,
    pub strides: [usize; 2],
}

/// Returns the factor of (rows, columns); `None` where the backend returns "Invalid matmul arguments".
pub fn factor(stride: &[usize], rows: usize, columns: usize) -> Option<Factor> {
    let (minor, major) = (stride[stride.len() - 1], stride[stride.len() - 2]);
    let strides = if (minor == 1 || columns == 1) && (major == columns || rows == 1) {
        [columns, 1]
    } else if (minor == rows || columns == 1) && (major == 1 || rows == 1) {
        [1, rows]
    } else {
        return None;
    };
    let batch_stride = if stride.len() > 2 { stride[stride.len() - 3] } else { rows * columns };
    Some(Factor { batch_stride, strides })
}

/// Checks `copy2d` (mod.rs:1777): a copy without gaps (`src_s == d2 && dst_s == d2`) takes any dtype.
pub fn copy2d(dtype: DType, is_blit: bool) -> Result<()> {
    match dtype {
        _ if is_blit => Ok(()),
        F32 | F16 | BF16 | I64 | I32 | I16 | U32 | U8 => Ok(()),
        _ => crate::bail!("Metal copy2d {dtype:?} not implemented"),
    }
}

/// Checks `copy_strided_src` (mod.rs:1837): contiguous sources are copied in any dtype.
pub fn copy_strided(dtype: DType, src_l: &Layout) -> Result<()> {
    if src_l.is_contiguous() || src_l.shape().elem_count() == 0 {
        return Ok(());
    }
    let rank = src_l.stride().len();
    if rank == 1 || src_l.stride()[rank - 1] == 1 {
        if let crate::StridedBlocks::UniformBlocks { .. } = src_l.strided_blocks() {
            return copy2d(dtype, false);
        }
    }
    match dtype {
        F32 | F16 | BF16 | I64 | U32 | U8 => Ok(()),
        _ => crate::bail!("Metal copy_strided {dtype:?} not implemented"),
    }
}

/// Checks `conv1d` (mod.rs:907) and `conv2d` (mod.rs:1105): im2col and then a product, so the floats alone. A kernel
/// that is not contiguous is copied, and the copy is not used (mod.rs:972, :1175).
pub fn conv(op: &str, dtype: DType, kernel_l: &Layout) -> Result<()> {
    match dtype {
        F32 | F16 | BF16 => {}
        U8 | U32 => return matmul(dtype),
        _ => crate::bail!("Metal {op} {dtype:?} not implemented"),
    }
    if !kernel_l.is_contiguous() {
        silent(format!("{op} returns wrong numbers for a strided kernel"))?
    }
    Ok(())
}

/// Checks pools and upsampling (mod.rs:1258 and following).
pub fn image(op: &str, dtype: DType) -> Result<()> {
    match dtype {
        F32 | F16 | BF16 | U8 | U32 => Ok(()),
        _ => crate::bail!("Metal {op} {dtype:?} not implemented"),
    }
}

/// Checks `rand_uniform` (mod.rs:2270) and `rand_normal` (mod.rs:2310, with the same text).
pub fn random(dtype: DType) -> Result<()> {
    match dtype {
        F32 | F16 | BF16 => Ok(()),
        _ => crate::bail!("rand_uniform not implemented for {dtype:?}"),
    }
}

/// Checks `arg_sort` (candle-core/src/sort.rs:173); sort.metal has six dtypes. A thread group has at most 1,024
/// threads, and candle-metal-kernels/src/kernels/sort.rs:36 asks for the number of padded columns.
pub fn arg_sort(storage: &crate::MetalStorage, asc: bool, columns: usize) -> Result<()> {
    match storage.dtype() {
        BF16 | F16 | F32 | U8 | U32 | I64 => {}
        F8E4M3 => crate::bail!("Metal device does not yet support F8E4M3."),
        F64 | I16 | I32 => {
            missing(&format!("asort_{}_{}", if asc { "asc" } else { "desc" }, storage.dtype().as_str()))?
        }
        dtype => return Err(crate::Error::UnsupportedDTypeForOp(dtype, "argsort").bt()),
    }
    if columns.next_power_of_two() > 1024 {
        silent(format!("aborts or does nothing: argsort of {columns} columns asks for more than 1024 threads"))?
    }
    Ok(())
}
