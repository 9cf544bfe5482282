//! Reading one named tensor, with errors that say what was looked for.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::init::{FanInOut, Init, NonLinearity, NormalOrUniform};
use candle_nn::var_builder::{Shard, ShardedVarBuilder, SimpleBackend};
use candle_nn::{Linear, VarBuilder};

use super::{FLOATS, HeadShard, Heads, NO_BIAS, Share, Spec, fits_in_memory};

/// What is added to a float8 weight's name for that of its scale. Both are factors, whatever `inv` may suggest.
pub const SCALES: [&str; 2] = ["_scale_inv", "_scale"];

/// `nn.Linear`'s initialisation of its weight: uniform within ±1/sqrt(in).
pub const LINEAR_WEIGHT: Init = Init::Kaiming {
    dist: NormalOrUniform::Uniform,
    fan: FanInOut::FanIn,
    // The bound of a Kaiming uniform is sqrt(3) · gain / sqrt(fan).
    non_linearity: NonLinearity::ExplicitGain(0.577_350_269_189_625_8),
};

/// A parameter that PyTorch draws at random and then sets to zero. An empty range is both: seeded initialisation draws
/// for it and gets zeros; other builders may refuse it, and then get zeros requested.
pub const DRAWN_THEN_ZEROED: Init = Init::Uniform { lo: 0.0, up: 0.0 };

/// `nn.Linear`'s initialisation of its bias.
pub fn linear_bias(in_dim: usize) -> Init {
    let bound = 1.0 / (in_dim as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// A builder together with what is being read from it, for the errors.
#[derive(Clone)]
pub struct Source<'a> {
    /// Where parameters are read from, of its dtype and to its device.
    pub vb: VarBuilder<'a>,
    /// The operation that errors are of.
    pub op: &'static str,
    layout: String,
    /// The root of a builder that reads parts of the same tensors.
    sharded: Option<ShardedVarBuilder<'static>>,
    /// Whose parameters the source gives.
    pub shard: HeadShard,
    /// How many query and key heads all processes have together.
    heads: [usize; 2],
}

impl<'a> Source<'a> {
    /// Of `layout`, as errors call it, for the operation `op`.
    ///
    /// # Errors
    /// If the builder gives what no attention can be computed in.
    pub fn new(op: &'static str, layout: impl ToString, vb: VarBuilder<'a>) -> Result<Self> {
        let dtype = vb.dtype();
        if !FLOATS.contains(&dtype) {
            bail!("[{op}] the builder gives weights as {dtype:?}, expected F32, F16, BF16 or F64")
        }
        Ok(Self { vb, op, layout: layout.to_string(), sharded: None, shard: HeadShard::WHOLE, heads: [1; 2] })
    }

    /// A process's own over a builder that can read parts of tensors.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn sharded(
        op: &'static str,
        layout: impl ToString,
        vb: &ShardedVarBuilder<'static>,
        shard: HeadShard,
    ) -> Result<Self> {
        Ok(Self { sharded: Some(vb.root()), shard, ..Self::new(op, layout, whole(vb))? })
    }

    /// One that knows the numbers of query and key heads.
    ///
    /// # Errors
    /// For more processes than query heads.
    pub fn with_heads(self, heads: [usize; 2]) -> Result<Self> {
        let (n, h) = (self.shard.world_size(), heads[0]);
        if n > h {
            bail!("[{}] a world size of {n} is more than the {h} heads", self.op)
        }
        Ok(Self { heads, ..self })
    }

    /// The entries of this process's heads along a dimension of `len`.
    pub fn own_range(&self, heads: Heads, len: usize) -> Range<usize> {
        self.shard.range(heads, self.heads, len)
    }

    /// Below a prefix.
    pub fn pp(&self, prefix: impl ToString) -> Self {
        Self { vb: self.vb.pp(prefix), ..self.clone() }
    }

    /// The tensor of that name and shape.
    pub fn get(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        let shape = shape.into();
        self.refuse_scale(name)?;
        if !fits_in_memory(shape.dims()) {
            return self
                .fail(format!("{} would have shape {shape:?}, which is too large to address", self.full_name(name)));
        }
        let got = match self.vb.get_with_hints(shape.clone(), name, init) {
            Err(_) if matches!(init, Init::Uniform { lo, up } if lo == up) => {
                self.vb.get_with_hints(shape.clone(), name, Init::Const(0.0))
            }
            got => got,
        };
        let tensor = got.map_err(|error| self.explain(name, &shape, error))?;
        // A `VarMap` gives what it has, whatever the dtype requested.
        if tensor.dtype() != self.vb.dtype() {
            return self.fail(format!(
                "{} has dtype {:?}, expected the builder's {:?}",
                self.full_name(name),
                tensor.dtype(),
                self.vb.dtype()
            ));
        }
        Ok(tensor)
    }

    /// A parameter, or this process's share of it.
    pub fn read(&self, spec: &Spec) -> Result<Tensor> {
        let whole = || self.get(spec.shape.as_slice(), &spec.stored, spec.init);
        match spec.share {
            Some(Share::Heads(heads, dim)) => self.read_part(spec, dim, self.own_range(heads, spec.shape[dim])),
            Some(Share::Sum) if self.shard.rank() > 0 => whole()?.zeros_like(),
            _ => whole(),
        }
    }

    /// The same of one that the config may not want, or the assurance that the file does not have it.
    pub fn read_wanted(&self, spec: &Spec) -> Result<Option<Tensor>> {
        match spec.refused {
            Some(why) => self.refuse([&spec.stored], why).map(|()| None),
            None => self.read(spec).map(Some),
        }
    }

    /// Some entries of a parameter along a dimension.
    pub fn read_part(&self, spec: &Spec, dim: usize, own: Range<usize>) -> Result<Tensor> {
        let name = &spec.stored;
        if own.len() == spec.shape[dim] {
            return self.get(spec.shape.as_slice(), name, spec.init);
        }
        if let Some(sharded) = &self.sharded {
            self.refuse_scale(name)?;
            let mut expected = spec.shape.clone();
            expected[dim] = own.len();
            let full_name = self.full_name(name);
            // Candle's builder divides a dimension into equal parts.
            let unit = gcd(spec.shape[dim], gcd(own.start, own.end));
            let part = |rank| Shard { dim, rank, world_size: spec.shape[dim] / unit };
            // It indexes the shape in the file, and panics where that has fewer dimensions.
            let read = || {
                let parts = own.start / unit..own.end / unit;
                let parts = parts.map(|rank| sharded.get_with_hints(spec.shape.as_slice(), &full_name, part(rank)));
                Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, dim)
            };
            if let Ok(Ok(own)) = catch_unwind(AssertUnwindSafe(read))
                && own.dims() == expected
            {
                return Ok(own);
            }
        }
        // Reading all of it says what is wrong.
        let whole = self.get(spec.shape.as_slice(), name, spec.init)?;
        whole.narrow(dim, own.start, own.len())?.force_contiguous()
    }

    /// `name.weight` of shape (out, in), and `name.bias` (out) if there is to be one; of heads that divide one of the
    /// two dimensions, this process's part.
    pub fn linear(&self, name: &str, shape: (usize, usize), bias: bool, share: Option<Share>) -> Result<Linear> {
        let source = self.pp(name);
        let weight = source.read(&Spec { share, ..Spec::new("weight", [shape.0, shape.1], LINEAR_WEIGHT) })?;
        let share = if let Some(Share::Heads(_, 1)) = share { Some(Share::Sum) } else { share };
        let spec = Spec { share, ..Spec::new("bias", [shape.0], linear_bias(shape.1)) };
        Ok(Linear::new(weight, source.read_wanted(&spec.only_if(bias, NO_BIAS))?))
    }

    /// That the file holds no tensor of these names, which would be left out though it changes the numbers.
    ///
    /// # Errors
    /// If it does, with the reason `why`.
    pub fn refuse(&self, names: impl IntoIterator<Item = impl AsRef<str>>, why: &str) -> Result<()> {
        match names.into_iter().find(|name| self.has(name.as_ref())) {
            Some(name) => self.fail(format!("{} is in the file, but {why}", self.full_name(name.as_ref()))),
            None => Ok(()),
        }
    }

    /// An error if the builder has a scale for the weight: it would give float8 without it. The builder of a
    /// `Checkpoint` applies scales, and has no tensors of their names.
    fn refuse_scale(&self, name: &str) -> Result<()> {
        match SCALES.map(|suffix| format!("{name}{suffix}")).iter().find(|scale| self.has(scale)) {
            Some(scale) => self.fail(format!(
                "{} is to be multiplied by {}, which this builder does not do; that of weights::open does",
                self.full_name(name),
                self.full_name(scale)
            )),
            None => Ok(()),
        }
    }

    /// Whether the builder holds a tensor of this name in particular: one that claims every name
    /// (`VarBuilder::zeros`) holds none.
    pub fn has(&self, name: &str) -> bool {
        has(&self.vb, name)
    }

    /// An error of the operation and the layout.
    pub fn fail<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        bail!("[{}] {message} (layout {})", self.op, self.layout)
    }

    fn full_name(&self, name: &str) -> String {
        match self.vb.prefix() {
            prefix if prefix.is_empty() => name.to_string(),
            prefix => format!("{prefix}.{name}"),
        }
    }

    fn explain(&self, name: &str, expected: &Shape, error: Error) -> Error {
        let problem = match root(&error) {
            Error::CannotFindTensor { .. } | Error::SafeTensor(safetensors::SafeTensorError::TensorNotFound(_)) => {
                format!(" is missing, expected shape {expected:?}")
            }
            Error::UnexpectedShape { got, .. } => format!(" has shape {got:?}, expected {expected:?}"),
            other => format!(": {other}"),
        };
        let hint = hint(&error);
        let hint = if hint.is_empty() { hint } else { format!("; {hint}") };
        Error::msg(format!("[{}] {}{problem} (layout {}){hint}", self.op, self.full_name(name), self.layout))
    }
}

/// The largest number that divides both, of which one is not 0.
fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The same tensors from an ordinary builder, whole.
pub fn whole(vb: &ShardedVarBuilder<'static>) -> VarBuilder<'static> {
    let (prefix, dtype, device) = (vb.prefix(), vb.dtype(), vb.device().clone());
    let root = VarBuilder::from_backend(Box::new(Whole(vb.root())), dtype, device);
    if prefix.is_empty() { root } else { root.pp(prefix) }
}

/// Whole tensors through a sharded builder.
struct Whole(ShardedVarBuilder<'static>);

impl SimpleBackend for Whole {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        self.0.clone().set_dtype(dtype).set_device(device.clone()).get_with_hints(shape, name, Shard::default())
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> Result<Tensor> {
        self.0.get_unchecked_dtype(name, dtype)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.0.contains_tensor(name)
    }
}

/// See [`Source::has`].
pub fn has(vb: &VarBuilder, name: &str) -> bool {
    vb.contains_tensor(name) && !vb.contains_tensor("no parameter has this name")
}

/// What a `Checkpoint` has instead of a tensor that is missing, from the error for it; or nothing.
pub fn hint(error: &Error) -> String {
    let text = error.to_string();
    let hint = text.lines().find_map(|line| line.split_once(" is missing; ")).map(|(_, hint)| hint);
    hint.unwrap_or_default().to_string()
}

/// The error below the context and backtraces that were wrapped around it.
pub fn root(error: &Error) -> &Error {
    match error {
        Error::WithBacktrace { inner, .. } | Error::WithPath { inner, .. } | Error::Context { inner, .. } => {
            root(inner)
        }
        error => error,
    }
}
