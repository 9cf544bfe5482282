//! A weight in the order in which products read it.

use std::ops::Range;

use half::{bf16, f16};

use super::pack::PackPanel;
use crate::Scalar;
use crate::cpu::{
    Bf16Pairs, Element, F16Rows, ForKernel, Kernel, Narrow, Product, Scratch, Tier, Vector, Workers, filled,
    for_each_task, on_kernel,
};

/// The type of a weight's elements, which decides how they are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    F32,
    /// Pairs of neighbouring inputs, whether the tier multiplies them as they are or widens them: both take an instruction.
    Bf16,
    F16,
}

impl Kind {
    /// Elements in 32 bits.
    pub fn elements_of_word(self) -> usize {
        match self {
            Self::F32 => 1,
            Self::Bf16 | Self::F16 => 2,
        }
    }
}

/// (out, in) as panels of outputs: each is (in, panel), so that the sums of a panel's outputs are the lanes of vectors and
/// the panel is read from its beginning to its end, whether for one row of input or for thousands.
pub struct PackedWeight {
    words: Scratch,
    pub kind: Kind,
    /// The tier that the panel is as wide as.
    pub tier: Tier,
    pub inputs: usize,
    pub outputs: usize,
    /// The outputs of a panel; the last one is filled up with zeros.
    pub panel: usize,
    /// The inputs of a panel; the last ones are zeros where a product takes more than there are.
    pub padded: usize,
}

impl PackedWeight {
    /// Packs rows of `inputs` elements, an output each; `None` where there is no memory for them.
    pub fn new<E: Scalar>(rows: &[E], shape: (usize, usize), tier: Tier) -> Option<Self> {
        E::pack(rows, shape, tier)
    }

    pub(crate) fn new_generic<E: Packable>(rows: &[E], (outputs, inputs): (usize, usize), tier: Tier) -> Option<Self> {
        assert_eq!(rows.len(), outputs * inputs);
        struct Pack<'a, E> {
            rows: &'a [E],
            outputs: usize,
            inputs: usize,
            tier: Tier,
            packed: &'a mut Option<PackedWeight>,
        }
        impl<E: Packable> ForKernel for Pack<'_, E> {
            unsafe fn run<K: Kernel>(self) {
                // SAFETY: the caller's promise.
                *self.packed = unsafe { PackedWeight::pack::<K, E>(self.rows, (self.outputs, self.inputs), self.tier) };
            }
        }
        let mut packed = None;
        on_kernel(tier, E::KIND == Kind::Bf16, Pack { rows, outputs, inputs, tier, packed: &mut packed });
        packed
    }

    /// # Safety
    /// As [`Kernel`].
    unsafe fn pack<K: Kernel, E: Packable>(
        rows: &[E],
        (outputs, inputs): (usize, usize),
        tier: Tier,
    ) -> Option<PackedWeight> {
        let (kind, panel) = (E::KIND, K::PANEL);
        // Pairs are whole, and a tier may take more.
        let step = K::ELEMENTS * K::DEPTH;
        let padded = inputs.next_multiple_of(if kind == Kind::Bf16 { step.max(2) } else { step });
        let panels = outputs.div_ceil(panel);
        panels.checked_mul(padded)?.checked_mul(panel)?.checked_mul(size_of::<f32>())?;
        let each = padded * panel / kind.elements_of_word();
        let pack = |words: *mut f32| {
            let words = Shared(words);
            let tasks = if each == 0 { 0 } else { panels };
            for_each_task(
                tasks,
                Workers::of(rows.len()),
                || (),
                |(), index| {
                    let own = index * panel * inputs..outputs.min((index + 1) * panel) * inputs;
                    // SAFETY: the caller's promise; the panel is this task's.
                    unsafe {
                        let to = words.at(index * each);
                        K::vectorize(PackPanel { rows: &rows[own], inputs, to, padded, panel });
                    }
                },
            );
        };
        // SAFETY: every panel is written from its beginning to its end.
        let words = unsafe { Scratch::written(panels * each, pack) }?;
        Some(Self { words, kind, tier, inputs, outputs, panel, padded })
    }

    /// The rows as they were packed; `None` where there is no memory for them.
    pub fn unpack<E: Scalar>(&self) -> Option<Vec<E>> {
        E::unpack(self)
    }

    pub(crate) fn unpack_generic<E: Element>(&self) -> Option<Vec<E>> {
        let &Self { inputs, outputs, panel, padded, .. } = self;
        let mut rows = filled(outputs.checked_mul(inputs)?, E::default())?;
        let to = Shared(rows.as_mut_ptr());
        let tasks = if inputs == 0 { 0 } else { outputs.div_ceil(panel) };
        for_each_task(
            tasks,
            Workers::of(outputs * inputs),
            || (),
            |(), index| {
                for output in self.columns_of(index) {
                    for input in 0..inputs {
                        let from = index * padded * panel + position(self.kind, panel, input, output % panel);
                        // SAFETY: the positions lie within the panels and the rows, of which these are this task's.
                        unsafe { *to.at(output * inputs + input) = *self.words.as_ptr().cast::<E>().add(from) };
                    }
                }
            },
        );
        Some(rows)
    }

    /// The outputs of a panel.
    pub fn columns_of(&self, panel: usize) -> Range<usize> {
        panel * self.panel..self.outputs.min((panel + 1) * self.panel)
    }

    /// Whether a product with inputs of a type is one of pairs of bf16, where the tier has them.
    pub fn multiplies_pairs<X: Element>(&self) -> bool {
        X::IS_BF16 && self.kind == Kind::Bf16
    }

    /// A product with `product.depth` words of inputs from `first` of a panel; `room` takes as many rows of
    /// [`K::PANEL`](Kernel::PANEL). Words of the kernel's own are read in place, others widened to f32: on their way into
    /// registers for up to two tiles of rows, into `room` before many.
    ///
    /// # Safety
    /// As [`Kernel`]; the panel exists; the inputs lie within [`padded`](Self::padded), and `first` is even.
    #[inline(always)]
    pub(super) unsafe fn multiply<K: Kernel>(
        &self,
        (panel, first): (usize, usize),
        room: *mut f32,
        mut product: Product,
    ) {
        let from = panel * self.padded * self.panel + first * self.panel;
        let is_few = product.rows <= 2 * K::ROWS && self.panel == K::PANEL;
        // SAFETY: the caller's promise.
        unsafe {
            match self.kind {
                Kind::F32 => product.b = self.words.as_ptr().add(from),
                Kind::Bf16 => {
                    product.b = self.words.as_ptr().add(from / 2);
                    if K::ELEMENTS == 1 && is_few {
                        return K::multiply_narrow::<Bf16Pairs>(&product);
                    } else if K::ELEMENTS == 1 {
                        self.widen::<K, Bf16Pairs>(&mut product, room);
                    }
                }
                Kind::F16 => {
                    product.b = self.words.as_ptr().cast::<f16>().add(from).cast();
                    if is_few {
                        return K::multiply_narrow::<F16Rows>(&product);
                    }
                    self.widen::<K, F16Rows>(&mut product, room);
                }
            }
            K::multiply(&product);
        }
    }

    /// Puts a product's columns into `room` as f32.
    ///
    /// # Safety
    /// As [`multiply`](Self::multiply).
    #[inline(always)]
    unsafe fn widen<K: Kernel, B: Narrow>(&self, product: &mut Product, room: *mut f32) {
        let mut from = product.b;
        for step in (0..product.depth).step_by(B::STEPS) {
            for column in (0..self.panel).step_by(K::Vector::LANES) {
                // SAFETY: the caller's promise.
                unsafe {
                    let columns = B::load::<K::Vector>(from, column);
                    for (at, vector) in columns.into_iter().take(B::STEPS).enumerate() {
                        vector.store(room.add((step + at) * K::PANEL + column));
                    }
                }
            }
            from = B::next(from, self.panel);
        }
        product.b = room;
    }
}

/// Where an element of a panel is, in elements.
fn position(kind: Kind, panel: usize, input: usize, column: usize) -> usize {
    match kind {
        Kind::F32 | Kind::F16 => input * panel + column,
        Kind::Bf16 => (input / 2 * panel + column) * 2 + input % 2,
    }
}

/// A place in memory of which every task writes parts of its own.
pub(super) struct Shared<E>(pub *mut E);

// SAFETY: tasks write disjoint parts.
unsafe impl<E: Send> Sync for Shared<E> {}

impl<E> Shared<E> {
    /// # Safety
    /// As [`pointer::add`].
    pub unsafe fn at(&self, at: usize) -> *mut E {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(at) }
    }
}

/// Elements that can be packed.
pub trait Packable: Element {
    const KIND: Kind;
}

impl Packable for f32 {
    const KIND: Kind = Kind::F32;
}

impl Packable for bf16 {
    const KIND: Kind = Kind::Bf16;
}

impl Packable for f16 {
    const KIND: Kind = Kind::F16;
}
