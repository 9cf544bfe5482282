//! Attention to compressed keys, in calls with a cache and with padding.

use candle_attention::{
    CompressedKeyAttention, CompressedKeyAttentionConfig, CompressedKeyCache, CompressedKeyInput, KeyCompression, hf,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use serde_json::json;

use crate::Model;
use crate::common::{error_text, values};

/// A layer, and inputs (2, T, E) with the outputs of transformers.
struct Recorded {
    model: Model,
    layer: CompressedKeyAttention,
    xs: Tensor,
    ys: Tensor,
}

/// Returns a layer with a window alone, one whose indexer chooses compressed keys, and one that attends to all of them.
fn recorded() -> Result<Vec<Recorded>> {
    let model = Model::named("deepseek_v4");
    let mut all = Vec::new();
    for (number, expected) in [None, Some((2, true, true)), Some((4, false, false))].into_iter().enumerate() {
        let layer = hf::load_compressed_key_attention(&model.config, number, model.vb())?;
        let found = layer.config().compression.map(|own| (own.rate, own.overlaps, own.indexer.is_some()));
        assert_eq!(found, expected, "layer {number}");
        let (xs, ys) =
            (model.golden[&format!("layer{number}.in")].clone(), model.golden[&format!("layer{number}.out")].clone());
        all.push(Recorded { model: model.clone(), layer, xs, ys });
    }
    Ok(all)
}

#[test]
fn compressed_keys_with_cache_in_chunks_match_transformers() -> Result<()> {
    for Recorded { model, layer, xs, ys } in recorded()? {
        let t = xs.dim(1)?;
        for own in [layer.clone(), layer.freeze()?] {
            for chunk in [1, 3, 5, 8] {
                let mut cache = CompressedKeyCache::default();
                for start in (0..t).step_by(chunk) {
                    let n = chunk.min(t - start);
                    let part = xs.narrow(1, start, n)?;
                    let found = own.forward_with(CompressedKeyInput::new(&part).with_cache(&mut cache))?;
                    model.assert_close(&found, &ys.narrow(1, start, n)?, &format!("chunks of {chunk} from {start}"));
                }
                assert_eq!(cache.lens(), [t, t]);
            }
        }
    }
    Ok(())
}

#[test]
fn compressed_keys_with_padding_match_sequences_alone() -> Result<()> {
    for Recorded { model, layer, xs, ys } in recorded()? {
        let t = xs.dim(1)?;
        let padding = 5;
        // The second sequence without its last tokens, after padding or before it.
        let second = xs.narrow(0, 1, 1)?;
        let own = second.narrow(1, 0, t - padding)?;
        let noise = (second.narrow(1, 2, padding)? * f64::NAN)?;
        let expected = ys.narrow(0, 1, 1)?.narrow(1, 0, t - padding)?;
        for is_left in [true, false] {
            let padded = if is_left { Tensor::cat(&[&noise, &own], 1)? } else { Tensor::cat(&[&own, &noise], 1)? };
            let batch = Tensor::cat(&[&xs.narrow(0, 0, 1)?, &padded], 0)?;
            let first = if is_left { padding } else { 0 };
            let (starts, ends) = ([0, first], [t, first + t - padding]);
            let mut cache = CompressedKeyCache::default();
            for is_cached in [false, true] {
                let mut input = CompressedKeyInput::new(&batch).with_starts(&starts).with_valid_lens(&ends);
                if is_cached {
                    input = input.with_cache(&mut cache);
                }
                let found = layer.forward_with(input)?;
                model.assert_close(&found.narrow(0, 0, 1)?, &ys.narrow(0, 0, 1)?, "the sequence without padding");
                let tokens = found.narrow(0, 1, 1)?.narrow(1, first, t - padding)?;
                model.assert_close(&tokens, &expected, "the sequence with padding");
            }
            // The second sequence continues, in a batch with one that has no token.
            let rest = xs.narrow(1, t - padding, padding)?;
            let lens = [0, padding];
            let input = CompressedKeyInput::new(&rest).with_valid_lens(&lens).with_cache(&mut cache);
            let found = layer.forward_with(input)?.narrow(0, 1, 1)?;
            model.assert_close(&found, &ys.narrow(0, 1, 1)?.narrow(1, t - padding, padding)?, "its next tokens");
            assert_eq!(cache.lens(), [t, t]);
        }
    }
    Ok(())
}

#[test]
fn fork_of_cache_of_compressed_keys_continues_by_itself() -> Result<()> {
    for Recorded { model, layer, xs, ys } in recorded()? {
        let t = xs.dim(1)?;
        let mut cache = CompressedKeyCache::default();
        let prompt = xs.narrow(1, 0, 7)?;
        layer.forward_with(CompressedKeyInput::new(&prompt).with_cache(&mut cache))?;
        let mut other = cache.fork()?;
        let rest = xs.narrow(1, 7, t - 7)?;
        let elsewhere = (&rest * -1.0)?;
        layer.forward_with(CompressedKeyInput::new(&elsewhere).with_cache(&mut other))?;
        let found = layer.forward_with(CompressedKeyInput::new(&rest).with_cache(&mut cache))?;
        model.assert_close(&found, &ys.narrow(1, 7, t - 7)?, "the cache whose fork went on");
        assert!(cache.memory() > 0);
        cache.reset();
        assert_eq!((cache.lens(), cache.memory()), (vec![], 0));
    }
    Ok(())
}

/// Compares the names that transformers has in memory with the names of the file, which are the published ones.
#[test]
fn compressed_keys_by_names_of_transformers_match_published_names() -> Result<()> {
    let renames = [
        (".attn.", ".self_attn."),
        ("indexer.compressor.", "compressor.indexer."),
        ("indexer.weights_proj", "compressor.indexer.scorer.weights_proj"),
        ("indexer.wq_b", "compressor.indexer.q_b_proj"),
        ("attn_sink", "sinks"),
        (".norm.", ".kv_norm."),
        (".ape", ".position_bias"),
        ("wq_a", "q_a_proj"),
        ("wq_b", "q_b_proj"),
        ("wkv", "kv_proj"),
        ("wgate", "gate_proj"),
        ("wo_a", "o_a_proj"),
        ("wo_b", "o_b_proj"),
        (".q_norm", ".q_a_norm"),
    ];
    for (number, Recorded { model, layer, xs, .. }) in recorded()?.into_iter().enumerate() {
        let mut other = model.clone();
        for (theirs, own) in renames {
            other.weights =
                other.weights.into_iter().map(|(name, own_tensor)| (name.replace(theirs, own), own_tensor)).collect();
        }
        let renamed = hf::load_compressed_key_attention(&other.config, number, other.vb())?;
        assert_eq!(values(&renamed.forward(&xs)?), values(&layer.forward(&xs)?), "layer {number}");
    }
    Ok(())
}

/// Compares gradients with differences of outputs, in f64, which Metal does not have.
#[test]
fn gradients_of_compressed_keys_match_differences() -> Result<()> {
    for compression in [None, Some(KeyCompression { rate: 2, overlaps: true, indexer: None })] {
        let cfg = CompressedKeyAttentionConfig {
            head_dim: 6,
            q_lora_rank: 5,
            rope_head_dim: 2,
            window: 2,
            output_groups: 2,
            output_rank: 3,
            compression,
            ..CompressedKeyAttentionConfig::new(8, 2)
        };
        let variables = VarMap::new();
        let layer = CompressedKeyAttention::new(&cfg, VarBuilder::from_varmap(&variables, DType::F64, &Device::Cpu))?;
        let wave = |shape: &[usize], phase: f64| -> Result<Tensor> {
            let count: usize = shape.iter().product();
            let numbers = (0..count).map(|i| (i as f64 * 0.7 + phase).sin()).collect();
            Tensor::from_vec(numbers, shape, &Device::Cpu)
        };
        let mut all: Vec<_> = variables.data().lock().expect("no panic before").clone().into_iter().collect();
        all.sort_by(|one, other| one.0.cmp(&other.0));
        for (n, (_, variable)) in all.iter().enumerate() {
            variable.set(&wave(variable.dims(), n as f64)?)?;
        }
        let xs = wave(&[1, 5, 8], 0.3)?;
        let weights = wave(&[1, 5, 8], 2.0)?;
        let loss = || (layer.forward(&xs)? * &weights)?.sum_all();
        let gradients = loss()?.backward()?;
        for (name, variable) in &all {
            let gradient = gradients.get(variable).unwrap_or_else(|| panic!("{name} has no gradient"));
            let direction = wave(variable.dims(), 5.0)?;
            let before = variable.as_tensor().copy()?;
            let mut at = Vec::new();
            for step in [1e-5, -1e-5] {
                variable.set(&(&before + (&direction * step)?)?)?;
                at.push(loss()?.to_scalar::<f64>()?);
            }
            variable.set(&before)?;
            let expected = (at[0] - at[1]) / 2e-5;
            let found = (gradient * &direction)?.sum_all()?.to_scalar::<f64>()?;
            assert!((found - expected).abs() < 1e-6 * expected.abs().max(1.0), "{name}: {found}, expected {expected}");
        }
    }
    Ok(())
}

#[test]
fn config_of_compressed_keys_that_does_not_fit_is_an_error() -> Result<()> {
    let model = Model::named("deepseek_v4");
    let error = |name: &str, value: serde_json::Value, layer: usize| {
        let mut config = model.config.clone();
        config[name] = value;
        error_text(hf::compressed_key_attention_config(&config, layer))
    };
    assert!(error("o_groups", json!(3), 0).contains("num_heads is 4, expected a multiple of output_groups, 3"));
    assert!(
        error("index_head_dim", json!(2), 1)
            .contains("the indexer's head_dim is 2, expected at least the rope_head_dim of 4")
    );
    assert!(error("num_key_value_heads", json!(2), 0).contains("num_key_value_heads is 2, but deepseek_v4 has 1"));
    assert!(
        error("layer_types", json!(["full_attention"]), 0).contains("layer_types has \"full_attention\" for layer 0")
    );
    let ratios = json!({"model_type": "deepseek_v4", "num_hidden_layers": 1, "compress_ratios": [8]});
    assert_error(
        hf::compressed_key_attention_config(&ratios, 0),
        "compress_ratios has 8 for layer 0, expected 0, 4 or 128",
    );
    assert_error(hf::attention_config(&model.config, 0), "expected a call of `compressed_key_attention_config`");
    assert_error(
        hf::compressed_key_attention_config(&Model::named("llama").config, 0),
        "attention is not to compressed keys",
    );
    Ok(())
}

/// Checks that a result is an error with this text.
fn assert_error<T>(result: Result<T>, expected: &str) {
    let text = error_text(result);
    assert!(text.contains(expected), "{text}");
}

#[test]
fn input_of_compressed_keys_that_does_not_fit_is_an_error() -> Result<()> {
    let Recorded { layer, xs, .. } = recorded()?.remove(1);
    let mut cache = CompressedKeyCache::default();
    layer.forward_with(CompressedKeyInput::new(&xs).with_cache(&mut cache))?;
    let one = xs.narrow(0, 0, 1)?;
    assert_error(
        layer.forward_with(CompressedKeyInput::new(&one).with_cache(&mut cache)),
        "the call has 1 sequences, expected the 2 that the cache holds",
    );
    assert_error(
        layer.forward_with(CompressedKeyInput::new(&xs).with_starts(&[0, 14])),
        "[compressed_key_attention] starts has 14 for sequence 1",
    );
    assert_eq!(layer.forward(&xs.narrow(1, 0, 0)?)?.dims(), [2, 0, 32]);
    assert_error(layer.forward(&xs.narrow(2, 0, 31)?), "[compressed_key_attention]");
    let tracked = candle_core::Var::from_tensor(&xs)?;
    assert_error(
        layer.forward_with(CompressedKeyInput::new(&tracked).with_cache(&mut cache)),
        "keys are tracked for gradients, which a cache would lose",
    );
    assert_eq!(cache.lens(), [13, 13]);
    Ok(())
}
