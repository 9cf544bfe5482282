//! Normalisation of queries and keys before attention, of the attention output, and between the layers of a model.

mod blocks;
mod config;
mod cuda;
mod metal;
mod names;
mod passes;
mod rows;
#[cfg(test)]
mod tests;

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_nn::{Init, ops};

use crate::base::{
    Heads, NO_BIAS, Parameter, ParameterList, ParameterReader, ParameterSpec, accumulation_dtype, check_memory,
};
pub use blocks::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm, rms_norm_plus_one};
pub use config::{OutputNorm, QkNorm, QkNormKind, QkNormScope, check_epsilon};
use cuda::CudaNorm;
pub(crate) use cuda::{GATED_NORM_CASE, NORM_CASE};
pub(crate) use metal::{METAL_GATED_NORM_CASE, METAL_NORM_CASE};
pub use names::{KEY_NORM_NAMES, NormName, OUTPUT_NORM_NAMES, QUERY_NORM_NAMES, VALUE_NORM_NAMES};
use passes::RowNorm;
use rows::Affine;

/// A norm of a layer before its parameters are loaded.
#[derive(Debug, Clone, Copy)]
pub struct NormSpec {
    /// The formula.
    pub norm: QkNorm,
    /// The names of the norm in files.
    pub names: &'static [NormName],
    /// Whether the norm is of query heads or of key heads.
    pub heads: Heads,
    /// The number of heads.
    pub count: usize,
    /// The number of entries of each head.
    pub width: usize,
}

impl NormSpec {
    fn shape(&self) -> Vec<usize> {
        match self.norm.scope {
            QkNormScope::Projection => vec![self.count * self.width],
            QkNormScope::PerHeadWeights => vec![self.count, self.width],
            QkNormScope::PerHead => vec![self.width],
        }
    }

    /// Returns the name of the norm in the file of `source`, and the crate's own name if the file has none.
    fn stored_name(&self, source: &ParameterReader) -> NormName {
        let is_there = |name: &&NormName| source.has(&name.weight_name()) || source.has(&name.first_of_list());
        self.names.iter().find(is_there).copied().unwrap_or(self.names[0])
    }

    /// Returns the parameters, under the names that the file of `source` uses.
    pub fn specs(&self, source: &ParameterReader) -> Result<Vec<ParameterSpec>> {
        let Self { norm, names, heads, count, .. } = *self;
        if norm.kind == QkNormKind::RmsNoWeight {
            return Ok(Vec::new());
        }
        norm.kind.refuse_unknown_conversion(source)?;
        let stored = self.stored_name(source);
        let is_list = norm.scope == QkNormScope::PerHeadWeights && source.has(&stored.first_of_list());
        let list = format!("{}.norms", stored.module);
        if is_list {
            source.refuse([format!("{list}.{count}.weight")], &format!("there are {count} heads"))?;
            if norm.kind != QkNormKind::Layer {
                source.refuse([format!("{}.bias", stored.module)], NO_BIAS)?;
            }
        }
        let spec = |parameter: &'static str, init| {
            let own = if parameter == "weight" { stored.weight } else { parameter };
            let name = if is_list { format!("{list}.{{}}.{own}") } else { format!("{}.{own}", stored.module) };
            let spec = ParameterSpec::new(format!("{}.{parameter}", names[0].module), self.shape(), init).stored(name);
            if norm.scope == QkNormScope::PerHead { spec } else { spec.by_head(heads, 0) }
        };
        let weight = spec("weight", norm.kind.initial_weight());
        let bias = spec("bias", Init::Const(0.0)).only_if(norm.kind == QkNormKind::Layer, NO_BIAS);
        Ok(vec![weight, bias])
    }

    /// Builds the norm from loaded parameters. A norm without a weight is in `dtype` on `device`.
    pub fn build(&self, parameters: &ParameterList, dtype: DType, device: &Device) -> Result<Norm> {
        let get = |parameter: &str| parameters.get(&format!("{}.{parameter}", self.names[0].module)).cloned();
        let QkNorm { kind, eps, .. } = self.norm;
        match get("weight") {
            Some(weight) => Norm::new(kind, eps, weight, get("bias")),
            None => Norm::without_weight(eps, *self.shape().last().unwrap_or(&0), dtype, device),
        }
    }
}

/// Checks that the file has no norms of queries, keys or the attention output that the config does not mention.
pub fn refuse_norms(qk_norm: Option<QkNorm>, output_norm: Option<OutputNorm>, source: &ParameterReader) -> Result<()> {
    if qk_norm.is_none() {
        refuse_names(source, QUERY_NORM_NAMES, "qk_norm")?;
        refuse_names(source, KEY_NORM_NAMES, "qk_norm")?;
    }
    if output_norm.is_none() {
        refuse_names(source, OUTPUT_NORM_NAMES, "output_norm")?;
    }
    Ok(())
}

fn refuse_names(source: &ParameterReader, names: &[NormName], option: &str) -> Result<()> {
    let parameters = names.iter().flat_map(|name| name.parameters());
    source.refuse(parameters, &format!("the config says there is no {option}"))
}

/// A normalisation over the last dimension.
#[derive(Debug, Clone)]
pub struct Norm {
    kind: QkNormKind,
    eps: f64,
    /// (size,) or (H, D).
    weight: Parameter,
    bias: Option<Parameter>,
    /// The result of [`affine`](Self::affine) if no parameter is a variable.
    affine: Option<Affine>,
    sharded: Option<ShardedDimension>,
}

/// The dimension of a norm whose entries are sharded across ranks.
#[derive(Debug, Clone, Copy)]
pub struct ShardedDimension {
    /// The number of entries of all ranks.
    pub width: usize,
    /// Whether this rank's shard is counted: false on ranks that have a duplicate of another rank's shard.
    pub counts: bool,
}

/// A function that returns the sum of a tensor over all ranks. All ranks pass tensors of one shape.
pub type AllReduce<'a> = dyn Fn(&Tensor) -> Result<Tensor> + 'a;

impl Norm {
    fn new(kind: QkNormKind, eps: f64, weight: Parameter, bias: Option<Parameter>) -> Result<Self> {
        let mut norm = Self { kind, eps, weight, bias, affine: None, sharded: None };
        if !norm.weight.is_tracked() && !norm.bias.as_ref().is_some_and(Parameter::is_tracked) {
            norm.affine = Some(norm.affine()?);
        }
        Ok(norm)
    }

    /// Loads a norm over rows of `size` entries: `weight` (size,), also read as `gamma`, and `bias` (size,), also read
    /// as `beta`, below the prefix of `source`.
    pub fn load(kind: QkNormKind, eps: f64, size: usize, has_bias: bool, source: &ParameterReader) -> Result<Self> {
        kind.refuse_unknown_conversion(source)?;
        let weight_name = if source.has("weight") || !source.has("gamma") { "weight" } else { "gamma" };
        let bias_name = if source.has("bias") || !source.has("beta") { "bias" } else { "beta" };
        let weight = source.get(size, weight_name, kind.initial_weight())?;
        let bias = ParameterSpec::new(bias_name, [size], Init::Const(0.0)).only_if(has_bias, NO_BIAS);
        Self::new(kind, eps, weight.into(), source.read_requested(&bias)?.map(Parameter::from))
    }

    /// Creates the root mean square norm over rows of `size` entries, without parameters.
    pub fn without_weight(eps: f64, size: usize, dtype: DType, device: &Device) -> Result<Self> {
        check_memory("norm", format_args!("a norm of {size} entries"), &[size])?;
        Self::new(QkNormKind::RmsNoWeight, eps, Tensor::ones(size, dtype, device)?.into(), None)
    }

    /// Sets the dimension that is sharded across ranks.
    pub fn with_sharded(self, sharded: Option<ShardedDimension>) -> Self {
        Self { sharded, ..self }
    }

    /// Returns a copy with the current values of variables, without gradients.
    pub fn freeze(&self) -> Result<Self> {
        let bias = self.bias.as_ref().map(Parameter::freeze).transpose()?;
        Ok(Self::new(self.kind, self.eps, self.weight.freeze()?, bias)?.with_sharded(self.sharded))
    }

    /// Normalises (.., size), or (.., H, D) with a weight for each head. The result has the shape and dtype of `xs`.
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let affine = self.affine()?;
        if let Some(rows) = self.rows(xs, &affine) {
            return rows.apply(xs, &affine);
        }
        if xs.device().is_cuda()
            && affine.weight.dtype() == DType::F32
            && let Some(call) = CudaNorm::plan(self.row_norm(), xs, &affine)
        {
            return call.run();
        }
        if xs.device().is_metal()
            && let Some(normed) = metal::norm_on_metal(self.row_norm(), xs, &affine)
        {
            return normed;
        }
        // Candle's fused norms have no backward pass and no f64, and need a weight (D,) of the dtype of the rows.
        if xs.track_op() || self.affine.is_none() {
            return self.composed(xs, &affine, None);
        }
        let weight = self.weight.tensor()?;
        let eps = self.eps as f32;
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

    /// Returns the norm as a pass over rows, if `xs` is on a CPU and computed in f32.
    fn rows(&self, xs: &Tensor, affine: &Affine) -> Option<RowNorm> {
        let on_cpu = xs.device().is_cpu() && affine.weight.device().is_cpu();
        if !on_cpu || affine.weight.dtype() != DType::F32 || xs.dtype() == DType::F64 {
            return None;
        }
        Some(self.row_norm())
    }

    fn row_norm(&self) -> RowNorm {
        RowNorm { subtracts_mean: self.kind.subtracts_mean(), eps: self.eps as f32 }
    }

    /// Normalises (B, T, width). If the dimension is sharded across ranks, the mean is over the shards of all ranks.
    ///
    /// # Errors
    /// For a sharded dimension without `all_reduce`.
    pub fn forward_sharded(&self, xs: &Tensor, all_reduce: Option<&AllReduce>) -> Result<Tensor> {
        match (self.sharded, all_reduce) {
            (None, _) => self.forward(xs),
            (Some(dimension), Some(all_reduce)) => {
                self.composed(xs, &self.affine()?, Some(AcrossRanks { dimension, all_reduce }))
            }
            (Some(_), None) => bail!(
                "[multi_head_attention] the norm of a whole projection is over the heads of all ranks, expected their \
                 all-reduce in the call: `with_all_reduce`"
            ),
        }
    }

    /// Normalises with Candle's operations, which have gradients.
    fn composed(&self, xs: &Tensor, affine: &Affine, across_ranks: Option<AcrossRanks>) -> Result<Tensor> {
        // An empty view may begin past the end of its buffer, where Candle's sums panic.
        let is_far = xs.elem_count() == 0 && xs.layout().start_offset() > 0;
        let xs = if is_far { &xs.zeros_like()? } else { xs };
        let mut size = xs.dim(D::Minus1)?;
        let mut rows = xs.to_dtype(accumulation_dtype(xs.dtype()))?;
        if self.kind.subtracts_mean() {
            rows = rows.broadcast_sub(&(rows.sum_keepdim(D::Minus1)? / size as f64)?)?;
        }
        let mut squares = rows.sqr()?.sum_keepdim(D::Minus1)?;
        if let Some(AcrossRanks { dimension, all_reduce }) = across_ranks {
            let own = if dimension.counts { squares } else { squares.zeros_like()? };
            squares = all_reduce(&own)?;
            size = dimension.width;
        }
        let root = ((squares / size as f64)? + self.eps)?.sqrt()?;
        let mut normed = rows.broadcast_div(&root)?.broadcast_mul(&affine.weight.to_dtype(rows.dtype())?)?;
        if let Some(bias) = &affine.bias {
            normed = normed.broadcast_add(&bias.to_dtype(rows.dtype())?)?;
        }
        normed.to_dtype(xs.dtype())
    }

    /// Returns the factor of normed numbers and the number that is added, contiguous, in the dtype of the computation.
    fn affine(&self) -> Result<Affine> {
        if let Some(affine) = &self.affine {
            return Ok(affine.clone());
        }
        let mut weight = contiguous_wide(&self.weight)?;
        if self.kind == QkNormKind::RmsPlusOne {
            weight = (weight + 1.0)?;
        }
        let bias = self.bias.as_ref().map(contiguous_wide).transpose()?;
        Ok(Affine { weight, bias })
    }
}

/// The sharded dimension of a norm, and the sum over the ranks.
struct AcrossRanks<'a> {
    dimension: ShardedDimension,
    all_reduce: &'a AllReduce<'a>,
}

/// Returns a parameter in the dtype of the computation, contiguous.
fn contiguous_wide(parameter: &Parameter) -> Result<Tensor> {
    let tensor = parameter.tensor()?;
    tensor.to_dtype(accumulation_dtype(tensor.dtype()))?.contiguous()
}
