//! Projections as columns of products with packed weights.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::Linear;

use super::OP;
use super::modules::{Projection, ProjectionModule};
use crate::base::{Parameter, WeightAndBias, part};
use crate::linear::PackedLinear;

/// A projection (B, T, in) to (B, T, out): some columns of the product with a weight. Projections of one input that
/// share a weight are views of one product.
#[derive(Debug, Clone)]
pub struct PackedProjection {
    pub(super) weight: Arc<SharedWeight>,
    pub(super) columns: Range<usize>,
    pub(super) has_bias: bool,
}

/// The weight of one or more projections.
pub(super) enum SharedWeight {
    Packed(PackedLinear),
    /// Rows of variables, which each call reads.
    Tracked(WeightAndBias),
    /// A module of the caller.
    Module {
        projection: Projection,
        module: ProjectionModule,
        /// The module with checks of its output.
        checked: ProjectionModule,
    },
}

/// The outputs of one projection in a weight that several share.
#[derive(Debug, Clone, Copy)]
pub struct Outputs {
    /// The number of outputs.
    pub count: usize,
    /// Whether the projection has a bias.
    pub has_bias: bool,
}

impl fmt::Debug for SharedWeight {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Packed(weight) => weight.fmt(f),
            Self::Tracked(rows) => rows.fmt(f),
            Self::Module { projection, .. } => write!(f, "a module for the {projection}"),
        }
    }
}

impl SharedWeight {
    /// Computes some of the outputs, plus a residual (B, T, out) if there is one.
    pub(super) fn product(&self, xs: &Tensor, columns: Range<usize>, residual: Option<&Tensor>) -> Result<Tensor> {
        match (self, residual) {
            (Self::Packed(weight), _) => weight.product(xs, columns, residual),
            (Self::Tracked(rows), _) => PackedLinear::try_from(rows.to_linear()?)?.product(xs, columns, residual),
            (Self::Module { checked, .. }, None) => checked.forward(xs),
            (Self::Module { checked, .. }, Some(residual)) => checked.forward(xs)? + residual,
        }
    }
}

impl PackedProjection {
    /// Creates projections of inputs of one width. They share one packed weight, or have a weight each if one of them
    /// is tracked for gradients, or has codes that cannot be in one weight with the others.
    pub fn of_rows(all: &[&WeightAndBias]) -> Result<Vec<Self>> {
        let is_tracked = all.iter().any(|rows| rows.is_tracked());
        if is_tracked && all.len() > 1 {
            return Ok(all.chunks(1).map(Self::of_rows).collect::<Result<Vec<_>>>()?.concat());
        }
        let joined = WeightAndBias::join(all)?;
        if all.len() > 1 && joined.weight.has_codes() && joined.weight.quantized()?.is_none() {
            return Ok(all.chunks(1).map(Self::of_rows).collect::<Result<Vec<_>>>()?.concat());
        }
        let outputs = all.iter().map(|rows| Outputs { count: rows.weight.num_rows(), has_bias: rows.bias.is_some() });
        let weight = if is_tracked { SharedWeight::Tracked(joined) } else { SharedWeight::Packed(joined.try_into()?) };
        Ok(Self::columns_of(weight, outputs))
    }

    /// Returns a copy with the current values of variables, packed. A module of the caller is kept.
    pub(super) fn freeze(&self) -> Result<Self> {
        match &*self.weight {
            SharedWeight::Tracked(rows) => Ok(Self::of_rows(&[&rows.freeze()?])?.remove(0)),
            SharedWeight::Packed(_) | SharedWeight::Module { .. } => Ok(self.clone()),
        }
    }

    /// Splits a packed weight into projections, whose outputs follow each other.
    pub fn split(weight: PackedLinear, outputs: impl IntoIterator<Item = Outputs>) -> Vec<Self> {
        Self::columns_of(SharedWeight::Packed(weight), outputs)
    }

    fn columns_of(weight: SharedWeight, outputs: impl IntoIterator<Item = Outputs>) -> Vec<Self> {
        let shared = Arc::new(weight);
        let mut projections = Vec::new();
        let mut start = 0;
        for Outputs { count, has_bias } in outputs {
            projections.push(Self { weight: shared.clone(), columns: start..start + count, has_bias });
            start += count;
        }
        projections
    }

    /// Returns whether two projections are columns of one product.
    pub(super) fn shares_weight(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.weight, &other.weight)
    }

    /// Returns the projections as linear layers, with the current values of variables. Projections that share a weight
    /// are views of it.
    ///
    /// # Errors
    /// For a module of the caller, whose weights are unknown, and if a weight cannot be allocated.
    pub fn to_linears(all: &[&Self]) -> Result<Vec<Linear>> {
        let mut linears = Vec::with_capacity(all.len());
        for run in all.chunk_by(|own, next| own.shares_weight(next)) {
            let whole = match &*run[0].weight {
                SharedWeight::Packed(weight) => weight.to_linear()?,
                SharedWeight::Tracked(rows) => rows.to_linear()?,
                SharedWeight::Module { projection, .. } => {
                    bail!("[{OP}] the {projection} projection is a module of the caller, whose weights are unknown")
                }
            };
            for Self { columns, has_bias, .. } in run {
                let own = |tensor: &Tensor| tensor.narrow(0, columns.start, columns.len());
                let bias = whole.bias().filter(|_| *has_bias).map(own).transpose()?;
                linears.push(Linear::new(own(whole.weight())?, bias));
            }
        }
        Ok(linears)
    }

    /// Returns the weight and the bias: variables as they are, which training may change, and others with their values.
    pub(super) fn rows(&self) -> Result<WeightAndBias> {
        if let SharedWeight::Tracked(rows) = &*self.weight {
            return Ok(rows.clone());
        }
        let linear = Self::to_linears(&[self])?.remove(0);
        Ok(WeightAndBias { weight: linear.weight().clone().into(), bias: linear.bias().cloned().map(Parameter::from) })
    }

    /// Projects one input. The outputs of projections that share a weight are views of one product.
    pub fn project(all: &[&Self], xs: &Tensor) -> Result<Vec<Tensor>> {
        let mut outputs = Vec::with_capacity(all.len());
        for run in all.chunk_by(|own, next| own.shares_weight(next)) {
            let first = run[0];
            let last = run[run.len() - 1];
            let start = first.columns.start;
            let product = first.weight.product(xs, start..last.columns.end, None)?;
            for Self { columns, .. } in run {
                // A part of an empty tensor would be new zeros without a gradient.
                let is_whole = columns.len() == product.dim(2)?;
                let own = columns.start - start..columns.end - start;
                outputs.push(if is_whole { product.clone() } else { part(&product, 2, own)? });
            }
        }
        Ok(outputs)
    }
}

impl Module for PackedProjection {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.weight.product(xs, self.columns.clone(), None)
    }
}
