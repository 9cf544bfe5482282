//! The numbers of keys and values that are stored as codes.

use candle_attention_call::KvCodeFormat;
use candle_attention_modules::base::Float8;
use candle_core::{D, DType, Device, Result, Tensor};

/// The code of the number 0 in 8 bits.
pub(crate) const Q8_ZERO: f64 = 128.0;

/// The difference of a code of 4 bits and its number.
pub(crate) const Q4_OFFSET: f64 = 7.5;

/// Returns whether the kernels of a device read codes.
pub(crate) fn kernels_read_codes(device: &Device) -> bool {
    match device {
        Device::Cpu | Device::Cuda(_) => true,
        Device::Metal(_) => candle_attention_metal::is_available(device).is_ok(),
    }
}

/// Returns the numbers of codes (.., bytes) with their scales (.., scales of a row) in a dtype: (.., width). The
/// tensors may have any strides.
pub(crate) fn decoded(codes: &Tensor, scales: &Tensor, format: KvCodeFormat, dtype: DType) -> Result<Tensor> {
    let mut dims = codes.dims().to_vec();
    if let Some(width) = dims.last_mut() {
        *width = format.numbers(*width);
    }
    if codes.elem_count() == 0 {
        // Candle copies no empty views.
        return Tensor::zeros(dims, dtype, codes.device());
    }
    let numbers = match format {
        KvCodeFormat::Q8 => (codes.to_dtype(dtype)? - Q8_ZERO)?,
        KvCodeFormat::E4M3 => {
            let table: Vec<f32> = (0..=u8::MAX).map(|code| Float8::E4M3.number(code)).collect();
            looked_up(codes, &Tensor::from_vec(table, (256, 1), codes.device())?.to_dtype(dtype)?)?
                .reshape(dims.as_slice())?
        }
        KvCodeFormat::Q4 => {
            let number = |code: u8| f32::from(code) - Q4_OFFSET as f32;
            let table: Vec<f32> = (0..=u8::MAX).flat_map(|byte| [number(byte & 15), number(byte >> 4)]).collect();
            let table = Tensor::from_vec(table, (256, 2), codes.device())?.to_dtype(dtype)?;
            // The lower bits of the bytes of a block have its first half.
            let pairs = looked_up(codes, &table)?.reshape(((), format.block() / 2, 2))?;
            pairs.transpose(1, 2)?.contiguous()?.reshape(dims.as_slice())?
        }
    };
    let scales = scales.to_dtype(dtype)?;
    match scales.dim(D::Minus1)? {
        1 => numbers.broadcast_mul(&scales),
        groups => {
            let in_groups = grouped(&numbers, groups)?;
            in_groups.broadcast_mul(&scales.unsqueeze(D::Minus1)?)?.reshape(dims)
        }
    }
}

/// Returns rows (.., width) as (.., groups, numbers of a group).
pub(crate) fn grouped(rows: &Tensor, groups: usize) -> Result<Tensor> {
    let mut dims = rows.dims().to_vec();
    if let Some(width) = dims.pop() {
        dims.extend([groups, width / groups.max(1)]);
    }
    rows.reshape(dims)
}

/// Returns the row of a table (256, n) for each code: (codes, n).
fn looked_up(codes: &Tensor, table: &Tensor) -> Result<Tensor> {
    table.index_select(&codes.flatten_all()?.to_dtype(DType::U32)?, 0)
}
