//! Rows as codes of 8 bits, each row with a scale.

use candle_core::{DType, Result, Tensor};

use super::{check_tensor, entries_of, program_of};
use crate::arguments::{Address, RowStrides};
use crate::catalogue::CatalogueEntry;
use crate::device::{Grid, KernelArguments, KernelDevice, Launch, Operands, Reading};
use crate::element::Element;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

const OP: &str = "quantize_rows";

/// The file of the kernel.
const ROOT: &str = "quantize_rows.cu";

/// The warps of a block, each of which has a row: QUANTIZE_WARPS in the source.
const WARPS: usize = 4;

const KERNEL: KernelShape = KernelShape { name: "quantize_rows", threads: WARPS * 32, shared_bytes: 0 };

/// The quantisation of rows to 8 bits: x is stored as `round(x / scale) + 128`, where the scale is 1/127 of the row's
/// largest magnitude.
///
/// A row with a number that is not finite has the scale NaN and codes of 0. A row whose scale would be subnormal has
/// the scale 0 and codes of 128, which are zeros.
#[derive(Debug, Clone)]
pub struct QuantizeRowsCall {
    /// (B, H, T, D), f32, bf16 or f16. The last dimension is contiguous.
    pub rows: Tensor,
}

/// Rows as codes, and their scales.
#[derive(Debug, Clone)]
pub struct RowCodes {
    /// u8 (B, H, T, D), contiguous.
    pub codes: Tensor,
    /// f32 (B, H, T, 1), contiguous.
    pub scales: Tensor,
}

/// The argument of the kernel. The source documents the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct QuantizeRowsArguments {
    inputs: Address,
    codes: Address,
    scales: Address,

    input_strides: RowStrides,

    entries: i32,
    heads: i32,
    tokens: i32,
    width: i32,
}

// SAFETY: the struct has the fields of the source in the same order, and no padding; the calls of this module check
// shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for QuantizeRowsArguments {}

impl QuantizeRowsCall {
    /// Checks that the kernel runs the call, and loads the program, which is compiled in the first call. No tensor is
    /// read.
    ///
    /// # Errors
    /// If it does not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        self.check()?;
        KernelDevice::of(self.rows.device())?.prepare(&program_of(ROOT, Element::of(self.rows.dtype())?))
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        KernelDevice::of(self.rows.device())?;
        Element::of(self.rows.dtype())?;
        let fits = |size: &usize| (1..1 << 30).contains(size);
        if self.rows.rank() != 4 || !self.rows.dims().iter().all(fits) {
            let dims = self.rows.dims();
            return Err(Unsupported::new(format!("rows of the shape {dims:?} are not quantised by a kernel")));
        }
        launch(self.rows.dims()).check()
    }

    /// Computes the codes and the scales.
    ///
    /// # Errors
    /// If the call does not fit together, the kernel does not run it, or it does not compile or launch.
    pub fn forward(&self) -> Result<RowCodes> {
        self.check()?;
        let (b, h, t, d) = self.rows.dims4()?;
        check_tensor(OP, "the input", &self.rows, &[b, h, t, d], self.rows.dtype())?;
        let device = KernelDevice::of(self.rows.device())?;
        let program = device.load(&program_of(ROOT, Element::of(self.rows.dtype())?))?;
        let count = b * h * t;
        let mut codes = device.uninitialized(DType::U8, count * d)?;
        let mut scales = device.uninitialized(DType::F32, count)?;
        {
            let inputs = Reading::new(&self.rows);
            let mut operands = Operands::new(&device);
            let strides = inputs.strides();
            let arguments = QuantizeRowsArguments {
                inputs: operands.read("inputs", &inputs)?,
                codes: operands.write("codes", &mut codes)?,
                scales: operands.write("scales", &mut scales)?,
                input_strides: RowStrides {
                    sequence: strides[0] as i64,
                    head: strides[1] as i64,
                    row: strides[2] as i64,
                },
                entries: b as i32,
                heads: h as i32,
                tokens: t as i32,
                width: d as i32,
            };
            operands.launch(&program, &launch(self.rows.dims()), &arguments)?;
        }
        Ok(RowCodes { codes: codes.into_tensor((b, h, t, d))?, scales: scales.into_tensor((b, h, t, 1))? })
    }
}

/// Returns the launch for rows (B, H, T, D).
fn launch(dims: &[usize]) -> Launch {
    let rows = dims[..3].iter().fold(1usize, |rows, &size| rows.saturating_mul(size));
    Launch::new(KERNEL, Grid::linear(rows.div_ceil(WARPS)))
}

/// Returns the programs of all element types.
pub(super) fn entries() -> Vec<CatalogueEntry> {
    entries_of(ROOT, "quantize_rows", &[KERNEL])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_sizes::{assert_same_layout, source_sizes};

    #[test]
    fn quantize_rows_arguments_match_the_source() {
        let sizes = source_sizes(&program_of(ROOT, Element::F32));
        assert_same_layout!(
            sizes,
            QuantizeRowsArguments,
            [inputs, codes, scales, input_strides, entries, heads, tokens, width]
        );
        assert_eq!(sizes["QUANTIZE_WARPS"], WARPS);
    }
}
