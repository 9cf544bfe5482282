//! Where a layer's keys and values come from.

use candle_core::{Result, bail};
use serde::{Deserialize, Serialize};

use super::{MultiHeadAttentionConfig, OP};

/// Where a layer's keys and values come from.
///
/// ```
/// use candle_attention::{KvSource, MultiHeadAttentionConfig};
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_kv_source(KvSource::KeysAsValues);
/// cfg.validate().expect("keys and values are of one width");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum KvSource {
    /// A projection of its own for each.
    #[default]
    Projected,
    /// One projection for both: values are what it gives, before norms and positions of the keys (`attention_k_eq_v` of
    /// Gemma 4).
    KeysAsValues,
    /// None: the layer reads what an earlier layer keeps in its
    /// [cache](crate::AttentionInput::with_shared_cache), or has projected to a
    /// [memory](crate::AttentionInput::with_memory) (`num_kv_shared_layers` of Gemma 3n and Gemma 4).
    EarlierLayer,
}

impl MultiHeadAttentionConfig {
    /// Nothing may be asked of keys and values that are not there.
    pub(super) fn validate_kv_source(&self) -> Result<()> {
        match self.kv_source {
            KvSource::Projected => Ok(()),
            KvSource::KeysAsValues => {
                let (keys, values) = (
                    [self.head_dim(), self.key_size(), usize::from(self.k_bias)],
                    [self.value_head_dim(), self.value_size(), usize::from(self.v_bias)],
                );
                if keys != values {
                    bail!(
                        "[{OP}] values are the keys' projection, expected one width of heads and inputs and \
                         a bias on both or neither, found {keys:?} for keys and {values:?} for values"
                    )
                }
                Ok(())
            }
            KvSource::EarlierLayer => {
                let options = [
                    ("k_bias", self.k_bias),
                    ("v_bias", self.v_bias),
                    ("bias_kv", self.bias_kv),
                    ("add_zero_attn", self.add_zero_attn),
                    ("value_norm", self.value_norm.is_some()),
                ];
                match options.into_iter().find(|&(_, is_set)| is_set) {
                    Some((name, _)) => bail!(
                        "[{OP}] {name} is set, but keys and values are those of an earlier layer, as it \
                         made them"
                    ),
                    None => Ok(()),
                }
            }
        }
    }
}
