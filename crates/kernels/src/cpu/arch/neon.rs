//! NEON, which every 64-bit Arm processor has: thirty-two registers of four f32, and its bf16 dot products.
//!
//! In its matrix products the words of A come from a lane of a register. A broadcast word costs an Arm processor a load
//! and, on most, a vector operation that a multiply-add could have had. Multiply-adds take a lane of a register just as
//! well, so a load brings four words of A: four steps of the depth, or four rows where rows lie side by side. For 96
//! multiply-adds that are 32 loads at most, and no register is spilt.

use std::arch::aarch64::*;
use std::arch::asm;

use crate::cpu::functions::{EXP2, EXP2_MIN, EXP2_ROUND, polynomial};
use crate::cpu::kernel::{
    Columns, Kernel, MAX_LANES, TableBytes, TakenBits, Vector, WordHalves, compiled_for, float8_mask, simd_fns,
};
use crate::cpu::panel::PanelProduct;
use crate::cpu::product::multiply_rows;

#[derive(Clone, Copy)]
pub(crate) struct Neon(float32x4_t);

impl Vector for Neon {
    const LANES: usize = 4;
    type Mask = uint32x4_t;

    simd_fns! {
        fn splat(x: f32) -> Self { Self(vdupq_n_f32(x)) }
        fn load(from: *const f32) -> Self { Self(vld1q_f32(from)) }
        fn store(self, to: *mut f32) { vst1q_f32(to, self.0) }
        fn load_bf16(from: *const u16) -> Self { Self(vreinterpretq_f32_u32(vshll_n_u16::<16>(vld1_u16(from)))) }
        fn load_u8(from: *const u8) -> Self {
            let bytes = vcreate_u8(u64::from(from.cast::<u32>().read_unaligned()));
            Self(vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes)))))
        }
        fn load_nibbles(from: *const u8, shift: u32) -> Self {
            let bytes = vcreate_u8(u64::from(from.cast::<u32>().read_unaligned()));
            let words = vmovl_u16(vget_low_u16(vmovl_u8(bytes)));
            let moved = vshlq_u32(words, vdupq_n_s32(-shift.cast_signed()));
            let codes = vandq_u32(moved, vdupq_n_u32(0xf));
            Self(vsubq_f32(vcvtq_f32_u32(codes), vdupq_n_f32(7.5)))
        }
        fn load_pairs(from: *const f32) -> WordHalves<Self> {
            let words = vld1q_u32(from.cast());
            let upper = vandq_u32(words, vdupq_n_u32(0xffff_0000));
            let lower = vshlq_n_u32::<16>(words);
            WordHalves { low: Self(vreinterpretq_f32_u32(lower)), high: Self(vreinterpretq_f32_u32(upper)) }
        }
        fn take_bits<const BITS: u32, const IS_SIGNED: bool>(self) -> TakenBits<Self> {
            let words = vreinterpretq_u32_f32(self.0);
            let highest = match IS_SIGNED {
                true => {
                    let masked = vandq_u32(words, vdupq_n_u32(u32::MAX << (32 - BITS)));
                    vcvtq_f32_s32(vreinterpretq_s32_u32(masked))
                }
                false => vcvtq_f32_u32(vshlq_u32(words, vdupq_n_s32(BITS as i32 - 32))),
            };
            let rest = vshlq_u32(words, vdupq_n_s32(BITS as i32));
            TakenBits { number: Self(highest), rest: Self(vreinterpretq_f32_u32(rest)) }
        }
        fn load_highest_bytes(from: *const u8) -> Self {
            let bytes = vcreate_u8(u64::from(from.cast::<u32>().read_unaligned()));
            Self(vreinterpretq_f32_u32(vshlq_n_u32::<24>(vmovl_u16(vget_low_u16(vmovl_u8(bytes))))))
        }
        fn take_entries(self, table: *const f32) -> TakenBits<Self> {
            // A look-up of bytes. An entry is four neighbours of the table's 64 bytes.
            let words = vreinterpretq_u32_f32(self.0);
            let first = vshlq_n_u32::<2>(vshrq_n_u32::<28>(words));
            let bytes = vmlaq_n_u32(vdupq_n_u32(0x0302_0100), first, 0x0101_0101);
            let numbers = vqtbl4q_u8(vld1q_u8_x4(table.cast()), vreinterpretq_u8_u32(bytes));
            let rest = vreinterpretq_f32_u32(vshlq_n_u32::<4>(words));
            TakenBits { number: Self(vreinterpretq_f32_u8(numbers)), rest: Self(rest) }
        }
        fn look_up_bytes(self, table: *const i8) -> TableBytes<Self> {
            let words = vreinterpretq_u8_f32(self.0);
            let entries = vld1q_u8(table.cast());
            let upper = vqtbl1q_u8(entries, vshrq_n_u8::<4>(words));
            let lower = vqtbl1q_u8(entries, vandq_u8(words, vdupq_n_u8(0xf)));
            TableBytes { upper: Self(vreinterpretq_f32_u8(upper)), lower: Self(vreinterpretq_f32_u8(lower)) }
        }
        fn take_float8<const SHIFT: u32>(self) -> TakenBits<Self> {
            let words = vreinterpretq_u32_f32(self.0);
            // Shifted with its sign, and the copies of the sign are masked.
            let shifted = vshlq_s32(vreinterpretq_s32_u32(words), vdupq_n_s32(-(SHIFT as i32)));
            let number = vandq_u32(vreinterpretq_u32_s32(shifted), vdupq_n_u32(float8_mask(SHIFT)));
            let rest = vreinterpretq_f32_u32(vshlq_n_u32::<8>(words));
            TakenBits { number: Self(vreinterpretq_f32_u32(number)), rest: Self(rest) }
        }
        fn load_f16(from: *const u16) -> Self { Self(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)))) }
        fn store_bf16(self, to: *mut u16) {
            let bits = vreinterpretq_u32_f32(self.0);
            let odd = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
            let quiet = vorrq_u32(bits, vdupq_n_u32(0x0040_0000));
            let is_number = vceqq_f32(self.0, self.0);
            vst1_u16(to, vshrn_n_u32::<16>(vbslq_u32(is_number, rounded, quiet)));
        }
        fn store_f16(self, to: *mut u16) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(self.0))) }
        fn store_halves(self, to: *mut f32) { self.store_bf16(to.cast()) }
        fn store_pairs(self, high: Self, to: *mut f32) {
            // Eight bf16 are four words.
            let mut pairs = self.0;
            asm!(
                ".arch_extension bf16",
                "bfcvtn {low:v}.4h, {low:v}.4s",
                "bfcvtn {high:v}.4h, {high:v}.4s",
                "zip1 {low:v}.8h, {low:v}.8h, {high:v}.8h",
                low = inout(vreg) pairs,
                high = inout(vreg) high.0 => _,
                options(pure, nomem, nostack, preserves_flags),
            );
            vst1q_f32(to, pairs);
        }

        fn add(self, other: Self) -> Self { Self(vaddq_f32(self.0, other.0)) }
        fn sub(self, other: Self) -> Self { Self(vsubq_f32(self.0, other.0)) }
        fn mul(self, other: Self) -> Self { Self(vmulq_f32(self.0, other.0)) }
        fn div(self, other: Self) -> Self { Self(vdivq_f32(self.0, other.0)) }
        fn mul_add(self, factor: Self, addend: Self) -> Self { Self(vfmaq_f32(addend.0, self.0, factor.0)) }
        fn max(self, other: Self) -> Self { Self(vbslq_f32(vcgtq_f32(self.0, other.0), self.0, other.0)) }
        fn abs(self) -> Self { Self(vabsq_f32(self.0)) }
        fn less_than(self, other: Self) -> Self::Mask { vcltq_f32(self.0, other.0) }
        fn select(mask: Self::Mask, yes: Self, no: Self) -> Self { Self(vbslq_f32(mask, yes.0, no.0)) }
        fn sum(self) -> f32 { vaddvq_f32(self.0) }
        fn sum_each(vectors: &[Self; MAX_LANES]) -> Self {
            let [a, b, c, d, ..] = *vectors;
            Self(vpaddq_f32(vpaddq_f32(a.0, b.0), vpaddq_f32(c.0, d.0)))
        }
        fn exp2(self) -> Self {
            let round = vdupq_n_f32(EXP2_ROUND);
            let least = vdupq_n_f32(EXP2_MIN);
            let shifted = vaddq_f32(vmaxq_f32(self.0, least), round);
            let f = vsubq_f32(self.0, vsubq_f32(shifted, round));
            let whole = vreinterpretq_f32_u32(vshlq_n_u32::<23>(vreinterpretq_u32_f32(shifted)));
            let scaled = vreinterpretq_u32_f32(vmulq_f32(polynomial(Self(f), &EXP2).0, whole));
            Self(vreinterpretq_f32_u32(vbicq_u32(scaled, vcltq_f32(self.0, least))))
        }
        fn prefetch(at: *const u8) { asm!("prfm pldl1keep, [{}]", in(reg) at, options(nostack, readonly, preserves_flags)) }
        fn transpose(from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize) {
            // Rows `r` and `r + 1`, then `r` and `r + 2` trade places.
            let row = |r: usize| vld1q_f32(from.add(r * from_stride));
            let a = row(0);
            let b = row(1);
            let c = row(2);
            let d = row(3);
            let even = |x, y| vreinterpretq_f64_f32(vtrn1q_f32(x, y));
            let odd = |x, y| vreinterpretq_f64_f32(vtrn2q_f32(x, y));
            let above = [even(a, b), odd(a, b)];
            let below = [even(c, d), odd(c, d)];
            for column in 0..2 {
                let x = above[column];
                let y = below[column];
                vst1q_f32(to.add(column * to_stride), vreinterpretq_f32_f64(vzip1q_f64(x, y)));
                vst1q_f32(to.add((2 + column) * to_stride), vreinterpretq_f32_f64(vzip2q_f64(x, y)));
            }
        }
    }
}

impl ByLane for Neon {
    #[inline(always)]
    unsafe fn mul_add_lane<const LANE: i32>(sum: float32x4_t, b: float32x4_t, a: float32x4_t) -> float32x4_t {
        // SAFETY: as this function's contract.
        unsafe { vfmaq_laneq_f32::<LANE>(sum, b, a) }
    }
}

/// The kernel for words of one f32. There is no kernel of f16 products: `fmlal` multiplies four pairs into f32 as
/// `fmla` does, so it would only save the widening of each block, and weights would have to be rounded to f16.
impl Kernel for Neon {
    type Vector = Self;
    const ELEMENTS: usize = 1;
    const ROWS: usize = ROWS;
    const VECTORS: usize = VECTORS;

    compiled_for!("neon");

    #[inline(always)]
    unsafe fn multiply_columns<B: Columns>(product: &PanelProduct) {
        // SAFETY: as this method's contract.
        unsafe {
            if const { B::IS_WORDS } {
                return multiply_by_lane::<Neon, B>(product);
            }
            multiply_rows::<Neon, B>(product, 0);
        }
    }
}

/// The kernel for pairs of bf16: a word of two elements is multiplied and added in one instruction.
///
/// `bfdot` rounds the two products' sum to odd, and then that sum and what was there: an inexact f32 gets 1 as its last
/// bit. It errs by up to an ulp, in either direction alike, where rounding to nearest errs by half of one; operands of
/// 8 bits err by 2^15 times as much. Subnormal numbers are zeros to it. The rounding would be another one if a program
/// set `FPCR.EBF` where the processor has it; none of this needs either.
///
/// The intrinsics are not stable. `.arch_extension` permits the instructions in a build without optimisation, where a
/// closure is not part of the functions that are compiled for the instruction set.
pub(crate) struct NeonBf16;

impl ByLane for NeonBf16 {
    #[inline(always)]
    unsafe fn mul_add_lane<const LANE: i32>(mut sum: float32x4_t, b: float32x4_t, a: float32x4_t) -> float32x4_t {
        // SAFETY: as this function's contract.
        unsafe {
            asm!(
                ".arch_extension bf16",
                "bfdot {sum:v}.4s, {b:v}.8h, {a:v}.2h[{lane}]",
                sum = inout(vreg) sum,
                b = in(vreg) b,
                a = in(vreg) a,
                lane = const LANE,
                options(pure, nomem, nostack, preserves_flags),
            );
        }
        sum
    }
}

impl Kernel for NeonBf16 {
    type Vector = Neon;
    const ELEMENTS: usize = 2;
    const ROWS: usize = ROWS;
    const VECTORS: usize = VECTORS;

    compiled_for!("neon,bf16");

    #[inline(always)]
    unsafe fn add_product(sum: Neon, a: Neon, b: Neon) -> Neon {
        // SAFETY: the processor has the instruction set; a splat has its word in every lane, so in lane 0.
        Neon(unsafe { Self::mul_add_lane::<0>(sum.0, b.0, a.0) })
    }

    #[inline(always)]
    unsafe fn multiply_columns<B: Columns>(product: &PanelProduct) {
        // SAFETY: as this method's contract.
        unsafe { multiply_by_lane::<NeonBf16, B>(product) }
    }
}

/// Eight rows by three vectors are 24 sums, which hide the latency of four multiply-adds a cycle; three or four words
/// of A and one to three of B fill the other registers.
const ROWS: usize = 8;
const VECTORS: usize = 3;

const LANES: usize = 4;
const PANEL: usize = VECTORS * LANES;

/// Multiply-adds with one lane of a vector.
trait ByLane: Kernel {
    /// Returns `sum + a[LANE] · b`, over both elements of a word where there are two.
    ///
    /// # Safety
    /// The processor has the instruction set.
    unsafe fn mul_add_lane<const LANE: i32>(sum: float32x4_t, b: float32x4_t, a: float32x4_t) -> float32x4_t;
}

type TileSums<const N: usize> = [[float32x4_t; ROWS]; N];

/// Computes a product of words, eight rows at a time.
///
/// # Safety
/// As [`multiply`](crate::cpu::multiply).
#[inline(always)]
unsafe fn multiply_by_lane<M: ByLane, B: Columns>(product: &PanelProduct) {
    let whole = product.rows / ROWS * ROWS;
    for row in (0..whole).step_by(ROWS) {
        // SAFETY: as this function's contract; `row + ROWS` rows exist.
        unsafe {
            match product.vectors {
                1 => tile::<M, 1>(product, row),
                2 => tile::<M, 2>(product, row),
                _ => tile::<M, VECTORS>(product, row),
            }
        }
    }
    // SAFETY: as this function's contract.
    unsafe { multiply_rows::<M, B>(product, whole) };
}

/// Computes the eight rows from `row` on, for N vectors of the panel.
///
/// # Safety
/// As [`multiply_by_lane`]; the rows exist.
#[inline(always)]
unsafe fn tile<M: ByLane, const N: usize>(product: &PanelProduct, row: usize) {
    let a_row = product.a.row;
    // SAFETY: as this function's contract.
    unsafe {
        let mut sums: TileSums<N> = [[vdupq_n_f32(0.0); ROWS]; N];
        let mut a = product.a.at.wrapping_add(row / ROWS * product.a.group);
        let mut b = product.b.at;
        let mut left = product.depth;
        if a_row == 1 {
            while left > 0 {
                eight_rows::<M, N>(&mut sums, a, b);
                a = a.wrapping_add(product.a.step);
                b = b.add(PANEL);
                left -= 1;
            }
        } else if product.a.step == 1 {
            while left >= 4 {
                four_steps::<M, N, 0>(&mut sums, a, a_row, b);
                // Read again: the compiler would spill the columns that both halves share, since no register is free.
                let mut again = b;
                asm!("/* {} */", inout(reg) again, options(pure, readonly, nostack, preserves_flags));
                four_steps::<M, N, 4>(&mut sums, a.add(4 * a_row), a_row, again);
                a = a.wrapping_add(4);
                b = b.add(4 * PANEL);
                left -= 4;
            }
        }
        while left > 0 {
            one_step::<M, N, 0>(&mut sums, a, a_row, b);
            one_step::<M, N, 4>(&mut sums, a.add(4 * a_row), a_row, b);
            a = a.wrapping_add(product.a.step);
            b = b.add(PANEL);
            left -= 1;
        }
        let c = product.c.add(row * PANEL);
        for (n, sums) in sums.iter().enumerate() {
            for (r, &sum) in sums.iter().enumerate() {
                let at = c.add(r * PANEL + n * LANES);
                match product.factors {
                    None => vst1q_f32(at, sum),
                    Some(factors) => vst1q_f32(at, vfmaq_f32(sum, vld1q_f32(at), vld1q_f32(factors.add(n * LANES)))),
                }
            }
        }
    }
}

/// Adds one step of the depth for eight rows, whose words are contiguous.
///
/// # Safety
/// As [`multiply_by_lane`].
#[inline(always)]
unsafe fn eight_rows<M: ByLane, const N: usize>(sums: &mut TileSums<N>, a: *const f32, b: *const f32) {
    // SAFETY: as this function's contract.
    unsafe {
        let above = vld1q_f32(a);
        let below = vld1q_f32(a.add(4));
        for (n, sums) in sums.iter_mut().enumerate() {
            let column = vld1q_f32(b.add(n * LANES));
            sums[0] = M::mul_add_lane::<0>(sums[0], column, above);
            sums[1] = M::mul_add_lane::<1>(sums[1], column, above);
            sums[2] = M::mul_add_lane::<2>(sums[2], column, above);
            sums[3] = M::mul_add_lane::<3>(sums[3], column, above);
            sums[4] = M::mul_add_lane::<0>(sums[4], column, below);
            sums[5] = M::mul_add_lane::<1>(sums[5], column, below);
            sums[6] = M::mul_add_lane::<2>(sums[6], column, below);
            sums[7] = M::mul_add_lane::<3>(sums[7], column, below);
        }
    }
}

/// Adds four steps of the depth, whose words are contiguous, for four rows.
///
/// # Safety
/// As [`multiply_by_lane`].
#[inline(always)]
unsafe fn four_steps<M: ByLane, const N: usize, const FIRST: usize>(
    sums: &mut TileSums<N>,
    a: *const f32,
    a_row: usize,
    b: *const f32,
) {
    // SAFETY: as this function's contract.
    unsafe {
        let words = [0, 1, 2, 3].map(|r| vld1q_f32(a.add(r * a_row)));
        step::<M, N, FIRST, 0>(sums, words, b);
        step::<M, N, FIRST, 1>(sums, words, b.add(PANEL));
        step::<M, N, FIRST, 2>(sums, words, b.add(2 * PANEL));
        step::<M, N, FIRST, 3>(sums, words, b.add(3 * PANEL));
    }
}

/// Adds one step of the depth for four rows, at any strides.
///
/// # Safety
/// As [`multiply_by_lane`].
#[inline(always)]
unsafe fn one_step<M: ByLane, const N: usize, const FIRST: usize>(
    sums: &mut TileSums<N>,
    a: *const f32,
    a_row: usize,
    b: *const f32,
) {
    // SAFETY: as this function's contract.
    unsafe {
        let words = [0, 1, 2, 3].map(|r| vld1q_dup_f32(a.add(r * a_row)));
        step::<M, N, FIRST, 0>(sums, words, b);
    }
}

/// Adds one step of the depth for four rows, whose words are in the given lane.
///
/// # Safety
/// As [`multiply_by_lane`].
#[inline(always)]
unsafe fn step<M: ByLane, const N: usize, const FIRST: usize, const LANE: i32>(
    sums: &mut TileSums<N>,
    words: [float32x4_t; 4],
    b: *const f32,
) {
    // SAFETY: as this function's contract.
    unsafe {
        for (n, sums) in sums.iter_mut().enumerate() {
            let column = vld1q_f32(b.add(n * LANES));
            sums[FIRST] = M::mul_add_lane::<LANE>(sums[FIRST], column, words[0]);
            sums[FIRST + 1] = M::mul_add_lane::<LANE>(sums[FIRST + 1], column, words[1]);
            sums[FIRST + 2] = M::mul_add_lane::<LANE>(sums[FIRST + 2], column, words[2]);
            sums[FIRST + 3] = M::mul_add_lane::<LANE>(sums[FIRST + 3], column, words[3]);
        }
    }
}
