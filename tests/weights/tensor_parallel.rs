//! A layer's heads on several processes.

use std::sync::{Barrier, Mutex};

use candle_attention::{
    AlibiConfig, AttentionCache, AttentionInput, GateActivation, GateLayout, GateScope, HeadShard, MultiHeadAttention,
    MultiHeadAttentionConfig as Config, OutputGate, QkNorm, QkNormKind, QkNormScope, RelativeBias, RelativeBiasConfig,
    RopeConfig, WeightLayout,
    weights::{PackedNaming, QkvOrder},
};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;

use crate::common::{assert_near, sharded};
use crate::grid::EMBED_DIM;
use crate::{DEVICE, Invented, invented};

/// Loads the shards of a layer, each from a file that has the whole layer below `layer.`.
fn shards(whole: &MultiHeadAttention, layout: WeightLayout, world_size: usize) -> Result<Vec<MultiHeadAttention>> {
    let named = whole.state_dict(layout)?.into_iter().map(|(name, tensor)| (format!("layer.{name}"), tensor));
    let vb = sharded(&named.collect())?.pp("layer");
    HeadShard::new(0, world_size)?
        .all()
        .map(|shard| MultiHeadAttention::load_shard(whole.config(), layout, shard, &vb))
        .collect()
}

/// Processes as threads, each of which waits for the others where their parts are added up.
struct Processes {
    barrier: Barrier,
    parts: Mutex<Vec<Tensor>>,
}

impl Processes {
    /// Returns the sum of the outputs of the shards of a layer.
    fn run(
        layers: &[MultiHeadAttention],
        call: impl Fn(usize, &MultiHeadAttention, &dyn Fn(&Tensor) -> Result<Tensor>) -> Result<Tensor> + Sync,
    ) -> Result<Tensor> {
        let processes = Self { barrier: Barrier::new(layers.len()), parts: Mutex::default() };
        let outputs = std::thread::scope(|scope| {
            let run = |(rank, layer)| {
                let processes = &processes;
                let call = &call;
                scope.spawn(move || call(rank, layer, &|own| processes.sum(own)))
            };
            let running: Vec<_> = layers.iter().enumerate().map(run).collect();
            running.into_iter().map(|process| process.join().expect("no panic")).collect::<Result<Vec<_>>>()
        })?;
        match layers[0].config().out_proj() {
            true => sum(&outputs),
            false => Tensor::cat(&outputs, 2),
        }
    }

    fn sum(&self, own: &Tensor) -> Result<Tensor> {
        let parts = || self.parts.lock().expect("no thread panicked");
        parts().push(own.clone());
        self.barrier.wait();
        let all = parts().clone();
        if self.barrier.wait().is_leader() {
            parts().clear();
        }
        self.barrier.wait();
        sum(&all)
    }
}

fn sum(parts: &[Tensor]) -> Result<Tensor> {
    parts.iter().skip(1).try_fold(parts[0].clone(), |sum, part| sum + part)
}

/// Compares the sum of the outputs of the shards with the output of the whole layer. Returns whether the layer has
/// enough heads, and no norm over all of them.
pub fn assert_shared_out(
    whole: &MultiHeadAttention,
    layout: WeightLayout,
    world_size: usize,
    call: impl Fn(&MultiHeadAttention) -> Result<Tensor> + Sync,
) -> Result<bool> {
    let cfg = whole.config();
    let spans = cfg.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection);
    if cfg.num_heads() < world_size || spans {
        return Ok(false);
    }
    let found = Processes::run(&shards(whole, layout, world_size)?, |_, layer, _| call(layer))?;
    assert_near(&found, &call(whole)?, 1e-5, &format!("{cfg:?} as {layout} in {world_size}"));
    Ok(true)
}

#[test]
fn tensor_parallel_options_per_head_match_whole_layer() -> Result<()> {
    let of = |h, h_kv| Config::new(EMBED_DIM, h).with_num_kv_heads(h_kv).with_head_dim(4);

    let grouped = || of(4, 2);
    // Two processes have four heads and two: whole key heads.
    let uneven = || of(6, 3);
    let norm = QkNorm { kind: QkNormKind::Layer, scope: QkNormScope::PerHeadWeights, eps: 1e-5 };
    let buckets = RelativeBiasConfig::new(true);
    let gate = |scope, place| OutputGate { activation: GateActivation::Sigmoid, scope, layout: place };
    let mut configs = vec![
        grouped()
            .with_output_gate(gate(GateScope::Elementwise, GateLayout::FusedWithQuery))
            .with_causal(true)
            .with_bias(true),
        grouped().with_output_gate(gate(GateScope::PerHead, GateLayout::Separate { bias: true })).with_value_norm(1e-5),
        grouped().with_alibi(AlibiConfig::Standard),
        grouped().with_alibi(AlibiConfig::Slopes(vec![0.5, 0.1, 0.3, 0.02])).with_causal(true),
        grouped().with_alibi(AlibiConfig::Falcon).with_causal(true),
        grouped().with_qk_norm(norm).with_rope(RopeConfig::new(100.0)).with_causal(true),
        grouped().with_relative_bias(buckets.clone()).with_scale(1.0),
        grouped().with_sinks(true).with_bias_kv(true).with_bias(true),
        of(4, 1).with_causal(true).with_bias(true),
        of(9, 3).with_causal(true),
        uneven().with_alibi(AlibiConfig::Standard).with_causal(true).with_bias(true),
        uneven().with_alibi(AlibiConfig::Falcon).with_causal(true),
        uneven().with_qk_norm(norm).with_rope(RopeConfig::new(100.0)).with_causal(true).with_sinks(true),
        uneven().with_sinks(true).with_bias_kv(true).with_bias(true),
        uneven()
            .with_output_gate(gate(GateScope::PerHead, GateLayout::FusedWithQuery))
            .with_window(2)
            .with_causal(true),
    ];
    // Where several processes have a copy of a key head, it counts once in a norm of the whole projection.
    for kind in [QkNormKind::Rms, QkNormKind::RmsPlusOne, QkNormKind::RmsNoWeight] {
        let of_projection = QkNorm { kind, scope: QkNormScope::Projection, eps: 1e-5 };
        configs.extend([(6, 3), (4, 2), (4, 1), (9, 3)].map(|(h, h_kv)| of(h, h_kv).with_qk_norm(of_projection)));
    }
    for cfg in configs {
        let invented_vb = || VarBuilder::from_backend(Box::new(Invented), DType::F32, DEVICE.clone());
        let bias = cfg.relative_bias().map(|own| RelativeBias::new(own, cfg.num_heads(), invented_vb())).transpose()?;
        let with_bias = |layer: &MultiHeadAttention, own: Option<RelativeBias>| match own {
            Some(own) => layer.clone().with_relative_bias(own),
            None => Ok(layer.clone()),
        };
        let whole = with_bias(&invented(&cfg, WeightLayout::Canonical)?, bias.clone())?;
        let xs = Tensor::randn(0f32, 0.5, (2, 5, EMBED_DIM), &DEVICE)?;
        // A relative bias takes equal shares.
        for world_size in (1..=cfg.num_heads().min(5)).filter(|&n| n != 3 || cfg.relative_bias().is_none()) {
            let layers = shards(&whole, WeightLayout::Canonical, world_size)?;
            let found = Processes::run(&layers, |rank, layer, sum| {
                let shard = HeadShard::new(rank, world_size)?;
                let layer = with_bias(layer, bias.as_ref().map(|bias| bias.shard(shard)).transpose()?)?;
                layer.config().validate()?;
                if cfg.bias_kv() || !cfg.causal() {
                    return layer.forward_with(AttentionInput::new(&xs).with_all_reduce(sum));
                }
                // A rank stores the keys of its heads.
                let mut cache = AttentionCache::default();
                let steps = [(0, 3), (3, 1), (4, 1)].map(|(start, len)| {
                    let tokens = xs.narrow(1, start, len)?.contiguous()?;
                    layer.forward_with(AttentionInput::new(&tokens).with_cache(&mut cache).with_all_reduce(sum))
                });
                Tensor::cat(&steps.into_iter().collect::<Result<Vec<_>>>()?, 1)
            })?;
            assert_near(&found, &whole.forward(&xs)?, 1e-5, &format!("{cfg:?} in {world_size}"));
        }
    }
    Ok(())
}

/// Divides nine query heads and three key heads: one rank has six and two, the other three and one.
#[test]
fn tensor_parallel_gqa_shards_have_whole_key_heads() -> Result<()> {
    let whole = invented(&Config::new(EMBED_DIM, 9).with_num_kv_heads(3).with_head_dim(4), WeightLayout::Canonical)?;
    let shards = shards(&whole, WeightLayout::Canonical, 2)?;
    let heads = |layer: &MultiHeadAttention| (layer.config().num_heads(), layer.config().num_kv_heads());
    assert_eq!(shards.iter().map(heads).collect::<Vec<_>>(), [(6, 2), (3, 1)]);
    shards[0].state_dict(WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByHead))?;
    Ok(())
}
