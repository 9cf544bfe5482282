//! A weight in the order in which products read it.

use std::fmt;

use half::f16;

use super::format::Format;
use super::pack::PackPanel;
use crate::cpu::{
    Bf16Pairs, CodeBlocks, Columns, F16Rows, Kernel, Product, Scratch, SharedPtr, SimdTask, Tier, Vector, Words,
    Workers, for_each_task,
};
use crate::error::{Error, check_len, check_tier};
use crate::linear::ProductKernels;
use crate::number::{Dtype, Number};

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
        let (outputs, inputs) = shape;
        check_tier(tier)?;
        match outputs.checked_mul(inputs) {
            Some(count) => check_len("the weight", rows.len(), count)?,
            None => return Err(no_memory(outputs, inputs)),
        }
        E::pack(&WeightRows { rows, outputs, inputs, tier }).ok_or_else(|| no_memory(outputs, inputs))
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
        if E::DTYPE != self.format.dtype() {
            return Err(Error::Shape(format!("expected a weight of {:?}, found {:?}", E::DTYPE, self.format)));
        }
        if let Some(output) = outputs.iter().find(|&&output| output >= self.outputs) {
            return Err(Error::Shape(format!("expected outputs below {}, found {output}", self.outputs)));
        }
        E::unpack(&WeightOutputs { weight: self, outputs }).ok_or_else(|| no_memory(outputs.len(), self.inputs))
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

    /// The outputs of a panel.
    pub(super) fn panel(&self) -> usize {
        self.panel
    }

    /// The inputs of a panel, the last of which may be zeros.
    pub(super) fn padded(&self) -> usize {
        self.padded
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
        K::ELEMENTS == 1 && self.format != Format::Elements(Dtype::F32) && !is_few
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
        let is_widened = self.is_widened::<K>(product.rows);
        product.b = self.at(panel, first);
        // SAFETY: as this method's contract; the panel's inputs from `first` on are valid for the depth of the product.
        unsafe {
            match (self.format, is_widened) {
                (Format::Elements(Dtype::F32), _) => {}
                // Pairs that the kernel multiplies.
                (Format::Elements(Dtype::BF16), _) if K::ELEMENTS == 2 => {}
                (Format::Elements(Dtype::BF16), false) => return K::F32::multiply::<Bf16Pairs>(&product),
                (Format::Elements(Dtype::F16), false) => return K::F32::multiply::<F16Rows>(&product),
                (Format::Codes { bits: 4, .. }, false) => return K::F32::multiply::<CodeBlocks<4>>(&product),
                (Format::Codes { .. }, false) => return K::F32::multiply::<CodeBlocks<8>>(&product),
                (Format::Elements(Dtype::BF16), true) => self.widen::<K, Bf16Pairs>(&mut product, widened),
                (Format::Elements(Dtype::F16), true) => self.widen::<K, F16Rows>(&mut product, widened),
                (Format::Codes { bits: 4, .. }, true) => self.widen::<K, CodeBlocks<4>>(&mut product, widened),
                (Format::Codes { .. }, true) => self.widen::<K, CodeBlocks<8>>(&mut product, widened),
            }
            K::multiply::<Words>(&product);
        }
    }

    /// Puts a product's columns into `to` as f32.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply), with B.
    #[inline(always)]
    unsafe fn widen<K: Kernel, B: Columns>(&self, product: &mut Product, to: *mut f32) {
        let mut from = product.b;
        for first in (0..product.depth).step_by(B::BLOCK) {
            let numbers = B::numbers(from, self.panel, product.has_minimums);
            for column in (0..self.panel).step_by(K::Vector::LANES) {
                // SAFETY: as this method's contract.
                unsafe {
                    let scales = B::scales::<K::Vector>(from, self.panel, column, product.has_minimums);
                    let mut words = numbers;
                    for step in (first..first + B::BLOCK).step_by(B::STEPS) {
                        let mut loaded = B::load::<K::Vector>(words, column);
                        for step in step..step + B::STEPS {
                            B::take(&mut loaded, scales).store(to.add(step * K::PANEL + column));
                        }
                        words = B::next(words, self.panel);
                    }
                }
            }
            from = (0..B::BLOCK / B::STEPS).fold(numbers, |words, _| B::next(words, self.panel));
        }
        product.b = to;
    }
}

/// Squares whose rows are inputs and whose columns are outputs, for products with the outputs. `output` is a multiple
/// of the columns, so that these belong to one panel.
impl PackedWeight {
    /// A square of f32 where it is, its rows a panel apart; `None` where its words are others, or some are missing.
    pub(super) fn square_in_place(&self, output: usize, input: usize, size: usize) -> Option<*const f32> {
        let is_f32 = self.format == Format::Elements(Dtype::F32);
        let is_whole = is_f32 && output < self.outputs && input + size <= self.padded;
        is_whole.then(|| self.at(output / self.panel, input).wrapping_add(output % self.panel))
    }

    /// LANES inputs from `input`, each a vector of outputs as f32; zeros where there are none.
    ///
    /// # Safety
    /// The processor has the tier of V, `input` is a multiple of LANES, and `to` takes LANES vectors.
    #[inline(always)]
    pub(super) unsafe fn widened_rows<V: Vector>(&self, output: usize, input: usize, to: *mut f32) {
        // SAFETY: as this method's contract.
        unsafe {
            to.write_bytes(0, V::LANES * V::LANES);
            match self.format {
                _ if output >= self.outputs => {}
                Format::Elements(Dtype::F32) => self.rows_of::<V, Words>(output, input, to),
                Format::Elements(Dtype::BF16) => self.rows_of::<V, Bf16Pairs>(output, input, to),
                Format::Elements(Dtype::F16) => self.rows_of::<V, F16Rows>(output, input, to),
                Format::Codes { bits: 4, .. } => self.rows_of::<V, CodeBlocks<4>>(output, input, to),
                Format::Codes { .. } => self.rows_of::<V, CodeBlocks<8>>(output, input, to),
            }
        }
    }

    /// # Safety
    /// As [`widened_rows`](Self::widened_rows); the weight has the output, and is stored as B.
    #[inline(always)]
    unsafe fn rows_of<V: Vector, B: Columns>(&self, output: usize, input: usize, to: *mut f32) {
        let (panel, column, has_minimums) = (output / self.panel, output % self.panel, self.has_minimums());
        let wanted = input..self.padded.min(input + V::LANES);
        for first in (input / B::BLOCK * B::BLOCK..wanted.end).step_by(B::BLOCK) {
            let block = self.at(panel, first);
            // SAFETY: as this method's contract; the block lies within the panel, and a wanted row within `to`.
            unsafe {
                let scales = B::scales::<V>(block, self.panel, column, has_minimums);
                let mut words = B::numbers(block, self.panel, has_minimums);
                for step in (first..first + B::BLOCK).step_by(B::STEPS) {
                    let mut loaded = B::load::<V>(words, column);
                    for step in step..step + B::STEPS {
                        let numbers = B::take(&mut loaded, scales);
                        if wanted.contains(&step) {
                            numbers.store(to.add((step - input) * V::LANES));
                        }
                    }
                    words = B::next(words, self.panel);
                }
            }
        }
    }

    /// LANES pairs of inputs from `input`, each a vector of words of as many outputs; zeros where there are none.
    ///
    /// # Safety
    /// The weight is of bf16, the processor has the tier of V, `input` is even, and `to` takes LANES vectors.
    #[inline(always)]
    pub(super) unsafe fn pair_rows<V: Vector>(&self, output: usize, input: usize, to: *mut f32) {
        let filled = if output < self.outputs { V::LANES.min((self.padded - input) / 2) } else { 0 };
        // SAFETY: as this method's contract; the rows that are read lie within a panel.
        unsafe {
            to.add(filled * V::LANES).write_bytes(0, (V::LANES - filled) * V::LANES);
            for row in 0..filled {
                let from = self.at(output / self.panel, input + 2 * row).wrapping_add(output % self.panel);
                V::load(from).store(to.add(row * V::LANES));
            }
        }
    }
}

pub(super) fn no_memory(outputs: usize, inputs: usize) -> Error {
    Error::Memory(format!("a packed weight of {:?}", (outputs, inputs)))
}

/// Rows that are as many as the shape (out, in) says, and the tier that is to multiply them.
pub struct WeightRows<'a, E> {
    rows: &'a [E],
    outputs: usize,
    inputs: usize,
    tier: Tier,
}

/// Some outputs that a weight has, which are to be unpacked as what [`Format::dtype`] says.
pub struct WeightOutputs<'a> {
    weight: &'a PackedWeight,
    outputs: &'a [usize],
}

/// `None` where there is no memory for a copy.
pub(crate) fn pack_weight<E: Number>(rows: &WeightRows<E>) -> Option<PackedWeight> {
    struct Pack<'a, E> {
        rows: &'a [E],
        weight: PackedWeight,
        packed: &'a mut Option<PackedWeight>,
    }
    impl<E: Number> SimdTask for Pack<'_, E> {
        unsafe fn run<K: Kernel>(self) {
            // Steps are whole, and a tier may take more.
            let panel = K::PANEL;
            let step = (K::ELEMENTS * K::DEPTH).max(self.weight.format.step());
            let padded = self.weight.inputs.next_multiple_of(step);
            let weight = PackedWeight { panel, padded, ..self.weight };
            // SAFETY: the processor has the tier of K, which includes that of its kernel for f32.
            *self.packed = unsafe { weight.fill::<K::F32, E>(self.rows) };
        }
    }
    let &WeightRows { rows, outputs, inputs, tier } = rows;
    let words = Scratch::zeros(0);
    let weight = PackedWeight { words, format: Format::Elements(E::DTYPE), tier, inputs, outputs, panel: 0, padded: 0 };
    let mut packed = None;
    E::dispatch(tier, Pack { rows, weight, packed: &mut packed });
    packed
}

impl PackedWeight {
    /// Copies the rows into panels; `None` where there is no memory for them.
    ///
    /// # Safety
    /// The processor has the tier of K.
    unsafe fn fill<K: Kernel, E: Number>(mut self, rows: &[E]) -> Option<Self> {
        let Self { inputs, outputs, panel, padded, .. } = self;
        let panels = outputs.div_ceil(panel);
        panels.checked_mul(padded)?.checked_mul(panel)?.checked_mul(size_of::<f32>())?;
        let each = self.format.bytes(padded) * panel / size_of::<f32>();
        let pack = |words: *mut f32| {
            let words = SharedPtr(words);
            let tasks = if each == 0 { 0 } else { panels };
            for_each_task(
                tasks,
                Workers::of(rows.len(), 0, None),
                || (),
                |(), index| {
                    let own = index * panel * inputs..outputs.min((index + 1) * panel) * inputs;
                    // SAFETY: the processor has the tier of K; the panel is this task's.
                    unsafe {
                        let to = words.add(index * each);
                        K::run_simd(PackPanel { rows: &rows[own], inputs, to, padded, panel });
                    }
                },
            );
        };
        // SAFETY: every panel is written from its beginning to its end.
        self.words = unsafe { Scratch::written(panels * each, pack) }?;
        Some(self)
    }
}

/// The rows of some outputs of a weight of E; `None` where there is no memory for them.
pub(crate) fn unpack_weight<E: Number>(rows: &WeightOutputs) -> Option<Vec<E>> {
    let &WeightOutputs { weight, outputs } = rows;
    let inputs = weight.inputs;
    let count = outputs.len().checked_mul(inputs)?;
    let mut rows = Vec::new();
    rows.try_reserve_exact(count).ok()?;
    rows.resize(count, E::default());
    let to = SharedPtr(rows.as_mut_ptr());
    let tasks = if inputs == 0 { 0 } else { outputs.len() };
    for_each_task(
        tasks,
        Workers::of(count, 0, None),
        || (),
        // SAFETY: the row is this task's.
        |(), row| unsafe { weight.unpack_row(outputs[row], to.slice(row * inputs, inputs)) },
    );
    Some(rows)
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
