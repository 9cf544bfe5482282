//! Layers whose heads cannot be divided among processes, and files that hold no such layer.

use std::collections::HashMap;

use candle_attention::{
    ContextNorm, HeadShard, MultiHeadAttention, MultiHeadAttentionConfig as Config, QkNorm, QkNormKind, QkNormScope,
    RelativeBias, RelativeBiasConfig, WeightLayout,
};
use candle_core::{DType, Result};
use candle_nn::VarBuilder;
use candle_nn::var_builder::ShardedSafeTensors;

use crate::{CPU, Case, zeros};

fn config() -> Config {
    Config::new(12, 6).with_num_kv_heads(3)
}

/// The first share of a layer, in whose file one tensor has another shape, or is missing.
fn load(cfg: &Config, world_size: usize, other: Option<(&str, Option<&[usize]>)>) -> Result<MultiHeadAttention> {
    let mut tensors = HashMap::new();
    for (name, rows) in [("q_proj", 12), ("k_proj", 6), ("v_proj", 6), ("o_proj", 12)] {
        tensors.insert(format!("layer.{name}.weight"), zeros((rows, 12)));
    }
    if let Some((name, shape)) = other {
        let name = format!("layer.{name}");
        match shape {
            Some(shape) => tensors.insert(name, zeros(shape)),
            None => tensors.remove(&name),
        };
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors, &path)?;
    // SAFETY: nothing writes to the file after it was saved.
    let vb = unsafe { ShardedSafeTensors::var_builder(&[path], DType::F32, &CPU)? };
    let shard = HeadShard::new(0, world_size)?;
    MultiHeadAttention::load_shard(cfg, WeightLayout::Canonical, shard, &vb.pp("layer"))
}

fn with(name: &str, shape: &[usize]) -> Result<MultiHeadAttention> {
    load(&config(), 3, Some((name, Some(shape))))
}

pub const CASES: &[Case] = cases! {
    "more processes than query heads" => load(&config(), 7, None),
    "layer norms of whole projections" => {
        let norm = QkNorm { kind: QkNormKind::Layer, scope: QkNormScope::Projection, eps: 1e-5 };
        load(&config().with_qk_norm(norm), 3, None)
    },
    "a norm of the context" => {
        load(&config().with_context_norm(ContextNorm { kind: QkNormKind::Rms, eps: 1e-5 }), 3, None)
    },
    "norms of whole projections without a sum" => {
        let norm = QkNorm { kind: QkNormKind::RmsNoWeight, scope: QkNormScope::Projection, eps: 1e-5 };
        load(&config().with_qk_norm(norm), 3, None)?.forward(&zeros((1, 2, 12)))
    },
    "unequal shares of a relative bias" => load(&config().with_relative_bias(RelativeBiasConfig::new(true)), 4, None),
    "shares of a relative bias that key heads make unequal" => {
        let cfg = Config::new(12, 12).with_num_kv_heads(4).with_relative_bias(RelativeBiasConfig::new(true));
        load(&cfg, 3, None)
    },
    "a rank past the last" => HeadShard::new(2, 2),
    "no processes" => HeadShard::new(0, 0),
    "a relative bias of other heads" => {
        let bias = RelativeBias::new(&RelativeBiasConfig::new(true), 4, VarBuilder::zeros(DType::F32, &CPU))?;
        bias.shard(HeadShard::new(0, 3)?)
    },
    "no queries" => load(&config(), 3, Some(("q_proj.weight", None))),
    "too many keys" => with("k_proj.weight", &[12, 12]),
    "too few values" => with("v_proj.weight", &[5, 12]),
    "too few columns" => with("o_proj.weight", &[12, 9]),
    "a vector" => with("o_proj.weight", &[12]),
    "a number" => with("q_proj.weight", &[]),
    "a bias that the config does not have" => with("q_proj.bias", &[12]),
    "sinks that the config does not have" => with("sinks", &[6]),
};
