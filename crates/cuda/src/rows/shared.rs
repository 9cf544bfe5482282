//! The forward passes of calls over rows for kernels of the same names in another language, which take the same
//! arguments and have the same grids.

use candle_core::{DType, Result, Tensor};

use super::gate::{GateArguments, GateCall};
use super::gated_norm::{GatedNormArguments, GatedNormCall};
use super::linear::{LinearRowsArguments, LinearRowsCall};
use super::linear_codes::{DequantizeCall, LinearCodesArguments, LinearCodesCall};
use super::norm::{NormArguments, NormCall};
use super::outline::{OneLaunch, RowsCall, program};
use super::rotation::{RotationArguments, RotationCall};
use crate::attention::InputAddresses;
use crate::element::ElementType;
use crate::kernel_pointers::{Elements, OutputPointer};
use crate::kernel_struct::KernelStruct;
use crate::program::Define;
use crate::unsupported::Unsupported;

/// The launch of a forward pass over rows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardRowsLaunch {
    /// The name of the kernel.
    pub kernel: &'static str,
    /// The constants of the program: ELEMENT, then those of the kernel.
    pub defines: Vec<Define>,
    /// The number of blocks.
    pub blocks: usize,
    /// The number of threads of a block.
    pub threads: usize,
    /// The number of bytes of shared memory of a block.
    pub shared_bytes: usize,
    /// The dtype of the elements.
    pub dtype: DType,
    /// The dimensions of the output, in the dtype of the elements.
    pub output: Vec<usize>,
}

/// A call over rows whose forward pass is one kernel.
pub trait ForwardRows {
    /// The only argument of the kernel.
    type Arguments: KernelStruct;

    /// Returns the tensor whose device runs the kernel.
    fn rows(&self) -> &Tensor;

    /// Returns the launch.
    ///
    /// # Errors
    /// If the kernel does not take the call.
    fn forward_launch(&self) -> std::result::Result<ForwardRowsLaunch, Unsupported>;

    /// Returns the arguments of the kernel.
    ///
    /// # Errors
    /// If the tensors do not fit together.
    fn forward_arguments<'t>(
        &'t self,
        operands: &mut impl InputAddresses<'t>,
        output: OutputPointer<Elements>,
    ) -> Result<Self::Arguments>;
}

/// Returns the launch of a forward pass.
fn launch_of<C: OneLaunch>(call: &C) -> std::result::Result<ForwardRowsLaunch, Unsupported> {
    let shape = call.shape()?;
    let launch = C::forward_launch(shape);
    let program = program::<C>(ElementType::of(call.dtype())?, C::constants(shape));
    Ok(ForwardRowsLaunch {
        kernel: launch.kernel,
        defines: program.defines,
        blocks: launch.grid.blocks(launch.kernel)? as usize,
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
        dtype: call.dtype(),
        output: call.output_dims(shape),
    })
}

/// Returns the arguments of a forward pass, after checking that the tensors fit together.
fn arguments_of<'t, C: OneLaunch>(
    call: &'t C,
    operands: &mut impl InputAddresses<'t>,
    output: OutputPointer<Elements>,
) -> Result<C::Arguments> {
    let shape = call.shape()?;
    call.check(shape)?;
    let mut arguments = call.arguments(shape, operands)?;
    C::set_output(&mut arguments, output);
    Ok(arguments)
}

/// Implements [`ForwardRows`] for calls whose forward pass is one launch.
macro_rules! forward_rows {
    ($($Call:ty, $Arguments:ty;)+) => {
        $(
            impl ForwardRows for $Call {
                type Arguments = $Arguments;

                fn rows(&self) -> &Tensor {
                    self.elements()
                }

                fn forward_launch(&self) -> std::result::Result<ForwardRowsLaunch, Unsupported> {
                    launch_of(self)
                }

                fn forward_arguments<'t>(
                    &'t self,
                    operands: &mut impl InputAddresses<'t>,
                    output: OutputPointer<Elements>,
                ) -> Result<$Arguments> {
                    arguments_of(self, operands, output)
                }
            }
        )+
    };
}

forward_rows! {
    NormCall, NormArguments;
    RotationCall, RotationArguments;
    GateCall, GateArguments;
    GatedNormCall, GatedNormArguments;
    LinearRowsCall, LinearRowsArguments;
    LinearCodesCall, LinearCodesArguments;
    DequantizeCall, LinearCodesArguments;
}
