//! Types without codes: floats and whole numbers, whose numbers are converted to f32.

use half::{bf16, f16};

/// Converts numbers of N bytes each.
fn converted<const N: usize>(bytes: &[u8], convert: impl Fn([u8; N]) -> f32) -> Vec<f32> {
    bytes.as_chunks::<N>().0.iter().map(|number| convert(*number)).collect()
}

pub(super) fn f32s(bytes: &[u8]) -> Vec<f32> {
    converted(bytes, f32::from_le_bytes)
}

pub(super) fn f16s(bytes: &[u8]) -> Vec<f32> {
    converted(bytes, |number| f16::from_le_bytes(number).to_f32())
}

pub(super) fn bf16s(bytes: &[u8]) -> Vec<f32> {
    converted(bytes, |number| bf16::from_le_bytes(number).to_f32())
}

/// Converts numbers in f64, each to the nearest one in f32.
pub(super) fn f64s(bytes: &[u8]) -> Vec<f32> {
    converted(bytes, |number| f64::from_le_bytes(number) as f32)
}

pub(super) fn i8s(bytes: &[u8]) -> Vec<f32> {
    converted(bytes, |number| i8::from_le_bytes(number).into())
}

pub(super) fn i16s(bytes: &[u8]) -> Vec<f32> {
    converted(bytes, |number| i16::from_le_bytes(number).into())
}

/// Converts whole numbers of 32 bits, each to the nearest one in f32.
pub(super) fn i32s(bytes: &[u8]) -> Vec<f32> {
    converted(bytes, |number| i32::from_le_bytes(number) as f32)
}

/// Converts whole numbers of 64 bits, each to the nearest one in f32.
pub(super) fn i64s(bytes: &[u8]) -> Vec<f32> {
    converted(bytes, |number| i64::from_le_bytes(number) as f32)
}
