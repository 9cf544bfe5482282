#![doc = include_str!("../README.md")]

#[cfg(target_endian = "big")]
compile_error!(
    "candle-attention-kernels needs a little-endian target: products read a 32-bit word as two 16-bit numbers, the first in \
     its lower half, and would give wrong results in half precision"
);

mod cpu;
pub mod delta;
mod error;
pub mod flash;
mod kv_codes;
pub mod linear;
mod number;

pub use cpu::{
    InstructionSet, UnsupportedInstructionSet, WorkSize, Workers, for_each_chunk, for_each_task, large_page_vec,
};
pub use error::Error;

use half::{bf16, f16};

/// An element of tensors: f32, bf16 or f16. It is read as f32 and rounded from f32. There are no other implementations.
pub trait Element: flash::AttentionKernels + delta::DeltaKernels + linear::ProductKernels {}

impl Element for f32 {}
impl Element for bf16 {}
impl Element for f16 {}

/// Methods that do not validate their arguments are `unsafe` or take a type that is private to this package. These
/// examples check that generic code outside of the package cannot call them. Weights are packed and unpacked by methods
/// that validate:
///
/// ```
/// use candle_attention_kernels::linear::{PackedWeight, WeightShape};
/// use candle_attention_kernels::{Element, Error, InstructionSet};
///
/// fn rows_of<E: Element>(rows: &[E], shape: WeightShape, outputs: &[usize]) -> Result<Vec<E>, Error> {
///     PackedWeight::new(rows, shape, InstructionSet::Scalar)?.unpack_rows(outputs)
/// }
/// let shape = WeightShape { outputs: 2, inputs: 2 };
/// assert_eq!(rows_of(&[1f32, 2.0, 3.0, 4.0], shape, &[1]), Ok(vec![3.0, 4.0]));
/// assert!(rows_of(&[1f32, 2.0, 3.0, 4.0], shape, &[1 << 40]).is_err());
/// assert!(rows_of(&[1f32, 2.0], shape, &[]).is_err());
/// ```
///
/// The types of other methods' arguments cannot be named, and neither can the traits:
///
/// ```compile_fail,E0603
/// use candle_attention_kernels::flash::kernels::KernelTask;
/// ```
///
/// ```compile_fail,E0603
/// use candle_attention_kernels::number::Number;
/// ```
///
/// ```compile_fail,E0603
/// use candle_attention_kernels::cpu::{SimdTask, Vector};
/// ```
#[cfg(doctest)]
struct SealedApiDoctests;
