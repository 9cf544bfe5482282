//! The deserialisation of a config, with errors that say which option is meant by an unknown name, and which values an
//! option may have.

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::attention::SYNONYMS_OF_ATTENTION;
use super::{KvSharing, MultiHeadAttentionConfig};
use crate::position::{AlibiConfig, ContentPositions};
use candle_attention_modules::base::{Synonym, explain_unknown_field, optional_variant, variant};

/// Returns the names that PyTorch, transformers, JAX, other libraries and earlier versions have for the options of a
/// layer.
pub(crate) fn synonyms() -> Vec<Synonym> {
    [SYNONYMS_OF_SHAPES, SYNONYMS_OF_ATTENTION].concat()
}

/// Other names of the options of the shape, the projections and the gates of a layer, and of parts of a config.
const SYNONYMS_OF_SHAPES: &[Synonym] = &[
    Synonym::of(
        "num_heads",
        &["num_attention_heads", "n_heads", "n_head", "nhead", "heads", "num_q_heads"],
        "`num_heads`",
    ),
    Synonym::of(
        "num_kv_heads",
        &[
            "num_key_value_heads",
            "kv_heads",
            "num_heads_kv",
            "n_kv_heads",
            "n_kv_head",
            "n_head_kv",
            "num_kv",
            "num_query_groups",
            "num_kv_groups",
            "multi_query_group_num",
            "num_key_heads",
            "kv_n_heads",
        ],
        "`num_kv_heads`",
    ),
    Synonym::of(
        "embed_dim",
        &["hidden_size", "d_model", "dim", "n_embd", "emb_dim", "d_in", "embedding_dim", "model_dim", "qkv_features"],
        "`embed_dim`",
    ),
    Synonym::of(
        "head_dim",
        &["dim_head", "d_head", "head_size", "d_kv", "d_k", "key_dim", "qk_head_dim"],
        "`head_dim`",
    ),
    Synonym::of("value_head_dim", &["v_head_dim", "value_dim", "d_v"], "`value_head_dim`"),
    Synonym::of("out_dim", &["d_out", "output_dim", "out_features", "output_shape"], "`out_dim`"),
    Synonym::of("kdim", &["key_size", "cross_attention_dim", "encoder_hidden_size"], "`kdim`"),
    Synonym::of("vdim", &["value_size"], "`vdim`"),
    Synonym::of("q_bias", &["bias", "use_bias"], "`q_bias`, `k_bias`, `v_bias` and `out_bias`"),
    Synonym::of("q_bias", &["qkv_bias", "attention_bias", "use_qkv_bias"], "`q_bias`, `k_bias` and `v_bias`"),
    Synonym::of("out_bias", &["o_bias", "proj_bias", "out_proj_bias", "dense_bias"], "`out_bias`"),
    Synonym::of("bias_kv", &["add_bias_kv"], "`bias_kv`"),
    Synonym::of("num_mem_kv", &["mem_kv", "memory_kv"], "`num_mem_kv`"),
    Synonym::of("clip_qkv", &["qkv_clip", "clip"], "`clip_qkv`"),
    Synonym::of("qk_norm", &["qk_layernorm", "use_qk_norm", "q_norm", "k_norm", "normalize_qk"], "`qk_norm`"),
    Synonym::of("output_gate", &["gate", "attn_output_gate"], "`output_gate`"),
    Synonym::of("output_norm", &["context_norm", "attn_sub_norm"], "`output_norm`"),
    Synonym::of("kv_sharing", &["kv_source", "attention_k_eq_v"], "`kv_sharing`"),
    // Parts of the config, and the config of latent attention.
    Synonym::of("base", &["theta", "rope_theta"], "`base`"),
    Synonym::of("layout", &["place"], "`layout`"),
    Synonym::of("rope_head_dim", &["qk_rope_head_dim"], "`rope_head_dim`"),
    Synonym::of("nope_head_dim", &["qk_nope_head_dim"], "`nope_head_dim`"),
];

// The derived functions are `MultiHeadAttentionConfig::serialize` and `deserialize`, because of `remote = "Self"`.

impl Serialize for MultiHeadAttentionConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for MultiHeadAttentionConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize(deserializer).map_err(|error| explain_unknown_field(error, &synonyms()))
    }
}

/// Reads the option `alibi`.
pub(super) fn alibi<'de, D: Deserializer<'de>>(value: D) -> Result<Option<AlibiConfig>, D::Error> {
    optional_variant(value, "alibi")
}

/// Reads the option `content_positions`.
pub(super) fn content_positions<'de, D: Deserializer<'de>>(value: D) -> Result<Option<ContentPositions>, D::Error> {
    optional_variant(value, "content_positions")
}

/// Reads the option `kv_sharing`.
pub(super) fn kv_sharing<'de, D: Deserializer<'de>>(value: D) -> Result<KvSharing, D::Error> {
    variant(value, "kv_sharing")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error_of(text: &str) -> String {
        serde_json::from_str::<MultiHeadAttentionConfig>(text).expect_err("an unknown field").to_string()
    }

    #[test]
    fn misspelt_field_of_config_names_the_nearest_field() {
        assert_eq!(
            error_of(r#"{"embed_dim": 8, "num_heads": 4, "num_kv_head": 2}"#),
            "unknown field `num_kv_head`, did you mean `num_kv_heads`? at line 1 column 46"
        );
        let in_option = error_of(r#"{"embed_dim": 8, "num_heads": 4, "local_window": {"lef": 1, "right": 2}}"#);
        assert!(in_option.starts_with("unknown field `lef`, did you mean `left`?"), "{in_option}");
        let far = error_of(r#"{"embed_dim": 8, "num_heads": 4, "vocab_size": 4}"#);
        assert!(far.starts_with("unknown field `vocab_size`, expected one of `embed_dim`"), "{far}");
    }

    #[test]
    fn names_of_other_libraries_name_the_option_of_the_config() {
        let other_structs = ["base", "layout", "rope_head_dim", "nope_head_dim"];
        for synonym in synonyms().iter().filter(|synonym| !other_structs.contains(&synonym.field)) {
            for name in synonym.names {
                let text = error_of(&format!(r#"{{"embed_dim": 8, "num_heads": 4, "{name}": 2}}"#));
                let expected = format!("unknown field `{name}`, did you mean {}? at line", synonym.advice);
                assert!(text.starts_with(&expected), "{text}");
            }
        }
        let rope = error_of(r#"{"embed_dim": 8, "num_heads": 4, "rope": {"theta": 1e4}}"#);
        assert!(rope.starts_with("unknown field `theta`, did you mean `base`?"), "{rope}");
    }

    #[test]
    fn synonyms_are_no_options_and_occur_once_for_a_field() {
        let known = serde_json::to_value(MultiHeadAttentionConfig::new(8, 4)).expect("JSON");
        let all = synonyms();
        for (i, synonym) in all.iter().enumerate() {
            for name in synonym.names {
                assert!(known.get(name).is_none(), "{name} is an option");
                let other = all[..i].iter().find(|other| other.names.contains(name));
                assert!(other.is_none_or(|other| other.field != synonym.field), "{name} occurs twice");
            }
        }
    }
}
