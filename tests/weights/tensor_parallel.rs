//! A layer's heads on several processes.

use std::sync::{Barrier, Mutex};

use candle_attention::{
    AlibiConfig, AttentionCache, AttentionInput, GateActivation, GatePlace, GateScope, HeadShard, MultiHeadAttention,
    MultiHeadAttentionConfig as Config, OutputGate, QkNorm, QkNormKind, QkNormScope, RelativeBias, RelativeBiasConfig,
    RopeConfig, WeightLayout,
    weights::{PackedNaming, QkvOrder},
};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;

use crate::common::{assert_near, sharded};
use crate::grid::EMBED_DIM;
use crate::{CPU, Invented, invented};

/// The shares of a layer, each read from a file that holds the whole below `layer.`.
fn shards(whole: &MultiHeadAttention, layout: WeightLayout, world_size: usize) -> Result<Vec<MultiHeadAttention>> {
    let named = whole.state_dict(layout)?.into_iter().map(|(name, tensor)| (format!("layer.{name}"), tensor));
    let vb = sharded(&named.collect())?.pp("layer");
    HeadShard::new(0, world_size)?
        .all()
        .map(|shard| MultiHeadAttention::load_shard(whole.config(), layout, shard, &vb))
        .collect()
}

/// What the processes give together.
fn together(cfg: &Config, outputs: &[Tensor]) -> Result<Tensor> {
    if !cfg.out_proj() {
        return Tensor::cat(outputs, 2);
    }
    let (first, others) = outputs.split_first().expect("a process");
    others.iter().try_fold(first.clone(), |sum, output| sum + output)
}

fn xs(width: usize) -> Result<Tensor> {
    Tensor::randn(0f32, 0.5, (2, 5, width), &CPU)
}

/// What so many processes make of a layer is what it makes of a call itself; whether it has so many heads, and no norm
/// over all of them.
pub fn assert_shared_out(
    whole: &MultiHeadAttention,
    layout: WeightLayout,
    world_size: usize,
    call: impl Fn(&MultiHeadAttention) -> Result<Tensor>,
) -> Result<bool> {
    let cfg = whole.config();
    let spans = cfg.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection);
    if cfg.num_heads() < world_size || spans {
        return Ok(false);
    }
    let outputs = shards(whole, layout, world_size)?.iter().map(&call).collect::<Result<Vec<_>>>()?;
    assert_near(&together(cfg, &outputs)?, &call(whole)?, 1e-5, &format!("{cfg:?} as {layout} in {world_size}"));
    Ok(true)
}

#[test]
fn options_by_head_are_those_of_the_shards_heads() -> Result<()> {
    let grouped = || Config::new(EMBED_DIM, 4).with_num_kv_heads(2).with_head_dim(4);
    // Two processes have four heads and two: whole key heads.
    let uneven = || Config::new(EMBED_DIM, 6).with_num_kv_heads(3).with_head_dim(4);
    let norm = QkNorm { kind: QkNormKind::Layer, scope: QkNormScope::PerHeadWeights, eps: 1e-5 };
    let buckets = RelativeBiasConfig::new(true);
    let gate = |scope, place| OutputGate { activation: GateActivation::Sigmoid, scope, place };
    let configs = [
        grouped().with_output_gate(gate(GateScope::PerEntry, GatePlace::Query)).with_causal(true).with_bias(true),
        grouped().with_output_gate(gate(GateScope::PerHead, GatePlace::Own { bias: true })).with_value_norm(1e-5),
        grouped().with_alibi(AlibiConfig::Standard),
        grouped().with_alibi(AlibiConfig::Slopes(vec![0.5, 0.1, 0.3, 0.02])).with_causal(true),
        grouped().with_alibi(AlibiConfig::Falcon).with_causal(true),
        grouped().with_qk_norm(norm).with_rope(RopeConfig::new(100.0)).with_causal(true),
        grouped().with_relative_bias(buckets.clone()).with_scale(1.0),
        grouped().with_sinks(true).with_bias_kv(true).with_bias(true),
        Config::new(EMBED_DIM, 4).with_num_kv_heads(1).with_head_dim(4).with_causal(true).with_bias(true),
        Config::new(EMBED_DIM, 9).with_num_kv_heads(3).with_head_dim(4).with_causal(true),
        uneven().with_alibi(AlibiConfig::Standard).with_causal(true).with_bias(true),
        uneven().with_alibi(AlibiConfig::Falcon).with_causal(true),
        uneven().with_qk_norm(norm).with_rope(RopeConfig::new(100.0)).with_causal(true).with_sinks(true),
        uneven().with_sinks(true).with_bias_kv(true).with_bias(true),
        uneven().with_output_gate(gate(GateScope::PerHead, GatePlace::Query)).with_window(2).with_causal(true),
    ];
    for cfg in configs {
        let invented_vb = || VarBuilder::from_backend(Box::new(Invented), DType::F32, CPU);
        let bias = cfg
            .relative_bias()
            .map(|buckets| RelativeBias::new(buckets, cfg.num_heads(), invented_vb()))
            .transpose()?;
        let with_bias = |layer: MultiHeadAttention, bias: Option<RelativeBias>| match bias {
            Some(bias) => layer.with_relative_bias(bias),
            None => Ok(layer),
        };
        let whole = with_bias(invented(&cfg, WeightLayout::Canonical)?, bias.clone())?;
        let xs = xs(EMBED_DIM)?;
        let expected = whole.forward(&xs)?;
        // A relative bias takes equal shares.
        for world_size in (1..=4).filter(|&n| n != 3 || cfg.relative_bias().is_none()) {
            let mut outputs = Vec::new();
            for (rank, layer) in shards(&whole, WeightLayout::Canonical, world_size)?.into_iter().enumerate() {
                let shard = HeadShard::new(rank, world_size)?;
                let layer = with_bias(layer, bias.as_ref().map(|bias| bias.shard(shard)).transpose()?)?;
                layer.config().validate()?;
                if cfg.bias_kv() || !cfg.causal() {
                    outputs.push(layer.forward(&xs)?);
                    continue;
                }
                // A process keeps the keys of its own heads.
                let mut cache = AttentionCache::default();
                let step = |(start, len): (usize, usize), cache: &mut AttentionCache| {
                    let tokens = xs.narrow(1, start, len)?.contiguous()?;
                    layer.forward_with(AttentionInput::new(&tokens).with_cache(cache))
                };
                let calls = [step((0, 3), &mut cache)?, step((3, 1), &mut cache)?, step((4, 1), &mut cache)?];
                outputs.push(Tensor::cat(&calls, 1)?);
            }
            assert_near(&together(&cfg, &outputs)?, &expected, 1e-5, &format!("{cfg:?} in {world_size}"));
        }
    }
    Ok(())
}

/// Nine query heads over three key heads in two processes: six of them over two, and three over one.
#[test]
fn whole_key_heads_are_divided() -> Result<()> {
    let whole = invented(&Config::new(EMBED_DIM, 9).with_num_kv_heads(3).with_head_dim(4), WeightLayout::Canonical)?;
    let shards = shards(&whole, WeightLayout::Canonical, 2)?;
    let heads = |layer: &MultiHeadAttention| (layer.config().num_heads(), layer.config().num_kv_heads());
    assert_eq!(shards.iter().map(heads).collect::<Vec<_>>(), [(6, 2), (3, 1)]);
    shards[0].state_dict(WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByHead))?;
    Ok(())
}

/// Processes as threads, each of which waits for the others where their parts are added up.
struct Processes {
    barrier: Barrier,
    parts: Mutex<Vec<Tensor>>,
}

impl Processes {
    fn sum(&self, own: &Tensor) -> Result<Tensor> {
        let parts = || self.parts.lock().expect("no thread panicked");
        parts().push(own.clone());
        self.barrier.wait();
        let all = parts().clone();
        let sum = all.iter().skip(1).try_fold(all[0].clone(), |sum, part| sum + part)?;
        if self.barrier.wait().is_leader() {
            parts().clear();
        }
        self.barrier.wait();
        Ok(sum)
    }
}

/// Where several processes have a copy of a key head, it counts once.
#[test]
fn norms_of_whole_projections_are_over_all_processes() -> Result<()> {
    for (h, h_kv, world_size) in [(6, 3, 2), (6, 3, 3), (4, 2, 4), (4, 1, 2), (9, 3, 5)] {
        for kind in [QkNormKind::Rms, QkNormKind::RmsPlusOne, QkNormKind::RmsNoWeight] {
            let norm = QkNorm { kind, scope: QkNormScope::Projection, eps: 1e-5 };
            let cfg = Config::new(EMBED_DIM, h).with_num_kv_heads(h_kv).with_head_dim(4).with_qk_norm(norm);
            let whole = invented(&cfg, WeightLayout::Canonical)?;
            let layers = shards(&whole, WeightLayout::Canonical, world_size)?;
            let xs = xs(EMBED_DIM)?;
            let processes = Processes { barrier: Barrier::new(world_size), parts: Mutex::default() };
            let sum = |own: &Tensor| processes.sum(own);
            let call = |layer: &MultiHeadAttention| layer.forward_with(AttentionInput::new(&xs).with_sum(&sum));
            let outputs = std::thread::scope(|scope| {
                let running: Vec<_> = layers.iter().map(|layer| scope.spawn(move || call(layer))).collect();
                running.into_iter().map(|process| process.join().expect("no panic")).collect::<Result<Vec<_>>>()
            })?;
            let what = format!("{h} and {h_kv} heads, {kind:?}, in {world_size}");
            assert_near(&together(&cfg, &outputs)?, &whole.forward(&xs)?, 1e-5, &what);
        }
    }
    Ok(())
}
