//! Matrix products whose words of A come from a lane of a register.
//!
//! A broadcast word costs an Arm processor a load and, on most, a vector operation that a multiply-add could have had.
//! Multiply-adds take a lane of a register just as well, so a load brings four words of A: four steps of the
//! depth, or four rows where rows lie side by side. For 96 multiply-adds that are 32 loads at most, and no register is
//! spilt.

use std::arch::aarch64::*;
use std::arch::asm;

use crate::cpu::product::{MulAdd, Product, Words, remaining_rows};

/// Eight rows by three vectors are 24 sums, which hide the latency of four multiply-adds a cycle; three or four words
/// of A and one to three of B fill the other registers.
pub(super) const ROWS: usize = 8;
pub(super) const VECTORS: usize = 3;

const LANES: usize = 4;
const PANEL: usize = VECTORS * LANES;

/// How a tier multiplies words and adds.
pub(super) trait ByLane: MulAdd {
    /// `sum + a[LANE] · b`, over both elements of a word where there are two.
    ///
    /// # Safety
    /// The processor has the tier.
    unsafe fn mul_add_lane<const LANE: i32>(sum: float32x4_t, b: float32x4_t, a: float32x4_t) -> float32x4_t;
}

type Sums<const N: usize> = [[float32x4_t; ROWS]; N];

/// [`Kernel::multiply`](crate::cpu::Kernel::multiply).
///
/// # Safety
/// As there.
#[inline(always)]
pub(super) unsafe fn multiply<M: ByLane>(product: &Product) {
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
    if whole < product.rows {
        // SAFETY: as this function's contract.
        unsafe { remaining_rows::<M, Words, ROWS, VECTORS>(product) };
    }
}

/// The eight rows from `row`, for N vectors of the panel.
///
/// # Safety
/// As [`multiply`]; the rows exist.
#[inline(always)]
unsafe fn tile<M: ByLane, const N: usize>(product: &Product, row: usize) {
    let a_row = product.a.row;
    // SAFETY: as this function's contract.
    unsafe {
        let mut sums: Sums<N> = [[vdupq_n_f32(0.0); ROWS]; N];
        let (mut a, mut b) = (product.a.at.wrapping_add(row / ROWS * product.a.group), product.b);
        let mut left = product.depth;
        if a_row == 1 {
            while left > 0 {
                eight_rows::<M, N>(&mut sums, a, b);
                (a, b, left) = (a.wrapping_add(product.a.step), b.add(PANEL), left - 1);
            }
        } else if product.a.step == 1 {
            while left >= 4 {
                four_steps::<M, N, 0>(&mut sums, a, a_row, b);
                // Read again: what both halves share would not fit beside the sums, and the compiler would spill it.
                let mut again = b;
                asm!("/* {} */", inout(reg) again, options(pure, readonly, nostack, preserves_flags));
                four_steps::<M, N, 4>(&mut sums, a.add(4 * a_row), a_row, again);
                (a, b, left) = (a.wrapping_add(4), b.add(4 * PANEL), left - 4);
            }
        }
        while left > 0 {
            one_step::<M, N, 0>(&mut sums, a, a_row, b);
            one_step::<M, N, 4>(&mut sums, a.add(4 * a_row), a_row, b);
            (a, b, left) = (a.wrapping_add(product.a.step), b.add(PANEL), left - 1);
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

/// One step of the depth, for eight rows that stand side by side.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn eight_rows<M: ByLane, const N: usize>(sums: &mut Sums<N>, a: *const f32, b: *const f32) {
    // SAFETY: as this function's contract.
    unsafe {
        let (above, below) = (vld1q_f32(a), vld1q_f32(a.add(4)));
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

/// Four steps of the depth, which stand side by side, for four rows.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn four_steps<M: ByLane, const N: usize, const FIRST: usize>(
    sums: &mut Sums<N>,
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

/// One step of the depth for four rows, at any strides.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn one_step<M: ByLane, const N: usize, const FIRST: usize>(
    sums: &mut Sums<N>,
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

/// One step of the depth for four rows, whose words are in the given lane.
///
/// # Safety
/// As [`multiply`].
#[inline(always)]
unsafe fn step<M: ByLane, const N: usize, const FIRST: usize, const LANE: i32>(
    sums: &mut Sums<N>,
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
