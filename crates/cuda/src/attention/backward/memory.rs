//! The memory of a backward pass: gradients and scratch.

use candle_core::{DType, Result};

use super::BackwardPlan;
use crate::arguments::AttentionArguments;
use crate::attention::checks::CallSizes;
use crate::device::{DeviceBuffer, KernelDevice, Operands};

/// The sizes of the gradient of a bias.
#[derive(Clone, Copy)]
pub(super) struct BiasGradient {
    pub batch: usize,
    pub heads: usize,
    pub queries: usize,
    pub keys: usize,
    /// Whether the gradients of scores are summed.
    pub is_broadcast: bool,
}

/// The memory of a backward pass.
pub(super) struct BackwardMemory {
    pub q: DeviceBuffer,
    pub k: DeviceBuffer,
    pub v: DeviceBuffer,
    /// The gradient of each score, for the gradient of the bias.
    pub scores: Option<DeviceBuffer>,
    /// The sums of these gradients, if the bias is broadcast.
    pub bias: Option<DeviceBuffer>,
    pub sinks: Option<DeviceBuffer>,
    pub slopes: Option<DeviceBuffer>,
    pub relative_bias: Option<DeviceBuffer>,
    delta: DeviceBuffer,
    query_intervals: DeviceBuffer,
    tile_intervals: DeviceBuffer,
    query_sums: Option<DeviceBuffer>,
    query_turns: Option<DeviceBuffer>,
    slope_parts: Option<DeviceBuffer>,
    relative_bias_parts: Option<DeviceBuffer>,
}

/// Allocates memory if `is_needed`.
fn allocate_if(is_needed: bool, allocate: impl FnOnce() -> Result<DeviceBuffer>) -> Result<Option<DeviceBuffer>> {
    if is_needed { Ok(Some(allocate()?)) } else { Ok(None) }
}

impl BackwardMemory {
    pub fn new(device: &KernelDevice, plan: &BackwardPlan) -> Result<Self> {
        let &CallSizes { batch, sequences, heads, key_heads, queries, keys, head_dim, value_dim, element, .. } =
            &plan.sizes;
        let rows = plan.sizes.rows();
        let gradients = plan.specialization.gradients;
        let elements = |count| device.uninitialized(element.dtype(), count);
        let floats = |count| device.uninitialized(DType::F32, count);
        let zeros = |count| device.zeros(DType::F32, count);
        let integers = |count| device.uninitialized(DType::I32, count);
        let tiles = sequences * heads * plan.query_tiles();
        let key_parts = sequences * heads * plan.key_blocks();
        let distances = plan.sizes.distances();
        let is_fused = plan.tile.is_fused();
        let sums = plan.tile.keys.queries * plan.specialization.head_columns();
        let bias = match plan.bias {
            Some(bias) if bias.is_broadcast => Some(floats(bias.batch * bias.heads * bias.queries * bias.keys)?),
            _ => None,
        };
        Ok(Self {
            q: elements(rows * head_dim)?,
            k: elements(batch * key_heads * keys * head_dim)?,
            v: elements(batch * key_heads * keys * value_dim)?,
            scores: allocate_if(gradients.bias, || zeros(rows * keys))?,
            bias,
            sinks: allocate_if(plan.has_sink_gradient, || floats(heads))?,
            slopes: allocate_if(gradients.slopes, || floats(heads))?,
            relative_bias: allocate_if(gradients.relative_bias, || {
                zeros(plan.relative_bias_sequences() * heads * distances)
            })?,
            delta: floats(rows)?,
            query_intervals: integers(batch * queries * 2)?,
            tile_intervals: integers(sequences * plan.query_tiles() * 4)?,
            query_sums: allocate_if(is_fused, || floats(tiles * sums))?,
            query_turns: allocate_if(is_fused, || integers(tiles))?,
            slope_parts: allocate_if(gradients.slopes, || zeros(key_parts * plan.tile.keys.warps))?,
            relative_bias_parts: allocate_if(gradients.relative_bias, || {
                zeros(plan.pairs_of_launch() * plan.parts_of_pair())
            })?,
        })
    }

    /// Sets the addresses of the memory, its strides, and the sizes of a backward pass.
    pub fn set_arguments<'a>(
        &'a mut self,
        plan: &BackwardPlan,
        operands: &mut Operands<'a, '_>,
        arguments: &mut AttentionArguments,
    ) -> Result<()> {
        arguments.query_gradient = operands.output("the gradient of q", &mut self.q)?;
        arguments.key_gradient = operands.output("the gradient of k", &mut self.k)?;
        arguments.value_gradient = operands.output("the gradient of v", &mut self.v)?;
        plan.set_gradient_strides(arguments);

        arguments.score_gradient = operands.optional_output("the gradients of scores", self.scores.as_mut())?;
        arguments.bias_gradient = operands.optional_output("the gradient of the bias", self.bias.as_mut())?;
        arguments.sink_gradient = operands.optional_output("the gradient of sinks", self.sinks.as_mut())?;
        arguments.slope_gradient = operands.optional_output("the gradient of slopes", self.slopes.as_mut())?;
        arguments.relative_bias_gradient =
            operands.optional_output("the gradient of the relative bias", self.relative_bias.as_mut())?;
        if let Some(bias) = plan.bias {
            arguments.bias_sequences = bias.batch as i32;
            arguments.bias_heads = bias.heads as i32;
            arguments.bias_queries = bias.queries as i32;
            arguments.bias_keys = bias.keys as i32;
        }

        arguments.delta = operands.output("delta", &mut self.delta)?;
        arguments.query_intervals = operands.output("the intervals of queries", &mut self.query_intervals)?;
        arguments.tile_intervals = operands.output("the intervals of tiles", &mut self.tile_intervals)?;
        arguments.query_gradient_sums =
            operands.optional_output("the sums of the gradient of q", self.query_sums.as_mut())?;
        arguments.query_gradient_turns = operands.optional_output("turns", self.query_turns.as_mut())?;
        arguments.slope_gradient_parts =
            operands.optional_output("the parts of the gradient of slopes", self.slope_parts.as_mut())?;
        arguments.relative_bias_parts = operands
            .optional_output("the parts of the gradient of the relative bias", self.relative_bias_parts.as_mut())?;
        arguments.query_tiles = plan.query_tiles() as i32;
        arguments.key_blocks = plan.key_blocks() as i32;
        Ok(())
    }
}
