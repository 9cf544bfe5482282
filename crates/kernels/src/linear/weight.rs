//! A weight in the order in which products read it.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use super::code_numbers::unpack_codes;
use super::matrix::Square;
use crate::cpu::{
    ColumnBlock, Columns, Format, InstructionSet, Kernel, NextBytes, PanelProduct, RightOperand, Scratch, SharedPtr,
    SimdTask, Vector, WithColumns, WorkSize, Workers, for_each_index, is_of_others, multiply, with_columns,
    with_number_columns,
};
use crate::error::Error;
use crate::number::Number;

/// The shape of a weight, (out, in).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightShape {
    /// The number of rows of the weight.
    pub outputs: usize,
    /// The number of columns of the weight.
    pub inputs: usize,
}

impl WeightShape {
    /// Returns the number of elements.
    ///
    /// # Errors
    /// If the number exceeds a `usize`.
    pub(super) fn count(self) -> Result<usize, Error> {
        self.outputs.checked_mul(self.inputs).ok_or_else(|| self.no_memory())
    }

    /// Returns the error of a weight that does not fit in memory.
    pub(super) fn no_memory(self) -> Error {
        Error::Memory(format!("a packed weight of {:?}", (self.outputs, self.inputs)))
    }
}

/// A weight (out, in) as panels of outputs, for [`multiply`](super::multiply). Each panel is (in, panel), so that the
/// sums of its outputs are the lanes of vectors, and is read from its beginning to its end, for one row of input or for
/// thousands.
pub struct PackedWeight {
    pub(super) words: Scratch,
    pub(super) format: Format,
    pub(super) instruction_set: InstructionSet,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// The outputs of a panel. The last panel is filled up with zeros.
    pub(super) panel: usize,
    /// The number of inputs of a panel. The last ones are zeros where a product takes more inputs than the weight has.
    pub(super) padded: usize,
}

impl fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}, {:?}, {}", self.outputs, self.inputs, self.format, self.instruction_set)
    }
}

impl PackedWeight {
    /// Returns the number of bytes of the weight in memory.
    pub fn memory(&self) -> usize {
        size_of_val(self.words.words())
    }

    /// Returns the number of rows of the weight.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Returns the number of columns of the weight.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Returns the instruction set that multiplies the weight.
    pub fn instruction_set(&self) -> InstructionSet {
        self.instruction_set
    }

    /// Returns whether the weight is stored as codes with scales.
    pub fn has_codes(&self) -> bool {
        matches!(self.format, Format::Codes(_))
    }

    pub(super) fn is_bf16(&self) -> bool {
        self.format == Format::BF16
    }

    /// Returns whether both weights have the same shape, format and instruction set, so that one can be the other's
    /// [`Up`](super::Up). Codes may have different scales and values.
    pub fn is_like(&self, other: &Self) -> bool {
        let are_codes = matches!((self.format, other.format), (Format::Codes(_), Format::Codes(_)));
        self.outputs == other.outputs
            && self.inputs == other.inputs
            && self.padded == other.padded
            && (are_codes || self.format == other.format)
            && self.instruction_set == other.instruction_set
    }

    /// Returns the number of bytes of some outputs.
    pub(super) fn bytes(&self, outputs: usize) -> usize {
        outputs * self.format.bytes(self.padded)
    }

    /// Returns the first word of a panel's inputs from `first` on, which is a multiple of the format's step.
    fn at(&self, panel: usize, first: usize) -> *const f32 {
        let bytes = (panel * self.format.bytes(self.padded) + self.format.bytes(first)) * self.panel;
        self.words.as_ptr().wrapping_byte_add(bytes)
    }

    /// Returns the bytes of `count` inputs of a panel from `first` on; both are multiples of the format's step.
    pub(super) fn bytes_at(&self, panel: usize, first: usize, count: usize) -> NextBytes {
        NextBytes { at: self.at(panel, first).cast(), count: self.format.bytes(count) * self.panel }
    }

    /// Returns whether a product with `rows` rows widens the weight's words before it multiplies them.
    pub(super) fn is_widened<K: Kernel>(&self, rows: usize) -> bool {
        // Pairs of bf16 may be packed for another kernel, with fewer columns.
        let is_few = rows <= 2 * K::ROWS && self.panel <= K::PANEL;
        !K::IS_BF16 && self.format != Format::F32 && !is_few
    }

    /// Computes a product with `product.depth` words of inputs of a panel, from `first` on. Words in the kernel's own
    /// format are read in place. Other words are widened to f32: while they are loaded for up to two tiles of rows, and
    /// for more rows ([`is_widened`](Self::is_widened)) once, into `widened`, which is then valid for `product.depth`
    /// rows of [`K::PANEL`](Kernel::PANEL) words.
    ///
    /// # Safety
    /// As [`multiply`] except for B; the panel exists; the inputs lie within [`padded`](Self::padded), and `first` is a
    /// multiple of the format's step.
    #[inline(always)]
    pub(super) unsafe fn multiply<K: Kernel>(
        &self,
        panel: usize,
        first: usize,
        widened: *mut f32,
        mut product: PanelProduct,
    ) {
        // SAFETY: as this method's contract; the panel's inputs from `first` on are valid for the depth of the product.
        unsafe {
            product.b = RightOperand { at: self.at(panel, first), panel: self.panel, format: self.format };
            if self.is_widened::<K>(product.rows) {
                let inputs = first..first + product.depth;
                let columns = 0..self.panel;
                K::Vector::run_simd(Widen { weight: self, panel, columns, inputs, to: widened, stride: K::PANEL });
                product.b = RightOperand::words(widened, K::PANEL);
            }
            multiply::<K>(&product);
        }
    }

    /// Returns a square of f32, inputs from `input` on by outputs from `output` on: in place, or in `widened` with
    /// zeros for inputs that do not exist.
    ///
    /// # Safety
    /// The processor has the instruction set of V; the output exists, and both numbers are multiples of a vector.
    #[inline(always)]
    pub(super) unsafe fn square<V: Vector>(&self, output: usize, input: usize, widened: &mut Square) -> SquareRows {
        let panel = output / self.panel;
        let column = output % self.panel;
        if self.format == Format::F32 && input + V::LANES <= self.padded {
            return SquareRows { at: self.at(panel, input).wrapping_add(column), stride: self.panel };
        }
        let inputs = input..self.padded.min(input + V::LANES);
        widened[inputs.len() * V::LANES..].fill(0.0);
        let columns = column..column + V::LANES;
        let to = widened.as_mut_ptr();
        let widen = Widen { weight: self, panel, columns, inputs, to, stride: V::LANES };
        // SAFETY: as this method's contract.
        unsafe {
            match self.format {
                Format::Codes(_) => V::run_simd(widen),
                // Inlined, since a call would take a part of the time of a square.
                _ => with_number_columns(self.format, WidenFormat::<V> { widen, vector: PhantomData }),
            }
        }
        SquareRows { at: widened.as_ptr(), stride: V::LANES }
    }

    /// Copies the numbers of an output to `row`.
    ///
    /// # Safety
    /// The output exists, and E is the type of its unpacked numbers.
    unsafe fn unpack_row<E: Number>(&self, output: usize, row: &mut [E]) {
        let panel = output / self.panel;
        let column = output % self.panel;
        let step = self.format.step();
        for (index, numbers) in row.chunks_mut(step).enumerate() {
            let at = self.at(panel, index * step);
            // SAFETY: the step's numbers lie within the panel, by this method's contract.
            unsafe {
                match self.format {
                    Format::Codes(ref format) => unpack_codes(at, self.panel, column, format, numbers),
                    Format::F32 | Format::BF16 | Format::F16 => {
                        let stored = at.cast::<E>().add(column * step);
                        for (n, number) in numbers.iter_mut().enumerate() {
                            *number = *stored.add(n);
                        }
                    }
                }
            }
        }
    }
}

/// A square of f32 in memory, whose rows are `stride` words apart.
pub(super) struct SquareRows {
    pub at: *const f32,
    pub stride: usize,
}

/// A task that copies some inputs of some columns of a panel as f32. It does not depend on the type of the other
/// operand, so that it is compiled once for all types.
struct Widen<'a> {
    weight: &'a PackedWeight,
    panel: usize,
    /// Whole vectors of the panel.
    columns: Range<usize>,
    /// The inputs, within [`PackedWeight::padded`].
    inputs: Range<usize>,
    /// The memory for the copy: a row of the columns for each input.
    to: *mut f32,
    /// The number of words from one row of the copy to the next.
    stride: usize,
}

impl SimdTask for Widen<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: the processor has the instruction set of K, and the fields have the sizes that they document.
        unsafe {
            with_columns(self.weight.format, WidenFormat::<K::Vector> { widen: self, vector: PhantomData });
        }
    }
}

/// A copy that waits for the format of the weight.
struct WidenFormat<'a, V> {
    widen: Widen<'a>,
    vector: PhantomData<V>,
}

impl<V: Vector> WithColumns for WidenFormat<'_, V> {
    #[inline(always)]
    unsafe fn run<B: Columns>(self) {
        if const { is_of_others::<B, V>() } {
            unreachable!("weights have other formats on this instruction set");
        }
        let Widen { weight, panel, columns, inputs, to, stride } = self.widen;
        for first in (inputs.start / B::BLOCK * B::BLOCK..inputs.end).step_by(B::BLOCK) {
            let block = ColumnBlock { at: weight.at(panel, first), panel: weight.panel, format: &weight.format };
            let group = B::group(&block);
            for column in columns.clone().step_by(V::LANES) {
                let column_to = to.wrapping_add(column - columns.start);
                let mut words = B::numbers(&block);
                for group_index in 0..B::BLOCK / group {
                    let group_start = first + group_index * group;
                    if inputs.end <= group_start || group_start + group <= inputs.start {
                        words = words.wrapping_byte_add(group / B::STEPS * B::BYTES * weight.panel);
                        continue;
                    }
                    // SAFETY: the fields have the sizes that they document, and the block lies within the panel.
                    unsafe {
                        let scales = B::scales::<V>(&block, group_index, column);
                        for step in (group_start..group_start + group).step_by(B::STEPS) {
                            let mut loaded = B::load::<V>(words, column, weight.panel, &scales);
                            let is_whole = inputs.start <= step && step + B::STEPS <= inputs.end;
                            for input in step..step + B::STEPS {
                                let numbers = B::take(&mut loaded, &scales);
                                if is_whole || inputs.contains(&input) {
                                    numbers.store(column_to.add((input - inputs.start) * stride));
                                }
                            }
                            words = words.wrapping_byte_add(B::BYTES * weight.panel);
                        }
                    }
                }
            }
        }
    }
}

/// Unpacks the rows of some outputs, as [`PackedWeight::unpack_rows`] says. It is compiled once for each element.
pub(super) fn unpack_rows<E: Number>(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<E>, Error> {
    let &PackedWeight { inputs, format, .. } = weight;
    let unpacked = if let Format::Codes(_) = format { Format::F32 } else { format };
    if E::FORMAT != unpacked {
        return Err(Error::Shape(format!("expected a weight of {:?}, found {format:?}", E::FORMAT)));
    }
    if let Some(output) = outputs.iter().find(|&&output| output >= weight.outputs) {
        return Err(Error::Shape(format!("expected outputs below {}, found {output}", weight.outputs)));
    }
    let shape = WeightShape { outputs: outputs.len(), inputs };
    let count = shape.count()?;
    let mut rows = Vec::new();
    rows.try_reserve_exact(count).map_err(|_| shape.no_memory())?;
    rows.resize(count, E::default());
    let to = SharedPtr(rows.as_mut_ptr());
    let tasks = if inputs == 0 { 0 } else { outputs.len() };
    for_each_index(tasks, Workers::for_call(WorkSize { multiply_adds: count, bytes: 0 }), &|row| {
        // SAFETY: the row is this task's.
        unsafe { weight.unpack_row(outputs[row], to.slice(row * inputs, inputs)) }
    });
    Ok(rows)
}
