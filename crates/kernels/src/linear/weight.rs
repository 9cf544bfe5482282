//! A weight in the order in which products read it.

use std::fmt;
use std::ops::Range;

use half::f16;

use crate::cpu::{
    Bf16Pairs, CODE_BLOCK, CodeBlocks, ColumnBlock, Columns, F16Rows, Kernel, Product, Scratch, SharedPtr, Tier,
    Vector, Words, Workers, for_each_index,
};
use crate::error::Error;
use crate::linear::ProductKernels;
use crate::number::{Dtype, Number};

/// How the numbers of a weight are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// As they are. bf16 is stored as pairs of neighbouring inputs, whether the tier multiplies them as they are or
    /// widens them: both take one instruction.
    Elements(Dtype),
    /// As [`CodeBlocks`](crate::cpu::CodeBlocks).
    Codes { bits: usize, has_minimums: bool },
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Elements(dtype) => dtype.fmt(f),
            Self::Codes { bits, has_minimums: false } => write!(f, "codes of {bits} bits"),
            Self::Codes { bits, has_minimums: true } => write!(f, "codes of {bits} bits with minimums"),
        }
    }
}

impl Format {
    /// The type that numbers are unpacked as.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Elements(dtype) => dtype,
            Self::Codes { .. } => Dtype::F32,
        }
    }

    /// The inputs that are stored together.
    pub fn step(self) -> usize {
        match self {
            Self::Elements(Dtype::BF16) => 2,
            Self::Elements(_) => 1,
            Self::Codes { .. } => CODE_BLOCK,
        }
    }

    /// The bytes of so many inputs of one output, in whole steps.
    pub fn bytes(self, inputs: usize) -> usize {
        match self {
            Self::Elements(Dtype::F32) => inputs * 4,
            Self::Elements(Dtype::BF16 | Dtype::F16) => inputs * 2,
            Self::Codes { bits, has_minimums } => {
                let scales = size_of::<f16>() << u32::from(has_minimums);
                inputs / CODE_BLOCK * (scales + CODE_BLOCK * bits / 8)
            }
        }
    }
}

/// A weight (out, in) as panels of outputs, for [`project`](super::project). Each panel is (in, panel), so that the
/// sums of its outputs are the lanes of vectors, and is read from its beginning to its end, for one row of input or for
/// thousands.
pub struct PackedWeight {
    pub(super) words: Scratch,
    pub(super) format: Format,
    pub(super) tier: Tier,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    /// The outputs of a panel; the last one is filled up with zeros.
    pub(super) panel: usize,
    /// The inputs of a panel; the last ones are zeros where a product takes more than there are.
    pub(super) padded: usize,
}

impl fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}, {:?}, {}", self.outputs, self.inputs, self.format, self.tier)
    }
}

impl PackedWeight {
    /// Packs `rows`, a contiguous matrix of shape (out, in), for products on a tier.
    ///
    /// # Errors
    /// [`Error::Shape`] if `rows` has another length, [`Error::Tier`] if the processor lacks the tier,
    /// [`Error::Memory`] if there is none for a copy.
    ///
    /// ```
    /// use candle_attention_kernels::{Tier, linear::PackedWeight};
    ///
    /// let weight = PackedWeight::new(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (3, 2), Tier::Scalar)?;
    /// assert_eq!((weight.outputs(), weight.inputs()), (3, 2));
    /// assert_eq!(weight.unpack::<f32>()?, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    /// # Ok::<(), candle_attention_kernels::Error>(())
    /// ```
    pub fn new<E: ProductKernels>(rows: &[E], shape: (usize, usize), tier: Tier) -> Result<Self, Error> {
        E::pack(rows, shape, tier)
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

    /// The tier that multiplies the weight.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    pub(super) fn is_bf16(&self) -> bool {
        self.format == Format::Elements(Dtype::BF16)
    }

    /// Whether its blocks of codes have minimums.
    pub(super) fn has_minimums(&self) -> bool {
        matches!(self.format, Format::Codes { has_minimums: true, .. })
    }

    /// Whether it is stored as the other one, so that one can be the other's [`Up`](super::Up).
    pub fn is_like(&self, other: &Self) -> bool {
        let layout = |weight: &Self| (weight.outputs, weight.inputs, weight.format, weight.tier);
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
        !K::IS_BF16 && self.format != Format::Elements(Dtype::F32) && !is_few
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
        mut product: Product,
    ) {
        product.b = self.at(panel, first);
        // SAFETY: as this method's contract; the panel's inputs from `first` on are valid for the depth of the product.
        unsafe {
            if self.is_widened::<K>(product.rows) {
                self.widen::<K::Vector>(panel, 0..self.panel, first..first + product.depth, widened, K::PANEL);
                product.b = widened;
                return K::multiply::<Words>(&product);
            }
            match self.format {
                Format::Elements(Dtype::F32) => K::multiply::<Words>(&product),
                // Pairs that the kernel multiplies.
                Format::Elements(Dtype::BF16) if K::IS_BF16 => K::multiply::<Words>(&product),
                Format::Elements(Dtype::BF16) => K::F32::multiply::<Bf16Pairs>(&product),
                Format::Elements(Dtype::F16) => K::F32::multiply::<F16Rows>(&product),
                Format::Codes { bits: 4, .. } => K::F32::multiply::<CodeBlocks<4>>(&product),
                Format::Codes { .. } => K::F32::multiply::<CodeBlocks<8>>(&product),
            }
        }
    }

    /// Some inputs of some columns of a panel as f32, each `stride` words after the one before.
    ///
    /// # Safety
    /// The processor has the tier of V; the inputs lie within [`padded`](Self::padded), the columns are whole vectors
    /// of the panel, and `to` takes them.
    #[inline(always)]
    pub(super) unsafe fn widen<V: Vector>(
        &self,
        panel: usize,
        columns: Range<usize>,
        inputs: Range<usize>,
        to: *mut f32,
        stride: usize,
    ) {
        // SAFETY: as this method's contract.
        unsafe {
            match self.format {
                Format::Elements(Dtype::F32) => self.widen_columns::<V, Words>(panel, columns, inputs, to, stride),
                Format::Elements(Dtype::BF16) => self.widen_columns::<V, Bf16Pairs>(panel, columns, inputs, to, stride),
                Format::Elements(Dtype::F16) => self.widen_columns::<V, F16Rows>(panel, columns, inputs, to, stride),
                Format::Codes { bits: 4, .. } => {
                    self.widen_columns::<V, CodeBlocks<4>>(panel, columns, inputs, to, stride);
                }
                Format::Codes { .. } => self.widen_columns::<V, CodeBlocks<8>>(panel, columns, inputs, to, stride),
            }
        }
    }

    /// # Safety
    /// As [`widen`](Self::widen), of a weight that is stored as B.
    #[inline(always)]
    unsafe fn widen_columns<V: Vector, B: Columns>(
        &self,
        panel: usize,
        columns: Range<usize>,
        inputs: Range<usize>,
        to: *mut f32,
        stride: usize,
    ) {
        for first in (inputs.start / B::BLOCK * B::BLOCK..inputs.end).step_by(B::BLOCK) {
            let block = ColumnBlock { at: self.at(panel, first), panel: self.panel, has_minimums: self.has_minimums() };
            for column in columns.clone().step_by(V::LANES) {
                let to = to.wrapping_add(column - columns.start);
                let mut words = B::numbers(block);
                for step in (first..first + B::BLOCK).step_by(B::STEPS) {
                    // SAFETY: as this method's contract; the block lies within the panel.
                    unsafe {
                        let mut loaded = B::load::<V>(words, block, column);
                        for input in step..step + B::STEPS {
                            let numbers = B::take(&mut loaded);
                            if inputs.contains(&input) {
                                numbers.store(to.add((input - inputs.start) * stride));
                            }
                        }
                    }
                    words = B::next(words, self.panel);
                }
            }
        }
    }

    /// A square of f32 where it is, inputs from `input` on by outputs from `output` on, its rows a panel apart; `None`
    /// where its words are others, or some are missing.
    pub(super) fn square_in_place(&self, output: usize, input: usize, size: usize) -> Option<*const f32> {
        let is_f32 = self.format == Format::Elements(Dtype::F32);
        let is_whole = is_f32 && output < self.outputs && input + size <= self.padded;
        is_whole.then(|| self.at(output / self.panel, input).wrapping_add(output % self.panel))
    }
}

pub(super) fn no_memory(outputs: usize, inputs: usize) -> Error {
    Error::Memory(format!("a packed weight of {:?}", (outputs, inputs)))
}

/// [`PackedWeight::unpack_rows`], compiled once.
pub(super) fn unpack_rows<E: Number>(weight: &PackedWeight, outputs: &[usize]) -> Result<Vec<E>, Error> {
    let &PackedWeight { inputs, format, .. } = weight;
    if E::DTYPE != format.dtype() {
        return Err(Error::Shape(format!("expected a weight of {:?}, found {format:?}", E::DTYPE)));
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

impl PackedWeight {
    /// # Safety
    /// The output exists, and E is the type that its numbers are unpacked as.
    unsafe fn unpack_row<E: Number>(&self, output: usize, row: &mut [E]) {
        let (panel, column) = (output / self.panel, output % self.panel);
        for (index, numbers) in row.chunks_mut(self.format.step()).enumerate() {
            let at = self.at(panel, index * self.format.step());
            // SAFETY: the step's numbers lie within the panel, by this method's contract.
            unsafe {
                match self.format {
                    Format::Elements(_) => {
                        let own = at.cast::<E>().add(column * self.format.step());
                        numbers.iter_mut().enumerate().for_each(|(at, number)| *number = *own.add(at));
                    }
                    Format::Codes { bits, has_minimums } => {
                        let scales = at.cast::<f16>().add(column);
                        let scale = (*scales).to_f32();
                        let minimum = match has_minimums {
                            true => (*scales.add(self.panel)).to_f32(),
                            false => scale * -f32::from(1u8 << (bits - 1)),
                        };
                        let words = at.cast::<f16>().add(self.panel << u32::from(has_minimums)).cast::<u32>();
                        for (at, number) in numbers.iter_mut().enumerate() {
                            let word = *words.add(at * bits / 32 * self.panel + column);
                            let code = word >> (at * bits % 32) & ((1 << bits) - 1);
                            // The product is exact.
                            *number = E::from_f32(code as f32 * scale + minimum);
                        }
                    }
                }
            }
        }
    }
}
