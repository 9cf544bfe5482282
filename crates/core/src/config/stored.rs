//! The deserialisation of a config, with an error that says which option has the name nearest to an unknown one.

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::MultiHeadAttentionConfig;
use candle_attention_modules::base::{edits, nearest};

// The derived functions are `MultiHeadAttentionConfig::serialize` and `deserialize`, because of `remote = "Self"`.

impl Serialize for MultiHeadAttentionConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        Self::serialize(self, serializer)
    }
}

impl<'de> Deserialize<'de> for MultiHeadAttentionConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::deserialize(deserializer).map_err(|error| match with_nearest(&error.to_string()) {
            Some(text) => D::Error::custom(text),
            None => error,
        })
    }
}

/// Returns serde's error about an unknown field with the nearest of the names that it lists instead of the list; `None`
/// for another error, and if no name is near. The list has the fields of the struct without that field, which may be
/// the config of an option.
fn with_nearest(text: &str) -> Option<String> {
    let quoted: Vec<&str> = text.strip_prefix("unknown field ")?.split('`').collect();
    // The texts between quotes and those in quotes take turns; the last one is the position in the file.
    let [_, unknown, .., position] = quoted[..] else { return None };
    let known = quoted[2..].iter().skip(1).step_by(2).copied();
    let nearest = *nearest(unknown, known).first()?;
    // A misspelling, and not the name that another library has for an option.
    if 3 * edits(unknown, nearest) > unknown.len().max(nearest.len()) {
        return None;
    }
    Some(format!("unknown field `{unknown}`, did you mean `{nearest}`?{position}"))
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
        let far = error_of(r#"{"embed_dim": 8, "num_heads": 4, "num_attention_heads": 4}"#);
        assert!(far.starts_with("unknown field `num_attention_heads`, expected one of `embed_dim`"), "{far}");
    }
}
