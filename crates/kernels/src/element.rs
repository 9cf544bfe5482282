//! The types that tensors hold.

use half::{bf16, f16};

use crate::cpu::{MAX_LANES, SimdTask, Tier, Vector, dispatch_bf16, dispatch_f32};
use crate::flash::{self, BackwardCall, Call};
use crate::linear::{self, PackedWeight, Product, WeightOutputs, WeightRows};

/// f32, bf16 or f16: read as f32, written from f32. There are no other implementations.
pub trait Element: Kernels {}

impl<E: Kernels> Element for E {}

/// The type of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F32,
    BF16,
    F16,
}

/// What the kernels read as f32: elements, and keys and values of 8 bits.
pub trait Stored: Copy + Default + Send + Sync + 'static {
    /// Whether what is read is to be multiplied by the scale of its row.
    const IS_SCALED: bool;

    /// # Safety
    /// As [`Vector::load`].
    unsafe fn load<V: Vector>(from: *const Self) -> V;
}

/// Codes of keys and values: 128 stands for 0.
impl Stored for u8 {
    const IS_SCALED: bool = true;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: as this method's contract.
        unsafe { V::load_u8(from).sub(V::splat(128.0)) }
    }
}

/// What the algorithms need of an element, and the algorithms for it. These are compiled here, in this package: generic code
/// would be compiled again, and perhaps without optimisation, wherever it is used.
///
/// Whoever is generic over [`Element`] can name these methods. Those that trust what they are given are `unsafe`, or take
/// what nobody else can make: a call that was checked, a vector, a task.
pub trait Kernels: Stored {
    const DTYPE: Dtype;

    fn from_f32(x: f32) -> Self;

    /// # Safety
    /// As [`Vector::store`].
    unsafe fn store<V: Vector>(vector: V, to: *mut Self);

    /// Runs a task on a tier's kernel, over pairs of bf16 if this is bf16 and the tier multiplies them.
    fn dispatch(tier: Tier, task: impl SimdTask);

    fn attend(call: &Call<Self>, tier: Tier) -> Option<()>;
    fn attend_q8(call: &Call<Self, u8>, tier: Tier) -> Option<()>;
    fn attend_backward(call: &BackwardCall<Self>, tier: Tier) -> Option<()>;
    fn multiply(product: &Product<Self>);
    fn pack(rows: &WeightRows<Self>) -> Option<PackedWeight>;
    fn unpack(rows: &WeightOutputs) -> Option<Vec<Self>>;
}

/// What trusts its arguments cannot be called from outside of this package. Weights are packed and unpacked like this,
///
/// ```
/// use candle_attention_kernels::{Element, Error, Tier, linear::PackedWeight};
///
/// fn rows_of<E: Element>(rows: &[E], shape: (usize, usize), outputs: &[usize]) -> Result<Vec<E>, Error> {
///     PackedWeight::new(rows, shape, Tier::Scalar)?.unpack_rows(outputs)
/// }
/// assert_eq!(rows_of(&[1f32, 2.0, 3.0, 4.0], (2, 2), &[1]), Ok(vec![3.0, 4.0]));
/// assert!(rows_of(&[1f32, 2.0, 3.0, 4.0], (2, 2), &[1 << 40]).is_err());
/// assert!(rows_of(&[1f32, 2.0], (2, 2), &[]).is_err());
/// ```
///
/// and not past the checks:
///
/// ```compile_fail,E0061
/// use candle_attention_kernels::{Element, Tier, linear::PackedWeight};
///
/// fn pack<E: Element>(rows: &[E], shape: (usize, usize)) -> Option<PackedWeight> {
///     E::pack(rows, shape.0, shape.1, Tier::Scalar)
/// }
/// ```
///
/// ```compile_fail,E0061
/// use candle_attention_kernels::{Element, linear::PackedWeight};
///
/// fn unpack<E: Element>(weight: &PackedWeight, outputs: &[usize]) -> Option<Vec<E>> {
///     E::unpack(weight, outputs)
/// }
/// ```
///
/// What those methods take cannot be named, nor can the traits:
///
/// ```compile_fail,E0603
/// use candle_attention_kernels::linear::{WeightOutputs, WeightRows};
/// ```
///
/// ```compile_fail,E0603
/// use candle_attention_kernels::linear::Product;
/// ```
///
/// ```compile_fail,E0603
/// use candle_attention_kernels::flash::{BackwardCall, Call};
/// ```
///
/// ```compile_fail,E0603
/// use candle_attention_kernels::element::Kernels;
/// ```
///
/// ```compile_fail,E0603
/// use candle_attention_kernels::cpu::{SimdTask, Vector};
/// ```
#[cfg(doctest)]
struct WhatIsOutOfReach;

macro_rules! element {
    ($type:ty, $dtype:ident, $load:ident, $store:ident, $from_f32:expr, $dispatch:path) => {
        impl Stored for $type {
            const IS_SCALED: bool = false;

            #[inline(always)]
            unsafe fn load<V: Vector>(from: *const Self) -> V {
                // SAFETY: as this method's contract; bf16 and f16 are stored as their bits.
                unsafe { V::$load(from.cast()) }
            }
        }

        impl Kernels for $type {
            const DTYPE: Dtype = Dtype::$dtype;

            #[inline(always)]
            fn from_f32(x: f32) -> Self {
                $from_f32(x)
            }

            #[inline(always)]
            unsafe fn store<V: Vector>(vector: V, to: *mut Self) {
                // SAFETY: as this method's contract; bf16 and f16 are stored as their bits.
                unsafe { vector.$store(to.cast()) }
            }

            fn dispatch(tier: Tier, task: impl SimdTask) {
                $dispatch(tier, task)
            }

            fn attend(call: &Call<Self>, tier: Tier) -> Option<()> {
                flash::run(call, tier)
            }

            fn attend_q8(call: &Call<Self, u8>, tier: Tier) -> Option<()> {
                flash::run(call, tier)
            }

            fn attend_backward(call: &BackwardCall<Self>, tier: Tier) -> Option<()> {
                flash::run_backward(call, tier)
            }

            fn multiply(product: &Product<Self>) {
                linear::run(product)
            }

            fn pack(rows: &WeightRows<Self>) -> Option<PackedWeight> {
                linear::pack_weight(rows)
            }

            fn unpack(rows: &WeightOutputs) -> Option<Vec<Self>> {
                linear::unpack_weight(rows)
            }
        }
    };
}

element!(f32, F32, load, store, std::convert::identity, dispatch_f32);
element!(bf16, BF16, load_bf16, store_bf16, bf16::from_f32, dispatch_bf16);
element!(f16, F16, load_f16, store_f16, f16::from_f32, dispatch_f32);

/// The first `n` lanes; the others are what a default element is read as.
///
/// # Safety
/// The processor has the tier of V; `from` is valid for `n` elements, at most `LANES`.
#[inline(always)]
pub(crate) unsafe fn load_first<E: Stored, V: Vector>(from: *const E, n: usize) -> V {
    // SAFETY: as this function's contract; the copy has as many elements as any vector.
    unsafe {
        if n == V::LANES {
            return E::load(from);
        }
        let mut whole = [E::default(); MAX_LANES];
        std::ptr::copy_nonoverlapping(from, whole.as_mut_ptr(), n);
        E::load(whole.as_ptr())
    }
}

/// Stores the first `n` lanes.
///
/// # Safety
/// The processor has the tier of V; `to` is valid for writes of `n` elements, at most `LANES`.
#[inline(always)]
pub(crate) unsafe fn store_first<E: Kernels, V: Vector>(vector: V, to: *mut E, n: usize) {
    // SAFETY: as this function's contract; the copy has as many elements as any vector.
    unsafe {
        if n == V::LANES {
            return E::store(vector, to);
        }
        let mut whole = [E::default(); MAX_LANES];
        E::store(vector, whole.as_mut_ptr());
        std::ptr::copy_nonoverlapping(whole.as_ptr(), to, n);
    }
}

/// One row of elements widened to f32 and multiplied by a factor, with zeros up to `padded`.
///
/// # Safety
/// The processor has the tier of V; `from` is valid for `width` elements and `to` for writes of `padded`, at least `width`.
#[inline(always)]
pub(crate) unsafe fn widen_row<E: Stored, V: Vector>(
    from: *const E,
    width: usize,
    to: *mut f32,
    padded: usize,
    factor: f32,
) {
    let whole = width / V::LANES * V::LANES;
    // SAFETY: as this function's contract.
    unsafe {
        let factor = V::splat(factor);
        for at in (0..whole).step_by(V::LANES) {
            E::load::<V>(from.add(at)).mul(factor).store(to.add(at));
        }
        if whole < width {
            let rest: V = load_first(from.add(whole), width - whole);
            store_first(rest.mul(factor), to.add(whole), width - whole);
        }
        to.add(width).write_bytes(0, padded - width);
    }
}
