//! The launch of a kernel: on Metal through Candle's device, or on the emulator.

use candle_attention_cuda::Unsupported;
use candle_attention_cuda::shared::AttentionArguments;
use candle_attention_device::switches::Switch;
use candle_core::{Device, Result, Tensor};

use crate::launch::{MetalLaunch, count_launch};
use crate::operands::MetalOperands;

/// The environment variable that turns the kernels on for a Mac, and off for the emulator.
const VARIABLE: &str = "CANDLE_ATTENTION_METAL_KERNELS";

static KERNELS: Switch = Switch::new(VARIABLE);

/// Checks that a device runs kernels.
///
/// # Errors
/// If it does not: the sentence says why.
pub fn is_available(device: &Device) -> std::result::Result<(), Unsupported> {
    if let Some(reason) = KERNELS.reason_against("the Metal kernels") {
        return Err(Unsupported::new(reason));
    }
    #[cfg(feature = "emulator")]
    {
        let started = candle_attention_cuda::shared::emulator::check_compiler();
        started.map_err(|reason| Unsupported::new(format!("{reason}, for tensors on {device:?}")))
    }
    #[cfg(not(feature = "emulator"))]
    match device {
        Device::Metal(_) if cfg!(all(feature = "metal", any(target_vendor = "apple", metal_check))) => {
            // Nobody has seen their results on a Mac.
            if std::env::var_os(VARIABLE).is_some_and(|value| value == "1") {
                return Ok(());
            }
            Err(Unsupported::new(format!(
                "the Metal kernels have not run on a Mac yet, and run only if the environment variable {VARIABLE} is 1"
            )))
        }
        Device::Metal(_) => Err(Unsupported::new("the Metal kernels need an Apple device and the feature `metal`")),
        Device::Cpu | Device::Cuda(_) => Err(Unsupported::new("the tensors are not on Metal")),
    }
}

/// Checks that no earlier call failed to compile the kernel of a launch. `launch` is called only if any kernel failed.
///
/// # Errors
/// If one did: the sentence says why.
#[cfg_attr(
    not(all(feature = "metal", any(target_vendor = "apple", metal_check), not(feature = "emulator"))),
    expect(unused_variables, reason = "nothing is compiled for Metal")
)]
pub(crate) fn check_known_failure(
    device: &Device,
    launch: impl FnOnce() -> Option<MetalLaunch>,
) -> std::result::Result<(), Unsupported> {
    #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_check), not(feature = "emulator")))]
    if let Some(reason) = crate::metal::known_failure(device, launch) {
        return Err(Unsupported::new(reason));
    }
    Ok(())
}

/// Runs kernels one after the other, and returns what they wrote, in the order in which the memory was added. All
/// launches are made here.
///
/// # Errors
/// If a kernel does not compile, or cannot be launched.
pub(crate) fn run(
    launches: &[MetalLaunch],
    arguments: &AttentionArguments,
    operands: MetalOperands,
    device: &Device,
) -> Result<Vec<Tensor>> {
    launches.iter().for_each(|_| count_launch());
    #[cfg(feature = "emulator")]
    {
        crate::emulator::run(launches, arguments, operands, device)
    }
    #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_check), not(feature = "emulator")))]
    {
        crate::metal::run(launches, arguments, &operands, device)
    }
    #[cfg(not(any(feature = "emulator", all(feature = "metal", any(target_vendor = "apple", metal_check)))))]
    candle_core::bail!(
        "{launches:?} cannot run on {device:?} in this build: {} inputs, {} outputs, {} queries",
        operands.inputs.len(),
        operands.outputs.len(),
        arguments.query_count
    )
}
