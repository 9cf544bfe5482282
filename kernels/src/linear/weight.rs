//! A weight in the order in which products read it.

use std::fmt;
use std::ops::Range;

use half::f16;

use super::pack::PackPanel;
use crate::cpu::{
    Bf16Pairs, Columns, F16Rows, Kernel, Product, Scratch, SharedPtr, SimdTask, Tier, Vector, Words, Workers,
    for_each_task,
};
use crate::element::{Dtype, Kernels};
use crate::error::{check_len, check_tier};
use crate::{Element, Error};

/// A weight (out, in) as panels of outputs, for [`project`](super::project). Each panel is (in, panel), so that the sums of
/// its outputs are the lanes of vectors, and is read from its beginning to its end, for one row of input or for thousands.
pub struct PackedWeight {
    words: Scratch,
    /// bf16 is stored as pairs of neighbouring inputs, whether the tier multiplies them as they are or widens them: both take
    /// one instruction.
    dtype: Dtype,
    tier: Tier,
    inputs: usize,
    outputs: usize,
    /// The outputs of a panel; the last one is filled up with zeros.
    panel: usize,
    /// The inputs of a panel; the last ones are zeros where a product takes more than there are.
    padded: usize,
}

impl fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}, {:?}, {}", self.outputs, self.inputs, self.dtype, self.tier)
    }
}

impl PackedWeight {
    /// Packs `rows`, a contiguous matrix of shape (out, in), for products on a tier.
    ///
    /// # Errors
    /// [`Error::Shape`] if `rows` has another length, [`Error::Tier`] if the processor lacks the tier, [`Error::Memory`] if
    /// there is none for a copy.
    ///
    /// ```
    /// use candle_attention_kernels::{Tier, linear::PackedWeight};
    ///
    /// let weight = PackedWeight::new(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (3, 2), Tier::Scalar)?;
    /// assert_eq!((weight.outputs(), weight.inputs()), (3, 2));
    /// assert_eq!(weight.unpack::<f32>()?, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    /// # Ok::<(), candle_attention_kernels::Error>(())
    /// ```
    pub fn new<E: Element>(rows: &[E], shape: (usize, usize), tier: Tier) -> Result<Self, Error> {
        let (outputs, inputs) = shape;
        check_tier(tier)?;
        match outputs.checked_mul(inputs) {
            Some(count) => check_len("the weight", rows.len(), count)?,
            None => return Err(no_memory(outputs, inputs)),
        }
        E::pack(rows, outputs, inputs, tier).ok_or_else(|| no_memory(outputs, inputs))
    }

    /// The rows as they were packed, (out, in).
    ///
    /// # Errors
    /// [`Error::Shape`] if E is not the type that was packed, [`Error::Memory`] if there is none for the rows.
    pub fn unpack<E: Element>(&self) -> Result<Vec<E>, Error> {
        if E::DTYPE != self.dtype {
            return Err(Error::Shape(format!("expected a weight of {:?}, found {:?}", E::DTYPE, self.dtype)));
        }
        E::unpack(self).ok_or_else(|| no_memory(self.outputs, self.inputs))
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
        self.dtype == Dtype::BF16
    }

    /// Whether products can take both weights' panels together.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let layout = |weight: &Self| (weight.outputs, weight.inputs, weight.dtype, weight.tier);
        layout(self) == layout(other)
    }

    /// The bytes of so many outputs.
    pub(super) fn bytes(&self, outputs: usize) -> usize {
        outputs * self.padded / elements_of_word(self.dtype) * size_of::<f32>()
    }

    /// Whether products with so many rows take words that were widened before.
    pub(super) fn is_widened<K: Kernel>(&self, rows: usize) -> bool {
        let is_few = rows <= 2 * K::ROWS && self.panel == K::PANEL;
        K::ELEMENTS == 1 && self.dtype != Dtype::F32 && !is_few
    }

    /// The outputs of one of the panels.
    pub(super) fn columns_of(&self, panel: usize) -> Range<usize> {
        panel * self.panel..self.outputs.min((panel + 1) * self.panel)
    }

    /// A product with `product.depth` words of inputs from `first` of a panel. Words of the kernel's own are read in
    /// place, others widened to f32: while they are loaded for up to two tiles of rows, before many into `widened`,
    /// which takes as many rows of [`K::PANEL`](Kernel::PANEL) then ([`is_widened`](Self::is_widened)).
    ///
    /// # Safety
    /// As [`Kernel::multiply`] but for B; the panel exists; the inputs lie within [`padded`](Self::padded), and `first` is even.
    #[inline(always)]
    pub(super) unsafe fn multiply<K: Kernel>(
        &self,
        panel: usize,
        first: usize,
        widened: *mut f32,
        mut product: Product,
    ) {
        let from = panel * self.padded * self.panel + first * self.panel;
        let is_widened = self.is_widened::<K>(product.rows);
        // SAFETY: as this method's contract; the panel's inputs from `first` on are valid for the depth of the product.
        unsafe {
            match self.dtype {
                Dtype::F32 => product.b = self.words.as_ptr().add(from),
                Dtype::BF16 => product.b = self.words.as_ptr().add(from / 2),
                Dtype::F16 => product.b = self.words.as_ptr().cast::<f16>().add(from).cast(),
            }
            // Pairs that the kernel multiplies, or f32.
            if K::ELEMENTS == 2 || self.dtype == Dtype::F32 {
                return K::multiply::<Words>(&product);
            }
            match (self.dtype, is_widened) {
                (Dtype::BF16, false) => return K::F32::multiply::<Bf16Pairs>(&product),
                (_, false) => return K::F32::multiply::<F16Rows>(&product),
                (Dtype::BF16, true) => self.widen::<K, Bf16Pairs>(&mut product, widened),
                (_, true) => self.widen::<K, F16Rows>(&mut product, widened),
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
        for step in (0..product.depth).step_by(B::STEPS) {
            for column in (0..self.panel).step_by(K::Vector::LANES) {
                // SAFETY: as this method's contract.
                unsafe {
                    let columns = B::load::<K::Vector>(from, column);
                    for (at, vector) in columns.into_iter().take(B::STEPS).enumerate() {
                        vector.store(to.add((step + at) * K::PANEL + column));
                    }
                }
            }
            from = B::next(from, self.panel);
        }
        product.b = to;
    }
}

fn no_memory(outputs: usize, inputs: usize) -> Error {
    Error::Memory(format!("a packed weight of {:?}", (outputs, inputs)))
}

/// Elements in 32 bits.
pub(super) const fn elements_of_word(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 1,
        Dtype::BF16 | Dtype::F16 => 2,
    }
}

/// `rows` are as many as the shape says; `None` where there is no memory for them.
pub(crate) fn pack_weight<E: Kernels>(rows: &[E], outputs: usize, inputs: usize, tier: Tier) -> Option<PackedWeight> {
    struct Pack<'a, E> {
        rows: &'a [E],
        weight: PackedWeight,
        packed: &'a mut Option<PackedWeight>,
    }
    impl<E: Kernels> SimdTask for Pack<'_, E> {
        unsafe fn run<K: Kernel>(self) {
            // Pairs are whole, and a tier may take more.
            let (step, panel) = (K::ELEMENTS * K::DEPTH, K::PANEL);
            let step = if E::DTYPE == Dtype::BF16 { step.max(2) } else { step };
            let padded = self.weight.inputs.next_multiple_of(step);
            let weight = PackedWeight { panel, padded, ..self.weight };
            // SAFETY: the processor has the tier of K, which includes that of its kernel for f32.
            *self.packed = unsafe { weight.fill::<K::F32, E>(self.rows) };
        }
    }
    let words = Scratch::zeros(0);
    let weight = PackedWeight { words, dtype: E::DTYPE, tier, inputs, outputs, panel: 0, padded: 0 };
    let mut packed = None;
    E::dispatch(tier, Pack { rows, weight, packed: &mut packed });
    packed
}

impl PackedWeight {
    /// Copies the rows into panels; `None` where there is no memory for them.
    ///
    /// # Safety
    /// The processor has the tier of K.
    unsafe fn fill<K: Kernel, E: Kernels>(mut self, rows: &[E]) -> Option<Self> {
        let Self { inputs, outputs, panel, padded, .. } = self;
        let panels = outputs.div_ceil(panel);
        panels.checked_mul(padded)?.checked_mul(panel)?.checked_mul(size_of::<f32>())?;
        let each = padded * panel / elements_of_word(E::DTYPE);
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

/// The rows of a weight of E; `None` where there is no memory for them.
pub(crate) fn unpack_weight<E: Kernels>(weight: &PackedWeight) -> Option<Vec<E>> {
    let &PackedWeight { dtype, inputs, outputs, panel, padded, .. } = weight;
    let mut rows = Vec::new();
    rows.try_reserve_exact(outputs * inputs).ok()?;
    rows.resize(outputs * inputs, E::default());
    let to = SharedPtr(rows.as_mut_ptr());
    let tasks = if inputs == 0 { 0 } else { outputs.div_ceil(panel) };
    for_each_task(
        tasks,
        Workers::of(outputs * inputs, 0, None),
        || (),
        |(), index| {
            for output in weight.columns_of(index) {
                for input in 0..inputs {
                    let from = index * padded * panel + position(dtype, panel, input, output % panel);
                    // SAFETY: the positions lie within the panels and the rows, of which these are this task's.
                    unsafe { *to.add(output * inputs + input) = *weight.words.as_ptr().cast::<E>().add(from) };
                }
            }
        },
    );
    Some(rows)
}

/// The position of an element in a panel, in elements.
fn position(dtype: Dtype, panel: usize, input: usize, column: usize) -> usize {
    match dtype {
        Dtype::F32 | Dtype::F16 => input * panel + column,
        Dtype::BF16 => (input / 2 * panel + column) * 2 + input % 2,
    }
}
