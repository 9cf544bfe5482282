//! Low-rank updates of projections: LoRA (<https://arxiv.org/abs/2106.09685>).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::Linear;
use candle_nn::ops::dropout;

use super::modules::{ByProjection, Projection};
use super::{PackedProjection, Projections};
use crate::base::{Parameter, WeightAndBias, accumulation_dtype, frozen};

/// The matrices of a low-rank update of one module, which computes one projection or several.
#[derive(Debug, Clone)]
pub struct LoraMatrices {
    /// A, (r, in).
    pub a: Parameter,
    /// The rows of B (out, r) of each projection.
    pub b: ByProjection<Parameter>,
    /// The factor of B A.
    pub scaling: f64,
    /// The probability with which an entry of the input is dropped in training.
    pub dropout: f64,
}

/// A low-rank update: `scaling · B A dropout(x)` is added to the outputs of projections.
#[derive(Debug, Clone)]
pub(super) struct LoraUpdate {
    a: PackedProjection,
    b: ByProjection<PackedProjection>,
    dtype: DType,
    scaling: f64,
    dropout: f32,
    /// The number of calls of training.
    training_calls: Arc<AtomicU32>,
}

/// The update of one of several outputs.
struct ChangedOutput {
    /// The index of the output.
    index: usize,
    /// (B, T, out), in the dtype of the matrices.
    update: Tensor,
}

/// The number of calls of training after which an update should have changed: more than the calls before the first step
/// of an optimizer in most programs that add up gradients.
pub const IDLE_CALLS: u32 = 64;

/// Returns a projection by the rows of a matrix.
fn unbiased(rows: &Parameter) -> WeightAndBias {
    WeightAndBias { weight: rows.clone(), bias: None }
}

impl LoraUpdate {
    /// Creates an update. Matrices that are tracked for gradients are read in each call, others are packed now.
    ///
    /// # Errors
    /// If a packed matrix cannot be allocated.
    pub fn new(matrices: &LoraMatrices) -> Result<Self> {
        let rows: Vec<_> = matrices.b.values().map(unbiased).collect();
        let packed = PackedProjection::of_rows(&Vec::from_iter(&rows))?;
        Ok(Self {
            a: PackedProjection::of_rows(&[&unbiased(&matrices.a)])?.remove(0),
            b: matrices.b.keys().copied().zip(packed).collect(),
            dtype: matrices.a.first().dtype(),
            scaling: matrices.scaling,
            dropout: matrices.dropout as f32,
            training_calls: Arc::default(),
        })
    }

    /// Returns whether the update changes a projection.
    pub fn changes(&self, projection: Projection) -> bool {
        self.b.contains_key(&projection)
    }

    /// Adds the update to the outputs (B, T, out) of the projections that it changes, of which `kinds` has one for each
    /// output. `xs` is their input (B, T, in).
    pub fn add_to(&self, kinds: &[Projection], outputs: &mut [Tensor], xs: &Tensor, train: bool) -> Result<()> {
        for ChangedOutput { index, update } in self.changed_outputs(kinds, xs, train)? {
            outputs[index] = (&outputs[index] + update.to_dtype(outputs[index].dtype())?)?;
        }
        Ok(())
    }

    /// Adds the update as [`add_to`](Self::add_to) does, to some of the B · T rows alone.
    pub fn add_to_rows(
        &self,
        kinds: &[Projection],
        outputs: &mut [Tensor],
        xs: &Tensor,
        rows: &[u32],
        train: bool,
    ) -> Result<()> {
        let (b, t, width) = xs.dims3()?;
        if rows.len() == b * t {
            return self.add_to(kinds, outputs, xs, train);
        }
        if rows.is_empty() || !kinds.iter().any(|kind| self.changes(*kind)) {
            return Ok(());
        }
        let index = Tensor::new(rows, xs.device())?;
        let own = xs.reshape((b * t, width))?.index_select(&index, 0)?.unsqueeze(0)?;
        for ChangedOutput { index: n, update } in self.changed_outputs(kinds, &own, train)? {
            let output = &outputs[n];
            let rows_of_output = output.reshape((b * t, output.dim(2)?))?;
            let update = update.squeeze(0)?.to_dtype(output.dtype())?;
            outputs[n] = rows_of_output.index_add(&index, &update, 0)?.reshape(output.shape())?;
        }
        Ok(())
    }

    /// Computes the update of the outputs of the projections that it changes, for their input (B, T, in).
    fn changed_outputs(&self, kinds: &[Projection], xs: &Tensor, train: bool) -> Result<Vec<ChangedOutput>> {
        let mut indices = Vec::new();
        let mut matrices = Vec::new();
        for (index, projection) in kinds.iter().enumerate() {
            if let Some(b) = self.b.get(projection) {
                indices.push(index);
                matrices.push(b);
            }
        }
        if matrices.is_empty() || xs.elem_count() == 0 {
            return Ok(Vec::new());
        }
        let mut input = xs.to_dtype(self.dtype)?;
        if train && self.dropout > 0.0 {
            input = dropout(&input, self.dropout)?;
        }
        let products = PackedProjection::project(&matrices, &self.a.forward(&input)?)?;
        let mut changed = Vec::with_capacity(indices.len());
        for (index, product) in indices.into_iter().zip(products) {
            changed.push(ChangedOutput { index, update: (product * self.scaling)? });
        }
        Ok(changed)
    }

    /// Counts a call of training. Returns whether it is the [`IDLE_CALLS`]th, and B is a variable and still zero, as it
    /// is before the first step of an optimizer.
    fn is_idle_in_training(&self) -> Result<bool> {
        if self.training_calls.fetch_add(1, Ordering::Relaxed) + 1 != IDLE_CALLS {
            return Ok(false);
        }
        for b in self.b.values() {
            let rows = PackedProjection::to_linears(&[b])?.remove(0);
            let weight = rows.weight();
            if !weight.track_op() || weight.elem_count() == 0 {
                return Ok(false);
            }
            if weight.detach().abs()?.max_all()?.to_dtype(DType::F32)?.to_scalar::<f32>()? > 0.0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Adds `scaling · B A` to the weights of the projections that the update changes.
    fn add_to_weights(&self, linears: &mut ByProjection<Linear>) -> Result<()> {
        let a = PackedProjection::to_linears(&[&self.a])?.remove(0);
        for (projection, b) in &self.b {
            let Some(linear) = linears.get_mut(projection) else { continue };
            let b = PackedProjection::to_linears(&[b])?.remove(0);
            let weight = linear.weight();
            let dtype = accumulation_dtype(weight.dtype());
            let factor = |matrix: &Linear| matrix.weight().detach().to_dtype(dtype);
            let delta = (factor(&b)?.matmul(&factor(&a)?)? * self.scaling)?;
            let merged = (weight.detach().to_dtype(dtype)? + delta)?.to_dtype(weight.dtype())?;
            *linear = Linear::new(merged, linear.bias().cloned());
        }
        Ok(())
    }

    /// Returns a copy with the current values of variables, packed.
    pub fn freeze(&self) -> Result<Self> {
        let freeze = |own: &PackedProjection| -> Result<Parameter> {
            let linear = PackedProjection::to_linears(&[own])?.remove(0);
            Ok(Parameter::from(linear.weight().detach().force_contiguous()?))
        };
        let mut b = ByProjection::new();
        for (projection, own) in &self.b {
            b.insert(*projection, freeze(own)?);
        }
        let dropout = f64::from(self.dropout);
        Self::new(&LoraMatrices { a: freeze(&self.a)?, b, scaling: self.scaling, dropout })
    }
}

impl Projections {
    /// Adds a low-rank update.
    ///
    /// # Errors
    /// If a packed matrix cannot be allocated.
    pub fn with_update(mut self, matrices: &LoraMatrices) -> Result<Self> {
        self.updates.push(LoraUpdate::new(matrices)?);
        Ok(self)
    }

    /// Counts a call of training. Returns whether it is the [`IDLE_CALLS`]th of a low-rank update that is a variable
    /// and still zero, as it is before the first step of an optimizer.
    ///
    /// # Errors
    /// If the device fails.
    pub fn has_idle_update(&self) -> Result<bool> {
        let mut has_idle = false;
        for update in &self.updates {
            has_idle |= update.is_idle_in_training()?;
        }
        Ok(has_idle)
    }

    /// Returns projections without low-rank updates, which have the current values of the updates in their weights.
    /// Sums are computed in f32, or in f64 for weights in f64, and rounded once. Weights without an update are shared;
    /// variables are replaced by their current values.
    ///
    /// # Errors
    /// For a module of the caller that has an update, since its weights are unknown, and if a weight cannot be
    /// allocated.
    pub fn merge(&self) -> Result<Self> {
        let mut all = ByProjection::new();
        let entries: Vec<_> = self.all.iter().collect();
        for run in entries.chunk_by(|own, next| own.1.shares_weight(next.1)) {
            let is_changed = |projection| self.updates.iter().any(|update| update.changes(projection));
            if !run.iter().any(|(projection, _)| is_changed(**projection)) {
                for (projection, own) in run {
                    all.insert(**projection, own.freeze()?);
                }
                continue;
            }
            let own: Vec<_> = run.iter().map(|(_, own)| *own).collect();
            let kinds = run.iter().map(|(projection, _)| **projection);
            let mut linears: ByProjection<_> = kinds.zip(PackedProjection::to_linears(&own)?).collect();
            for update in &self.updates {
                update.add_to_weights(&mut linears)?;
            }
            let mut merged = Vec::new();
            for linear in linears.values() {
                let bias = linear.bias().map(frozen).transpose()?.map(Parameter::from);
                merged.push(WeightAndBias { weight: frozen(linear.weight())?.into(), bias });
            }
            let packed = PackedProjection::of_rows(&Vec::from_iter(&merged))?;
            all.extend(linears.keys().copied().zip(packed));
        }
        Ok(Self { all, updates: Vec::new(), ..self.clone() })
    }
}
