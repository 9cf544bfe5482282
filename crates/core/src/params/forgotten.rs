//! The option of a config or the layout that a weight of another shape suggests, for errors.

use super::layout::WeightLayout;
use super::source::TensorSource;
use super::tensors::{ProjectionTensor, projection_shape};
use crate::config::MultiHeadAttentionConfig;
use candle_attention_modules::base::{ParameterReader, StoredDims};
use candle_attention_modules::linear::Projection::{self, Key, Output, Query, Value};

/// The numbers of outputs and inputs of a stored matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MatrixSize {
    outputs: usize,
    inputs: usize,
}

impl MatrixSize {
    /// Returns the matrix of a shape; `None` for other ranks and for kernels with a dimension of heads.
    fn of(dims: StoredDims, shape: &[usize]) -> Option<Self> {
        match (dims, shape) {
            (StoredDims::OutIn, &[outputs, inputs]) | (StoredDims::InOut, &[inputs, outputs]) => {
                Some(Self { outputs, inputs })
            }
            _ => None,
        }
    }

    fn transposed(self) -> Self {
        Self { outputs: self.inputs, inputs: self.outputs }
    }
}

/// Returns what a weight of another shape than expected suggests: an option of the config with the value that fits the
/// file, or the layout of transposed weights. `None` for a missing weight, and where nothing fits.
pub(super) fn forgotten_option(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    tensor: &ProjectionTensor,
    reader: &ParameterReader,
) -> Option<String> {
    let spec = &tensor.tensor.spec;
    if tensor.is_bias || layout.is_stacked() || !reader.has(&spec.stored) {
        return None;
    }
    let expected = MatrixSize::of(tensor.tensor.dims, &spec.shape)?;
    let found = MatrixSize::of(tensor.tensor.dims, &reader.vb.shape(&spec.stored).ok()?)?;
    if found == expected {
        return None;
    }
    if found.transposed() == expected {
        let other = transposed_layout(&spec.stored, tensor.tensor.dims)?;
        return Some(format!("it is transposed, as in the layout `{other}`"));
    }
    let mut options = Vec::new();
    if let Some(option) = option_of_inputs(cfg, tensor.projections, expected, found) {
        options.push(option);
    }
    if let Some(option) = option_of_outputs(cfg, tensor.projections, expected, found) {
        options.push(option);
    }
    let explains_both =
        options.len() == usize::from(found.inputs != expected.inputs) + usize::from(found.outputs != expected.outputs);
    if options.is_empty() || !explains_both {
        return None;
    }
    Some(format!("it fits `{}`", options.join("` and `")))
}

/// Returns the first layout that stores a weight of this name in the other order of dimensions.
fn transposed_layout(name: &str, dims: StoredDims) -> Option<WeightLayout> {
    let other = match dims {
        StoredDims::OutIn => StoredDims::InOut,
        StoredDims::InOut => StoredDims::OutIn,
        StoredDims::InHeads | StoredDims::HeadsOut => return None,
    };
    WeightLayout::all()
        .into_iter()
        .find(|layout| layout.tensors(0, true).iter().any(|tensor| tensor.name() == name && tensor.dims() == other))
}

/// Returns the option for the number of inputs of a weight.
fn option_of_inputs(
    cfg: &MultiHeadAttentionConfig,
    projections: &[Projection],
    expected: MatrixSize,
    found: MatrixSize,
) -> Option<String> {
    let inputs = found.inputs;
    if inputs == expected.inputs {
        return None;
    }
    match projections {
        [Key] => Some(format!("with_kdim({inputs})")),
        [Value] => Some(format!("with_vdim({inputs})")),
        [Output] if inputs.is_multiple_of(cfg.num_heads()) => {
            Some(format!("with_value_head_dim({})", inputs / cfg.num_heads()))
        }
        _ => None,
    }
}

/// Returns the option for the number of outputs of a weight.
fn option_of_outputs(
    cfg: &MultiHeadAttentionConfig,
    projections: &[Projection],
    expected: MatrixSize,
    found: MatrixSize,
) -> Option<String> {
    let outputs = found.outputs;
    if outputs == expected.outputs {
        return None;
    }
    let num_heads = cfg.num_heads();
    let key_heads = |rows: usize, width: usize| -> Option<String> {
        let count = rows.checked_div(width)?;
        let fits = count > 0 && rows.is_multiple_of(width) && num_heads.is_multiple_of(count);
        fits.then(|| format!("with_num_kv_heads({count})"))
    };
    match projections {
        [Query] if outputs > 0 && outputs.is_multiple_of(num_heads) => {
            Some(format!("with_head_dim({})", outputs / num_heads))
        }
        [Key] => key_heads(outputs, cfg.head_dim()),
        // The keys, which are read first, have fitted the number of key heads.
        [Value] if outputs > 0 && outputs.is_multiple_of(cfg.num_kv_heads()) => {
            Some(format!("with_value_head_dim({})", outputs / cfg.num_kv_heads()))
        }
        [Output] => Some(format!("with_out_dim({outputs})")),
        [Query, Key, Value] => {
            let rest = outputs.checked_sub(projection_shape(cfg, Query).outputs)?;
            key_heads(rest, cfg.head_dim() + cfg.value_head_dim())
        }
        _ => None,
    }
}
