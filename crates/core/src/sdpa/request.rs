//! The requests that a call can make. Each returns a type of its own, and names the functions of the paths that compute
//! it.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::call::Call;
use super::cuda::CudaCall;
use super::first_line;
use super::metal::MetalCall;
use super::options::Backend;
use super::plan::{Choice, Plan};
use super::result::{AttentionOutput, AttentionResult, ResultKind};
use super::statistics::{AttentionStatistics, StatisticsOptions};
use super::{cpu, reference};
use candle_attention_cuda::warn_of_each_text;
use candle_attention_kernels::InstructionSet;

/// A request for one kind of result.
pub(crate) trait Request: Copy {
    type Result: AttentionResult;

    /// The kind of the result, on which the choice of the path depends.
    const KIND: ResultKind;

    /// Returns the name of the public function that makes the request, for errors.
    fn operation(self, is_packed: bool) -> &'static str;

    /// Checks that a call can have the result.
    fn check(self, _: &Call) -> Result<()> {
        Ok(())
    }

    /// Computes the result on the reference path.
    fn run_reference(self, call: &Call) -> Result<Self::Result>;

    /// Computes the result with the CPU kernel, or on the reference path if the kernel does not have it.
    fn run_cpu(self, call: Call, _: InstructionSet) -> Result<Self::Result> {
        self.run_reference(&call)
    }

    /// Computes the result with the CUDA kernels, or on the reference path if the kernels do not have it.
    fn run_cuda(self, _: CudaCall, call: &Call) -> Result<Self::Result> {
        self.run_reference(call)
    }

    /// Computes the result with Metal's operation, or on the reference path if the operation does not have it.
    fn run_metal(self, _: &MetalCall, call: &Call) -> Result<Self::Result> {
        self.run_reference(call)
    }

    /// Makes the result of an output that a caller's attention function computes.
    ///
    /// # Errors
    /// If the result is more than the output.
    fn run_function(self, attend: impl FnOnce() -> Result<Tensor>) -> Result<Self::Result>;

    /// Computes the result for ranges of at most `step` of `h_kv` key heads, or for all key heads at once if results of
    /// parts cannot be joined.
    fn run_by_key_heads(
        self,
        h_kv: usize,
        _step: usize,
        attend: impl Fn(Range<usize>) -> Result<Self::Result>,
    ) -> Result<Self::Result> {
        attend(0..h_kv)
    }
}

/// A request for the attention output.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutputOnly;

impl Request for OutputOnly {
    type Result = Tensor;

    const KIND: ResultKind = ResultKind::Output;

    fn operation(self, is_packed: bool) -> &'static str {
        if is_packed { "scaled_dot_product_attention_varlen" } else { "scaled_dot_product_attention" }
    }

    fn run_reference(self, call: &Call) -> Result<Tensor> {
        reference::output(call)
    }

    fn run_cpu(self, call: Call, instruction_set: InstructionSet) -> Result<Tensor> {
        cpu::output(call, instruction_set)
    }

    fn run_cuda(self, cuda_call: CudaCall, call: &Call) -> Result<Tensor> {
        or_reference(call, cuda_call.output(), || reference::output(call))
    }

    fn run_metal(self, metal_call: &MetalCall, call: &Call) -> Result<Tensor> {
        or_reference(call, metal_call.output(call), || reference::output(call))
    }

    fn run_function(self, attend: impl FnOnce() -> Result<Tensor>) -> Result<Tensor> {
        attend()
    }

    fn run_by_key_heads(
        self,
        h_kv: usize,
        step: usize,
        attend: impl Fn(Range<usize>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut outputs = Vec::new();
        for start in (0..h_kv).step_by(step) {
            outputs.push(attend(start..h_kv.min(start + step))?.transpose(1, 2)?);
        }
        Tensor::cat(&outputs, 2)?.contiguous()?.transpose(1, 2)
    }
}

/// A request for the attention output and the weights after dropout.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WithWeights;

impl Request for WithWeights {
    type Result = AttentionOutput;

    const KIND: ResultKind = ResultKind::Weights;

    fn operation(self, _: bool) -> &'static str {
        "scaled_dot_product_attention_with_weights"
    }

    fn check(self, call: &Call) -> Result<()> {
        if call.sequences.is_some() {
            bail!("[multi_head_attention] weights (B, H, T_q, T_kv) were requested, which packed sequences do not have")
        }
        Ok(())
    }

    fn run_reference(self, call: &Call) -> Result<AttentionOutput> {
        let (output, weights) = reference::output_and_weights(call)?;
        Ok(AttentionOutput { output, weights })
    }

    fn run_function(self, _: impl FnOnce() -> Result<Tensor>) -> Result<AttentionOutput> {
        bail!("[attention_function] weights were requested, which a caller's function does not return")
    }
}

/// A request for the attention output and the log-sum-exp of the scores, (B, H, T_q).
#[derive(Debug, Clone, Copy)]
pub(crate) struct WithLogSumExp;

impl Request for WithLogSumExp {
    type Result = (Tensor, Tensor);

    const KIND: ResultKind = ResultKind::LogSumExp;

    fn operation(self, is_packed: bool) -> &'static str {
        match is_packed {
            false => "scaled_dot_product_attention_with_lse",
            true => "scaled_dot_product_attention_varlen_with_lse",
        }
    }

    fn run_reference(self, call: &Call) -> Result<(Tensor, Tensor)> {
        reference::output_and_lse(call)
    }

    fn run_cpu(self, call: Call, instruction_set: InstructionSet) -> Result<(Tensor, Tensor)> {
        cpu::output_and_lse(call, instruction_set)
    }

    fn run_cuda(self, cuda_call: CudaCall, call: &Call) -> Result<(Tensor, Tensor)> {
        or_reference(call, cuda_call.output_and_lse(), || reference::output_and_lse(call))
    }

    fn run_function(self, _: impl FnOnce() -> Result<Tensor>) -> Result<(Tensor, Tensor)> {
        bail!("[attention_function] the log-sum-exp was requested, which a caller's function does not return")
    }
}

/// A request for the attention output and statistics of the weights.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WithStatistics<'a>(pub &'a StatisticsOptions);

impl Request for WithStatistics<'_> {
    type Result = (Tensor, AttentionStatistics);

    const KIND: ResultKind = ResultKind::Statistics;

    fn operation(self, is_packed: bool) -> &'static str {
        match is_packed {
            false => "scaled_dot_product_attention_with_statistics",
            true => "scaled_dot_product_attention_varlen_with_statistics",
        }
    }

    fn check(self, call: &Call) -> Result<()> {
        self.0.check(call)
    }

    fn run_reference(self, call: &Call) -> Result<(Tensor, AttentionStatistics)> {
        reference::output_and_statistics(call, self.0)
    }

    fn run_cpu(self, call: Call, instruction_set: InstructionSet) -> Result<(Tensor, AttentionStatistics)> {
        cpu::output_and_statistics(call, instruction_set, self.0)
    }

    fn run_function(self, _: impl FnOnce() -> Result<Tensor>) -> Result<(Tensor, AttentionStatistics)> {
        bail!("[attention_function] statistics were requested, which a caller's function does not return")
    }
}

/// Chooses the path of a call and runs it.
pub(crate) fn run<R: Request>(call: Call, request: R) -> Result<R::Result> {
    let choice = choose(&call, request)?;
    run_on(choice, call, request)
}

/// Chooses the path of a call that can have the requested result.
pub(crate) fn choose<R: Request>(call: &Call, request: R) -> Result<Choice> {
    request.check(call)?;
    Choice::new(call, R::KIND)
}

/// Runs a call on a path.
pub(crate) fn run_on<R: Request>(choice: Choice, call: Call, request: R) -> Result<R::Result> {
    match choice {
        Choice::Reference { .. } => request.run_reference(&call),
        Choice::Cpu(instruction_set) => request.run_cpu(call, instruction_set),
        Choice::Cuda(cuda_call) => request.run_cuda(*cuda_call, &call),
        Choice::Metal(metal_call) => request.run_metal(&metal_call, &call),
    }
}

/// Returns the path of a call for its output, without running it.
pub(crate) fn plan(call: &Call) -> Result<Plan> {
    Ok(Choice::new(call, ResultKind::Output)?.plan())
}

/// Returns the output of a GPU kernel, or that of the reference path if the kernel failed and another path is allowed.
pub(super) fn or_reference<T>(call: &Call, fused: Result<T>, reference: impl FnOnce() -> Result<T>) -> Result<T> {
    let Err(cause) = fused else { return fused };
    if call.options.backend == Backend::Fused {
        bail!("[{}] the fused operation failed: {}", call.op, first_line(&cause))
    }
    // Once, since a model would repeat it for every layer and token.
    warn_of_each_text(&format!(
        "[{}] the fused operation failed, the reference path runs instead: {}",
        call.op,
        first_line(&cause)
    ));
    reference().map_err(|error| error.context(format!("after the fused operation failed: {}", first_line(&cause))))
}
