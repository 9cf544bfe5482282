//! Latent attention: DeepSeek's, and the same attention in other families.

use candle_core::Result;
use serde_json::Value;

use super::fields::Fields;
use candle_attention_core::{
    IndexerConfig, IndexerQueries, LatentScales, MultiHeadLatentAttentionConfig, RopeConfig, RopeScaling, RopeStyle,
};
use candle_attention_modules::gate::OutputGate;

/// The defaults of the sizes of latent attention in a family.
#[derive(Clone, Copy)]
pub(super) struct Latent {
    pub q_lora_rank: Option<usize>,
    pub kv_lora_rank: usize,
    pub nope_head_dim: usize,
    pub rope_head_dim: usize,
    /// The default of the width of values; `None` means `embed_dim / num_heads`.
    pub value_head_dim: Option<usize>,
    /// The layers whose queries and shared keys have rotary positions.
    pub rotates: LatentRotation,
    /// The default of `rms_norm_eps`, where the norms of the latents read it; transformers ignores it in most models,
    /// whose norms have 1e-6.
    pub norm_eps: Option<f64>,
    /// The gate of the attention output.
    pub gate: Option<OutputGate>,
    /// Whether each head has a sink.
    pub sinks: bool,
    /// Whether latents are multiplied by the root of the model's width over the width of the latent.
    pub scales_latents: bool,
    /// Whether the shared key is normalised.
    pub shared_key_norm: bool,
    /// Whether queries are multiplied by learned factors of their positions.
    pub learned_temperature: bool,
    /// Whether `head_dim` is the width of the entries that rotate.
    pub head_dim_is_rotated: bool,
    /// Whether rotary frequencies have learned factors, a parameter that all layers share (`rotary_emb.alpha`).
    pub learned_frequencies: bool,
    /// The defaults of layers with a window, whose fields may begin with `swa_`.
    pub windowed: Option<&'static Windowed>,
    /// The indexer that chooses keys.
    pub indexer: Option<FamilyIndexer>,
}

/// The layers with a window of a family whose other layers have none.
#[derive(Clone, Copy)]
pub(super) struct Windowed {
    /// The function that returns the kind of any layer, by which its rotary positions are found.
    pub kind: for<'a> fn(&Fields<'a>) -> Result<&'a str>,
    /// The default of the number of heads.
    pub num_heads: usize,
    pub latent: Latent,
}

/// The layers of latent attention that rotate.
#[derive(Clone, Copy)]
pub(super) enum LatentRotation {
    All,
    /// No layer. Queries and shared keys have the entries that rotate in other models.
    None,
    /// Layers for which the function returns true. In the others, keys are computed from latents alone.
    If(fn(&Fields) -> Result<bool>),
}

/// The indexer of a family, and its defaults.
#[derive(Clone, Copy)]
pub(super) struct FamilyIndexer {
    /// The number of heads if a config does not say it.
    pub num_heads: usize,
    pub rope_style: RopeStyle,
    /// Whether the last entries of heads rotate.
    pub rotates_last: bool,
    pub queries: IndexerQueries,
    /// The default of `rms_norm_eps`, where the norm of the keys reads it.
    pub norm_eps: Option<f64>,
    /// The layers that have an indexer.
    pub layers: IndexerLayers,
    /// The default of `index_kpool`, the number of keys that have one score.
    pub pool: Option<usize>,
}

/// The source of the keys that a layer's queries attend to.
enum LayerChoice {
    /// Nothing: they attend to all keys that the mask allows.
    None,
    Indexer(IndexerConfig),
    /// The indexer of the last layer before it that has one.
    EarlierLayer,
}

/// The layers that have an indexer, in a config without `indexer_types`.
#[derive(Clone, Copy)]
pub(super) enum IndexerLayers {
    All,
    /// The first two, and every fourth after them. The others attend to the keys that an earlier layer chose.
    EveryFourth,
    /// The layers for which the function returns true. Other layers attend to all keys, or to the keys in a window.
    If(fn(&Fields) -> Result<bool>),
}

impl FamilyIndexer {
    /// An indexer of DeepSeek V3.2.
    pub const DEEPSEEK: Self = Self {
        num_heads: 64,
        rope_style: RopeStyle::RotateHalf,
        rotates_last: false,
        queries: IndexerQueries::Compressed,
        norm_eps: None,
        layers: IndexerLayers::All,
        pool: None,
    };

    /// Returns the source of the keys of a layer's queries.
    fn of_layer(self, fields: &Fields) -> Result<LayerChoice> {
        let is_full = match (fields.of_layer("indexer_types")?.and_then(|kind| kind.as_str()), self.layers) {
            (Some(kind), _) => kind == "full",
            (None, IndexerLayers::EveryFourth) => fields.layer == 0 || (fields.layer - 1).is_multiple_of(4),
            (None, IndexerLayers::If(condition)) => {
                if !condition(fields)? {
                    return Ok(LayerChoice::None);
                }
                true
            }
            (None, IndexerLayers::All) => is_full_by_pattern(fields)?,
        };
        if !is_full {
            return Ok(LayerChoice::EarlierLayer);
        }
        let num_heads = fields.get_or("index_n_heads", self.num_heads)?;
        let head_dim = fields.get_or("index_head_dim", 128)?;
        let top_k = fields.get_or("index_topk", 2048)?;
        let mut config = IndexerConfig::new(num_heads, head_dim, top_k);
        config.rope_style = self.rope_style;
        config.rotates_last = self.rotates_last;
        config.queries = self.queries;
        if let Some(default) = self.norm_eps {
            config.norm_eps = fields.get_or("rms_norm_eps", default)?;
        }
        if let Some(default) = self.pool {
            config.pool = Some(fields.get_or("index_kpool", default)?);
        }
        Ok(LayerChoice::Indexer(config))
    }
}

/// Returns whether a layer has an indexer in a config without `indexer_types`: by the letters of `index_topk_pattern`,
/// or by the numbers `index_topk_freq` and `index_skip_topk_offset`.
fn is_full_by_pattern(fields: &Fields) -> Result<bool> {
    match fields.get("index_topk_pattern") {
        Some(Value::String(letters)) => match letters.as_bytes().get(fields.layer) {
            Some(b'F') => Ok(true),
            Some(b'S') => Ok(false),
            _ => fields
                .fail(format!("index_topk_pattern is {letters:?}, expected \"F\" or \"S\" for layer {}", fields.layer)),
        },
        Some(_) => Ok(fields.of_layer("index_topk_pattern")?.is_some_and(|kind| kind == "full")),
        None => {
            let every = fields.count("index_topk_freq", 1)?.max(1);
            let offset = fields.count("index_skip_topk_offset", 2)?;
            Ok((fields.layer + 1).saturating_sub(offset).is_multiple_of(every))
        }
    }
}

/// The widths of the parts of query and key heads.
struct LatentWidths {
    /// Without positions.
    nope: usize,
    rotated: usize,
}

impl Latent {
    /// The defaults of DeepSeek V2 and V3.
    pub const DEEPSEEK: Self = Self {
        q_lora_rank: Some(1536),
        kv_lora_rank: 512,
        nope_head_dim: 128,
        rope_head_dim: 64,
        value_head_dim: Some(128),
        rotates: LatentRotation::All,
        norm_eps: None,
        gate: None,
        sinks: false,
        scales_latents: false,
        shared_key_norm: false,
        learned_temperature: false,
        head_dim_is_rotated: true,
        learned_frequencies: false,
        windowed: None,
        indexer: None,
    };

    /// Returns the widths of the parts of query and key heads.
    fn widths(&self, fields: &Fields) -> Result<LatentWidths> {
        Ok(LatentWidths {
            nope: fields.get_or("qk_nope_head_dim", self.nope_head_dim)?,
            rotated: fields.count("qk_rope_head_dim", self.rope_head_dim)?,
        })
    }

    /// Returns the number of entries of heads that rotate.
    pub fn rotary_width(&self, fields: &Fields) -> Result<usize> {
        Ok(self.widths(fields)?.rotated)
    }

    /// Returns the config of a layer.
    pub fn config(
        &self,
        fields: &Fields,
        embed_dim: usize,
        num_heads: usize,
        rope: RopeConfig,
    ) -> Result<MultiHeadLatentAttentionConfig> {
        let LatentWidths { nope, rotated } = self.widths(fields)?;
        fields.agrees("num_key_value_heads", num_heads)?;
        let rotates = match self.rotates {
            LatentRotation::All => true,
            LatentRotation::None => false,
            LatentRotation::If(condition) => condition(fields)?,
        };
        if rotates && self.head_dim_is_rotated {
            fields.agrees("head_dim", rotated)?;
        }
        fields.agrees("qk_head_dim", nope.saturating_add(rotated))?;
        if let Some(source) = fields.of_layer("kv_source_layers")?
            && *source != fields.layer
        {
            return fields.fail(format!(
                "layer {} reads the latents of layer {source} (`kv_source_layers`), expected a layer with its own",
                fields.layer
            ));
        }
        if !matches!(rope.scaling(), RopeScaling::None | RopeScaling::Yarn { .. }) {
            // transformers corrects the scale of the scores with any scaling, but only models with YaRN have been
            // checked.
            for name in ["rope_scaling", "rope_parameters"] {
                fields.section(name)?.only("mscale_all_dim", 0)?;
            }
        }
        let value_head_dim = self.value_head_dim.unwrap_or(embed_dim / num_heads);
        let choice = match self.indexer {
            Some(indexer) => indexer.of_layer(fields)?,
            None => LayerChoice::None,
        };
        let shared_choice = matches!(choice, LayerChoice::EarlierLayer);
        let indexer = if let LayerChoice::Indexer(own) = choice { Some(own) } else { None };
        // A model whose indexer reads the input compresses no queries, also if its config says so.
        let reads_input = self.indexer.is_some_and(|own| own.queries == IndexerQueries::NormalizedInput);
        let q_lora_rank = if reads_input { None } else { fields.nullable("q_lora_rank", self.q_lora_rank)? };
        let kv_lora_rank = fields.get_or("kv_lora_rank", self.kv_lora_rank)?;
        let scale_of = |rank: usize| (embed_dim as f64 / rank as f64).sqrt();
        let scales = self.scales_latents.then(|| LatentScales {
            queries: q_lora_rank.map_or(1.0, scale_of),
            keys_and_values: scale_of(kv_lora_rank),
        });
        let norm_eps = match self.norm_eps {
            Some(default) => fields.get_or("rms_norm_eps", default)?,
            None => 1e-6,
        };
        let joins_parts = !rotates && matches!(self.rotates, LatentRotation::If(_));
        Ok(MultiHeadLatentAttentionConfig::new(embed_dim, num_heads)
            .with_indexer(indexer)
            .with_shared_choice(shared_choice)
            .with_q_lora_rank(q_lora_rank)
            .with_kv_lora_rank(kv_lora_rank)
            .with_nope_head_dim(if joins_parts { nope.saturating_add(rotated) } else { nope })
            .with_rope_head_dim(if joins_parts { 0 } else { rotated })
            .with_value_head_dim(fields.optional("v_head_dim")?.unwrap_or(value_head_dim))
            .with_bias(fields.flag("attention_bias", false)?)
            .with_rope(rope)
            .with_rotates(rotates)
            .with_norm_eps(norm_eps)
            .with_output_gate(self.gate)
            .with_sinks(self.sinks)
            .with_latent_scales(scales)
            .with_shared_key_norm(self.shared_key_norm)
            .with_learned_temperature(self.learned_temperature)
            .with_causal(fields.flag("is_causal", true)?)
            .with_dropout(fields.optional("attention_dropout")?.unwrap_or(0.0)))
    }
}
