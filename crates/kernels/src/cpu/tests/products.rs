//! Tests of every instruction set's matrix product against plain loops.

use half::bf16;

use super::{Sequence, on_every_instruction_set};
use crate::cpu::{Kernel, LeftOperand, NextBytes, PanelProduct, RightOperand, SimdTask, Vector, multiply};

/// Returns a word of one or two elements.
fn word<K: Kernel>(elements: [f32; 2]) -> f32 {
    match K::ELEMENTS {
        1 => elements[0],
        _ => {
            let [low, high] = elements.map(|x| u32::from(bf16::from_f32(x).to_bits()));
            f32::from_bits(low | high << 16)
        }
    }
}

/// Returns the elements of a word. The second one of an f32 is 0.
fn elements<K: Kernel>(word: f32) -> [f64; 2] {
    let half = |bits: u32| f64::from(f32::from_bits(bits << 16));
    match K::ELEMENTS {
        1 => [f64::from(word), 0.0],
        _ => [half(word.to_bits() & 0xffff), half(word.to_bits() >> 16)],
    }
}

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    depth: usize,
    vectors: usize,
    a_group: usize,
    a_row: usize,
    a_step: usize,
    accumulates: bool,
}

impl Case {
    /// Compares the product with sums in f64. Words that the product may not read are NaN, and words that it may not
    /// write are compared too.
    ///
    /// # Safety
    /// As [`multiply`].
    unsafe fn check<K: Kernel>(self, number: &mut impl FnMut() -> f32, tolerance: f64) {
        let Self { rows, depth, vectors, a_group, a_row, a_step, accumulates } = self;
        let row_at = |row: usize| row / K::ROWS * a_group + row % K::ROWS * a_row;
        let panel = K::PANEL;
        let columns = vectors * K::Vector::LANES;
        let mut a = vec![f32::NAN; row_at(rows - 1) + (depth - 1) * a_step + 1];
        for row in 0..rows {
            (0..depth).for_each(|step| a[row_at(row) + step * a_step] = word::<K>([number(), number()]));
        }
        let mut b = vec![f32::NAN; depth * panel];
        let mut c = vec![f32::NAN; rows * panel];
        for row in b.chunks_exact_mut(panel) {
            row[..columns].fill_with(|| word::<K>([number(), number()]));
        }
        for row in c.chunks_exact_mut(panel) {
            // The numbers that the product is added to; they are overwritten with NaN below if it is not.
            (0..panel).for_each(|column| row[column] = if column < columns { number() } else { 7.0 });
        }
        if !accumulates {
            c.chunks_exact_mut(panel).for_each(|row| row[..columns].fill(f32::NAN));
        }
        let factors: Vec<f32> = (0..panel).map(|_| number()).collect();
        let before = c.clone();
        let product = PanelProduct {
            a: LeftOperand { at: a.as_ptr(), group: a_group, row: a_row, step: a_step },
            b: RightOperand::words(b.as_ptr(), panel),
            c: c.as_mut_ptr(),
            rows,
            depth,
            vectors,
            factors: accumulates.then_some(factors.as_ptr()),
            next: NextBytes::NONE,
        };
        // SAFETY: the processor has the instruction set of K; the matrices have these sizes.
        unsafe { multiply::<K>(&product) };
        for row in 0..rows {
            for column in 0..panel {
                let got = f64::from(c[row * panel + column]);
                let old = f64::from(before[row * panel + column]);
                if column >= columns {
                    assert_eq!(got, old, "{self:?}: column {column} of row {row} was written");
                    continue;
                }
                let scaled = if accumulates { old * f64::from(factors[column]) } else { 0.0 };
                let mut exact = scaled;
                let mut magnitude = scaled.abs();
                for step in 0..depth {
                    let left = elements::<K>(a[row_at(row) + step * a_step]);
                    let right = elements::<K>(b[step * panel + column]);
                    for (x, y) in left.into_iter().zip(right) {
                        exact += x * y;
                        magnitude += (x * y).abs();
                    }
                }
                let error = (got - exact).abs();
                assert!(error <= tolerance * magnitude, "{self:?}: row {row}, column {column}: {got:e}, {exact:e}");
            }
        }
    }
}

/// Calls a function with products of every kind of size, A row by row, or group by group with gaps between them, and
/// for words of one element also column by column, within groups and across them, and neither.
fn cases<K: Kernel>(mut each: impl FnMut(Case)) {
    let least = K::MIN_ROWS;
    let some = [K::ROWS, 2 * K::ROWS, 3 * K::ROWS, 5 * K::ROWS, least, 2 * least, 3 * least, K::ROWS + 7 * least];
    for rows in some {
        for depth in [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 31, 65].map(|n: usize| n.next_multiple_of(K::DEPTH)) {
            for vectors in 1..=K::VECTORS {
                for accumulates in [false, true] {
                    let n = K::ROWS;
                    let mut strides =
                        vec![(n * depth, depth, 1), (n * (depth + 5), depth + 5, 1), (n * depth + 7, depth, 1)];
                    if K::ELEMENTS == 1 {
                        strides.extend([(n * depth, 1, n), (n, 1, rows + 3), (2 * n, 2, 2 * rows + 1)]);
                    }
                    for (a_group, a_row, a_step) in strides {
                        each(Case { rows, depth, vectors, a_group, a_row, a_step, accumulates });
                    }
                }
            }
        }
    }
}

struct WholeNumbers;

impl SimdTask for WholeNumbers {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let mut sequence = Sequence(3);
        // SAFETY: the processor has the instruction set of K.
        cases::<K>(|case| unsafe { case.check::<K>(&mut || sequence.whole(9), 0.0) });
    }
}

/// Sums of small whole numbers are exact in any order and by any rounding.
#[test]
fn products_of_whole_numbers_are_exact() {
    on_every_instruction_set(|| WholeNumbers);
}

struct Fractions;

impl SimdTask for Fractions {
    type Output = ();

    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let mut sequence = Sequence(4);
        cases::<K>(|case| {
            // A rounding of up to an ulp for each product, for each sum, and for the numbers that are added to.
            let roundings = 2 * case.depth * K::ELEMENTS + 2;
            let tolerance = roundings as f64 * f64::from(f32::EPSILON);
            // SAFETY: the processor has the instruction set of K.
            unsafe { case.check::<K>(&mut || sequence.fraction(), tolerance) };
        });
    }
}

#[test]
fn products_of_fractions_err_within_rounding() {
    on_every_instruction_set(|| Fractions);
}
