//! Elementary functions of vectors.

use super::kernel::Vector;

/// The coefficients of 2^x for x within ±½: the powers of ln 2 over factorials, moved so that the largest relative
/// error over ±½ is the smallest: 9.1e-8 for the polynomial of degree 5, 1.5 times the rounding error of f32. The first
/// coefficient is 1, so that 2^0 is 1: running sums that keep their maximum are multiplied by it block after block, and
/// would drift.
pub(super) const EXP2: [f32; 6] =
    [1.0, std::f32::consts::LN_2, 0.240_222_42, 0.055_507_336, 0.009_671_513, 0.001_326_472_7];

/// The exponent below which [`Vector::exp2`] is 0.
pub(crate) const EXP2_MIN: f32 = -126.0;

/// 1.5 · 2^23 + 127: adding it rounds a number to an integer n, and the lowest bits of the sum are the exponent bits of
/// 2^n. The result is multiplied by that power of two, so that NaN stays NaN: the lowest bits of a NaN have no meaning.
pub(crate) const EXP2_ROUND: f32 = 12_583_039.0;

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

/// Returns the sum of coefficients times the powers of x, the constant coefficient first.
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

/// Returns the hyperbolic tangent to a few ulp: an odd polynomial (Cephes' `tanhf`) near 0, where `1 - e` would cancel,
/// and `(1 - e) / (1 + e)` with `e = exp(-2 |x|)` elsewhere.
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
        let positive = one.sub(e).div(one.add(e));
        let far = V::select(x.less_than(V::splat(0.0)), V::splat(0.0).sub(positive), positive);
        V::select(magnitude.less_than(V::splat(0.625)), near, far)
    }
}

/// Returns `1 / (1 + exp(-x))` to `3e-7 + 1e-7 · |x|` of itself: 0 below 2^-126 and for -inf, NaN for NaN.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
pub(crate) unsafe fn sigmoid<V: Vector>(x: V) -> V {
    // SAFETY: the processor has the instruction set of V.
    unsafe {
        // The exponential of a negative number, which is 1 at most.
        let e = x.abs().mul(V::splat(-std::f32::consts::LOG2_E)).exp2();
        let one = V::splat(1.0);
        V::select(x.less_than(V::splat(0.0)), e, one).div(one.add(e))
    }
}

/// Returns `1 - erf(x)` to 2.4e-7, and up to 4 to 1e-4 of itself: 2 for -inf, 0 for inf, NaN for NaN.
///
/// The polynomials are from N. Juffa's `erff` (<https://stackoverflow.com/a/35148199>): near 0 a polynomial of the odd
/// part, and elsewhere of the logarithm, so that one exponential remains.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
pub(crate) unsafe fn erfc<V: Vector>(x: V) -> V {
    const NEAR_ZERO: [f32; 6] =
        [0.128_379_17, -0.376_125_34, 0.112_819_925, -0.026_768_135, 0.004_991_194, -0.000_596_761_7];
    // The coefficients of `ln(1 - erf(x)) / x + 1`.
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
