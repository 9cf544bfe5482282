//! The description of a launch, and the number of launches.

use std::cell::Cell;

use candle_attention_cuda::Unsupported;
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
    /// The number of bytes of threadgroup memory.
    pub shared_bytes: usize,
    /// The pairs of a launch of the kernel of the gradients of keys, and of the one that sums the gradients of a
    /// relative bias; `None` for the others.
    pub pairs: Option<PairRange>,
}

/// Successive pairs of a sequence and a key head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct PairRange {
    pub first: usize,
    pub count: usize,
}

/// Checks that Metal can launch the threadgroups of a call or of a kernel, which `name` is for the sentence.
///
/// # Errors
/// If it does not.
pub(crate) fn check_groups(name: &str, groups: usize) -> std::result::Result<(), Unsupported> {
    if groups > i32::MAX as usize {
        return Err(Unsupported::new(format!("{name} has {groups} threadgroups, expected at most {}", i32::MAX)));
    }
    Ok(())
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
