//! Numbers of floats of a few bits.

use safetensors::Dtype;

use candle_attention_modules::base::Float8;

/// The numbers of the floats of 4 bits (E2M1) of MXFP4 and NVFP4.
pub(super) const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Returns the float that a dtype has; `None` for other dtypes.
pub(crate) fn float8_of(dtype: Dtype) -> Option<Float8> {
    match dtype {
        Dtype::F8_E4M3 => Some(Float8::E4M3),
        Dtype::F8_E5M2 => Some(Float8::E5M2),
        _ => None,
    }
}

/// Returns whether a dtype is one of floats that plain weights have.
pub(super) fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::BF16 | Dtype::F32 | Dtype::F64)
}

/// Returns the numbers of the scales of MXFP4 and MXFP8: powers of 2, and NaN.
pub(super) fn e8m0() -> Vec<f32> {
    (0..=u8::MAX).map(e8m0_number).collect()
}

/// Returns the number of a scale of MXFP4 or MXFP8.
pub(super) fn e8m0_number(byte: u8) -> f32 {
    match byte {
        u8::MAX => f32::NAN,
        // The exponent at its place in f32; 2^-127 is below the smallest normal number.
        0 => f32::from_bits(1 << 22),
        exponent => f32::from_bits(u32::from(exponent) << 23),
    }
}

/// Returns the numbers of scales in E4M3 times the scale of their tensor.
pub(super) fn e4m3_times(scale: f32) -> Vec<f32> {
    (0..=u8::MAX).map(|byte| Float8::E4M3.number(byte) * scale).collect()
}

/// Returns the numbers of scales in E4M3, each divided by the scale of their tensor.
pub(super) fn e4m3_over(scale: f32) -> Vec<f32> {
    (0..=u8::MAX).map(|byte| Float8::E4M3.number(byte) / scale).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e8m0_numbers_are_powers_of_2() {
        for exponent in 0..u8::MAX {
            assert_eq!(f64::from(e8m0_number(exponent)), 2f64.powi(i32::from(exponent) - 127), "{exponent}");
        }
        assert!(e8m0_number(u8::MAX).is_nan());
    }
}
