//! Weights, labels and limits that no heat map can be drawn with.

use candle_attention::plot::{Heads, HeatMap, TerminalOptions};

use crate::*;

#[test]
fn heat_maps() {
    // 16 heads, 2 queries, 3 keys.
    let map = || HeatMap::new(&zeros((16, 2, 3)));
    let shapes: [&[usize]; 6] = [&[4, 2, 3, 3], &[3], &[1, 1, 1, 2, 2], &[0, 2, 2], &[2, 0, 2], &[2, 2, 0]];
    let cases = cases! {
        "integers" => HeatMap::new(&of(DType::U32, (2, 2))),
        "a sequence out of range" => HeatMap::from_batch(&zeros((2, 2, 3, 3)), 2),
        "a batch of rank 3" => HeatMap::from_batch(&zeros((2, 3, 3)), 0),
        "a head out of range" => map()?.to_terminal(Heads::One(16), &TerminalOptions::default()),
        "too few query tokens" => map()?.with_query_tokens(&["a"]),
        "too many key tokens" => map()?.with_key_tokens(&["a"; 4]),
        "one list of tokens for two lengths" => map()?.with_tokens(&["a", "b"]),
    };
    let limits = [(Some(9), None), (Some(0), None), (None, Some(0))];
    let limits = each("columns and rows", limits, |(max_width, max_rows)| {
        let map = HeatMap::new(&zeros((2, 2)))?.with_tokens(&["hello", "world"])?;
        map.to_terminal(Heads::Mean, &TerminalOptions { max_width, max_rows, ..TerminalOptions::default() })
    });
    assert_reviewed(
        "heat_maps",
        &[
            each("weights of shape", shapes, |shape| HeatMap::new(&zeros(shape))),
            cases,
            each("a scale that ends at", [0.0, -1.0, f64::NAN, f64::INFINITY], |end| map()?.with_scale_max(end)),
            limits,
        ],
    );
}
