//! Instruction sets, vectors, matrix products, threads and memory: the base of the algorithms, which knows nothing of
//! attention or layers.

mod arch {
    //! One file for each instruction set.

    #[cfg(target_arch = "x86_64")]
    pub(super) mod amx;
    #[cfg(target_arch = "x86_64")]
    pub(super) mod avx2;
    #[cfg(target_arch = "x86_64")]
    pub(super) mod avx512;
    #[cfg(target_arch = "aarch64")]
    pub(super) mod neon;
    pub(super) mod scalar;
}
mod cache;
mod child;
mod code_columns;
mod code_format;
mod code_scales;
mod columns;
mod detection;
mod dispatch;
mod functions;
mod instruction_set;
mod kept;
mod kernel;
mod memory;
mod panel;
mod pool;
mod product;
#[cfg(test)]
pub(crate) mod tests;
mod threads;

pub(crate) use cache::second_cache;
pub(crate) use code_format::{
    ByteTable, CodeFormat, CodeTable, CodeValues, E4M3_SHIFT, Float8, GROUPS_BLOCK, GroupFormat, NumberFormat, Offset,
    ScaleFormat,
};
pub use code_format::{CODE_BLOCK, NESTED_BLOCK};
pub(crate) use columns::{with_columns, with_number_columns};
pub(crate) use dispatch::{dispatch_bf16, dispatch_f32, kernel_layout};
pub(crate) use functions::{EXP2_MIN, erfc, prefetch_bytes, sigmoid, tanh};
pub use instruction_set::{InstructionSet, UnsupportedInstructionSet};
pub(crate) use kept::KeptLines;
pub(crate) use kernel::{
    ColumnBlock, Columns, Kernel, Layout, MAX_LANES, SimdTask, TakenBits, Vector, WithColumns, is_of_others,
};
pub use memory::large_page_vec;
pub(crate) use memory::{CacheLine, Scratch, SharedPtr, Unwritten};
pub(crate) use panel::{Format, LeftOperand, MAX_COLUMNS, NextBytes, PanelProduct, RightOperand};
pub(crate) use product::{add_products, multiply, multiply_words};
pub(crate) use threads::for_each_index;
pub use threads::{WorkSize, Workers, for_each_chunk, for_each_task};
