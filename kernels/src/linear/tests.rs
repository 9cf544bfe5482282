//! The kernels alone, without tensors: small enough for Miri, which finds what reads or writes out of bounds on the scalar
//! tier. `tests/attention/linear` holds every tier to f64.

use std::ops::Range;

use half::{bf16, f16};

use super::{PackedWeight, Projection, project, project_vec};
use crate::cpu::Tier;
use crate::{Element, Error};

/// Numbers between -1 and 1 in no order.
fn numbers<E: Element>(count: usize, salt: u64) -> Vec<E> {
    let number = |n: u64| ((n + 1).wrapping_mul(salt.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1) >> 40) as f32;
    (0..count as u64).map(|n| E::from_f32(number(n) / (1 << 23) as f32 - 1.0)).collect()
}

#[derive(Debug, Clone)]
struct Case {
    rows: usize,
    inputs: usize,
    outputs: usize,
    columns: Range<usize>,
    /// Elements of the input between one row and the next.
    gap: usize,
    bias: bool,
}

impl Case {
    /// The largest difference between a product and plain loops in f64, relative to the sum of the magnitudes.
    fn difference<W: Element + PartialEq + Into<f32>, X: Element + Into<f32>>(&self, tier: Tier) -> f64 {
        let Self { rows, inputs, outputs, ref columns, gap, bias } = *self;
        let weight: Vec<W> = numbers(outputs * inputs, 1);
        let xs_row = inputs + gap;
        let xs: Vec<X> = numbers((rows * xs_row).saturating_sub(gap), 2);
        let bias: Option<Vec<f32>> = bias.then(|| numbers(outputs, 3));
        let packed = PackedWeight::new(&weight, (outputs, inputs), tier).expect("memory");
        assert!(packed.unpack::<W>().expect("memory") == weight, "{tier}: {self:?} is not unpacked as it was");
        let projection =
            Projection { weight: &packed, bias: bias.as_deref(), xs: &xs, xs_row, rows, columns: columns.clone() };
        let out = project_vec(&projection).expect("memory");
        assert_eq!(out.len(), rows * columns.len());
        let number = |x: f32| f64::from(x);
        let entry = |(at, &found): (usize, &X)| {
            let (row, column) = (at / columns.len(), columns.start + at % columns.len());
            let terms = (0..inputs)
                .map(|input| number(xs[row * xs_row + input].into()) * number(weight[column * inputs + input].into()));
            let bias = bias.as_ref().map_or(0.0, |bias| number(bias[column]));
            let (sum, size) = terms.fold((bias, bias.abs()), |(sum, size), term| (sum + term, size + term.abs()));
            let difference = (number(found.into()) - sum).abs();
            if difference == 0.0 { 0.0 } else { difference / size }
        };
        out.iter().enumerate().map(entry).fold(0.0, f64::max)
    }
}

fn case(rows: usize, inputs: usize, outputs: usize) -> Case {
    Case { rows, inputs, outputs, columns: 0..outputs, gap: rows % 3, bias: outputs.is_multiple_of(2) }
}

#[test]
fn every_tier_gives_the_numbers_of_plain_loops() {
    let mut cases = vec![case(1, 3, 2), case(3, 18, 17), Case { columns: 1..18, ..case(2, 5, 19) }, case(2, 0, 3)];
    if !cfg!(miri) {
        cases.extend([case(0, 4, 4), case(3, 4, 0), case(17, 33, 49), case(5, 513, 97), case(193, 40, 50)]);
        cases.push(Case { columns: 47..97, ..case(20, 257, 100) });
    }
    // Interpreted, a product takes seconds.
    let tiers = if cfg!(miri) { vec![Tier::Scalar] } else { Tier::available() };
    for tier in tiers {
        for case in &cases {
            for (difference, most) in [
                (case.difference::<f32, f32>(tier), 1e-6),
                (case.difference::<bf16, bf16>(tier), 4e-3),
                (case.difference::<f16, f16>(tier), 5e-4),
                (case.difference::<bf16, f32>(tier), 1e-6),
                (case.difference::<f16, f32>(tier), 1e-6),
            ] {
                assert!(difference < most, "{tier}: {case:?} is off by {difference:e}, more than {most:e}");
            }
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_errors() {
    let rows = [1f32, 2.0, 3.0, 4.0, 5.0, 6.0];
    let weight = PackedWeight::new(&rows, (3, 2), Tier::Scalar).expect("a small weight");
    let good = Projection { weight: &weight, bias: None, xs: &rows, xs_row: 2, rows: 3, columns: 0..3 };
    assert_eq!(project_vec(&good).expect("a good call").len(), 9);
    let (start, end) = (2, 1);
    let cases = [
        (Projection { columns: 1..4, ..good.clone() }, "expected columns within 3 outputs, found 1..4"),
        (Projection { columns: start..end, ..good.clone() }, "expected columns within 3 outputs, found 2..1"),
        (Projection { bias: Some(&rows[..2]), ..good.clone() }, "bias has 2 elements, expected 3"),
        (Projection { rows: 4, ..good.clone() }, "expected 4 rows of 2 elements, 2 apart, found 6 elements"),
        (Projection { xs_row: 3, ..good.clone() }, "expected 3 rows of 2 elements, 3 apart, found 6 elements"),
        (
            Projection { rows: usize::MAX, xs_row: 0, ..good.clone() },
            &format!("an output of {} rows of 3 does not fit in memory", usize::MAX),
        ),
    ];
    for (projection, expected) in cases {
        assert_eq!(project_vec(&projection).expect_err(expected).to_string(), expected);
    }
    let error = project(&good, &mut Box::new_uninit_slice(8)).expect_err("too short");
    assert_eq!(error.to_string(), "output has 8 elements, expected 9");
    let error = PackedWeight::new(&rows, (2, 2), Tier::Scalar).expect_err("a wrong shape");
    assert_eq!(error.to_string(), "the weight has 6 elements, expected 4");
    assert_eq!(weight.unpack::<bf16>().expect_err("f32").to_string(), "expected a weight of BF16, found F32");
    let missing = Tier::ALL.into_iter().find(|tier| !tier.is_available()).expect("of another processor");
    assert!(matches!(PackedWeight::new(&rows, (3, 2), missing), Err(Error::Tier(_))));
}
