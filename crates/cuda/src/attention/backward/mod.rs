//! The backward pass.

mod launches;
mod memory;

use candle_attention_call::{OutputLayout, PerInput, RequestedGradients};
use candle_core::{DType, Result, Tensor, bail};

use super::arguments::{alignment, layout_strides, row_strides};
use super::call::BackwardInputs;
use super::checked::CudaAttention;
use super::checks::CallSizes;
use super::forward::{output_shape, output_strides};
use crate::arguments::AttentionArguments;
use crate::capability::Limits;
use crate::device::{DeviceBuffer, KernelDevice, Operands, TensorLocks};
use crate::program::Program;
use crate::specialization::Specialization;
use crate::tiles::BackwardTile;
use crate::unsupported::Unsupported;
use memory::{BackwardMemory, BiasGradient, scratch_bytes};

/// The most bytes for the sums of blocks, of which the gradient of a relative bias is the sum, unless one sequence and
/// one key head need more.
const MOST_PART_BYTES: usize = 256 << 20;

/// The limit on the emulator, whose tests have few keys.
const MOST_PART_BYTES_OF_EMULATOR: usize = 8 << 10;

/// A backward pass: its sizes, and the kernels that it launches.
#[derive(Clone, Copy)]
pub(super) struct BackwardPlan {
    sizes: CallSizes,
    specialization: Specialization,
    tile: BackwardTile,
    /// The order in memory of the gradients of q, k and v.
    layout: OutputLayout,
    bias: Option<BiasGradient>,
    has_sink_gradient: bool,
    shares_relative_bias: bool,
    /// The most bytes for the sums of blocks, as [`MOST_PART_BYTES`].
    most_part_bytes: usize,
}

impl BackwardPlan {
    /// Returns whether one kernel computes the gradients of queries, keys and values.
    pub fn is_fused(&self) -> bool {
        self.tile.is_fused()
    }

    /// Sets the strides of the gradients of q, k and v.
    fn set_gradient_strides(&self, arguments: &mut AttentionArguments) {
        let CallSizes { heads, key_heads, queries, keys, head_dim, value_dim, .. } = self.sizes;
        arguments.query_gradient_strides = layout_strides(self.layout, heads, queries, head_dim);
        arguments.key_gradient_strides = layout_strides(self.layout, key_heads, keys, head_dim);
        arguments.value_gradient_strides = layout_strides(self.layout, key_heads, keys, value_dim);
    }

    /// Returns the number of tiles of queries of the longest sequence.
    fn query_tiles(&self) -> usize {
        self.sizes.longest_queries.div_ceil(self.tile.keys.queries)
    }

    /// Returns the number of blocks of keys of the longest sequence.
    fn key_blocks(&self) -> usize {
        self.sizes.longest_keys.div_ceil(self.tile.key_block())
    }

    /// Returns the number of pairs that one launch of the kernel of the gradients of keys works on.
    fn pairs_of_launch(&self) -> usize {
        if !self.specialization.gradients.relative_bias {
            return self.sizes.pairs();
        }
        self.sizes.pairs_of_launch(self.key_blocks(), self.most_part_bytes)
    }

    /// Returns the number of sequences with separate relative biases: 1 where all share them.
    fn relative_bias_sequences(&self) -> usize {
        if self.shares_relative_bias { 1 } else { self.sizes.sequences }
    }
}

impl CudaAttention {
    /// Computes gradients, the same bits every time, each in the shape and the dtype of its input. Keys and values of a
    /// batch that was expanded have a gradient for each sequence.
    ///
    /// The gradient of a bias takes memory for all scores, (B, H, T_q, T_kv) in f32; no other gradient does.
    ///
    /// # Errors
    /// If the inputs do not fit the call, no kernel runs it, or one does not compile or launch.
    pub fn backward(&self, inputs: &BackwardInputs, wanted: RequestedGradients) -> Result<PerInput<Option<Tensor>>> {
        let device = KernelDevice::of(self.call.q.device())?;
        let sizes = self.sizes;
        let plan = self.backward_plan_on(&device, wanted)?;
        let BackwardPlan { specialization, tile, .. } = plan;
        self.check_backward_inputs(inputs)?;
        let mut memory = BackwardMemory::new(&device, &plan)?;

        let locks = TensorLocks::default();
        let mut operands = Operands::new(&device, &locks);
        let mut arguments = self.arguments(&mut operands)?;
        arguments.output = operands.input("the output", inputs.output)?.into_output();
        arguments.output_strides = output_strides(self.call.output_layout, &sizes);
        arguments.row_statistics = operands.input("the statistics of the softmax", inputs.softmax_stats)?.into_output();
        arguments.output_gradient = operands.input("the gradient of the output", inputs.output_gradient)?;
        arguments.output_gradient_strides = row_strides(inputs.output_gradient);
        arguments.log_sum_exp_gradient =
            operands.optional_input("the gradient of the log-sum-exp", inputs.log_sum_exp_gradient)?;
        memory.set_arguments(&plan, &mut operands, &mut arguments)?;

        let alignment = alignment(&arguments, &self.call, &sizes);
        let plan = BackwardPlan { specialization: Specialization { alignment, ..specialization }, ..plan };
        let program = device.load(&tile.program(&plan.specialization))?;
        for launch in plan.launches() {
            launch.queue(&operands, &program, &arguments)?;
        }
        operands.finish();
        self.gradients(memory, wanted)
    }

    /// Loads the program of the backward pass, for a gradient of the output with the strides of a new tensor.
    ///
    /// # Errors
    /// If no kernel computes it, or one does not compile.
    pub fn prepare_backward(&self, wanted: RequestedGradients) -> Result<()> {
        let device = KernelDevice::of(self.call.q.device())?;
        let plan = self.backward_plan(self.sizes, wanted, &device.limits())?;
        device.load(&self.backward_program(&device, &plan)?)?;
        Ok(())
    }

    /// Returns the bytes of device memory that a backward pass needs besides the gradients.
    ///
    /// # Errors
    /// If no kernel computes it.
    pub fn backward_scratch_bytes(&self, wanted: RequestedGradients) -> std::result::Result<usize, Unsupported> {
        let device = KernelDevice::of(self.call.q.device())?;
        Ok(scratch_bytes(&self.backward_plan_on(&device, wanted)?))
    }

    /// Returns the backward pass on a device, with its limit on the sums of blocks.
    fn backward_plan_on(
        &self,
        device: &KernelDevice,
        wanted: RequestedGradients,
    ) -> std::result::Result<BackwardPlan, Unsupported> {
        let plan = self.backward_plan(self.sizes, wanted, &device.limits())?;
        let most_part_bytes = if device.is_emulator() { MOST_PART_BYTES_OF_EMULATOR } else { plan.most_part_bytes };
        Ok(BackwardPlan { most_part_bytes, ..plan })
    }

    /// Returns the program of a backward pass, for a gradient of the output with the strides of a new tensor.
    pub(super) fn backward_program(&self, device: &KernelDevice, plan: &BackwardPlan) -> Result<Program> {
        let sizes = &plan.sizes;
        let locks = TensorLocks::default();
        let mut operands = Operands::new(device, &locks);
        let mut arguments = self.arguments(&mut operands)?;
        arguments.output_strides = output_strides(self.call.output_layout, sizes);
        arguments.output_gradient_strides = arguments.output_strides;
        plan.set_gradient_strides(&mut arguments);
        let alignment = alignment(&arguments, &self.call, sizes);
        Ok(plan.tile.program(&Specialization { alignment, ..plan.specialization }))
    }

    /// Returns the backward pass for aligned tensors.
    ///
    /// # Errors
    /// If no kernel computes it, or a kernel has more blocks than CUDA launches.
    pub(super) fn backward_plan(
        &self,
        sizes: CallSizes,
        wanted: RequestedGradients,
        limits: &Limits,
    ) -> std::result::Result<BackwardPlan, Unsupported> {
        let (specialization, tile) = self.backward_choice(&sizes, wanted, limits)?;
        let plan = BackwardPlan {
            sizes,
            specialization,
            tile,
            layout: wanted.layout,
            bias: self.bias_gradient(&sizes, wanted),
            has_sink_gradient: wanted.of.sinks && self.call.scores.sinks.is_some(),
            shares_relative_bias: self.call.scores.relative_bias.as_ref().is_some_and(|biases| biases.dims()[0] == 1),
            most_part_bytes: MOST_PART_BYTES,
        };
        for planned in plan.launches() {
            planned.launch.check()?;
        }
        Ok(plan)
    }

    /// Returns the sizes of the gradient of the bias, if it was requested.
    fn bias_gradient(&self, sizes: &CallSizes, wanted: RequestedGradients) -> Option<BiasGradient> {
        let bias = self.call.scores.bias.as_ref().filter(|_| wanted.of.bias)?;
        let &[batch, heads, queries, keys] = bias.dims() else { return None };
        let is_broadcast = bias.dims() != [sizes.batch, sizes.heads, sizes.queries, sizes.keys];
        Some(BiasGradient { batch, heads, queries, keys, is_broadcast })
    }

    /// Checks the inputs of a backward pass.
    ///
    /// # Errors
    /// If one has another shape, dtype or layout than the kernels read.
    #[doc(hidden)]
    pub fn check_backward_inputs(&self, inputs: &BackwardInputs) -> Result<()> {
        let sizes = &self.sizes;
        let &CallSizes { batch, heads, queries, value_dim, .. } = sizes;
        let dtype = sizes.element.dtype();
        let rows = [batch, heads, queries];
        check_input("the output", inputs.output, output_shape(self.call.output_layout, sizes).dims(), dtype)?;
        check_input("the statistics of the softmax", inputs.softmax_stats, &[2, batch, heads, queries], DType::F32)?;
        check_input("the gradient of the output", inputs.output_gradient, &[batch, heads, queries, value_dim], dtype)?;
        let mut contiguous =
            vec![("the output", inputs.output), ("the statistics of the softmax", inputs.softmax_stats)];
        if let Some(gradient) = inputs.log_sum_exp_gradient {
            check_input("the gradient of the log-sum-exp", gradient, &rows, DType::F32)?;
            contiguous.push(("the gradient of the log-sum-exp", gradient));
        }
        for (name, tensor) in contiguous {
            if !tensor.is_contiguous() {
                bail!("{name} is not contiguous")
            }
        }
        if value_dim > 1 && inputs.output_gradient.stride()[3] != 1 {
            bail!("the last dimension of the gradient of the output is not contiguous")
        }
        Ok(())
    }

    /// Returns the gradients that were requested.
    fn gradients(&self, memory: BackwardMemory, wanted: RequestedGradients) -> Result<PerInput<Option<Tensor>>> {
        let BackwardMemory { q, k, v, scores, bias, sinks, slopes, relative_bias, .. } = memory;
        let modifiers = &self.call.scores;
        let layout = wanted.layout;
        Ok(PerInput {
            q: if wanted.of.q { Some(heads_gradient(q, &self.call.q, layout)?) } else { None },
            k: if wanted.of.k { Some(heads_gradient(k, &self.call.k, layout)?) } else { None },
            v: if wanted.of.v { Some(heads_gradient(v, &self.call.v, layout)?) } else { None },
            // The gradient of a bias that has all dimensions of the scores is the gradient of the scores.
            bias: modifier_gradient(modifiers.bias.as_ref(), bias.or(scores))?,
            relative_bias: modifier_gradient(modifiers.relative_bias.as_ref(), relative_bias)?,
            alibi_slopes: modifier_gradient(modifiers.alibi_slopes.as_ref(), slopes)?,
            sinks: modifier_gradient(modifiers.sinks.as_ref(), sinks)?,
        })
    }
}

/// Returns the gradient of a tensor of the score modifiers, if it was computed.
fn modifier_gradient(modifier: Option<&Tensor>, numbers: Option<DeviceBuffer>) -> Result<Option<Tensor>> {
    match (modifier, numbers) {
        (Some(modifier), Some(numbers)) => Ok(Some(numbers.into_tensor(modifier.shape())?.to_dtype(modifier.dtype())?)),
        _ => Ok(None),
    }
}

/// Returns the gradient of queries, keys or values (B, H, T, ..), whose numbers are in the order of a layout.
fn heads_gradient(numbers: DeviceBuffer, heads: &Tensor, layout: OutputLayout) -> Result<Tensor> {
    match layout {
        OutputLayout::Bhtd => numbers.into_tensor(heads.shape()),
        OutputLayout::Bthd => numbers.into_tensor(heads.transpose(1, 2)?.shape())?.transpose(1, 2),
    }
}

/// Checks the shape and the dtype of an input.
fn check_input(name: &str, tensor: &Tensor, dims: &[usize], dtype: DType) -> Result<()> {
    if tensor.dims() != dims || tensor.dtype() != dtype {
        bail!("{name} is {:?} {:?}, expected {dtype:?} {dims:?}", tensor.dtype(), tensor.dims())
    }
    Ok(())
}
