//! What a layer's projections are made from: rows of tensors, wherever a checkpoint keeps them, or modules.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::Linear;

use crate::base::Parameter;

/// One of a layer's projections. Those of one input lie in this order in a weight that they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ProjectionPlace {
    /// (B, T_q, embed_dim) to (B, T_q, H·D).
    Query,
    /// (B, T_q, embed_dim) to (B, T_q, H·D_v), or (B, T_q, H) for a gate of whole heads
    /// ([`OutputGate`](crate::gate::OutputGate)).
    Gate,
    /// (B, T_kv, key_size) to (B, T_kv, H_kv·D).
    Key,
    /// (B, T_kv, value_size) to (B, T_kv, H_kv·D_v).
    Value,
    /// (B, T_q, H·D_v) to (B, T_q, out_dim).
    Output,
}

impl ProjectionPlace {
    pub(super) const ALL: [Self; 5] = [Self::Query, Self::Gate, Self::Key, Self::Value, Self::Output];

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

/// What there is of something for each projection.
pub type ByPlace<T> = BTreeMap<ProjectionPlace, T>;

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
        self.0.insert(place, Arc::new(module));
        self
    }
}

impl fmt::Debug for ProjectionModules {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_tuple("ProjectionModules").field(&self.0.keys()).finish()
    }
}

/// The rows of one projection, in the order of its outputs: one tensor, one for each head, or some rows of a packed
/// one. What variables hold is read when it is asked for.
#[derive(Debug, Clone, Default)]
pub struct ProjectionRows {
    /// (out, in); empty where there is no such projection.
    pub weight: Parameter,
    /// (out,).
    pub bias: Option<Parameter>,
}

impl ProjectionRows {
    /// More rows, of the weight or of the bias.
    pub fn push(&mut self, more: Parameter, is_bias: bool) {
        if is_bias { self.bias.get_or_insert_default() } else { &mut self.weight }.extend(more);
    }

    /// Whether training may change them, weights or biases, so that a copy would not stay the same.
    pub fn is_tracked(&self) -> bool {
        self.weight.is_tracked() || self.bias.as_ref().is_some_and(Parameter::is_tracked)
    }

    /// With what variables hold now.
    pub fn freeze(&self) -> Result<Self> {
        let bias = self.bias.as_ref().map(Parameter::freeze).transpose()?;
        Ok(Self { weight: self.weight.freeze()?, bias })
    }

    /// The rows of several projections of inputs of one width as one linear layer, with what variables hold now.
    pub fn to_linear(projections: &[&Self]) -> Result<Linear> {
        let weight = projections.iter().map(|rows| rows.weight.clone()).collect::<Parameter>().tensor()?;
        if projections.iter().all(|rows| rows.bias.is_none()) {
            return Ok(Linear::new(weight, None));
        }
        let bias = |rows: &&Self| match &rows.bias {
            Some(bias) => Ok(bias.clone()),
            // Adding zero changes no number.
            None => Ok(Tensor::zeros(rows.weight.count(), weight.dtype(), weight.device())?.into()),
        };
        let bias = projections.iter().map(bias).collect::<Result<Parameter>>()?.tensor()?;
        Ok(Linear::new(weight, Some(bias)))
    }
}
