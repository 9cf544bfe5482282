//! What the algorithms are written in: instruction sets, vectors, matrix products, threads and memory. Knows nothing of
//! attention or layers.

pub(crate) mod arch {
    //! One file for each instruction set.

    #[cfg(target_arch = "x86_64")]
    pub(crate) mod amx;
    #[cfg(target_arch = "x86_64")]
    pub(crate) mod avx2;
    #[cfg(target_arch = "x86_64")]
    pub(crate) mod avx512;
    #[cfg(target_arch = "aarch64")]
    pub(crate) mod neon;
    #[cfg(target_arch = "aarch64")]
    mod neon_tile;
    pub(crate) mod scalar;
}
mod kernel;
mod memory;
mod product;
#[cfg(test)]
pub(crate) mod tests;
mod threads;
mod tier;
mod vector;

pub(crate) use kernel::{Kernel, SimdTask, dispatch_bf16, dispatch_f32};
pub use memory::large_page_vec;
pub(crate) use memory::{Scratch, SharedPtr, Unwritten, second_cache};
pub use product::CODE_BLOCK;
pub(crate) use product::{
    Bf16Pairs, CodeBlocks, ColumnBlock, Columns, F16Rows, LeftOperand, MAX_COLUMNS, Product, Words, add_products,
};
pub(crate) use threads::for_each_index;
pub use threads::{Executor, Workers, for_each_task};
pub use tier::{Tier, TierError};
pub(crate) use vector::{EXP2_MIN, MAX_LANES, Vector, erfc, prefetch_bytes, sigmoid, tanh};
