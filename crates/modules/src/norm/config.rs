//! The options of the norms of a layer.

use candle_core::Result;
use candle_nn::Init;
use serde::{Deserialize, Deserializer, Serialize};

use crate::base::{Fact, ParameterReader, number, variant};

/// The formula of a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum QkNormKind {
    /// Root mean square, with a weight and no bias.
    Rms,
    /// Root mean square, with the factor 1 + weight (Gemma 3).
    RmsPlusOne,
    /// Root mean square, without a weight (Llama 4).
    RmsNoWeight,
    /// Mean and variance, with a weight and a bias.
    Layer,
    /// Mean and variance, with a weight and no bias (Cohere, StableLM).
    LayerNoBias,
}

/// The entries that one mean is taken over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum QkNormScope {
    /// The entries of one head. All heads share one weight (D,) (Qwen 3).
    PerHead,
    /// The entries of one head. Each head has its own weight: (H, D) for queries, (H_kv, D) for keys (Cohere,
    /// StableLM).
    PerHeadWeights,
    /// The entries of the whole projection, before it is split into heads (OLMo 2).
    Projection,
}

/// Normalisation of queries and keys. The parameters are `q_norm.weight` and `k_norm.weight`, and `.bias` for the kind
/// with a bias. The names `q_layernorm` and `query_layernorm` are read too, and `q_norm.scale` (torchtune)
/// and `query_ln.scale` (flax). StableLM's list of one norm for each head,
/// `q_layernorm.norms.{i}.weight`, is read as one weight (H, D).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QkNorm {
    /// The formula.
    #[serde(deserialize_with = "kind")]
    pub kind: QkNormKind,
    /// The entries that one mean is taken over.
    #[serde(deserialize_with = "scope")]
    pub scope: QkNormScope,
    /// The number that is added to the mean square or the variance.
    pub eps: f64,
}

/// Normalisation of the attention output of all heads together, before the output projection. The parameters are
/// `output_norm.weight`, and `.bias` for the kind with a bias. The names `attn_sub_norm` (BitNet) and `inner_attn_ln`
/// (Kosmos-2) are read too.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputNorm {
    /// The formula.
    #[serde(deserialize_with = "kind")]
    pub kind: QkNormKind,
    /// The number that is added to the mean square or the variance.
    pub eps: f64,
}

/// Reads the option `kind`.
fn kind<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<QkNormKind, D::Error> {
    variant(value, "kind")
}

/// Reads the option `scope`.
fn scope<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<QkNormScope, D::Error> {
    variant(value, "scope")
}

impl QkNormKind {
    /// Returns the initial value of a new weight.
    pub(super) fn initial_weight(self) -> Init {
        Init::Const(if self == Self::RmsPlusOne { 0.0 } else { 1.0 })
    }

    /// Refuses the file of a model that MLX converted and that is not known, where the norm multiplies by `1 + weight`:
    /// MLX stores the sum in some models and the weight in others.
    pub(super) fn refuse_unknown_conversion(self, source: &ParameterReader) -> Result<()> {
        let is_unknown = self == Self::RmsPlusOne
            && Fact::WrittenByMlx.is_known_of(&source.vb)
            && !Fact::NormsAsInPyTorch.is_known_of(&source.vb);
        if is_unknown {
            return source.fail(
                "MLX converted this model, and stores norms as w or as 1 + w depending on the model, expected a file \
                 with its config.json next to it, or `hf::load_attention`",
            );
        }
        Ok(())
    }

    pub(super) fn subtracts_mean(self) -> bool {
        matches!(self, Self::Layer | Self::LayerNoBias)
    }
}

impl QkNorm {
    /// Returns the RMS norm of each head with one weight (D,) for all heads (Qwen 3). Other norms set
    /// [`kind`](Self::kind) and [`scope`](Self::scope).
    ///
    /// ```
    /// use candle_attention::{MultiHeadAttentionConfig, QkNorm, QkNormScope};
    /// let qwen3 = MultiHeadAttentionConfig::new(1024, 16).with_qk_norm(QkNorm::rms(1e-6));
    /// let olmo2 = qwen3.clone().with_qk_norm(QkNorm { scope: QkNormScope::Projection, ..QkNorm::rms(1e-6) });
    /// assert_eq!(qwen3.qk_norm().map(|norm| norm.scope), Some(QkNormScope::PerHead));
    /// # assert_ne!(qwen3, olmo2);
    /// ```
    pub fn rms(eps: f64) -> Self {
        Self { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps }
    }

    /// Returns the layer norm of each head with one weight and one bias (D,) for all heads (Persimmon, Phi).
    pub fn layer_norm(eps: f64) -> Self {
        Self { kind: QkNormKind::Layer, scope: QkNormScope::PerHead, eps }
    }
}

/// Converts to a norm over the whole projection.
impl From<OutputNorm> for QkNorm {
    fn from(OutputNorm { kind, eps }: OutputNorm) -> Self {
        Self { kind, scope: QkNormScope::Projection, eps }
    }
}

/// Checks the epsilon of the option `name`.
pub fn check_epsilon(op: &str, name: &str, norm: Option<impl Into<QkNorm>>) -> Result<()> {
    number::epsilon(op, &format!("eps of {name}"), norm.map(|norm| norm.into().eps))
}
