//! Random layers.

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

/// In the order in which they are drawn.
const NAMES: [&str; 11] = [
    "kv_a_proj_with_mqa.weight",
    "kv_a_layernorm.weight",
    "kv_b_proj.weight",
    "o_proj.weight",
    "q_proj.weight",
    "q_a_proj.weight",
    "q_a_layernorm.weight",
    "q_b_proj.weight",
    "kv_a_proj_with_mqa.bias",
    "o_proj.bias",
    "q_a_proj.bias",
];

/// Random numbers for every parameter that a layer asks for, which are those that the config names.
pub fn parameters(cfg: &Config, random: &mut Random) -> Parameters {
    let (asked, is_compressed) = (VarMap::new(), cfg.q_lora_rank().is_some());
    MultiHeadLatentAttention::new(cfg, VarBuilder::from_varmap(&asked, DType::F32, &CPU)).expect("a valid config");
    let asked = asked.data().lock().expect("one thread").clone();
    let biases = if cfg.bias() { 2 + usize::from(is_compressed) } else { 0 };
    assert_eq!(asked.len(), if is_compressed { 7 } else { 5 } + biases, "{cfg:?}");
    let asked = NAMES.into_iter().filter_map(|name| Some((name.to_string(), asked.get(name)?)));
    asked.map(|(name, var)| (name, Numbers::random(var.dims(), random))).collect()
}

/// Over plain tensors.
pub fn layer(cfg: &Config, parameters: &Parameters, dtype: DType, device: &Device) -> Result<MultiHeadLatentAttention> {
    MultiHeadLatentAttention::new(cfg, VarBuilder::from_tensors(tensors(parameters, dtype, device)?, dtype, device))
}

/// Numbers that f32 holds.
pub fn draw(random: &mut Random, shape: &[usize], dtype: DType) -> Result<Tensor> {
    Numbers::random(shape, random).tensor(dtype, &CPU)
}
