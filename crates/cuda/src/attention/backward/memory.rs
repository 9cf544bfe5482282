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
    /// Whether scores share entries of the bias, whose gradients are sums then.
    pub is_broadcast: bool,
}

/// The entries, of 4 bytes each, of the memory that a backward pass needs besides the gradients.
#[derive(Debug, Clone, Copy)]
struct ScratchSizes {
    delta: usize,
    query_intervals: usize,
    tile_intervals: usize,
    query_sums: Option<usize>,
    query_turns: Option<usize>,
    slope_parts: Option<usize>,
    relative_bias_parts: Option<usize>,
    /// The gradients of scores, if the gradient of a broadcast bias is their sum.
    scores: Option<usize>,
}

impl ScratchSizes {
    fn of(plan: &BackwardPlan) -> Self {
        let &CallSizes { batch, sequences, heads, queries, keys, .. } = &plan.sizes;
        let rows = plan.sizes.rows();
        let gradients = plan.specialization.gradients;
        let tiles = sequences * heads * plan.query_tiles();
        let sums = plan.tile.keys.queries * plan.specialization.head_columns();
        let key_parts = sequences * heads * plan.key_blocks() * plan.tile.keys.warps;
        let is_fused = plan.tile.is_fused();
        let sums_scores = plan.bias.is_some_and(|bias| bias.is_broadcast);
        Self {
            delta: rows,
            query_intervals: batch * queries * 2,
            tile_intervals: sequences * plan.query_tiles() * 4,
            query_sums: is_fused.then_some(tiles * sums),
            query_turns: is_fused.then_some(tiles),
            slope_parts: gradients.slopes.then_some(key_parts),
            relative_bias_parts: gradients
                .relative_bias
                .then(|| plan.pairs_of_launch() * plan.sizes.relative_bias_parts(plan.key_blocks())),
            scores: sums_scores.then_some(rows * keys),
        }
    }

    fn bytes(&self) -> usize {
        let &Self { delta, query_intervals, tile_intervals, .. } = self;
        let optional = [self.query_sums, self.query_turns, self.slope_parts, self.relative_bias_parts, self.scores];
        let entries = delta + query_intervals + tile_intervals + optional.into_iter().flatten().sum::<usize>();
        entries * size_of::<f32>()
    }
}

/// Returns the number of bytes that a backward pass needs besides the gradients.
pub(super) fn scratch_bytes(plan: &BackwardPlan) -> usize {
    ScratchSizes::of(plan).bytes()
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

/// Allocates memory of a number of entries, if there is one.
fn allocate_some(
    entries: Option<usize>,
    allocate: impl FnOnce(usize) -> Result<DeviceBuffer>,
) -> Result<Option<DeviceBuffer>> {
    entries.map(allocate).transpose()
}

impl BackwardMemory {
    pub fn new(device: &KernelDevice, plan: &BackwardPlan) -> Result<Self> {
        let &CallSizes { batch, heads, key_heads, keys, head_dim, value_dim, element, .. } = &plan.sizes;
        let scratch = ScratchSizes::of(plan);
        let rows = plan.sizes.rows();
        let gradients = plan.specialization.gradients;
        let elements = |count| device.uninitialized(element.dtype(), count);
        let floats = |count| device.uninitialized(DType::F32, count);
        let zeros = |count| device.zeros(DType::F32, count);
        let integers = |count| device.uninitialized(DType::I32, count);
        let distances = plan.sizes.distances();
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
            delta: floats(scratch.delta)?,
            query_intervals: integers(scratch.query_intervals)?,
            tile_intervals: integers(scratch.tile_intervals)?,
            query_sums: allocate_some(scratch.query_sums, floats)?,
            query_turns: allocate_some(scratch.query_turns, integers)?,
            slope_parts: allocate_some(scratch.slope_parts, zeros)?,
            relative_bias_parts: allocate_some(scratch.relative_bias_parts, zeros)?,
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
