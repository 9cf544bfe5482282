//! The projections of a layer: each is columns of a product with a weight, or a module.

mod sources;

pub use sources::{ByPlace, Projection, ProjectionModule, ProjectionModules};

use Projection::{Gate, Key, Output, Query, Value};

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::Linear;

use super::PackedLinear;
use crate::base::{Expect, WeightAndBias, part};

const OP: &str = "multi_head_attention";

/// One projection, (B, T, in) to (B, T, out): columns of the product with a weight. Projections of one input that share
/// the weight are views of one product.
#[derive(Debug, Clone)]
pub struct PackedProjection {
    weight: Arc<Weight>,
    columns: Range<usize>,
    has_bias: bool,
}

enum Weight {
    Packed(PackedLinear),
    /// Rows of variables, which each call reads.
    Tracked(WeightAndBias),
    /// A module of the caller's.
    Module {
        place: Projection,
        /// Itself, and with checks of what it gives.
        own: ProjectionModule,
        checked: ProjectionModule,
    },
}

impl fmt::Debug for Weight {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Packed(weight) => weight.fmt(f),
            Self::Tracked(rows) => rows.fmt(f),
            Self::Module { place, .. } => write!(f, "a module for the {place}"),
        }
    }
}

impl Weight {
    /// Some of the outputs, plus a residual (B, T, out), if there is one.
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
    /// Projections of inputs of one width: columns of one weight that is packed, or each by itself where training
    /// changes one of them.
    pub fn of_rows(all: &[&WeightAndBias]) -> Result<Vec<Self>> {
        let is_tracked = all.iter().any(|rows| rows.is_tracked());
        if is_tracked && all.len() > 1 {
            return Ok(all.chunks(1).map(Self::of_rows).collect::<Result<Vec<_>>>()?.concat());
        }
        let rows = WeightAndBias::join(all)?;
        let weight = if is_tracked { Weight::Tracked(rows) } else { Weight::Packed(rows.to_linear()?.try_into()?) };
        Ok(Self::columns_of(weight, all.iter().map(|rows| (rows.weight.count(), rows.bias.is_some()))))
    }

    /// Of one weight that is packed, the columns of each part, which is so many outputs and may have a bias.
    pub fn split(weight: PackedLinear, parts: impl IntoIterator<Item = (usize, bool)>) -> Vec<Self> {
        Self::columns_of(Weight::Packed(weight), parts)
    }

    fn columns_of(weight: Weight, parts: impl IntoIterator<Item = (usize, bool)>) -> Vec<Self> {
        let (weight, mut end) = (Arc::new(weight), 0);
        let part = |(len, has_bias)| {
            end += len;
            Self { weight: weight.clone(), columns: end - len..end, has_bias }
        };
        parts.into_iter().map(part).collect()
    }

    /// As linear layers, with what variables hold now. Parts of one weight are views of it.
    ///
    /// # Errors
    /// For a module, whose weights nobody knows here, and if memory is short.
    pub fn to_linears(all: &[&Self]) -> Result<Vec<Linear>> {
        let mut linears = Vec::with_capacity(all.len());
        for run in all.chunk_by(|own, next| Arc::ptr_eq(&own.weight, &next.weight)) {
            let whole = match &*run[0].weight {
                Weight::Packed(weight) => weight.to_linear()?,
                Weight::Tracked(rows) => rows.to_linear()?,
                Weight::Module { place, .. } => bail!(
                    "[{OP}] the {place} projection is a module of the caller's, whose weights the layer does not know"
                ),
            };
            for Self { columns, has_bias, .. } in run {
                let own = |tensor: &Tensor| tensor.narrow(0, columns.start, columns.len());
                let bias = whole.bias().filter(|_| *has_bias).map(own).transpose()?;
                linears.push(Linear::new(own(whole.weight())?, bias));
            }
        }
        Ok(linears)
    }

    /// Projections of one input; those that share a weight are views of one product.
    pub fn project(all: &[&Self], xs: &Tensor) -> Result<Vec<Tensor>> {
        let mut outputs = Vec::with_capacity(all.len());
        for run in all.chunk_by(|own, next| Arc::ptr_eq(&own.weight, &next.weight)) {
            let (first, last) = (run[0], run[run.len() - 1]);
            let start = first.columns.start;
            let product = first.weight.product(xs, start..last.columns.end, None)?;
            for Self { columns, .. } in run {
                // A part of an empty tensor would be new zeros, without its gradient.
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

/// The projections of a layer: of queries, and those that the config wants besides. Where there are keys and no
/// projection of values, values are what that of keys gives.
#[derive(Debug, Clone)]
pub struct Projections {
    all: ByPlace<PackedProjection>,
    /// The dtype of the weights, or what modules were said to give.
    pub dtype: DType,
    /// The device of the weights, or the one that modules were said to be on.
    pub device: Device,
}

/// What the inputs of a call are projected to; as heads (B, H, T, D) where a layer has split them.
#[derive(Debug)]
pub struct Projected {
    /// (B, T_q, H·D).
    pub q: Tensor,
    /// (B, T_kv, H_kv·D) and (B, T_kv, H_kv·D_v), if the call has inputs for them and the layer projects them.
    pub kv: Option<[Tensor; 2]>,
    /// (B, T_q, H·D_v) or (B, T_q, H).
    pub gate: Option<Tensor>,
}

impl Projections {
    /// From a checkpoint, of a dtype on a device: weights are packed now, or read in each call where training changes
    /// them.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(loaded: &ByPlace<WeightAndBias>, dtype: DType, device: &Device) -> Result<Self> {
        Ok(Self { all: Self::pack(loaded)?, dtype, device: device.clone() })
    }

    /// Those of inputs of one width are columns of one product.
    fn pack(loaded: &ByPlace<WeightAndBias>) -> Result<ByPlace<PackedProjection>> {
        let mut all = ByPlace::new();
        let loaded: Vec<_> = loaded.iter().collect();
        let width = |rows: &WeightAndBias| rows.weight.first().dims()[1];
        for run in loaded.chunk_by(|(_, own), (place, next)| **place != Output && width(own) == width(next)) {
            let (places, rows): (Vec<_>, Vec<_>) = run.iter().copied().unzip();
            all.extend(places.into_iter().copied().zip(PackedProjection::of_rows(&rows)?));
        }
        Ok(all)
    }

    /// The same with what variables hold now, packed. Modules of the caller's stay as they are.
    ///
    /// # Errors
    /// If memory is short.
    pub fn freeze(&self) -> Result<Self> {
        let mut frozen = ByPlace::new();
        for (place, own) in &self.all {
            if let Weight::Tracked(rows) = &*own.weight {
                frozen.insert(*place, rows.freeze()?);
            }
        }
        let mut all = self.all.clone();
        // Together, so that those of one input are one product again.
        all.extend(Self::pack(&frozen)?);
        Ok(Self { all, ..self.clone() })
    }

    /// Of modules with outputs of these widths, 0 for none, for inputs of a dtype on a device.
    ///
    /// # Errors
    /// If the config wants a projection and there is none, or the other way around.
    pub fn from_modules(
        width: impl Fn(Projection) -> usize,
        modules: &ProjectionModules,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let mut own = Self { all: ByPlace::new(), dtype, device: device.clone() };
        for place in Projection::ALL {
            let noun = place.noun();
            match (modules.0.get(&place).cloned(), width(place)) {
                (None, 0) => {}
                (None, _) => bail!("[{OP}] no module was given for the {noun} that the config wants"),
                (Some(_), 0) => bail!("[{OP}] a module was given for the {noun}, but the config says there is none"),
                (Some(module), width) => own.set(place, width, module),
            }
        }
        Ok(own)
    }

    /// A module with an output of that width, which is checked, in one place. It is not called where there is nothing
    /// to compute.
    fn set(&mut self, place: Projection, width: usize, module: ProjectionModule) {
        let (dtype, device, own) = (self.dtype, self.device.clone(), module.clone());
        let checked = move |xs: &Tensor| {
            let (b, t, _) = xs.dims3()?;
            let expected = [b, t, width];
            if expected.contains(&0) {
                return Tensor::zeros(&expected, dtype, &device);
            }
            let ys = module.forward(&xs.contiguous()?)?;
            let name = format!("the output of the {place} projection");
            let output = Expect::one(OP, &name, &ys).sizes(&expected)?;
            output.dtype(dtype, "the weights'")?.same_device("the weights", &device)?;
            Ok(ys)
        };
        let weight = Arc::new(Weight::Module { place, own, checked: Arc::new(checked) });
        self.all.insert(place, PackedProjection { weight, columns: 0..width, has_bias: false });
    }

    /// Of weights that are packed, query, key, value and output, for inputs in f32.
    pub fn of_columns(columns: Vec<PackedProjection>, device: &Device) -> Self {
        let all = [Query, Key, Value, Output].into_iter().zip(columns).collect();
        Self { all, dtype: DType::F32, device: device.clone() }
    }

    /// The same with a module in one place, with an output of that width, made from what is there.
    ///
    /// # Errors
    /// For a projection that the config does not have, and those of `change`.
    pub fn map(
        mut self,
        width: usize,
        place: Projection,
        change: impl FnOnce(ProjectionModule) -> Result<ProjectionModule>,
    ) -> Result<Self> {
        let Some(own) = self.all.remove(&place) else {
            bail!("[{OP}] the config says there is no {}, so none can be changed", place.noun())
        };
        let module = match &*own.weight {
            Weight::Module { own, .. } => own.clone(),
            _ => Arc::new(own),
        };
        self.set(place, width, change(module)?);
        Ok(self)
    }

    /// Whether queries and keys are projected by modules of the caller's, which may change.
    pub fn has_modules(&self) -> bool {
        let is_module = |own: &PackedProjection| matches!(&*own.weight, Weight::Module { .. });
        [Query, Key].iter().any(|place| self.all.get(place).is_some_and(is_module))
    }

    /// The inputs of some places projected; those of one tensor that share a weight are views of one product.
    fn project(&self, inputs: &[(Projection, &Tensor)]) -> Result<ByPlace<Tensor>> {
        let mut projected = ByPlace::new();
        for run in inputs.chunk_by(|(_, own), (_, next)| own.id() == next.id()) {
            let own = run.iter().filter_map(|(place, _)| self.all.get_key_value(place));
            let (places, all): (Vec<_>, Vec<_>) = own.unzip();
            projected.extend(places.into_iter().copied().zip(PackedProjection::project(&all, run[0].1)?));
        }
        Ok(projected)
    }

    /// q and the gate, and k and v where these have inputs.
    pub fn query_key_value(&self, queries: &Tensor, key_value: Option<[&Tensor; 2]>) -> Result<Projected> {
        let mut inputs = vec![(Query, queries), (Gate, queries)];
        inputs.extend(key_value.into_iter().flat_map(|[keys, values]| [(Key, keys), (Value, values)]));
        let mut projected = self.project(&inputs)?;
        let Some(q) = projected.remove(&Query) else { bail!("[{OP}] expected a query projection") };
        let gate = projected.remove(&Gate);
        Ok(Projected { q, kv: keys_and_values(projected), gate })
    }

    /// k (B, T_kv, H_kv·D) and v (B, T_kv, H_kv·D_v) alone, if the layer has them.
    pub fn key_value(&self, keys: &Tensor, values: &Tensor) -> Result<Option<[Tensor; 2]>> {
        Ok(keys_and_values(self.project(&[(Key, keys), (Value, values)])?))
    }

    /// The output projection of merged heads (B, T_q, H·D_v), or the heads as they are, plus a residual of that shape.
    pub fn output(&self, merged: Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        match (self.all.get(&Output), residual) {
            (Some(output), _) => output.weight.product(&merged, output.columns.clone(), residual),
            (None, Some(residual)) => merged + residual,
            (None, None) => Ok(merged),
        }
    }

    /// As linear layers, with what variables hold now: q (H·D, E), k (H_kv·D, kdim), v (H_kv·D_v, vdim), o
    /// (out_dim, H·D_v), gate (H·D_v or H, E). Parts of one weight are views of it.
    ///
    /// # Errors
    /// If a projection is a module, whose weights the layer does not know, and if memory is short.
    pub fn to_linears(&self) -> Result<ByPlace<Linear>> {
        let (places, all): (Vec<_>, Vec<_>) = self.all.iter().unzip();
        Ok(places.into_iter().copied().zip(PackedProjection::to_linears(&all)?).collect())
    }
}

/// Where there are keys and no projection of values, values are what that of keys gives.
fn keys_and_values(mut projected: ByPlace<Tensor>) -> Option<[Tensor; 2]> {
    let k = projected.remove(&Key)?;
    Some([k.clone(), projected.remove(&Value).unwrap_or(k)])
}
