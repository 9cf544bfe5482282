//! Options that a layer or a call may lack: `None` is the same as no call of the builder.

use std::sync::Arc;

use crate::*;

#[test]
fn config_options_of_none_equal_the_default() {
    let cfg = Config::new(12, 4)
        .with_num_kv_heads(None)
        .with_head_dim(None)
        .with_value_head_dim(None)
        .with_out_dim(None)
        .with_kdim(None)
        .with_vdim(None)
        .with_context_length(None)
        .with_window(None)
        .with_chunk(None)
        .with_clip_qkv(None)
        .with_softcap(None)
        .with_scale(None)
        .with_qk_norm(None)
        .with_value_norm(None)
        .with_rope(None)
        .with_alibi(None)
        .with_relative_bias(None)
        .with_content_positions(None)
        .with_attention_temperature(None)
        .with_output_gate(None)
        .with_output_norm(None);
    assert_eq!(cfg, Config::new(12, 4));
    assert_eq!(cfg.clone().with_window(Some(3)), cfg.clone().with_window(3));
    assert_eq!(cfg.clone().with_window(3).with_window(None), cfg);
    let rope = RopeConfig::new(100.0);
    assert_eq!(rope.clone().with_rotary_dim(None).with_axes(None), rope);
    let latent = LatentConfig::new(8, 2);
    assert_eq!(latent.clone().with_q_lora_rank(None).with_scale(None), latent);
    let cache = AttentionCacheConfig::new();
    assert_eq!(cache.clone().with_window(None).with_dtype(None), cache);
    let delta = GatedDeltaNetConfig::new(8, 2);
    let absent = delta.clone().with_num_key_heads(None).with_decay_rank(None);
    assert_eq!(absent.with_decay_lower_bound(None).with_gate_rank(None), delta);
}

#[test]
fn qk_norm_constructors_equal_their_fields() {
    let rms = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-6 };
    assert_eq!(QkNorm::rms(1e-6), rms);
    assert_eq!(QkNorm::layer_norm(1e-6), QkNorm { kind: QkNormKind::Layer, ..rms });
}

#[test]
fn call_inputs_of_none_and_of_options_match_plain_inputs() -> Result<()> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
    let layer = MultiHeadAttention::new(&Config::new(8, 2).with_causal(true), vb)?.freeze()?;
    let xs = Tensor::randn(0f32, 1., (2, 3, 8), &CPU)?;
    let run = |input: AttentionInput| layer.forward_with(input)?.to_vec3::<f32>();

    let none = AttentionInput::new(&xs).with_mask(None).with_positions(None).with_residual(None);
    let none = none.with_memory(None).with_packed(None).with_valid_lens(None).with_starts(None).with_dropout_seed(None);
    assert_eq!(run(none)?, run(AttentionInput::new(&xs))?);

    let mask = AttentionMask::none().with_valid_lens(vec![3, 1]);
    let masked = run(AttentionInput::new(&xs).with_mask(&mask))?;
    assert_ne!(masked, run(AttentionInput::new(&xs))?);
    assert_eq!(run(AttentionInput::new(&xs).with_mask(Some(&mask)))?, masked);
    assert_eq!(run(AttentionInput::new(&xs).with_mask(&Some(mask.clone())))?, masked);
    assert_eq!(run(AttentionInput::new(&xs).with_mask(&Arc::new(mask)))?, masked);

    let mut lengths = Vec::new();
    for input in [
        AttentionInput::new(&xs).with_valid_lens(&[3, 1]),
        AttentionInput::new(&xs).with_valid_lens(&vec![3, 1]),
        AttentionInput::new(&xs).with_valid_lens(Some(&[3, 1][..])),
    ] {
        let mut cache = AttentionCache::default();
        layer.forward_with(input.with_cache(&mut cache))?;
        lengths.push(cache.lens());
    }
    assert_eq!(lengths, [[3, 1]; 3]);
    Ok(())
}

#[test]
fn function_options_of_none_and_of_variables_match_plain_options() -> Result<()> {
    let q = Tensor::randn(0f32, 1., (1, 2, 3, 4), &CPU)?;
    let run = |mask: &AttentionMask, options: &SdpaOptions| {
        scaled_dot_product_attention(&q, &q, &q, mask, options)?.flatten_all()?.to_vec1::<f32>()
    };
    let plain = run(&AttentionMask::causal(), &SdpaOptions::default())?;
    let none = SdpaOptions::default().with_scale(None).with_softcap(None).with_sinks(None).with_alibi_slopes(None);
    let none = none.with_relative_bias(None).with_dropout_seed(None).with_dropout_philox_seed(None);
    assert_eq!(run(&AttentionMask::causal().with_bias(None).with_bool_mask(None), &none)?, plain);

    let numbers = Tensor::randn(0f32, 1., 2, &CPU)?;
    let bias = Tensor::randn(0f32, 1., (3, 3), &CPU)?;
    let of_tensors = SdpaOptions::default().with_sinks(&numbers).with_alibi_slopes(&numbers);
    let expected = run(&AttentionMask::causal().with_bias(&bias), &of_tensors)?;
    let numbers = Var::from_tensor(&numbers)?;
    let of_variables = SdpaOptions::default().with_sinks(&numbers).with_alibi_slopes(&numbers);
    let biased = AttentionMask::causal().with_bias(&Var::from_tensor(&bias)?);
    let error = run(&biased, &of_variables)?.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
    assert!(error < 1e-5, "{error}");
    assert_ne!(expected, plain);
    Ok(())
}
