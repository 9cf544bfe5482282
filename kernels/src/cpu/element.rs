//! The types that tensors hold.

use half::{bf16, f16};

use super::vector::Vector;

/// f32, bf16 or f16: read as f32, written from f32.
pub trait Element: Copy + Default + Send + Sync + 'static {
    /// Whether a product over pairs of bf16 can read the element as it is.
    const IS_BF16: bool = false;

    fn from_f32(x: f32) -> Self;

    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load<V: Vector>(from: *const Self) -> V;

    /// # Safety
    /// As [`Vector::store`].
    unsafe fn store<V: Vector>(vector: V, to: *mut Self);
}

impl Element for f32 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        x
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load(from) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(vector: V, to: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { vector.store(to) }
    }
}

impl Element for bf16 {
    const IS_BF16: bool = true;

    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        bf16::from_f32(x)
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise; bf16 is its bits.
        unsafe { V::load_bf16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(vector: V, to: *mut Self) {
        // SAFETY: the caller's promise; bf16 is its bits.
        unsafe { vector.store_bf16(to.cast()) }
    }
}

impl Element for f16 {
    #[inline(always)]
    fn from_f32(x: f32) -> Self {
        f16::from_f32(x)
    }

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: the caller's promise; f16 is its bits.
        unsafe { V::load_f16(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store<V: Vector>(vector: V, to: *mut Self) {
        // SAFETY: the caller's promise; f16 is its bits.
        unsafe { vector.store_f16(to.cast()) }
    }
}

/// The most lanes that a vector of any tier has.
pub(crate) const MOST_LANES: usize = 16;

/// The first `n` lanes, the others 0.
///
/// # Safety
/// As [`Vector::load`], with `n` elements, at most `LANES`.
#[inline(always)]
pub(crate) unsafe fn load_first<E: Element, V: Vector>(from: *const E, n: usize) -> V {
    // SAFETY: the caller's promise.
    unsafe {
        if n == V::LANES {
            return E::load(from);
        }
        let mut whole = [E::default(); MOST_LANES];
        std::ptr::copy_nonoverlapping(from, whole.as_mut_ptr(), n);
        E::load(whole.as_ptr())
    }
}

/// Stores the first `n` lanes.
///
/// # Safety
/// As [`Vector::store`], with `n` elements, at most `LANES`.
#[inline(always)]
pub(crate) unsafe fn store_first<E: Element, V: Vector>(vector: V, to: *mut E, n: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        if n == V::LANES {
            return E::store(vector, to);
        }
        let mut whole = [E::default(); MOST_LANES];
        E::store(vector, whole.as_mut_ptr());
        std::ptr::copy_nonoverlapping(whole.as_ptr(), to, n);
    }
}
