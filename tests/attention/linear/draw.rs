//! Random cases: sizes at the edges of vectors, panels, tiles and blocks.

use proptest::prelude::*;
use proptest::sample::select;

use crate::common::property::within;
use crate::linear::case::{Layout, Product, TYPES, WeightLayout};

/// Groups of 2, 4, 8 and 16 rows, and tasks of 192.
pub const ROWS: [usize; 27] =
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 31, 32, 33, 191, 192, 193, 400];

/// Vectors of 4, 8 and 16 elements, pairs, and blocks of 192 words of one element or two.
pub const INPUTS: [usize; 36] = [
    1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 31, 32, 33, 47, 63, 64, 65, 97, 127, 128, 129, 191, 192, 193, 257, 383,
    384, 385, 511, 577, 767, 768, 769, 1031,
];

/// Panels of 12, 16, 24, 32 and 48 columns.
pub const OUTPUTS: [usize; 33] = [
    1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 101,
    144, 145, 199,
];

fn sizes() -> impl Strategy<Value = [usize; 3]> {
    let most = prop_oneof![20 => Just(300_000), 1 => Just(8_000_000)];
    let each = (select(&ROWS[..]), select(&INPUTS[..]), select(&OUTPUTS[..]));
    (each, most, 0..3usize).prop_map(|((rows, inputs, outputs), most, first)| {
        within([rows, inputs, outputs], [&ROWS, &INPUTS, &OUTPUTS], first, |sizes| {
            sizes.iter().product::<usize>() <= most
        })
    })
}

pub fn products() -> impl Strategy<Value = Product> {
    let layouts = (select(&Layout::ALL[..]), select(&WeightLayout::ALL[..]));
    let size = select(&[1.0, 1.0, 1.0, 1.0 / 64.0, 16.0][..]);
    let part = (0.0..=1.0, 0.0..=1.0);
    (select(&TYPES[..]), sizes(), any::<bool>(), layouts, part, size, any::<u64>().no_shrink()).prop_map(
        |(types, [rows, inputs, outputs], bias, (layout, weight_layout), part, size, seed)| Product {
            types,
            rows,
            inputs,
            outputs,
            bias,
            layout,
            weight_layout,
            part,
            size,
            seed,
        },
    )
}
