//! Latent attention: DeepSeek's, and what is the same by other names.

use super::{DECODER, HEADS, HIDDEN, MODEL};
use crate::hf::family::{Family, ModuleNames, at};
use crate::hf::rope::rope;
use crate::hf::rules::{DEEPSEEK, LatentSizes, deepseek, deepseek_v3};
use candle_attention_core::WeightLayout;

#[rustfmt::skip]
const DEEPSEEK_V2: Family = Family {
    model_type: "deepseek_v2",
    // Latent attention names its parameters itself, and those of queries differ between checkpoints.
    modules: &[ModuleNames {
        parameter: Some("kv_a_proj_with_mqa.weight"), ..at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical)
    }],
    latent: Some(|fields, row| {
        fields.only("rope_interleave", true)?;
        deepseek(fields, row, DEEPSEEK, rope(10_000.0, 2048).interleaved())
    }),
    ..DECODER
};
#[rustfmt::skip]
const DEEPSEEK_V3: Family = Family {
    model_type: "deepseek_v3", sizes: [61, 7168, 128],
    latent: Some(|fields, row| deepseek_v3(fields, row, DEEPSEEK, 4096)),
    ..DEEPSEEK_V2
};

/// In alphabetical order.
#[rustfmt::skip]
pub(in crate::hf) const ROWS: &[Family] = &[
    Family {
        model_type: "axk1", sizes: [61, 7168, 64],
        latent: Some(|fields, row| deepseek_v3(fields, row, DEEPSEEK, 32_768)), ..DEEPSEEK_V3
    },
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    Family {
        model_type: "glm4_moe_lite", sizes: [47, 2048, 20],
        latent: Some(|fields, row| {
            let sizes = LatentSizes { q_lora_rank: 768, nope_head_dim: 192, value_head_dim: 256, ..DEEPSEEK };
            deepseek_v3(fields, row, sizes, 202_752)
        }),
        ..DEEPSEEK_V3
    },
    // As it is published; transformers loads it as DeepSeek V3.
    Family { model_type: "kimi_k2", sizes: [61, 7168, 64], ..DEEPSEEK_V3 },
    Family {
        model_type: "minicpm3", sizes: [62, 2560, 40],
        latent: Some(|fields, row| {
            let value_head_dim = fields.get_or(HIDDEN, row[1])? / fields.get_or(HEADS, row[2])?;
            let sizes = LatentSizes {
                q_lora_rank: 768, kv_lora_rank: 256, nope_head_dim: 64, rope_head_dim: 32, value_head_dim,
            };
            deepseek(fields, row, sizes, rope(10_000.0, 32_768))
        }),
        ..DEEPSEEK_V3
    },
    Family {
        model_type: "youtu", sizes: [32, 2048, 16],
        latent: Some(|fields, row| deepseek_v3(fields, row, DEEPSEEK, 131_072)), ..DEEPSEEK_V3
    },
];
