//! Plain Rust, which every processor runs. The other instruction sets are tested against it.

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

use crate::cpu::functions::{EXP2, EXP2_MIN, EXP2_ROUND, polynomial};
use crate::cpu::kernel::{
    Columns, Kernel, MAX_LANES, SimdTask, TableBytes, TakenBits, Vector, WordHalves, float8_mask, simd_fns,
};
use crate::cpu::panel::PanelProduct;
use crate::cpu::product::multiply_rows;

const LANES: usize = 8;

/// Eight f32, which the compiler keeps in the registers of its target.
#[derive(Clone, Copy)]
pub(crate) struct Scalar([f32; LANES]);

/// Numbers of another type, one for each lane.
type Lanes<T> = [T; LANES];

impl Scalar {
    /// Makes a vector from each lane's number. The loop compiles in a fraction of the time of `array::map`.
    #[inline(always)]
    fn each(f: impl Fn(usize) -> f32) -> Self {
        let mut lanes = [0.0; LANES];
        for (lane, x) in lanes.iter_mut().enumerate() {
            *x = f(lane);
        }
        Self(lanes)
    }

    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Self::each(|lane| f(self.0[lane]))
    }

    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self::each(|lane| f(self.0[lane], other.0[lane]))
    }
}

/// Converts f16 to f32. Conversions detect the processor's features, or are long: they are compiled once, and not
/// inlined.
#[inline(never)]
fn widen_f16(bits: Lanes<u16>) -> Lanes<f32> {
    let mut lanes = [0.0; LANES];
    bits.reinterpret_cast::<f16>().convert_to_f32_slice(&mut lanes);
    lanes
}

/// Converts f32 to a type of 16 bits.
#[inline(never)]
fn narrow<T: Copy>(lanes: Lanes<f32>, zero: T) -> Lanes<T>
where
    [T]: HalfFloatSliceExt,
{
    let mut converted = [zero; LANES];
    converted.convert_from_f32_slice(&lanes);
    converted
}

impl Vector for Scalar {
    const LANES: usize = LANES;
    type Mask = Lanes<bool>;

    simd_fns! {
        fn splat(x: f32) -> Self { Self([x; LANES]) }
        fn load(from: *const f32) -> Self { Self(from.cast::<Lanes<f32>>().read_unaligned()) }
        fn store(self, to: *mut f32) { to.cast::<Lanes<f32>>().write_unaligned(self.0) }
        fn load_bf16(from: *const u16) -> Self {
            let bits = from.cast::<Lanes<u16>>().read_unaligned();
            Self::each(|lane| f32::from_bits(u32::from(bits[lane]) << 16))
        }
        fn load_u8(from: *const u8) -> Self {
            let codes = from.cast::<Lanes<u8>>().read_unaligned();
            Self::each(|lane| codes[lane].into())
        }
        fn load_nibbles(from: *const u8, shift: u32) -> Self {
            let bytes = from.cast::<Lanes<u8>>().read_unaligned();
            Self::each(|lane| f32::from(bytes[lane] >> shift & 0xf) - 7.5)
        }
        fn load_pairs(from: *const f32) -> WordHalves<Self> {
            let words = Self::load(from);
            WordHalves {
                low: words.map(|x| f32::from_bits(x.to_bits() << 16)),
                high: words.map(|x| f32::from_bits(x.to_bits() & 0xffff_0000)),
            }
        }
        fn take_bits<const BITS: u32, const IS_SIGNED: bool>(self) -> TakenBits<Self> {
            let highest = self.map(|x| match IS_SIGNED {
                true => (x.to_bits() & u32::MAX << (32 - BITS)).cast_signed() as f32,
                false => (x.to_bits() >> (32 - BITS)) as f32,
            });
            TakenBits { number: highest, rest: self.map(|x| f32::from_bits(x.to_bits() << BITS)) }
        }
        fn load_highest_bytes(from: *const u8) -> Self {
            let bytes = from.cast::<Lanes<u8>>().read_unaligned();
            Self::each(|lane| f32::from_bits(u32::from(bytes[lane]) << 24))
        }
        fn take_entries(self, table: *const f32) -> TakenBits<Self> {
            let table = table.cast::<[f32; 16]>().read_unaligned();
            TakenBits {
                number: self.map(|x| table[(x.to_bits() >> 28) as usize]),
                rest: self.map(|x| f32::from_bits(x.to_bits() << 4)),
            }
        }
        fn look_up_bytes(self, table: *const i8) -> TableBytes<Self> {
            let entries = table.cast::<[u8; 16]>().read_unaligned();
            let look_up = |word: f32, shift: u32| {
                let codes = word.to_bits().to_ne_bytes().map(|byte| byte >> shift & 0xf);
                f32::from_bits(u32::from_ne_bytes(codes.map(|code| entries[usize::from(code)])))
            };
            TableBytes { upper: self.map(|x| look_up(x, 4)), lower: self.map(|x| look_up(x, 0)) }
        }
        fn take_float8<const SHIFT: u32>(self) -> TakenBits<Self> {
            TakenBits {
                number: self.map(|x| f32::from_bits((x.to_bits().cast_signed() >> SHIFT).cast_unsigned() & float8_mask(SHIFT))),
                rest: self.map(|x| f32::from_bits(x.to_bits() << 8)),
            }
        }
        fn load_f16(from: *const u16) -> Self { Self(widen_f16(from.cast::<Lanes<u16>>().read_unaligned())) }
        fn store_bf16(self, to: *mut u16) { to.cast::<Lanes<bf16>>().write_unaligned(narrow(self.0, bf16::ZERO)) }
        fn store_f16(self, to: *mut u16) { to.cast::<Lanes<f16>>().write_unaligned(narrow(self.0, f16::ZERO)) }

        fn add(self, other: Self) -> Self { self.zip(other, |a, b| a + b) }
        fn sub(self, other: Self) -> Self { self.zip(other, |a, b| a - b) }
        fn mul(self, other: Self) -> Self { self.zip(other, |a, b| a * b) }
        fn div(self, other: Self) -> Self { self.zip(other, |a, b| a / b) }
        fn mul_add(self, factor: Self, addend: Self) -> Self {
            // `f32::mul_add` is a library call where the target has no FMA.
            self.mul(factor).add(addend)
        }
        fn max(self, other: Self) -> Self { self.zip(other, |a, b| if a > b { a } else { b }) }
        fn abs(self) -> Self { self.map(f32::abs) }
        fn less_than(self, other: Self) -> Self::Mask { std::array::from_fn(|lane| self.0[lane] < other.0[lane]) }
        fn select(mask: Self::Mask, yes: Self, no: Self) -> Self {
            Self::each(|lane| if mask[lane] { yes.0[lane] } else { no.0[lane] })
        }
        fn sum(self) -> f32 {
            let [a, b, c, d, e, f, g, h] = self.0;
            ((a + e) + (c + g)) + ((b + f) + (d + h))
        }
        fn sum_each(vectors: &[Self; MAX_LANES]) -> Self { Self::each(|n| vectors[n].sum()) }
        fn exp2(self) -> Self {
            let shifted = self.map(|x| if x < EXP2_MIN { EXP2_MIN } else { x } + EXP2_ROUND);
            let f = self.zip(shifted, |x, shifted| x - (shifted - EXP2_ROUND));
            let scaled = polynomial(f, &EXP2).zip(shifted, |power, shifted| power * f32::from_bits(shifted.to_bits() << 23));
            self.zip(scaled, |x, scaled| if x < EXP2_MIN { 0.0 } else { scaled })
        }
        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            for row in 0..LANES {
                for column in 0..LANES {
                    *to.add(column * to_stride + row) = *from.add(row * from_stride + column);
                }
            }
        }
    }
}

impl Kernel for Scalar {
    type Vector = Self;
    const ELEMENTS: usize = 1;
    const ROWS: usize = 2;
    const VECTORS: usize = 2;

    #[inline(never)]
    unsafe fn run_simd<T: SimdTask>(task: T) -> T::Output {
        // SAFETY: every processor has the scalar instruction set.
        unsafe { task.run::<Self>() }
    }

    #[inline(always)]
    unsafe fn multiply_columns<B: Columns>(product: &PanelProduct) {
        // SAFETY: as this method's contract.
        unsafe { multiply_rows::<Self, B>(product, 0) }
    }
}
