//! Random layers.

use candle_attention::{MultiHeadLatentAttention, MultiHeadLatentAttentionConfig as Config, RopeConfig, RopeStyle};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;

use crate::array::Random;
use crate::by_hand::{Numbers, Parameters, tensors};

pub const CPU: Device = Device::Cpu;

/// A layer with small, uneven widths.
pub fn config(random: &mut Random) -> Config {
    let embed_dim = 1 + random.up_to(11);
    config_of(embed_dim, random)
}

/// [`config`] for inputs of a width.
pub fn config_of(embed_dim: usize, random: &mut Random) -> Config {
    let style = if random.chance(0.5) { RopeStyle::Halves } else { RopeStyle::Interleaved };
    let mut cfg = Config::new(embed_dim, 1 + random.up_to(3))
        .with_kv_lora_rank(1 + random.up_to(17))
        .with_nope_head_dim(1 + random.up_to(7))
        .with_rope_head_dim(2 + 2 * random.up_to(2))
        .with_value_head_dim(1 + random.up_to(7))
        .with_bias(random.chance(0.5))
        .with_rope(RopeConfig::new(100.0).with_style(style));
    if random.chance(0.6) {
        cfg = cfg.with_q_lora_rank(1 + random.up_to(7));
    }
    if random.chance(0.3) {
        cfg = cfg.with_scale(random.between(0.1, 2.0)).with_norm_eps(0.1);
    }
    cfg
}

/// Every parameter of a layer, none of them trivial.
pub fn parameters(cfg: &Config, random: &mut Random) -> Parameters {
    let (e, h) = (cfg.embed_dim(), cfg.num_heads());
    let (rank, width) = (cfg.kv_lora_rank(), h * cfg.head_dim());
    let mut shapes = vec![
        ("kv_a_proj_with_mqa.weight", vec![rank + cfg.rope_head_dim(), e]),
        ("kv_a_layernorm.weight", vec![rank]),
        ("kv_b_proj.weight", vec![h * (cfg.nope_head_dim() + cfg.value_head_dim()), rank]),
        ("o_proj.weight", vec![e, h * cfg.value_head_dim()]),
    ];
    match cfg.q_lora_rank() {
        None => shapes.push(("q_proj.weight", vec![width, e])),
        Some(q_rank) => {
            shapes.push(("q_a_proj.weight", vec![q_rank, e]));
            shapes.push(("q_a_layernorm.weight", vec![q_rank]));
            shapes.push(("q_b_proj.weight", vec![width, q_rank]));
        }
    }
    if cfg.bias() {
        shapes.push(("kv_a_proj_with_mqa.bias", vec![rank + cfg.rope_head_dim()]));
        shapes.push(("o_proj.bias", vec![e]));
        shapes.extend(cfg.q_lora_rank().map(|q_rank| ("q_a_proj.bias", vec![q_rank])));
    }
    shapes.into_iter().map(|(name, shape)| (name.to_string(), Numbers::random(&shape, random))).collect()
}

/// Over plain tensors.
pub fn layer(cfg: &Config, parameters: &Parameters, dtype: DType, device: &Device) -> Result<MultiHeadLatentAttention> {
    MultiHeadLatentAttention::new(cfg, VarBuilder::from_tensors(tensors(parameters, dtype, device)?, dtype, device))
}

/// Numbers that f32 holds.
pub fn draw(random: &mut Random, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Numbers::random(shape, random).tensor(dtype, &CPU)
}
