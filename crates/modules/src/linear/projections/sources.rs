//! The places of a layer's projections, and modules for them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use candle_core::Module;

/// One of a layer's projections. Those of one input lie in this order in a weight that they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Projection {
    /// (B, T_q, embed_dim) to (B, T_q, H·D).
    Query,
    /// (B, T_q, embed_dim) to (B, T_q, H·D_v), or (B, T_q, H) for a gate of whole heads
    /// ([`OutputGate`](crate::gate::OutputGate)).
    Gate,
    /// (B, T_kv, kdim) to (B, T_kv, H_kv·D).
    Key,
    /// (B, T_kv, vdim) to (B, T_kv, H_kv·D_v).
    Value,
    /// (B, T_q, H·D_v) to (B, T_q, out_dim).
    Output,
}

impl Projection {
    pub(super) const ALL: [Self; 5] = [Self::Query, Self::Gate, Self::Key, Self::Value, Self::Output];

    /// For errors.
    pub(super) fn noun(self) -> String {
        if self == Self::Gate { self.to_string() } else { format!("{self} projection") }
    }
}

/// In lower case.
impl fmt::Display for Projection {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// What there is of something for each projection.
pub type ByPlace<T> = BTreeMap<Projection, T>;

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
        Self::of_query(query).with_key(key).with(Projection::Value, value)
    }

    /// A query projection alone, for keys and values of an earlier layer.
    pub fn of_query(query: impl Module + Send + Sync + 'static) -> Self {
        Self::default().with(Projection::Query, query)
    }

    /// With a key projection, whose output may be the values too.
    pub fn with_key(self, key: impl Module + Send + Sync + 'static) -> Self {
        self.with(Projection::Key, key)
    }

    /// With an output projection.
    pub fn with_output(self, output: impl Module + Send + Sync + 'static) -> Self {
        self.with(Projection::Output, output)
    }

    /// With the projection of an output gate, wherever a checkpoint may keep it.
    pub fn with_gate(self, gate: impl Module + Send + Sync + 'static) -> Self {
        self.with(Projection::Gate, gate)
    }

    fn with(mut self, place: Projection, module: impl Module + Send + Sync + 'static) -> Self {
        self.0.insert(place, Arc::new(module));
        self
    }
}

impl fmt::Debug for ProjectionModules {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_tuple("ProjectionModules").field(&self.0.keys()).finish()
    }
}
