//! What is not a number reaches its own row, or its own column, and nobody else.

use crate::linear::case::{Case, Product, TYPES};
use crate::linear::gradients::Projection;
use crate::*;

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

/// A case with these numbers in it.
fn poisoned(product: &Product, poisons: &[Poison]) -> Case {
    let (place, mut case) = (|part: f64, count: usize| (part * (count - 1) as f64).round() as usize, product.case());
    for Poison { of, at, value } in poisons {
        let (input, column) = (place(at.1, product.inputs), place(at.0, product.outputs));
        let (array, index) = match of {
            Operand::Input => (&mut case.xs, [0, 0, place(at.0, product.rows), input]),
            Operand::Weight => (&mut case.weight, [0, 0, column, input]),
            Operand::Bias => (case.bias.as_mut().expect("a bias"), [0, 0, 0, column]),
        };
        let at = array.place(index);
        array.data[at] = *value;
    }
    case
}

/// Sizes that leave something over everywhere: tiles of rows, vectors, panels and blocks.
#[test]
fn what_is_no_number_reaches_only_its_row_or_column() {
    let sizes = select(&[(1, 9, 19), (5, 261, 50), (21, 67, 97), (195, 33, 13)][..]);
    for_all(400, (select(&TYPES[..]), sizes, poisons()), |(types, (rows, inputs, outputs), poisons)| {
        let product = Product { bias: true, ..Product::plain(types, rows, (inputs, outputs)) };
        let [clean, spoilt] = [product.case(), poisoned(&product, &poisons)].map(Projection::of);
        let (expected, tiers) = (spoilt.case.expected()?, Tier::available().into_iter().map(Some).collect::<Vec<_>>());
        isolates([&clean, &spoilt], &tiers, |_, results| expected.compare(&results[0]))
    });
}
