//! The names of the tensors of a call.

/// A tensor of an attention call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input {
    /// The queries.
    Q,
    /// The keys.
    K,
    /// The values.
    V,
    /// The scales of keys that are codes.
    KeyScales,
    /// The scales of values that are codes.
    ValueScales,
    /// The pages of each sequence.
    PageTable,
    /// The slopes of ALiBi.
    AlibiSlopes,
    /// The bias of each distance between a query and a key.
    RelativeBias,
    /// The bias of each score.
    Bias,
    /// The boolean mask.
    BooleanMask,
    /// The sinks.
    Sinks,
    /// The seed of dropout on a device, or a bit for each weight.
    Dropout,
    /// The position of query 0 of each sequence.
    FirstPositions,
    /// The first key of each sequence.
    Starts,
    /// The number of keys of each sequence.
    Lengths,
    /// The number of keys of each sequence that a causal bound does not mask.
    Prefixes,
    /// The first key of each query.
    IntervalStarts,
    /// The key after the last one of each query.
    IntervalEnds,
    /// The cumulative numbers of queries of packed sequences.
    CumulativeQueries,
    /// The cumulative numbers of keys of packed sequences.
    CumulativeKeys,
}

impl Input {
    /// Returns the words for the tensor in messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::KeyScales => "the scales of k",
            Self::ValueScales => "the scales of v",
            Self::PageTable => "the table of pages",
            Self::AlibiSlopes => "alibi_slopes",
            Self::RelativeBias => "the relative bias",
            Self::Bias => "the bias",
            Self::BooleanMask => "the boolean mask",
            Self::Sinks => "sinks",
            Self::Dropout => "the seed of dropout",
            Self::FirstPositions => "the positions of query 0",
            Self::Starts => "starts",
            Self::Lengths => "lengths",
            Self::Prefixes => "prefixes",
            Self::IntervalStarts => "the starts of intervals",
            Self::IntervalEnds => "the ends of intervals",
            Self::CumulativeQueries => "cu_seqlens_q",
            Self::CumulativeKeys => "cu_seqlens_kv",
        }
    }
}
