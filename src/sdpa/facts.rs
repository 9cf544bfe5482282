//! What decides whether a GPU's fused operation can take a call: plain numbers, so that decisions are tested anywhere.

use std::fmt;

use candle_core::{DType, Result, Tensor};

use super::PackedSequences;
use super::plan::Wanted;
use super::validate::{Call, Dims};
use crate::mask::{AttentionMask, Outline};

/// A call without its tensors.
#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub dtype: DType,
    pub dims: Dims,
    pub h_kv: usize,
    pub scale: f64,
    pub softcap: Option<f64>,
    pub alibi: bool,
    pub sinks: bool,
    pub keep: bool,
    pub bias: bool,
    /// Whether the log-sum-exp is asked for.
    pub lse: bool,
    /// How q, k and v lie in memory.
    pub places: [Place; 3],
    /// Whether the spans lie one after the other, and not each in its own entry of a batch.
    pub packed: bool,
    /// What the sequences see, or what about the mask has no such form.
    pub spans: std::result::Result<Vec<Span>, String>,
}

/// The queries and keys of one sequence.
#[derive(Debug, Clone)]
pub(super) struct Span {
    pub t_q: usize,
    pub t_kv: usize,
    pub outline: Outline,
}

/// Strides and offset of a (B, H, T, D) tensor in its buffer, in elements.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub dims: [usize; 4],
    pub strides: [usize; 4],
    pub offset: usize,
}

impl Facts {
    /// # Errors
    /// As [`AttentionMask::resolve`].
    pub fn new(call: &Call, wanted: Wanted) -> Result<Self> {
        let Dims { b, t_q, t_kv, .. } = call.dims;
        let bound = call.mask.resolve(b, t_q, t_kv)?;
        let spans = (0..b).map(|b| Ok(Span { t_q, t_kv, outline: bound.outline(b)? }));
        Self::with_spans(call, wanted, spans.collect::<std::result::Result<_, &str>>().map_err(String::from))
    }

    /// Of a call over packed sequences, (1, H, total, D) each.
    ///
    /// # Errors
    /// As [`AttentionMask::resolve`] for each sequence.
    pub fn packed(call: &Call, sequences: &PackedSequences, wanted: Wanted) -> Result<Self> {
        let mut spans = Ok(Vec::with_capacity(sequences.len()));
        for s in 0..sequences.len() {
            let (t_q, t_kv) = (sequences.queries(s).len(), sequences.keys(s).len());
            let own: AttentionMask = call.mask.of_sequence(s, sequences.len(), t_q)?;
            match (own.resolve(1, t_q, t_kv)?.outline(0), &mut spans) {
                (Ok(outline), Ok(spans)) => spans.push(Span { t_q, t_kv, outline }),
                (Err(reason), Ok(_)) => spans = Err(reason.to_string()),
                (_, Err(_)) => {}
            }
        }
        Ok(Self { packed: true, ..Self::with_spans(call, wanted, spans)? })
    }

    fn with_spans(call: &Call, wanted: Wanted, spans: std::result::Result<Vec<Span>, String>) -> Result<Self> {
        let options = call.options;
        Ok(Self {
            dtype: call.q.dtype(),
            dims: call.dims,
            h_kv: call.k.dim(1)?,
            scale: call.scale(),
            softcap: options.softcap,
            alibi: options.alibi_slopes.is_some(),
            sinks: options.sinks.is_some(),
            keep: call.mask.has_keep(),
            bias: call.mask.has_bias(),
            lse: wanted == Wanted::LogSumExp,
            places: [Place::of(call.q)?, Place::of(call.k)?, Place::of(call.v)?],
            packed: false,
            spans,
        })
    }

    /// Whether there is a query, and a key for it.
    pub fn is_empty(&self) -> bool {
        let Dims { b, t_q, t_kv, .. } = self.dims;
        b == 0 || t_q == 0 || t_kv == 0
    }
}

impl Place {
    fn of(tensor: &Tensor) -> Result<Self> {
        let (b, h, t, d) = tensor.dims4()?;
        let mut strides = [0; 4];
        strides.copy_from_slice(tensor.stride());
        Ok(Self { dims: [b, h, t, d], strides, offset: tensor.layout().start_offset() })
    }

    /// Row-major.
    #[cfg(test)]
    pub fn contiguous(dims: [usize; 4]) -> Self {
        let [_, h, t, d] = dims;
        Self { dims, strides: [h * t * d, t * d, d, 1], offset: 0 }
    }

    /// Whether a stride is ever walked along.
    pub fn walks(&self, dim: usize) -> bool {
        self.dims[dim] > 1
    }

    /// Whether each number follows the one before it, as far as that can be seen.
    pub fn is_contiguous(&self) -> bool {
        let mut next = 1;
        (0..4).rev().all(|dim| {
            let follows = !self.walks(dim) || self.strides[dim] == next;
            next *= self.dims[dim];
            follows
        })
    }
}

/// Which of q, k and v have to be copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Copies(pub [bool; 3]);

impl fmt::Display for Copies {
    /// Nothing, or a clause at the end of a sentence.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = ["q", "k", "v"].into_iter().zip(self.0).filter_map(|(name, copied)| copied.then_some(name));
        let names: Vec<_> = names.collect();
        if names.is_empty() { Ok(()) } else { write!(f, ", with a copy of {}", names.join(", ")) }
    }
}
