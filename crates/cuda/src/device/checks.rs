//! The checks of kernels at their first use on devices on which nobody has run them.

use std::sync::Arc;

use candle_attention_device::FirstUse;
#[cfg(any(feature = "cuda", feature = "emulator"))]
use candle_attention_device::switches::Switch;

use crate::source;
#[cfg(any(feature = "cuda", feature = "emulator"))]
use crate::unsupported::Unsupported;

/// The checks of kernels on a device.
#[derive(Debug, Clone)]
pub struct DeviceChecks {
    /// The checks of each kind.
    pub checks: Arc<FirstUse>,
    /// Whether the kernels have been run on a device of this compute capability and compared with the CPU.
    pub have_run: bool,
}

/// Returns the version of the package and a hash of the kernels' source.
pub fn kernels_version() -> String {
    format!("{}, sources {:032x}", env!("CARGO_PKG_VERSION"), source::hash())
}

/// Checks that the environment does not turn the kernels off.
///
/// # Errors
/// If it does.
#[cfg(any(feature = "cuda", feature = "emulator"))]
pub(super) fn check_switch() -> Result<(), Unsupported> {
    static KERNELS: Switch = Switch::new("CANDLE_ATTENTION_CUDA_KERNELS");
    KERNELS.reason_against("the CUDA kernels").map_or(Ok(()), |reason| Err(Unsupported::new(reason)))
}
