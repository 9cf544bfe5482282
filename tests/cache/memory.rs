//! Keys and values that are projected once, against those that are projected in every call.

use candle_attention::{
    AlibiConfig, AttentionInput, AttentionMask, GateActivation, GatePlace, GateScope,
    MultiHeadAttentionConfig as Config, OutputGate, QkNorm, QkNormKind, QkNormScope, RopeConfig, RopeScaling,
};
use candle_core::{DType, Result, Tensor};

use crate::common::{assert_close, values};
use crate::{CPU, layer_on, wave};

const T: usize = 7;

fn base() -> Config {
    Config::new(8, 4).with_num_kv_heads(2)
}

#[test]
fn a_memory_gives_the_numbers_of_its_inputs() -> Result<()> {
    let norm = |scope| QkNorm { kind: QkNormKind::Rms, scope, eps: 1e-6 };
    let dynamic = RopeScaling::Dynamic { factor: 2.0, original_context: 4 };
    let wide = || Config::new(8, 2).with_head_dim(8);
    let padding = AttentionMask::none().with_valid_lens(vec![T, 3]);
    let place = GatePlace::Own { bias: true };
    let gate = OutputGate { activation: GateActivation::Softplus, scope: GateScope::PerHead, place };
    for cfg in [
        base(),
        base().with_key_size(5).with_value_size(6).with_bias(true).with_value_head_dim(3),
        base().with_key_size(5).with_value_size(5),
        base().with_clip_qkv(0.3).with_qk_norm(norm(QkNormScope::PerHead)).with_sinks(true),
        base().with_qk_norm(norm(QkNormScope::Projection)).with_softcap(2.0),
        base().with_bias_kv(true).with_bias(true),
        base().with_bias_kv(true).with_add_zero_attn(true),
        base().with_alibi(AlibiConfig::Falcon),
        base().with_output_gate(gate).with_value_norm(1e-5),
        base().with_out_proj(false).with_causal(true),
        wide().with_rope(RopeConfig::new(100.0)).with_qk_norm(norm(QkNormScope::PerHead)),
        wide().with_rope(RopeConfig::new(100.0).with_scaling(dynamic)).with_context_length(64),
    ] {
        // The memory lies in other strides, and the kernel may add in another order.
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-14), (DType::BF16, 1e-2)] {
            let layer = layer_on(&cfg, dtype, &CPU)?;
            for batch in [&[2][..], &[]] {
                let b = batch.first().copied().unwrap_or(1);
                let input = |t: usize, width: usize, first| {
                    wave(b, t, width, first)?.reshape([batch, &[t, width]].concat())?.to_dtype(dtype)
                };
                let (keys, values_in) = (input(T, cfg.key_size(), 1.0)?, input(T, cfg.value_size(), 2.0)?);
                let one = cfg.key_size() == cfg.value_size();
                for values_in in [values_in].iter().chain(one.then_some(&keys)) {
                    let memory = layer.project_memory(&keys, values_in)?;
                    for t_q in [1, 3, 9] {
                        let queries = input(t_q, 8, 3.0)?;
                        let with = |from_memory: bool| {
                            let input = AttentionInput::new(&queries);
                            let input = match from_memory {
                                true => input.with_memory(&memory),
                                false => input.with_key_value(&keys, values_in),
                            };
                            let masked = !batch.is_empty();
                            layer.forward_with_weights(if masked { input.with_mask(&padding) } else { input })
                        };
                        let (found, expected) = (with(true)?, with(false)?);
                        let what = format!("{cfg:?}, {dtype:?}, {batch:?}, {t_q} queries");
                        assert_close(&found.output, &expected.output, tolerance, &what);
                        assert_close(&found.weights, &expected.weights, tolerance, &what);
                        assert!(values(&found.output).iter().any(|&y| y != 0.0));
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn an_empty_memory_gives_what_no_keys_give() -> Result<()> {
    let layer = layer_on(&base(), DType::F32, &CPU)?;
    let (queries, none) = (wave(2, 3, 8, 0.0)?, Tensor::zeros((2, 0, 8), DType::F32, &CPU)?);
    let memory = layer.project_memory(&none, &none)?;
    let found = layer.forward_with(AttentionInput::new(&queries).with_memory(&memory))?;
    let expected = layer.forward_with(AttentionInput::new(&queries).with_key_value(&none, &none))?;
    assert_close(&found, &expected, 0.0, "no keys");
    Ok(())
}
