//! A layer over packed sequences, against the layer over each sequence by itself.

use candle_attention::{
    AttentionInput, AttentionMask, Backend, MultiHeadAttention, MultiHeadAttentionConfig as Config,
    MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, PackedSequences, RelativeBias, RelativeBiasConfig,
    RopeConfig,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::common::{assert_close, assert_near, error_text, max_error, values};
use crate::layer::{configs, is_self, layer};
use crate::tensors::named;

crate::on_each_device!(
    every_config_gives_each_sequence_the_numbers_and_gradients_of_a_call_by_itself,
    positions_start_anew_in_each_sequence_or_are_given,
    latent_attention_takes_packed_sequences,
    the_context_length_bounds_each_sequence,
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

/// The outputs of `run` for each sequence that has queries, one after the other.
fn one_by_one(sequences: &PackedSequences, run: impl Fn(usize) -> Result<Tensor>) -> Result<Tensor> {
    let with_queries = (0..sequences.len()).filter(|&s| !sequences.queries(s).is_empty());
    Tensor::cat(&with_queries.map(run).collect::<Result<Vec<_>>>()?, 0)
}

fn queries_of(xs: &Tensor, sequences: &PackedSequences, s: usize) -> Result<Tensor> {
    xs.narrow(0, sequences.queries(s).start, sequences.queries(s).len())
}

fn keys_of(xs: &Tensor, sequences: &PackedSequences, s: usize) -> Result<Tensor> {
    xs.narrow(0, sequences.keys(s).start, sequences.keys(s).len())
}

/// What the test is about, and T5's relative bias, of which each sequence has the part from distance 0 on.
fn layers(device: &Device) -> Result<Vec<(&'static str, Config, VarMap, MultiHeadAttention)>> {
    let buckets = || RelativeBiasConfig::new(true).with_num_buckets(8).with_max_distance(6);
    let relative = Config::new(12, 4).with_relative_bias(buckets()).with_sinks(true);
    let crossed = relative.clone().with_key_size(7);
    let mut layers = Vec::new();
    for (name, cfg) in configs().into_iter().chain([("relative bias", relative), ("crossed relative bias", crossed)]) {
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, DType::F32, device);
        let layer = MultiHeadAttention::new(&cfg, vb.clone())?;
        let layer = match cfg.relative_bias() {
            Some(_) => layer.with_relative_bias(RelativeBias::new(&buckets(), 4, vb)?)?,
            None => layer,
        };
        layers.push((name, cfg, variables, layer));
    }
    Ok(layers)
}

fn every_config_gives_each_sequence_the_numbers_and_gradients_of_a_call_by_itself(device: &Device) -> Result<()> {
    let (mut calls, mut refused) = (0, 0);
    for (name, cfg, variables, layer) in layers(device)? {
        let sequences = sequences(is_self(&cfg, 1, 1))?;
        let (total_q, total_kv) = (sequences.total_queries(), sequences.total_keys());
        let widths = [(total_q, cfg.embed_dim()), (total_kv, cfg.key_size()), (total_kv, cfg.value_size())];
        let inputs = widths.into_iter().take(if is_self(&cfg, 1, 1) { 1 } else { 3 });
        let inputs = inputs.map(|(t, width)| Var::from_tensor(&rows(t, width, device)?)).collect::<Result<Vec<_>>>()?;
        let all: Vec<_> = inputs.iter().map(|var| var.as_tensor().clone()).collect();
        let lens: Vec<_> = (0..sequences.len()).map(|s| sequences.keys(s).len().saturating_sub(1)).collect();
        let frozen = layer.freeze()?;
        for backend in [Backend::Auto, Backend::Reference] {
            let run = |layer: &MultiHeadAttention, of: Option<usize>| {
                let (mut inputs, mut own_lens) = (all.clone(), lens.clone());
                if let Some(s) = of {
                    let keys = all[1..].iter().map(|xs| keys_of(xs, &sequences, s));
                    inputs = std::iter::once(queries_of(&all[0], &sequences, s)).chain(keys).collect::<Result<_>>()?;
                    own_lens = vec![lens[s]];
                }
                let mask = AttentionMask::none().with_valid_lens(own_lens);
                let mut call = AttentionInput::new(&inputs[0]).with_mask(&mask).with_backend(backend);
                if let [_, keys, vs] = &inputs[..] {
                    call = call.with_key_value(keys, vs);
                }
                layer.forward_with(if of.is_some() { call } else { call.with_packed(&sequences) })
            };
            let packed = match run(&layer, None) {
                Err(error) if cfg.bias_kv() || cfg.add_zero_attn() || name.contains("Falcon") => {
                    assert!(error.to_string().contains("which packed sequences do not take"), "{name}: {error}");
                    refused += 1;
                    continue;
                }
                packed => packed?,
            };
            let each = one_by_one(&sequences, |s| run(&layer, Some(s)))?;
            assert_close(&packed, &each, 2e-5, name);
            assert_close(&run(&frozen, None)?, &packed, 2e-5, &format!("{name}, frozen"));
            let factors = packed.randn_like(0.0, 1.0)?;
            let [got, expected] = [packed, each].map(|ys| (ys * &factors)?.sum_all()?.backward());
            let (got, expected) = (got?, expected?);
            for var in inputs.iter().chain(named(&variables).values()) {
                let [got, expected] = [&got, &expected].map(|store| store.get(var).expect(name));
                let largest = values(expected).into_iter().fold(1.0, |most: f64, x| most.max(x.abs()));
                assert_close(got, expected, 2e-5 * largest, &format!("{name}, {backend:?}: {:?}", var.dims()));
            }
            calls += 1;
        }
        if cfg.relative_bias().is_some() {
            let positions = Tensor::zeros(total_q, DType::U32, device)?;
            let call = AttentionInput::new(&all[0]).with_packed(&sequences);
            let call = if let [_, keys, vs] = &all[..] { call.with_key_value(keys, vs) } else { call };
            assert_eq!(layer.plan(&call)?.backend == Backend::Fused, device.is_cpu());
            let text = error_text(layer.forward_with(call.with_positions(&positions)));
            assert!(text.contains("positions were given beside packed sequences"), "{text}");
        }
    }
    assert!(calls > 80 && calls + refused > 100, "{calls} {refused}");
    Ok(())
}

fn positions_start_anew_in_each_sequence_or_are_given(device: &Device) -> Result<()> {
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
        let (xs, positions) = (queries_of(&xs, &sequences, s)?, queries_of(&positions, &sequences, s)?);
        layer.forward_with(AttentionInput::new(&xs).with_positions(&positions))
    })?;
    assert_close(&ys, &expected, 2e-5, "positions of the caller");
    assert!(max_error(&ys, &given) > 1e-3, "positions reach the numbers");

    let (keys, sequences) = (rows(15, 12, device)?, self::sequences(false)?);
    let memory = layer.forward_with(AttentionInput::new(&xs).with_key_value(&keys, &keys).with_packed(&sequences))?;
    let expected = one_by_one(&sequences, |s| {
        let (xs, keys) = (queries_of(&xs, &sequences, s)?, keys_of(&keys, &sequences, s)?);
        layer.forward_with(AttentionInput::new(&xs).with_key_value(&keys, &keys))
    })?;
    assert_close(&memory, &expected, 2e-5, "cross-attention");
    Ok(())
}

fn latent_attention_takes_packed_sequences(device: &Device) -> Result<()> {
    let cfg = MultiHeadLatentAttentionConfig::new(16, 2);
    let layer = MultiHeadLatentAttention::new(&cfg, VarBuilder::from_varmap(&VarMap::new(), DType::F32, device))?;
    let (sequences, xs) = (sequences(true)?, rows(13, 16, device)?);
    let ys = layer.forward_with(AttentionInput::new(&xs).with_packed(&sequences))?;
    let expected = one_by_one(&sequences, |s| layer.forward(&queries_of(&xs, &sequences, s)?))?;
    assert_near(&ys, &expected, 2e-5, "latent attention");
    Ok(())
}

fn the_context_length_bounds_each_sequence(device: &Device) -> Result<()> {
    let (sequences, xs) = (sequences(true)?, rows(13, 12, device)?);
    let run = |context_length| {
        let cfg = Config::new(12, 2).with_context_length(context_length);
        layer(&cfg, DType::F32, device)?.forward_with(AttentionInput::new(&xs).with_packed(&sequences))
    };
    run(7)?;
    assert_eq!(error_text(run(6)), "[multi_head_attention] 7 positions are more than the context length 6");
    Ok(())
}
