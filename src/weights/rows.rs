//! Where the rows of a projection are in a checkpoint's tensors.

use std::ops::Range;

use candle_core::{Result, Tensor};
use candle_nn::Linear;

use super::layout::QkvOrder;
use super::load::projection_shapes;
use super::source::Source;
use crate::MultiHeadAttentionConfig;
use crate::linear::is_tracked;

/// The rows of one projection, in the order of its outputs: one linear layer, one for each head, or some rows of a packed
/// one.
#[derive(Debug, Clone)]
pub(crate) struct ProjectionRows {
    /// At least one.
    pieces: Vec<Piece>,
}

/// `range` of each of the `groups` that the rows of a linear layer are divided into.
#[derive(Debug, Clone)]
struct Piece {
    linear: Linear,
    groups: usize,
    range: Range<usize>,
}

impl Piece {
    fn whole(linear: Linear) -> Self {
        let rows = linear.weight().dims()[0];
        Self { linear, groups: 1, range: 0..rows }
    }

    fn len(&self) -> usize {
        self.groups * self.range.len()
    }

    fn bias(&self) -> Option<&Tensor> {
        self.linear.bias()
    }

    /// Whether the rows of `next` follow this piece's own in one tensor.
    fn is_followed_by(&self, next: &Self) -> bool {
        self.linear.weight().id() == next.linear.weight().id()
            && (self.groups, next.groups, self.range.end) == (1, 1, next.range.start)
    }

    /// These rows of a weight (rows, in) or a bias (rows,).
    fn of(&self, tensor: &Tensor) -> Result<Tensor> {
        if self.groups == 1 && self.range.len() == tensor.dims()[0] {
            return Ok(tensor.clone());
        }
        if self.groups == 1 {
            return tensor.narrow(0, self.range.start, self.range.len())?.contiguous();
        }
        let (rows, columns) = (tensor.dims()[0], &tensor.dims()[1..]);
        let grouped = tensor.reshape([&[self.groups, rows / self.groups], columns].concat())?;
        let own = grouped.narrow(1, self.range.start, self.range.len())?.contiguous()?;
        own.reshape([&[self.len()], columns].concat())
    }
}

impl From<Linear> for ProjectionRows {
    fn from(linear: Linear) -> Self {
        Self { pieces: vec![Piece::whole(linear)] }
    }
}

impl ProjectionRows {
    /// A linear layer for each head.
    pub(super) fn of_heads(heads: Vec<Linear>) -> Self {
        Self { pieces: heads.into_iter().map(Piece::whole).collect() }
    }

    /// The width of the output.
    pub(crate) fn len(&self) -> usize {
        self.pieces.iter().map(Piece::len).sum()
    }

    /// The width of the input.
    pub(crate) fn in_dim(&self) -> usize {
        self.weight().dims()[1]
    }

    /// The tensor that holds the first of the rows.
    pub(crate) fn weight(&self) -> &Tensor {
        self.pieces[0].linear.weight()
    }

    pub(crate) fn has_bias(&self) -> bool {
        self.pieces.iter().any(|piece| piece.bias().is_some())
    }

    /// Whether training may change them, weights or biases, so that a copy would not stay the same.
    pub(crate) fn is_tracked(&self) -> bool {
        self.pieces.iter().any(|piece| is_tracked(&piece.linear))
    }

    /// The rows as one linear layer, with what variables hold now: a view where they follow each other in one tensor, and a
    /// copy otherwise.
    pub(crate) fn to_linear(&self) -> Result<Linear> {
        Self::concat(&[self])
    }

    /// The rows of several projections of inputs of one width as one linear layer.
    pub(crate) fn concat(projections: &[&Self]) -> Result<Linear> {
        let mut pieces: Vec<Piece> = Vec::new();
        for piece in projections.iter().flat_map(|rows| &rows.pieces) {
            match pieces.last_mut() {
                Some(last) if last.is_followed_by(piece) => last.range.end = piece.range.end,
                _ => pieces.push(piece.clone()),
            }
        }
        let weights = pieces.iter().map(|piece| piece.of(piece.linear.weight())).collect::<Result<Vec<_>>>()?;
        let mut biases = Vec::new();
        if pieces.iter().any(|piece| piece.bias().is_some()) {
            for (piece, weight) in pieces.iter().zip(&weights) {
                biases.push(match piece.bias() {
                    Some(bias) => piece.of(bias)?,
                    // Adding zero changes no number.
                    None => Tensor::zeros(piece.len(), weight.dtype(), weight.device())?,
                });
            }
        }
        let one = |tensors: &[Tensor]| match tensors {
            [tensor] => Ok(tensor.clone()),
            _ => Tensor::cat(tensors, 0),
        };
        let bias = if biases.is_empty() { None } else { Some(one(&biases)?) };
        Ok(Linear::new(one(&weights)?, bias))
    }
}

/// Where query, key and value rows are in one packed weight.
#[derive(Debug, Clone)]
pub(super) struct PackedQkv {
    groups: usize,
    /// Rows of q, k and v in one group: all of them by part, those of one key head by head.
    parts: [usize; 3],
    pub bias: bool,
}

impl PackedQkv {
    /// # Errors
    /// If the config describes projections that cannot share one weight.
    pub fn new(cfg: &MultiHeadAttentionConfig, order: QkvOrder, source: &Source) -> Result<Self> {
        let [q, k, v, _] = projection_shapes(cfg);
        if q.1 != k.1 || q.1 != v.1 {
            return source.fail(format!(
                "one packed weight reads one input, but the config has input widths {}, {} and {}",
                q.1, k.1, v.1
            ));
        }
        let biases = cfg.qkv_bias();
        if biases[0] != biases[1] || biases[0] != biases[2] {
            return source.fail("one packed bias covers q, k and v, but the config wants some of them only");
        }
        let groups = match order {
            QkvOrder::ByPart => 1,
            QkvOrder::ByHead => cfg.num_kv_heads(),
        };
        Ok(Self { groups, parts: [q.0 / groups, k.0 / groups, v.0 / groups], bias: biases[0] })
    }

    /// Rows in all.
    pub fn len(&self) -> usize {
        self.groups * self.parts.iter().sum::<usize>()
    }

    /// The rows of each projection in a packed one.
    pub fn split(&self, packed: &Linear) -> [ProjectionRows; 3] {
        let [q, k, v] = self.parts;
        [0..q, q..q + k, q + k..q + k + v]
            .map(|range| ProjectionRows { pieces: vec![Piece { linear: packed.clone(), groups: self.groups, range }] })
    }

    /// The packed weight or bias of those of q, k and v: the inverse of [`split`](Self::split).
    pub fn join(&self, parts: [&Tensor; 3]) -> Result<Tensor> {
        if self.groups == 1 {
            return Tensor::cat(&parts, 0);
        }
        let columns = &parts[0].dims()[1..];
        let mut grouped = Vec::with_capacity(3);
        for (part, len) in parts.iter().zip(self.parts) {
            grouped.push(part.reshape([&[self.groups, len], columns].concat())?);
        }
        Tensor::cat(&grouped, 1)?.reshape([&[self.len()], columns].concat())
    }
}
