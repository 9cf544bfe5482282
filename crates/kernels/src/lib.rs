#![doc = include_str!("../README.md")]

#[cfg(target_endian = "big")]
compile_error!(
    "candle-attention-kernels needs a little-endian target: products read a 32-bit word as two 16-bit numbers, the first in \
     its lower half, and would give wrong results in half precision"
);

mod cpu;
pub mod delta;
mod element;
mod error;
pub mod flash;
pub mod linear;
mod number;
mod strided;

pub use cpu::{Executor, Tier, TierError, Workers, for_each_task, large_page_vec};
pub use element::Element;
pub use error::Error;
