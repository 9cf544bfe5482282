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
    pub(crate) mod scalar;
}
mod instruction_set;
mod machine;
mod product;
#[cfg(test)]
pub(crate) mod tests;
mod vector;

pub use instruction_set::{InstructionSet, UnsupportedInstructionSet};
pub(crate) use instruction_set::{Kernel, Layout, SimdTask, dispatch_bf16, dispatch_f32};
pub use machine::{Executor, Workers, for_each_task, large_page_vec};
pub(crate) use machine::{Scratch, SharedPtr, Unwritten, for_each_index, second_cache};
pub use product::CODE_BLOCK;
pub(crate) use product::{
    Bf16Pairs, CodeBlocks, ColumnBlock, Columns, F16Rows, Format, LeftOperand, MAX_COLUMNS, Product, Words,
    add_products,
};
pub(crate) use vector::{EXP2_MIN, MAX_LANES, Vector, erfc, prefetch_bytes, sigmoid, tanh};
