//! Layers whose heads cannot be divided among processes, and files that hold no such layer.

use std::collections::HashMap;

use candle_nn::var_builder::ShardedSafeTensors;

use crate::*;

fn config() -> Config {
    Config::new(12, 6).with_num_kv_heads(3)
}

/// The first share of a layer, in whose file one tensor has another shape.
fn load(cfg: Config, world_size: usize, other: Option<(&str, &[usize])>) -> Result<MultiHeadAttention> {
    let mut tensors = HashMap::new();
    for (name, rows) in [("q_proj", 12), ("k_proj", 6), ("v_proj", 6), ("o_proj", 12)] {
        tensors.insert(format!("layer.{name}.weight"), zeros((rows, 12)));
    }
    tensors.extend(other.map(|(name, shape)| (format!("layer.{name}"), zeros(shape))));
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors, &path)?;
    // SAFETY: nothing writes to the file after it was saved.
    let vb = unsafe { ShardedSafeTensors::var_builder(&[path], DType::F32, &CPU)? };
    let shard = HeadShard::new(0, world_size)?;
    MultiHeadAttention::load_shard(&cfg, WeightLayout::Canonical, shard, &vb.pp("layer"))
}

#[test]
fn shares_of_heads() {
    let norm = |kind| QkNorm { kind, scope: QkNormScope::Projection, eps: 1e-5 };
    let cases = cases! {
        "more processes than query heads" => load(config(), 7, None),
        "layer norms of whole projections" => load(config().with_qk_norm(norm(QkNormKind::Layer)), 3, None),
        "a norm of the context" =>
            load(config().with_context_norm(ContextNorm { kind: QkNormKind::Rms, eps: 1e-5 }), 3, None),
        "norms of whole projections without a sum" =>
            load(config().with_qk_norm(norm(QkNormKind::RmsNoWeight)), 3, None)?.forward(&zeros((1, 2, 12))),
        "unequal shares of a relative bias" =>
            load(config().with_relative_bias(RelativeBiasConfig::new(true)), 4, None),
        "shares of a relative bias that key heads make unequal" => {
            let cfg = Config::new(12, 12).with_num_kv_heads(4).with_relative_bias(RelativeBiasConfig::new(true));
            load(cfg, 3, None)
        },
        "a rank past the last" => HeadShard::new(2, 2),
        "no processes" => HeadShard::new(0, 0),
        "a relative bias of other heads" =>
            RelativeBias::new(&RelativeBiasConfig::new(true), 4, any_weights())?.shard(HeadShard::new(0, 3)?),
        "a weight that is not there" => {
            let path = crate::common::models().join("book_mha/model.safetensors");
            // SAFETY: nothing writes to the file.
            let vb = unsafe { ShardedSafeTensors::var_builder(&[path], DType::F32, &CPU)? };
            MultiHeadAttention::load_shard(&config(), WeightLayout::Canonical, HeadShard::new(0, 3)?, &vb)
        },
    };
    let others: [(&str, &[usize]); 7] = [
        ("k_proj.weight", &[12, 12]),
        ("v_proj.weight", &[5, 12]),
        ("o_proj.weight", &[12, 9]),
        ("o_proj.weight", &[12]),
        ("q_proj.weight", &[]),
        ("q_proj.bias", &[12]),
        ("sinks", &[6]),
    ];
    assert_reviewed("head_shards", &[cases, each("", others, |other| load(config(), 3, Some(other)))]);
}
