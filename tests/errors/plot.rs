//! Weights, labels and limits that no heat map can be drawn with.

use candle_attention::plot::{Heads, HeatMap, TerminalOptions};
use candle_core::{DType, Result, Shape};

use crate::{Case, of, zeros};

fn new(shape: impl Into<Shape>) -> Result<()> {
    HeatMap::new(&zeros(shape)).map(drop)
}

/// 16 heads, 2 queries, 3 keys.
fn map() -> Result<HeatMap> {
    HeatMap::new(&zeros((16, 2, 3)))
}

fn labelled(max_width: Option<usize>, max_rows: Option<usize>) -> Result<()> {
    let map = HeatMap::new(&zeros((2, 2)))?.with_tokens(&["hello", "world"])?;
    map.to_terminal(Heads::Mean, &TerminalOptions { max_width, max_rows, ..TerminalOptions::default() }).map(drop)
}

pub const CASES: &[Case] = cases! {
    "a batch" => new((4, 2, 3, 3)),
    "rank 1" => new(3),
    "rank 5" => new((1, 1, 1, 2, 2)),
    "no heads" => new((0, 2, 2)),
    "no queries" => new((2, 0, 2)),
    "no keys" => new((2, 2, 0)),
    "integers" => HeatMap::new(&of(DType::U32, (2, 2))),
    "a sequence out of range" => HeatMap::from_batch(&zeros((2, 2, 3, 3)), 2),
    "a batch of rank 3" => HeatMap::from_batch(&zeros((2, 3, 3)), 0),
    "a head out of range" => map()?.to_terminal(Heads::One(16), &TerminalOptions::default()),
    "too few query tokens" => map()?.with_query_tokens(&["a"]),
    "too many key tokens" => map()?.with_key_tokens(&["a"; 4]),
    "one list of tokens for two lengths" => map()?.with_tokens(&["a", "b"]),
    "a scale that ends at 0" => map()?.with_scale_max(0.0),
    "a scale that ends below 0" => map()?.with_scale_max(-1.0),
    "a scale that ends at NaN" => map()?.with_scale_max(f64::NAN),
    "a scale that ends at infinity" => map()?.with_scale_max(f64::INFINITY),
    "9 columns" => labelled(Some(9), None),
    "no columns" => labelled(Some(0), None),
    "no rows" => labelled(None, Some(0)),
};
