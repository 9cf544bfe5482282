//! Linear attention by the gated delta rule: the layers of a model that have it, and their options.

use candle_core::Result;

use super::fields::Fields;
use super::names::{HEADS, HIDDEN, MODEL, ModuleNames, at};
use candle_attention_core::WeightLayout;
use candle_attention_delta::{DeltaLayout, GatedDeltaNetConfig as Config};
use candle_attention_modules::gate::GateActivation;

/// Linear attention in some layers of a model.
#[derive(Clone, Copy)]
pub(super) struct Linear {
    /// Returns whether a layer has linear attention, where `layer_types` does not say so.
    layers: fn(&Fields) -> Result<bool>,
    /// Returns the config of a layer.
    config: fn(&Fields, LinearSizes) -> Result<Config>,
    /// The names of the module. Their layout, that of softmax attention, is not used.
    pub names: ModuleNames,
    /// The layout of the weights.
    pub layout: DeltaLayout,
}

/// The sizes of a model from which the sizes of linear attention follow.
#[derive(Clone, Copy)]
pub(super) struct LinearSizes {
    /// The width of a layer's input.
    pub embed_dim: usize,
    /// The default of the number of heads of softmax attention.
    pub num_heads: usize,
}

const HEAD_DIM: &str = "linear_head_dim";
const NUM_HEADS: &str = "linear_num_heads";
const CONV_KERNEL: &str = "linear_conv_kernel_dim";
const LINEAR_ATTN: ModuleNames = at(MODEL, "layers.{}.linear_attn", WeightLayout::Canonical);
const SELF_ATTN: ModuleNames = at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical);
const ATTENTION: ModuleNames = at(MODEL, "layers.{}.attention", WeightLayout::Canonical);

/// The kinds of layers with softmax attention. The last one is a name of Qwen 4's in older versions of transformers.
const OTHERS: [&str; 3] = ["full_attention", "indexed_attention", "qwen_sparse_attention"];

impl Linear {
    pub const QWEN3_NEXT: Self =
        Self { layers: but_last_of_four, config: qwen, names: LINEAR_ATTN, layout: DeltaLayout::Qwen3Next };
    pub const QWEN3_5: Self = Self { layout: DeltaLayout::Qwen3_5, ..Self::QWEN3_NEXT };
    pub const QWEN4: Self = Self { config: qwen4, ..Self::QWEN3_5 };
    pub const OLMO: Self = Self { config: olmo, layout: DeltaLayout::Separate, ..Self::QWEN3_NEXT };
    pub const KIMI: Self = Self { layers: kimi_layers, config: kimi, names: SELF_ATTN, ..Self::OLMO };
    pub const GLM5: Self = Self { config: glm5, names: SELF_ATTN, ..Self::OLMO };
    pub const BAILING: Self = Self { layers: bailing_layers, config: bailing, names: ATTENTION, ..Self::OLMO };

    /// Returns whether a layer has linear attention.
    pub fn is_in(&self, fields: &Fields) -> Result<bool> {
        match fields.of_layer("layer_types")? {
            Some(kind) if kind == "linear_attention" => Ok(true),
            Some(kind) if OTHERS.iter().any(|known| kind == known) => Ok(false),
            Some(kind) => fields.fail(format!(
                "layer_types has {kind} for layer {}, expected \"full_attention\" or \"linear_attention\"",
                fields.layer
            )),
            None => (self.layers)(fields),
        }
    }

    /// Returns the config of a layer, from the defaults of the model's sizes.
    pub fn config(&self, fields: &Fields, defaults: LinearSizes) -> Result<Config> {
        fields.only("hidden_act", "silu")?;
        (self.config)(fields, LinearSizes { embed_dim: fields.get_or(HIDDEN, defaults.embed_dim)?, ..defaults })
    }
}

/// Returns true for all layers but the last of every four, or of every `full_attention_interval`.
fn but_last_of_four(fields: &Fields) -> Result<bool> {
    Ok(!(fields.layer + 1).is_multiple_of(fields.get_or("full_attention_interval", 4)?))
}

/// Returns true for all layers except `full_attn_layers`, which count from 1. Without that field, returns true
/// for all but every fourth layer after the first.
fn kimi_layers(fields: &Fields) -> Result<bool> {
    let full = fields.section("linear_attn_config")?.optional::<Vec<usize>>("full_attn_layers")?;
    let is_fourth = fields.layer > 0 && fields.layer.is_multiple_of(4);
    Ok(!full.map_or(is_fourth, |full| full.contains(&(fields.layer + 1))))
}

/// Returns true for all layers but the last of every `layer_group_size`.
fn bailing_layers(fields: &Fields) -> Result<bool> {
    Ok(!(fields.layer + 1).is_multiple_of(fields.get_or("layer_group_size", 6)?))
}

fn qwen(fields: &Fields, sizes: LinearSizes) -> Result<Config> {
    Ok(Config::new(sizes.embed_dim, fields.get_or("linear_num_value_heads", 32)?)
        .with_num_key_heads(fields.get_or("linear_num_key_heads", 16)?)
        .with_key_head_dim(fields.get_or("linear_key_head_dim", 128)?)
        .with_value_head_dim(fields.get_or("linear_value_head_dim", 128)?)
        .with_conv_kernel_dim(fields.get_or(CONV_KERNEL, 4)?)
        .with_norm_eps(fields.get_or("rms_norm_eps", 1e-6)?))
}

/// Reads Qwen 4's `output_gate_type` too.
fn qwen4(fields: &Fields, sizes: LinearSizes) -> Result<Config> {
    let cfg = qwen(fields, sizes)?;
    match fields.optional::<&str>("output_gate_type")? {
        None | Some("silu") => Ok(cfg),
        Some("sigmoid") => Ok(cfg.with_gate_activation(GateActivation::Sigmoid)),
        Some(other) => fields.fail(format!("output_gate_type is {other:?}, expected \"silu\" or \"sigmoid\"")),
    }
}

/// Reads OLMo Hybrid's fields: sizes that follow from the sizes of softmax attention, and betas up to 2. The epsilon of
/// its norm is fixed.
fn olmo(fields: &Fields, LinearSizes { embed_dim, num_heads }: LinearSizes) -> Result<Config> {
    let size = |name, default: usize| fields.optional(name).map(|size| size.unwrap_or(default));
    let heads = fields.get_or(HEADS, num_heads)?;
    let key_heads = size("linear_num_key_heads", heads)?;
    let key_width = size("linear_key_head_dim", embed_dim.saturating_mul(3) / 4 / key_heads)?;
    Ok(Config::new(embed_dim, size("linear_num_value_heads", heads)?)
        .with_num_key_heads(key_heads)
        .with_key_head_dim(key_width)
        .with_value_head_dim(size("linear_value_head_dim", key_width.saturating_mul(2))?)
        .with_conv_kernel_dim(fields.get_or(CONV_KERNEL, 4)?)
        .with_allow_neg_eigval(fields.flag("linear_allow_neg_eigval", true)?)
        .with_norm_eps(1e-5))
}

/// The sizes of linear attention with a decay for each channel.
struct ByChannel {
    head_dim: usize,
    num_heads: usize,
    conv_kernel: usize,
}

/// Returns a config with a decay for each channel and a sigmoid gate.
fn by_channel(embed_dim: usize, sizes: &ByChannel, eps: f64) -> Config {
    Config::new(embed_dim, sizes.num_heads)
        .with_key_head_dim(sizes.head_dim)
        .with_value_head_dim(sizes.head_dim)
        .with_conv_kernel_dim(sizes.conv_kernel)
        .with_decay_per_channel(true)
        .with_gate_activation(GateActivation::Sigmoid)
        .with_norm_eps(eps)
}

/// Reads Kimi Linear's sizes: from `linear_attn_config`, as published, or next to it, as transformers saves them.
fn kimi(fields: &Fields, LinearSizes { embed_dim, num_heads }: LinearSizes) -> Result<Config> {
    let section = fields.section("linear_attn_config")?;
    let size = |name, outer, default| section.get_or(name, fields.get_or(outer, default)?);
    let sizes = ByChannel {
        head_dim: size("head_dim", HEAD_DIM, 128)?,
        num_heads: size("num_heads", NUM_HEADS, num_heads)?,
        conv_kernel: size("short_conv_kernel_size", CONV_KERNEL, 4)?,
    };
    let cfg = by_channel(embed_dim, &sizes, fields.get_or("rms_norm_eps", 1e-5)?);
    Ok(cfg.with_decay_rank(sizes.head_dim).with_gate_rank(sizes.head_dim))
}

/// Reads Kimi Linear's fields, and GLM 5's bound of decays.
fn glm5(fields: &Fields, sizes: LinearSizes) -> Result<Config> {
    let section = fields.section("linear_attn_config")?;
    let bound = fields.nullable("linear_lower_bound", Some(-5.0))?;
    let bound = section.nullable("gate_lower_bound", bound)?;
    let is_safe = fields.has("linear_attn_config") && section.flag("safe_gate", true)?;
    let cfg = kimi(fields, sizes)?;
    Ok(cfg.with_decay_lower_bound(bound.or(is_safe.then_some(-5.0))))
}

/// Reads Ling 3's fields: heads of `head_dim`, unless the config has `linear_head_dim` too, and a bound of decays.
fn bailing(fields: &Fields, LinearSizes { embed_dim, num_heads }: LinearSizes) -> Result<Config> {
    let size = |name, usual, default| fields.get_or(name, fields.get_or(usual, default)?);
    let sizes = ByChannel {
        head_dim: size(HEAD_DIM, "head_dim", 128)?,
        num_heads: size(NUM_HEADS, HEADS, num_heads)?,
        conv_kernel: size(CONV_KERNEL, "short_conv_kernel_size", 4)?,
    };
    let cfg = by_channel(embed_dim, &sizes, fields.get_or("rms_norm_eps", 1e-6)?);
    Ok(match fields.flag("kda_safe_gate", true)? {
        true => cfg.with_decay_lower_bound(fields.get_or("kda_lower_bound", -5.0)?),
        false => cfg,
    })
}
