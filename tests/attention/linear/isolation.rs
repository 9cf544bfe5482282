//! What is not a number reaches its own row, or its own column, and nobody else.

use candle_attention::cpu::Tier;
use candle_core::Result;
use proptest::prelude::*;
use proptest::sample::select;

use crate::common::property::for_all;
use crate::linear::case::{Outcome, Product, TYPES, bits};

/// One number of a product, as fractions of its row and column.
#[derive(Debug, Clone)]
struct Poison {
    of: Operand,
    at: (f64, f64),
    value: f64,
}

#[derive(Debug, Clone, Copy)]
enum Operand {
    Input,
    Weight,
    Bias,
}

/// Infinities of both signs in one sum make a NaN, an infinite input over a weight of zero does too.
fn poisons() -> impl Strategy<Value = Vec<Poison>> {
    let of = select(&[Operand::Input, Operand::Weight, Operand::Bias][..]);
    // The ends are what tiles leave over.
    let at = || prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0];
    let value = select(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0][..]);
    proptest::collection::vec((of, (at(), at()), value).prop_map(|(of, at, value)| Poison { of, at, value }), 1..=3)
}

/// What a number reaches is what plain loops give, and the rest has the bits that it had.
fn check(product: &Product, poisons: &[Poison]) -> Result<Outcome> {
    let (case, mut poisoned) = (product.case(), product.case());
    let (mut rows, mut columns) = (vec![false; product.rows], vec![false; product.outputs]);
    let place = |fraction: f64, count: usize| (fraction * (count - 1) as f64).round() as usize;
    for Poison { of, at, value } in poisons {
        let input = place(at.1, product.inputs);
        let column = place(at.0, product.outputs);
        match of {
            Operand::Input => {
                let row = place(at.0, product.rows);
                rows[row] = true;
                let at = poisoned.xs.place([0, 0, row, input]);
                poisoned.xs.data[at] = *value;
            }
            Operand::Weight => {
                columns[column] = true;
                let at = poisoned.weight.place([0, 0, column, input]);
                poisoned.weight.data[at] = *value;
            }
            Operand::Bias => {
                columns[column] = true;
                poisoned.bias.as_mut().expect("a bias").data[column] = *value;
            }
        }
    }
    let expected = poisoned.expected()?;
    for tier in Tier::available() {
        let (clean, ys) = (bits(&case.forward(tier)?), poisoned.forward(tier)?);
        if let Err(difference) = expected.compare(&ys) {
            return Ok(Err(format!("{tier}: {difference}")));
        }
        for (n, (found, clean)) in bits(&ys).into_iter().zip(clean).enumerate() {
            let (row, column) = (n / product.outputs, n % product.outputs);
            if found != clean && !rows[row] && !columns[column] {
                return Ok(Err(format!("{tier}: row {row}, column {column} changes")));
            }
        }
    }
    Ok(Ok(()))
}

/// Sizes that leave something over everywhere: tiles of rows, vectors, panels and blocks.
#[test]
fn what_is_no_number_reaches_only_its_row_or_column() {
    let sizes = select(&[(1, 9, 19), (5, 261, 50), (21, 67, 97), (195, 33, 13)][..]);
    for_all(400, (select(&TYPES[..]), sizes, poisons()), |(types, (rows, inputs, outputs), poisons)| {
        let product = Product { bias: true, ..Product::plain(types, rows, (inputs, outputs)) };
        check(&product, &poisons).unwrap_or_else(|error| Err(error.to_string()))
    });
}
