//! Plain Rust, which every processor runs: the tier that the others are read against.

use half::{bf16, f16};

use crate::cpu::kernel::{Job, Kernel, MulAdd, Narrow, Product, multiply, multiply_columns};
use crate::cpu::vector::{EXP2_LEAST, Vector, exp2_fraction};

const LANES: usize = 8;

/// Eight f32, which the compiler may keep in whatever registers its target has.
#[derive(Clone, Copy)]
pub(crate) struct Scalar([f32; LANES]);

impl Scalar {
    #[inline(always)]
    fn map(self, f: impl Fn(f32) -> f32) -> Self {
        Self(self.0.map(f))
    }

    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|lane| f(self.0[lane], other.0[lane])))
    }
}

impl Vector for Scalar {
    const LANES: usize = LANES;
    type Mask = [bool; LANES];

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self(from.cast::<[f32; LANES]>().read_unaligned()) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    unsafe fn load_bf16(from: *const u16) -> Self {
        // SAFETY: the caller's promise.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Self(bits.map(|bits| f32::from_bits(u32::from(bits) << 16)))
    }
    #[inline(always)]
    unsafe fn load_pairs(from: *const f32) -> (Self, Self) {
        // SAFETY: the caller's promise.
        let words = unsafe { from.cast::<[u32; LANES]>().read_unaligned() };
        (Self(words.map(|word| f32::from_bits(word << 16))), Self(words.map(|word| f32::from_bits(word & 0xffff_0000))))
    }
    #[inline(always)]
    unsafe fn load_f16(from: *const u16) -> Self {
        // SAFETY: the caller's promise.
        let bits = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        Self(bits.map(|bits| f16::from_bits(bits).to_f32()))
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(self.0.map(|x| bf16::from_f32(x).to_bits())) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[u16; LANES]>().write_unaligned(self.0.map(|x| f16::from_f32(x).to_bits())) }
    }

    #[inline(always)]
    unsafe fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
    #[inline(always)]
    unsafe fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
    #[inline(always)]
    unsafe fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
    #[inline(always)]
    unsafe fn mul_add(self, factor: Self, addend: Self) -> Self {
        // `f32::mul_add` is a library call where the target has no FMA.
        self.zip(factor, |a, b| a * b).zip(addend, |a, b| a + b)
    }
    #[inline(always)]
    unsafe fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    unsafe fn abs(self) -> Self {
        self.map(f32::abs)
    }
    #[inline(always)]
    unsafe fn less_than(self, other: Self) -> Self::Mask {
        std::array::from_fn(|lane| self.0[lane] < other.0[lane])
    }
    #[inline(always)]
    unsafe fn select(mask: Self::Mask, yes: Self, no: Self) -> Self {
        Self(std::array::from_fn(|lane| if mask[lane] { yes.0[lane] } else { no.0[lane] }))
    }
    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let [a, b, c, d, e, f, g, h] = self.0;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    }
    #[inline(always)]
    unsafe fn exp2(self) -> Self {
        // Adding 1.5 · 2^23 rounds to an integer, which then stands in the lowest bits.
        const ROUND: f32 = 12_582_912.0;
        let shifted = self.map(|x| if x < EXP2_LEAST { EXP2_LEAST } else { x } + ROUND);
        let f = self.zip(shifted, |x, shifted| x - (shifted - ROUND));
        // SAFETY: the scalar tier needs nothing of the processor.
        let power = unsafe { exp2_fraction(f) };
        let scaled =
            power.zip(shifted, |power, shifted| f32::from_bits(power.to_bits().wrapping_add(shifted.to_bits() << 23)));
        self.zip(scaled, |x, scaled| if x < EXP2_LEAST { 0.0 } else { scaled })
    }
    #[inline(always)]
    unsafe fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
        for row in 0..LANES {
            for column in 0..LANES {
                // SAFETY: the caller's promise.
                unsafe { *to.add(column * to_stride + row) = *from.add(row * from_stride + column) };
            }
        }
    }
}

impl MulAdd for Scalar {
    type Vector = Self;

    #[inline(always)]
    unsafe fn mul_add(sum: Self, a: Self, b: Self) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Vector::mul_add(a, b, sum) }
    }
}

impl Kernel for Scalar {
    type Vector = Self;
    const ELEMENTS: usize = 1;
    const ROWS: usize = 2;
    const DEPTH: usize = 1;
    const VECTORS: usize = 2;

    unsafe fn store_pairs(_: Self::Vector, _: Self::Vector, _: *mut f32) {
        unreachable!("a word of this tier is one element")
    }

    unsafe fn vectorize(job: impl Job) {
        // SAFETY: the caller's promise.
        unsafe { job.run::<Self>() }
    }

    unsafe fn multiply(product: &Product) {
        // SAFETY: the caller's promise.
        unsafe { multiply::<Self, 2, 2>(product) }
    }

    unsafe fn multiply_narrow<B: Narrow>(product: &Product) {
        // SAFETY: the caller's promise.
        unsafe { multiply_columns::<Self, B, 2, 2>(product) }
    }
}
