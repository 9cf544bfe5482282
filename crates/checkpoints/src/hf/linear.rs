//! Linear attention by the gated delta rule: which layers of a model have it, and their options. And latent attention,
//! DeepSeek's and what is the same by other names.

use candle_core::Result;

use super::families::{HEADS, HIDDEN, MODEL};
use super::fields::{Fields, with};
use super::load::{ModuleNames, at};
use super::rope::Rope;
use candle_attention_core::{MultiHeadLatentAttentionConfig, RopeScaling, WeightLayout};
use candle_attention_delta::{DeltaLayout, GatedDeltaNetConfig as Config};
use candle_attention_modules::gate::GateActivation;

/// Linear attention in some layers of a model.
#[derive(Clone, Copy)]
pub(super) struct Linear {
    /// Whether a layer has it, where `layer_types` does not say so.
    layers: fn(&Fields) -> Result<bool>,
    /// Of a model that has this `embed_dim` and so many heads by default.
    config: fn(&Fields, [usize; 2]) -> Result<Config>,
    /// Its module; the layout there is that of softmax attention, which nobody reads.
    pub names: ModuleNames,
    pub layout: DeltaLayout,
}

const SIZES: [&str; 3] = ["linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"];
const LINEAR_ATTN: ModuleNames = at(MODEL, "layers.{}.linear_attn", WeightLayout::Canonical);
const SELF_ATTN: ModuleNames = at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical);
const ATTENTION: ModuleNames = at(MODEL, "layers.{}.attention", WeightLayout::Canonical);

impl Linear {
    pub const QWEN3_NEXT: Self =
        Self { layers: but_last_of_four, config: qwen, names: LINEAR_ATTN, layout: DeltaLayout::ByKeyHead };
    pub const QWEN3_5: Self = Self { layout: DeltaLayout::ByPart, ..Self::QWEN3_NEXT };
    pub const QWEN4: Self = Self { config: qwen4, ..Self::QWEN3_5 };
    pub const OLMO: Self = Self { config: olmo, layout: DeltaLayout::Separate, ..Self::QWEN3_NEXT };
    pub const KIMI: Self = Self { layers: kimi_layers, config: kimi, names: SELF_ATTN, ..Self::OLMO };
    pub const GLM5: Self = Self { config: glm5, names: SELF_ATTN, ..Self::OLMO };
    pub const BAILING: Self = Self { layers: bailing_layers, config: bailing, names: ATTENTION, ..Self::OLMO };

    /// Whether a layer has it.
    pub fn is_in(&self, fields: &Fields) -> Result<bool> {
        match fields.of_layer("layer_types")? {
            Some(kind) if kind == "linear_attention" => Ok(true),
            Some(kind) if kind == "full_attention" || kind == "indexed_attention" => Ok(false),
            Some(kind) => fields.fail(format!(
                "layer_types has {kind} for layer {}, expected \"full_attention\" or \"linear_attention\"",
                fields.layer
            )),
            None => (self.layers)(fields),
        }
    }

    pub fn config(&self, fields: &Fields, sizes: [usize; 2]) -> Result<Config> {
        fields.only("hidden_act", "silu")?;
        (self.config)(fields, [fields.get_or(HIDDEN, sizes[0])?, sizes[1]])
    }
}

/// All but the last of every four, or of `full_attention_interval`.
fn but_last_of_four(fields: &Fields) -> Result<bool> {
    Ok(!(fields.layer + 1).is_multiple_of(fields.get_or("full_attention_interval", 4)?))
}

/// All but those of `full_attn_layers`, which count from 1; or else all but every fourth after the first.
fn kimi_layers(fields: &Fields) -> Result<bool> {
    let full = fields.section("linear_attn_config")?.optional::<Vec<usize>>("full_attn_layers")?;
    let is_fourth = fields.layer > 0 && fields.layer.is_multiple_of(4);
    Ok(!full.map_or(is_fourth, |full| full.contains(&(fields.layer + 1))))
}

/// All but the last of `layer_group_size`.
fn bailing_layers(fields: &Fields) -> Result<bool> {
    Ok(!(fields.layer + 1).is_multiple_of(fields.get_or("layer_group_size", 6)?))
}

fn qwen(fields: &Fields, [embed_dim, _]: [usize; 2]) -> Result<Config> {
    Ok(Config::new(embed_dim, fields.get_or("linear_num_value_heads", 32)?)
        .with_num_key_heads(fields.get_or("linear_num_key_heads", 16)?)
        .with_key_head_dim(fields.get_or("linear_key_head_dim", 128)?)
        .with_value_head_dim(fields.get_or("linear_value_head_dim", 128)?)
        .with_conv_kernel(fields.get_or(SIZES[2], 4)?)
        .with_norm_eps(fields.get_or("rms_norm_eps", 1e-6)?))
}

/// Qwen 4: `output_gate_type`.
fn qwen4(fields: &Fields, sizes: [usize; 2]) -> Result<Config> {
    let cfg = qwen(fields, sizes)?;
    match fields.optional::<&str>("output_gate_type")? {
        None | Some("silu") => Ok(cfg),
        Some("sigmoid") => Ok(cfg.with_gate_activation(GateActivation::Sigmoid)),
        Some(other) => fields.fail(format!("output_gate_type is {other:?}, expected \"silu\" or \"sigmoid\"")),
    }
}

/// OLMo Hybrid: sizes that follow from those of softmax attention, and betas up to 2. The epsilon of its norm is fixed.
fn olmo(fields: &Fields, [embed_dim, heads]: [usize; 2]) -> Result<Config> {
    let size = |name, default: usize| fields.optional(name).map(|size| size.unwrap_or(default));
    let heads = fields.get_or(HEADS, heads)?;
    let key_heads = size("linear_num_key_heads", heads)?;
    let key_width = size("linear_key_head_dim", embed_dim.saturating_mul(3) / 4 / key_heads)?;
    Ok(Config::new(embed_dim, size("linear_num_value_heads", heads)?)
        .with_num_key_heads(key_heads)
        .with_key_head_dim(key_width)
        .with_value_head_dim(size("linear_value_head_dim", key_width.saturating_mul(2))?)
        .with_conv_kernel(fields.get_or(SIZES[2], 4)?)
        .with_allow_neg_eigval(fields.flag("linear_allow_neg_eigval", true)?)
        .with_norm_eps(1e-5))
}

/// Decays of channels, and a gate by sigmoid: of heads of a width, so many of them, and so many taps.
fn by_channel(embed_dim: usize, [width, heads, taps]: [usize; 3], eps: f64) -> Config {
    Config::new(embed_dim, heads)
        .with_key_head_dim(width)
        .with_value_head_dim(width)
        .with_conv_kernel(taps)
        .with_decay_per_channel(true)
        .with_gate_activation(GateActivation::Sigmoid)
        .with_norm_eps(eps)
}

/// Kimi Linear: sizes in `linear_attn_config`, as published, or beside it, as transformers saves them.
fn kimi(fields: &Fields, [embed_dim, heads]: [usize; 2]) -> Result<Config> {
    let own = fields.section("linear_attn_config")?;
    let size = |name, beside, default| own.get_or(name, fields.get_or(beside, default)?);
    let [dim, num, taps] = SIZES;
    let sizes = [size("head_dim", dim, 128)?, size("num_heads", num, heads)?, size("short_conv_kernel_size", taps, 4)?];
    let cfg = by_channel(embed_dim, sizes, fields.get_or("rms_norm_eps", 1e-5)?);
    Ok(cfg.with_decay_rank(sizes[0]).with_gate_rank(sizes[0]))
}

/// GLM 5: the same with a bound of decays.
fn glm5(fields: &Fields, sizes: [usize; 2]) -> Result<Config> {
    let own = fields.section("linear_attn_config")?;
    let bound = fields.nullable("linear_lower_bound", Some(-5.0))?;
    let bound = own.nullable("gate_lower_bound", bound)?;
    let is_safe = fields.has("linear_attn_config") && own.flag("safe_gate", true)?;
    let cfg = kimi(fields, sizes)?;
    Ok(with(cfg, bound.or(is_safe.then_some(-5.0)), Config::with_decay_lower_bound))
}

/// Ling 3: heads of `head_dim`, unless the config says `linear_head_dim` beside it, and a bound of decays.
fn bailing(fields: &Fields, [embed_dim, heads]: [usize; 2]) -> Result<Config> {
    let [dim, num, taps] = SIZES;
    let size = |name, usual, default| fields.get_or(name, fields.get_or(usual, default)?);
    let sizes = [size(dim, "head_dim", 128)?, size(num, HEADS, heads)?, size(taps, "short_conv_kernel_size", 4)?];
    let cfg = by_channel(embed_dim, sizes, fields.get_or("rms_norm_eps", 1e-6)?);
    Ok(match fields.flag("kda_safe_gate", true)? {
        true => cfg.with_decay_lower_bound(fields.get_or("kda_lower_bound", -5.0)?),
        false => cfg,
    })
}

/// The defaults of its own sizes.
#[derive(Clone, Copy)]
pub(super) struct Latent {
    pub q_lora_rank: Option<usize>,
    pub kv_lora_rank: usize,
    pub nope_head_dim: usize,
    pub rope_head_dim: usize,
    /// `embed_dim / num_heads` unless given.
    pub value_head_dim: Option<usize>,
    /// Whether queries and the shared keys know positions.
    pub rotates: bool,
}

impl Latent {
    /// Those of DeepSeek V2 and V3.
    pub const DEEPSEEK: Self = Self {
        q_lora_rank: Some(1536),
        kv_lora_rank: 512,
        nope_head_dim: 128,
        rope_head_dim: 64,
        value_head_dim: Some(128),
        rotates: true,
    };

    pub fn config(
        &self,
        fields: &Fields,
        embed_dim: usize,
        num_heads: usize,
        rope: &Rope,
    ) -> Result<MultiHeadLatentAttentionConfig> {
        let nope = fields.get_or("qk_nope_head_dim", self.nope_head_dim)?;
        let rotated = fields.get_or("qk_rope_head_dim", self.rope_head_dim)?;
        fields.agrees("num_key_value_heads", num_heads)?;
        if self.rotates {
            fields.agrees("head_dim", rotated)?;
        }
        fields.agrees("qk_head_dim", nope.saturating_add(rotated))?;
        let rope = rope.config(fields, rotated)?;
        if !matches!(rope.scaling(), RopeScaling::None | RopeScaling::Yarn { .. }) {
            // transformers corrects the scale of the scores with any scaling, but only models with YaRN have been
            // checked.
            for name in ["rope_scaling", "rope_parameters"] {
                fields.section(name)?.only("mscale_all_dim", 0)?;
            }
        }
        let value_head_dim = self.value_head_dim.unwrap_or(embed_dim / num_heads);
        let cfg = MultiHeadLatentAttentionConfig::new(embed_dim, num_heads)
            .with_kv_lora_rank(fields.get_or("kv_lora_rank", self.kv_lora_rank)?)
            .with_nope_head_dim(nope)
            .with_rope_head_dim(rotated)
            .with_value_head_dim(fields.optional("v_head_dim")?.unwrap_or(value_head_dim))
            .with_bias(fields.flag("attention_bias", false)?)
            .with_rope(rope)
            .with_rotates(self.rotates)
            // transformers ignores `rms_norm_eps` in the norms of the latents.
            .with_norm_eps(1e-6)
            .with_causal(fields.flag("is_causal", true)?)
            .with_dropout(fields.optional("attention_dropout")?.unwrap_or(0.0));
        let rank = fields.nullable("q_lora_rank", self.q_lora_rank)?;
        Ok(with(cfg, rank, MultiHeadLatentAttentionConfig::with_q_lora_rank))
    }
}
