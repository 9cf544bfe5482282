//! The forward pass: a block of queries at a time, or few queries with the keys in parts.

use candle_attention_call::{OutputLayout, RequestedResults};
use candle_core::{DType, Result, Shape, bail};

use super::arguments::{alignment, layout_strides};
use super::call::ForwardOutput;
use super::checked::CudaAttention;
use super::checks::CallSizes;
use super::plan::ForwardChoice;
use crate::arguments::AttentionArguments;
use crate::device::{DeviceBuffer, Grid, KernelDevice, Launch, Operands, TensorLocks};
use crate::kernel_pointers::RowStrides;
use crate::program::Program;
use crate::specialization::{ModifierGradients, Specialization};
use crate::tiles::{DecodeTile, ForwardTile};
use crate::unsupported::Unsupported;

impl CudaAttention {
    /// Computes the attention output, and the log-sum-exp and the statistics of the softmax if they are requested.
    ///
    /// # Errors
    /// If weights or statistics of weights are requested, no kernel runs the call, or one does not compile or launch.
    pub fn forward(&self, wanted: RequestedResults) -> Result<ForwardOutput> {
        if wanted.weights || wanted.statistics.is_some() {
            bail!("the kernels store no attention weights, expected a call for other results")
        }
        let device = KernelDevice::of(self.call.q.device())?;
        let sizes = self.sizes;
        let choice = self.forward_choice(&sizes, &device.limits())?;
        let dtype = sizes.element.dtype();
        let mut output = device.uninitialized(dtype, sizes.rows() * sizes.value_dim)?;
        let mut log_sum_exp = match wanted.log_sum_exp {
            true => Some(device.uninitialized(DType::F32, sizes.rows())?),
            false => None,
        };
        let mut softmax_stats = match wanted.softmax_stats {
            true => Some(device.uninitialized(DType::F32, 2 * sizes.rows())?),
            false => None,
        };
        let mut parts = match choice {
            ForwardChoice::Decode { splits, .. } if splits > 1 => Some(DecodeParts::new(&device, &sizes, splits)?),
            _ => None,
        };

        let locks = TensorLocks::default();
        let mut operands = Operands::new(&device, &locks);
        let mut arguments = self.arguments(&mut operands)?;
        arguments.output = operands.output("the output", &mut output)?;
        arguments.output_strides = output_strides(self.call.output_layout, &sizes);
        arguments.log_sum_exp = operands.optional_output("the log-sum-exp", log_sum_exp.as_mut())?;
        arguments.row_statistics = operands.optional_output("the statistics of the softmax", softmax_stats.as_mut())?;
        if let Some(parts) = &mut parts {
            arguments.partial_outputs = operands.output("the parts of the output", &mut parts.outputs)?;
            arguments.partial_statistics = operands.output("the statistics of parts", &mut parts.statistics)?;
        }
        let alignment = alignment(&arguments, &self.call, &sizes);
        let specialization = self.specialization(&sizes, ModifierGradients::default(), alignment);
        let pass = ForwardPass { device: &device, operands: &operands, sizes, specialization };
        match choice {
            ForwardChoice::Forward(tile) => pass.forward(&tile, arguments)?,
            ForwardChoice::Decode { tile, splits } => pass.decode(&tile, splits, arguments)?,
        }
        operands.finish();
        Ok(ForwardOutput {
            output: output.into_storage(),
            output_shape: output_shape(self.call.output_layout, &sizes),
            log_sum_exp: log_sum_exp.map(|buffer| buffer.into_storage()),
            log_sum_exp_shape: (sizes.batch, sizes.heads, sizes.queries).into(),
            softmax_stats: softmax_stats.map(|buffer| buffer.into_storage()),
            softmax_stats_shape: (2, sizes.batch, sizes.heads, sizes.queries).into(),
        })
    }
}

impl CudaAttention {
    /// Returns the bytes of device memory that a forward pass needs besides its results: the parts of keys that are
    /// split over blocks.
    ///
    /// # Errors
    /// If no kernel runs the call.
    pub fn forward_scratch_bytes(&self) -> std::result::Result<usize, Unsupported> {
        let device = KernelDevice::of(self.call.q.device())?;
        Ok(match self.forward_choice(&self.sizes, &device.limits())? {
            ForwardChoice::Decode { splits, .. } if splits > 1 => DecodeParts::entries(&self.sizes, splits) * 4,
            ForwardChoice::Decode { .. } | ForwardChoice::Forward(_) => 0,
        })
    }

    /// Returns the program of the forward pass, into a new output.
    pub(super) fn forward_program(
        &self,
        device: &KernelDevice,
        sizes: &CallSizes,
        choice: &ForwardChoice,
    ) -> Result<Program> {
        let locks = TensorLocks::default();
        let mut operands = Operands::new(device, &locks);
        let mut arguments = self.arguments(&mut operands)?;
        arguments.output_strides = output_strides(self.call.output_layout, sizes);
        let alignment = alignment(&arguments, &self.call, sizes);
        let specialization = self.specialization(sizes, ModifierGradients::default(), alignment);
        Ok(match choice {
            ForwardChoice::Forward(tile) => tile.program(&specialization),
            ForwardChoice::Decode { tile, .. } => tile.program(&specialization),
        })
    }
}

/// The results of the decode kernel for parts of the keys.
struct DecodeParts {
    /// (splits, B, H, T_q, D_v).
    outputs: DeviceBuffer,
    /// (splits, B, H, T_q) pairs.
    statistics: DeviceBuffer,
}

impl DecodeParts {
    fn new(device: &KernelDevice, sizes: &CallSizes, splits: usize) -> Result<Self> {
        let rows = splits * sizes.rows();
        let outputs = device.uninitialized(DType::F32, rows * sizes.value_dim)?;
        Ok(Self { outputs, statistics: device.uninitialized(DType::F32, rows * 2)? })
    }

    /// Returns the number of floats of both buffers.
    fn entries(sizes: &CallSizes, splits: usize) -> usize {
        splits * sizes.rows() * (sizes.value_dim + 2)
    }
}

/// Returns the shape of the output as it is stored.
pub(super) fn output_shape(layout: OutputLayout, sizes: &CallSizes) -> Shape {
    let &CallSizes { batch, heads, queries, value_dim, .. } = sizes;
    Shape::from(&layout.dims(batch, heads, queries, value_dim))
}

/// Returns the strides of the output.
pub(super) fn output_strides(layout: OutputLayout, sizes: &CallSizes) -> RowStrides {
    let &CallSizes { heads, queries, value_dim, .. } = sizes;
    layout_strides(layout, heads, queries, value_dim)
}

/// Returns the grid of the forward kernel.
fn forward_grid(sizes: &CallSizes, tile: &ForwardTile) -> Grid {
    Grid { x: sizes.longest_queries.div_ceil(tile.queries()), y: sizes.heads, z: sizes.sequences }
}

/// Returns the number of blocks of the decode kernel for the queries of a key head.
fn decode_row_blocks(sizes: &CallSizes) -> usize {
    DecodeTile::row_blocks(sizes.longest_queries * sizes.group())
}

/// Returns the grid of the decode kernel.
fn decode_grid(sizes: &CallSizes, splits: usize) -> Grid {
    Grid { x: splits, y: decode_row_blocks(sizes) * sizes.key_heads, z: sizes.sequences }
}

/// Returns the grid of the kernel that combines parts.
fn combine_grid(sizes: &CallSizes) -> Grid {
    Grid::linear(DecodeTile::combine_blocks(sizes.rows()))
}

impl ForwardChoice {
    /// Checks that CUDA can launch the blocks of every kernel.
    ///
    /// # Errors
    /// If a kernel has too many.
    pub(super) fn check_blocks(&self, sizes: &CallSizes) -> std::result::Result<(), Unsupported> {
        match self {
            Self::Forward(tile) => forward_grid(sizes, tile).blocks("attention_forward")?,
            Self::Decode { splits, .. } => {
                decode_grid(sizes, *splits).blocks("attention_decode")?;
                combine_grid(sizes).blocks("attention_combine")?
            }
        };
        Ok(())
    }
}

/// The launches of a forward pass.
struct ForwardPass<'a, 't> {
    device: &'a KernelDevice,
    operands: &'a Operands<'a, 't>,
    sizes: CallSizes,
    specialization: Specialization,
}

impl ForwardPass<'_, '_> {
    /// Launches the forward kernel.
    fn forward(&self, tile: &ForwardTile, mut arguments: AttentionArguments) -> Result<()> {
        let grid = forward_grid(&self.sizes, tile);
        arguments.blocks = grid.x as i32;
        let program = self.device.load(&tile.program(&self.specialization))?;
        self.operands.launch(&program, &Launch::new(tile.kernel(&self.specialization), grid), &arguments)
    }

    /// Launches the decode kernel, and the kernel that combines parts.
    fn decode(&self, tile: &DecodeTile, splits: usize, mut arguments: AttentionArguments) -> Result<()> {
        arguments.splits = splits as i32;
        arguments.blocks = decode_row_blocks(&self.sizes) as i32;
        let program = self.device.load(&tile.program(&self.specialization))?;
        let launch = Launch::new(tile.kernel(&self.specialization), decode_grid(&self.sizes, splits));
        self.operands.launch(&program, &launch, &arguments)?;
        if splits == 1 {
            return Ok(());
        }
        let combine = Launch::new(DecodeTile::combine_kernel(), combine_grid(&self.sizes));
        self.operands.launch(&program, &combine, &arguments)
    }
}
