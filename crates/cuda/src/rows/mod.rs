//! Kernels that compute rows: the short convolution, the gates of linear attention, norms, norms with gates, gates,
//! rotations of heads, linear layers of few rows, and codes of 8 bits.

mod activation;
mod convolution;
mod delta_gates;
mod gate;
mod gated_norm;
mod linear;
mod norm;
mod quantize_rows;
mod rotation;

pub use activation::Activation;
pub use convolution::{ConvolutionCall, ConvolutionGradients, ConvolutionResults};
pub use delta_gates::{DeltaGates, DeltaGatesCall};
pub use gate::{GateCall, GateGradients};
pub use gated_norm::{GatedNormCall, GatedNormGradients};
pub use linear::{LinearParameters, LinearRowsCall};
pub use norm::{NormCall, NormGradients, NormParameterGradients};
pub use quantize_rows::{QuantizeRowsCall, RowCodes};
pub use rotation::{AngleRows, RotationCall};

use candle_core::{DType, Result, Tensor, bail};

use crate::arguments::RowStrides;
use crate::catalogue::CatalogueEntry;
use crate::device::Reading;
use crate::element::Element;
use crate::program::{KernelShape, Program};
use crate::unsupported::Unsupported;

/// Returns the programs that devices run for the usual sizes.
pub(crate) fn entries() -> Vec<CatalogueEntry> {
    let all = [
        convolution::entries(),
        delta_gates::entries(),
        gated_norm::entries(),
        rotation::entries(),
        norm::entries(),
        gate::entries(),
        quantize_rows::entries(),
        linear::entries(),
    ];
    all.concat()
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
fn row_strides(reading: &Reading) -> RowStrides {
    let strides = reading.strides();
    RowStrides { sequence: strides[0] as i64, head: strides[2] as i64, row: strides[1] as i64 }
}

/// Returns the program of an element type that needs no other constant.
fn program_of(root: &'static str, element: Element) -> Program {
    Program { root, defines: vec![element.define()] }
}

/// Returns the programs of [`program_of`] for all element types.
fn entries_of(root: &'static str, name: &str, kernels: &[KernelShape]) -> Vec<CatalogueEntry> {
    let mut entries = Vec::new();
    for element in Element::ALL {
        let own_name = format!("{name} {}", element.name());
        entries.push(CatalogueEntry::new(&program_of(root, element), own_name, true, kernels.to_vec()));
    }
    entries
}

/// Checks that a tensor that a kernel reads without strides is contiguous.
fn check_contiguous(op: &str, name: &str, tensor: &Tensor) -> Result<()> {
    if tensor.is_contiguous() {
        return Ok(());
    }
    bail!("[{op}] {name} has the strides {:?}, expected contiguous ones", tensor.stride())
}
