use candle_core::Tensor;

/// What a layer gives when the weights are asked for too.
#[derive(Debug, Clone)]
pub struct LayerOutput {
    /// The output, projected: (B, T_q, out_dim); (T_q, out_dim) for an input (T_q, E).
    pub output: Tensor,
    /// The weights after softmax and dropout: (B, H, T_q, T_kv); (H, T_q, T_kv) for an input (T_q, E).
    pub weights: Tensor,
}
