//! The launch of a kernel: on Metal through Candle's device, or on the emulator.

use std::sync::Arc;

use candle_attention_cuda::Unsupported;
use candle_attention_device::switches::{FIRST_USE_CHECKS, Switch};
use candle_attention_device::{FirstUse, Fnv};
use candle_core::{Device, Result, Tensor};

use crate::bindings::LaunchArguments;
use crate::launch::{MetalLaunch, count_launch};
use crate::operands::MetalOperands;
use crate::source::KernelSource;

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
            if is_turned_on() {
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

/// Returns whether the environment turns the kernels on, which is read once: nobody has seen their results on a Mac.
#[cfg(not(feature = "emulator"))]
fn is_turned_on() -> bool {
    static IS_ON: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *IS_ON.get_or_init(|| std::env::var_os(VARIABLE).is_some_and(|value| value == "1"))
}

/// Returns the checks of the kernels at their first use on a device. There are none where no kernels run, where the
/// environment turns the checks off, and on the emulator, unless it is a `NewDevice`.
#[cfg_attr(
    not(all(feature = "metal", any(target_vendor = "apple", metal_check), not(feature = "emulator"))),
    expect(unused_variables, reason = "the emulator runs calls of any device, and others have no kernels")
)]
pub fn first_use(device: &Device) -> Option<Arc<FirstUse>> {
    if !FIRST_USE_CHECKS.is_on() {
        return None;
    }
    #[cfg(feature = "emulator")]
    let checks = candle_attention_cuda::first_use(&Device::Cpu).map(|of_device| of_device.checks);
    #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_check), not(feature = "emulator")))]
    let checks = crate::metal::first_use(device, kernels_version);
    #[cfg(not(any(feature = "emulator", all(feature = "metal", any(target_vendor = "apple", metal_check)))))]
    let checks = None;
    checks
}

/// Returns the version of the package and a hash of the kernels' source.
pub(crate) fn kernels_version() -> String {
    let mut hash = Fnv::new();
    for source in KernelSource::ALL {
        hash.add_text(&source.text());
    }
    format!("{}, sources {:032x}", env!("CARGO_PKG_VERSION"), hash.value())
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
pub(crate) fn run<A: LaunchArguments>(
    launches: &[MetalLaunch],
    arguments: &A,
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
        "{launches:?} cannot run on {device:?} in this build: {} inputs, {} outputs, {} bytes of arguments",
        operands.inputs.len(),
        operands.outputs.len(),
        size_of_val(arguments)
    )
}

/// Compiles the kernels of some launches.
///
/// # Errors
/// If one does not compile.
#[cfg_attr(feature = "emulator", expect(unused_variables, reason = "the emulator runs calls of any device"))]
pub(crate) fn prepare(launches: &[MetalLaunch], device: &Device) -> Result<()> {
    #[cfg(feature = "emulator")]
    {
        crate::emulator::prepare(launches)
    }
    #[cfg(all(feature = "metal", any(target_vendor = "apple", metal_check), not(feature = "emulator")))]
    {
        crate::metal::prepare(launches, device)
    }
    #[cfg(not(any(feature = "emulator", all(feature = "metal", any(target_vendor = "apple", metal_check)))))]
    candle_core::bail!("{launches:?} cannot run on {device:?} in this build")
}
