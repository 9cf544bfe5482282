//! Reads parameters by name, with errors that say what was expected and what was found.

use std::ops::Range;

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::VarBuilder;
use candle_nn::init::{FanInOut, Init, NonLinearity, NormalOrUniform};
use candle_nn::var_builder::{Shard, ShardedVarBuilder, SimpleBackend};

use super::expect::{fits_in_memory, floats_on, floats_text};
use super::facts::{Fact, has_integers, is_claimed_by_all};
use super::quantization::QuantizationSigns;
use super::shard::{HeadCounts, HeadShard, Heads, Share};
use super::spec::ParameterSpec;

/// The suffixes that the name of a float8 weight's scale adds to the name of the weight. Weights are multiplied by
/// both, also by the one that is called `inv`.
pub const SCALES: [&str; 2] = ["_scale_inv", "_scale"];

/// The initialisation of the weight of `nn.Linear`: uniform within ±1/sqrt(in).
pub const LINEAR_WEIGHT: Init = Init::Kaiming {
    dist: NormalOrUniform::Uniform,
    fan: FanInOut::FanIn,
    // The bound of a Kaiming uniform is sqrt(3) · gain / sqrt(fan).
    non_linearity: NonLinearity::ExplicitGain(0.577_350_269_189_625_8),
};

/// The initialisation of a parameter that PyTorch draws at random and then sets to zero. An empty range is both: seeded
/// initialisation draws for it and returns zeros. Other builders may refuse it, and then make zeros.
pub const DRAWN_THEN_ZEROED: Init = Init::Uniform { lo: 0.0, up: 0.0 };

/// Returns the initialisation of the bias of `nn.Linear`.
pub fn linear_bias(in_dim: usize) -> Init {
    let bound = 1.0 / (in_dim as f64).sqrt();
    Init::Uniform { lo: -bound, up: bound }
}

/// A reader of the parameters of a layer: a builder, with the operation and the layout that errors name, and the shard
/// of the layer that is read.
#[derive(Clone)]
pub struct ParameterReader<'a> {
    /// The builder, whose dtype and device the parameters get.
    pub vb: VarBuilder<'a>,
    /// The operation that errors begin with.
    pub op: &'static str,
    layout: String,
    /// The shard whose parameters are read.
    pub shard: HeadShard,
    /// The numbers of heads of all ranks.
    heads: HeadCounts,
}

impl<'a> ParameterReader<'a> {
    /// Returns a reader for the operation `op` and the layout that errors name.
    ///
    /// # Errors
    /// If the builder returns a dtype in which attention cannot be computed.
    pub fn new(op: &'static str, layout: impl ToString, vb: VarBuilder<'a>) -> Result<Self> {
        let dtype = vb.dtype();
        if !floats_on(vb.device()).contains(&dtype) {
            bail!("[{op}] the builder returns weights as {dtype:?}, expected {}", floats_text(vb.device()))
        }
        Ok(Self { vb, op, layout: layout.to_string(), shard: HeadShard::WHOLE, heads: HeadCounts { query: 1, key: 1 } })
    }

    /// Returns a reader of one shard.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn sharded(
        op: &'static str,
        layout: impl ToString,
        vb: &'a impl WholeTensors,
        shard: HeadShard,
    ) -> Result<Self> {
        Ok(Self { shard, ..Self::new(op, layout, vb.whole())? })
    }

    /// Sets the numbers of heads of all ranks.
    ///
    /// # Errors
    /// For more ranks than query heads.
    pub fn with_heads(self, heads: HeadCounts) -> Result<Self> {
        let n = self.shard.world_size();
        if n > heads.query {
            bail!("[{}] a world size of {n} is more than the {} heads", self.op, heads.query)
        }
        Ok(Self { heads, ..self })
    }

    /// Returns the entries of this rank's heads along a dimension of `len`.
    pub fn own_range(&self, heads: Heads, len: usize) -> Range<usize> {
        self.shard.range(heads, self.heads, len)
    }

    /// Returns a reader below a prefix.
    pub fn pp(&self, prefix: impl ToString) -> Self {
        Self { vb: self.vb.pp(prefix), ..self.clone() }
    }

    /// Returns the tensor of this name and shape.
    ///
    /// # Errors
    /// For a missing or misshapen tensor, and for a float8 weight whose scale the builder does not apply.
    pub fn get(&self, shape: impl Into<Shape>, name: &str, init: Init) -> Result<Tensor> {
        let shape = shape.into();
        let stored = &stored_name(&self.vb, name);
        self.refuse_quantized(stored)?;
        if !fits_in_memory(shape.dims()) {
            return self
                .fail(format!("{} would have shape {shape:?}, which is too large to address", self.full_name(stored)));
        }
        let got = match self.vb.get_with_hints(shape.clone(), stored, init) {
            Err(_) if matches!(init, Init::Uniform { lo, up } if lo == up) => {
                self.vb.get_with_hints(shape.clone(), stored, Init::Const(0.0))
            }
            got => got,
        };
        let tensor = self.masked(stored, got.map_err(|error| self.explain(stored, &shape, error))?)?;
        // A `VarMap` returns its tensor in its own dtype.
        if tensor.dtype() != self.vb.dtype() {
            return self.fail(format!(
                "{} has dtype {:?}, expected the builder's {:?}",
                self.full_name(stored),
                tensor.dtype(),
                self.vb.dtype()
            ));
        }
        Ok(tensor)
    }

    /// Returns a bias times the mask next to it, and a bias without a mask as it is. Where the mask is 0 the product is
    /// 0, also if the bias is NaN. DINOv3 masks the bias of keys.
    fn masked(&self, name: &str, bias: Tensor) -> Result<Tensor> {
        let mask_name = format!("{name}_mask");
        if !name.ends_with("bias") || !self.has(&mask_name) {
            return Ok(bias);
        }
        if bias.track_op() {
            return self.fail(format!(
                "{} is in the file, and {} is a variable, expected a bias without a mask in training",
                self.full_name(&mask_name),
                self.full_name(name)
            ));
        }
        let shape = bias.shape();
        let mask = self.vb.get(shape.clone(), &mask_name).map_err(|error| self.explain(&mask_name, shape, error))?;
        mask.ne(0.0)?.where_cond(&(&bias * &mask)?, &bias.zeros_like()?)
    }

    /// Returns a parameter, or this rank's share of it.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn read(&self, spec: &ParameterSpec) -> Result<Tensor> {
        match spec.share {
            Some(Share::Heads { heads, dim }) => self.read_part(spec, dim, self.own_range(heads, spec.shape[dim])),
            Some(Share::Sum) if self.shard.rank() > 0 => self.read_whole(spec)?.zeros_like(),
            Some(Share::Sum) | None => self.read_whole(spec),
        }
    }

    fn read_whole(&self, spec: &ParameterSpec) -> Result<Tensor> {
        self.get(spec.shape.as_slice(), &spec.stored, spec.init)
    }

    /// Returns a parameter that the config asks for, or `None` if the config does not ask for it.
    ///
    /// # Errors
    /// As [`get`](Self::get), and if the file has a parameter that the config does not ask for.
    pub fn read_requested(&self, spec: &ParameterSpec) -> Result<Option<Tensor>> {
        match spec.refused {
            Some(why) => self.refuse([&spec.stored], why).map(|()| None),
            None => self.read(spec).map(Some),
        }
    }

    /// Returns some entries of a parameter along a dimension. The tensor is read whole, since Candle's sharded builder
    /// checks no shapes.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn read_part(&self, spec: &ParameterSpec, dim: usize, range: Range<usize>) -> Result<Tensor> {
        let whole = self.read_whole(spec)?;
        if range.len() == spec.shape[dim] {
            return Ok(whole);
        }
        whole.narrow(dim, range.start, range.len())?.force_contiguous()
    }

    /// Refuses tensors that would be passed over although they change the output.
    ///
    /// # Errors
    /// If the file has one of these names, with the reason `why`.
    pub fn refuse(&self, names: impl IntoIterator<Item = impl AsRef<str>>, why: &str) -> Result<()> {
        for name in names {
            let name = name.as_ref();
            if self.has(name) {
                return self.fail(format!("{} is in the file, but {why}", self.full_name(name)));
            }
        }
        Ok(())
    }

    /// Refuses a quantised weight, and a weight whose scale the builder does not apply. The builder of `weights::open`
    /// applies the scales of float8, and has no tensors of their names.
    fn refuse_quantized(&self, name: &str) -> Result<()> {
        let is_opened = Fact::Opened.is_known_of(&self.vb);
        let full_name = self.full_name(name);
        if let Some(found) = QuantizationSigns::beside(name, |beside| self.has(beside)) {
            // The error of an opened file is its builder's, which knows dtypes and the config too.
            return if is_opened { Ok(()) } else { self.fail(format!("{full_name} {found}")) };
        }
        if has_integers(&self.vb, &full_name) {
            let Err(error) = self.vb.get_unchecked(name) else {
                return self.fail(format!("{full_name} has integers in the file, expected floats"));
            };
            return Err(self.explain(name, &Shape::from(()), error));
        }
        let Some(scale) = SCALES.iter().map(|suffix| format!("{name}{suffix}")).find(|scale| self.has(scale)) else {
            return Ok(());
        };
        let scale = self.full_name(&scale);
        if is_opened {
            return self
                .fail(format!("{scale} is next to {full_name}, expected no scale of a weight that is not float8"));
        }
        self.fail(format!(
            "{full_name} is to be multiplied by {scale}, which this builder does not do; that of weights::open does"
        ))
    }

    /// Returns whether the builder has a tensor of this name in particular, as [`has`] does.
    pub fn has(&self, name: &str) -> bool {
        has(&self.vb, name)
    }

    /// Returns the first of the names of a module whose weight the builder has, or else the first name.
    pub fn stored_module<'n>(&self, names: &[&'n str]) -> &'n str {
        let is_there = |name: &&&str| self.has(&format!("{name}.weight"));
        names.iter().find(is_there).unwrap_or(&names[0])
    }

    /// Returns an error of the operation and the layout.
    ///
    /// # Errors
    /// Always.
    pub fn fail<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        bail!("[{}] {message} (layout {})", self.op, self.layout)
    }

    pub(super) fn full_name(&self, name: &str) -> String {
        match self.vb.prefix() {
            prefix if prefix.is_empty() => name.to_string(),
            prefix => format!("{prefix}.{name}"),
        }
    }

    /// Returns an error with the shape that was expected, instead of the error of a builder.
    pub(super) fn explain(&self, name: &str, expected: &Shape, error: Error) -> Error {
        let problem = match root(&error) {
            Error::CannotFindTensor { .. } | Error::SafeTensor(safetensors::SafeTensorError::TensorNotFound(_)) => {
                format!(" is missing, expected shape {expected:?}")
            }
            Error::UnexpectedShape { got, .. } => format!(" has shape {got:?}, expected {expected:?}"),
            other => {
                let text = other.to_string();
                // The errors of a checkpoint name the tensor themselves.
                match text.strip_prefix(&self.full_name(name)) {
                    Some(rest) => rest.to_string(),
                    None => format!(": {text}"),
                }
            }
        };
        let hint = match missing_tensor_hint(&error) {
            Some(hint) => format!("; {hint}"),
            None => String::new(),
        };
        Error::msg(format!("[{}] {}{problem} (layout {}){hint}", self.op, self.full_name(name), self.layout))
    }
}

/// A builder that ranks read their shards from: Candle's sharded builder, or one of whole tensors, such as that of
/// `weights::open`, which quantised weights need.
pub trait WholeTensors {
    /// Returns a builder of the same tensors, whole.
    fn whole(&self) -> VarBuilder<'_>;
}

impl WholeTensors for VarBuilder<'_> {
    fn whole(&self) -> VarBuilder<'_> {
        self.clone()
    }
}

impl WholeTensors for ShardedVarBuilder<'static> {
    fn whole(&self) -> VarBuilder<'_> {
        let prefix = self.prefix();
        let dtype = self.dtype();
        let device = self.device().clone();
        let root = VarBuilder::from_backend(Box::new(WholeBackend(self.root())), dtype, device);
        if prefix.is_empty() { root } else { root.pp(prefix) }
    }
}

/// A backend of whole tensors over a sharded builder.
struct WholeBackend(ShardedVarBuilder<'static>);

impl SimpleBackend for WholeBackend {
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

/// Returns whether a builder has a tensor of this name in particular, or under the name that PEFT moves it to. One that
/// claims every name, as `VarBuilder::zeros` does, has none.
pub fn has(vb: &VarBuilder, name: &str) -> bool {
    let is_there = vb.contains_tensor(name) || moved_names(name).any(|moved| vb.contains_tensor(&moved));
    is_there && !is_claimed_by_all(vb)
}

/// Returns the names to which PEFT moves the parameter of a module that it adapts, or of which it trains a copy:
/// `q_proj.base_layer.weight` and `q_proj.original_module.weight` for `q_proj.weight`.
pub fn moved_names(name: &str) -> impl Iterator<Item = String> {
    let split = name.rsplit_once('.');
    let moved = |inner: &str| split.map(|(module, parameter)| format!("{module}.{inner}.{parameter}"));
    [moved("base_layer"), moved("original_module")].into_iter().flatten()
}

/// Returns the name under which a builder has a parameter: this name, or the name to which PEFT moved the parameter.
pub fn stored_name(vb: &VarBuilder, name: &str) -> String {
    if vb.contains_tensor(name) {
        return name.to_string();
    }
    moved_names(name).find(|moved| vb.contains_tensor(moved)).unwrap_or_else(|| name.to_string())
}

/// Returns what a checkpoint has instead of a missing or misshapen tensor, from the error of its builder, which has
/// it as the context next to the cause.
pub fn missing_tensor_hint(error: &Error) -> Option<String> {
    match error {
        Error::WithBacktrace { inner, .. } | Error::WithPath { inner, .. } => missing_tensor_hint(inner),
        Error::Context { inner, context } => match &**inner {
            Error::CannotFindTensor { .. } | Error::UnexpectedShape { .. } => Some(context.to_string()),
            inner => missing_tensor_hint(inner),
        },
        _ => None,
    }
}

/// Returns the error below the context and backtraces that were wrapped around it.
pub fn root(error: &Error) -> &Error {
    match error {
        Error::WithBacktrace { inner, .. } | Error::WithPath { inner, .. } | Error::Context { inner, .. } => {
            root(inner)
        }
        error => error,
    }
}
