//! Checks of the kernels at their first use, on an emulator that is a device on which nobody has run them.

use std::path::Path;

use candle_attention_call::RequestedResults;
use candle_attention_cuda::{NewDevice, SourceFault, launches_of_thread, on_new_device};
use candle_core::{DType, Device, Error, Result, Tensor, Var};

use super::super::ATTENTION_CASES;
use super::problem::emulator_runs;
use crate::cache::QUANTIZE_CASE;
use crate::mask::AttentionMask;
use crate::position::ROTATION_CASE;
use crate::sdpa::call::{Call, Qkv};
use crate::sdpa::cuda::CudaPath;
use crate::sdpa::options::{Backend, SdpaOptions};
use crate::sdpa::plan::Choice;
use crate::sdpa::run::ChosenCall;
use candle_attention_modules::base::first_use::{CaseError, allowed_error};
use candle_attention_modules::init::TorchSeed;

/// Every sequence has the length of the first one: forward, decode and backward kernels attend to wrong keys.
const WRONG_LENGTHS: SourceFault =
    SourceFault { file: "masks.cuh", text: "arguments.key_lengths + index", replacement: "arguments.key_lengths" };

/// A program that does not compile.
const NO_PROGRAM: SourceFault =
    SourceFault { file: "masks.cuh", text: "struct Sequence {", replacement: "struct Sequence { not C++;" };

/// The queries for which the forward kernel runs, and for which the decode kernel does.
const PROMPT: usize = 72;
const TOKEN: usize = 1;

/// The inputs of a call.
struct Inputs {
    q: Var,
    k: Tensor,
    v: Tensor,
}

impl Inputs {
    /// Draws queries, keys and values of two heads in bf16.
    fn draw(t_q: usize) -> Result<Self> {
        let generator = TorchSeed::new(21);
        let rows = |heads: usize, t: usize| generator.randn((1, heads, t, 64))?.to_dtype(DType::BF16);
        Ok(Self { q: Var::from_tensor(&rows(2, t_q)?)?, k: rows(1, 136)?, v: rows(1, 136)? })
    }

    fn call(&self, is_tracked: bool, backend: Backend) -> Result<Call> {
        let q = if is_tracked { self.q.as_tensor().clone() } else { self.q.detach() };
        let options = SdpaOptions::default().with_backend(backend);
        Call::new("test", Qkv { q: &q, k: &self.k, v: &self.v }, None, &AttentionMask::causal(), &options)
    }

    /// Returns the output of a call for the CUDA kernels, as a public function would.
    fn output(&self, is_tracked: bool) -> Result<Tensor> {
        let call = self.call(is_tracked, Backend::Auto)?;
        let wanted = RequestedResults::default();
        let choice = match CudaPath::plan(&call, wanted) {
            Ok(cuda_path) => Choice::Cuda(Box::new(cuda_path)),
            Err(reason) => Choice::Reference { reason },
        };
        Ok(ChosenCall { choice, call }.attend(wanted)?.output)
    }

    /// Returns the output of the reference path.
    fn expected(&self) -> Result<Tensor> {
        let choice = Choice::Reference { reason: String::new() };
        let call = self.call(true, Backend::Auto)?;
        Ok(ChosenCall { choice, call }.attend(RequestedResults::default())?.output)
    }

    /// Returns the reason why no kernel runs the call, by its plan.
    fn reason(&self, is_tracked: bool) -> Result<Option<String>> {
        Ok(CudaPath::plan(&self.call(is_tracked, Backend::Auto)?, RequestedResults::default()).err())
    }
}

fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// Returns a device with wrong kernels.
fn wrong_device(folder: &Path) -> NewDevice {
    NewDevice::new("a device with wrong lengths", folder).with_fault(WRONG_LENGTHS)
}

#[test]
fn first_use_cases_of_attention_rotation_and_codes_pass_on_the_emulator() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    for case in ATTENTION_CASES.into_iter().chain([ROTATION_CASE, QUANTIZE_CASE]) {
        let CaseError { name, error } = case.largest_error(&Device::Cpu, DType::BF16)?;
        let allowed = allowed_error(DType::BF16);
        assert!(error <= allowed / 2.0, "{}: {name} is off by {error:e}, of {allowed:e}", case.operation);
    }
    Ok(())
}

#[test]
fn wrong_cuda_kernel_at_first_use_is_caught_and_call_matches_reference() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    for t_q in [PROMPT, TOKEN] {
        let inputs = Inputs::draw(t_q)?;
        let device = wrong_device(folder.path());
        on_new_device(&device, || -> Result<()> {
            assert_eq!(inputs.reason(false)?, None, "before the first call");
            assert_eq!(numbers(&inputs.output(false)?)?, numbers(&inputs.expected()?)?);
            let reason = inputs.reason(false)?.expect("a reason after the first call");
            let kernels = if t_q == PROMPT { "attention, forward" } else { "attention, decode" };
            let start = format!("the kernels of {kernels} in bf16 failed their check on a device with wrong lengths: ");
            assert!(reason.starts_with(&start) && reason.contains("the output is off by "), "{reason}");
            // The later calls launch nothing.
            let before = launches_of_thread();
            inputs.output(false)?;
            assert_eq!(launches_of_thread(), before);
            Ok(())
        })?;
        let fused = inputs.call(false, Backend::Fused)?;
        let wanted = RequestedResults::default();
        let error = on_new_device(&wrong_device(folder.path()), || -> Result<Error> {
            let cuda_path = CudaPath::plan(&fused, wanted).map_err(Error::msg)?;
            let choice = Choice::Cuda(Box::new(cuda_path));
            Ok(ChosenCall { choice, call: fused.clone() }.attend(wanted).expect_err("an error"))
        })?;
        assert!(error.to_string().starts_with("[test] no fused path: the kernels of attention"), "{error}");
    }
    Ok(())
}

#[test]
fn wrong_backward_cuda_kernel_at_first_use_leaves_gradients_to_the_reference() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let inputs = Inputs::draw(PROMPT)?;
    // The forward kernel is right.
    let fault = SourceFault {
        file: "gradient_sums.cuh",
        text: "store_global(arguments.delta + row, sum)",
        replacement: "store_global(arguments.delta + row, 0.5f * sum)",
    };
    let device = NewDevice::new("a device with wrong gradients", folder.path()).with_fault(fault);
    let gradient = |output: &Tensor| -> Result<Vec<f32>> {
        let gradients = output.sqr()?.sum_all()?.backward()?;
        numbers(gradients.get(&inputs.q).expect("a gradient"))
    };
    on_new_device(&device, || -> Result<()> {
        let found = inputs.output(true)?;
        let expected = inputs.expected()?;
        assert_eq!(gradient(&found)?, gradient(&expected)?);
        let reason = inputs.reason(true)?.expect("a reason");
        assert!(reason.starts_with("the kernels of attention, backward in bf16 failed their check"), "{reason}");
        assert_eq!(inputs.reason(false)?, None, "a call without gradients");
        Ok(())
    })
}

#[test]
fn cuda_kernel_that_does_not_compile_at_first_use_leaves_the_call_to_the_reference() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let inputs = Inputs::draw(TOKEN)?;
    let device = NewDevice::new("a device without a program", folder.path()).with_fault(NO_PROGRAM);
    on_new_device(&device, || -> Result<()> {
        for _ in 0..2 {
            assert_eq!(numbers(&inputs.output(false)?)?, numbers(&inputs.expected()?)?);
        }
        Ok(())
    })
}

#[test]
fn right_cuda_kernel_at_first_use_is_remembered_by_later_calls_and_processes() -> Result<()> {
    if !emulator_runs() {
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let inputs = Inputs::draw(TOKEN)?;
    let launches = |device: &NewDevice| -> Result<u64> {
        on_new_device(device, || {
            let before = launches_of_thread();
            inputs.output(false)?;
            Ok(launches_of_thread() - before)
        })
    };
    // The emulator as it usually is: a device on which the kernels have been run.
    let before = launches_of_thread();
    inputs.output(false)?;
    let of_call = launches_of_thread() - before;
    let first = NewDevice::new("a right device", folder.path());
    assert!(launches(&first)? > of_call, "the case runs in the first call");
    assert_eq!(launches(&first)?, of_call, "not in the second");
    assert_eq!(launches(&NewDevice::new("a right device", folder.path()))?, of_call, "nor in another process");
    assert!(launches(&NewDevice::new("another device", folder.path()))? > of_call);
    Ok(())
}
