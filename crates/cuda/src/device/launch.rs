//! The shape and the argument of a launch.

use std::cell::Cell;

use candle_core::{Result, bail};

use crate::program::KernelShape;

/// A struct that is the only argument of a kernel.
///
/// # Safety
/// The type is `#[repr(C)]` without padding and has the fields of the struct in the kernels' source. Its addresses are
/// null or come from the operands of the same launch, and sizes and strides stay within the memory there.
pub(crate) unsafe trait KernelArguments: Copy {}

/// The shape of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launch {
    pub kernel: &'static str,
    pub grid: Grid,
    /// The threads of a block.
    pub threads: usize,
    /// The bytes of shared memory of a block.
    pub shared_bytes: usize,
}

impl Launch {
    /// Returns the launch of a kernel with a number of blocks.
    pub fn new(shape: KernelShape, grid: Grid) -> Self {
        let KernelShape { name, threads, shared_bytes } = shape;
        Self { kernel: name, grid, threads, shared_bytes }
    }
}

thread_local! {
    static LAUNCHES: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of kernels of this package that the current thread has launched, on GPUs and on the emulator.
/// The kernels of Candle are not counted.
///
/// The difference between two numbers is the number of launches in between:
///
/// ```
/// let before = candle_attention_cuda::launches_of_thread();
/// // A call.
/// let launches = candle_attention_cuda::launches_of_thread() - before;
/// # assert_eq!(launches, 0);
/// ```
pub fn launches_of_thread() -> u64 {
    LAUNCHES.get()
}

/// Counts a launch of the current thread, before it is queued.
pub(super) fn count_launch() {
    LAUNCHES.set(LAUNCHES.get() + 1);
}

/// The number of blocks of a launch, by dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Grid {
    pub x: usize,
    pub y: usize,
    pub z: usize,
}

impl Grid {
    /// Returns a grid of one dimension.
    pub fn linear(x: usize) -> Self {
        Self { x, y: 1, z: 1 }
    }

    /// Checks the largest sizes that CUDA launches.
    pub fn check(&self, kernel: &str) -> Result<GridDimensions> {
        let Self { x, y, z } = *self;
        if x > i32::MAX as usize || y > u16::MAX.into() || z > u16::MAX.into() {
            bail!("[{kernel}] the grid is {x} by {y} by {z} blocks, expected at most 2147483647 by 65535 by 65535")
        }
        Ok(GridDimensions { x: x as u32, y: y as u32, z: z as u32 })
    }
}

/// A grid that CUDA can launch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GridDimensions {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}
