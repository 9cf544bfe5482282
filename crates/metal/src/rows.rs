//! Forward passes over rows: norms, norms with gates, rotations of heads, gates, linear layers of few rows with weights
//! of elements or of codes, and the numbers of weights of codes.

use candle_attention_cuda::shared::{
    Define, ForwardRows, ForwardRowsLaunch, GateArguments, GatedNormArguments, LinearCodesArguments,
    LinearRowsArguments, NormArguments, RotationArguments,
};
use candle_attention_cuda::{
    DequantizeCall, GateCall, GatedNormCall, LinearCodesCall, LinearRowsCall, NormCall, RotationCall, Unsupported,
};
use candle_core::{Result, Tensor, bail};

use crate::bindings::{BoundField, BufferList, LaunchArguments, bound_fields};
use crate::launch::MetalLaunch;
use crate::operands::MetalOperands;
use crate::run::{check_known_failure, is_available, prepare, run};
use crate::source::KernelSource;

/// A call over rows, as the CUDA kernels take it. Nothing is tracked for gradients.
#[derive(Debug, Clone)]
pub enum MetalRows {
    /// A norm over rows (B, T, H, D).
    Norm(NormCall),
    /// A root mean square norm over rows (B, T, H, D), times an activated gate.
    GatedNorm(GatedNormCall),
    /// A rotation of heads (B, T, H, D).
    Rotation(RotationCall),
    /// Values (B, T, H, D) times an activated gate.
    Gate(GateCall),
    /// A linear layer of few rows.
    Linear(Box<LinearRowsCall>),
    /// A linear layer of few rows, whose weights are codes.
    Codes(Box<LinearCodesCall>),
    /// The numbers of a weight of codes.
    Dequantize(DequantizeCall),
}

/// Binds the arguments of a kernel: the name of its list of buffers, and the fields.
macro_rules! bind {
    ($Arguments:ty, $name:literal, [$($field:ident $(.$inner:ident)*),*]) => {
        impl LaunchArguments for $Arguments {
            const LISTS: &'static [BufferList<Self>] =
                &[BufferList { name: $name, fields: bound_fields![$($field $(.$inner)*),*] }];

            fn fields_of(_kernel: &str) -> &'static [BoundField<Self>] {
                Self::LISTS[0].fields
            }

            fn of_launch(&self, _launch: &MetalLaunch) -> Self {
                *self
            }
        }
    };
}

bind!(NormArguments, "NORM", [inputs, weights, biases, output]);
bind!(GatedNormArguments, "GATED_NORM", [inputs, gates, weights, output]);
bind!(RotationArguments, "ROTATION", [inputs, output, cosines, sines, angle_rows]);
bind!(GateArguments, "GATE", [gates, values, output]);
bind!(LinearRowsArguments, "LINEAR_ROWS", [inputs, weights, biases, up_weights, up_biases, residuals, output]);
bind!(
    LinearCodesArguments,
    "LINEAR_CODES",
    [
        linear.inputs,
        linear.weights,
        linear.biases,
        linear.up_weights,
        linear.up_biases,
        linear.residuals,
        linear.output,
        weight.high,
        weight.code_table,
        weight.scales.numbers,
        weight.scales.table,
        weight.offsets.numbers,
        weight.offsets.table,
        up_weight.high,
        up_weight.code_table,
        up_weight.scales.numbers,
        up_weight.scales.table,
        up_weight.offsets.numbers,
        up_weight.offsets.table
    ]
);

/// The constants of programs over rows besides the element type, in their order. Every program has all of them, so that
/// one source of the emulator runs all kernels; those that a kernel does not read are 1.
const ROW_CONSTANTS: [&str; 2] = ["LINEAR_ROWS", "NORM_WIDTH"];

impl MetalRows {
    /// Checks that a kernel runs the call. Nothing is compiled, and no tensor is read.
    ///
    /// # Errors
    /// If none does, or it could not be compiled in an earlier call: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        match self {
            Self::Norm(call) => plan(call),
            Self::GatedNorm(call) => plan(call),
            Self::Rotation(call) => plan(call),
            Self::Gate(call) => plan(call),
            Self::Linear(call) => plan(&**call),
            Self::Codes(call) => plan(&**call),
            Self::Dequantize(call) => plan(call),
        }
    }

    /// Compiles the kernel, which the first call does otherwise.
    ///
    /// # Errors
    /// If no kernel runs the call, or it does not compile.
    pub fn prepare(&self) -> Result<()> {
        match self {
            Self::Norm(call) => prepare_call(call),
            Self::GatedNorm(call) => prepare_call(call),
            Self::Rotation(call) => prepare_call(call),
            Self::Gate(call) => prepare_call(call),
            Self::Linear(call) => prepare_call(&**call),
            Self::Codes(call) => prepare_call(&**call),
            Self::Dequantize(call) => prepare_call(call),
        }
    }

    /// Computes the output, contiguous, in the dtype of the rows.
    ///
    /// # Errors
    /// If the tensors do not fit together, no kernel runs the call, or it does not compile.
    pub fn forward(&self) -> Result<Tensor> {
        match self {
            Self::Norm(call) => forward(call),
            Self::GatedNorm(call) => forward(call),
            Self::Rotation(call) => forward(call),
            Self::Gate(call) => forward(call),
            Self::Linear(call) => forward(&**call),
            Self::Codes(call) => forward(&**call),
            Self::Dequantize(call) => forward(call),
        }
    }
}

fn plan<C: ForwardRows>(call: &C) -> std::result::Result<(), Unsupported> {
    let device = call.rows().device();
    is_available(device)?;
    let launch = call.forward_launch()?;
    check_known_failure(device, || Some(metal_launch(&launch)))
}

fn prepare_call<C: ForwardRows>(call: &C) -> Result<()> {
    let device = call.rows().device();
    is_available(device)?;
    prepare(&[metal_launch(&call.forward_launch()?)], device)
}

fn forward<C>(call: &C) -> Result<Tensor>
where
    C: ForwardRows<Arguments: LaunchArguments>,
{
    let device = call.rows().device();
    is_available(device)?;
    let launch = call.forward_launch()?;
    let mut operands = MetalOperands::default();
    let output = operands.output("the output", launch.dtype, launch.output.as_slice())?;
    let arguments = call.forward_arguments(&mut operands, output)?;
    let results = run(&[metal_launch(&launch)], &arguments, operands, device)?;
    let Some(result) = results.into_iter().next() else { bail!("the Metal kernels returned no output") };
    Ok(result)
}

/// Returns the launch. All programs of a source have the same constants.
fn metal_launch(launch: &ForwardRowsLaunch) -> MetalLaunch {
    let mut defines = launch.defines.clone();
    if KernelSource::of_kernel(launch.kernel) == KernelSource::Rows {
        let value = |name| launch.defines.iter().find(|define| define.name == name).map_or(1, |define| define.value);
        defines.retain(|define| !ROW_CONSTANTS.contains(&define.name));
        defines.extend(ROW_CONSTANTS.map(|name| Define { name, value: value(name) }));
    }
    defines.push(Define { name: "ELEMENT_BYTES", value: launch.dtype.size_in_bytes() as i64 });
    MetalLaunch {
        kernel: launch.kernel,
        defines,
        groups: launch.blocks,
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
        pairs: None,
    }
}
