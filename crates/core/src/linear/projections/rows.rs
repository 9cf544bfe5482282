//! The rows of a layer's projections, wherever a checkpoint keeps them.

use std::ops::Range;

use candle_core::{Result, Tensor};
use candle_nn::Linear;

use crate::base::Share;

/// How many projections there may be.
pub(crate) const PROJECTIONS: usize = 5;

/// The projections of a layer as linear layers: q (H·D, E), k (H_kv·D, key_size), v (H_kv·D_v, value_size), o
/// (out_dim, H·D_v), gate (H·D_v or H, E).
#[derive(Debug, Clone)]
pub(crate) struct Linears {
    pub q: Linear,
    pub k: Option<Linear>,
    pub v: Option<Linear>,
    pub o: Option<Linear>,
    pub gate: Option<Linear>,
}

/// The rows of one projection, in the order of its outputs: one tensor, one for each head, or some rows of a packed
/// one.
#[derive(Debug, Clone, Default)]
pub(crate) struct ProjectionRows {
    /// None where there is no such projection.
    weight: Vec<Piece>,
    /// None without a bias.
    bias: Vec<Piece>,
}

/// `range` of each of the `groups` that the rows of a weight (rows, in) or a bias (rows,) are divided into.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    pub tensor: Tensor,
    pub groups: usize,
    pub range: Range<usize>,
}

impl Piece {
    pub fn whole(tensor: Tensor) -> Self {
        let rows = tensor.dims()[0];
        Self { tensor, groups: 1, range: 0..rows }
    }

    /// A copy of a share of the rows.
    pub fn share(&self, share: Share) -> Result<Self> {
        Ok(Self::whole(share.copy(&self.rows()?, 0)?))
    }

    fn len(&self) -> usize {
        self.groups * self.range.len()
    }

    /// Whether the rows of `next` follow this piece's own in one tensor.
    fn is_followed_by(&self, next: &Self) -> bool {
        self.tensor.id() == next.tensor.id() && (self.groups, next.groups, self.range.end) == (1, 1, next.range.start)
    }

    /// The rows, which follow the tensor where it is a variable.
    fn view(&self) -> Result<Option<Tensor>> {
        (self.groups == 1).then(|| self.tensor.narrow(0, self.range.start, self.range.len())).transpose()
    }

    fn rows(&self) -> Result<Tensor> {
        let Range { start, end } = self.range;
        let (rows, columns) = (self.tensor.dims()[0], &self.tensor.dims()[1..]);
        if self.groups == 1 && self.range.len() == rows {
            return Ok(self.tensor.clone());
        }
        if self.groups == 1 {
            return self.tensor.narrow(0, start, end - start)?.contiguous();
        }
        let grouped = self.tensor.reshape([&[self.groups, rows / self.groups], columns].concat())?;
        grouped.narrow(1, start, end - start)?.contiguous()?.reshape([&[self.len()], columns].concat())
    }

    /// The same rows in as few pieces as can be.
    fn join(pieces: impl IntoIterator<Item = Self>) -> Vec<Self> {
        let mut joined: Vec<Self> = Vec::new();
        for piece in pieces {
            match joined.last_mut() {
                Some(last) if last.is_followed_by(&piece) => last.range.end = piece.range.end,
                _ => joined.push(piece),
            }
        }
        joined
    }

    /// The rows of all pieces as one tensor: a view where they follow each other in one, and a copy otherwise.
    fn concat(pieces: impl IntoIterator<Item = Self>) -> Result<Tensor> {
        let joined = Self::join(pieces);
        let mut tensors = joined.iter().map(Self::rows).collect::<Result<Vec<_>>>()?;
        if tensors.len() == 1 { Ok(tensors.remove(0)) } else { Tensor::cat(&tensors, 0) }
    }
}

impl From<Linear> for ProjectionRows {
    fn from(linear: Linear) -> Self {
        let bias = linear.bias().cloned().map(Piece::whole).into_iter().collect();
        Self { weight: vec![Piece::whole(linear.weight().clone())], bias }
    }
}

impl ProjectionRows {
    /// More rows, of the weight or of the bias.
    pub(crate) fn push(&mut self, piece: Piece, is_bias: bool) {
        if is_bias { &mut self.bias } else { &mut self.weight }.push(piece);
    }

    /// Whether there is no such projection.
    pub(crate) fn is_empty(&self) -> bool {
        self.weight.is_empty()
    }

    /// The width of the output.
    pub(crate) fn len(&self) -> usize {
        self.weight.iter().map(Piece::len).sum()
    }

    /// The width of the input.
    pub(crate) fn in_dim(&self) -> usize {
        self.weight().dims()[1]
    }

    /// The tensor that holds the first of the rows.
    pub(crate) fn weight(&self) -> &Tensor {
        &self.weight[0].tensor
    }

    pub(crate) fn has_bias(&self) -> bool {
        !self.bias.is_empty()
    }

    /// Whether training may change them, weights or biases, so that a copy would not stay the same.
    pub(crate) fn is_tracked(&self) -> bool {
        self.weight.iter().chain(&self.bias).any(|piece| piece.tensor.track_op())
    }

    /// The rows as a linear layer that follows variables; `None` where they lie in several places.
    pub(crate) fn to_view(&self) -> Result<Option<Linear>> {
        let view = |pieces: &[Piece]| match Piece::join(pieces.iter().cloned()).as_slice() {
            [whole] => whole.view(),
            _ => Ok(None),
        };
        let bias = view(&self.bias)?;
        let weight = if bias.is_some() == self.has_bias() { view(&self.weight)? } else { None };
        Ok(weight.map(|weight| Linear::new(weight, bias)))
    }

    /// The rows as one linear layer, with what variables hold now.
    pub(crate) fn to_linear(&self) -> Result<Linear> {
        Self::concat(&[self])
    }

    /// The rows of several projections of inputs of one width as one linear layer.
    pub(crate) fn concat(projections: &[&Self]) -> Result<Linear> {
        let weight = Piece::concat(projections.iter().flat_map(|rows| rows.weight.clone()))?;
        if !projections.iter().any(|rows| rows.has_bias()) {
            return Ok(Linear::new(weight, None));
        }
        let mut bias = Vec::new();
        for rows in projections {
            bias.extend(rows.bias.clone());
            if !rows.has_bias() {
                // Adding zero changes no number.
                bias.push(Piece::whole(Tensor::zeros(rows.len(), weight.dtype(), weight.device())?));
            }
        }
        Ok(Linear::new(weight, Some(Piece::concat(bias)?)))
    }
}

/// The projections of a layer as a checkpoint has them, in the order of [`ProjectionPlace`](crate::ProjectionPlace).
pub(crate) type LoadedProjections = [Option<ProjectionRows>; PROJECTIONS];
