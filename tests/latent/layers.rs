//! Random layers.

use std::collections::BTreeMap;

use candle_attention::{MultiHeadLatentAttention, MultiHeadLatentAttentionConfig as Config, RopeConfig, RopeStyle};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};

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

/// Random numbers for every parameter that a layer asks for.
pub fn parameters(cfg: &Config, random: &mut Random) -> Parameters {
    let asked = VarMap::new();
    MultiHeadLatentAttention::new(cfg, VarBuilder::from_varmap(&asked, DType::F32, &CPU)).expect("a valid config");
    let asked: BTreeMap<_, _> = asked.data().lock().expect("one thread").clone().into_iter().collect();
    let biases = asked.keys().filter(|name| name.ends_with(".bias")).count();
    assert_eq!(biases, if cfg.bias() { 2 + usize::from(cfg.q_lora_rank().is_some()) } else { 0 }, "{cfg:?}");
    asked.into_iter().map(|(name, var)| (name, Numbers::random(var.dims(), random))).collect()
}

/// Over plain tensors.
pub fn layer(cfg: &Config, parameters: &Parameters, dtype: DType, device: &Device) -> Result<MultiHeadLatentAttention> {
    MultiHeadLatentAttention::new(cfg, VarBuilder::from_tensors(tensors(parameters, dtype, device)?, dtype, device))
}

/// Numbers that f32 holds.
pub fn draw(random: &mut Random, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Numbers::random(shape, random).tensor(dtype, &CPU)
}
