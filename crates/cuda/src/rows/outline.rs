//! The outline of every call over rows: check, load the program, allocate, launch.

use candle_core::{DType, Storage, Tensor, bail};

use crate::attention::InputAddresses;
use crate::ci_programs::CiProgram;
use crate::device::{DeviceBuffer, KernelArguments, KernelDevice, Launch, LoadedProgram, Operands, TensorLocks};
use crate::element::ElementType;
use crate::kernel_pointers::{Elements, OutputPointer};
use crate::kernel_struct::KernelStruct;
use crate::program::{Define, KernelShape, Program};
use crate::unsupported::Unsupported;

/// A call of kernels over rows.
///
/// An operation is its source in `kernels/`, which `source.rs` lists, and a file here with its argument, which
/// `kernel_struct` declares, the functions of this trait, and a function for each pass, which allocates its results by
/// a [`Run`], fills the argument and launches.
pub(super) trait RowsCall {
    /// The only argument of the kernels.
    type Arguments: KernelArguments;
    /// The dimensions of a call.
    type Shape: Copy;

    /// The operation, for errors.
    const OPERATION: &'static str;
    /// The file of the kernels.
    const SOURCE: &'static str;

    /// Returns the tensor whose device runs the kernels, and in whose [`dtype`](Self::dtype) they read and write elements.
    fn elements(&self) -> &Tensor;

    /// Returns the dtype of elements.
    fn dtype(&self) -> DType {
        self.elements().dtype()
    }

    /// Returns the dimensions of the call.
    ///
    /// # Errors
    /// If the kernels do not take them, or there are more blocks than CUDA launches.
    fn shape(&self) -> Result<Self::Shape, Unsupported>;

    /// Checks that all tensors have these dimensions.
    ///
    /// # Errors
    /// If one does not.
    fn check(&self, shape: Self::Shape) -> candle_core::Result<()>;

    /// Returns the constants of the program besides the element type.
    fn constants(_shape: Self::Shape) -> Vec<Define> {
        Vec::new()
    }

    /// Checks the shape, the dtype and the last stride of a tensor.
    ///
    /// # Errors
    /// If one differs.
    fn check_tensor(&self, name: &str, tensor: &Tensor, dims: &[usize], dtype: DType) -> candle_core::Result<()> {
        let has_rows = dims.last() == Some(&1) || tensor.stride().last() == Some(&1);
        if tensor.dims() == dims && tensor.dtype() == dtype && has_rows {
            return Ok(());
        }
        bail!(
            "[{}] {name} has the shape {:?}, the strides {:?} and the dtype {:?}, expected {dims:?} of {dtype:?} with \
             contiguous rows",
            Self::OPERATION,
            tensor.dims(),
            tensor.stride(),
            tensor.dtype()
        )
    }

    /// Checks that a tensor that a kernel reads without strides is contiguous.
    ///
    /// # Errors
    /// If it is not.
    fn check_contiguous(&self, name: &str, tensor: &Tensor) -> candle_core::Result<()> {
        if tensor.is_contiguous() {
            return Ok(());
        }
        bail!("[{}] {name} has the strides {:?}, expected contiguous ones", Self::OPERATION, tensor.stride())
    }
}

/// A call whose forward pass is one launch with one output, contiguous, in the dtype of the elements.
pub(super) trait OneLaunch: RowsCall {
    /// Returns the launch of the forward pass.
    fn forward_launch(shape: Self::Shape) -> Launch;

    /// Returns the dimensions of the output.
    fn output_dims(&self, shape: Self::Shape) -> Vec<usize>;

    /// Returns the arguments without an output.
    ///
    /// # Errors
    /// If kernels cannot read a tensor.
    fn arguments<'t>(
        &'t self,
        shape: Self::Shape,
        operands: &mut impl InputAddresses<'t>,
    ) -> candle_core::Result<Self::Arguments>;

    /// Sets the output.
    fn set_output(arguments: &mut Self::Arguments, output: OutputPointer<Elements>);
}

/// Computes the output of a call whose forward pass is one launch.
///
/// # Errors
/// As [`forward_buffer`].
pub(super) fn forward<C: OneLaunch>(call: &C) -> candle_core::Result<Storage> {
    forward_buffer(call).map(DeviceBuffer::into_storage)
}

/// Computes the output as [`forward`] does, in memory whose shape is not known yet.
///
/// # Errors
/// If the call does not fit together, no kernel runs it, or one does not compile or launch.
pub(super) fn forward_buffer<C: OneLaunch>(call: &C) -> candle_core::Result<DeviceBuffer> {
    let run = Run::start(call)?;
    let mut output = run.elements(call.output_dims(run.shape).iter().product())?;

    let locks = TensorLocks::default();
    let mut operands = run.operands(&locks);
    let mut arguments = call.arguments(run.shape, &mut operands)?;
    C::set_output(&mut arguments, operands.output("output", &mut output)?);
    run.launch(&operands, &C::forward_launch(run.shape), &arguments)?;
    operands.finish();
    Ok(output)
}

/// Returns the program of a call's kernels for an element type.
pub(super) fn program<C: RowsCall>(element: ElementType, constants: Vec<Define>) -> Program {
    let mut defines = vec![element.define()];
    defines.extend(constants);
    Program { root: C::SOURCE, arguments: <C::Arguments as KernelStruct>::DEFINITION, defines }
}

/// Returns the programs of kernels without other constants, for all element types.
pub(super) fn entries_of<C: RowsCall>(name: &str, kernels: &[KernelShape]) -> Vec<CiProgram> {
    let mut entries = Vec::new();
    for element in ElementType::ALL {
        let program = program::<C>(element, Vec::new());
        entries.push(CiProgram::new(&program, format!("{name} {}", element.name()), true, kernels.to_vec()));
    }
    entries
}

/// The device and the dimensions of a call, and the program that computes it.
struct ChosenProgram<C: RowsCall> {
    device: KernelDevice,
    shape: C::Shape,
    program: Program,
}

impl<C: RowsCall> ChosenProgram<C> {
    fn of(call: &C) -> Result<Self, Unsupported> {
        let device = KernelDevice::of(call.elements().device())?;
        let element = ElementType::of(call.dtype())?;
        let shape = call.shape()?;
        Ok(Self { device, shape, program: program::<C>(element, C::constants(shape)) })
    }
}

/// Checks that kernels run a call, and loads the program, which is compiled in the first call. No tensor is read.
///
/// # Errors
/// If they do not: the sentence says why.
pub(super) fn plan<C: RowsCall>(call: &C) -> Result<(), Unsupported> {
    let ChosenProgram { device, program, .. } = ChosenProgram::of(call)?;
    device.prepare(&program)
}

/// A call whose tensors fit together, with its program.
pub(super) struct Run<C: RowsCall> {
    pub shape: C::Shape,
    device: KernelDevice,
    program: LoadedProgram,
    dtype: DType,
}

impl<C: RowsCall> Run<C> {
    /// Checks a call and loads its program.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile.
    pub fn start(call: &C) -> candle_core::Result<Self> {
        let ChosenProgram { device, shape, program } = ChosenProgram::of(call)?;
        call.check(shape)?;
        let loaded = device.load(&program)?;
        Ok(Self { shape, device, program: loaded, dtype: call.dtype() })
    }

    /// Allocates a number of elements, whose values are undefined.
    pub fn elements(&self, count: usize) -> candle_core::Result<DeviceBuffer> {
        self.device.uninitialized(self.dtype, count)
    }

    /// Allocates a number of values of another dtype, which are undefined.
    pub fn allocate(&self, dtype: DType, count: usize) -> candle_core::Result<DeviceBuffer> {
        self.device.uninitialized(dtype, count)
    }

    /// Returns an empty list of the memory of launches.
    pub fn operands<'a, 't>(&'a self, locks: &'a TensorLocks<'t>) -> Operands<'a, 't> {
        Operands::new(&self.device, locks)
    }

    /// Queues a kernel.
    ///
    /// # Errors
    /// If the launch fails.
    pub fn launch(&self, operands: &Operands, launch: &Launch, arguments: &C::Arguments) -> candle_core::Result<()> {
        operands.launch(&self.program, launch, arguments)
    }
}
