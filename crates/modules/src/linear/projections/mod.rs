//! The projections of an attention layer. Each is some columns of the product with a weight, or a module of the caller.

mod adapted;
mod lora;
mod modules;
mod named;

pub use adapted::AdaptedLinear;
pub use lora::{IDLE_CALLS, LoraMatrices};
pub use modules::{ByProjection, Projection, ProjectionModule, ProjectionModules};
pub use named::{NamedUpdates, UpdatedRows, UpdatesOfCall};

use Projection::{Gate, Key, Output, Query, Value};

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::Linear;

use super::PackedLinear;
use crate::base::{Expect, Parameter, WeightAndBias, part};
use lora::LoraUpdate;

const OP: &str = "multi_head_attention";

/// A projection (B, T, in) to (B, T, out): some columns of the product with a weight. Projections of one input that
/// share a weight are views of one product.
#[derive(Debug, Clone)]
pub struct PackedProjection {
    weight: Arc<SharedWeight>,
    columns: Range<usize>,
    has_bias: bool,
}

/// The weight of one or more projections.
enum SharedWeight {
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
    fn product(&self, xs: &Tensor, columns: Range<usize>, residual: Option<&Tensor>) -> Result<Tensor> {
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
    fn freeze(&self) -> Result<Self> {
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
    fn shares_weight(&self, other: &Self) -> bool {
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
    fn rows(&self) -> Result<WeightAndBias> {
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

/// The projected inputs of a call. A layer replaces them by their heads, (B, H, T, D).
#[derive(Debug)]
pub struct Projected {
    /// (B, T_q, H·D).
    pub q: Tensor,
    /// Keys and values, if the call has inputs for them and the layer projects them.
    pub kv: Option<KeysAndValues>,
    /// (B, T_q, H·D_v) or (B, T_q, H).
    pub gate: Option<Tensor>,
}

/// Projected keys and values.
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
