//! The forward passes of calls over rows for kernels of the same names in another language, which take the same
//! arguments and have the same grids.

use candle_core::{Result, Tensor};

use super::gate::{GateArguments, GateCall};
use super::linear::{LinearRowsArguments, LinearRowsCall};
use super::norm::{NormArguments, NormCall};
use super::outline::RowsCall;
use super::rotation::{RotationArguments, RotationCall};
use crate::attention::InputAddresses;
use crate::device::Launch;
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
    /// The threads of a block.
    pub threads: usize,
    /// The bytes of shared memory of a block.
    pub shared_bytes: usize,
    /// The dimensions of the output, in the dtype of the elements.
    pub output: Vec<usize>,
}

/// A call over rows whose forward pass is one kernel.
pub trait ForwardRows {
    /// The only argument of the kernel.
    type Arguments: KernelStruct;

    /// Returns the tensor whose device runs the kernel, in the dtype of the output.
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

/// Returns the launch of a call with a grid and an output.
fn described<C: RowsCall>(
    call: &C,
    shape: C::Shape,
    launch: &Launch,
    output: Vec<usize>,
) -> std::result::Result<ForwardRowsLaunch, Unsupported> {
    let mut defines = vec![ElementType::of(call.dtype())?.define()];
    defines.extend(C::constants(shape));
    Ok(ForwardRowsLaunch {
        kernel: launch.kernel,
        defines,
        blocks: launch.grid.blocks(launch.kernel)? as usize,
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
        output,
    })
}

impl ForwardRows for NormCall {
    type Arguments = NormArguments;

    fn rows(&self) -> &Tensor {
        &self.xs
    }

    fn forward_launch(&self) -> std::result::Result<ForwardRowsLaunch, Unsupported> {
        let shape = self.shape()?;
        described(self, shape, &Self::forward_kernel(shape), shape.dims().to_vec())
    }

    fn forward_arguments<'t>(
        &'t self,
        operands: &mut impl InputAddresses<'t>,
        output: OutputPointer<Elements>,
    ) -> Result<NormArguments> {
        let shape = self.shape()?;
        self.check(shape)?;
        Ok(NormArguments { output, ..self.arguments(shape, operands)? })
    }
}

impl ForwardRows for RotationCall {
    type Arguments = RotationArguments;

    fn rows(&self) -> &Tensor {
        &self.xs
    }

    fn forward_launch(&self) -> std::result::Result<ForwardRowsLaunch, Unsupported> {
        let shape = self.shape()?;
        described(self, shape, &Self::forward_kernel(shape), self.xs.dims().to_vec())
    }

    fn forward_arguments<'t>(
        &'t self,
        operands: &mut impl InputAddresses<'t>,
        output: OutputPointer<Elements>,
    ) -> Result<RotationArguments> {
        let shape = self.shape()?;
        self.check(shape)?;
        Ok(RotationArguments { output, ..self.arguments(shape, operands)? })
    }
}

impl ForwardRows for GateCall {
    type Arguments = GateArguments;

    fn rows(&self) -> &Tensor {
        &self.values
    }

    fn forward_launch(&self) -> std::result::Result<ForwardRowsLaunch, Unsupported> {
        let shape = self.shape()?;
        described(self, shape, &Self::forward_kernel(shape), self.values.dims().to_vec())
    }

    fn forward_arguments<'t>(
        &'t self,
        operands: &mut impl InputAddresses<'t>,
        output: OutputPointer<Elements>,
    ) -> Result<GateArguments> {
        let shape = self.shape()?;
        self.check(shape)?;
        Ok(GateArguments { output, ..self.arguments(shape, operands)? })
    }
}

impl ForwardRows for LinearRowsCall {
    type Arguments = LinearRowsArguments;

    fn rows(&self) -> &Tensor {
        &self.xs
    }

    fn forward_launch(&self) -> std::result::Result<ForwardRowsLaunch, Unsupported> {
        let shape = self.shape()?;
        described(self, shape, &Self::forward_kernel(shape), self.output_dims(shape))
    }

    fn forward_arguments<'t>(
        &'t self,
        operands: &mut impl InputAddresses<'t>,
        output: OutputPointer<Elements>,
    ) -> Result<LinearRowsArguments> {
        let shape = self.shape()?;
        self.check(shape)?;
        Ok(LinearRowsArguments { output, ..self.arguments(shape, operands)? })
    }
}
