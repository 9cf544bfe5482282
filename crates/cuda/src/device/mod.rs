//! The devices that run kernels, CUDA and the emulator, and what a launch needs of them: memory, addresses, compiled
//! programs.

mod buffer;
mod checks;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "emulator")]
pub mod emulator;
mod launch;
#[cfg(feature = "emulator")]
mod new_device;
mod operands;
#[cfg(any(feature = "cuda", feature = "emulator"))]
mod programs;

use std::cell::Cell;

use candle_attention_device::switches::FIRST_USE_CHECKS;
use candle_core::{DType, Device};

pub(crate) use buffer::DeviceBuffer;
pub use checks::{DeviceChecks, kernels_version};
#[cfg(feature = "emulator")]
pub use emulator::without_programs;
pub use launch::KernelArguments;
pub use launch::launches_of_thread;
pub(crate) use launch::{Grid, Launch};
#[cfg(feature = "emulator")]
pub use new_device::{NewDevice, SourceFault, fault_of_thread, on_new_device};
pub use operands::check_dtype;
#[cfg(feature = "emulator")]
pub use operands::{CpuMemory, cpu_memory};
pub(crate) use operands::{Operands, TensorLocks};

use crate::capability::{Capability, Limits};
use crate::program::Program;
use crate::unsupported::Unsupported;

/// Returns the checks of the kernels at their first use on a device. There are none where no kernels run, where the
/// environment turns the checks off, and on the emulator, unless it is a `NewDevice`.
pub fn first_use(device: &Device) -> Option<DeviceChecks> {
    if !FIRST_USE_CHECKS.is_on() {
        return None;
    }
    match device {
        #[cfg(feature = "emulator")]
        Device::Cpu => new_device::checks_of_thread(),
        #[cfg(feature = "cuda")]
        Device::Cuda(cuda_device) => cuda::first_use(cuda_device),
        _ => None,
    }
}

thread_local! {
    static ALLOCATED_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Returns the number of bytes that calls of the current thread have allocated on the emulator, of results and of
/// scratch.
#[cfg(feature = "emulator")]
pub fn emulator_bytes_of_thread() -> usize {
    ALLOCATED_BYTES.get()
}

/// Counts an allocation on the emulator.
fn count_allocation(dtype: DType, count: usize) {
    ALLOCATED_BYTES.set(ALLOCATED_BYTES.get() + count * dtype.size_in_bytes());
}

/// A device that runs kernels.
pub(crate) enum KernelDevice {
    /// The emulator, for tensors on the CPU.
    #[cfg_attr(not(feature = "emulator"), expect(dead_code, reason = "made by the feature `emulator` alone"))]
    Emulator,
    /// A GPU.
    #[cfg(feature = "cuda")]
    Cuda(cuda::CudaRunner),
}

/// A compiled program on its device.
pub(crate) enum LoadedProgram {
    #[cfg(feature = "emulator")]
    Emulator(std::sync::Arc<emulator::EmulatedProgram>),
    #[cfg(feature = "cuda")]
    Cuda(std::sync::Arc<cuda::CudaProgram>),
}

impl KernelDevice {
    /// Returns the kernels' side of a device of Candle.
    ///
    /// # Errors
    /// If the device runs no kernels, or none can be compiled for it.
    pub fn of(device: &Device) -> Result<Self, Unsupported> {
        match device {
            #[cfg(feature = "emulator")]
            Device::Cpu => {
                checks::check_switch()?;
                emulator::check_compiler()?;
                Ok(Self::Emulator)
            }
            #[cfg(not(feature = "emulator"))]
            Device::Cpu => Err(Unsupported::new("the tensors are on the CPU")),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                checks::check_switch()?;
                Ok(Self::Cuda(cuda::CudaRunner::new(device)?))
            }
            #[cfg(not(feature = "cuda"))]
            Device::Cuda(_) => Err(Unsupported::new("the crate was built without the feature `cuda`")),
            Device::Metal(_) => Err(Unsupported::new("the tensors are on Metal")),
        }
    }

    /// Returns the name of the device, with everything that compiles for it.
    pub fn name(&self) -> String {
        match self {
            Self::Emulator => "the emulator".into(),
            #[cfg(feature = "cuda")]
            Self::Cuda(runner) => runner.name().into(),
        }
    }

    /// Returns whether kernels run on the emulator.
    pub fn is_emulator(&self) -> bool {
        matches!(self, Self::Emulator)
    }

    /// Returns what a kernel may use of the device. The emulator has the limits of an A100.
    pub fn limits(&self) -> Limits {
        match self {
            Self::Emulator => Limits::of_capability(Capability { major: 8, minor: 0 }),
            #[cfg(feature = "cuda")]
            Self::Cuda(runner) => runner.limits(),
        }
    }

    /// Allocates memory whose content is undefined.
    pub fn uninitialized(&self, dtype: DType, count: usize) -> candle_core::Result<DeviceBuffer> {
        match self {
            Self::Emulator => {
                count_allocation(dtype, count);
                buffer::poisoned(dtype, count)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(runner) => runner.uninitialized(dtype, count),
        }
    }

    /// Allocates zeros.
    pub fn zeros(&self, dtype: DType, count: usize) -> candle_core::Result<DeviceBuffer> {
        match self {
            Self::Emulator => {
                count_allocation(dtype, count);
                buffer::zeros(dtype, count)
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(runner) => runner.zeros(dtype, count),
        }
    }

    /// Returns a compiled program: from memory, from the cache on disk, or from the compiler.
    ///
    /// # Errors
    /// If it does not compile, or does not load.
    pub fn load(&self, program: &Program) -> Result<LoadedProgram, Unsupported> {
        match self {
            #[cfg(feature = "emulator")]
            Self::Emulator => Ok(LoadedProgram::Emulator(emulator::load(program)?)),
            #[cfg(not(feature = "emulator"))]
            Self::Emulator => {
                Err(Unsupported::new(format!("the crate was built without the feature `emulator`: {program:?}")))
            }
            #[cfg(feature = "cuda")]
            Self::Cuda(runner) => Ok(LoadedProgram::Cuda(runner.load(program)?)),
        }
    }

    /// Loads a program before a call, so that the caller can take another path if it fails. The failure is logged once.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn prepare(&self, program: &Program) -> Result<(), Unsupported> {
        match self.load(program) {
            Ok(_) => Ok(()),
            Err(reason) => {
                #[cfg(any(feature = "cuda", feature = "emulator"))]
                candle_attention_device::warn_of_each_text(&format!(
                    "Candle's operations run instead of CUDA kernels: {reason}"
                ));
                Err(reason)
            }
        }
    }

    /// Checks that no earlier call failed to load the program that `program` returns. The closure is called only if
    /// some program has failed to load.
    ///
    /// # Errors
    /// If it failed, and would not be tried again now.
    #[cfg_attr(not(any(feature = "cuda", feature = "emulator")), expect(unused_variables, reason = "no program loads"))]
    pub fn check_known_failure(&self, program: impl FnOnce() -> Option<Program>) -> Result<(), Unsupported> {
        match self {
            #[cfg(feature = "emulator")]
            Self::Emulator => emulator::known_failure(program).map_or(Ok(()), |failure| Err(failure.into())),
            #[cfg(not(feature = "emulator"))]
            Self::Emulator => Ok(()),
            #[cfg(feature = "cuda")]
            Self::Cuda(runner) => runner.known_failure(program).map_or(Ok(()), |failure| Err(failure.into())),
        }
    }
}
