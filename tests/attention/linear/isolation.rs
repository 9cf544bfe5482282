//! NaN and infinities reach their row or their column of a product, and no others.

use crate::linear::case::{Product, TYPES};
use crate::linear::gradients::Projection;
use crate::*;

/// One number of a buffer, as fractions of its rows and columns.
#[derive(Debug, Clone)]
struct Poison {
    buffer: usize,
    at: [f64; 2],
    value: f64,
}

/// Draws infinities too: of both signs in one sum they make a NaN, and so does an infinite input times a weight of
/// zero.
fn poisons() -> impl Strategy<Value = Vec<Poison>> {
    // The last rows and columns are outside of whole tiles.
    let at = || prop_oneof![Just(0.0), Just(1.0), 0.0..=1.0];
    let value = select(&[f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0][..]);
    let poison = (0..3usize, [at(), at()], value).prop_map(|(buffer, at, value)| Poison { buffer, at, value });
    proptest::collection::vec(poison, 1..=3)
}

/// Returns the call with these special numbers.
fn poisoned(call: &Projection, poisons: &[Poison]) -> Projection {
    let place = |part: f64, count: usize| (part * (count - 1) as f64).round() as usize;
    let mut call = call.clone();
    let [outputs, inputs] = [2, 3].map(|dim| call.case.weight.dim(dim));
    for Poison { buffer, at: [row, column], value } in poisons {
        let width = [inputs, outputs, inputs][*buffer];
        let data = &mut call.buffers()[*buffer].1;
        let row = place(*row, data.len() / width);
        data[row * width + place(*column, width)] = *value;
    }
    call
}

/// Draws sizes that are no multiples of tiles of rows, vectors, panels and blocks.
#[test]
fn linear_nan_reaches_only_its_row_or_column() {
    let sizes = select(&[(1, 9, 19), (5, 261, 50), (21, 67, 97), (195, 33, 13)][..]);
    for_all(400, (select(&TYPES[..]), sizes, poisons()), |(types, (rows, inputs, outputs), poisons)| {
        let product = Product { bias: true, ..Product::plain(types, rows, (inputs, outputs)) };
        let clean = Projection::of(product.case());
        let spoilt = poisoned(&clean, &poisons);
        let expected = spoilt.case.expected()?;
        let instruction_sets = InstructionSet::available().into_iter().map(Some).collect::<Vec<_>>();
        isolates([&clean, &spoilt], &instruction_sets, |_, results| expected.compare(&results[0]))
    });
}
