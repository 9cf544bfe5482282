//! Forward passes over rows: norms, rotations of heads, gates, and linear layers of few rows.

use candle_attention_cuda::shared::{
    Define, ForwardRows, ForwardRowsLaunch, GateArguments, LinearRowsArguments, NormArguments, RotationArguments,
};
use candle_attention_cuda::{GateCall, LinearRowsCall, NormCall, RotationCall, Unsupported};
use candle_core::{Result, Tensor, bail};

use crate::bindings::{BoundField, BufferList, LaunchArguments, bound_fields};
use crate::launch::MetalLaunch;
use crate::operands::MetalOperands;
use crate::run::{check_known_failure, is_available, run};

/// A call over rows, as the CUDA kernels take it. Nothing is tracked for gradients.
#[derive(Debug, Clone)]
pub enum MetalRows {
    /// A norm over rows (B, T, H, D).
    Norm(NormCall),
    /// A rotation of heads (B, T, H, D).
    Rotation(RotationCall),
    /// Values (B, T, H, D) times an activated gate.
    Gate(GateCall),
    /// A linear layer of few rows.
    Linear(Box<LinearRowsCall>),
}

/// Binds the arguments of a kernel: the name of its list of buffers, and the fields.
macro_rules! bind {
    ($Arguments:ty, $name:literal, [$($field:ident),*]) => {
        impl LaunchArguments for $Arguments {
            const LISTS: &'static [BufferList<Self>] =
                &[BufferList { name: $name, fields: bound_fields![$($field),*] }];

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
bind!(RotationArguments, "ROTATION", [inputs, output, cosines, sines, angle_rows]);
bind!(GateArguments, "GATE", [gates, values, output]);
bind!(LinearRowsArguments, "LINEAR_ROWS", [inputs, weights, biases, up_weights, up_biases, residuals, output]);

/// The constant of the linear kernel, which every program has.
const ROWS: &str = "LINEAR_ROWS";

impl MetalRows {
    /// Checks that a kernel runs the call. Nothing is compiled, and no tensor is read.
    ///
    /// # Errors
    /// If none does, or it could not be compiled in an earlier call: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        match self {
            Self::Norm(call) => plan(call),
            Self::Rotation(call) => plan(call),
            Self::Gate(call) => plan(call),
            Self::Linear(call) => plan(&**call),
        }
    }

    /// Computes the output, contiguous, in the dtype of the rows.
    ///
    /// # Errors
    /// If the tensors do not fit together, no kernel runs the call, or it does not compile.
    pub fn forward(&self) -> Result<Tensor> {
        match self {
            Self::Norm(call) => forward(call),
            Self::Rotation(call) => forward(call),
            Self::Gate(call) => forward(call),
            Self::Linear(call) => forward(&**call),
        }
    }
}

fn plan<C: ForwardRows>(call: &C) -> std::result::Result<(), Unsupported> {
    let device = call.rows().device();
    is_available(device)?;
    let launch = call.forward_launch()?;
    check_known_failure(device, || Some(metal_launch(&launch, call.rows())))
}

fn forward<C>(call: &C) -> Result<Tensor>
where
    C: ForwardRows<Arguments: LaunchArguments>,
{
    let rows = call.rows();
    is_available(rows.device())?;
    let launch = call.forward_launch()?;
    let mut operands = MetalOperands::default();
    let output = operands.output("the output", rows.dtype(), launch.output.as_slice())?;
    let arguments = call.forward_arguments(&mut operands, output)?;
    let results = run(&[metal_launch(&launch, rows)], &arguments, operands, rows.device())?;
    let Some(result) = results.into_iter().next() else { bail!("the Metal kernels returned no output") };
    Ok(result)
}

/// Returns the launch. Every program has the same constants.
fn metal_launch(launch: &ForwardRowsLaunch, rows: &Tensor) -> MetalLaunch {
    let mut defines = launch.defines.clone();
    if !defines.iter().any(|define| define.name == ROWS) {
        defines.push(Define { name: ROWS, value: 1 });
    }
    defines.push(Define { name: "ELEMENT_BYTES", value: rows.dtype().size_in_bytes() as i64 });
    MetalLaunch {
        kernel: launch.kernel,
        defines,
        groups: launch.blocks,
        threads: launch.threads,
        shared_bytes: launch.shared_bytes,
        pairs: None,
    }
}
