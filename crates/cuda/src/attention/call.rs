//! The description of one attention call.

use candle_core::{Shape, Storage, Tensor};

/// One attention call. All tensors are on one device: CUDA, or the CPU with the feature `emulator`.
///
/// Scores are made in this order: the product of query and key times the scale, softcap, ALiBi, relative bias, bias,
/// mask; then the softmax in f32, dropout, and the sum of values. A query that attends to no key has zeros.
#[derive(Debug, Clone)]
pub struct AttentionCall {
    /// Queries (B, H, T_q, D) in f16, bf16 or f32; of packed sequences (1, H, total_q, D). The strides are any, but the
    /// last dimension is contiguous.
    pub q: Tensor,
    /// Keys (B, H_kv, T_kv, D) in the dtype of the queries, or codes of 8 bits; of packed sequences (1, H_kv, total_kv,
    /// D). Strides as of the queries; the stride over B may be 0.
    pub k: Tensor,
    /// Values (B, H_kv, T_kv, D_v), likewise.
    pub v: Tensor,
    /// The scales of keys and values that are codes.
    pub kv_scales: Option<KvScales>,
    /// The keys that each query attends to.
    pub keys: KeyRanges,
    /// The lengths of packed sequences; `None` for a batch.
    pub packed: Option<PackedSequences>,
    /// The scale and the modifiers of scores and weights.
    pub scores: ScoreModifiers,
    /// The order of the output in memory.
    pub output_layout: OutputLayout,
}

/// The scales of keys and values that are stored as codes: u8, where a number is `(code - 128) · scale`.
#[derive(Debug, Clone)]
pub struct KvScales {
    /// f32 (B, H_kv, T_kv, 1).
    pub k: Tensor,
    /// f32 (B, H_kv, T_kv, 1).
    pub v: Tensor,
}

/// The keys that each query attends to: those that every bound allows. The default allows all.
///
/// Tensors are i32 on the device and have an entry for each sequence: (B,), or (n,) for packed sequences. Entries
/// outside of the keys are allowed.
#[derive(Debug, Clone, Default)]
pub struct KeyRanges {
    /// The position of query 0 among the keys, from which `causal`, `left`, `right`, `chunk` and ALiBi count.
    pub first_position: FirstPosition,
    /// Masks the keys after the query's position.
    pub causal: bool,
    /// Masks the keys more than this before the position.
    pub left: Option<usize>,
    /// Masks the keys more than this after the position.
    pub right: Option<usize>,
    /// Masks the keys in other chunks of this many positions than the query's.
    pub chunk: Option<usize>,
    /// Masks the keys before the start.
    pub starts: Option<Tensor>,
    /// Masks the keys at and past the length.
    pub lengths: Option<Tensor>,
    /// With `causal`: every query attends to the keys before the prefix's end.
    pub prefixes: Option<Tensor>,
    /// Bounds of each query.
    pub intervals: Option<Intervals>,
}

/// The position of query 0 of a sequence among its keys.
#[derive(Debug, Clone, Default)]
pub enum FirstPosition {
    /// T_kv - T_q of the sequence: the last query is at the last key.
    #[default]
    AtEnd,
    /// One position for all sequences, which may be negative.
    Same(i32),
    /// i32 (B,).
    Each(Tensor),
}

/// Bounds of each query: i32 (B, T_q), or (total_q,) of packed sequences, counted in the query's own sequence.
#[derive(Debug, Clone)]
pub struct Intervals {
    /// The first key that a query attends to.
    pub starts: Tensor,
    /// The key after the last one.
    pub ends: Tensor,
}

/// The lengths of packed sequences, on the device.
#[derive(Debug, Clone)]
pub struct PackedSequences {
    /// i32 (n + 1,): 0, and the end of each sequence's queries.
    pub cu_seqlens_q: Tensor,
    /// i32 (n + 1,): the same of the keys.
    pub cu_seqlens_kv: Tensor,
    /// The largest number of queries of a sequence.
    pub longest_queries: usize,
    /// The largest number of keys of a sequence.
    pub longest_keys: usize,
}

/// The scale, and the modifiers of scores and weights.
#[derive(Debug, Clone)]
pub struct ScoreModifiers {
    /// The factor of the product of a query and a key.
    pub scale: f64,
    /// `softcap · tanh(score / softcap)`.
    pub softcap: Option<f64>,
    /// f32 (H,): `-slope · |position of the query - key|` is added.
    pub alibi_slopes: Option<Tensor>,
    /// f32 (B or 1, H, T_q + T_kv - 1), of which entry `T_q - 1 - query + key` is added. Packed sequences share one
    /// (1, H, ..), where T_q and T_kv are the largest numbers of queries and of keys of a sequence.
    pub relative_bias: Option<Tensor>,
    /// f32 or the dtype of the queries, (B or 1, H or 1, T_q or 1, T_kv or 1): added.
    pub bias: Option<Tensor>,
    /// u8 of such a shape: 0 masks a key for a query.
    pub boolean_mask: Option<Tensor>,
    /// f32 (H,): a logit for each query head that takes weight and has no value.
    pub sinks: Option<Tensor>,
    /// Dropout of the weights.
    pub dropout: Option<Dropout>,
}

impl Default for ScoreModifiers {
    /// Returns a scale of 1 without modifiers.
    fn default() -> Self {
        Self {
            scale: 1.0,
            softcap: None,
            alibi_slopes: None,
            relative_bias: None,
            bias: None,
            boolean_mask: None,
            sinks: None,
            dropout: None,
        }
    }
}

/// Weights are dropped with a probability, and the others divided by the probability of being kept. Philox 4×32-7 draws
/// them, as for the CPU kernels: the key is the seed, the counter is (key / 4, query, head, sequence).
#[derive(Debug, Clone)]
pub struct Dropout {
    /// The probability, from 0 to 1.
    pub p: f64,
    /// The seed.
    pub seed: DropoutSeed,
}

/// The seed of dropout.
#[derive(Debug, Clone)]
pub enum DropoutSeed {
    /// A number.
    Number(u64),
    /// u32 (2,) on the device: the low and the high half of the number.
    OnDevice(Tensor),
}

/// The order in memory of the dimensions of the output, or of the gradients of queries, keys and values.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OutputLayout {
    /// (B, H, T, D).
    #[default]
    Bhtd,
    /// (B, T, H, D).
    Bthd,
}

/// The results of a forward pass.
#[derive(Debug)]
pub struct ForwardOutput {
    /// The attention output in the dtype of the queries.
    pub output: Storage,
    /// The shape of the output as it is stored: (B, H, T_q, D_v) or (B, T_q, H, D_v).
    pub output_shape: Shape,
    /// The log-sum-exp of the scores in f32, if it was requested; -inf for a fully masked query.
    pub log_sum_exp: Option<Storage>,
    /// (B, H, T_q).
    pub log_sum_exp_shape: Shape,
    /// The numbers from which a backward pass computes the weights, in f32, if they were requested: the log-sum-exp in
    /// two parts, since one f32 would lose the sum next to a large score.
    pub statistics: Option<Storage>,
    /// (2, B, H, T_q).
    pub statistics_shape: Shape,
}

/// The results of a forward pass besides the attention output.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestedResults {
    /// Whether to return the log-sum-exp.
    pub log_sum_exp: bool,
    /// Whether to return what a backward pass needs.
    pub statistics: bool,
}

/// The inputs of a backward pass besides the call.
#[derive(Debug, Clone, Copy)]
pub struct BackwardInputs<'a> {
    /// The output of the forward pass, contiguous in the shape in which it is stored.
    pub output: &'a Tensor,
    /// The statistics of the forward pass, f32 (2, B, H, T_q).
    pub statistics: &'a Tensor,
    /// The gradient of the output, (B, H, T_q, D_v) in the dtype of the queries, with any strides but a contiguous last
    /// dimension.
    pub output_gradient: &'a Tensor,
    /// The gradient of the log-sum-exp, f32 (B, H, T_q).
    pub log_sum_exp_gradient: Option<&'a Tensor>,
}

/// The inputs whose gradients a backward pass computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestedGradients {
    /// The order in memory of the gradients of the queries, keys and values.
    pub layout: OutputLayout,
    /// Whether to compute the gradient of the queries.
    pub q: bool,
    /// Whether to compute the gradient of the keys.
    pub k: bool,
    /// Whether to compute the gradient of the values.
    pub v: bool,
    /// Whether to compute the gradient of the bias.
    pub bias: bool,
    /// Whether to compute the gradient of the relative bias.
    pub relative_bias: bool,
    /// Whether to compute the gradient of the ALiBi slopes.
    pub slopes: bool,
    /// Whether to compute the gradient of the sinks.
    pub sinks: bool,
}

/// The gradients of a backward pass, each in the shape and the dtype of its input. Keys and values of a batch that was
/// expanded have a gradient for each sequence.
#[derive(Debug, Clone, Default)]
pub struct Gradients {
    /// The gradient of the queries.
    pub q: Option<Tensor>,
    /// The gradient of the keys.
    pub k: Option<Tensor>,
    /// The gradient of the values.
    pub v: Option<Tensor>,
    /// The gradient of the bias.
    pub bias: Option<Tensor>,
    /// The gradient of the relative bias.
    pub relative_bias: Option<Tensor>,
    /// The gradient of the ALiBi slopes.
    pub slopes: Option<Tensor>,
    /// The gradient of the sinks.
    pub sinks: Option<Tensor>,
}
