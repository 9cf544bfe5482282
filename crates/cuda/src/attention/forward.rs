//! The forward pass: a block of queries at a time, or few queries with the keys in parts.

use candle_core::{DType, Result, Shape};

use super::call::{AttentionCall, ForwardOutput, OutputLayout};
use super::plan::ForwardChoice;
use super::readings::{Readings, alignment, layout_strides};
use super::sizes::Sizes;
use crate::arguments::{AttentionArguments, RowStrides};
use crate::device::{Buffer, Grid, KernelDevice, Launch, Operands};
use crate::specialization::{ModifierGradients, Specialization};
use crate::tiles::{DecodeTile, ForwardTile};

impl AttentionCall {
    /// Computes the attention output, and the log-sum-exp if `with_log_sum_exp`.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch.
    pub fn forward(&self, with_log_sum_exp: bool) -> Result<ForwardOutput> {
        let device = KernelDevice::of(self.q.device())?;
        let sizes = self.sizes()?;
        let choice = self.forward_choice(&sizes, &device.limits())?;
        let dtype = sizes.element.dtype();
        let mut output = device.uninitialized(dtype, sizes.rows() * sizes.value_dim)?;
        let mut log_sum_exp = match with_log_sum_exp {
            true => Some(device.uninitialized(DType::F32, sizes.rows())?),
            false => None,
        };
        let mut parts = match choice {
            ForwardChoice::Decode { splits, .. } if splits > 1 => Some(DecodeParts::new(&device, &sizes, splits)?),
            _ => None,
        };

        let readings = Readings::new(self);
        let mut operands = Operands::new(&device);
        let mut arguments = readings.arguments(&mut operands, &sizes)?;
        arguments.output = operands.write("the output", &mut output)?;
        arguments.output_strides = output_strides(self.output_layout, &sizes);
        arguments.log_sum_exp = operands.write_optional("the log-sum-exp", log_sum_exp.as_mut())?;
        if let Some(DecodeParts { outputs, statistics }) = &mut parts {
            arguments.partial_outputs = operands.write("the parts of the output", outputs)?;
            arguments.partial_statistics = operands.write("the statistics of parts", statistics)?;
        }
        let alignment = alignment(&arguments, self, &sizes);
        let specialization = self.specialization(&sizes, ModifierGradients::default(), alignment);
        let pass = ForwardPass { device: &device, operands: &operands, sizes, specialization };
        match choice {
            ForwardChoice::Forward(tile) => pass.forward(&tile, arguments)?,
            ForwardChoice::Decode { tile, splits } => pass.decode(&tile, splits, arguments)?,
        }
        operands.finish();
        Ok(ForwardOutput {
            output: output.into_storage(),
            output_shape: output_shape(self.output_layout, &sizes),
            log_sum_exp: log_sum_exp.map(|buffer| buffer.into_storage()),
            log_sum_exp_shape: (sizes.batch, sizes.heads, sizes.queries).into(),
        })
    }
}

/// The results of the decode kernel for parts of the keys.
struct DecodeParts {
    /// (splits, B, H, T_q, D_v).
    outputs: Buffer,
    /// (splits, B, H, T_q) pairs.
    statistics: Buffer,
}

impl DecodeParts {
    fn new(device: &KernelDevice, sizes: &Sizes, splits: usize) -> Result<Self> {
        let rows = splits * sizes.rows();
        let outputs = device.uninitialized(DType::F32, rows * sizes.value_dim)?;
        Ok(Self { outputs, statistics: device.uninitialized(DType::F32, rows * 2)? })
    }
}

/// Returns the shape of the output as it is stored.
pub(super) fn output_shape(layout: OutputLayout, sizes: &Sizes) -> Shape {
    let &Sizes { batch, heads, queries, value_dim, .. } = sizes;
    match layout {
        OutputLayout::Bhtd => (batch, heads, queries, value_dim).into(),
        OutputLayout::Bthd => (batch, queries, heads, value_dim).into(),
    }
}

/// Returns the strides of the output.
pub(super) fn output_strides(layout: OutputLayout, sizes: &Sizes) -> RowStrides {
    let &Sizes { heads, queries, value_dim, .. } = sizes;
    layout_strides(layout, heads, queries, value_dim)
}

/// The launches of a forward pass.
struct ForwardPass<'a> {
    device: &'a KernelDevice,
    operands: &'a Operands<'a>,
    sizes: Sizes,
    specialization: Specialization,
}

impl ForwardPass<'_> {
    /// Launches the forward kernel.
    fn forward(&self, tile: &ForwardTile, mut arguments: AttentionArguments) -> Result<()> {
        let Sizes { heads, sequences, longest_queries, .. } = self.sizes;
        let blocks = longest_queries.div_ceil(tile.queries());
        arguments.blocks = blocks as i32;
        let program = self.device.load(&tile.program(&self.specialization))?;
        let launch = Launch::new(tile.kernel(&self.specialization), Grid::linear(blocks * heads * sequences));
        self.operands.launch(&program, &launch, &arguments)
    }

    /// Launches the decode kernel, and the kernel that combines parts.
    fn decode(&self, tile: &DecodeTile, splits: usize, mut arguments: AttentionArguments) -> Result<()> {
        let Sizes { key_heads, sequences, longest_queries, .. } = self.sizes;
        arguments.splits = splits as i32;
        let row_blocks = DecodeTile::row_blocks(longest_queries * self.sizes.group());
        let program = self.device.load(&tile.program(&self.specialization))?;
        let grid = Grid { x: splits, y: row_blocks * key_heads, z: sequences };
        self.operands.launch(&program, &Launch::new(tile.kernel(&self.specialization), grid), &arguments)?;
        if splits == 1 {
            return Ok(());
        }
        let grid_of_rows = Grid::linear(DecodeTile::combine_blocks(self.sizes.rows()));
        self.operands.launch(&program, &Launch::new(DecodeTile::combine_kernel(), grid_of_rows), &arguments)
    }
}
