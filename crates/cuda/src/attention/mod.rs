//! Attention: the description of a call, the choice of its kernels and their launches.

mod arguments;
mod backward;
mod call;
mod checked;
mod checks;
mod ci_programs;
mod forward;
mod plan;

use crate::arguments::AttentionArguments;
use crate::device::KernelArguments;

// SAFETY: the passes take addresses from operands, and sizes and strides from the checks of `CallSizes::of`.
unsafe impl KernelArguments for AttentionArguments {}

pub(crate) use ci_programs::entries;

pub use arguments::{InputAddresses, layout_strides, row_strides};
pub use call::{BackwardInputs, CudaCall, ForwardOutput};
pub use checked::CudaAttention;
pub use checks::CallSizes;
pub use plan::{BackwardKernel, ForwardKernel, is_available};
