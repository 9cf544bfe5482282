//! Kernels that compute rows: the short convolution, the gates of linear attention, norms, norms with gates, gates,
//! rotations of heads, linear layers of few rows with weights of elements or of codes, and codes of 8 bits. All have
//! the outline in `outline.rs`.

mod activation;
mod code_format;
mod code_programs;
mod coded_weight;
mod convolution;
mod delta_gates;
mod gate;
mod gated_norm;
mod linear;
mod linear_codes;
mod norm;
mod outline;
mod quantize_rows;
mod rotation;
mod shared;

pub use activation::Activation;
pub use coded_weight::{CodedNumbers, CodedValues, CodedWeight, HostCodes};
pub use convolution::{ConvolutionCall, ConvolutionGradients, ConvolutionResults};
pub use delta_gates::{DeltaGates, DeltaGatesCall};
pub use gate::{GateCall, GateGradients};
pub use gated_norm::{GatedNormCall, GatedNormGradients};
pub use linear::{LinearParameters, LinearRowsCall};
pub use linear_codes::{CodedLinear, DequantizeCall, LinearCodesCall};
pub use norm::{NormCall, NormGradients, NormParameterGradients};
pub use quantize_rows::{QuantizeRowsCall, RowCodes};
pub use rotation::{AngleRows, RotationCall};

#[doc(hidden)]
pub use gate::GateArguments;
#[doc(hidden)]
pub use gated_norm::GatedNormArguments;
#[doc(hidden)]
pub use linear::LinearRowsArguments;
#[doc(hidden)]
pub use linear_codes::LinearCodesArguments;
#[doc(hidden)]
pub use norm::NormArguments;
#[doc(hidden)]
pub use rotation::RotationArguments;
#[doc(hidden)]
pub use shared::{ForwardRows, ForwardRowsLaunch};

use candle_core::Tensor;

use crate::ci_programs::CiProgram;
use crate::kernel_pointers::RowStrides;
use crate::unsupported::Unsupported;

/// Returns the programs that devices run for the usual sizes.
pub(crate) fn entries() -> Vec<CiProgram> {
    let all = [
        convolution::entries(),
        delta_gates::entries(),
        gated_norm::entries(),
        rotation::entries(),
        norm::entries(),
        gate::entries(),
        quantize_rows::entries(),
        linear::entries(),
        code_programs::entries(),
    ];
    all.concat()
}

/// The dimensions of rows (B, T, H, D).
#[derive(Debug, Clone, Copy)]
struct RowsShape {
    b: usize,
    t: usize,
    h: usize,
    d: usize,
}

impl RowsShape {
    /// Returns the dimensions of a tensor.
    ///
    /// # Errors
    /// If a tensor has another rank, has no rows, or has more rows or wider ones than the kernels count.
    fn of(xs: &Tensor) -> std::result::Result<Self, Unsupported> {
        let &[b, t, h, d] = xs.dims() else {
            return Err(Unsupported::new(format!("the rows have the shape {:?}, expected (B, T, H, D)", xs.dims())));
        };
        // The number of rows and of warps that compute them is an i32.
        let most = i32::MAX as usize / 32;
        if [b, t, h, d].contains(&0) || b.saturating_mul(t).saturating_mul(h) > most || d > most {
            return Err(Unsupported::new(format!("the rows have the shape {:?}, which no kernel takes", xs.dims())));
        }
        Ok(Self { b, t, h, d })
    }

    fn dims(self) -> [usize; 4] {
        [self.b, self.t, self.h, self.d]
    }

    /// Returns the number of tokens of all sequences.
    fn tokens(self) -> usize {
        self.b * self.t
    }

    /// Returns the number of rows.
    fn rows(self) -> usize {
        self.tokens() * self.h
    }

    /// Returns the number of elements.
    fn elements(self) -> usize {
        self.rows() * self.d
    }
}

/// Returns the strides of a tensor (B, T, H, D).
fn row_strides(tensor: &Tensor) -> RowStrides {
    let strides = tensor.stride();
    RowStrides { sequence: strides[0] as i64, head: strides[2] as i64, row: strides[1] as i64 }
}
