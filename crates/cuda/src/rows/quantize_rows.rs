//! Rows as codes of 8 bits, each row with a scale.

use candle_core::{DType, Result, Tensor};

use super::outline::{self, RowsCall, Run};
use crate::ci_programs::CiProgram;
use crate::device::{Grid, KernelArguments, Launch, TensorLocks};
use crate::kernel_pointers::{Elements, InputPointer, OutputPointer, RowStrides};
use crate::kernel_struct::kernel_struct;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

const KERNEL: KernelShape = KernelShape { name: "quantize_rows", threads: QUANTIZE_WARPS * 32, shared_bytes: 0 };

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

/// The dimensions of a call, (B, H, T, D).
#[derive(Debug, Clone, Copy)]
pub(super) struct QuantizeShape {
    b: usize,
    h: usize,
    t: usize,
    d: usize,
}

impl QuantizeShape {
    fn rows(self) -> usize {
        self.b.saturating_mul(self.h).saturating_mul(self.t)
    }
}

kernel_struct! {
    /// The only argument of the kernel that quantises rows to 8 bits.
    ///
    /// B is `entries`, H is `heads`, T is `tokens` and D is `width`.
    pub(super) struct QuantizeRowsArguments {
        // ---- tensors ----
        /// (B, H, T, D), elements.
        inputs: InputPointer<Elements>,
        /// (B, H, T, D), contiguous.
        codes: OutputPointer<u8>,
        /// (B, H, T), contiguous.
        scales: OutputPointer<f32>,
        // ---- strides, in elements ----
        /// The strides of `inputs`.
        input_strides: RowStrides,
        // ---- sizes ----
        /// B, the entries of the batch.
        entries: i32,
        /// H, the heads.
        heads: i32,
        /// T, the tokens of an entry.
        tokens: i32,
        /// D, the columns of a row.
        width: i32,
    }

    /// The warps of a block, each of which has a row.
    const QUANTIZE_WARPS: usize = 4;
}

// SAFETY: the calls of this module check shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for QuantizeRowsArguments {}

impl RowsCall for QuantizeRowsCall {
    type Arguments = QuantizeRowsArguments;
    type Shape = QuantizeShape;

    const OPERATION: &'static str = "quantize_rows";
    const SOURCE: &'static str = "quantize_rows.cu";

    fn elements(&self) -> &Tensor {
        &self.rows
    }

    fn shape(&self) -> std::result::Result<QuantizeShape, Unsupported> {
        let fits = |size: &usize| (1..1 << 30).contains(size);
        match self.rows.dims() {
            &[b, h, t, d] if self.rows.dims().iter().all(fits) => {
                let shape = QuantizeShape { b, h, t, d };
                launch(shape).check()?;
                Ok(shape)
            }
            dims => Err(Unsupported::new(format!("rows of the shape {dims:?} are not quantised by a kernel"))),
        }
    }

    fn check(&self, shape: QuantizeShape) -> Result<()> {
        let QuantizeShape { b, h, t, d } = shape;
        self.check_tensor("the input", &self.rows, &[b, h, t, d], self.rows.dtype())
    }
}

impl QuantizeRowsCall {
    /// Checks that the kernel runs the call, and loads the program, which is compiled in the first call. No tensor is
    /// read.
    ///
    /// # Errors
    /// If it does not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        outline::plan(self)
    }

    /// Computes the codes and the scales.
    ///
    /// # Errors
    /// If the call does not fit together, the kernel does not run it, or it does not compile or launch.
    pub fn forward(&self) -> Result<RowCodes> {
        let run = Run::start(self)?;
        let QuantizeShape { b, h, t, d } = run.shape;
        let mut codes = run.allocate(DType::U8, run.shape.rows() * d)?;
        let mut scales = run.allocate(DType::F32, run.shape.rows())?;

        let locks = TensorLocks::default();
        let mut operands = run.operands(&locks);
        let strides = self.rows.stride();
        let arguments = QuantizeRowsArguments {
            inputs: operands.input("inputs", &self.rows)?,
            codes: operands.output("codes", &mut codes)?,
            scales: operands.output("scales", &mut scales)?,
            input_strides: RowStrides { sequence: strides[0] as i64, head: strides[1] as i64, row: strides[2] as i64 },
            entries: b as i32,
            heads: h as i32,
            tokens: t as i32,
            width: d as i32,
        };
        run.launch(&operands, &launch(run.shape), &arguments)?;
        operands.finish();
        Ok(RowCodes { codes: codes.into_tensor((b, h, t, d))?, scales: scales.into_tensor((b, h, t, 1))? })
    }
}

fn launch(shape: QuantizeShape) -> Launch {
    Launch::new(KERNEL, Grid::linear(shape.rows().div_ceil(QUANTIZE_WARPS)))
}

/// Returns the programs of all element types.
pub(super) fn entries() -> Vec<CiProgram> {
    outline::entries_of::<QuantizeRowsCall>("quantize_rows", &[KERNEL])
}
