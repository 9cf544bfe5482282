//! Kernels that compute rows: the short convolution, the gates of linear attention, norms with gates, and rotations of
//! heads.

mod convolution;
mod delta_gates;
mod gated_norm;
mod rotation;

pub use convolution::{ConvolutionCall, ConvolutionGradients, ConvolutionResults};
pub use delta_gates::{DeltaGates, DeltaGatesCall};
pub use gated_norm::{Activation, GatedNormCall, GatedNormGradients};
pub use rotation::{AngleRows, RotationCall};

use candle_core::{DType, Result, Tensor, bail};

use crate::catalogue::CatalogueEntry;

/// Returns the programs that devices run for the usual sizes.
pub(crate) fn entries() -> Vec<CatalogueEntry> {
    [convolution::entries(), delta_gates::entries(), gated_norm::entries(), rotation::entries()].concat()
}

/// Checks the shape, the dtype and the last stride of a tensor.
fn check_tensor(op: &str, name: &str, tensor: &Tensor, dims: &[usize], dtype: DType) -> Result<()> {
    let has_rows = dims.last() == Some(&1) || tensor.stride().last() == Some(&1);
    if tensor.dims() == dims && tensor.dtype() == dtype && has_rows {
        return Ok(());
    }
    bail!(
        "[{op}] {name} has the shape {:?}, the strides {:?} and the dtype {:?}, expected {dims:?} of {dtype:?} with \
         contiguous rows",
        tensor.dims(),
        tensor.stride(),
        tensor.dtype()
    )
}
