//! Projections beside forbidden pages.

use proptest::prelude::*;
use proptest::sample::select;

use crate::common::property::for_all;
use crate::last_words;
use crate::linear::case::{Layout, Outcome, Recipe, TYPES, check};
use crate::linear::draw::{INPUTS, OUTPUTS, ROWS, recipes};

/// Layouts whose input ends, and begins, where its buffer does.
const TIGHT: [Layout; 5] =
    [Layout::Contiguous, Layout::LeadingTransposed, Layout::ColumnMajor, Layout::OneRow, Layout::RankFour];

/// A pool of its own for each case, so that no scratch memory is left that is larger than the case needs.
fn holds(recipe: &Recipe) -> Outcome {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().map_err(|error| error.to_string())?;
    last_words::name(format!("an access outside of the buffers, on one of the tiers, in\n{recipe:#?}\n"));
    pool.install(|| check(recipe))
}

#[test]
fn random_projections_stay_in_their_buffers() {
    let strategy = (recipes(), prop_oneof![3 => select(&TIGHT[..]), 1 => select(&Layout::ALL[..])]);
    for_all(300, strategy, |(recipe, layout)| holds(&Recipe { layout, ..recipe }));
}

#[test]
fn every_edge_of_a_projection_stays_in_its_buffers() {
    for (n, &inputs) in INPUTS.iter().enumerate() {
        for (m, &outputs) in OUTPUTS.iter().enumerate().filter(|(_, outputs)| **outputs <= 101) {
            let rows = ROWS[(2 * n + 3 * m) % 23];
            let recipe = Recipe::plain(TYPES[(n + m) % 5], rows, (inputs, outputs));
            let recipe = Recipe { layout: TIGHT[(n + m / 5) % 5], ..recipe };
            holds(&recipe).unwrap_or_else(|difference| panic!("{difference}\n{recipe:?}"));
        }
    }
}
