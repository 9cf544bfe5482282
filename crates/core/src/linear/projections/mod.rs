//! The projections of a layer: each is columns of a product with a weight, or a module.

mod modules;
mod rows;

pub use modules::{ProjectionModule, ProjectionModules, ProjectionPlace};
pub(crate) use rows::{Linears, LoadedProjections, PROJECTIONS, Piece, ProjectionRows};

use ProjectionPlace::{Gate, Key, Output, Query, Value};

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::Linear;

use super::{PackedLinear, frozen};
use crate::base::part;

/// One projection, (B, T, in) to (B, T, out).
#[derive(Clone)]
enum Projection {
    Columns(ProjectionColumns),
    /// A module of the caller's, whose output is checked.
    Module {
        module: ProjectionModule,
        expected: ModuleOutput,
    },
}

/// ProjectionColumns of the product with a weight. Projections of one input that share the weight are views of one
/// product.
#[derive(Debug, Clone)]
pub struct ProjectionColumns {
    weight: ProjectionWeight,
    range: Range<usize>,
    has_bias: bool,
}

#[derive(Debug, Clone)]
enum ProjectionWeight {
    Whole(Arc<PackedLinear>),
    /// Rows that lie in several places of variables, joined in each call.
    Scattered(Arc<ProjectionRows>),
}

impl ProjectionWeight {
    /// With what variables hold now.
    fn linear(&self) -> Result<Arc<PackedLinear>> {
        match self {
            Self::Whole(linear) => Ok(linear.clone()),
            Self::Scattered(rows) => Ok(Arc::new(rows.to_linear()?.try_into()?)),
        }
    }
}

impl ProjectionColumns {
    /// Of one weight, the columns of each part, which is so many outputs and may have a bias.
    pub fn split(weight: PackedLinear, parts: impl IntoIterator<Item = (usize, bool)>) -> Vec<Self> {
        let (weight, mut end) = (Arc::new(weight), 0);
        let part = |(len, has_bias)| {
            end += len;
            Self { weight: ProjectionWeight::Whole(weight.clone()), range: end - len..end, has_bias }
        };
        parts.into_iter().map(part).collect()
    }

    fn shares_weight(&self, other: &Self) -> bool {
        match (&self.weight, &other.weight) {
            (ProjectionWeight::Whole(own), ProjectionWeight::Whole(other)) => Arc::ptr_eq(own, other),
            _ => false,
        }
    }

    /// Whether training may change them.
    fn is_tracked(&self) -> bool {
        match &self.weight {
            ProjectionWeight::Whole(linear) => linear.is_tracked(),
            ProjectionWeight::Scattered(_) => true,
        }
    }

    /// What variables hold now.
    fn frozen_rows(&self) -> Result<ProjectionRows> {
        let linear = self.rows_of(&self.weight.linear()?.to_linear()?)?;
        let bias = linear.bias().map(frozen).transpose()?;
        Ok(Linear::new(frozen(linear.weight())?, bias).into())
    }

    /// Their rows of the whole weight.
    fn rows_of(&self, whole: &Linear) -> Result<Linear> {
        let own = |tensor: &Tensor| tensor.narrow(0, self.range.start, self.range.len());
        let bias = whole.bias().filter(|_| self.has_bias).map(own).transpose()?;
        Ok(Linear::new(own(whole.weight())?, bias))
    }

    /// The columns from the first of these to the last of others that share the weight, (B, T, ..).
    fn product_to(&self, last: &Self, xs: &Tensor) -> Result<Tensor> {
        self.weight.linear()?.forward_columns(xs, self.range.start..last.range.end)
    }

    /// Their view of a product whose first column is `start`.
    fn of(&self, product: &Tensor, start: usize) -> Result<Tensor> {
        part(product, 2, self.range.start - start..self.range.end - start)
    }
}

/// What a module has to give.
#[derive(Debug, Clone)]
struct ModuleOutput {
    place: ProjectionPlace,
    width: usize,
    dtype: DType,
    device: Device,
}

impl Projection {
    /// Projections of inputs of one width: columns of one weight that is packed, or of one each where training changes
    /// them.
    fn columns(all: &[&ProjectionRows]) -> Result<Vec<Self>> {
        if all.iter().any(|rows| rows.is_tracked()) {
            return all.iter().map(|rows| Self::tracked(rows)).collect();
        }
        let parts = all.iter().map(|rows| (rows.len(), rows.has_bias()));
        let columns = ProjectionColumns::split(ProjectionRows::concat(all)?.try_into()?, parts);
        Ok(columns.into_iter().map(Self::Columns).collect())
    }

    fn tracked(rows: &ProjectionRows) -> Result<Self> {
        let weight = match rows.to_view()? {
            Some(linear) => ProjectionWeight::Whole(Arc::new(linear.try_into()?)),
            None => ProjectionWeight::Scattered(Arc::new(rows.clone())),
        };
        Ok(Self::Columns(ProjectionColumns { weight, range: 0..rows.len(), has_bias: rows.has_bias() }))
    }

    fn as_columns(&self) -> Option<&ProjectionColumns> {
        match self {
            Self::Columns(columns) => Some(columns),
            _ => None,
        }
    }

    fn as_module(&self) -> ProjectionModule {
        match self {
            Self::Module { module, .. } => module.clone(),
            own => Arc::new(own.clone()),
        }
    }
}

impl Projection {
    /// Plus a residual (B, T, out), if there is one.
    fn product(&self, xs: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        match (self, residual) {
            (Self::Columns(ProjectionColumns { weight, range, .. }), _) => {
                weight.linear()?.product(xs, range.clone(), residual)
            }
            (Self::Module { module, expected }, None) => expected.of(module, xs),
            (Self::Module { module, expected }, Some(residual)) => expected.of(module, xs)? + residual,
        }
    }
}

impl Module for Projection {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.product(xs, None)
    }
}

impl ModuleOutput {
    /// A module's output, checked; empty without a call where there is nothing to compute.
    fn of(&self, module: &ProjectionModule, xs: &Tensor) -> Result<Tensor> {
        let (b, t, _) = xs.dims3()?;
        let expected = [b, t, self.width];
        if expected.contains(&0) {
            return Tensor::zeros(&expected, self.dtype, &self.device);
        }
        let ys = module.forward(&xs.contiguous()?)?;
        if ys.dims() != expected || ys.dtype() != self.dtype || !ys.device().same_device(&self.device) {
            bail!(
                "[multi_head_attention] the {} projection gives {:?} of {:?} on {:?}, expected {expected:?} of {:?} on {:?}",
                self.place,
                ys.dims(),
                ys.dtype(),
                ys.device().location(),
                self.dtype,
                self.device.location()
            )
        }
        Ok(ys)
    }
}

impl fmt::Debug for Projection {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Columns(columns) => columns.fmt(f),
            Self::Module { expected, .. } => write!(f, "a module to {expected:?}"),
        }
    }
}

/// The projections of a layer.
#[derive(Debug, Clone)]
pub struct Projections {
    q: Projection,
    k: Option<Projection>,
    /// Where there are keys, values are these without one.
    v: Option<Projection>,
    gate: Option<Projection>,
    o: Option<Projection>,
    dtype: DType,
    device: Device,
}

/// In the order of [`ProjectionPlace`].
type Placed = [Option<Projection>; PROJECTIONS];

/// What queries' inputs are projected to.
#[derive(Debug)]
pub(crate) struct Queries {
    /// (B, T_q, H·D).
    pub q: Tensor,
    /// (B, T_q, H·D_v) or (B, T_q, H).
    pub gate: Option<Tensor>,
}

impl Projections {
    /// From a checkpoint: weights are packed now, or read in each call where training changes them.
    ///
    /// # Errors
    /// If memory is short.
    pub(crate) fn new(loaded: LoadedProjections) -> Result<Self> {
        let Some(weight) = loaded[0].as_ref().map(|q| q.weight().clone()) else {
            bail!("[multi_head_attention] expected a query projection")
        };
        Self::placed(Self::pack(&loaded)?, weight.dtype(), weight.device().clone())
    }

    /// Those of inputs of one width are columns of one product.
    fn pack(loaded: &LoadedProjections) -> Result<Placed> {
        // A gate beside the query, whose input it reads.
        let rows = |place: ProjectionPlace| Some((place, loaded[place as usize].as_ref()?));
        let of_inputs: Vec<_> = [Query, Gate, Key, Value].into_iter().filter_map(rows).collect();
        let output = rows(Output);
        let mut placed = Placed::default();
        let groups = of_inputs.chunk_by(|own, next| own.1.in_dim() == next.1.in_dim());
        for group in groups.chain(output.iter().map(std::slice::from_ref)) {
            let all: Vec<_> = group.iter().map(|(_, rows)| *rows).collect();
            for ((place, _), projection) in group.iter().zip(Projection::columns(&all)?) {
                placed[*place as usize] = Some(projection);
            }
        }
        Ok(placed)
    }

    fn placed(placed: Placed, dtype: DType, device: Device) -> Result<Self> {
        let [Some(q), k, v, o, gate] = placed else { bail!("[multi_head_attention] expected a query projection") };
        Ok(Self { q, k, v, gate, o, dtype, device })
    }

    /// The same with what variables hold now, packed. Modules of the caller's stay as they are.
    ///
    /// # Errors
    /// If memory is short.
    pub(crate) fn freeze(&self) -> Result<Self> {
        let Self { q, k, v, gate, o, dtype, device } = self.clone();
        let own = [Some(q), k, v, o, gate];
        let mut frozen = LoadedProjections::default();
        for (frozen, own) in frozen.iter_mut().zip(&own) {
            if let Some(columns) = own.as_ref().and_then(Projection::as_columns).filter(|columns| columns.is_tracked())
            {
                *frozen = Some(columns.frozen_rows()?);
            }
        }
        // Together, so that those of one input are one product again.
        let mut packed = Self::pack(&frozen)?.into_iter();
        Self::placed(own.map(|own| packed.next().flatten().or(own)), dtype, device)
    }

    /// Of modules with outputs of these widths, 0 for none, for inputs of a dtype on a device.
    ///
    /// # Errors
    /// If the config wants an output projection or a gate and there is none, or the other way around.
    pub(crate) fn from_modules(
        widths: [usize; PROJECTIONS],
        modules: ProjectionModules,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let ProjectionModules { query, key, value, output, gate } = modules;
        let mut modules = [Some(query), key, value, output, gate].into_iter();
        let mut placed = Placed::default();
        for (place, width) in ProjectionPlace::ALL.into_iter().zip(widths) {
            placed[place as usize] = match (modules.next().flatten(), width) {
                (None, 0) => None,
                (None, _) => {
                    bail!("[multi_head_attention] no module was given for the {} that the config wants", place.noun())
                }
                (Some(_), 0) => bail!(
                    "[multi_head_attention] a module was given for the {}, but the config says there is none",
                    place.noun()
                ),
                (Some(module), _) => {
                    let expected = ModuleOutput { place, width, dtype, device: device.clone() };
                    Some(Projection::Module { module, expected })
                }
            };
        }
        Self::placed(placed, dtype, device.clone())
    }

    /// Of weights that are packed, query, key, value and output, for inputs in f32.
    pub fn of_columns(all: Vec<ProjectionColumns>, device: &Device) -> Result<Self> {
        let mut placed = Placed::default();
        for (place, columns) in placed.iter_mut().zip(all) {
            *place = Some(Projection::Columns(columns));
        }
        Self::placed(placed, DType::F32, device.clone())
    }

    /// The same with a module in one place, with an output of that width, made from what is there.
    ///
    /// # Errors
    /// For an output projection or a gate that the config does not have, and those of `change`.
    pub(crate) fn map(
        mut self,
        width: usize,
        place: ProjectionPlace,
        change: impl FnOnce(ProjectionModule) -> Result<ProjectionModule>,
    ) -> Result<Self> {
        let own = match place {
            Query => Some(&mut self.q),
            Key => self.k.as_mut(),
            Value => self.v.as_mut(),
            Output => self.o.as_mut(),
            Gate => self.gate.as_mut(),
        };
        let Some(own) = own else {
            bail!("[multi_head_attention] the config says there is no {}, so none can be changed", place.noun())
        };
        let expected = ModuleOutput { place, width, dtype: self.dtype, device: self.device.clone() };
        *own = Projection::Module { module: change(own.as_module())?, expected };
        Ok(self)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// q and the gate, and k (B, T_kv, H_kv·D) and v (B, T_kv, H_kv·D_v), if the layer has them. Those of one input
    /// that share a weight are views of one product.
    pub(crate) fn query_key_value(
        &self,
        queries: &Tensor,
        keys: &Tensor,
        values: &Tensor,
    ) -> Result<(Queries, Option<[Tensor; 2]>)> {
        let last = self.v.as_ref().or(self.k.as_ref());
        if queries.id() == keys.id()
            && keys.id() == values.id()
            && let (Some(q), Some(k)) = (self.q.as_columns(), self.k.as_ref().and_then(Projection::as_columns))
            && let Some(last) = last.and_then(Projection::as_columns)
            && q.shares_weight(k)
            && k.shares_weight(last)
        {
            let start = q.range.start;
            let product = q.product_to(last, queries)?;
            let gate = self.gate.as_ref().map(|gate| match gate.as_columns() {
                Some(gate) if gate.shares_weight(q) => gate.of(&product, start),
                _ => gate.forward(queries),
            });
            let own = Queries { q: q.of(&product, start)?, gate: gate.transpose()? };
            return Ok((own, Some([k.of(&product, start)?, last.of(&product, start)?])));
        }
        Ok((self.query(queries)?, self.key_value(keys, values)?))
    }

    /// Whether queries and keys are projected by modules of the caller's, which may change.
    pub fn has_modules(&self) -> bool {
        [Some(&self.q), self.k.as_ref()].into_iter().flatten().any(|own| own.as_columns().is_none())
    }

    /// q and the gate alone.
    pub(crate) fn query(&self, queries: &Tensor) -> Result<Queries> {
        if let (Some(q), Some(gate)) = (self.q.as_columns(), self.gate.as_ref().and_then(Projection::as_columns))
            && q.shares_weight(gate)
        {
            let product = q.product_to(gate, queries)?;
            let start = q.range.start;
            return Ok(Queries { q: q.of(&product, start)?, gate: Some(gate.of(&product, start)?) });
        }
        let gate = self.gate.as_ref().map(|gate| gate.forward(queries)).transpose()?;
        Ok(Queries { q: self.q.forward(queries)?, gate })
    }

    /// k (B, T_kv, H_kv·D) and v (B, T_kv, H_kv·D_v) alone, if the layer has them.
    pub(crate) fn key_value(&self, keys: &Tensor, values: &Tensor) -> Result<Option<[Tensor; 2]>> {
        let Some(own_k) = &self.k else { return Ok(None) };
        let Some(own_v) = &self.v else {
            let k = own_k.forward(keys)?;
            return Ok(Some([k.clone(), k]));
        };
        if keys.id() == values.id()
            && let (Some(k), Some(v)) = (own_k.as_columns(), own_v.as_columns())
            && k.shares_weight(v)
        {
            let start = k.range.start;
            let product = k.product_to(v, keys)?;
            return Ok(Some([k.of(&product, start)?, v.of(&product, start)?]));
        }
        Ok(Some([own_k.forward(keys)?, own_v.forward(values)?]))
    }

    /// The output projection of merged heads (B, T_q, H·D_v), or the heads as they are, plus a residual of that shape.
    pub(crate) fn output(&self, merged: Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        match (&self.o, residual) {
            (Some(o), _) => o.product(&merged, residual),
            (None, Some(residual)) => merged + residual,
            (None, None) => Ok(merged),
        }
    }

    /// As linear layers, with what variables hold now; parts of one weight are views of it.
    ///
    /// # Errors
    /// If a projection is a module, whose weights the layer does not know, and if memory is short.
    pub(crate) fn to_linears(&self) -> Result<Linears> {
        let mut latest: Option<(ProjectionColumns, Linear)> = None;
        let mut linear = |projection: &Projection| match projection {
            Projection::Columns(columns) => {
                let whole = match latest.take().filter(|(of, _)| of.shares_weight(columns)) {
                    Some((_, whole)) => whole,
                    None => columns.weight.linear()?.to_linear()?,
                };
                let own = columns.rows_of(&whole)?;
                latest = Some((columns.clone(), whole));
                Ok(own)
            }
            Projection::Module { expected, .. } => bail!(
                "[multi_head_attention] the {} projection is a module of the caller's, whose weights the layer does not know",
                expected.place
            ),
        };
        Ok(Linears {
            q: linear(&self.q)?,
            gate: self.gate.as_ref().map(&mut linear).transpose()?,
            k: self.k.as_ref().map(&mut linear).transpose()?,
            v: self.v.as_ref().map(&mut linear).transpose()?,
            o: self.o.as_ref().map(&mut linear).transpose()?,
        })
    }
}
