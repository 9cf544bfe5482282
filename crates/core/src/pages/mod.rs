//! Keys and values in pages: pools of pages for each layer, and one table for all layers of which sequence has which
//! pages.
//!
//! `table` has the sequences, `allocator` the pages that are free, `prefixes` the pages that are found by their tokens,
//! `step` the new tokens of one pass through a model, `pool` the storage of a layer.

mod allocator;
mod config;
mod pool;
mod prefixes;
mod step;
mod table;

pub use config::KvPoolConfig;
pub use pool::KvPool;
pub use step::{PageCopy, PagedStep, PagedTokens};
pub use table::{PageTable, SequenceId, SharedPrefix, StepTokens};

pub(crate) use pool::PagedKeys;
