//! What does not fit is an error that says so.

use candle_attention::{
    AttentionCache, AttentionInput, Backend, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadLatentAttention,
    MultiHeadLatentAttentionConfig as Config, RopeConfig, RopeStyle, RotaryEmbedding,
};
use candle_core::{DType, Result, Tensor};
use candle_nn::VarBuilder;

use crate::array::Random;
use crate::common::error_text;
use crate::layers::{CPU, layer, parameters, tensors};

fn base() -> Config {
    Config::new(6, 2).with_q_lora_rank(3).with_kv_lora_rank(5).with_nope_head_dim(4).with_rope_head_dim(2)
}

fn zeros(cfg: &Config) -> Result<MultiHeadLatentAttention> {
    MultiHeadLatentAttention::new(cfg, VarBuilder::zeros(DType::F32, &CPU))
}

#[test]
fn configs_that_do_not_fit_together_are_named() {
    let most = u32::MAX as usize;
    for (cfg, expected) in [
        (Config::new(0, 2), "[multi_head_latent_attention] embed_dim is 0, expected at least 1".to_string()),
        (Config::new(6, 0), "[multi_head_latent_attention] num_heads is 0, expected at least 1".to_string()),
        (base().with_q_lora_rank(0), "[multi_head_latent_attention] q_lora_rank is 0, expected at least 1".to_string()),
        (
            base().with_kv_lora_rank(0),
            "[multi_head_latent_attention] kv_lora_rank is 0, expected at least 1".to_string(),
        ),
        (
            base().with_nope_head_dim(0),
            "[multi_head_latent_attention] nope_head_dim is 0, expected at least 1".to_string(),
        ),
        (
            base().with_value_head_dim(most + 1),
            format!("[multi_head_latent_attention] value_head_dim is {}, expected at most {most}", most + 1),
        ),
        (
            base().with_nope_head_dim(most),
            format!("[multi_head_latent_attention] num_heads 2 times a width of {} is more than {most}", most + 128),
        ),
        (
            base().with_dropout(1.5),
            "[multi_head_latent_attention] dropout is 1.5, expected a probability from 0 to 1".to_string(),
        ),
        (
            base().with_norm_eps(-1.0),
            "[multi_head_latent_attention] norm_eps is -1, expected a finite number of zero or more".to_string(),
        ),
        (
            base().with_scale(f64::INFINITY),
            "[multi_head_latent_attention] scale is inf, expected a finite number".to_string(),
        ),
        (
            base().with_rope_head_dim(3),
            "[rope] rotary_dim is 3, expected an even number from 2 to head_dim 3".to_string(),
        ),
    ] {
        assert_eq!(error_text(zeros(&cfg)), expected);
    }
}

#[test]
fn missing_and_misshapen_tensors_are_named() -> Result<()> {
    let cfg = base().with_bias(true);
    let all = parameters(&cfg, &mut Random::new(41));
    let load = |cfg: &Config, change: &dyn Fn(&mut std::collections::HashMap<String, Tensor>)| {
        let mut tensors = tensors(&all, DType::F32)?;
        change(&mut tensors);
        MultiHeadLatentAttention::new(cfg, VarBuilder::from_tensors(tensors, DType::F32, &CPU).pp("attention"))
    };
    let below = |tensors: &mut std::collections::HashMap<String, Tensor>| {
        *tensors = tensors.drain().map(|(name, tensor)| (format!("attention.{name}"), tensor)).collect();
    };
    assert!(load(&cfg, &below).is_ok());
    for (name, shape) in [
        ("q_a_proj.weight", "[3, 6]"),
        ("q_a_layernorm.weight", "[3]"),
        ("q_b_proj.weight", "[12, 3]"),
        ("kv_a_proj_with_mqa.bias", "[7]"),
        ("kv_a_layernorm.weight", "[5]"),
        ("kv_b_proj.weight", "[264, 5]"),
        ("o_proj.bias", "[6]"),
    ] {
        let without = load(&cfg, &|tensors| {
            tensors.remove(name);
            below(tensors);
        });
        assert_eq!(
            error_text(without),
            format!(
                "[multi_head_latent_attention] attention.{name} is missing, expected shape {shape} (layout latent)"
            )
        );
    }
    assert_eq!(
        error_text(load(&cfg.clone().with_kv_lora_rank(4), &below)),
        "[multi_head_latent_attention] attention.kv_a_proj_with_mqa.weight has shape [7, 6], expected [6, 6] (layout latent)"
    );
    assert_eq!(
        error_text(load(&cfg.with_bias(false), &below)),
        "[multi_head_latent_attention] attention.q_a_proj.bias is in the file, but the config says there is no such bias \
         (layout latent)"
    );
    assert_eq!(
        error_text(MultiHeadLatentAttention::new(&base(), VarBuilder::zeros(DType::U8, &CPU))),
        "[multi_head_latent_attention] the builder gives weights as U8, expected F32, F16, BF16 or F64"
    );
    Ok(())
}

#[test]
fn inputs_that_do_not_fit_are_named() -> Result<()> {
    let layer = zeros(&base())?;
    let input = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &CPU);
    let xs = input(&[2, 3, 6])?;
    for (dims, expected) in [
        (&[2, 3, 5][..], "[2, 3, 5], expected (B, T, 6)"),
        (&[3, 7], "[3, 7], expected (B, T, 6) or (T, 6)"),
        (&[6], "[6], expected (B, T, 6) or (T, 6)"),
        (&[1, 1, 2, 6], "[1, 1, 2, 6], expected (B, T, 6) or (T, 6)"),
    ] {
        let expected = format!("[multi_head_latent_attention] queries have shape {expected}");
        assert_eq!(error_text(layer.forward(&input(dims)?)), expected);
    }
    assert_eq!(
        error_text(layer.forward(&xs.to_dtype(DType::F64)?)),
        "[multi_head_latent_attention] queries have dtype F64, expected the weights' F32"
    );
    assert_eq!(
        error_text(layer.forward_with(AttentionInput::new(&xs).with_key_value(&xs, &xs))),
        "[multi_head_latent_attention] keys and values were given, expected self-attention"
    );
    let positions = Tensor::zeros(3, DType::U32, &CPU)?;
    assert_eq!(
        error_text(layer.forward_with(AttentionInput::new(&xs).with_key_positions(&positions))),
        "[multi_head_latent_attention] key positions are given, but the keys are the queries"
    );
    assert_eq!(
        error_text(layer.forward_with(AttentionInput::new(&xs).with_valid_lens(&[1, 2]))),
        "[multi_head_latent_attention] valid_lens or starts were given to a call without a cache; expected padding in the mask"
    );
    assert_eq!(
        error_text(layer.forward_with(AttentionInput::new(&xs).with_positions(&Tensor::zeros(2, DType::U32, &CPU)?))),
        "[rope] positions have shape [2], expected (T,) = [3] or (B, T) = [2, 3]"
    );
    let wide = layer.forward_with(AttentionInput::new(&xs).with_train(true).with_backend(Backend::Fused));
    assert!(wide.is_ok(), "no dropout, so training is as inference");
    Ok(())
}

#[test]
fn tables_of_other_positions_are_refused() -> Result<()> {
    let rope = RopeConfig::new(10_000.0).with_style(RopeStyle::Interleaved);
    let other = zeros(&base())?.with_rotary(RotaryEmbedding::new(&rope, 4)?);
    assert_eq!(
        error_text(other),
        format!(
            "[multi_head_latent_attention] rotary tables are of {rope:?} and heads of 4, expected {rope:?} and heads of 2"
        )
    );
    assert!(zeros(&base())?.with_rotary(RotaryEmbedding::new(&rope, 2)?).is_ok());
    Ok(())
}

/// Caches know what they hold.
#[test]
fn a_cache_of_latents_is_for_layers_of_their_width() -> Result<()> {
    let random = &mut Random::new(42);
    let latent = |cfg: &Config, random: &mut Random| layer(cfg, &parameters(cfg, random), DType::F32);
    let xs = Tensor::zeros((2, 3, 6), DType::F32, &CPU)?;
    let mut cache = AttentionCache::default();
    latent(&base(), random)?.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;

    let cfg = base().with_kv_lora_rank(3).with_rope_head_dim(4);
    let other = latent(&cfg, random)?.forward_with(AttentionInput::new(&xs).with_cache(&mut cache));
    assert_eq!(
        error_text(other),
        "[attention_cache] keys (2, 1, T, 7) on Cpu and values in their first 3 columns do not fit those of the calls \
         before, (2, 1, T, 7) on Cpu and in their first 5 columns"
    );
    let cfg = MultiHeadAttentionConfig::new(6, 2).with_num_kv_heads(1).with_head_dim(7).with_value_head_dim(5);
    let plain = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &CPU))?;
    assert_eq!(
        error_text(plain.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))),
        "[attention_cache] keys (2, 1, T, 7) on Cpu and values (2, 1, T, 5) on Cpu do not fit those of the calls before, \
         (2, 1, T, 7) on Cpu and in their first 5 columns"
    );
    assert_eq!(cache.lens(), [3, 3]);
    Ok(())
}
