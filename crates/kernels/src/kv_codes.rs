//! Codes of keys and values in other formats than 8 bits: floats of 8 bits, and pairs of codes of 4 bits.

use crate::cpu::{E4M3_SHIFT, Float8, TakenBits, Vector};
use crate::number::{Numbers, Stored};
use candle_attention_call::KvCodeFormat;

/// A float of 8 bits, [`KvCodeFormat::E4M3`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct E4M3Code(u8);

/// Two codes of 4 bits, [`KvCodeFormat::Q4`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(transparent)]
pub struct CodePair(u8);

/// The numbers that [`CodePair`]s store together: the lower bits of the bytes have the first half of them.
const PAIRED: usize = KvCodeFormat::Q4.block();

/// The items of [`Stored`] that all codes in a byte have, for a transparent type of a byte.
macro_rules! stored_as_bytes {
    () => {
        const NAME: &'static str = "u8";
        const IS_SCALED: bool = true;

        fn typed(numbers: Numbers<'_>) -> Option<&[Self]> {
            let Numbers::U8(bytes) = numbers else { return None };
            // SAFETY: the type is a byte.
            Some(unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len()) })
        }

        fn numbers(typed: &[Self]) -> Numbers<'_> {
            // SAFETY: the type is a byte.
            Numbers::U8(unsafe { std::slice::from_raw_parts(typed.as_ptr().cast(), typed.len()) })
        }

        #[inline(always)]
        fn is_finite(self) -> bool {
            // The kernels read the codes of NaN as numbers.
            true
        }
    };
}

impl Stored for E4M3Code {
    stored_as_bytes!();

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: as this method's contract.
        unsafe {
            let TakenBits { number, .. } = V::load_highest_bytes(from.cast()).take_float8::<E4M3_SHIFT>();
            number.mul(V::splat(const { Float8::E4M3.factor() }))
        }
    }
}

impl Stored for CodePair {
    stored_as_bytes!();

    const HAS_GROUPS: bool = true;
    const NUMBERS: usize = 2;
    const BLOCK: usize = PAIRED;

    #[inline(always)]
    unsafe fn load<V: Vector>(from: *const Self) -> V {
        // SAFETY: as this method's contract.
        unsafe { V::load_nibbles(from.cast(), 0) }
    }

    #[inline(always)]
    unsafe fn load_at<V: Vector>(row: *const Self, n: usize) -> V {
        const { assert!((PAIRED / 2).is_multiple_of(V::LANES)) };
        let block = n / PAIRED;
        let place = n % PAIRED;
        let byte = block * (PAIRED / 2) + place % (PAIRED / 2);
        let shift = place / (PAIRED / 2) * 4;
        // SAFETY: as this method's contract; a vector ends within one half of a block.
        unsafe { V::load_nibbles(row.add(byte).cast(), shift as u32) }
    }
}
