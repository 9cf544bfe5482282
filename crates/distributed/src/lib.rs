//! Attention on several processes: a layer's heads, or a sequence's keys, are shared among them.
//!
//! A [`Communicator`] is what that takes of a library that connects processes: `mpi::Mpi` (feature `mpi`) or
//! `nccl::Nccl` (feature `nccl`). Over it,
//!
//! - **tensor parallelism** gives each process some heads of every layer ([`HeadShard`](candle_attention::HeadShard),
//!   [`hf::load_attention_shard`](candle_attention::hf::load_attention_shard)) and sums what they give; the program
//!   `causal_lm` does so with whole models;
//! - **context parallelism** gives each process some positions of a sequence: [`RingAttention`] for a prompt, and
//!   [`ContextCache`] for the tokens after it.
//!
//! `docs/distributed.md` in the repository says how processes are started, what is divided, and what it costs.

mod communicator;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod ring;

pub use communicator::{Communicator, SingleProcess, check_same};
pub use ring::{ContextCache, RingAttention, ZigZag};
