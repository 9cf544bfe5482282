//! A layer over packed sequences, against the layer over each sequence by itself.

use std::ops::Range;

use crate::by_hand::{Parameters, drawn};
use crate::layer_kind::{Layer, LayerKind};
use crate::registry::{Feature, relative};
use crate::seeded::layer;
use crate::*;

crate::on_each_device!(
    packed_layer_with_relative_bias_matches_separate_calls,
    packed_relative_bias_rejects_positions_of_caller,
    packed_rope_positions_restart_in_each_sequence_unless_given,
    packed_sequence_longer_than_context_length_is_rejected,
);

test_each_feature_on_each_device!(
    matches_separate_calls:
    packed_layer_with_heads_biases_and_widths_matches_separate_calls => Plain,
    packed_layer_with_gqa_matches_separate_calls => Gqa,
    packed_layer_with_causal_mask_matches_separate_calls => Causal,
    packed_layer_with_window_matches_separate_calls => Window,
    packed_layer_with_softcap_matches_separate_calls => Softcap,
    packed_layer_with_sinks_matches_separate_calls => Sinks,
    packed_layer_with_norms_matches_separate_calls => Norms,
    packed_layer_with_clip_matches_separate_calls => Clip,
    packed_layer_with_alibi_matches_separate_calls => Alibi,
    packed_layer_with_rope_matches_separate_calls => Rope,
    packed_layer_with_gate_matches_separate_calls => Gate,
    packed_layer_with_learned_keys_is_rejected => LearnedKeys,
    packed_layer_with_cross_attention_matches_separate_calls => Cross,
    packed_layer_with_all_options_matches_separate_calls => AllAtOnce,
    packed_latent_attention_matches_separate_calls => Latent,
);

/// Queries and keys of each sequence.
const LENS: [(usize, usize); 5] = [(3, 3), (1, 4), (0, 0), (7, 2), (2, 6)];

fn sequences(is_self: bool) -> Result<PackedSequences> {
    let (lens_q, lens_kv): (Vec<_>, Vec<_>) = LENS.into_iter().unzip();
    PackedSequences::from_lens(&lens_q, if is_self { &lens_q } else { &lens_kv })
}

fn rows(t: usize, width: usize, device: &Device) -> Result<Tensor> {
    Tensor::randn(0f32, 1., (t, width), device)
}

/// Joins the outputs of `run` for each sequence that has queries.
fn one_by_one(sequences: &PackedSequences, run: impl Fn(usize) -> Result<Tensor>) -> Result<Tensor> {
    let with_queries = (0..sequences.len()).filter(|&s| !sequences.queries(s).is_empty());
    Tensor::cat(&with_queries.map(run).collect::<Result<Vec<_>>>()?, 0)
}

fn part_of(xs: &Tensor, rows: &Range<usize>) -> Result<Tensor> {
    xs.narrow(0, rows.start, rows.len())
}

/// A call of a layer with lengths that mask the last key of each sequence.
struct Call {
    kind: LayerKind,
    parameters: Parameters,
    device: Device,
}

impl Operation for Call {
    /// Packed, or one sequence after the other.
    type Way = (Backend, bool);

    fn run(&self, &(backend, is_packed): &Self::Way, leaf: Leaf) -> Result<Vec<Tensor>> {
        let built = self.kind.of_leaves(&self.parameters, DType::F32, &self.device, leaf)?;
        let is_self = self.kind.is_self(1, 1);
        let [width, of_keys, of_values, _] = self.kind.widths();
        let sequences = sequences(is_self)?;
        let total_q = sequences.total_queries();
        let total_kv = sequences.total_keys();
        let random = &mut Random::new(7);
        let mut draw = |name, t, size| leaf(name, drawn(&[t, size], random).tensor(DType::F32, &self.device)?);
        let queries = draw("queries", total_q, width)?;
        let cross =
            if is_self { None } else { Some((draw("keys", total_kv, of_keys)?, draw("values", total_kv, of_values)?)) };
        let run = |on: &dyn Layer, of: Option<usize>| -> Result<Tensor> {
            let own_len = |s: usize| sequences.keys(s).len().saturating_sub(1);
            let lens: Vec<_> = of.map_or(0..sequences.len(), |s| s..s + 1).map(own_len).collect();
            let mask = AttentionMask::none().with_valid_lens(lens);
            let part = |xs: &Tensor| of.map_or(Ok(xs.clone()), |s| part_of(xs, &sequences.keys(s)));
            let xs = of.map_or(Ok(queries.clone()), |s| part_of(&queries, &sequences.queries(s)))?;
            let call = AttentionInput::new(&xs).with_mask(&mask).with_backend(backend);
            let call = if of.is_some() { call } else { call.with_packed(&sequences) };
            match &cross {
                Some((keys, vs)) => on.run(call.with_key_value(&part(keys)?, &part(vs)?)),
                None => on.run(call),
            }
        };
        if !is_packed {
            return Ok(vec![one_by_one(&sequences, |s| run(&*built, Some(s)))?]);
        }
        let packed = run(&*built, None)?;
        assert_close(&run(&*built.frozen()?, None)?, &packed, 2e-5, "frozen");
        Ok(vec![packed])
    }
}

/// Returns whether packed sequences are an error: each would need separate keys that the layer appends, or biases that
/// count keys of the whole.
fn rejects_packed_sequences(kind: &LayerKind) -> bool {
    let is_falcon = matches!(kind, LayerKind::MultiHead(cfg) if cfg.alibi() == Some(&AlibiConfig::Falcon));
    kind.more_keys() > 0 || is_falcon
}

/// Compares outputs and gradients of packed sequences with one call for each sequence.
fn matches_separate_calls(feature: Feature, device: &Device) -> Result<()> {
    check_layers(feature.configs(), device)
}

fn packed_layer_with_relative_bias_matches_separate_calls(device: &Device) -> Result<()> {
    check_layers(relative().into(), device)
}

fn check_layers(layers: Vec<(&'static str, LayerKind)>, device: &Device) -> Result<()> {
    for (name, kind) in layers {
        let call = Call { parameters: kind.parameters(3), kind, device: device.clone() };
        for backend in [Backend::Auto, Backend::Reference] {
            let packed = backward(&call, &(backend, true), |_| true);
            if rejects_packed_sequences(&call.kind) {
                let text = error_text(packed);
                assert!(text.contains("packed sequences"), "{name}: {text}");
                continue;
            }
            let each = backward(&call, &(backend, false), |_| true)?;
            let most = |what: &str, largest: f64| 2e-5 * if what == "result 0" { 1.0 } else { largest.max(1.0) };
            are_near(&packed?, &each, most).map_err(|error| error.context(format!("{name}, {backend:?}")))?;
        }
    }
    Ok(())
}

fn packed_relative_bias_rejects_positions_of_caller(device: &Device) -> Result<()> {
    for (_, kind) in relative() {
        let layer = kind.of_parameters(&kind.parameters(3), DType::F32, device)?;
        let sequences = sequences(true)?;
        let xs = rows(13, 12, device)?;
        let keys = rows(13, kind.widths()[1], device)?;
        let positions = Tensor::zeros(13, DType::U32, device)?;
        let call = AttentionInput::new(&xs).with_packed(&sequences);
        let call = if kind.is_self(1, 1) { call } else { call.with_key_value(&keys, &keys) };
        let planned = layer.as_multi_head().expect("of many heads").plan(&call)?;
        // On Metal, kernels may be off.
        assert!(device.is_metal() || (planned.backend == Backend::Fused) == device.is_cpu(), "{planned}");
        let text = error_text(layer.run(call.with_positions(&positions)));
        assert!(text.contains("positions were given with packed sequences"), "{text}");
    }
    Ok(())
}

fn packed_rope_positions_restart_in_each_sequence_unless_given(device: &Device) -> Result<()> {
    let cfg = Config::new(12, 2).with_rope(RopeConfig::new(100.0)).with_causal(true);
    let layer = layer(&cfg, DType::F32, device)?;
    let sequences = sequences(true)?;
    let xs = rows(13, 12, device)?;
    let call = || AttentionInput::new(&xs).with_packed(&sequences);
    let own: Vec<u32> = (0..sequences.len()).flat_map(|s| 0..sequences.queries(s).len() as u32).collect();
    let given = layer.forward_with(call().with_positions(&Tensor::new(own, device)?))?;
    assert_close(&given, &layer.forward_with(call())?, 0.0, "positions from 0");
    let positions = Tensor::arange(20u32, 33, device)?.affine(-3.0, 100.0)?;
    let ys = layer.forward_with(call().with_positions(&positions))?;
    let expected = one_by_one(&sequences, |s| {
        let xs = part_of(&xs, &sequences.queries(s))?;
        let positions = part_of(&positions, &sequences.queries(s))?;
        layer.forward_with(AttentionInput::new(&xs).with_positions(&positions))
    })?;
    assert_close(&ys, &expected, 2e-5, "positions of the caller");
    assert!(max_error(&ys, &given) > 1e-3, "positions reach the numbers");
    Ok(())
}

fn packed_sequence_longer_than_context_length_is_rejected(device: &Device) -> Result<()> {
    let sequences = sequences(true)?;
    let xs = rows(13, 12, device)?;
    let run = |context_length| {
        let cfg = Config::new(12, 2).with_context_length(context_length);
        layer(&cfg, DType::F32, device)?.forward_with(AttentionInput::new(&xs).with_packed(&sequences))
    };
    run(7)?;
    assert_eq!(error_text(run(6)), "[multi_head_attention] 7 positions are more than the context length 6");
    Ok(())
}
