//! Statistics of the weights, which the forward pass never stores as a whole.
//!
//! A weight is known when the sum over all keys of its query is. So a task keeps the scores of the few tiles that it
//! works on, T_kv for each of their queries, and reads them a second time: that takes one more exponential for each
//! score, and no product.

pub(super) mod memory;
pub(super) mod observe;
pub(super) mod output;

pub use output::{MAX_TOP, Statistics};
