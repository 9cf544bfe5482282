//! Latent attention: DeepSeek's, and what is the same by other names.

use super::{DECODER, MODEL};
use crate::hf::family::Family;
use crate::hf::latent::Latent;
use crate::hf::names::{ModuleNames, at};
use crate::hf::rope::{Rope, rope};
use candle_attention_core::WeightLayout;

/// Latent attention names its parameters itself, and those of queries differ between checkpoints.
const NAMES: ModuleNames = ModuleNames {
    parameter: Some("kv_a_proj_with_mqa.weight"),
    ..at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical)
};
const DEEPSEEK_V2: Family = DECODER.of("deepseek_v2").modules([Some(NAMES), None]).latent(Latent::DEEPSEEK)
    .rope(rope(10_000.0, 2048).interleaved()).only(&[("rope_interleave", "true")]);
const DEEPSEEK_V3: Family = DEEPSEEK_V2.of("deepseek_v3").sizes([61, 7168, 128]).rope(by_flag(4096)).only(&[]);

/// Neighbours, or halves by `rope_interleave`.
const fn by_flag(context: usize) -> Rope {
    rope(10_000.0, context).interleaving_flag("rope_interleave")
}

const GLM4_LITE: Latent =
    Latent { q_lora_rank: 768, nope_head_dim: 192, value_head_dim: Some(256), ..Latent::DEEPSEEK };
const MINICPM3: Latent =
    Latent { q_lora_rank: 768, kv_lora_rank: 256, nope_head_dim: 64, rope_head_dim: 32, value_head_dim: None };

/// In alphabetical order.
pub(super) const ROWS: &[Family] = &[
    DEEPSEEK_V3.of("axk1").sizes([61, 7168, 64]).rope(by_flag(32_768)),
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    DEEPSEEK_V3.of("glm4_moe_lite").sizes([47, 2048, 20]).rope(by_flag(202_752))
        .latent(GLM4_LITE),
    // As it is published; transformers loads it as DeepSeek V3.
    DEEPSEEK_V3.of("kimi_k2").sizes([61, 7168, 64]),
    DEEPSEEK_V3.of("minicpm3").sizes([62, 2560, 40]).rope(rope(10_000.0, 32_768)).latent(MINICPM3),
    DEEPSEEK_V3.of("youtu").sizes([32, 2048, 16]).rope(by_flag(131_072)),
];
