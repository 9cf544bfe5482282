//! The projections of an attention layer. Each is some columns of the product with a weight, or a module of the caller.

mod adapted;
mod lora;
mod modules;
mod named;
mod packed;

pub use adapted::AdaptedLinear;
pub use lora::{IDLE_CALLS, LoraMatrices};
pub use modules::{ByProjection, Projection, ProjectionModule, ProjectionModules};
pub use named::{NamedUpdates, UpdatedRows, UpdatesOfCall};
pub use packed::{Outputs, PackedProjection};

use Projection::{Gate, Key, Output, Query, Value};

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::Linear;

use crate::base::{Expect, Parameter, WeightAndBias};
use lora::LoraUpdate;
use packed::SharedWeight;

const OP: &str = "multi_head_attention";

/// The projections of a layer: of queries, and all others that the config has. With a key projection and no value
/// projection, the projected keys are the values too.
#[derive(Debug, Clone)]
pub struct Projections {
    all: ByProjection<PackedProjection>,
    /// Low-rank updates, which are added to the outputs.
    updates: Vec<LoraUpdate>,
    /// Low-rank updates of which each sequence chooses one.
    named: NamedUpdates,
    /// The dtype of the weights, or of the modules' outputs.
    pub dtype: DType,
    /// The device of the weights, or of the modules' outputs.
    pub device: Device,
}

/// Other values of the weight or the bias of a projection.
#[derive(Debug, Clone, Default)]
pub struct ReplacedRows {
    /// The weight, (out, in), if it is replaced.
    pub weight: Option<Parameter>,
    /// The bias, (out,), if it is replaced.
    pub bias: Option<Parameter>,
}

/// The projected inputs of a call, whose heads are columns.
#[derive(Debug)]
pub struct Projected {
    /// (B, T_q, H·D).
    pub q: Tensor,
    /// Keys and values, if the call has inputs for them and the layer projects them.
    pub kv: Option<KeysAndValues>,
    /// (B, T_q, H·D_v) or (B, T_q, H).
    pub gate: Option<Tensor>,
}

/// Projected keys and values, whose heads are columns.
#[derive(Debug, Clone)]
pub struct KeysAndValues {
    /// (B, T_kv, H_kv·D).
    pub keys: Tensor,
    /// (B, T_kv, H_kv·D_v).
    pub values: Tensor,
}

impl Projections {
    /// Creates the projections of loaded weights in a dtype on a device. Weights that are tracked for gradients are
    /// read in each call, others are packed now.
    ///
    /// # Errors
    /// If a packed weight cannot be allocated.
    pub fn new(loaded: &ByProjection<WeightAndBias>, dtype: DType, device: &Device) -> Result<Self> {
        Ok(Self::without_updates(Self::pack(loaded)?, dtype, device))
    }

    /// Packs weights. Projections of inputs of one width share one weight.
    fn pack(loaded: &ByProjection<WeightAndBias>) -> Result<ByProjection<PackedProjection>> {
        let mut all = ByProjection::new();
        let projections: Vec<_> = loaded.keys().copied().collect();
        let width = |projection: &Projection| loaded[projection].weight.first().dims()[1];
        // Projections are in the order of queries, keys, values, gate and output.
        for run in projections.chunk_by(|own, next| *next != Output && width(own) == width(next)) {
            let rows: Vec<_> = run.iter().map(|projection| &loaded[projection]).collect();
            all.extend(run.iter().copied().zip(PackedProjection::of_rows(&rows)?));
        }
        Ok(all)
    }

    /// Returns a copy with the current values of variables, packed. Modules of the caller are kept.
    ///
    /// # Errors
    /// If a packed weight cannot be allocated.
    pub fn freeze(&self) -> Result<Self> {
        let mut frozen = ByProjection::new();
        for (projection, own) in &self.all {
            if let SharedWeight::Tracked(rows) = &*own.weight {
                frozen.insert(*projection, rows.freeze()?);
            }
        }
        let mut all = self.all.clone();
        // All at once, so that the projections of one input share a weight again.
        all.extend(Self::pack(&frozen)?);
        let updates = self.updates.iter().map(LoraUpdate::freeze).collect::<Result<_>>()?;
        Ok(Self { all, updates, named: self.named.freeze()?, ..self.clone() })
    }

    /// Returns projections that have other weights or biases, which `replaced` has in the dtype of the projections.
    /// Weights that share nothing with them stay as they are; those that do are packed anew, without low-rank updates.
    ///
    /// # Errors
    /// For a module of the caller, whose weights are unknown, and if a weight cannot be allocated.
    pub fn with_replaced(&self, replaced: &ByProjection<ReplacedRows>) -> Result<Self> {
        let mut all = self.all.clone();
        let entries: Vec<_> = self.all.iter().collect();
        for run in entries.chunk_by(|own, next| own.1.shares_weight(next.1)) {
            if !run.iter().any(|(projection, _)| replaced.contains_key(projection)) {
                continue;
            }
            let mut loaded = ByProjection::new();
            for (projection, own) in run {
                let mut rows = own.rows()?;
                if let Some(ReplacedRows { weight, bias }) = replaced.get(projection).cloned() {
                    rows.weight = weight.unwrap_or(rows.weight);
                    rows.bias = bias.or(rows.bias);
                }
                loaded.insert(**projection, rows);
            }
            all.extend(Self::pack(&loaded)?);
        }
        Ok(Self::without_updates(all, self.dtype, &self.device))
    }

    /// Creates projections of modules. `width` returns the number of outputs of a projection, 0 if the config does not
    /// have it. The modules' outputs are in `dtype` on `device`.
    ///
    /// # Errors
    /// If a projection of the config has no module, or a module belongs to no projection of the config.
    pub fn from_modules(
        width: impl Fn(Projection) -> usize,
        modules: &ProjectionModules,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let mut own = Self::without_updates(ByProjection::new(), dtype, device);
        for projection in Projection::ALL {
            let noun = projection.noun();
            match (modules.0.get(&projection).cloned(), width(projection)) {
                (None, 0) => {}
                (None, _) => bail!("[{OP}] there is no module for the {noun} of the config"),
                (Some(_), 0) => bail!("[{OP}] there is a module for the {noun}, which the config does not have"),
                (Some(module), width) => own.set(projection, width, module),
            }
        }
        Ok(own)
    }

    /// Sets the module of a projection with `width` outputs. Each output is checked. The module is not called for an
    /// empty output.
    fn set(&mut self, projection: Projection, width: usize, module: ProjectionModule) {
        let dtype = self.dtype;
        let device = self.device.clone();
        let own = module.clone();
        let checked = move |xs: &Tensor| {
            let (b, t, _) = xs.dims3()?;
            let expected = [b, t, width];
            if expected.contains(&0) {
                return Tensor::zeros(&expected, dtype, &device);
            }
            let ys = own.forward(&xs.contiguous()?)?;
            let name = format!("the output of the {projection} projection");
            let output = Expect::one(OP, &name, &ys).sizes(&expected)?;
            output.dtype(dtype, "the weights'")?.same_device("the weights", &device)?;
            Ok(ys)
        };
        let weight = Arc::new(SharedWeight::Module { projection, module, checked: Arc::new(checked) });
        self.all.insert(projection, PackedProjection { weight, columns: 0..width, has_bias: false });
    }

    /// Creates projections of packed weights, for inputs in f32.
    pub fn of_columns(columns: Vec<(Projection, PackedProjection)>, device: &Device) -> Self {
        Self::without_updates(columns.into_iter().collect(), DType::F32, device)
    }

    /// Returns projections that no low-rank update changes.
    fn without_updates(all: ByProjection<PackedProjection>, dtype: DType, device: &Device) -> Self {
        Self { all, updates: Vec::new(), named: NamedUpdates::default(), dtype, device: device.clone() }
    }

    /// Replaces a projection by the module that `change` makes of it. The module has `width` outputs.
    ///
    /// # Errors
    /// For a projection that the config does not have, and the errors of `change`.
    pub fn map(
        mut self,
        width: usize,
        projection: Projection,
        change: impl FnOnce(ProjectionModule) -> Result<ProjectionModule>,
    ) -> Result<Self> {
        let Some(own) = self.all.remove(&projection) else {
            bail!("[{OP}] there is no {} in the config, expected a projection of the layer", projection.noun())
        };
        let current = match &*own.weight {
            SharedWeight::Module { module, .. } => module.clone(),
            _ => Arc::new(own),
        };
        self.set(projection, width, change(current)?);
        Ok(self)
    }

    /// Returns the first projection of keys or values that is a module of the caller.
    pub fn module_of_caller(&self) -> Option<Projection> {
        let is_module = |projection: &Projection| {
            self.all.get(projection).is_some_and(|own| matches!(&*own.weight, SharedWeight::Module { .. }))
        };
        [Key, Value].into_iter().find(is_module)
    }

    /// Returns whether queries or keys are projected by modules of the caller or have low-rank updates, which may
    /// change.
    pub fn may_change(&self) -> bool {
        let is_module = |own: &PackedProjection| matches!(&*own.weight, SharedWeight::Module { .. });
        let has_module = |projection: &Projection| self.all.get(projection).is_some_and(is_module);
        let has_update = |projection: &Projection| self.updates.iter().any(|update| update.changes(*projection));
        [Query, Key].iter().any(|projection| has_module(projection) || has_update(projection))
    }

    /// Returns the low-rank updates of which each sequence chooses one.
    pub fn named_updates(&self) -> &NamedUpdates {
        &self.named
    }

    /// Replaces the low-rank updates of which each sequence chooses one.
    pub fn with_named_updates(mut self, named: NamedUpdates) -> Self {
        self.named = named;
        self
    }

    /// Computes some projections. Projections of one input that share a weight are views of one product. Low-rank
    /// updates drop entries of the input if it is a call of training.
    fn project(&self, inputs: &[ProjectionInput], train: bool) -> Result<ByProjection<Tensor>> {
        let mut projected = ByProjection::new();
        for run in inputs.chunk_by(|own, next| own.xs.id() == next.xs.id() && own.chosen == next.chosen) {
            let mut kinds = Vec::new();
            let mut weights = Vec::new();
            for input in run {
                if let Some(weight) = self.all.get(&input.projection) {
                    kinds.push(input.projection);
                    weights.push(weight);
                }
            }
            let mut outputs = PackedProjection::project(&weights, run[0].xs)?;
            for update in &self.updates {
                update.add_to(&kinds, &mut outputs, run[0].xs, train)?;
            }
            self.named.add_to(&kinds, &mut outputs, run[0].xs, run[0].chosen, train)?;
            projected.extend(kinds.into_iter().zip(outputs));
        }
        Ok(projected)
    }

    /// Projects queries and their gate, and keys and values if the call has inputs for them. `key_value` are the inputs
    /// of keys and of values.
    pub fn query_key_value(
        &self,
        queries: &Tensor,
        key_value: Option<[&Tensor; 2]>,
        updates: UpdatesOfCall,
    ) -> Result<Projected> {
        let UpdatesOfCall { train, queries: chosen, keys: chosen_by_keys } = updates;
        let mut inputs = Vec::new();
        for projection in [Query, Gate] {
            inputs.push(ProjectionInput { projection, xs: queries, chosen });
        }
        if let Some([keys, values]) = key_value {
            inputs.push(ProjectionInput { projection: Key, xs: keys, chosen: chosen_by_keys });
            inputs.push(ProjectionInput { projection: Value, xs: values, chosen: chosen_by_keys });
        }
        let mut projected = self.project(&inputs, train)?;
        let Some(q) = projected.remove(&Query) else { bail!("[{OP}] expected a query projection") };
        let gate = projected.remove(&Gate);
        Ok(Projected { q, kv: keys_and_values(projected), gate })
    }

    /// Projects keys and values alone, as outside of training; `None` if the layer has no such projections.
    pub fn key_value(&self, keys: &Tensor, values: &Tensor) -> Result<Option<KeysAndValues>> {
        let inputs = [
            ProjectionInput { projection: Key, xs: keys, chosen: &[] },
            ProjectionInput { projection: Value, xs: values, chosen: &[] },
        ];
        Ok(keys_and_values(self.project(&inputs, false)?))
    }

    /// Applies the output projection to merged heads (B, T_q, H·D_v), if the layer has one, and adds a residual (B,
    /// T_q, out_dim), if there is one. `chosen` are the rows that have the low-rank update of a name. Updates drop
    /// entries of the input if it is a call of training.
    pub fn output(
        &self,
        merged: Tensor,
        residual: Option<&Tensor>,
        chosen: &[UpdatedRows],
        train: bool,
    ) -> Result<Tensor> {
        match (self.all.get(&Output), residual) {
            (Some(output), _) => {
                let mut outputs = [output.weight.product(&merged, output.columns.clone(), residual)?];
                for update in &self.updates {
                    update.add_to(&[Output], &mut outputs, &merged, train)?;
                }
                self.named.add_to(&[Output], &mut outputs, &merged, chosen, train)?;
                let [projected] = outputs;
                Ok(projected)
            }
            (None, Some(residual)) => merged + residual,
            (None, None) => Ok(merged),
        }
    }

    /// Returns the projections as linear layers, with the current values of variables: q (H·D, E), k (H_kv·D, kdim),
    /// v (H_kv·D_v, vdim), o (out_dim, H·D_v), gate (H·D_v or H, E). Projections that share a weight are views of it.
    ///
    /// # Errors
    /// For a module of the caller, whose weights are unknown, and if a weight cannot be allocated.
    pub fn to_linears(&self) -> Result<ByProjection<Linear>> {
        let all: Vec<_> = self.all.values().collect();
        Ok(self.all.keys().copied().zip(PackedProjection::to_linears(&all)?).collect())
    }
}

/// A projection and its input (B, T, in).
struct ProjectionInput<'a> {
    projection: Projection,
    xs: &'a Tensor,
    /// The rows that have the low-rank update of a name.
    chosen: &'a [UpdatedRows],
}

/// Returns projected keys and values. Without a value projection the projected keys are the values too.
fn keys_and_values(mut projected: ByProjection<Tensor>) -> Option<KeysAndValues> {
    let keys = projected.remove(&Key)?;
    let values = projected.remove(&Value).unwrap_or_else(|| keys.clone());
    Some(KeysAndValues { keys, values })
}
