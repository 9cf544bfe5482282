//! Box-Muller on blocks of sixteen, to the last bit as PyTorch's AVX2 kernel computes it.
//!
//! The polynomials are those of the Cephes library's single-precision `logf`, `sinf` and `cosf`, for the small domain
//! that the transform needs: a logarithm on (0, 1] and an angle on [0, 2π]. Each `mul_add` stands where PyTorch's
//! compiled kernel rounds once, each separate product and sum where it rounds twice.

#![expect(clippy::excessive_precision, reason = "the coefficients keep the digits that Cephes prints")]

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_PI, TAU};

/// Draws that one block of the transform takes and normals that it gives.
pub(super) const BLOCK: usize = 16;

/// `block` holds uniform draws from [0, 1): eight radii, then the eight angles that go with them. They are replaced by
/// sixteen normals of the given mean and standard deviation, the cosines first.
pub(super) fn transform(block: &mut [f32; BLOCK], mean: f32, std: f32) {
    let (radii, angles) = block.split_at_mut(BLOCK / 2);
    for (first, second) in radii.iter_mut().zip(angles) {
        let radius = (-2.0 * ln(1.0 - *first)).sqrt();
        let (sin, cos) = sin_cos(TAU * *second);
        *first = (radius * cos).mul_add(std, mean);
        *second = (radius * sin).mul_add(std, mean);
    }
}

/// Natural logarithm of a positive normal number.
fn ln(x: f32) -> f32 {
    // ln 2 in two parts, the high one short enough for exact multiples.
    const LN_2_HIGH: f32 = 0.693_359_375;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const POLYNOMIAL: [f32; 8] = [
        -1.151_461_031e-1,
        1.167_699_874e-1,
        -1.242_014_084_6e-1,
        1.424_932_278_7e-1,
        -1.666_805_766_5e-1,
        2.000_071_476_5e-1,
        -2.499_999_399_3e-1,
        3.333_333_117_4e-1,
    ];
    // x = mantissa · 2^exponent with the mantissa in [0.5, 1), then in [√½, √2) less one.
    let bits = x.to_bits();
    let mut exponent = (bits >> 23) as f32 - 126.0;
    let mut m = f32::from_bits((bits & 0x007f_ffff) | 0.5f32.to_bits());
    if m < FRAC_1_SQRT_2 {
        exponent -= 1.0;
        m = m - 1.0 + m;
    } else {
        m -= 1.0;
    }
    let m2 = m * m;
    let cubic = POLYNOMIAL.iter().fold(7.037_683_629_2e-2, |sum: f32, &c| sum.mul_add(m, c)) * m;
    let tail = cubic.mul_add(m2, exponent * LN_2_LOW);
    let tail = m2.mul_add(-0.5, tail);
    exponent.mul_add(LN_2_HIGH, m + tail)
}

/// Sine and cosine of an angle on [0, 2π].
fn sin_cos(angle: f32) -> (f32, f32) {
    // π/4 in three parts, so that taking a multiple away loses nothing.
    const QUARTER_PI: [f32; 3] = [0.785_156_25, 2.418_756_484_985_351_562_5e-4, 3.774_894_977_445_941_08e-8];
    let octant = ((angle * (2.0 * FRAC_2_PI)) as u32 + 1) & !1;
    let multiple = octant as f32;
    let x = QUARTER_PI.iter().fold(angle, |x, &part| multiple.mul_add(-part, x));
    let x2 = x * x;

    let cos = 2.443_315_711_809_948e-5f32.mul_add(x2, -1.388_731_625_493_765e-3);
    let cos = cos.mul_add(x2, 4.166_664_568_298_827e-2) * x2;
    let cos = cos.mul_add(x2, -0.5 * x2) + 1.0;

    let sin = (-1.951_529_589_1e-4f32).mul_add(x2, 8.332_160_873_6e-3);
    let sin = sin.mul_add(x2, -1.666_665_461_1e-1) * x2;
    let sin = sin.mul_add(x, x);

    match octant % 8 {
        0 => (sin, cos),
        2 => (cos, -sin),
        4 => (-sin, -cos),
        _ => (-cos, sin),
    }
}
