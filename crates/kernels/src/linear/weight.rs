//! A weight in the order in which products read it.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use half::f16;

use super::matrix::Square;
use crate::cpu::{
    CodeFormat, ColumnBlock, Columns, Format, InstructionSet, Kernel, NESTED_BLOCK, PanelProduct, ScaleFormat, Scratch,
    SharedPtr, SimdTask, Vector, WithColumns, WorkSize, Workers, for_each_index, multiply, with_columns,
};
use crate::error::Error;
use crate::number::Number;

/// The shape of a weight, (out, in).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightShape {
    /// The rows of the weight.
    pub outputs: usize,
    /// The columns of the weight.
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
    /// The inputs of a panel. The last ones are zeros where a product takes more inputs than the weight has.
    pub(super) padded: usize,
}

impl fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}, {:?}, {}", self.outputs, self.inputs, self.format, self.instruction_set)
    }
}

impl PackedWeight {
    /// Returns the bytes of the weight in memory.
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

    pub(super) fn is_bf16(&self) -> bool {
        self.format == Format::BF16
    }

    /// Returns whether both weights have the same shape, format and instruction set, so that one can be the other's
    /// [`Up`](super::Up).
    pub fn is_like(&self, other: &Self) -> bool {
        self.outputs == other.outputs
            && self.inputs == other.inputs
            && self.format == other.format
            && self.instruction_set == other.instruction_set
    }

    /// Returns the bytes of some outputs.
    pub(super) fn bytes(&self, outputs: usize) -> usize {
        outputs * self.format.bytes(self.padded)
    }

    /// Returns the first word of a panel's inputs from `first` on, which is a multiple of the format's step.
    fn at(&self, panel: usize, first: usize) -> *const f32 {
        let bytes = (panel * self.format.bytes(self.padded) + self.format.bytes(first)) * self.panel;
        self.words.as_ptr().wrapping_byte_add(bytes)
    }

    /// Returns whether a product with `rows` rows widens the weight's words before it multiplies them.
    pub(super) fn is_widened<K: Kernel>(&self, rows: usize) -> bool {
        let is_few = rows <= 2 * K::ROWS && self.panel == K::PANEL;
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
            product.b = self.at(panel, first);
            product.format = self.format;
            if self.is_widened::<K>(product.rows) {
                let inputs = first..first + product.depth;
                let columns = 0..self.panel;
                K::Vector::run_simd(Widen { weight: self, panel, columns, inputs, to: widened, stride: K::PANEL });
                product.b = widened;
                product.format = Format::F32;
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
        // Inlined, since a call would take a part of the time of a square.
        // SAFETY: as this method's contract.
        unsafe { Widen { weight: self, panel, columns, inputs, to, stride: V::LANES }.run::<V>() };
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
                    Format::Codes(format) => self.unpack_codes(at, column, format, numbers),
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

    /// Computes the numbers of a column of a block of codes, whose first word is at `block`.
    ///
    /// # Safety
    /// The block belongs to the weight.
    unsafe fn unpack_codes<E: Number>(&self, block: *const f32, column: usize, format: CodeFormat, numbers: &mut [E]) {
        let CodeFormat { bits, has_minimums, .. } = format;
        // SAFETY: the scales and the words of codes lie within the block.
        unsafe {
            let words = block.byte_add(format.bytes_before_codes() * self.panel).cast::<u32>();
            for (group, group_numbers) in numbers.chunks_mut(format.group()).enumerate() {
                let CodeScale { scale, minimum } = self.code_scale(block, column, format, group);
                for (n, number) in group_numbers.iter_mut().enumerate() {
                    let at = group * format.group() + n;
                    // The code is the highest bits of the word.
                    let word = *words.add(at * bits / 32 * self.panel + column) << (at * bits % 32);
                    *number = E::from_f32(match has_minimums {
                        // The product is exact.
                        true => (word >> (32 - bits)) as f32 * scale + minimum,
                        false => (word.cast_signed() >> (32 - bits)) as f32 * scale,
                    });
                }
            }
        }
    }

    /// Returns the scale of a group of codes of a column of a block, whose first word is at `block`.
    ///
    /// # Safety
    /// The block belongs to the weight.
    unsafe fn code_scale(&self, block: *const f32, column: usize, format: CodeFormat, group: usize) -> CodeScale {
        let halves = block.cast::<f16>();
        let kinds = if format.has_minimums { 2 } else { 1 };
        // Read only where there are minimums.
        let at_minimum = (kinds - 1) * self.panel + column;
        // SAFETY: the scales lie within the block.
        unsafe {
            let factor = (*halves.add(column)).to_f32();
            let minimum_factor = (*halves.add(at_minimum)).to_f32();
            let ScaleFormat::Nested { group: group_len } = format.scales else {
                return CodeScale { scale: factor, minimum: minimum_factor };
            };
            let bytes = halves.add(kinds * self.panel).cast::<u8>();
            let at = group * self.panel + column;
            let scale = f32::from(*bytes.add(at));
            if !format.has_minimums {
                return CodeScale { scale: factor * (scale - 128.0), minimum: 0.0 };
            }
            let minimum = f32::from(*bytes.add(NESTED_BLOCK / group_len * self.panel + at));
            CodeScale { scale: factor * scale, minimum: minimum_factor * minimum }
        }
    }
}

/// The scale of a group of codes, and their minimum if they have one.
struct CodeScale {
    scale: f32,
    minimum: f32,
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
    /// The copy, which is valid for a row of the columns for each input.
    to: *mut f32,
    /// The words from one row of the copy to the next.
    stride: usize,
}

impl SimdTask for Widen<'_> {
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
        let Widen { weight, panel, columns, inputs, to, stride } = self.widen;
        for first in (inputs.start / B::BLOCK * B::BLOCK..inputs.end).step_by(B::BLOCK) {
            let block = ColumnBlock { at: weight.at(panel, first), panel: weight.panel, format: weight.format };
            let group = B::group(&block);
            for column in columns.clone().step_by(V::LANES) {
                let column_to = to.wrapping_add(column - columns.start);
                let mut words = B::numbers(&block);
                for group_index in 0..B::BLOCK / group {
                    let group_start = first + group_index * group;
                    // SAFETY: the fields have the sizes that they document, and the block lies within the panel.
                    unsafe {
                        let scales = B::scales::<V>(&block, group_index, column);
                        for step in (group_start..group_start + group).step_by(B::STEPS) {
                            let mut loaded = B::load::<V>(words, column);
                            for input in step..step + B::STEPS {
                                let numbers = B::take(&mut loaded, &scales);
                                if inputs.contains(&input) {
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
