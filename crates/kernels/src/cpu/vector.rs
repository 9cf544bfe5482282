//! What an algorithm may do with a vector register of f32.

use super::instruction_set::Kernel;

/// A vector of [`LANES`](Vector::LANES) f32, and the kernel for words of one f32.
///
/// # Safety
/// Every method needs a processor that has the instruction set, and belongs (inlined) into a function that is
/// compiled for it. A pointer must be valid for `LANES` elements; none has to be aligned.
pub trait Vector: Copy + Kernel<Vector = Self> {
    /// The f32 in a vector, at most [`MAX_LANES`].
    const LANES: usize;
    /// A truth value for each lane.
    type Mask: Copy;

    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    unsafe fn store(self, to: *mut f32);
    /// bf16, by its bits.
    unsafe fn load_bf16(from: *const u16) -> Self;
    unsafe fn load_f16(from: *const u16) -> Self;
    /// Whole numbers from 0 to 255.
    unsafe fn load_u8(from: *const u8) -> Self;
    /// The lower and the upper bf16 of each of `LANES` words.
    unsafe fn load_pairs(from: *const f32) -> (Self, Self);
    /// Returns the highest 4 or 8 bits of each word as a number, in two's complement where `IS_SIGNED`, and the words
    /// shifted so that the next bits are the highest. The bits that are shifted in are of any value.
    unsafe fn take_bits<const BITS: u32, const IS_SIGNED: bool>(self) -> (Self, Self);
    /// Rounded to the nearest, ties to even.
    unsafe fn store_bf16(self, to: *mut u16);
    unsafe fn store_f16(self, to: *mut u16);
    /// With another vector as pairs of bf16, this one in the lower half of each word, for instruction sets that
    /// multiply them.
    unsafe fn store_pairs(self, _high: Self, _to: *mut f32) {
        unreachable!("this instruction set multiplies no pairs")
    }
    /// As bf16 for instruction sets that multiply them: half as many words.
    unsafe fn store_halves(self, _to: *mut f32) {
        unreachable!("this instruction set multiplies no pairs")
    }

    unsafe fn add(self, other: Self) -> Self;
    unsafe fn sub(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    unsafe fn div(self, other: Self) -> Self;
    /// `self · factor + addend`, rounded once (twice on the scalar instruction set where the processor has no FMA).
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self;
    /// The larger one; `other` if either is NaN.
    unsafe fn max(self, other: Self) -> Self;
    unsafe fn abs(self) -> Self;
    /// False where either is NaN.
    unsafe fn less_than(self, other: Self) -> Self::Mask;
    /// `yes` where the mask is set.
    unsafe fn select(mask: Self::Mask, yes: Self, no: Self) -> Self;
    /// The sum of all lanes, in an order that does not vary.
    unsafe fn sum(self) -> f32;
    /// Lane n is the sum of the lanes of vector n; vectors past `LANES` are not read.
    unsafe fn sum_each(vectors: &[Self; MAX_LANES]) -> Self;

    /// 2 to the power `self`, for `self` up to 127, to 3e-7 of itself, four ulp at most: 0 below the smallest normal
    /// number, NaN for NaN.
    ///
    /// `2^x = 2^n · 2^f`, n the nearest integer and f within ±½, of which it is a polynomial ([`EXP2`]).
    unsafe fn exp2(self) -> Self;

    /// Prefetches the cache line at an address, which need not be valid.
    unsafe fn prefetch(at: *const u8) {
        let _ = at;
    }

    /// A square of `LANES` by `LANES` 32-bit words, transposed; strides in words.
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);
}

/// Prefetches the cache lines of some bytes, which need not be valid.
///
/// # Safety
/// The processor has the instruction set of V.
#[inline(always)]
pub(crate) unsafe fn prefetch_bytes<V: Vector>(at: *const u8, bytes: usize) {
    for line in (0..bytes).step_by(64) {
        // SAFETY: as this function's contract.
        unsafe { V::prefetch(at.wrapping_add(line)) };
    }
}

/// The most lanes that a vector of any instruction set has.
pub(crate) const MAX_LANES: usize = 16;

/// The methods of a [`Vector`], which all have the same attributes and the same reason to be sound.
macro_rules! simd_fns {
    ($(fn $name:ident $(<$(const $parameter:ident: $kind:ty),*>)? ($($args:tt)*) $(-> $out:ty)? $body:block)*) => {$(
        #[inline(always)]
        #[allow(unused_unsafe, reason = "the scalar instruction set's arithmetic is safe")]
        unsafe fn $name $(<$(const $parameter: $kind),*>)? ($($args)*) $(-> $out)? {
            // SAFETY: by the contract of `Vector`, the processor has the instruction set and pointers are valid for a
            // vector.
            unsafe { $body }
        }
    )*};
}
pub(super) use simd_fns;

/// 2^x for x within ±½: the powers of ln 2 over factorials, moved so that the largest relative error over ±½ is the
/// smallest: 9.1e-8 for the polynomial of degree 5, 1.5 times the rounding error of f32. The first is 1, so that 2^0 is
/// 1: running sums that keep their maximum are multiplied by it block after block, and would drift.
pub(super) const EXP2: [f32; 6] =
    [1.0, std::f32::consts::LN_2, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_7];

/// The sum of coefficients times the powers of x, the constant one first.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
pub(crate) unsafe fn polynomial<V: Vector, const N: usize>(x: V, coefficients: &[f32; N]) -> V {
    // SAFETY: the processor has the instruction set of V.
    unsafe {
        let mut sum = V::splat(coefficients[N - 1]);
        for &coefficient in coefficients[..N - 1].iter().rev() {
            sum = sum.mul_add(x, V::splat(coefficient));
        }
        sum
    }
}

/// Below this, [`Vector::exp2`] is 0.
pub(crate) const EXP2_MIN: f32 = -126.0;

/// 1.5 · 2^23 + 127: adding it rounds to an integer, whose exponent as an f32's then stands in the lowest bits. A power
/// of two that is made of them is multiplied, so that NaN stays NaN, from which they could be anything.
pub(crate) const EXP2_ROUND: f32 = 12_583_039.0;

/// Hyperbolic tangent to a few ulp: an odd polynomial (Cephes' `tanhf`) near 0, where `1 - e` would cancel, and
/// `(1 - e) / (1 + e)` with `e = exp(-2 |x|)` elsewhere.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
pub(crate) unsafe fn tanh<V: Vector>(x: V) -> V {
    const NEAR_ZERO: [f32; 5] = [-0.333_332_84, 0.133_314_42, -0.053_739_716, 0.020_639_09, -0.005_704_988_6];
    // SAFETY: the processor has the instruction set of V.
    unsafe {
        let square = x.mul(x);
        let near = polynomial(square, &NEAR_ZERO).mul(square).mul_add(x, x);
        let magnitude = x.abs();
        let e = magnitude.mul(V::splat(-2.0 * std::f32::consts::LOG2_E)).exp2();
        let one = V::splat(1.0);
        let far = one.sub(e).div(one.add(e));
        let far = V::select(x.less_than(V::splat(0.0)), V::splat(0.0).sub(far), far);
        V::select(magnitude.less_than(V::splat(0.625)), near, far)
    }
}

/// `1 / (1 + exp(-x))` to `3e-7 + 1e-7 · |x|` of itself; 0 below 2^-126 and for -inf, NaN for NaN.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
pub(crate) unsafe fn sigmoid<V: Vector>(x: V) -> V {
    // SAFETY: the processor has the instruction set of V.
    unsafe {
        // Of a negative number, so that it is 1 at most.
        let e = x.abs().mul(V::splat(-std::f32::consts::LOG2_E)).exp2();
        let one = V::splat(1.0);
        V::select(x.less_than(V::splat(0.0)), e, one).div(one.add(e))
    }
}

/// `1 - erf(x)`, to 2.4e-7, and up to 4 to 1e-4 of itself: 2 for -inf, 0 for inf, NaN for NaN.
///
/// Polynomials of N. Juffa's `erff` (<https://stackoverflow.com/a/35148199>): of the odd part near 0, and elsewhere of
/// the logarithm, which is that of a single power.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
pub(crate) unsafe fn erfc<V: Vector>(x: V) -> V {
    const NEAR_ZERO: [f32; 6] =
        [0.128_379_17, -0.376_125_34, 0.112_819_925, -0.026_768_135, 0.004_991_194, -0.000_596_761_7];
    // Of `ln(1 - erf(x)) / x + 1`.
    const LOGARITHM: [f32; 7] = [
        -0.128_717_51,
        -0.634_846_7,
        -0.106_777_88,
        0.024_254_622,
        -0.003_883_964_4,
        0.000_383_197_13,
        -1.728_534_7e-5,
    ];
    // SAFETY: the processor has the instruction set of V.
    unsafe {
        let square = x.mul(x);
        let one = V::splat(1.0);
        let near = one.sub(polynomial(square, &NEAR_ZERO).mul_add(x, x));

        let magnitude = x.abs();
        let logarithm = polynomial(magnitude, &LOGARITHM).mul_add(magnitude, V::splat(0.0).sub(magnitude));
        let tail = logarithm.mul(V::splat(std::f32::consts::LOG2_E)).exp2();
        let far = V::select(x.less_than(V::splat(0.0)), V::splat(2.0).sub(tail), tail);
        V::select(V::splat(0.927_734_4).less_than(magnitude), far, near)
    }
}
