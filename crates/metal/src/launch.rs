//! The description of a launch, and the number of launches.

use std::cell::Cell;

use candle_attention_cuda::shared::Define;

/// A kernel of a program, and the threadgroups of a launch.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct MetalLaunch {
    pub kernel: &'static str,
    /// The constants of the program.
    pub defines: Vec<Define>,
    /// The number of threadgroups.
    pub groups: usize,
    /// The number of threads of a threadgroup.
    pub threads: usize,
    /// The bytes of threadgroup memory.
    pub shared_bytes: usize,
}

thread_local! {
    static LAUNCHES: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of Metal kernels of this package that the current thread has launched, on devices and on the
/// emulator.
pub fn launches_of_thread() -> u64 {
    LAUNCHES.get()
}

/// Counts a launch of the current thread.
pub(crate) fn count_launch() {
    LAUNCHES.set(LAUNCHES.get() + 1);
}
