//! Attention to compressed keys: DeepSeek V4's.

use candle_core::Result;

use super::fields::Fields;
use super::rope::Rope;
use candle_attention_core::{
    CompressedKeyAttentionConfig as Config, CompressedKeyIndexerConfig, KeyCompression, RopeConfig, RopeScaling,
};

/// The kinds of layers, by their names in `layer_types`.
const WINDOW_ALONE: &str = "sliding_attention";
const CHOSEN: &str = "compressed_sparse_attention";
const ALL: &str = "heavily_compressed_attention";

/// The part of each head that rotates.
const PARTIAL: &str = "partial_rotary_factor";

/// Attention to compressed keys in the layers of a model, and the defaults of its sizes.
#[derive(Clone, Copy)]
pub(super) struct CompressedKeys {
    pub head_dim: usize,
    /// The default of `qk_rope_head_dim`, the number of entries of a head that rotate.
    pub rope_head_dim: usize,
    pub q_lora_rank: usize,
    pub window: usize,
    pub output_groups: usize,
    pub output_rank: usize,
    /// The default of the number of tokens that have one key, in layers whose indexer chooses keys.
    pub chosen_rate: usize,
    /// The default of that number in layers that attend to all compressed keys.
    pub rate: usize,
    pub indexer: CompressedKeyIndexerConfig,
    /// The default of `compress_rope_theta`, the base of the rotary positions of layers that compress keys.
    pub compressed_base: f64,
}

impl CompressedKeys {
    pub const DEEPSEEK_V4: Self = Self {
        head_dim: 512,
        rope_head_dim: 64,
        q_lora_rank: 1024,
        window: 128,
        output_groups: 8,
        output_rank: 1024,
        chosen_rate: 4,
        rate: 128,
        indexer: CompressedKeyIndexerConfig { num_heads: 64, head_dim: 128, top_k: 512 },
        compressed_base: 160_000.0,
    };

    /// Returns the config of a layer; `rope` has the positions of layers with a window alone.
    pub fn config(&self, fields: &Fields, embed_dim: usize, num_heads: usize, rope: Rope) -> Result<Config> {
        fields.agrees("num_key_value_heads", 1)?;
        fields.only("attention_bias", false)?;
        fields.only("is_causal", true)?;
        let kind = self.kind(fields)?;
        let head_dim = fields.get_or("head_dim", self.head_dim)?;
        let rope_head_dim = match fields.optional::<f64>(PARTIAL)? {
            Some(part) => (head_dim as f64 * part) as usize,
            None => fields.optional("qk_rope_head_dim")?.unwrap_or(head_dim * self.rope_head_dim / self.head_dim),
        };
        let rates = fields.section("compress_rates")?;
        let compression = match kind {
            WINDOW_ALONE => None,
            CHOSEN => Some(KeyCompression {
                rate: rates.get_or(CHOSEN, fields.get_or("compress_rate_csa", self.chosen_rate)?)?,
                overlaps: true,
                indexer: Some(CompressedKeyIndexerConfig {
                    num_heads: fields.get_or("index_n_heads", self.indexer.num_heads)?,
                    head_dim: fields.get_or("index_head_dim", self.indexer.head_dim)?,
                    top_k: fields.get_or("index_topk", self.indexer.top_k)?,
                }),
            }),
            _ => Some(KeyCompression {
                rate: rates.get_or(ALL, fields.get_or("compress_rate_hca", self.rate)?)?,
                overlaps: false,
                indexer: None,
            }),
        };
        Ok(Config {
            embed_dim,
            num_heads,
            head_dim,
            q_lora_rank: fields.get_or("q_lora_rank", self.q_lora_rank)?,
            rope_head_dim,
            window: fields.get_or("sliding_window", self.window)?,
            output_groups: fields.get_or("o_groups", self.output_groups)?,
            output_rank: fields.get_or("o_lora_rank", self.output_rank)?,
            rope: self.rope(fields, rope, compression.is_some(), rope_head_dim)?,
            norm_eps: fields.get_or("rms_norm_eps", 1e-6)?,
            dropout: fields.optional("attention_dropout")?.unwrap_or(0.0),
            compression,
        })
    }

    /// Returns the rotary positions of a layer. They are `rope_parameters` by the name "main" or "compress"; in a
    /// config without these names, layers that compress keys have another base, and the scaling of `rope_scaling`.
    fn rope(&self, fields: &Fields, family: Rope, compresses: bool, width: usize) -> Result<RopeConfig> {
        let parameters = match fields.object("rope_scaling")? {
            None => fields.object("rope_parameters")?,
            scaling => scaling,
        };
        let name = if compresses { "compress" } else { "main" };
        if let Some(own) = parameters.as_ref().map_or(Ok(None), |parameters| parameters.object(name))? {
            return family.read(fields, Some(own), width);
        }
        if !compresses {
            return family.read(fields, None, width);
        }
        let mut scaling = family.read(fields, parameters, width)?.scaling().clone();
        // The model does not multiply cosines and sines by the factor that YaRN computes.
        if let RopeScaling::Yarn { attention_factor, .. } = &mut scaling {
            attention_factor.get_or_insert(1.0);
        }
        let rope = family.read(fields, None, width)?;
        let base = fields.get_or("compress_rope_theta", self.compressed_base)?;
        Ok(RopeConfig::new(base).with_style(rope.style()).with_scaling(scaling))
    }

    /// Returns the kind of a layer: from `layer_types`, from `compress_ratios` of published configs, which may have
    /// more entries than layers, or as in the class of transformers.
    fn kind(&self, fields: &Fields) -> Result<&'static str> {
        let kinds = [WINDOW_ALONE, CHOSEN, ALL];
        if let Some(named) = fields.of_layer("layer_types")? {
            return match kinds.into_iter().find(|kind| named == kind) {
                Some(kind) => Ok(kind),
                None => fields.fail(format!(
                    "layer_types has {named} for layer {}, expected {WINDOW_ALONE:?}, {CHOSEN:?} or {ALL:?}",
                    fields.layer
                )),
            };
        }
        if let Some(ratio) = fields.of_layer("compress_ratios")? {
            return match ratio.as_u64() {
                Some(0) => Ok(WINDOW_ALONE),
                Some(4) => Ok(CHOSEN),
                Some(128) => Ok(ALL),
                _ => {
                    fields.fail(format!("compress_ratios has {ratio} for layer {}, expected 0, 4 or 128", fields.layer))
                }
            };
        }
        Ok(if fields.layer > 2 && !fields.layer.is_multiple_of(2) { CHOSEN } else { ALL })
    }
}
