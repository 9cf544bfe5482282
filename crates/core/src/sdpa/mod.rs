//! Scaled dot-product attention: one function for every device, dtype and mask.
//!
//! A call is checked ([`call`]), a path is chosen ([`plan`]), and the path computes the requested results
//! ([`run`]). The reference path ([`reference`]) is the specification; a fused path returns its numbers.
//!
//! A checked `Call` contains an `AttentionCall`, in which `MaskedKeys` describe the keys that each query attends to. A
//! fused path makes another `AttentionCall` of it: the CPU kernels read slices and a range of keys for each query
//! (`CpuCall`, `KeysOfQueries`), the CUDA kernels tensors of the device and bounds of the keys (`CudaCall`,
//! `BoundedKeys`).

mod bounded_keys;
mod call;
mod call_sizes;
mod codes;
mod cpu;
mod cuda;
mod dropout;
mod function;
mod gather;
mod kernel_call;
mod kernel_graph;
mod keys;
mod listed;
mod listed_mask;
mod merge;
mod metal;
mod options;
mod packed;
mod page_table;
mod paged;
mod paged_function;
mod plan;
mod prepared;
mod reference;
mod results;
mod run;
mod small_call;
mod softmax;
mod statistics;
#[cfg(test)]
mod tests;

pub use cuda::ATTENTION_CASES;
#[cfg(test)]
pub use cuda::emulator_runs;
pub use function::{
    plan, scaled_dot_product_attention, scaled_dot_product_attention_varlen,
    scaled_dot_product_attention_varlen_with_lse, scaled_dot_product_attention_varlen_with_statistics,
    scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_statistics,
    scaled_dot_product_attention_with_weights,
};
pub use keys::AttentionFunction;
pub use merge::merge_attention;
pub use metal::METAL_CASES;
pub use options::{Backend, OutputLayout, SdpaOptions, has_relative_bias, take_alibi_slopes, without_sinks};
pub use packed::PackedSequences;
pub use paged::PagedSequences;
pub use paged_function::{plan_paged, scaled_dot_product_attention_paged, scaled_dot_product_attention_paged_with_lse};
pub use plan::Plan;
pub use results::AttentionOutput;
pub use softmax::masked_softmax;
pub use statistics::{AttentionStatistics, StatisticsOptions};

pub(crate) use call::{Call, Qkv};
pub(crate) use codes::{Q4_OFFSET, Q8_ZERO, decoded, grouped, kernels_read_codes};
pub(crate) use keys::{FunctionKeys, OwnKeys};
pub(crate) use results::{Attended, operation};
pub(crate) use run::{choose, plan as plan_of_call, run as attend};

/// Returns an error without the backtrace that Candle may append.
fn first_line(error: &candle_core::Error) -> String {
    error.to_string().lines().next().unwrap_or_default().trim().to_string()
}
