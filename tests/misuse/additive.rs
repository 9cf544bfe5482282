//! `AdditiveAttention`.

use candle_attention::{AdditiveAttention, AdditiveAttentionConfig, AttentionMask};
use candle_core::{DType, Result, Shape, Tensor};
use candle_nn::VarBuilder;

use crate::common::models;
use crate::{CPU, Misuse, check, of, zeros};

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

const ROWS: &[Misuse] = &[
    (
        "queries without a batch",
        || attend((2, 4), (1, 6, 3), (1, 6, 7)),
        "[additive_attention] queries have shape [2, 4], expected (B, T_q, query_size)",
    ),
    (
        "keys with heads",
        || attend((1, 2, 4), (1, 1, 6, 3), (1, 6, 7)),
        "[additive_attention] keys have shape [1, 1, 6, 3], expected (B, T_kv, key_size)",
    ),
    (
        "values without a width",
        || attend((1, 2, 4), (1, 6, 3), (1, 6)),
        "[additive_attention] values have shape [1, 6], expected (B, T_kv, D_v)",
    ),
    (
        "queries and keys in each other's place",
        || attend((1, 2, 3), (1, 6, 4), (1, 6, 7)),
        "[additive_attention] queries and keys have widths 3 and 4, expected 4 and 3",
    ),
    (
        "fewer values than keys",
        || attend((1, 2, 4), (1, 6, 3), (1, 5, 7)),
        "[additive_attention] queries [1, 2, 4], keys [1, 6, 3] and values [1, 5, 7] differ in batch size, or keys and values in length",
    ),
    (
        "a larger batch of keys",
        || attend((1, 2, 4), (2, 6, 3), (2, 6, 7)),
        "[additive_attention] queries [1, 2, 4], keys [2, 6, 3] and values [2, 6, 7] differ in batch size, or keys and values in length",
    ),
    (
        "inputs in half precision",
        || {
            let values = of(DType::F16, (1, 6, 7));
            attend_to(&zeros((1, 2, 4)), &zeros((1, 6, 3)), &values, &AttentionMask::none())
        },
        "[additive_attention] values are F16 on Cpu, expected the weights' F32 on Cpu",
    ),
    (
        "lengths for another batch, with no queries",
        || {
            let mask = AttentionMask::none().with_valid_lens(vec![1, 2]);
            attend_to(&zeros((1, 0, 4)), &zeros((1, 6, 3)), &zeros((1, 6, 7)), &mask)
        },
        "[attention_mask] valid_lens has 2 entries, expected one for each of 1 sequences",
    ),
    (
        "a keep for several heads",
        || {
            let mask = AttentionMask::none().with_keep(&of(DType::U8, (1, 4, 2, 6)));
            attend_to(&zeros((1, 2, 4)), &zeros((1, 6, 3)), &zeros((1, 6, 7)), &mask)
        },
        "[attention_mask] keep has shape [1, 4, 2, 6], which does not broadcast to (B, H, T_q, T_kv) = [1, 1, 2, 6]",
    ),
    (
        "queries of no width",
        || new(AdditiveAttentionConfig::new(0, 3, 5)).map(drop),
        "[additive_attention] query_size is 0, expected at least 1",
    ),
    (
        "no hidden units",
        || new(AdditiveAttentionConfig::new(4, 3, 0)).map(drop),
        "[additive_attention] hidden_size is 0, expected at least 1",
    ),
    (
        "sizes beyond memory",
        || new(AdditiveAttentionConfig::new(4, usize::MAX, usize::MAX)).map(drop),
        "[additive_attention] W_k.weight would have shape [18446744073709551615, 18446744073709551615], which no memory holds (layout d2l)",
    ),
    (
        "dropout in percent",
        || new(AdditiveAttentionConfig::new(4, 3, 5).with_dropout(10.0)).map(drop),
        "[additive_attention] dropout is 10, expected a probability from 0 to 1",
    ),
    (
        "integer weights",
        || {
            let vb = VarBuilder::zeros(DType::U8, &CPU);
            AdditiveAttention::new(&AdditiveAttentionConfig::new(4, 3, 5), vb).map(drop)
        },
        "[additive_attention] the builder gives weights as U8, expected F32, F16, BF16 or F64",
    ),
    (
        "the weights of a multi-head layer",
        || {
            let path = models().join("d2l_mha_100/model.safetensors");
            let vb = candle_attention::weights::open(path, DType::F32, &CPU)?;
            AdditiveAttention::new(&AdditiveAttentionConfig::new(100, 100, 100), vb).map(drop)
        },
        "[additive_attention] w_v.weight is missing, expected shape [1, 100] (layout d2l)",
    ),
    (
        "an unknown field",
        || json(r#"{"query_size": 4, "key_size": 3, "hidden_size": 5, "bias": true}"#),
        "unknown field `bias`, expected one of `query_size`, `key_size`, `hidden_size`, `dropout` at line 1 column …",
    ),
];

#[test]
fn misuse_of_additive_attention_is_named() {
    check(ROWS);
}
