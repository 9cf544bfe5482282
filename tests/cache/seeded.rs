//! A layer of random weights that are plain tensors.

use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use candle_core::{DType, Device, Result};
use candle_nn::VarBuilder;

use crate::by_hand::{parameters, tensors};

pub fn layer(cfg: &MultiHeadAttentionConfig, dtype: DType, device: &Device) -> Result<MultiHeadAttention> {
    let weights = tensors(&parameters(cfg, 3), dtype, device)?;
    MultiHeadAttention::new(cfg, VarBuilder::from_tensors(weights, dtype, device))
}
