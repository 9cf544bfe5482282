//! What a layer's projections are made from: rows of tensors, wherever a checkpoint keeps them, or modules.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::Linear;

use crate::base::{Rows, frozen};

/// One of a layer's projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProjectionPlace {
    /// (B, T_q, embed_dim) to (B, T_q, H·D).
    Query,
    /// (B, T_kv, key_size) to (B, T_kv, H_kv·D).
    Key,
    /// (B, T_kv, value_size) to (B, T_kv, H_kv·D_v).
    Value,
    /// (B, T_q, H·D_v) to (B, T_q, out_dim).
    Output,
    /// (B, T_q, embed_dim) to (B, T_q, H·D_v), or (B, T_q, H) for a gate of whole heads
    /// ([`OutputGate`](crate::gate::OutputGate)).
    Gate,
}

impl ProjectionPlace {
    /// In the order of the type.
    pub(super) const ALL: [Self; PROJECTIONS] = [Self::Query, Self::Key, Self::Value, Self::Output, Self::Gate];

    /// For errors.
    pub(super) fn noun(self) -> String {
        if self == Self::Gate { self.to_string() } else { format!("{self} projection") }
    }
}

impl fmt::Display for ProjectionPlace {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Query => "query",
            Self::Key => "key",
            Self::Value => "value",
            Self::Output => "output",
            Self::Gate => "gate",
        })
    }
}

/// How many projections a layer may have.
pub const PROJECTIONS: usize = 5;

/// What there is of something for each projection, in the order of [`ProjectionPlace`].
pub type ByPlace<T> = [Option<T>; PROJECTIONS];

/// A module in a projection's place.
pub type ProjectionModule = Arc<dyn Module + Send + Sync>;

/// Modules for all projections of a layer (`MultiHeadAttention::from_modules`), biases included.
#[derive(Clone, Default)]
#[must_use]
pub struct ProjectionModules(pub(super) ByPlace<ProjectionModule>);

impl ProjectionModules {
    /// Query, key and value projections, and no output projection.
    pub fn new(
        query: impl Module + Send + Sync + 'static,
        key: impl Module + Send + Sync + 'static,
        value: impl Module + Send + Sync + 'static,
    ) -> Self {
        Self::of_query(query).with_key(key).with(ProjectionPlace::Value, value)
    }

    /// A query projection alone, for keys and values of an earlier layer.
    pub fn of_query(query: impl Module + Send + Sync + 'static) -> Self {
        Self::default().with(ProjectionPlace::Query, query)
    }

    /// With a key projection, whose output may be the values too.
    pub fn with_key(self, key: impl Module + Send + Sync + 'static) -> Self {
        self.with(ProjectionPlace::Key, key)
    }

    /// With an output projection.
    pub fn with_output(self, output: impl Module + Send + Sync + 'static) -> Self {
        self.with(ProjectionPlace::Output, output)
    }

    /// With the projection of an output gate, wherever a checkpoint may keep it.
    pub fn with_gate(self, gate: impl Module + Send + Sync + 'static) -> Self {
        self.with(ProjectionPlace::Gate, gate)
    }

    fn with(mut self, place: ProjectionPlace, module: impl Module + Send + Sync + 'static) -> Self {
        self.0[place as usize] = Some(Arc::new(module));
        self
    }
}

impl fmt::Debug for ProjectionModules {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let places = ProjectionPlace::ALL.into_iter().filter(|&place| self.0[place as usize].is_some());
        f.debug_tuple("ProjectionModules").field(&places.collect::<Vec<_>>()).finish()
    }
}

/// The rows of one projection, in the order of its outputs: one tensor, one for each head, or some rows of a packed
/// one. What variables hold is read when it is asked for.
#[derive(Debug, Clone, Default)]
pub struct ProjectionRows {
    /// None where there is no such projection.
    weight: Vec<Piece>,
    /// None without a bias.
    bias: Vec<Piece>,
}

/// Rows of a weight (rows, in) or of a bias (rows,).
#[derive(Debug, Clone)]
pub struct Piece {
    tensor: Tensor,
    rows: Rows,
}

impl Piece {
    /// Some of the rows (out, in) of a weight, or (out,) of a bias.
    pub fn new(tensor: Tensor, rows: Rows) -> Self {
        Self { tensor, rows }
    }

    /// All rows of a weight or a bias.
    pub fn whole(tensor: Tensor) -> Self {
        let rows = Rows::first(tensor.dims()[0]);
        Self { tensor, rows }
    }

    /// A copy of some of the rows, unless these are all.
    pub fn narrow(self, own: Range<usize>) -> Result<Self> {
        if own.len() == self.rows.count() {
            return Ok(self);
        }
        Ok(Self::whole(self.rows.of(&self.tensor)?.narrow(0, own.start, own.len())?.force_contiguous()?))
    }

    /// Whether the rows of `next` follow this piece's own in one tensor.
    fn is_followed_by(&self, next: &Self) -> bool {
        self.tensor.id() == next.tensor.id()
            && (self.rows.groups, next.rows.groups, self.rows.range.end) == (1, 1, next.rows.range.start)
    }

    /// The rows of all pieces as one tensor: a view where they follow each other in one, and a copy otherwise.
    fn concat(pieces: impl IntoIterator<Item = Self>) -> Result<Tensor> {
        let mut joined: Vec<Self> = Vec::new();
        for piece in pieces {
            match joined.last_mut() {
                Some(last) if last.is_followed_by(&piece) => last.rows.range.end = piece.rows.range.end,
                _ => joined.push(piece),
            }
        }
        let mut tensors = joined.iter().map(|piece| piece.rows.of(&piece.tensor)).collect::<Result<Vec<_>>>()?;
        if tensors.len() == 1 { Ok(tensors.remove(0)) } else { Tensor::cat(&tensors, 0) }
    }
}

impl ProjectionRows {
    /// Without a bias.
    pub fn of(weight: Piece) -> Self {
        Self { weight: vec![weight], bias: Vec::new() }
    }

    /// More rows, of the weight or of the bias.
    pub fn push(&mut self, piece: Piece, is_bias: bool) {
        if is_bias { &mut self.bias } else { &mut self.weight }.push(piece);
    }

    /// Whether there is no such projection.
    pub fn is_empty(&self) -> bool {
        self.weight.is_empty()
    }

    /// The width of the output.
    pub fn len(&self) -> usize {
        self.weight.iter().map(|piece| piece.rows.count()).sum()
    }

    /// The tensor (.., in) that holds the first of the rows.
    pub fn weight(&self) -> &Tensor {
        &self.weight[0].tensor
    }

    /// Whether the rows have a bias.
    pub fn has_bias(&self) -> bool {
        !self.bias.is_empty()
    }

    /// Whether training may change them, weights or biases, so that a copy would not stay the same.
    pub fn is_tracked(&self) -> bool {
        self.weight.iter().chain(&self.bias).any(|piece| piece.tensor.track_op())
    }

    /// With what variables hold now.
    pub fn freeze(&self) -> Result<Self> {
        let linear = Self::to_linear(&[self])?;
        let bias = linear.bias().map(frozen).transpose()?.map(Piece::whole);
        Ok(Self { weight: vec![Piece::whole(frozen(linear.weight())?)], bias: bias.into_iter().collect() })
    }

    /// The rows of several projections of inputs of one width as one linear layer, with what variables hold now.
    pub fn to_linear(projections: &[&Self]) -> Result<Linear> {
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
