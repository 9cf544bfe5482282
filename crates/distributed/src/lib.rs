//! Attention on several ranks, which divide the heads of a layer or the positions of a sequence.
//!
//! The ranks communicate over a [`Communicator`]: `mpi::Mpi` (feature `mpi`) or `nccl::Nccl` (feature `nccl`).
//!
//! - **Tensor parallelism**: each rank computes a shard of the heads of every layer
//!   ([`HeadShard`](candle_attention::HeadShard),
//!   [`hf::load_attention_shard`](candle_attention::hf::load_attention_shard)), and an all-reduce adds the results. The
//!   program `causal_lm` divides whole models.
//! - **Context parallelism**: each rank stores a shard of the positions of a sequence. [`RingAttention`] computes a
//!   prompt, and [`ContextCache`] the tokens after it.
//!
//! `docs/distributed.md` in the repository describes how ranks are started, what is divided, and what it costs.

mod communicator;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod ring;

pub use communicator::{Communicator, SingleProcess, check_same};
pub use ring::{ContextCache, RingAttention, ZigZag};

/// The document whose code is tested.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/distributed.md")]
pub mod guide {}
