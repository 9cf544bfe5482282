//! Keys and values in pages: pools of pages for each layer, and one table for all layers of which sequence has which
//! pages.
//!
//! `table` has the sequences, `allocator` the pages that are free, `prefixes` the pages that are found by their tokens,
//! `states` the slots for states of recurrent layers, `step` the new tokens of one pass through a model, `keep` the
//! choice among drafted tokens and `moves` the rows that move after it, `pool` the storage of a layer, `copied` the
//! sequences of a step as a cache, `stored_steps` the steps whose tokens a pool has.

mod allocator;
mod config;
mod copied;
mod keep;
mod moves;
mod pool;
mod prefixes;
mod states;
mod step;
mod stored_steps;
mod table;

pub use config::KvPoolConfig;
pub use moves::RowMoves;
pub use pool::KvPool;
pub use states::{StateAfter, StepStates};
pub use step::{PageCopy, PagedStep, PagedTokens};
pub use stored_steps::StoredSteps;
pub use table::{PageTable, SequenceId, SharedPrefix, StepTokens};

pub(crate) use pool::PagedKeys;
