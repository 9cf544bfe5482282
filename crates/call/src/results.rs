//! The requested results of a forward pass.

use std::ops::Range;

/// The requested results of a forward pass besides the attention output. The default is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestedResults<'a> {
    /// Whether the attention weights after dropout are requested, (B, H, T_q, T_kv).
    pub weights: bool,
    /// Whether the log-sum-exp of the scores of each query is requested, (B, H, T_q).
    pub log_sum_exp: bool,
    /// Whether the statistics of the softmax are requested, from which a backward pass computes the weights again.
    pub softmax_stats: bool,
    /// The requested statistics of the weights before dropout.
    pub statistics: Option<&'a RequestedStatistics>,
}

/// The requested statistics of attention weights besides the entropy of each query and the sum for each key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestedStatistics {
    /// The number of keys with the largest weights to return for each query.
    pub top_keys: usize,
    /// The queries and keys whose weights are returned.
    pub tile: Option<WeightTile>,
}

/// A rectangle of attention weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightTile {
    /// The queries.
    pub queries: Range<usize>,
    /// The keys.
    pub keys: Range<usize>,
}
