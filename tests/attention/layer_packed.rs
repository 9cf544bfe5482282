//! A layer over packed sequences, against the layer over each sequence by itself.

use candle_attention::{
    AttentionInput, AttentionMask, Backend, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadLatentAttention,
    MultiHeadLatentAttentionConfig, PackedSequences, RelativeBias, RelativeBiasConfig, RopeConfig,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::common::{assert_close, error_text, values};
use crate::layer::{configs, layer};

crate::on_each_device!(
    every_config_gives_each_sequence_the_numbers_of_a_call_by_itself,
    a_relative_bias_counts_in_each_sequence,
    positions_start_anew_in_each_sequence_or_are_given,
    latent_attention_takes_packed_sequences,
    the_context_length_bounds_each_sequence,
    every_config_trains_as_over_each_sequence_by_itself,
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

fn every_config_gives_each_sequence_the_numbers_of_a_call_by_itself(device: &Device) -> Result<()> {
    let (mut calls, mut refused) = (0, 0);
    for (name, cfg) in configs() {
        let layer = layer(&cfg, DType::F32, device)?;
        let is_self = [cfg.key_size(), cfg.value_size()] == [cfg.embed_dim(); 2];
        let sequences = sequences(is_self)?;
        let xs = rows(sequences.total_queries(), cfg.embed_dim(), device)?;
        let keys = rows(sequences.total_keys(), cfg.key_size(), device)?;
        let vs = rows(sequences.total_keys(), cfg.value_size(), device)?;
        let lens: Vec<_> = (0..sequences.len()).map(|s| sequences.keys(s).len().saturating_sub(1)).collect();
        let mask = AttentionMask::none().with_valid_lens(lens.clone());
        for backend in [Backend::Auto, Backend::Reference] {
            let call = AttentionInput::new(&xs).with_packed(&sequences).with_mask(&mask).with_backend(backend);
            let call = if is_self { call } else { call.with_key_value(&keys, &vs) };
            if cfg.bias_kv() || name.contains("Falcon") {
                let text = error_text(layer.forward_with(call));
                assert!(text.contains("which packed sequences do not take"), "{name}: {text}");
                refused += 1;
                continue;
            }
            let ys = layer.forward_with(call)?;
            let expected = one_by_one(&sequences, |s| {
                let (xs, keys, vs) =
                    (queries_of(&xs, &sequences, s)?, keys_of(&keys, &sequences, s)?, keys_of(&vs, &sequences, s)?);
                let mask = AttentionMask::none().with_valid_lens(vec![lens[s]]);
                let call = AttentionInput::new(&xs).with_mask(&mask).with_backend(backend);
                layer.forward_with(if is_self { call } else { call.with_key_value(&keys, &vs) })
            })?;
            assert_close(&ys, &expected, 2e-5, name);
            calls += 1;
        }
    }
    assert!(calls > 80 && refused > 8, "{calls} {refused}");
    Ok(())
}

/// Of one bias, each sequence has the part from distance 0 on.
fn a_relative_bias_counts_in_each_sequence(device: &Device) -> Result<()> {
    let buckets = RelativeBiasConfig::new(true).with_num_buckets(8).with_max_distance(6);
    let cfg = MultiHeadAttentionConfig::new(12, 4).with_relative_bias(buckets.clone()).with_sinks(true);
    let weight = Tensor::randn(0f32, 1.0, (8, 4), device)?;
    let weight = [("relative_attention_bias.weight".to_string(), weight)].into();
    let bias = RelativeBias::new(&buckets, 4, VarBuilder::from_tensors(weight, DType::F32, device))?;
    let layer = layer(&cfg, DType::F32, device)?.with_relative_bias(bias)?;
    for is_self in [true, false] {
        let sequences = sequences(is_self)?;
        let (xs, keys) = (rows(sequences.total_queries(), 12, device)?, rows(sequences.total_keys(), 12, device)?);
        let lens: Vec<_> = (0..sequences.len()).map(|s| sequences.keys(s).len().saturating_sub(1)).collect();
        let mask = AttentionMask::none().with_valid_lens(lens.clone());
        for backend in [Backend::Auto, Backend::Reference] {
            let call = || {
                let call = AttentionInput::new(&xs).with_packed(&sequences).with_mask(&mask).with_backend(backend);
                if is_self { call } else { call.with_key_value(&keys, &keys) }
            };
            let expected = one_by_one(&sequences, |s| {
                let (xs, keys) = (queries_of(&xs, &sequences, s)?, keys_of(&keys, &sequences, s)?);
                let mask = AttentionMask::none().with_valid_lens(vec![lens[s]]);
                let call = AttentionInput::new(&xs).with_mask(&mask).with_backend(backend);
                layer.forward_with(if is_self { call } else { call.with_key_value(&keys, &keys) })
            })?;
            assert_close(&layer.forward_with(call())?, &expected, 2e-5, "packed");
            let planned = layer.plan(&call())?.backend;
            assert_eq!(planned == Backend::Reference, backend == Backend::Reference || !device.is_cpu());
            let positions = Tensor::zeros(sequences.total_queries(), DType::U32, device)?;
            let text = error_text(layer.forward_with(call().with_positions(&positions)));
            assert!(text.contains("positions were given beside packed sequences"), "{text}");
        }
    }
    Ok(())
}

fn positions_start_anew_in_each_sequence_or_are_given(device: &Device) -> Result<()> {
    let cfg = MultiHeadAttentionConfig::new(12, 2).with_rope(RopeConfig::new(100.0)).with_causal(true);
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
    assert!(crate::common::max_error(&ys, &given) > 1e-3, "positions reach the numbers");

    let keys = rows(15, 12, device)?;
    let sequences = self::sequences(false)?;
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
    let sequences = sequences(true)?;
    let xs = rows(13, 16, device)?;
    let ys = layer.forward_with(AttentionInput::new(&xs).with_packed(&sequences))?;
    let expected = one_by_one(&sequences, |s| layer.forward(&queries_of(&xs, &sequences, s)?))?;
    assert_close(&ys, &expected, 2e-5, "latent attention");
    Ok(())
}

fn the_context_length_bounds_each_sequence(device: &Device) -> Result<()> {
    let xs = rows(13, 12, device)?;
    let sequences = sequences(true)?;
    let run = |context_length| {
        let cfg = MultiHeadAttentionConfig::new(12, 2).with_context_length(context_length);
        layer(&cfg, DType::F32, device)?.forward_with(AttentionInput::new(&xs).with_packed(&sequences))
    };
    run(7)?;
    assert_eq!(error_text(run(6)), "[multi_head_attention] 7 positions are more than the context length 6");
    Ok(())
}

fn every_config_trains_as_over_each_sequence_by_itself(device: &Device) -> Result<()> {
    let mut calls = 0;
    for (name, cfg) in configs().into_iter().filter(|(name, cfg)| !cfg.bias_kv() && !name.contains("Falcon")) {
        let variables = VarMap::new();
        let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&variables, DType::F32, device))?;
        let is_self = [cfg.key_size(), cfg.value_size()] == [cfg.embed_dim(); 2];
        let sequences = sequences(is_self)?;
        let widths = [cfg.embed_dim(), cfg.key_size(), cfg.value_size()];
        let totals = [sequences.total_queries(), sequences.total_keys(), sequences.total_keys()];
        let inputs = widths.into_iter().zip(totals).take(if is_self { 1 } else { 3 });
        let inputs: Vec<_> =
            inputs.map(|(width, t)| Var::from_tensor(&rows(t, width, device)?)).collect::<Result<_>>()?;
        let mut leaves: Vec<_> =
            ["queries", "keys", "values"].map(String::from).into_iter().zip(inputs.clone()).collect();
        leaves.extend(variables.data().lock().expect("one thread").clone());
        for backend in [Backend::Auto, Backend::Reference] {
            let run = |inputs: &[Tensor], sequences: Option<&PackedSequences>| {
                let mut call = AttentionInput::new(&inputs[0]).with_backend(backend);
                if let [_, keys, vs] = inputs {
                    call = call.with_key_value(keys, vs);
                }
                layer.forward_with(match sequences {
                    Some(sequences) => call.with_packed(sequences),
                    None => call,
                })
            };
            let all: Vec<_> = inputs.iter().map(|var| var.as_tensor().clone()).collect();
            let packed = run(&all, Some(&sequences))?;
            let each = one_by_one(&sequences, |s| {
                let keys = all[1..].iter().map(|xs| keys_of(xs, &sequences, s));
                let own: Vec<_> =
                    std::iter::once(queries_of(&all[0], &sequences, s)).chain(keys).collect::<Result<_>>()?;
                run(&own, None)
            })?;
            let factors = packed.randn_like(0.0, 1.0)?;
            let [got, expected] = [packed, each].map(|ys| (ys * &factors)?.sum_all()?.backward());
            let (got, expected) = (got?, expected?);
            for (leaf, var) in &leaves {
                let what = format!("{name}, {backend:?}: {leaf}");
                let [got, expected] = [&got, &expected].map(|store| store.get(var).unwrap_or_else(|| panic!("{what}")));
                let largest = values(expected).into_iter().fold(1.0, |most: f64, x| most.max(x.abs()));
                assert_close(got, expected, 2e-5 * largest, &what);
                let rows = values(got);
                let reaches = |row: &[f64]| row.iter().any(|x| *x != 0.0);
                assert!(leaf != "queries" || rows.chunks(widths[0]).all(reaches), "{what}: of every row");
            }
            calls += 1;
        }
    }
    assert!(calls > 80, "{calls}");
    Ok(())
}
