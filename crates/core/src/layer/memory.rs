//! Keys and values of cross-attention that were projected once for several calls.

use candle_core::Tensor;

/// Keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v) that a layer projected by
/// [`MultiHeadAttention::project_memory`](crate::MultiHeadAttention::project_memory). They are for any number of calls of
/// cross-attention, or for later layers that attend to the keys of this layer
/// ([`KvSharing::EarlierLayer`](crate::KvSharing)).
#[derive(Debug, Clone)]
pub struct ProjectedMemory {
    /// The keys, followed by those that the layer appends.
    pub(super) k: Tensor,
    /// The values, followed by those that the layer appends.
    pub(super) v: Tensor,
    /// T_kv without the appended keys.
    pub(super) t_kv: usize,
    /// Whether the inputs had a batch dimension.
    pub(super) batched: bool,
}
