//! The choice of the path of a call, and its run on that path.

use candle_attention_call::RequestedResults;
use candle_core::{Result, bail};

use super::call::Call;
use super::cuda::CudaPath;
use super::listed::ListedKernel;
use super::metal::MetalPath;
use super::options::Backend;
use super::plan::{Choice, Plan};
use super::results::Attended;
use super::{cpu, first_line, gather, listed, reference, statistics};
use candle_attention_cuda::warn_of_each_text;

/// A call in the form that its path reads, and the path.
pub(crate) struct ChosenCall {
    pub choice: Choice,
    pub call: Call,
}

impl ChosenCall {
    /// Returns the requested results.
    pub fn attend(self, wanted: RequestedResults) -> Result<Attended> {
        let Self { choice, call } = self;
        match choice {
            Choice::Reference { .. } => reference::attend(&call, wanted),
            Choice::Cpu(instruction_set) => cpu::attend(call, instruction_set, wanted),
            Choice::Listed(kernel @ ListedKernel::Cpu(_)) => listed::attend(call, kernel, wanted),
            Choice::Listed(kernel @ (ListedKernel::Cuda | ListedKernel::Metal)) => {
                let fused = listed::attend(call.clone(), kernel, wanted);
                or_reference(&call, fused, || reference::attend(&listed::with_all_keys(call.clone())?, wanted))
            }
            Choice::Cuda(cuda_path) => attend_on_cuda(&call, *cuda_path, wanted, || reference::attend(&call, wanted)),
            Choice::Metal(metal_path) => {
                attend_on_metal(&call, metal_path, wanted, || reference::attend(&call, wanted))
            }
        }
    }

    /// Returns the path in the form that callers read.
    pub fn plan(self) -> Plan {
        let mut plan = self.choice.plan();
        if let Some(reason) = &self.call.lists_obstacle
            && self.call.attention.keys.lists.is_empty()
        {
            plan.reason.push_str(&format!("; the key lists are a boolean mask: {reason}"));
        }
        plan
    }
}

/// Chooses the path of a call and runs it.
pub(crate) fn run(call: Call, wanted: RequestedResults) -> Result<Attended> {
    if !has_pages_to_read(&call) {
        return choose(call, wanted)?.attend(wanted);
    }
    let on_reference = || reference::attend(&gather::with_keys_in_one_piece(call.clone())?, wanted);
    match Choice::fused(&call, wanted)? {
        Ok(Choice::Cpu(instruction_set)) => cpu::attend_over_pages(&call, instruction_set, wanted),
        Ok(Choice::Cuda(cuda_path)) => attend_on_cuda(&call, *cuda_path, wanted, on_reference),
        Ok(Choice::Metal(metal_path)) => attend_on_metal(&call, metal_path, wanted, on_reference),
        _ => choose(gather::with_keys_in_one_piece(call)?, wanted)?.attend(wanted),
    }
}

/// Returns whether a call has keys in pages that its kernel may read page by page. Listed keys are read row by row.
fn has_pages_to_read(call: &Call) -> bool {
    call.attention.keys.pages.is_some() && call.attention.keys.lists.is_empty()
}

/// Returns the path of a call for its output, without running it.
pub(crate) fn plan(call: Call) -> Result<Plan> {
    let wanted = RequestedResults::default();
    if !has_pages_to_read(&call) {
        return Ok(choose(call, wanted)?.plan());
    }
    let reason = match Choice::fused(&call, wanted)? {
        Ok(choice) => {
            let mut plan = choice.plan();
            plan.reason.push_str(", which reads pages in place");
            return Ok(plan);
        }
        Err(reason) => reason,
    };
    let mut plan = Choice::new(&gather::for_plan(call)?, wanted)?.plan();
    if plan.backend == Backend::Fused {
        plan.reason.push_str(&format!(", over a copy of the pages: {reason}"));
    }
    Ok(plan)
}

/// Chooses the path of a call that can have the requested results.
pub(crate) fn choose(call: Call, wanted: RequestedResults) -> Result<ChosenCall> {
    let readable = listed::readable(call, wanted)?;
    if wanted.weights && readable.sequences().is_some() {
        bail!("[multi_head_attention] weights (B, H, T_q, T_kv) were requested, which packed sequences do not have")
    }
    if let Some(requested) = wanted.statistics {
        statistics::check(requested, &readable)?;
    }
    Ok(ChosenCall { choice: Choice::new(&readable, wanted)?, call: readable })
}

/// Runs a call on the CUDA kernels, or on the reference path, as [`unless_check_failed`] says.
fn attend_on_cuda(
    call: &Call,
    cuda_path: CudaPath,
    wanted: RequestedResults,
    reference: impl FnOnce() -> Result<Attended>,
) -> Result<Attended> {
    unless_check_failed(call, cuda_path.check_first_use(), reference, || cuda_path.attend(wanted))
}

/// Runs a call on Metal as [`attend_on_cuda`] does on CUDA.
fn attend_on_metal(
    call: &Call,
    metal_path: MetalPath,
    wanted: RequestedResults,
    reference: impl FnOnce() -> Result<Attended>,
) -> Result<Attended> {
    unless_check_failed(call, metal_path.check_first_use(), reference, || metal_path.attend(call, wanted))
}

/// Runs a call on GPU kernels. If they fail, or failed their check at first use, the reference path runs it, unless
/// [`Backend::Fused`] is requested: then the failure is an error.
fn unless_check_failed(
    call: &Call,
    check: std::result::Result<(), String>,
    reference: impl FnOnce() -> Result<Attended>,
    kernels: impl FnOnce() -> Result<Attended>,
) -> Result<Attended> {
    match check {
        Ok(()) => or_reference(call, kernels(), reference),
        Err(reason) if call.backend == Backend::Fused => bail!("[{}] no fused path: {reason}", call.op),
        // The check has logged the reason.
        Err(_) => reference(),
    }
}

/// Returns the results of a GPU kernel, or the results of the reference path if the kernel failed. If
/// [`Backend::Fused`] is requested, the failure is an error.
pub(super) fn or_reference<T>(call: &Call, fused: Result<T>, reference: impl FnOnce() -> Result<T>) -> Result<T> {
    let Err(cause) = fused else { return fused };
    if call.backend == Backend::Fused {
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
