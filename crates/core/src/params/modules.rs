//! The linear layers of a layout that adapters change.

use candle_core::{Result, Tensor, bail};

use super::layout::WeightLayout;
use super::layout_tensors::other_name;
use super::tensors::{ProjectionTensor, has_separate_biases, projection_tensors};
use crate::config::MultiHeadAttentionConfig;
use candle_attention_modules::base::{ParameterReader, StoredDims};
use candle_attention_modules::linear::{ByProjection, LoraMatrices, Projections, ReplacedRows};
use candle_attention_modules::warn_once;

/// A linear layer of a checkpoint that computes one projection or several, and that an adapter may change.
#[derive(Debug, Clone)]
pub struct AdaptableModule {
    /// The name of the module below the attention module.
    pub name: String,
    /// The other name that some models have for it.
    pub other_name: Option<String>,
    /// The number of outputs.
    pub outputs: usize,
    /// The number of inputs.
    pub inputs: usize,
}

/// The matrices that an adapter has for a module.
#[derive(Debug, Clone)]
pub struct AdapterMatrices {
    /// A, (r, in).
    pub a: Tensor,
    /// B, (out, r).
    pub b: Tensor,
    /// The factor of B A.
    pub scaling: f64,
    /// The probability with which an entry of the input is dropped in training.
    pub dropout: f64,
}

/// A module that an adapter may change, with its weight.
pub(crate) struct ModuleWeight {
    pub module: AdaptableModule,
    weight: ProjectionTensor,
}

impl ModuleWeight {
    /// Splits the rows of B into the rows of each projection.
    pub fn split(&self, matrices: &AdapterMatrices) -> LoraMatrices {
        let rows = self.weight.tensor.split_rows(&matrices.b);
        LoraMatrices {
            a: self.weight.tensor.order_columns(&matrices.a),
            b: ByProjection::from_iter(self.weight.projections.iter().copied().zip(rows)),
            scaling: matrices.scaling,
            dropout: matrices.dropout,
        }
    }
}

/// The names that a parameter may have below the attention module.
#[derive(Debug, Clone)]
pub struct ParameterName {
    /// The name in the layout.
    pub name: String,
    /// The other name that some models have for it, as `q_bias` for `query.bias`.
    pub other: Option<String>,
}

/// Returns other values of a parameter, by its name and its current values; `None` where it stays as it is.
pub(crate) type Replacement<'a> = dyn FnMut(&ParameterName, &Tensor) -> Result<Option<Tensor>> + 'a;

/// Returns the rows of projections for which `replacement` has other values. Variables among them are read in every
/// call.
///
/// # Errors
/// For a config that does not fit the layout, for a module of the caller, and the errors of `replacement`.
pub(crate) fn replaced_rows(
    op: &str,
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    projections: &Projections,
    replacement: &mut Replacement,
) -> Result<ByProjection<ReplacedRows>> {
    let linears = projections.to_linears()?;
    let mut replaced = ByProjection::new();
    let separate_biases = has_separate_biases(cfg, layout);
    for tensor in projection_tensors(op, cfg, layout, 0..cfg.num_heads(), separate_biases)? {
        let Some(current) = tensor.join(&linears)? else { continue };
        let name = tensor.tensor.spec.name.clone();
        let other = other_name(&name, tensor.is_bias, tensor.projections);
        if let Some(values) = replacement(&ParameterName { name, other }, &current)? {
            tensor.replace(values, projections.dtype, &mut replaced)?;
        }
    }
    Ok(replaced)
}

/// Logs a warning, once in a process, if the file has a PEFT adapter for the module of a weight: the weight alone is
/// loaded.
pub(crate) fn warn_of_adapter(stored: &str, reader: &ParameterReader) {
    let Some(module) = stored.strip_suffix(".weight") else { return };
    let matrix = format!("{module}.lora_A.default.weight");
    if reader.has(&matrix) && !reader.vb.contains_tensor(stored) {
        warn_once!(
            "[{}] the file has an adapter ({matrix}), and the weights without it are loaded; expected `peft::Adapter` \
             for the adapter",
            reader.op
        );
    }
}

/// Returns the linear layers of a layout.
///
/// # Errors
/// In the name of the operation `op`, for a config that does not fit the layout, and for a layout whose weights do not
/// belong to linear layers.
pub(crate) fn module_weights(
    op: &str,
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
) -> Result<Vec<ModuleWeight>> {
    if layout.is_stacked() {
        bail!("[{op}] the layout {layout} has a module for each head, expected one for all heads")
    }
    let mut modules = Vec::new();
    for weight in projection_tensors(op, cfg, layout, 0..cfg.num_heads(), false)?.filter(|tensor| !tensor.is_bias) {
        let spec = &weight.tensor.spec;
        let Some(name) = spec.stored.strip_suffix(".weight") else {
            bail!("[{op}] {} of the layout {layout} is no linear layer, which adapters change", spec.stored)
        };
        let (outputs, inputs) = match (weight.tensor.dims, &spec.shape[..]) {
            (StoredDims::OutIn, &[outputs, inputs]) | (StoredDims::InOut, &[inputs, outputs]) => (outputs, inputs),
            (_, shape) => bail!("[{op}] {} has shape {shape:?}, expected a matrix", spec.stored),
        };
        let other = other_name(&spec.stored, weight.is_bias, weight.projections);
        let other_name = other.and_then(|other| other.strip_suffix(".weight").map(str::to_string));
        let module = AdaptableModule { name: name.to_string(), other_name, outputs, inputs };
        modules.push(ModuleWeight { module, weight });
    }
    Ok(modules)
}
