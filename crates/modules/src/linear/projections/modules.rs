//! The kinds of projections of a layer, and modules of the caller for them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use candle_core::Module;

/// A projection of an attention layer. In a shared weight, the projections of one input have this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Projection {
    /// The query projection, (B, T_q, embed_dim) to (B, T_q, H·D).
    Query,
    /// The projection of an [`OutputGate`](crate::gate::OutputGate), (B, T_q, embed_dim) to (B, T_q, H·D_v), or to
    /// (B, T_q, H) with one number for each head.
    Gate,
    /// The key projection, (B, T_kv, kdim) to (B, T_kv, H_kv·D).
    Key,
    /// The value projection, (B, T_kv, vdim) to (B, T_kv, H_kv·D_v).
    Value,
    /// The output projection, (B, T_q, H·D_v) to (B, T_q, out_dim).
    Output,
}

impl Projection {
    pub(super) const ALL: [Self; 5] = [Self::Query, Self::Gate, Self::Key, Self::Value, Self::Output];

    /// Returns the name of the projection in errors.
    pub(super) fn noun(self) -> String {
        if self == Self::Gate { self.to_string() } else { format!("{self} projection") }
    }
}

/// Writes the name in lower case.
impl fmt::Display for Projection {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// A map from projections to values.
pub type ByProjection<T> = BTreeMap<Projection, T>;

/// A module that computes a projection.
pub type ProjectionModule = Arc<dyn Module + Send + Sync>;

/// Modules for all projections of a layer, with their biases, for `MultiHeadAttention::from_modules`.
#[derive(Clone, Default)]
#[must_use]
pub struct ProjectionModules(pub(super) ByProjection<ProjectionModule>);

impl ProjectionModules {
    /// Sets query, key and value projections, without an output projection.
    pub fn new(
        query: impl Module + Send + Sync + 'static,
        key: impl Module + Send + Sync + 'static,
        value: impl Module + Send + Sync + 'static,
    ) -> Self {
        Self::of_query(query).with_key(key).with(Projection::Value, value)
    }

    /// Sets a query projection alone, for a layer that reads keys and values of an earlier layer.
    pub fn of_query(query: impl Module + Send + Sync + 'static) -> Self {
        Self::default().with(Projection::Query, query)
    }

    /// Sets a key projection. Without a value projection, its outputs are the values too.
    pub fn with_key(self, key: impl Module + Send + Sync + 'static) -> Self {
        self.with(Projection::Key, key)
    }

    /// Sets an output projection.
    pub fn with_output(self, output: impl Module + Send + Sync + 'static) -> Self {
        self.with(Projection::Output, output)
    }

    /// Sets the projection of an output gate, for both layouts of [`GateLayout`](crate::gate::GateLayout).
    pub fn with_gate(self, gate: impl Module + Send + Sync + 'static) -> Self {
        self.with(Projection::Gate, gate)
    }

    fn with(mut self, projection: Projection, module: impl Module + Send + Sync + 'static) -> Self {
        self.0.insert(projection, Arc::new(module));
        self
    }
}

impl fmt::Debug for ProjectionModules {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_tuple("ProjectionModules").field(&self.0.keys()).finish()
    }
}
