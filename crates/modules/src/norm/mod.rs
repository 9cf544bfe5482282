//! Normalisation: of queries and keys before attention, of contexts after it, and between the layers of a model.

mod blocks;
mod rows;
#[cfg(test)]
mod tests;

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_nn::{Init, ops};
use serde::{Deserialize, Serialize};

use crate::base::{Heads, NO_BIAS, Parameter, ParameterList, Source, Spec, accumulation_dtype, check_memory, number};
pub use blocks::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm, rms_norm_plus_one};
use rows::RowNorm;

/// Which normalisation is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum QkNormKind {
    /// Root mean square, a weight and no bias.
    Rms,
    /// Root mean square, times 1 + weight (Gemma 3).
    RmsPlusOne,
    /// Root mean square alone, without a weight (Llama 4).
    RmsNoWeight,
    /// Mean and variance, a weight and a bias.
    Layer,
    /// Mean and variance, a weight and no bias (Cohere, StableLM).
    LayerNoBias,
}

/// What one normalisation spans.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum QkNormScope {
    /// Each head by itself; the weight (D,) is shared by all heads (Qwen 3).
    PerHead,
    /// Each head by itself, with a weight of its own: (H, D), and (H_kv, D) for keys (Cohere, StableLM).
    PerHeadWeights,
    /// The whole projection, before it is split into heads (OLMo 2).
    Projection,
}

/// Normalisation of queries and keys: parameters `q_norm.weight`, `k_norm.weight`, and `.bias` for the kind that has
/// one. Also read under `q_layernorm` and `query_layernorm` where a file has those; StableLM's list of a norm for each
/// head, `q_layernorm.norms.{i}.weight`, is read as one weight (H, D).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QkNorm {
    /// Root mean square or layer norm.
    pub kind: QkNormKind,
    /// One head or the whole projection.
    pub scope: QkNormScope,
    /// Added to the mean square or the variance.
    pub eps: f64,
}

/// Normalisation of the context of all heads together, before the output projection: parameter `output_norm.weight`,
/// and `.bias` for the kind that has one. Also read as `attn_sub_norm` (BitNet) and `inner_attn_ln` (Kosmos-2).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OutputNorm {
    /// Root mean square or layer norm.
    pub kind: QkNormKind,
    /// Added to the mean square or the variance.
    pub eps: f64,
}

impl QkNormKind {
    /// How a weight begins.
    fn initial_weight(self) -> Init {
        Init::Const(if self == Self::RmsPlusOne { 0.0 } else { 1.0 })
    }

    fn subtracts_mean(self) -> bool {
        matches!(self, Self::Layer | Self::LayerNoBias)
    }
}

/// As a norm of one row.
impl From<OutputNorm> for QkNorm {
    fn from(OutputNorm { kind, eps }: OutputNorm) -> Self {
        Self { kind, scope: QkNormScope::Projection, eps }
    }
}

/// Checks the epsilon of the option `name`.
pub fn check_epsilon(op: &str, name: &str, norm: Option<impl Into<QkNorm>>) -> Result<()> {
    number::epsilon(op, &format!("eps of {name}"), norm.map(|norm| norm.into().eps))
}

/// The names under which files keep the norm of queries, the first of which is the crate's own.
pub const OF_QUERIES: [&str; 3] = ["q_norm", "q_layernorm", "query_layernorm"];

/// Likewise of keys.
pub const OF_KEYS: [&str; 3] = ["k_norm", "k_layernorm", "key_layernorm"];

/// Likewise of the context.
pub const OF_CONTEXT: [&str; 3] = ["output_norm", "attn_sub_norm", "inner_attn_ln"];

/// One of a layer's norms: where its parameters are, and what it spans.
#[derive(Debug, Clone, Copy)]
pub struct NormPlace {
    /// What it computes.
    pub norm: QkNorm,
    /// Where files keep it.
    pub names: [&'static str; 3],
    /// Whose heads it is of.
    pub heads: Heads,
    /// How many heads there are.
    pub count: usize,
    /// How wide each is.
    pub width: usize,
}

impl NormPlace {
    fn shape(&self) -> Vec<usize> {
        match self.norm.scope {
            QkNormScope::Projection => vec![self.count * self.width],
            QkNormScope::PerHeadWeights => vec![self.count, self.width],
            QkNormScope::PerHead => vec![self.width],
        }
    }

    /// The parameters, under the names that the file has for them.
    pub fn specs(&self, source: &Source) -> Result<Vec<Spec>> {
        let Self { norm, names, heads, count, .. } = *self;
        if norm.kind == QkNormKind::RmsNoWeight {
            return Ok(Vec::new());
        }
        let has = |name: &&str| source.has(&format!("{name}.weight")) || source.has(&first_of_list(name));
        let stored = names.into_iter().find(has).unwrap_or(names[0]);
        let is_list = norm.scope == QkNormScope::PerHeadWeights && source.has(&first_of_list(stored));
        let list = format!("{stored}.norms");
        if is_list {
            source.refuse([format!("{list}.{count}.weight")], &format!("there are {count} heads"))?;
            if norm.kind != QkNormKind::Layer {
                source.refuse([format!("{stored}.bias")], NO_BIAS)?;
            }
        }
        let spec = |part: &'static str, init| {
            let stored = if is_list { format!("{list}.{{}}.{part}") } else { format!("{stored}.{part}") };
            let spec = Spec::new(format!("{}.{part}", names[0]), self.shape(), init).stored(stored);
            if norm.scope == QkNormScope::PerHead { spec } else { spec.by_head(heads, 0) }
        };
        let bias = spec("bias", Init::Const(0.0)).only_if(norm.kind == QkNormKind::Layer, NO_BIAS);
        Ok(vec![spec("weight", norm.kind.initial_weight()), bias])
    }

    /// The norm, of numbers in a dtype on a device.
    pub fn norm(&self, parameters: &ParameterList, dtype: DType, device: &Device) -> Result<Norm> {
        let get = |part: &str| parameters.get(&format!("{}.{part}", self.names[0])).cloned();
        let QkNorm { kind, eps, .. } = self.norm;
        match get("weight") {
            Some(weight) => Norm::new(kind, eps, weight, get("bias")),
            None => Norm::without_weight(eps, *self.shape().last().unwrap_or(&0), dtype, device),
        }
    }
}

/// An error if the file has norms of queries, keys or a context that the config does not mention.
pub fn refuse_norms(qk_norm: Option<QkNorm>, output_norm: Option<OutputNorm>, source: &Source) -> Result<()> {
    let of_heads = [OF_QUERIES, OF_KEYS].map(|names| ("qk_norm", qk_norm.is_some(), names));
    let all = of_heads.into_iter().chain([("output_norm", output_norm.is_some(), OF_CONTEXT)]);
    for (option, _, names) in all.filter(|(_, is_set, _)| !is_set) {
        let of = |name| [format!("{name}.weight"), format!("{name}.bias"), first_of_list(name)];
        source.refuse(names.into_iter().flat_map(of), &format!("the config says there is no {option}"))?;
    }
    Ok(())
}

fn first_of_list(name: &str) -> String {
    format!("{name}.norms.0.weight")
}

/// A normalisation over the last dimension.
#[derive(Debug, Clone)]
pub struct Norm {
    kind: QkNormKind,
    eps: f64,
    /// (size,) or (H, D).
    weight: Parameter,
    bias: Option<Parameter>,
    /// [`affine`](Self::affine) where nothing is a variable.
    affine: Option<[Tensor; 2]>,
    span: Option<Span>,
}

/// What a norm spans of which this process has a part.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// Of all processes.
    pub width: usize,
    /// Whether this process's part counts: of those that have a part twice, one does.
    pub counts: bool,
}

/// The sum over all processes of tensors of one shape.
pub type AllReduce<'a> = dyn Fn(&Tensor) -> Result<Tensor> + 'a;

impl Norm {
    fn new(kind: QkNormKind, eps: f64, weight: Parameter, bias: Option<Parameter>) -> Result<Self> {
        let mut norm = Self { kind, eps, weight, bias, affine: None, span: None };
        if !norm.weight.is_tracked() && !norm.bias.as_ref().is_some_and(Parameter::is_tracked) {
            norm.affine = Some(norm.affine()?);
        }
        Ok(norm)
    }

    /// Of rows of one width, below the source's prefix: `weight`, also read as `gamma`, and `bias`, also read as `beta`
    /// (size,).
    pub fn load(kind: QkNormKind, eps: f64, size: usize, has_bias: bool, source: &Source) -> Result<Self> {
        let name = |names: [&'static str; 2]| names.into_iter().find(|name| source.has(name)).unwrap_or(names[0]);
        let weight = source.get(size, name(["weight", "gamma"]), kind.initial_weight())?;
        let bias = Spec::new(name(["bias", "beta"]), [size], Init::Const(0.0)).only_if(has_bias, NO_BIAS);
        Self::new(kind, eps, weight.into(), source.read_wanted(&bias)?.map(Parameter::from))
    }

    /// The root mean square of rows of one width, without a parameter.
    pub fn without_weight(eps: f64, size: usize, dtype: DType, device: &Device) -> Result<Self> {
        check_memory("norm", format_args!("a norm of {size} entries"), &[size])?;
        Self::new(QkNormKind::RmsNoWeight, eps, Tensor::ones(size, dtype, device)?.into(), None)
    }

    /// Over the parts of all processes.
    pub fn over(self, span: Option<Span>) -> Self {
        Self { span, ..self }
    }

    /// With what variables hold now.
    pub fn freeze(&self) -> Result<Self> {
        let bias = self.bias.as_ref().map(Parameter::freeze).transpose()?;
        Ok(Self::new(self.kind, self.eps, self.weight.freeze()?, bias)?.over(self.span))
    }

    /// (.., size), or (.., H, D) with weights of heads, to the same shape and dtype.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let affine = self.affine()?;
        if let Some(rows) = self.rows(xs, &affine) {
            return rows.apply(xs, &affine);
        }
        // Candle's fused norms have no backward pass and no f64, and take a weight (D,) of the dtype of the rows.
        if xs.track_op() || self.affine.is_none() {
            return self.composed(xs, &affine, None);
        }
        let (weight, eps) = (self.weight.tensor()?, self.eps as f32);
        let is_fused = weight.rank() == 1 && weight.dtype() == xs.dtype() && xs.dtype() != DType::F64;
        match (self.kind, &self.bias) {
            (QkNormKind::Rms | QkNormKind::RmsNoWeight, None) if is_fused => {
                ops::rms_norm(&xs.contiguous()?, &weight, eps)
            }
            (QkNormKind::Layer, Some(bias)) if is_fused => {
                ops::layer_norm(&xs.contiguous()?, &weight, &bias.tensor()?, eps)
            }
            _ => self.composed(xs, &affine, None),
        }
    }

    /// The norm in one pass, where a CPU computes in f32.
    fn rows(&self, xs: &Tensor, [factors, _]: &[Tensor; 2]) -> Option<RowNorm> {
        let on_cpu = xs.device().is_cpu() && factors.device().is_cpu();
        let rows = RowNorm { subtracts_mean: self.kind.subtracts_mean(), eps: self.eps as f32, gate: None };
        (on_cpu && factors.dtype() == DType::F32 && xs.dtype() != DType::F64).then_some(rows)
    }

    /// [`forward`](Self::forward) of (B, T, width), where the mean is over all processes if the norm spans them.
    pub fn forward_over(&self, xs: &Tensor, sum: Option<&AllReduce>) -> Result<Tensor> {
        match (self.span, sum) {
            (None, _) => self.forward(xs),
            (Some(span), Some(sum)) => self.composed(xs, &self.affine()?, Some((span, sum))),
            (Some(_), None) => bail!(
                "[multi_head_attention] norms of whole projections span the heads of all processes, expected their sum in \
                 the call, `with_all_reduce`"
            ),
        }
    }

    /// By Candle's operations, which have gradients.
    fn composed(&self, xs: &Tensor, [factors, bias]: &[Tensor; 2], over: Option<(Span, &AllReduce)>) -> Result<Tensor> {
        // A view of nothing may begin past the end of its buffer, where Candle's sums panic.
        let is_far = xs.elem_count() == 0 && xs.layout().start_offset() > 0;
        let xs = if is_far { &xs.zeros_like()? } else { xs };
        let (mut size, mut rows) = (xs.dim(D::Minus1)?, xs.to_dtype(accumulation_dtype(xs.dtype()))?);
        if self.kind.subtracts_mean() {
            rows = rows.broadcast_sub(&(rows.sum_keepdim(D::Minus1)? / size as f64)?)?;
        }
        let mut squares = rows.sqr()?.sum_keepdim(D::Minus1)?;
        if let Some((Span { width, counts }, sum)) = over {
            squares = sum(&if counts { squares } else { squares.zeros_like()? })?;
            size = width;
        }
        let own = |parameter: &Tensor| parameter.to_dtype(rows.dtype());
        let root = ((squares / size as f64)? + self.eps)?.sqrt()?;
        let normed = rows.broadcast_div(&root)?.broadcast_mul(&own(factors)?)?;
        let normed = if bias.elem_count() > 0 { normed.broadcast_add(&own(bias)?)? } else { normed };
        normed.to_dtype(xs.dtype())
    }

    /// What normed numbers are multiplied by, and what is added, which is empty where nothing is, in the type that they
    /// are computed in; contiguous.
    fn affine(&self) -> Result<[Tensor; 2]> {
        if let Some(affine) = &self.affine {
            return Ok(affine.clone());
        }
        let own = |parameter: &Parameter| {
            let tensor = parameter.tensor()?;
            tensor.to_dtype(accumulation_dtype(tensor.dtype()))?.contiguous()
        };
        let weight = own(&self.weight)?;
        let bias = match &self.bias {
            Some(bias) => own(bias)?,
            None => Tensor::zeros(0, weight.dtype(), weight.device())?,
        };
        Ok([if self.kind == QkNormKind::RmsPlusOne { (weight + 1.0)? } else { weight }, bias])
    }
}
