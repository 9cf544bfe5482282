//! The projections of a layer: each is columns of a product with a weight, or a module.

mod modules;

pub use modules::{ProjectionModule, ProjectionModules, ProjectionPlace};

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::Linear;

use crate::linear::frozen;
use crate::size::part;
use crate::weights::{Linears, LoadedProjections, ProjectionRows, projection_shapes};
use crate::{MultiHeadAttentionConfig, PackedLinear};

/// One projection, (B, T, in) to (B, T, out).
#[derive(Clone)]
enum Projection {
    Columns(Columns),
    /// A module of the caller's, whose output is checked.
    Module {
        module: ProjectionModule,
        expected: ModuleOutput,
    },
}

/// Columns of the product with a weight. Projections of one input that share the weight are views of one product.
#[derive(Debug, Clone)]
pub(crate) struct Columns {
    pub weight: ProjectionWeight,
    pub range: Range<usize>,
    pub has_bias: bool,
}

#[derive(Debug, Clone)]
pub(crate) enum ProjectionWeight {
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

impl Columns {
    /// Of one weight, the columns of each part, which is so many outputs and may have a bias.
    pub(crate) fn split(weight: PackedLinear, parts: impl IntoIterator<Item = (usize, bool)>) -> Vec<Self> {
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
        let columns = Columns::split(ProjectionRows::concat(all)?.try_into()?, parts);
        Ok(columns.into_iter().map(Self::Columns).collect())
    }

    fn tracked(rows: &ProjectionRows) -> Result<Self> {
        let weight = match rows.to_view()? {
            Some(linear) => ProjectionWeight::Whole(Arc::new(linear.try_into()?)),
            None => ProjectionWeight::Scattered(Arc::new(rows.clone())),
        };
        Ok(Self::Columns(Columns { weight, range: 0..rows.len(), has_bias: rows.has_bias() }))
    }

    fn as_columns(&self) -> Option<&Columns> {
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
            (Self::Columns(Columns { weight, range, .. }), _) => weight.linear()?.product(xs, range.clone(), residual),
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
pub(crate) struct Projections {
    q: Projection,
    k: Projection,
    v: Projection,
    gate: Option<Projection>,
    o: Option<Projection>,
    dtype: DType,
    device: Device,
}

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
    pub fn new(loaded: LoadedProjections) -> Result<Self> {
        let LoadedProjections { qkv: [q, k, v], gate, o } = loaded;
        let (dtype, device) = (q.weight().dtype(), q.weight().device().clone());
        let [of_q, of_k, of_v] = [&q, &k, &v].map(ProjectionRows::in_dim);
        // A gate beside the query, whose input it reads.
        let queries: Vec<_> = std::iter::once(&q).chain(&gate).collect();
        let qkv = if of_k != of_v {
            [Projection::columns(&queries)?, Projection::columns(&[&k])?, Projection::columns(&[&v])?].concat()
        } else if of_q != of_k {
            [Projection::columns(&queries)?, Projection::columns(&[&k, &v])?].concat()
        } else {
            Projection::columns(&[queries, vec![&k, &v]].concat())?
        };
        let o = o.map(|o| Projection::columns(&[&o])).transpose()?;
        Self::of_list(qkv, o, dtype, device)
    }

    /// The same with what variables hold now, packed. Modules of the caller's stay as they are.
    ///
    /// # Errors
    /// If memory is short.
    pub fn freeze(&self) -> Result<Self> {
        let tracked = |own: &Projection| own.as_columns().filter(|columns| columns.is_tracked()).cloned();
        let Self { q, k, v, gate, .. } = self;
        let mut own = self.clone();
        // Together, so that those of one input are one product again.
        if let (Some(q), Some(k), Some(v)) = (tracked(q), tracked(k), tracked(v)) {
            let qkv = [q.frozen_rows()?, k.frozen_rows()?, v.frozen_rows()?];
            let gate = gate.as_ref().and_then(tracked).map(|gate| gate.frozen_rows()).transpose()?;
            let Self { q, k, v, gate, .. } = Self::new(LoadedProjections { qkv, gate, o: None })?;
            (own.q, own.k, own.v) = (q, k, v);
            own.gate = gate.or(own.gate);
        }
        for projection in [&mut own.q, &mut own.k, &mut own.v].into_iter().chain(&mut own.gate).chain(&mut own.o) {
            if let Some(columns) = tracked(projection)
                && let Some(frozen) = Projection::columns(&[&columns.frozen_rows()?])?.pop()
            {
                *projection = frozen;
            }
        }
        Ok(own)
    }

    /// Of modules, for inputs of a dtype on a device.
    ///
    /// # Errors
    /// If the config wants an output projection or a gate and there is none, or the other way around.
    pub fn from_modules(
        cfg: &MultiHeadAttentionConfig,
        modules: ProjectionModules,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let ProjectionModules { query, key, value, output, gate } = modules;
        match (cfg.output_gate(), &gate) {
            (Some(_), None) => bail!("[multi_head_attention] no module was given for the gate that the config wants"),
            (None, Some(_)) => {
                bail!("[multi_head_attention] a module was given for a gate, but the config says there is none")
            }
            _ => {}
        }
        match (cfg.out_proj(), &output) {
            (true, None) => {
                bail!("[multi_head_attention] no module was given for the output projection that the config wants")
            }
            (false, Some(_)) => bail!(
                "[multi_head_attention] a module was given for the output projection, but the config says there is none"
            ),
            _ => {}
        }
        use ProjectionPlace::{Gate, Key, Output, Query, Value};
        let projection = |(place, module): (ProjectionPlace, _)| {
            let width = projection_shapes(cfg)[place as usize].0;
            Projection::Module { module, expected: ModuleOutput { place, width, dtype, device: device.clone() } }
        };
        let gate = gate.map(|gate| (Gate, gate));
        let qkv = std::iter::once((Query, query)).chain(gate).chain([(Key, key), (Value, value)]);
        let o = output.map(|output| vec![projection((Output, output))]);
        Self::of_list(qkv.map(projection).collect(), o, dtype, device.clone())
    }

    /// Of weights that are packed, for inputs in f32.
    pub fn of_columns(qkv: Vec<Columns>, o: Vec<Columns>, device: &Device) -> Result<Self> {
        let [qkv, o] = [qkv, o].map(|columns| columns.into_iter().map(Projection::Columns).collect());
        Self::of_list(qkv, Some(o), DType::F32, device.clone())
    }

    /// Query, perhaps a gate, key and value, and the output projection.
    fn of_list(mut qkv: Vec<Projection>, o: Option<Vec<Projection>>, dtype: DType, device: Device) -> Result<Self> {
        let gate = (qkv.len() == 4).then(|| qkv.remove(1));
        let Ok([q, k, v]) = <[Projection; 3]>::try_from(qkv) else { bail!("[projection] expected three projections") };
        Ok(Self { q, k, v, gate, o: o.and_then(|mut o| o.pop()), dtype, device })
    }

    /// The same with a module in one place, made from what is there.
    ///
    /// # Errors
    /// For an output projection or a gate that the config does not have, and those of `change`.
    pub fn map(
        mut self,
        cfg: &MultiHeadAttentionConfig,
        place: ProjectionPlace,
        change: impl FnOnce(ProjectionModule) -> Result<ProjectionModule>,
    ) -> Result<Self> {
        let own = match place {
            ProjectionPlace::Query => &mut self.q,
            ProjectionPlace::Key => &mut self.k,
            ProjectionPlace::Value => &mut self.v,
            ProjectionPlace::Output => match &mut self.o {
                Some(o) => o,
                None => bail!(
                    "[multi_head_attention] the config says there is no output projection, so none can be changed"
                ),
            },
            ProjectionPlace::Gate => match &mut self.gate {
                Some(gate) => gate,
                None => bail!("[multi_head_attention] the config says there is no gate, so none can be changed"),
            },
        };
        let width = projection_shapes(cfg)[place as usize].0;
        let expected = ModuleOutput { place, width, dtype: self.dtype, device: self.device.clone() };
        *own = Projection::Module { module: change(own.as_module())?, expected };
        Ok(self)
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn device(&self) -> &Device {
        &self.device
    }

    /// q and the gate, and k (B, T_kv, H_kv·D) and v (B, T_kv, H_kv·D_v). Those of one input that share a weight are
    /// views of one product.
    pub fn query_key_value(&self, queries: &Tensor, keys: &Tensor, values: &Tensor) -> Result<(Queries, [Tensor; 2])> {
        if queries.id() == keys.id()
            && keys.id() == values.id()
            && let (Some(q), Some(k), Some(v)) = (self.q.as_columns(), self.k.as_columns(), self.v.as_columns())
            && q.shares_weight(k)
            && k.shares_weight(v)
        {
            let start = q.range.start;
            let product = q.product_to(v, queries)?;
            let gate = self.gate.as_ref().map(|gate| match gate.as_columns() {
                Some(gate) if gate.shares_weight(q) => gate.of(&product, start),
                _ => gate.forward(queries),
            });
            let own = Queries { q: q.of(&product, start)?, gate: gate.transpose()? };
            return Ok((own, [k.of(&product, start)?, v.of(&product, start)?]));
        }
        Ok((self.query(queries)?, self.key_value(keys, values)?))
    }

    /// q and the gate alone.
    pub fn query(&self, queries: &Tensor) -> Result<Queries> {
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

    /// k (B, T_kv, H_kv·D) and v (B, T_kv, H_kv·D_v) alone.
    pub fn key_value(&self, keys: &Tensor, values: &Tensor) -> Result<[Tensor; 2]> {
        if keys.id() == values.id()
            && let (Some(k), Some(v)) = (self.k.as_columns(), self.v.as_columns())
            && k.shares_weight(v)
        {
            let start = k.range.start;
            let product = k.product_to(v, keys)?;
            return Ok([k.of(&product, start)?, v.of(&product, start)?]);
        }
        Ok([self.k.forward(keys)?, self.v.forward(values)?])
    }

    /// The output projection of merged heads (B, T_q, H·D_v), or the heads as they are, plus a residual of that shape.
    pub fn output(&self, merged: Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
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
    pub fn to_linears(&self) -> Result<Linears> {
        let mut latest: Option<(Columns, Linear)> = None;
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
            k: linear(&self.k)?,
            v: linear(&self.v)?,
            o: self.o.as_ref().map(&mut linear).transpose()?,
        })
    }
}
