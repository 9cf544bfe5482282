//! The rotation of heads by the angles of their tokens: rotary position embeddings.

use candle_core::{DType, Result, Storage, Tensor, bail};

use super::{check_contiguous, check_tensor, entries_of, program_of, row_strides};
use crate::arguments::{Address, RowStrides};
use crate::catalogue::CatalogueEntry;
use crate::device::{Grid, KernelArguments, KernelDevice, Launch, Operands, Reading};
use crate::element::Element;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

const OP: &str = "rotation";

/// The file of the kernels.
const ROOT: &str = "rotation.cu";

/// The threads of a block: ROTATION_THREADS in the source.
const THREADS: usize = 256;

const KERNEL: KernelShape = KernelShape { name: "rotate_heads", threads: THREADS, shared_bytes: 0 };

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

/// The argument of the kernel. The source documents the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct RotationArguments {
    inputs: Address,
    output: Address,
    cosines: Address,
    sines: Address,
    angle_rows: Address,

    input_strides: RowStrides,
    angle_rows_stride: i64,

    entries: i32,
    tokens: i32,
    heads: i32,
    width: i32,
    pairs: i32,
    angle_row_count: i32,

    first_angle_row: i32,
    interleaved: i32,
    inverse: i32,
    reserved: i32,
}

// SAFETY: the struct has the fields of the source in the same order, and no padding; the calls of this module check
// shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for RotationArguments {}

impl RotationCall {
    /// Checks that the kernel runs the call, and loads the program, which is compiled in the first call. No tensor is
    /// read.
    ///
    /// # Errors
    /// If it does not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        self.check()?;
        KernelDevice::of(self.xs.device())?.prepare(&program_of(ROOT, Element::of(self.xs.dtype())?))
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        KernelDevice::of(self.xs.device())?;
        Element::of(self.xs.dtype())?;
        let fits = |count: &usize| (1..1 << 30).contains(count);
        if self.xs.rank() != 4 || !self.xs.dims().iter().chain(self.cosines.dims()).all(fits) {
            return Err(Unsupported::new(format!("heads of the shape {:?} are not rotated", self.xs.dims())));
        }
        self.launch().check()
    }

    /// Returns the launch, with a thread for each pair of columns and for each column after all pairs.
    fn launch(&self) -> Launch {
        let Some((&width, heads)) = self.xs.dims().split_last() else { return Launch::new(KERNEL, Grid::linear(0)) };
        let pairs = self.cosines.dims().last().copied().unwrap_or(0);
        let heads = heads.iter().fold(1usize, |heads, &size| heads.saturating_mul(size));
        let threads = heads.saturating_mul(width.saturating_sub(pairs));
        Launch::new(KERNEL, Grid::linear(threads.div_ceil(THREADS)))
    }

    /// Computes the rotated heads, (B, T, H, D), contiguous, in the dtype of the input.
    ///
    /// # Errors
    /// If the call does not fit together, the kernel does not run it, or it does not compile or launch.
    pub fn forward(&self) -> Result<Storage> {
        self.check()?;
        let (b, t, h, d) = self.xs.dims4()?;
        let (rows, pairs) = self.cosines.dims2()?;
        check_tensor(OP, "the input", &self.xs, &[b, t, h, d], self.xs.dtype())?;
        for (name, table) in [("cosines", &self.cosines), ("sines", &self.sines)] {
            check_tensor(OP, name, table, &[rows, pairs], DType::F32)?;
            check_contiguous(OP, name, table)?;
        }
        if 2 * pairs > d {
            bail!("[{OP}] the angles have {pairs} pairs of columns, expected at most those of {d} columns")
        }
        let device = KernelDevice::of(self.xs.device())?;
        let program = device.load(&program_of(ROOT, Element::of(self.xs.dtype())?))?;
        let mut output = device.uninitialized(self.xs.dtype(), b * t * h * d)?;
        {
            let inputs = Reading::new(&self.xs);
            let cosines = Reading::new(&self.cosines);
            let sines = Reading::new(&self.sines);
            let list = match &self.angle_rows {
                AngleRows::From(_) => None,
                AngleRows::Each(list) => Some(RowList::new(list, b, t)?),
            };
            let mut operands = Operands::new(&device);
            let mut arguments = RotationArguments {
                inputs: operands.read("inputs", &inputs)?,
                output: operands.write("output", &mut output)?,
                cosines: operands.read("cosines", &cosines)?,
                sines: operands.read("sines", &sines)?,
                input_strides: row_strides(&inputs),
                entries: b as i32,
                tokens: t as i32,
                heads: h as i32,
                width: d as i32,
                pairs: pairs as i32,
                angle_row_count: rows as i32,
                interleaved: i32::from(self.interleaved),
                inverse: i32::from(self.inverse),
                ..RotationArguments::default()
            };
            if let AngleRows::From(first) = self.angle_rows {
                arguments.first_angle_row = first as i32;
            }
            if let Some(list) = &list {
                arguments.angle_rows = operands.read("angle_rows", &list.rows)?;
                arguments.angle_rows_stride = list.sequence_stride;
            }
            operands.launch(&program, &self.launch(), &arguments)?;
        }
        Ok(output.into_storage())
    }
}

/// The rows of [`AngleRows::Each`] while a launch reads them.
struct RowList<'t> {
    rows: Reading<'t>,
    /// The distance from the rows of a sequence to those of the next one; 0 if all sequences have the same rows.
    sequence_stride: i64,
}

impl<'t> RowList<'t> {
    /// Checks the rows of B sequences of T tokens.
    fn new(rows: &'t Tensor, b: usize, t: usize) -> Result<Self> {
        let is_shared = rows.elem_count() == t;
        check_tensor(OP, "angle_rows", rows, &[if is_shared { t } else { b * t }], DType::I32)?;
        Ok(Self { rows: Reading::new(rows), sequence_stride: if is_shared { 0 } else { t as i64 } })
    }
}

/// Returns the programs of all element types.
pub(super) fn entries() -> Vec<CatalogueEntry> {
    entries_of(ROOT, "rotation", &[KERNEL])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_sizes::{assert_same_layout, source_sizes};

    #[test]
    fn rotation_arguments_match_the_source() {
        let sizes = source_sizes(&program_of(ROOT, Element::F32));
        assert_same_layout!(
            sizes,
            RotationArguments,
            [
                inputs,
                output,
                cosines,
                sines,
                angle_rows,
                input_strides,
                angle_rows_stride,
                entries,
                tokens,
                heads,
                width,
                pairs,
                angle_row_count,
                first_angle_row,
                interleaved,
                inverse,
                reserved
            ]
        );
        assert_eq!(sizes["ROTATION_THREADS"], THREADS);
    }
}
