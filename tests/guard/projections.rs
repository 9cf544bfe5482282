//! Projections beside forbidden pages.

use proptest::prelude::*;
use proptest::sample::select;

use crate::common::property::for_all;
use crate::last_words;
use crate::linear::case::{Layout, Outcome, Product, TYPES, check};
use crate::linear::draw::{INPUTS, OUTPUTS, ROWS, products};

/// Layouts whose input ends, and begins, where its buffer does.
const TIGHT: [Layout; 5] =
    [Layout::Contiguous, Layout::LeadingTransposed, Layout::ColumnMajor, Layout::OneRow, Layout::RankFour];

/// A pool of its own for each case, so that no scratch memory is left that is larger than the case needs.
fn holds(product: &Product) -> Outcome {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().map_err(|error| error.to_string())?;
    last_words::name(format!("an access outside of the buffers, on one of the tiers, in\n{product:#?}\n"));
    pool.install(|| check(product))
}

#[test]
fn random_projections_stay_in_their_buffers() {
    let strategy = (products(), prop_oneof![3 => select(&TIGHT[..]), 1 => select(&Layout::ALL[..])]);
    for_all(64, strategy, |(product, layout)| holds(&Product { layout, ..product }));
}

#[test]
fn every_edge_of_a_projection_stays_in_its_buffers() {
    for (n, &inputs) in INPUTS.iter().enumerate() {
        for (m, &outputs) in OUTPUTS.iter().enumerate().filter(|(_, outputs)| **outputs <= 101) {
            let rows = ROWS[(2 * n + 3 * m) % 23];
            let product = Product::plain(TYPES[(n + m) % 5], rows, (inputs, outputs));
            let product = Product { layout: TIGHT[(n + m / 5) % 5], ..product };
            holds(&product).unwrap_or_else(|difference| panic!("{difference}\n{product:?}"));
        }
    }
}
