//! Layers whose heads cannot be divided among processes, and files that hold no such layer.

use std::collections::HashMap;

use candle_nn::var_builder::ShardedSafeTensors;

use crate::wrong::Shapes;
use crate::*;

fn config() -> Config {
    Config::new(12, 6).with_num_kv_heads(3)
}

/// The first share of a layer of these tensors.
fn load(cfg: Config, world_size: usize, shapes: &Shapes) -> Result<MultiHeadAttention> {
    let tensors: HashMap<_, _> =
        shapes.iter().map(|(name, shape)| (format!("layer.{name}"), zeros(shape.as_slice()))).collect();
    let file = tempfile::NamedTempFile::new()?;
    candle_core::safetensors::save(&tensors, file.path())?;
    // SAFETY: nothing writes to the file after it was saved.
    let vb = unsafe { ShardedSafeTensors::var_builder(&[file.path()], DType::F32, &CPU)? };
    MultiHeadAttention::load_shard(&cfg, WeightLayout::Canonical, HeadShard::new(0, world_size)?, &vb.pp("layer"))
}

#[test]
fn shares_of_heads() {
    let shapes = wrong::shapes(&[
        ("q_proj.weight", &[12, 12]),
        ("k_proj.weight", &[6, 12]),
        ("v_proj.weight", &[6, 12]),
        ("o_proj.weight", &[12, 12]),
    ]);
    let norm = |kind| QkNorm { kind, scope: QkNormScope::Projection, eps: 1e-5 };
    let cases = cases! {
        "more processes than query heads" => load(config(), 7, &shapes),
        "layer norms of whole projections" => load(config().with_qk_norm(norm(QkNormKind::Layer)), 3, &shapes),
        "a norm of the context" =>
            load(config().with_context_norm(ContextNorm { kind: QkNormKind::Rms, eps: 1e-5 }), 3, &shapes),
        "norms of whole projections without a sum" =>
            load(config().with_qk_norm(norm(QkNormKind::RmsNoWeight)), 3, &shapes)?.forward(&zeros((1, 2, 12))),
        "unequal shares of a relative bias" =>
            load(config().with_relative_bias(RelativeBiasConfig::new(true)), 4, &shapes),
        "shares of a relative bias that key heads make unequal" => {
            let cfg = Config::new(12, 12).with_num_kv_heads(4).with_relative_bias(RelativeBiasConfig::new(true));
            load(cfg, 3, &shapes)
        },
        "a rank past the last" => HeadShard::new(2, 2),
        "no processes" => HeadShard::new(0, 0),
        "a relative bias of other heads" =>
            RelativeBias::new(&RelativeBiasConfig::new(true), 4, any_weights())?.shard(HeadShard::new(0, 3)?),
    };
    let more = wrong::shapes(&[("q_proj.bias", &[12]), ("sinks", &[6])]);
    let of_three = |shapes: &Shapes| load(config(), 3, shapes);
    assert_reviewed(
        "head_shards",
        &[cases, wrong::weights(&shapes, of_three), wrong::surplus(&shapes, &more, of_three)],
    );
}
