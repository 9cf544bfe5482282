//! What one instruction set provides, and how a call reaches it.

use super::product::{Columns, Product};
use super::vector::Vector;
use super::{Tier, arch};

/// What a tier does for one type of operand. Matrices consist of 32-bit words: an f32, or a pair of bf16 along the
/// depth of the product, so that one description serves both.
///
/// # Safety
/// Every method needs a processor that has the tier's instructions.
pub trait Kernel {
    /// The tier's vector of f32.
    type Vector: Vector;
    /// The tier's kernel for words of one f32: itself, or the one that shares its vectors. A processor that has the
    /// tier has that kernel's too.
    type F32: Kernel<Vector = Self::Vector>;
    /// What [`configure_tiles`](Self::configure_tiles) returns.
    type Tiles;
    /// Elements in a word: 1 for f32, 2 for bf16.
    const ELEMENTS: usize;
    /// Whether a word is a pair of bf16. A branch on one constant, as this one or a `const` block, that is not taken is
    /// not compiled for the kernel.
    const IS_BF16: bool = Self::ELEMENTS == 2;
    /// The rows of a group of A, which a register tile takes at once.
    const ROWS: usize;
    /// The rows of A and C come in multiples of this; what is left of a group takes smaller tiles.
    const MIN_ROWS: usize = 1;
    /// The words of depth come in multiples of this.
    const DEPTH: usize = 1;
    /// The vectors of a panel's columns.
    const VECTORS: usize;
    /// The columns of a panel, at most [`MAX_COLUMNS`](super::MAX_COLUMNS).
    const PANEL: usize = Self::VECTORS * <Self::Vector as Vector>::LANES;

    /// The keys that are scored before the next softmax; a multiple of `ROWS`, and of `DEPTH` words.
    const BLOCK: usize = 128;

    /// Two vectors as pairs of bf16, `low` in the lower half of each word.
    ///
    /// # Safety
    /// The processor has the tier, and `to` is valid for writes of a vector of words.
    unsafe fn store_pairs(_low: Self::Vector, _high: Self::Vector, _to: *mut f32) {
        unreachable!("a word of this kernel is one element")
    }

    /// A vector as bf16, one after the other: half as many words.
    ///
    /// # Safety
    /// The processor has the tier, and `to` is valid for writes of half a vector of words.
    unsafe fn store_halves(_vector: Self::Vector, _to: *mut f32) {
        unreachable!("a word of this kernel is one element")
    }

    /// Sets up tile registers for products on this thread, until the result is dropped. Tasks that call
    /// [`multiply`](Self::multiply) do this first.
    ///
    /// # Safety
    /// The processor has the tier.
    unsafe fn configure_tiles() -> Self::Tiles;

    /// Runs a task in a function that is compiled for the tier's instructions.
    ///
    /// # Safety
    /// The processor has the tier.
    unsafe fn run_simd(task: impl SimdTask);

    /// `C = A B`, or `C = C · factors + A B`. B is [`Words`](super::Words) where a word is two elements, else it may be
    /// narrower and is widened while it is loaded.
    ///
    /// # Safety
    /// The processor has the tier, its tiles are configured, and the product's pointers are valid for its sizes.
    unsafe fn multiply<B: Columns>(product: &Product);
}

/// Work that is written once and compiled for each kernel. `run` is `#[inline(always)]` where it computes, so that it
/// becomes part of a function that is compiled for the tier.
pub trait SimdTask {
    /// # Safety
    /// The processor has the tier of K.
    unsafe fn run<K: Kernel>(self);
}

/// What every [`Kernel`] of a set of instructions has: functions that are compiled for them. `run_simd` is not inlined,
/// so that a task is compiled once, wherever it is started.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! compiled_for {
    ($features:literal, |$product:ident, $columns:ident| $multiply:expr) => {
        unsafe fn run_simd(task: impl crate::cpu::SimdTask) {
            #[inline(never)]
            #[target_feature(enable = $features)]
            unsafe fn compiled<K: crate::cpu::Kernel>(task: impl crate::cpu::SimdTask) {
                // SAFETY: the processor has the tier, whose instructions this function is compiled for.
                unsafe { task.run::<K>() }
            }
            // SAFETY: the processor has the tier, by the contract of `run_simd`.
            unsafe { compiled::<Self>(task) }
        }

        unsafe fn multiply<B: crate::cpu::Columns>($product: &crate::cpu::Product) {
            #[target_feature(enable = $features)]
            unsafe fn compiled<$columns: crate::cpu::Columns>($product: &crate::cpu::Product) {
                // SAFETY: by the contract of `multiply`, for whose tier this function is compiled.
                unsafe { $multiply }
            }
            // SAFETY: the processor has the tier and the product is valid, by the contract of `multiply`.
            unsafe { compiled::<B>($product) }
        }
    };
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use compiled_for;

/// Runs a task on a tier's kernel for words of one f32.
///
/// # Panics
/// If the processor lacks the tier.
pub(crate) fn dispatch_f32(tier: Tier, task: impl SimdTask) {
    assert!(tier.is_available(), "the processor lacks the CPU tier {tier}");
    // SAFETY: the processor has the tier, and each of the wider ones includes what its match arm runs.
    unsafe {
        match tier {
            Tier::Scalar => task.run::<arch::scalar::Scalar>(),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx2 => task.run::<arch::avx2::Avx2>(),
            #[cfg(target_arch = "x86_64")]
            Tier::Avx512 | Tier::Avx512Bf16 | Tier::Amx => task.run::<arch::avx512::Avx512>(),
            #[cfg(target_arch = "aarch64")]
            Tier::Neon | Tier::NeonBf16 => task.run::<arch::neon::Neon>(),
            _ => unreachable!("tiers of other processors are not available"),
        }
    }
}

/// Runs a task on a tier's kernel for pairs of bf16, or for f32 if it has none.
///
/// # Panics
/// If the processor lacks the tier.
pub(crate) fn dispatch_bf16(tier: Tier, task: impl SimdTask) {
    assert!(tier.is_available(), "the processor lacks the CPU tier {tier}");
    match tier {
        // SAFETY: the processor has the tier.
        #[cfg(target_arch = "x86_64")]
        Tier::Avx512Bf16 => unsafe { task.run::<arch::avx512::Avx512Bf16>() },
        // SAFETY: the processor has the tier.
        #[cfg(target_arch = "x86_64")]
        Tier::Amx => unsafe { task.run::<arch::amx::Amx>() },
        // SAFETY: the processor has the tier.
        #[cfg(target_arch = "aarch64")]
        Tier::NeonBf16 => unsafe { task.run::<arch::neon::NeonBf16>() },
        _ => dispatch_f32(tier, task),
    }
}
