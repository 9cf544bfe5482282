//! The projections of a layer: each is columns of a product with a weight, variables, or a module.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::Linear;

use crate::size::part;
use crate::weights::{Linears, LoadedProjections, ProjectionRows, projection_shapes};
use crate::{MultiHeadAttentionConfig, PackedLinear};

/// One of a layer's four projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ProjectionPlace {
    /// (B, T_q, embed_dim) to (B, T_q, H·D).
    Query,
    /// (B, T_kv, key_size) to (B, T_kv, H_kv·D).
    Key,
    /// (B, T_kv, value_size) to (B, T_kv, H_kv·D_v).
    Value,
    /// (B, T_q, H·D_v) to (B, T_q, out_dim).
    Output,
}

impl fmt::Display for ProjectionPlace {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Self::Query => "query",
            Self::Key => "key",
            Self::Value => "value",
            Self::Output => "output",
        })
    }
}

/// A module in a projection's place.
pub type ProjectionModule = Arc<dyn Module + Send + Sync>;

/// Modules for all projections of a layer ([`MultiHeadAttention::from_modules`](crate::MultiHeadAttention::from_modules)),
/// biases included.
#[derive(Clone)]
#[must_use]
pub struct ProjectionModules {
    query: ProjectionModule,
    key: ProjectionModule,
    value: ProjectionModule,
    output: Option<ProjectionModule>,
}

impl ProjectionModules {
    /// Query, key and value projections, and no output projection.
    pub fn new(
        query: impl Module + Send + Sync + 'static,
        key: impl Module + Send + Sync + 'static,
        value: impl Module + Send + Sync + 'static,
    ) -> Self {
        Self { query: Arc::new(query), key: Arc::new(key), value: Arc::new(value), output: None }
    }

    /// With an output projection.
    pub fn with_output(mut self, output: impl Module + Send + Sync + 'static) -> Self {
        self.output = Some(Arc::new(output));
        self
    }
}

impl fmt::Debug for ProjectionModules {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("ProjectionModules").field("output", &self.output.is_some()).finish_non_exhaustive()
    }
}

/// One projection, (B, T, in) to (B, T, out).
#[derive(Clone)]
enum Projection {
    Columns(Columns),
    /// Variables, which training changes in place: read again in each call.
    Variables(ProjectionRows),
    /// A module of the caller's, whose output is checked.
    Module {
        module: ProjectionModule,
        expected: ModuleOutput,
    },
}

/// Columns of the product with a weight. Projections of one input that share the weight are views of one product.
#[derive(Debug, Clone)]
pub(crate) struct Columns {
    pub weight: Arc<PackedLinear>,
    pub range: Range<usize>,
    pub has_bias: bool,
}

impl Columns {
    fn shares_weight(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.weight, &other.weight)
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
    /// Projections of inputs of one width, none of them variables, as columns of one weight.
    fn columns(all: &[&ProjectionRows], pack: impl FnOnce(Linear) -> Result<PackedLinear>) -> Result<Vec<Self>> {
        let linear = ProjectionRows::concat(all)?;
        let weight = Arc::new(pack(Linear::new(linear.weight().contiguous()?, linear.bias().cloned()))?);
        let mut end = 0;
        let own = |rows: &&ProjectionRows| {
            let start = end;
            end += rows.len();
            Self::Columns(Columns { weight: weight.clone(), range: start..end, has_bias: rows.has_bias() })
        };
        Ok(all.iter().map(own).collect())
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
            (Self::Columns(Columns { weight, range, .. }), _) => weight.product(xs, range.clone(), residual),
            (own, Some(residual)) => own.product(xs, None)? + residual,
            (Self::Variables(rows), None) => PackedLinear::unpacked(rows.to_linear()?).forward(xs),
            (Self::Module { module, expected }, None) => expected.of(module, xs),
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
            Self::Variables(rows) => rows.fmt(f),
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
    o: Option<Projection>,
    dtype: DType,
    device: Device,
}

impl Projections {
    /// From a checkpoint: whether weights are copied and packed now, or read again in each call because training changes
    /// them, is decided here.
    ///
    /// # Errors
    /// If memory is short.
    pub fn new(loaded: LoadedProjections) -> Result<Self> {
        let LoadedProjections { qkv: [q, k, v], o } = loaded;
        let (dtype, device) = (q.weight().dtype(), q.weight().device().clone());
        let trains_qkv = [&q, &k, &v].into_iter().any(ProjectionRows::is_tracked);
        let trains = trains_qkv || o.as_ref().is_some_and(ProjectionRows::is_tracked);
        let columns = |all: &[&ProjectionRows]| {
            Projection::columns(
                all,
                |linear| if trains { Ok(PackedLinear::unpacked(linear)) } else { linear.try_into() },
            )
        };
        let alone = |rows: ProjectionRows| match rows.is_tracked() {
            true => Ok(vec![Projection::Variables(rows)]),
            false => columns(&[&rows]),
        };
        let o = o.map(alone).transpose()?;
        let qkv = if trains_qkv || k.in_dim() != v.in_dim() {
            [alone(q)?, alone(k)?, alone(v)?].concat()
        } else if q.in_dim() != k.in_dim() {
            [alone(q)?, columns(&[&k, &v])?].concat()
        } else {
            columns(&[&q, &k, &v])?
        };
        Self::of_list(qkv, o, dtype, device)
    }

    /// Of modules, for inputs of a dtype on a device.
    ///
    /// # Errors
    /// If the config wants an output projection and there is none, or the other way around.
    pub fn from_modules(
        cfg: &MultiHeadAttentionConfig,
        modules: ProjectionModules,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let ProjectionModules { query, key, value, output } = modules;
        match (cfg.out_proj(), &output) {
            (true, None) => {
                bail!("[multi_head_attention] no module was given for the output projection that the config wants")
            }
            (false, Some(_)) => bail!(
                "[multi_head_attention] a module was given for the output projection, but the config says there is none"
            ),
            _ => {}
        }
        use ProjectionPlace::{Key, Output, Query, Value};
        let projection = |(place, module): (ProjectionPlace, _)| {
            let width = projection_shapes(cfg)[place as usize].0;
            Projection::Module { module, expected: ModuleOutput { place, width, dtype, device: device.clone() } }
        };
        let qkv = [(Query, query), (Key, key), (Value, value)].map(projection);
        let o = output.map(|output| vec![projection((Output, output))]);
        Self::of_list(qkv.into(), o, dtype, device.clone())
    }

    /// Of weights that are packed, for inputs in f32.
    pub fn of_columns(qkv: [Columns; 3], o: Columns) -> Self {
        let device = o.weight.device().clone();
        let [q, k, v] = qkv.map(Projection::Columns);
        Self { q, k, v, o: Some(Projection::Columns(o)), dtype: DType::F32, device }
    }

    /// Query, key and value, and the output projection.
    fn of_list(qkv: Vec<Projection>, o: Option<Vec<Projection>>, dtype: DType, device: Device) -> Result<Self> {
        let Ok([q, k, v]) = <[Projection; 3]>::try_from(qkv) else { bail!("[projection] expected three projections") };
        Ok(Self { q, k, v, o: o.and_then(|mut o| o.pop()), dtype, device })
    }

    /// The same with a module in one place, made from what is there.
    ///
    /// # Errors
    /// For an output projection that the config does not have, and those of `change`.
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

    /// q (B, T_q, H·D), k (B, T_kv, H_kv·D) and v (B, T_kv, H_kv·D_v). Those of one input that share a weight are views of
    /// one product.
    pub fn query_key_value(&self, queries: &Tensor, keys: &Tensor, values: &Tensor) -> Result<[Tensor; 3]> {
        if queries.id() == keys.id()
            && keys.id() == values.id()
            && let (Some(q), Some(k), Some(v)) = (self.q.as_columns(), self.k.as_columns(), self.v.as_columns())
            && q.shares_weight(k)
            && k.shares_weight(v)
        {
            let start = q.range.start;
            let product = q.weight.forward_columns(queries, start..v.range.end)?;
            return Ok([q.of(&product, start)?, k.of(&product, start)?, v.of(&product, start)?]);
        }
        let [k, v] = self.key_value(keys, values)?;
        Ok([self.query(queries)?, k, v])
    }

    /// q (B, T_q, H·D) alone.
    pub fn query(&self, queries: &Tensor) -> Result<Tensor> {
        self.q.forward(queries)
    }

    /// k (B, T_kv, H_kv·D) and v (B, T_kv, H_kv·D_v) alone.
    pub fn key_value(&self, keys: &Tensor, values: &Tensor) -> Result<[Tensor; 2]> {
        if keys.id() == values.id()
            && let (Some(k), Some(v)) = (self.k.as_columns(), self.v.as_columns())
            && k.shares_weight(v)
        {
            let start = k.range.start;
            let product = k.weight.forward_columns(keys, start..v.range.end)?;
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
        let mut latest: Option<(Arc<PackedLinear>, Linear)> = None;
        let mut linear = |projection: &Projection| match projection {
            Projection::Columns(Columns { weight, range, has_bias }) => {
                let whole = match latest.take().filter(|(of, _)| Arc::ptr_eq(of, weight)) {
                    Some((_, whole)) => whole,
                    None => weight.to_linear()?,
                };
                let own = |tensor: &Tensor| tensor.narrow(0, range.start, range.len());
                let bias = whole.bias().filter(|_| *has_bias).map(own).transpose()?;
                let linear = Linear::new(own(whole.weight())?, bias);
                latest = Some((weight.clone(), whole));
                Ok(linear)
            }
            Projection::Variables(rows) => rows.to_linear(),
            Projection::Module { expected, .. } => bail!(
                "[multi_head_attention] the {} projection is a module of the caller's, whose weights the layer does not know",
                expected.place
            ),
        };
        Ok(Linears {
            q: linear(&self.q)?,
            k: linear(&self.k)?,
            v: linear(&self.v)?,
            o: self.o.as_ref().map(linear).transpose()?,
        })
    }
}
