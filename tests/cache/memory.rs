//! Keys and values that are projected once, beside those that are projected in every call.

use candle_attention::{
    AlibiConfig, AttentionCache, AttentionInput, AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig as Config,
    ProjectedMemory, QkNorm, QkNormKind, QkNormScope, RopeConfig, RopeScaling,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};

use crate::common::{assert_close, error_text, values};
use crate::compare::layer;

const CPU: Device = Device::Cpu;
const T: usize = 7;

fn base() -> Config {
    Config::new(8, 4).with_num_kv_heads(2)
}

fn xs(dims: &[usize], first: f32) -> Tensor {
    let count = dims.iter().product::<usize>();
    let data: Vec<f32> = (0..count).map(|n| (n as f32 * 0.7 + first).sin()).collect();
    Tensor::from_vec(data, dims, &CPU).expect("as many numbers")
}

#[test]
fn a_memory_gives_the_numbers_of_its_inputs() -> Result<()> {
    let norm = |scope| QkNorm { kind: QkNormKind::Rms, scope, eps: 1e-6 };
    let dynamic = RopeScaling::Dynamic { factor: 2.0, original_context: 4 };
    let wide = || Config::new(8, 2).with_head_dim(8);
    let padding = AttentionMask::none().with_valid_lens(vec![T, 3]);
    for cfg in [
        base(),
        base().with_key_size(5).with_value_size(6).with_bias(true).with_value_head_dim(3),
        base().with_key_size(5).with_value_size(5),
        base().with_clip_qkv(0.3).with_qk_norm(norm(QkNormScope::PerHead)).with_sinks(true),
        base().with_qk_norm(norm(QkNormScope::Projection)).with_softcap(2.0),
        base().with_bias_kv(true).with_bias(true),
        base().with_bias_kv(true).with_add_zero_attn(true),
        base().with_alibi(AlibiConfig::Falcon),
        base().with_out_proj(false).with_causal(true),
        wide().with_rope(RopeConfig::new(100.0)).with_qk_norm(norm(QkNormScope::PerHead)),
        wide().with_rope(RopeConfig::new(100.0).with_scaling(dynamic)).with_context_length(64),
    ] {
        // The memory lies in other strides, and the kernel may add in another order.
        for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::F64, 1e-14), (DType::BF16, 1e-2)] {
            let layer = layer(&cfg, dtype, &CPU)?;
            for batch in [&[2][..], &[]] {
                let input = |t: usize, width: usize, first| xs(&[batch, &[t, width]].concat(), first).to_dtype(dtype);
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
                        assert_close(&found.context, &expected.context, tolerance, &what);
                        assert_close(&found.weights, &expected.weights, tolerance, &what);
                        assert!(values(&found.context).iter().any(|&y| y != 0.0));
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_go_through_a_memory() -> Result<()> {
    let vars = VarMap::new();
    let layer = MultiHeadAttention::new(&base(), VarBuilder::from_varmap(&vars, DType::F32, &CPU))?;
    let (queries, encoded) = (xs(&[2, 3, 8], 0.0), xs(&[2, T, 8], 1.0));
    let memory = layer.project_memory(&encoded, &encoded)?;
    let squares = |input: AttentionInput| layer.forward_with(input)?.sqr()?.sum_all()?.backward();
    let found = squares(AttentionInput::new(&queries).with_memory(&memory))?;
    let expected = squares(AttentionInput::new(&queries).with_key_value(&encoded, &encoded))?;
    for (name, var) in vars.data().lock().expect("one thread").iter() {
        let of = |gradients: &candle_core::backprop::GradStore| gradients.get(var).cloned().expect("a gradient");
        assert_close(&of(&found), &of(&expected), 1e-5, name);
    }
    Ok(())
}

#[test]
fn an_empty_memory_gives_what_no_keys_give() -> Result<()> {
    let layer = layer(&base(), DType::F32, &CPU)?;
    let (queries, none) = (xs(&[2, 3, 8], 0.0), Tensor::zeros((2, 0, 8), DType::F32, &CPU)?);
    let memory = layer.project_memory(&none, &none)?;
    let found = layer.forward_with(AttentionInput::new(&queries).with_memory(&memory))?;
    let expected = layer.forward_with(AttentionInput::new(&queries).with_key_value(&none, &none))?;
    assert_close(&found, &expected, 0.0, "no keys");
    Ok(())
}

#[test]
fn what_does_not_fit_a_memory_is_an_error() -> Result<()> {
    let own = layer(&base().with_context_length(9), DType::F32, &CPU)?;
    let (queries, encoded) = (xs(&[2, 3, 8], 0.0), xs(&[2, T, 8], 1.0));
    let projected = |keys: &[usize], values: &[usize]| own.project_memory(&xs(keys, 0.0), &xs(values, 0.0));
    for (found, expected) in [
        (projected(&[2, T, 7], &[2, T, 8]), "keys have shape [2, 7, 7], expected (B, T, 8)"),
        (projected(&[8], &[8]), "keys have shape [8], expected (B, T, 8)"),
        (projected(&[2, T, 8], &[T, 8]), "values have shape [7, 8], expected (B, T, 8)"),
        (projected(&[2, T, 8], &[2, 6, 8]), "keys [2, 7, 8] and values [2, 6, 8] differ in batch size or length"),
        (projected(&[1, T, 8], &[2, T, 8]), "keys [1, 7, 8] and values [2, 7, 8] differ in batch size or length"),
        (projected(&[2, 10, 8], &[2, 10, 8]), "10 positions are more than the context length 9"),
        (
            own.project_memory(&encoded.to_dtype(DType::F64)?, &encoded),
            "keys have dtype F64, expected the weights' F32",
        ),
    ] {
        assert_eq!(error_text(found), format!("[multi_head_attention] {expected}"));
    }

    let memory = own.project_memory(&encoded, &encoded)?;
    let of = |cfg: Config, dtype| -> Result<ProjectedMemory> {
        let encoded = encoded.to_dtype(dtype)?;
        layer(&cfg, dtype, &CPU)?.project_memory(&encoded, &encoded)
    };
    let other = [
        (of(base().with_num_kv_heads(4), DType::F32)?, "keys [2, 4, 7, 2] and values [2, 4, 7, 2]"),
        (of(base().with_value_head_dim(3), DType::F32)?, "keys [2, 2, 7, 2] and values [2, 2, 7, 3]"),
        (of(base().with_bias_kv(true), DType::F32)?, "keys [2, 2, 8, 2] and values [2, 2, 8, 2]"),
    ];
    for (memory, holds) in &other {
        assert_eq!(
            error_text(own.forward_with(AttentionInput::new(&queries).with_memory(memory))),
            format!(
                "[multi_head_attention] the memory holds {holds}, expected [2, 2, 7, 2] and [2, 2, 7, 2] of this layer and batch"
            )
        );
    }
    let mut cache = AttentionCache::default();
    let positions = Tensor::arange(0u32, T as u32, &CPU)?;
    let (three, single) = (xs(&[3, 3, 8], 0.0), xs(&[3, 8], 0.0));
    let wide = of(base(), DType::F64)?;
    for (input, expected) in [
        (
            AttentionInput::new(&three).with_memory(&memory),
            "the memory holds keys [2, 2, 7, 2] and values [2, 2, 7, 2], expected [3, 2, 7, 2] and [3, 2, 7, 2] of this layer and batch",
        ),
        (
            AttentionInput::new(&single).with_memory(&memory),
            "the memory is of a batch, expected one sequence without a batch as the queries",
        ),
        (
            AttentionInput::new(&queries).with_memory(&wide),
            "the memory is F64 on Cpu, expected the weights' F32 on Cpu",
        ),
        (
            AttentionInput::new(&queries).with_memory(&memory).with_key_value(&encoded, &encoded),
            "keys and values were given beside a memory, expected one of the two",
        ),
        (
            AttentionInput::new(&queries).with_memory(&memory).with_cache(&mut cache),
            "keys and values were given beside a cache, expected self-attention",
        ),
    ] {
        assert_eq!(error_text(own.forward_with(input)), format!("[multi_head_attention] {expected}"));
    }

    let rotary = layer(&Config::new(8, 2).with_rope(RopeConfig::new(100.0)), DType::F32, &CPU)?;
    let memory = rotary.project_memory(&encoded, &encoded)?;
    let input = AttentionInput::new(&queries).with_memory(&memory).with_key_positions(&positions);
    assert_eq!(
        error_text(rotary.forward_with(input)),
        "[multi_head_attention] key positions were given beside a memory, whose keys stand at 0..T_kv"
    );
    Ok(())
}
