//! The six projections of a gated delta net's input, and the channels of its convolutions.

use std::ops::Range;

use candle_core::{Result, bail};

use super::config::{GatedDeltaNetConfig, OP};
use candle_attention_modules::base::{FusedRows, Heads};

/// One value for each projection of the layer's input.
#[derive(Debug, Clone)]
pub(super) struct Projections<T> {
    pub q: T,
    pub k: T,
    pub v: T,
    /// The output gate, or the compressed input that it is computed from.
    pub gate: T,
    pub beta: T,
    /// The decays, or the compressed input that they are computed from.
    pub decay: T,
}

impl<T> Projections<T> {
    /// Returns the projections from a list in the order of the fields.
    ///
    /// # Errors
    /// For another number of values than six.
    pub fn from_vec(values: Vec<T>) -> Result<Self> {
        let found = values.len();
        let Ok([q, k, v, gate, beta, decay]) = <[T; 6]>::try_from(values) else {
            bail!("[{OP}] there are {found} projections, expected 6")
        };
        Ok(Self { q, k, v, gate, beta, decay })
    }

    /// Returns the values in the order of the fields.
    pub fn all(&self) -> [&T; 6] {
        [&self.q, &self.k, &self.v, &self.gate, &self.beta, &self.decay]
    }
}

/// The channels of queries, keys and values in the convolutions.
#[derive(Debug, Clone)]
pub(super) struct ConvChannels {
    pub q: Range<usize>,
    pub k: Range<usize>,
    pub v: Range<usize>,
}

impl ConvChannels {
    /// Returns the number of channels.
    pub fn count(&self) -> usize {
        self.v.end
    }
}

impl GatedDeltaNetConfig {
    /// Returns the rows of each projection's weight, for all heads. No heads divide compressed inputs.
    pub(super) fn projection_rows(&self) -> Projections<FusedRows> {
        let key_rows = self.num_key_heads() * self.key_head_dim();
        let value_rows = self.num_value_heads() * self.value_head_dim();
        let of_heads = |heads, rows| FusedRows { count: rows, heads: Some(heads) };
        let compressed_or_of_heads = |rank: Option<usize>, rows| match rank {
            Some(rank) => FusedRows { count: rank, heads: None },
            None => of_heads(Heads::Query, rows),
        };
        Projections {
            q: of_heads(Heads::Key, key_rows),
            k: of_heads(Heads::Key, key_rows),
            v: of_heads(Heads::Query, value_rows),
            gate: compressed_or_of_heads(self.gate_rank(), value_rows),
            beta: of_heads(Heads::Query, self.num_value_heads()),
            decay: compressed_or_of_heads(self.decay_rank(), self.num_decays()),
        }
    }

    /// Returns the channels of the convolutions.
    pub(super) fn conv_channels(&self) -> ConvChannels {
        let Projections { q, k, v, .. } = self.projection_rows();
        let q = q.count;
        let k = k.count;
        let v = v.count;
        ConvChannels { q: 0..q, k: q..q + k, v: q + k..q + k + v }
    }
}
