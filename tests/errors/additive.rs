//! `AdditiveAttention`.

use candle_attention::{AdditiveAttention, AdditiveAttentionConfig, AttentionMask};
use candle_core::{DType, Result, Shape, Tensor};
use candle_nn::VarBuilder;

use crate::common::models;
use crate::{CPU, Case, of, zeros};

fn new(cfg: AdditiveAttentionConfig) -> Result<AdditiveAttention> {
    AdditiveAttention::new(&cfg, VarBuilder::zeros(DType::F32, &CPU))
}

fn attend(queries: impl Into<Shape>, keys: impl Into<Shape>, values: impl Into<Shape>) -> Result<()> {
    attend_to(&zeros(queries), &zeros(keys), &zeros(values), &AttentionMask::none())
}

/// Queries of width 4 and keys of width 3.
fn attend_to(queries: &Tensor, keys: &Tensor, values: &Tensor, mask: &AttentionMask) -> Result<()> {
    new(AdditiveAttentionConfig::new(4, 3, 5))?.forward(queries, keys, values, mask).map(drop)
}

fn json(text: &str) -> Result<()> {
    serde_json::from_str::<AdditiveAttentionConfig>(text).map(drop).map_err(candle_core::Error::wrap)
}

pub const CASES: &[Case] = cases! {
    "queries without a batch" => attend((2, 4), (1, 6, 3), (1, 6, 7)),
    "keys with heads" => attend((1, 2, 4), (1, 1, 6, 3), (1, 6, 7)),
    "values without a width" => attend((1, 2, 4), (1, 6, 3), (1, 6)),
    "queries and keys in each other's place" => attend((1, 2, 3), (1, 6, 4), (1, 6, 7)),
    "fewer values than keys" => attend((1, 2, 4), (1, 6, 3), (1, 5, 7)),
    "a larger batch of keys" => attend((1, 2, 4), (2, 6, 3), (2, 6, 7)),
    "inputs in half precision" =>
        attend_to(&zeros((1, 2, 4)), &zeros((1, 6, 3)), &of(DType::F16, (1, 6, 7)), &AttentionMask::none()),
    "lengths for another batch, with no queries" => {
        let mask = AttentionMask::none().with_valid_lens(vec![1, 2]);
        attend_to(&zeros((1, 0, 4)), &zeros((1, 6, 3)), &zeros((1, 6, 7)), &mask)
    },
    "more scores than fit in memory" => {
        let wide = |width| zeros((1, 1, width)).broadcast_as((1, 1 << 20, width));
        let queries = wide(4)?;
        attend_to(&queries, &wide(3)?, &wide(7)?, &AttentionMask::causal())
    },
    "a keep for several heads" => {
        let mask = AttentionMask::none().with_keep(&of(DType::U8, (1, 4, 2, 6)));
        attend_to(&zeros((1, 2, 4)), &zeros((1, 6, 3)), &zeros((1, 6, 7)), &mask)
    },
    "queries of no width" => new(AdditiveAttentionConfig::new(0, 3, 5)),
    "no hidden units" => new(AdditiveAttentionConfig::new(4, 3, 0)),
    "sizes beyond memory" => new(AdditiveAttentionConfig::new(4, u32::MAX as usize, u32::MAX as usize)),
    "a size beyond a shape" => new(AdditiveAttentionConfig::new(4, usize::MAX, 5)),
    "dropout in percent" => new(AdditiveAttentionConfig::new(4, 3, 5).with_dropout(10.0)),
    "integer weights" =>
        AdditiveAttention::new(&AdditiveAttentionConfig::new(4, 3, 5), VarBuilder::zeros(DType::U8, &CPU)),
    "the weights of a multi-head layer" => {
        let path = models().join("d2l_mha_100/model.safetensors");
        let vb = candle_attention::weights::open(path, DType::F32, &CPU)?;
        AdditiveAttention::new(&AdditiveAttentionConfig::new(100, 100, 100), vb)
    },
    "an unknown field" => json(r#"{"query_size": 4, "key_size": 3, "hidden_size": 5, "bias": true}"#),
};
