//! Latent attention: DeepSeek's, and the same attention in other families.

use candle_core::Result;

use super::fields::Fields;
use super::rope::Rope;
use candle_attention_core::{IndexerConfig, MultiHeadLatentAttentionConfig, RopeScaling, RopeStyle};

/// The defaults of the sizes of latent attention in a family.
#[derive(Clone, Copy)]
pub(super) struct Latent {
    pub q_lora_rank: Option<usize>,
    pub kv_lora_rank: usize,
    pub nope_head_dim: usize,
    pub rope_head_dim: usize,
    /// The default of the width of values; `None` means `embed_dim / num_heads`.
    pub value_head_dim: Option<usize>,
    /// Whether queries and the shared keys have rotary positions.
    pub rotates: bool,
    /// The indexer that chooses keys.
    pub indexer: Option<FamilyIndexer>,
}

/// The defaults of an indexer in a family.
#[derive(Clone, Copy)]
pub(super) struct FamilyIndexer {
    /// The number of heads if a config does not say it.
    pub num_heads: usize,
    pub rope_style: RopeStyle,
}

impl FamilyIndexer {
    /// Returns the config of the indexer of a layer.
    fn config(self, fields: &Fields) -> Result<IndexerConfig> {
        match fields.of_layer("indexer_types")?.and_then(|kind| kind.as_str()) {
            Some("full") => {}
            Some(_) => {
                return fields.fail(
                    "the layer attends to the keys that an earlier layer chose, expected a layer with an \
                     indexer (`indexer_types`: \"full\")",
                );
            }
            None => {
                fields.only("index_topk_freq", 1)?;
                if fields.has("index_topk_pattern") {
                    return fields.fail("index_topk_pattern is set, expected a list `indexer_types`");
                }
            }
        }
        Ok(IndexerConfig {
            num_heads: fields.get_or("index_n_heads", self.num_heads)?,
            head_dim: fields.get_or("index_head_dim", 128)?,
            top_k: fields.get_or("index_topk", 2048)?,
            rope_style: self.rope_style,
        })
    }
}

impl Latent {
    /// The defaults of DeepSeek V2 and V3.
    pub const DEEPSEEK: Self = Self {
        q_lora_rank: Some(1536),
        kv_lora_rank: 512,
        nope_head_dim: 128,
        rope_head_dim: 64,
        value_head_dim: Some(128),
        rotates: true,
        indexer: None,
    };

    /// Returns the config of a layer.
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
        let indexer = match self.indexer {
            Some(indexer) => Some(indexer.config(fields)?),
            None => None,
        };
        Ok(MultiHeadLatentAttentionConfig::new(embed_dim, num_heads)
            .with_indexer(indexer)
            .with_q_lora_rank(fields.nullable("q_lora_rank", self.q_lora_rank)?)
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
            .with_dropout(fields.optional("attention_dropout")?.unwrap_or(0.0)))
    }
}
