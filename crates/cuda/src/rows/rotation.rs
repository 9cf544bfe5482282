//! The rotation of heads by the angles of their tokens: rotary position embeddings.

use candle_core::{DType, Result, Storage, Tensor, bail};

use super::outline::{self, OneLaunch, RowsCall};
use super::row_strides;
use crate::attention::InputAddresses;
use crate::ci_programs::CiProgram;
use crate::device::{Grid, KernelArguments, Launch};
use crate::kernel_pointers::{Elements, InputPointer, OutputPointer, RowStrides};
use crate::kernel_struct::kernel_struct;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

const KERNEL: KernelShape = KernelShape { name: "rotate_heads", threads: ROTATION_THREADS, shared_bytes: 0 };

/// A rotation of the first `2 · pairs` columns of each head, by the angles of its token. The gradient of the input is
/// the gradient of the output, rotated by the opposite angles.
#[derive(Debug, Clone)]
pub struct RotationCall {
    /// (B, T, H, D), f32, bf16 or f16. The last dimension is contiguous.
    pub xs: Tensor,
    /// f32 (rows, pairs), contiguous.
    pub cosines: Tensor,
    /// f32 (rows, pairs), contiguous.
    pub sines: Tensor,
    /// The row of the table of angles that each token reads.
    pub angle_rows: AngleRows,
    /// Whether a pair are two neighbouring columns; otherwise column n and column n + pairs.
    pub interleaved: bool,
    /// Whether heads are rotated by the opposite angles.
    pub inverse: bool,
}

/// The rows of the angles of the tokens of a call.
#[derive(Debug, Clone)]
pub enum AngleRows {
    /// The first token of every sequence has this row, and the others those after it.
    From(usize),
    /// i32 (T,), or (B · T,) with separate rows for each sequence. A row outside of the tables is the nearest one in
    /// them.
    Each(Tensor),
}

/// The dimensions of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct RotationShape {
    b: usize,
    t: usize,
    h: usize,
    d: usize,
    /// The number of rows of the tables of angles.
    angle_rows: usize,
    pairs: usize,
}

kernel_struct! {
    /// The only argument of the kernel that rotates heads (rotary position embeddings).
    ///
    /// B is `entries`, T is `tokens`, H is `heads` and D is `width`. A pointer that a call does not need is null.
    pub struct RotationArguments {
        // ---- tensors ----
        /// (B, T, H, D), elements.
        pub inputs: InputPointer<Elements>,
        /// (B, T, H, D), elements, contiguous.
        pub output: OutputPointer<Elements>,
        /// (angle_row_count, pairs).
        pub cosines: InputPointer<f32>,
        /// (angle_row_count, pairs).
        pub sines: InputPointer<f32>,
        /// (T), or (B, T): the row of the angles of a token. Null: first_angle_row and those after it.
        pub angle_rows: InputPointer<i32>,
        // ---- strides, in elements ----
        /// The strides of `inputs`.
        pub input_strides: RowStrides,
        /// From sequence to sequence: T, or 0 if all have the same rows.
        pub angle_rows_stride: i64,
        // ---- sizes ----
        /// B, the number of entries of the batch.
        pub entries: i32,
        /// T, the number of tokens of an entry.
        pub tokens: i32,
        /// H, the number of heads.
        pub heads: i32,
        /// D, the number of columns of a row.
        pub width: i32,
        /// The number of columns that are rotated, divided by 2.
        pub pairs: i32,
        /// The number of rows of `cosines` and of `sines`.
        pub angle_row_count: i32,
        // ---- options ----
        /// The row of the angles of the first token, without `angle_rows`.
        pub first_angle_row: i32,
        /// 1: a pair are two neighbouring columns; 0: column n and column n + pairs.
        pub interleaved: i32,
        /// 1: rotates by the opposite angles.
        pub inverse: i32,
        /// 0: makes the size a multiple of 8 bytes.
        pub reserved: i32,
    }

    /// The number of threads of a block.
    const ROTATION_THREADS: usize = 256;
}

// SAFETY: the calls of this module check shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for RotationArguments {}

impl RowsCall for RotationCall {
    type Arguments = RotationArguments;
    type Shape = RotationShape;

    const OPERATION: &'static str = "rotation";
    const SOURCE: &'static str = "rotation.cu";

    fn elements(&self) -> &Tensor {
        &self.xs
    }

    fn shape(&self) -> std::result::Result<RotationShape, Unsupported> {
        let fits = |count: &usize| (1..1 << 30).contains(count);
        match (self.xs.dims(), self.cosines.dims()) {
            (&[b, t, h, d], &[angle_rows, pairs]) if [b, t, h, d, angle_rows, pairs].iter().all(fits) => {
                let shape = RotationShape { b, t, h, d, angle_rows, pairs };
                launch(shape).check()?;
                Ok(shape)
            }
            (dims, angles) => {
                Err(Unsupported::new(format!("heads of the shape {dims:?} are not rotated by angles of {angles:?}")))
            }
        }
    }

    fn check(&self, shape: RotationShape) -> Result<()> {
        let RotationShape { b, t, h, d, angle_rows, pairs } = shape;
        self.check_tensor("the input", &self.xs, &[b, t, h, d], self.xs.dtype())?;
        for (name, table) in [("cosines", &self.cosines), ("sines", &self.sines)] {
            self.check_tensor(name, table, &[angle_rows, pairs], DType::F32)?;
            self.check_contiguous(name, table)?;
        }
        if let AngleRows::Each(rows) = &self.angle_rows {
            let count = if is_shared(rows, t) { t } else { b * t };
            self.check_tensor("angle_rows", rows, &[count], DType::I32)?;
        }
        if 2 * pairs > d {
            let operation = Self::OPERATION;
            bail!("[{operation}] the angles have {pairs} pairs of columns, expected at most those of {d} columns")
        }
        Ok(())
    }
}

impl RotationCall {
    /// Checks that the kernel runs the call, and loads the program, which is compiled in the first call. No tensor is
    /// read.
    ///
    /// # Errors
    /// If it does not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        outline::plan(self)
    }

    /// Computes the rotated heads, (B, T, H, D), contiguous, in the dtype of the input.
    ///
    /// # Errors
    /// If the call does not fit together, the kernel does not run it, or it does not compile or launch.
    pub fn forward(&self) -> Result<Storage> {
        outline::forward(self)
    }
}

impl OneLaunch for RotationCall {
    fn forward_launch(shape: RotationShape) -> Launch {
        launch(shape)
    }

    fn output_dims(&self, _shape: RotationShape) -> Vec<usize> {
        self.xs.dims().to_vec()
    }

    fn arguments<'t>(
        &'t self,
        shape: RotationShape,
        operands: &mut impl InputAddresses<'t>,
    ) -> Result<RotationArguments> {
        let mut arguments = RotationArguments {
            inputs: operands.input("inputs", &self.xs)?,
            cosines: operands.input("cosines", &self.cosines)?,
            sines: operands.input("sines", &self.sines)?,
            input_strides: row_strides(&self.xs),
            entries: shape.b as i32,
            tokens: shape.t as i32,
            heads: shape.h as i32,
            width: shape.d as i32,
            pairs: shape.pairs as i32,
            angle_row_count: shape.angle_rows as i32,
            interleaved: i32::from(self.interleaved),
            inverse: i32::from(self.inverse),
            ..RotationArguments::default()
        };
        match &self.angle_rows {
            AngleRows::From(first) => arguments.first_angle_row = *first as i32,
            AngleRows::Each(rows) => {
                arguments.angle_rows = operands.input("angle_rows", rows)?;
                arguments.angle_rows_stride = if is_shared(rows, shape.t) { 0 } else { shape.t as i64 };
            }
        }
        Ok(arguments)
    }

    fn set_output(arguments: &mut RotationArguments, output: OutputPointer<Elements>) {
        arguments.output = output;
    }
}

/// Returns whether all sequences of T tokens have the same rows of angles.
fn is_shared(rows: &Tensor, t: usize) -> bool {
    rows.elem_count() == t
}

/// Returns the launch, with a thread for each pair of columns and for each column after all pairs.
fn launch(shape: RotationShape) -> Launch {
    let RotationShape { b, t, h, d, pairs, .. } = shape;
    let threads = b.saturating_mul(t).saturating_mul(h).saturating_mul(d.saturating_sub(pairs));
    Launch::new(KERNEL, Grid::linear(threads.div_ceil(ROTATION_THREADS)))
}

/// Returns the programs of all element types.
pub(super) fn entries() -> Vec<CiProgram> {
    outline::entries_of::<RotationCall>("rotation", &[KERNEL])
}
