//! Normalisation: of queries and keys before attention, of contexts after it, and between the layers of a model.

mod blocks;
mod rows;

use std::ops::Range;

use candle_core::{D, DType, Error, Result, Tensor, bail};
use candle_nn::{Init, ops};
use serde::{Deserialize, Serialize};

use crate::base::Share;
use crate::base::Source;
use crate::base::accumulation_dtype;
use crate::base::fits_in_memory;
use crate::base::number;
use crate::linear::frozen;
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

/// Normalisation of the context of all heads together, before the output projection: parameter `context_norm.weight`,
/// and `.bias` for the kind that has one. Also read as `attn_sub_norm` (BitNet) and `inner_attn_ln` (Kosmos-2).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContextNorm {
    /// Root mean square or layer norm.
    pub kind: QkNormKind,
    /// Added to the mean square or the variance.
    pub eps: f64,
}

impl QkNorm {
    /// Checks the epsilon, in the place of which a norm is named.
    pub(crate) fn check(op: &str, name: &str, norm: Option<Self>) -> Result<()> {
        number::epsilon_of(op, name, norm.map(|norm| norm.eps))
    }
}

impl ContextNorm {
    /// Checks the epsilon, in the place of which a norm is named.
    pub(crate) fn check(op: &str, name: &str, norm: Option<Self>) -> Result<()> {
        number::epsilon_of(op, name, norm.map(|norm| norm.eps))
    }
}

const OF_CONTEXT: [&str; 3] = ["context_norm", "attn_sub_norm", "inner_attn_ln"];

/// The names under which files keep the norm of queries, the first of which is the crate's own.
const OF_QUERIES: [&str; 3] = ["q_norm", "q_layernorm", "query_layernorm"];
const OF_KEYS: [&str; 3] = ["k_norm", "k_layernorm", "key_layernorm"];

/// The norms of a layer's queries and keys.
#[derive(Debug, Clone)]
pub(crate) struct QkNorms {
    scope: QkNormScope,
    pub q: Norm,
    /// None where keys are an earlier layer's.
    pub k: Option<Norm>,
}

/// H, H_kv and D; no H_kv where keys are an earlier layer's.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormDims {
    pub h: usize,
    pub h_kv: Option<usize>,
    pub d: usize,
}

impl QkNorms {
    pub(crate) fn load(norm: QkNorm, dims: NormDims, source: &Source) -> Result<Self> {
        Ok(Self {
            scope: norm.scope,
            q: Norm::load(norm, OF_QUERIES, dims.h, dims.d, source)?,
            k: dims.h_kv.map(|h_kv| Norm::load(norm, OF_KEYS, h_kv, dims.d, source)).transpose()?,
        })
    }

    /// An error if the file has norms that the config does not mention.
    pub(crate) fn refuse(source: &Source) -> Result<()> {
        for name in OF_QUERIES.into_iter().chain(OF_KEYS) {
            for parameter in [format!("{name}.weight"), first_of_list(name)] {
                source.refuse(&parameter, "the config says there is no qk_norm")?;
            }
        }
        Ok(())
    }

    /// Whether the norms span whole projections, and so come before these are split.
    pub(crate) fn of_projections(&self) -> bool {
        self.scope == QkNormScope::Projection
    }

    /// Those of a share of the query heads and a share of the key heads, of which it counts some where norms span all
    /// heads.
    pub(crate) fn shard(self, queries: Share, keys: Share, counted_keys: Share) -> Result<Self> {
        let of_projections = self.of_projections();
        if self.scope == QkNormScope::PerHead || (self.q.kind == QkNormKind::RmsNoWeight && !of_projections) {
            return Ok(self);
        }
        let own = |norm: Norm, heads: Share, counted: Share| {
            let width = norm.weight.tensor()?.dim(0)?;
            let (own, counted) = (heads.range(width), counted.range(width));
            let span = Span { width, counted: counted.start - own.start..counted.end - own.start };
            Ok::<_, Error>(Norm { span: of_projections.then_some(span), ..norm.shard(heads)? })
        };
        let k = self.k.map(|k| own(k, keys, counted_keys)).transpose()?;
        Ok(Self { scope: self.scope, q: own(self.q, queries, queries)?, k })
    }

    /// With what variables hold now.
    pub(crate) fn freeze(&self) -> Result<Self> {
        let k = self.k.as_ref().map(Norm::freeze).transpose()?;
        Ok(Self { scope: self.scope, q: self.q.freeze()?, k })
    }

    /// The parameters under the crate's own names.
    pub(crate) fn parameters(&self) -> Result<Vec<(String, Tensor)>> {
        let mut parameters = Vec::new();
        let named = std::iter::once((OF_QUERIES[0], &self.q)).chain(self.k.iter().map(|k| (OF_KEYS[0], k)));
        for (name, norm) in named {
            parameters.extend(norm.parameters(name)?);
        }
        Ok(parameters)
    }
}

fn first_of_list(name: &str) -> String {
    format!("{name}.norms.0.weight")
}

/// A normalisation over the last dimension.
#[derive(Debug, Clone)]
pub(crate) struct Norm {
    kind: QkNormKind,
    eps: f64,
    weight: Parameter,
    bias: Option<Parameter>,
    /// Where nothing is a variable.
    affine: Option<Affine>,
    span: Option<Span>,
}

/// What normed numbers are multiplied by, and what is added, in the type that they are computed in; contiguous.
#[derive(Debug, Clone)]
struct Affine {
    factors: Tensor,
    bias: Option<Tensor>,
}

/// What a norm spans of which this process has a part.
#[derive(Debug, Clone)]
struct Span {
    /// Of all processes.
    width: usize,
    /// This process's columns but for those that another one counts.
    counted: Range<usize>,
}

/// The sum over all processes of tensors of one shape.
pub type SumFunction<'a> = dyn Fn(&Tensor) -> Result<Tensor> + 'a;

/// A weight or bias: (size,) or (H, D), or a row (1, D) for each head, which may be views of variables that training
/// changes in place.
#[derive(Debug, Clone)]
struct Parameter(Vec<Tensor>);

impl Parameter {
    fn tensor(&self) -> Result<Tensor> {
        if let [whole] = self.0.as_slice() { Ok(whole.clone()) } else { Tensor::cat(&self.0, 0) }
    }

    fn is_tracked(&self) -> bool {
        self.0.iter().any(Tensor::track_op)
    }
}

impl Norm {
    /// The root mean square of rows of one width, by itself: the weight `name.weight` (size,).
    pub(crate) fn rms(name: &str, size: usize, eps: f64, source: &Source) -> Result<Self> {
        let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::Projection, eps };
        Self::load(norm, [name; 3], 1, size, source)
    }

    /// That of a context of so many heads of one width.
    pub(crate) fn of_context(norm: ContextNorm, heads: usize, width: usize, source: &Source) -> Result<Self> {
        let norm = QkNorm { kind: norm.kind, scope: QkNormScope::Projection, eps: norm.eps };
        Self::load(norm, OF_CONTEXT, heads, width, source)
    }

    /// An error if the file has a norm of the context that the config does not mention.
    pub(crate) fn refuse_of_context(source: &Source) -> Result<()> {
        let refuse = |name| source.refuse(&format!("{name}.weight"), "the config says there is no context_norm");
        OF_CONTEXT.into_iter().try_for_each(refuse)
    }

    /// The parameters below a name.
    pub(crate) fn parameters(&self, name: &str) -> Result<Vec<(String, Tensor)>> {
        if self.kind == QkNormKind::RmsNoWeight {
            return Ok(Vec::new());
        }
        let parameters = [("weight", Some(&self.weight)), ("bias", self.bias.as_ref())];
        let tensor =
            |(part, own): (&str, Option<&Parameter>)| Some(own?.tensor().map(|own| (format!("{name}.{part}"), own)));
        parameters.into_iter().filter_map(tensor).collect()
    }

    /// The mean and variance of rows of one width: `name.weight` and `name.bias` (size,).
    pub(crate) fn layer(name: &str, size: usize, eps: f64, source: &Source) -> Result<Self> {
        let norm = QkNorm { kind: QkNormKind::Layer, scope: QkNormScope::Projection, eps };
        Self::load(norm, [name; 3], 1, size, source)
    }

    /// Of rows of one width.
    fn new(kind: QkNormKind, eps: f64, weight: Tensor, bias: Option<Tensor>) -> Result<Self> {
        let (weight, bias) = (Parameter(vec![weight]), bias.map(|bias| Parameter(vec![bias])));
        Self { kind, eps, weight, bias, affine: None, span: None }.prepared()
    }

    /// The root mean square of rows of one width, without a parameter.
    pub(crate) fn without_weight(eps: f64, size: usize, source: &Source) -> Result<Self> {
        if !fits_in_memory(&[size]) {
            return source.fail(format!("a norm of {size} entries is too large to address"));
        }
        Self::new(QkNormKind::RmsNoWeight, eps, Tensor::ones(size, source.dtype(), source.device())?, None)
    }

    fn load(norm: QkNorm, names: [&str; 3], heads: usize, d: usize, source: &Source) -> Result<Self> {
        if norm.kind == QkNormKind::RmsNoWeight {
            let width = if norm.scope == QkNormScope::Projection { heads * d } else { d };
            return Self::without_weight(norm.eps, width, source);
        }
        let has = |name: &&str| source.has(&format!("{name}.weight")) || source.has(&first_of_list(name));
        let name = names.into_iter().find(has).unwrap_or(names[0]);
        let initial = Init::Const(if norm.kind == QkNormKind::RmsPlusOne { 0.0 } else { 1.0 });
        let has_bias = norm.kind == QkNormKind::Layer;
        let (weight, bias) = if norm.scope == QkNormScope::PerHeadWeights && source.has(&first_of_list(name)) {
            let list = source.pp(name).pp("norms");
            list.refuse(&format!("{heads}.weight"), &format!("there are {heads} heads"))?;
            let (mut weights, mut biases) = (Vec::new(), Vec::new());
            for head in 0..heads {
                let one = list.pp(head);
                weights.push(one.get(d, "weight", initial)?.unsqueeze(0)?);
                if let Some(bias) = one.bias("bias", d, has_bias, Init::Const(0.0))? {
                    biases.push(bias.unsqueeze(0)?);
                }
            }
            (weights, has_bias.then_some(biases))
        } else {
            let shape = match norm.scope {
                QkNormScope::PerHead => vec![d],
                QkNormScope::PerHeadWeights => vec![heads, d],
                QkNormScope::Projection => vec![heads * d],
            };
            let source = source.pp(name);
            let weight = source.get(shape.clone(), "weight", initial)?;
            let bias = source.bias("bias", shape, has_bias, Init::Const(0.0))?;
            (vec![weight], bias.map(|bias| vec![bias]))
        };
        let (weight, bias) = (Parameter(weight), bias.map(Parameter));
        Self { kind: norm.kind, eps: norm.eps, weight, bias, affine: None, span: None }.prepared()
    }

    /// With what is computed once, where nothing is a variable.
    fn prepared(mut self) -> Result<Self> {
        if !self.has_variables() {
            self.weight = Parameter(vec![self.weight.tensor()?]);
            self.bias = self.bias.map(|bias| Ok::<_, Error>(Parameter(vec![bias.tensor()?]))).transpose()?;
            self.affine = Some(self.affine()?);
        }
        Ok(self)
    }

    /// With what variables hold now.
    pub(crate) fn freeze(&self) -> Result<Self> {
        let own = |parameter: &Parameter| Ok::<_, Error>(Parameter(vec![frozen(&parameter.tensor()?)?]));
        let (weight, bias) = (own(&self.weight)?, self.bias.as_ref().map(own).transpose()?);
        Self { kind: self.kind, eps: self.eps, weight, bias, affine: None, span: self.span.clone() }.prepared()
    }

    /// A share of the heads that have weights of their own.
    fn shard(self, heads: Share) -> Result<Self> {
        let own = |parameter: &Parameter| Ok::<_, Error>(Parameter(vec![heads.copy(&parameter.tensor()?, 0)?]));
        let (weight, bias) = (own(&self.weight)?, self.bias.as_ref().map(own).transpose()?);
        Self { weight, bias, affine: None, ..self }.prepared()
    }

    fn has_variables(&self) -> bool {
        self.weight.is_tracked() || self.bias.as_ref().is_some_and(Parameter::is_tracked)
    }

    /// (.., size), or (.., H, D) with weights of heads, to the same shape and dtype.
    pub(crate) fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let affine = self.affine()?;
        let on_cpu = xs.device().is_cpu() && affine.factors.device().is_cpu();
        if on_cpu && affine.factors.dtype() == DType::F32 && xs.dtype() != DType::F64 {
            let rows = RowNorm { subtracts_mean: self.subtracts_mean(), eps: self.eps as f32 };
            return rows.apply(xs, &affine.factors, affine.bias.as_ref());
        }
        // Candle's fused norms have no backward pass and no f64.
        if xs.track_op() || self.has_variables() || xs.dtype() == DType::F64 {
            return self.differentiable(xs, &affine);
        }
        let (weight, eps) = (self.weight.tensor()?, self.eps as f32);
        match (self.kind, &self.bias) {
            _ if weight.rank() > 1 || weight.dtype() != xs.dtype() => self.differentiable(xs, &affine),
            (QkNormKind::Rms | QkNormKind::RmsNoWeight, None) => ops::rms_norm(&xs.contiguous()?, &weight, eps),
            (QkNormKind::Layer, Some(bias)) => ops::layer_norm(&xs.contiguous()?, &weight, &bias.tensor()?, eps),
            _ => self.differentiable(xs, &affine),
        }
    }

    /// [`forward`](Self::forward) of (B, T, width), where the mean is over all processes if the norm spans them.
    pub(crate) fn forward_over(&self, xs: &Tensor, sum: Option<&SumFunction>) -> Result<Tensor> {
        let Some(Span { width, counted }) = &self.span else { return self.forward(xs) };
        let Some(sum) = sum else {
            bail!(
                "[multi_head_attention] norms of whole projections span the heads of all processes, expected their sum in \
                 the call, `with_sum`"
            )
        };
        let dtype = accumulation_dtype(xs.dtype());
        let wide = xs.to_dtype(dtype)?;
        let squares = match counted.len() {
            0 => Tensor::zeros((xs.dim(0)?, xs.dim(1)?, 1), dtype, xs.device())?,
            len => wide.narrow(D::Minus1, counted.start, len)?.sqr()?.sum_keepdim(D::Minus1)?,
        };
        self.affine()?.apply(&wide, &((sum(&squares)? / *width as f64)? + self.eps)?)?.to_dtype(xs.dtype())
    }

    fn differentiable(&self, xs: &Tensor, affine: &Affine) -> Result<Tensor> {
        let size = xs.dim(D::Minus1)? as f64;
        let mut wide = xs.to_dtype(accumulation_dtype(xs.dtype()))?;
        if self.subtracts_mean() {
            wide = wide.broadcast_sub(&(wide.sum_keepdim(D::Minus1)? / size)?)?;
        }
        let mean_square = (wide.sqr()?.sum_keepdim(D::Minus1)? / size)?;
        affine.apply(&wide, &(mean_square + self.eps)?)?.to_dtype(xs.dtype())
    }

    fn affine(&self) -> Result<Affine> {
        if let Some(affine) = &self.affine {
            return Ok(affine.clone());
        }
        let own = |parameter: &Parameter| {
            let tensor = parameter.tensor()?;
            tensor.to_dtype(accumulation_dtype(tensor.dtype()))?.contiguous()
        };
        let (weight, bias) = (own(&self.weight)?, self.bias.as_ref().map(own).transpose()?);
        Ok(Affine { factors: if self.kind == QkNormKind::RmsPlusOne { (weight + 1.0)? } else { weight }, bias })
    }

    fn subtracts_mean(&self) -> bool {
        matches!(self.kind, QkNormKind::Layer | QkNormKind::LayerNoBias)
    }
}

impl Affine {
    /// Rows over the root of their `squares` (.., 1), by Candle's operations.
    fn apply(&self, rows: &Tensor, squares: &Tensor) -> Result<Tensor> {
        let own = |parameter: &Tensor| parameter.to_dtype(rows.dtype());
        let normed = rows.broadcast_div(&squares.sqrt()?)?.broadcast_mul(&own(&self.factors)?)?;
        match &self.bias {
            Some(bias) => normed.broadcast_add(&own(bias)?),
            None => Ok(normed),
        }
    }
}
