//! A weight in the order in which products read it.

use std::fmt;
use std::ops::Range;

use half::f16;

use super::operands::Square;
use crate::cpu::{
    Bf16Pairs, CodeBlocks, ColumnBlock, Columns, F16Rows, Format, InstructionSet, Kernel, Product as PanelProduct,
    Scratch, SharedPtr, SimdTask, Vector, Words, Workers, for_each_index,
};
use crate::error::Error;
use crate::linear::ProductKernels;
use crate::number::Number;

/// A weight (out, in) as panels of outputs, for [`multiply`](super::multiply). Each panel is (in, panel), so that the
/// sums of its outputs are the lanes of vectors, and is read from its beginning to its end, for one row of input or for
/// thousands.
pub struct PackedWeight {
    pub(super) words: Scratch,
    pub(super) format: Format,
    pub(super) instruction_set: InstructionSet,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// The outputs of a panel; the last one is filled up with zeros.
    pub(super) panel: usize,
    /// The inputs of a panel; the last ones are zeros where a product takes more than there are.
    pub(super) padded: usize,
}

impl fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}, {:?}, {}", self.outputs, self.inputs, self.format, self.instruction_set)
    }
}

impl PackedWeight {
    /// Packs `rows`, a contiguous matrix of shape (out, in), for products on an instruction set.
    ///
    /// # Errors
    /// [`Error::Shape`] if `rows` has another length, [`Error::InstructionSet`] if the processor lacks the instruction
    /// set, [`Error::Memory`] if there is none for a copy.
    ///
    /// ```
    /// use candle_attention_kernels::{InstructionSet, linear::PackedWeight};
    ///
    /// let weight = PackedWeight::new(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (3, 2), InstructionSet::Scalar)?;
    /// assert_eq!((weight.outputs(), weight.inputs()), (3, 2));
    /// assert_eq!(weight.unpack::<f32>()?, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    /// # Ok::<(), candle_attention_kernels::Error>(())
    /// ```
    pub fn new<E: ProductKernels>(
        rows: &[E],
        shape: (usize, usize),
        instruction_set: InstructionSet,
    ) -> Result<Self, Error> {
        E::pack(rows, shape, instruction_set)
    }

    /// The rows as they were packed, (out, in); those of codes as the numbers that they stand for, in f32.
    ///
    /// # Errors
    /// [`Error::Shape`] if E is not the type that was packed, [`Error::Memory`] if there is none for the rows.
    pub fn unpack<E: ProductKernels>(&self) -> Result<Vec<E>, Error> {
        // A weight of nothing may have any number of outputs.
        let outputs = if self.inputs == 0 { 0 } else { self.outputs };
        self.unpack_rows(&(0..outputs).collect::<Vec<_>>())
    }

    /// [`unpack`](Self::unpack) of the rows of some outputs, in any order: (`outputs.len()`, in).
    ///
    /// # Errors
    /// As [`unpack`](Self::unpack), and [`Error::Shape`] for an output that the weight does not have.
    pub fn unpack_rows<E: ProductKernels>(&self, outputs: &[usize]) -> Result<Vec<E>, Error> {
        E::unpack_rows(self, outputs)
    }

    /// The bytes that it takes.
    pub fn memory(&self) -> usize {
        size_of_val(self.words.words())
    }

    /// The rows of the weight.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// The columns of the weight.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// The instruction set that multiplies the weight.
    pub fn instruction_set(&self) -> InstructionSet {
        self.instruction_set
    }

    pub(super) fn is_bf16(&self) -> bool {
        self.format == Format::BF16
    }

    /// Whether it is stored as the other one, so that one can be the other's [`Up`](super::Up).
    pub fn is_like(&self, other: &Self) -> bool {
        let layout = |weight: &Self| (weight.outputs, weight.inputs, weight.format, weight.instruction_set);
        layout(self) == layout(other)
    }

    /// The bytes of so many outputs.
    pub(super) fn bytes(&self, outputs: usize) -> usize {
        outputs * self.format.bytes(self.padded)
    }

    /// The first word of a panel's inputs from `first` on, which is a whole step.
    fn at(&self, panel: usize, first: usize) -> *const f32 {
        let bytes = (panel * self.format.bytes(self.padded) + self.format.bytes(first)) * self.panel;
        self.words.as_ptr().wrapping_byte_add(bytes)
    }

    /// Whether products with so many rows take words that were widened before.
    pub(super) fn is_widened<K: Kernel>(&self, rows: usize) -> bool {
        let is_few = rows <= 2 * K::ROWS && self.panel == K::PANEL;
        !K::IS_BF16 && self.format != Format::F32 && !is_few
    }

    /// A product with `product.depth` words of inputs from `first` of a panel. Words of the kernel's own are read in
    /// place, others widened to f32: while they are loaded for up to two tiles of rows, before many into `widened`,
    /// which takes as many rows of [`K::PANEL`](Kernel::PANEL) then ([`is_widened`](Self::is_widened)).
    ///
    /// # Safety
    /// As [`Kernel::multiply`] but for B; the panel exists; the inputs lie within [`padded`](Self::padded), and `first`
    /// is a whole step.
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
            (product.b, product.format) = (self.at(panel, first), self.format);
            if self.is_widened::<K>(product.rows) {
                let (columns, inputs) = (0..self.panel, first..first + product.depth);
                K::Vector::run_simd(Widen { weight: self, panel, columns, inputs, to: widened, stride: K::PANEL });
                (product.b, product.format) = (widened, Format::F32);
            }
            K::multiply(&product);
        }
    }

    /// A square of f32, inputs from `input` on by outputs from `output` on, and the words from one of its rows to the
    /// next: where it is, or `widened` with zeros for what is missing.
    ///
    /// # Safety
    /// The processor has the instruction set of V; the output exists, and both are multiples of a vector.
    #[inline(always)]
    pub(super) unsafe fn square<V: Vector>(
        &self,
        output: usize,
        input: usize,
        widened: &mut Square,
    ) -> (*const f32, usize) {
        let (panel, column) = (output / self.panel, output % self.panel);
        if self.format == Format::F32 && input + V::LANES <= self.padded {
            return (self.at(panel, input).wrapping_add(column), self.panel);
        }
        let inputs = input..self.padded.min(input + V::LANES);
        widened[inputs.len() * V::LANES..].fill(0.0);
        // SAFETY: as this method's contract.
        unsafe {
            let (columns, to) = (column..column + V::LANES, widened.as_mut_ptr());
            // A call takes a part of the time of a square.
            Widen { weight: self, panel, columns, inputs, to, stride: V::LANES }.run::<V>();
        }
        (widened.as_ptr(), V::LANES)
    }

    /// # Safety
    /// The output exists, and E is the type that its numbers are unpacked as.
    unsafe fn unpack_row<E: Number>(&self, output: usize, row: &mut [E]) {
        let (panel, column) = (output / self.panel, output % self.panel);
        for (index, numbers) in row.chunks_mut(self.format.step()).enumerate() {
            let at = self.at(panel, index * self.format.step());
            // SAFETY: the step's numbers lie within the panel, by this method's contract.
            unsafe {
                let Format::Codes { bits, has_minimums } = self.format else {
                    let own = at.cast::<E>().add(column * self.format.step());
                    numbers.iter_mut().enumerate().for_each(|(at, number)| *number = *own.add(at));
                    continue;
                };
                let scales = at.cast::<f16>().add(column);
                let scale = (*scales).to_f32();
                let minimum = has_minimums.then(|| (*scales.add(self.panel)).to_f32());
                let words = at.cast::<f16>().add(self.panel << u32::from(has_minimums)).cast::<u32>();
                for (at, number) in numbers.iter_mut().enumerate() {
                    // The code is the highest bits of the word.
                    let word = *words.add(at * bits / 32 * self.panel + column) << (at * bits % 32);
                    *number = E::from_f32(match minimum {
                        // The product is exact.
                        Some(minimum) => (word >> (32 - bits)) as f32 * scale + minimum,
                        None => (word.cast_signed() >> (32 - bits)) as f32 * scale,
                    });
                }
            }
        }
    }
}

/// Some inputs of some columns of a panel as f32, each as many words after the one before. The inputs lie within
/// [`PackedWeight::padded`], the columns are whole vectors of the panel, and `to` takes them. Does not depend on the
/// type of what is multiplied, so that it is compiled once for all of them.
struct Widen<'a> {
    weight: &'a PackedWeight,
    panel: usize,
    columns: Range<usize>,
    inputs: Range<usize>,
    to: *mut f32,
    stride: usize,
}

impl SimdTask for Widen<'_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        // SAFETY: the processor has the instruction set of K, and the fields are as they say.
        unsafe {
            match self.weight.format {
                Format::F32 => self.widen::<K::Vector, Words>(),
                Format::BF16 => self.widen::<K::Vector, Bf16Pairs>(),
                Format::F16 => self.widen::<K::Vector, F16Rows>(),
                Format::Codes { bits: 4, has_minimums: false } => self.widen::<K::Vector, CodeBlocks<4, false>>(),
                Format::Codes { bits: 4, has_minimums: true } => self.widen::<K::Vector, CodeBlocks<4, true>>(),
                Format::Codes { has_minimums: false, .. } => self.widen::<K::Vector, CodeBlocks<8, false>>(),
                Format::Codes { has_minimums: true, .. } => self.widen::<K::Vector, CodeBlocks<8, true>>(),
            }
        }
    }
}

impl Widen<'_> {
    /// # Safety
    /// As [`SimdTask::run`], of a weight that is stored as B.
    #[inline(always)]
    unsafe fn widen<V: Vector, B: Columns>(self) {
        let Self { weight, panel, columns, inputs, .. } = self;
        for first in (inputs.start / B::BLOCK * B::BLOCK..inputs.end).step_by(B::BLOCK) {
            let block = ColumnBlock { at: weight.at(panel, first), panel: weight.panel };
            for column in columns.clone().step_by(V::LANES) {
                let to = self.to.wrapping_add(column - columns.start);
                let mut words = B::numbers(&block);
                for step in (first..first + B::BLOCK).step_by(B::STEPS) {
                    // SAFETY: as this method's contract; the block lies within the panel.
                    unsafe {
                        let mut loaded = B::load::<V>(words, &block, column);
                        for input in step..step + B::STEPS {
                            let numbers = B::take(&mut loaded);
                            if inputs.contains(&input) {
                                numbers.store(to.add((input - inputs.start) * self.stride));
                            }
                        }
                    }
                    words = words.wrapping_byte_add(B::BYTES * weight.panel);
                }
            }
        }
    }
}

pub(super) fn no_memory(outputs: usize, inputs: usize) -> Error {
    Error::Memory(format!("a packed weight of {:?}", (outputs, inputs)))
}

/// [`PackedWeight::unpack_rows`], compiled once.
pub(super) fn unpack_rows<E: Number>(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<E>, Error> {
    let &PackedWeight { inputs, format, .. } = weight;
    let unpacked = if let Format::Codes { .. } = format { Format::F32 } else { format };
    if E::FORMAT != unpacked {
        return Err(Error::Shape(format!("expected a weight of {:?}, found {format:?}", E::FORMAT)));
    }
    if let Some(output) = outputs.iter().find(|&&output| output >= weight.outputs) {
        return Err(Error::Shape(format!("expected outputs below {}, found {output}", weight.outputs)));
    }
    let no_memory = || no_memory(outputs.len(), inputs);
    let count = outputs.len().checked_mul(inputs).ok_or_else(no_memory)?;
    let mut rows = Vec::new();
    rows.try_reserve_exact(count).map_err(|_| no_memory())?;
    rows.resize(count, E::default());
    let to = SharedPtr(rows.as_mut_ptr());
    let tasks = if inputs == 0 { 0 } else { outputs.len() };
    for_each_index(tasks, Workers::of(count, 0, None), &|row| {
        // SAFETY: the row is this task's.
        unsafe { weight.unpack_row(outputs[row], to.slice(row * inputs, inputs)) }
    });
    Ok(rows)
}
