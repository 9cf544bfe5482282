//! The shape and the argument of a launch.

use std::cell::Cell;

use crate::kernel_struct::KernelStruct;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

/// The blocks that CUDA launches in the first dimension of a grid.
const MOST_BLOCKS: usize = i32::MAX as usize;

/// A struct that is the only argument of a kernel.
///
/// # Safety
/// In every launch, the addresses are null or come from the operands of the launch, and sizes and strides stay within
/// the memory there.
pub unsafe trait KernelArguments: KernelStruct {}

/// The shape of a launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Launch {
    pub kernel: &'static str,
    pub grid: Grid,
    /// The number of threads of a block.
    pub threads: usize,
    /// The number of bytes of shared memory of a block.
    pub shared_bytes: usize,
}

impl Launch {
    /// Returns the launch of a kernel with a number of blocks.
    pub fn new(shape: KernelShape, grid: Grid) -> Self {
        let KernelShape { name, threads, shared_bytes } = shape;
        Self { kernel: name, grid, threads, shared_bytes }
    }

    /// Returns the kernel.
    pub fn kernel_shape(&self) -> KernelShape {
        KernelShape { name: self.kernel, threads: self.threads, shared_bytes: self.shared_bytes }
    }

    /// Checks that CUDA can launch the blocks.
    ///
    /// # Errors
    /// If they are too many.
    pub fn check(&self) -> Result<(), Unsupported> {
        self.grid.blocks(self.kernel).map(|_| ())
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

/// The number of blocks of a launch, by dimension. The first index runs fastest.
///
/// The blocks are launched in one dimension, and kernels compute the three indices: in the second and the third
/// dimension, CUDA allows 65,535 blocks, fewer than a batch may have sequences.
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

    /// Returns the number of blocks.
    ///
    /// # Errors
    /// If they are more than CUDA launches.
    pub fn blocks(&self, kernel: &str) -> Result<u32, Unsupported> {
        let Self { x, y, z } = *self;
        match x.checked_mul(y).and_then(|blocks| blocks.checked_mul(z)) {
            Some(blocks) if blocks <= MOST_BLOCKS => Ok(blocks as u32),
            _ => Err(Unsupported::new(format!(
                "{kernel} has {x} by {y} by {z} blocks, expected at most {MOST_BLOCKS} in all"
            ))),
        }
    }
}
