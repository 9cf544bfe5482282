//! Terms of a layer's scores beside the product of queries and keys, each in a file of its own: biases by distance,
//! relative positions by content, places in a window.

mod alibi;
mod content;
mod relative_bias;

pub use alibi::{AlibiConfig, alibi_slopes};
pub use content::{ContentPositions, DisentangledConfig, RelativeEmbeddings};
pub use relative_bias::{RelativeBias, RelativeBiasConfig};

pub(crate) use alibi::alibi;
pub(crate) use content::{ContentLayer, KeysByHeads, content};

use std::fmt::Debug;
use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::Positions;
use crate::base::ParameterList;
use crate::linear::Projections;
use crate::mask::AttentionMask;
use crate::sdpa::{PackedSequences, SdpaOptions};

/// What the scores of a call are made of. Each term of a layer changes its part.
pub(crate) struct Scores {
    /// (B, H, T_q, D).
    pub q: Tensor,
    /// The call's own keys (B, H_kv, T_kv, D); `None` where it reads those of an earlier layer.
    pub k: Option<Tensor>,
    pub mask: AttentionMask,
    /// The scale is given.
    pub options: SdpaOptions,
    /// What is computed for a few heads at a time.
    pub by_heads: Option<content::DistanceTerms>,
}

impl Scores {
    /// What products of queries and keys are multiplied by.
    fn scale(&self) -> f64 {
        self.options.scale.unwrap_or(1.0)
    }

    /// The keys of a call whose tokens attend to each other.
    fn own_keys(&self, call: &TermCall) -> Result<Tensor> {
        match (&self.k, call.others) {
            (Some(k), None) => Ok(k.clone()),
            (_, others) => bail!(
                "[multi_head_attention] {} were given, but relative positions by content are between the tokens of a call",
                others.unwrap_or("keys of others")
            ),
        }
    }
}

/// A call, as far as terms depend on it.
pub(crate) struct TermCall<'a> {
    /// Of the queries, and of all keys that they may see; for a layer with a term that takes positions.
    pub queries: Option<&'a Positions>,
    pub keys: Option<&'a Positions>,
    /// Whether the caller gave positions.
    pub has_given_positions: bool,
    pub packed: Option<&'a PackedSequences>,
    pub projections: &'a Projections,
    /// What there is beside the call's own tokens, for an error.
    pub others: Option<&'static str>,
}

/// A term of the scores.
pub(crate) trait ScoreTerm: Debug + Send + Sync {
    /// Adds the term to the scores of a call.
    fn add(&self, scores: &mut Scores, call: &TermCall) -> Result<()>;

    /// Whether [`add`](Self::add) reads positions.
    fn takes_positions(&self) -> bool {
        false
    }

    /// The layer's own parameters of the term, if it has any.
    fn parameters(&self) -> Option<&ParameterList> {
        None
    }

    /// The term with what variables hold now; `None` for one without variables.
    fn freeze(&self) -> Result<Option<Term>> {
        Ok(None)
    }

    /// The term with the vectors of distances that the layers of a stack share, if it takes such.
    ///
    /// # Errors
    /// For vectors of another shape.
    fn with_embeddings(&self, _embeddings: &RelativeEmbeddings) -> Result<Option<Term>> {
        Ok(None)
    }
}

/// A term that clones of a layer share.
pub(crate) type Term = Arc<dyn ScoreTerm>;
