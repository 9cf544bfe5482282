//! Fused attention: scores are computed, normalised and used a tile at a time, and are never in memory as a whole. The
//! design is described in this package's README.
//!
//! A forward pass is described by these types in turn: `CpuCall` is the call as the caller passes it; `CheckedCall` and
//! `KeysValues` are its parts after their checks; `ForwardCall` adds the queries and the results; `KernelTask` is the
//! pass that is compiled for each kernel; `AttentionTask` is some of its queries and keys, and `Tile` the queries of
//! one panel. In the backward pass, `AttentionBackwardProblem`, `BackwardCall` and `BackwardTask` take the places of
//! `CpuCall`, `ForwardCall` and `AttentionTask`.
//!
//! The groups of files, from the lowest to the highest: the parts of a call (`view`, `problem`, `dropout`,
//! `relative_bias`, `options`, `inputs`, `pages`, `kv_rows`, `results`, `call`), tiles and memory (`tile`,
//! `packed_width`, `state`, `memory`, `chain`, `tasks`), the steps of a tile (`pack`, `block_products`, `scores`,
//! `dropout_factors`, `softmax`, `epilogue`), the passes (`decode`, `prefill`, `forward`, `backward`, `statistics`),
//! their compilation for each type of elements (`kernels`), and the functions for callers (`attend`).

mod attend;
mod backward;
mod block_products;
mod call;
mod chain;
mod decode;
mod dropout;
mod dropout_factors;
mod epilogue;
mod forward;
mod inputs;
mod kernels;
mod kv_rows;
mod memory;
mod options;
mod pack;
mod packed_width;
mod pages;
mod prefill;
mod problem;
mod relative_bias;
mod results;
mod scores;
mod softmax;
mod state;
mod statistics;
mod tasks;
#[cfg(test)]
#[expect(
    clippy::single_range_in_vec_init,
    clippy::reversed_empty_ranges,
    reason = "calls with one row, and with empty ones"
)]
mod tests;
mod tile;
mod view;

pub use crate::number::{Numbers, Strided};
pub use attend::attend;
pub use backward::{AttentionBackwardProblem, AttentionGradients, attend_backward};
pub use candle_attention_call::{
    AttentionCall, AttentionDims, Dropout, DropoutMask, KvCodeFormat, KvPages, KvScales, OutputLayout, PerInput,
    RequestedGradients, RequestedResults, RequestedStatistics, ScoreModifiers, WeightTile,
};
pub use dropout::{WeightIndex, philox_keeps};
pub use kernels::AttentionKernels;
pub use options::SoftmaxStats;
pub use problem::{CpuCall, Diagonals, KeysOfQueries};
pub use results::AttentionResults;
pub use statistics::{MAX_TOP, Statistics};
pub use view::View;
