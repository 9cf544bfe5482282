//! A call as the caller describes it.

use std::ops::Range;

use super::view::View;
use candle_attention_call::AttentionCall;

/// One call of [`attend`](super::attend). Queries are rows of f32, bf16 or f16. Keys and values have the same type, or
/// are codes with scales in f32; slopes, biases and sinks are in f32.
pub type CpuCall<'a> = AttentionCall<View<'a>, KeysOfQueries<'a>>;

/// The keys that each query attends to, and its position among them.
#[derive(Debug, Clone, Copy, Default)]
pub struct KeysOfQueries<'a> {
    /// The keys that each query of each sequence attends to: (B, T_q). The output of a fully masked query is zeros.
    pub ranges: &'a [Range<usize>],
    /// The key position of each query, from which ALiBi counts: (B, T_q). Not read without ALiBi.
    pub positions: &'a [f32],
    /// The entries of a relative bias that each query reads. Not read without one.
    pub diagonals: Diagonals<'a>,
}

/// The entries of a relative bias that each query reads: entry `origin + j` for key j.
///
/// With `T_q - 1 - i` as the origin of query i, entry n belongs to the n-th diagonal of the scores. Every key that a
/// query attends to must have an entry. Masked keys need none, so that the origin of a fully masked query may be any
/// number.
#[derive(Debug, Clone, Copy, Default)]
pub struct Diagonals<'a> {
    /// The number of entries of a head.
    pub len: usize,
    /// The entry of key 0 for each query, (B, T_q). Negative where the first keys have no entry.
    pub origins: &'a [i64],
}
