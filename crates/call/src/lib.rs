#![doc = include_str!("../README.md")]

mod call;
mod codes;
mod dims;
mod gradients;
mod inputs;
mod keys;
mod layout;
mod modifiers;
mod results;

pub use call::{AttentionCall, KvPages, KvScales};
pub use codes::KvCodeFormat;
pub use dims::{AttentionDims, KvHead, QueryRow};
pub use gradients::{PerInput, RequestedGradients};
pub use inputs::Input;
pub use keys::{BoundedKeys, FirstPosition, Intervals, PackedLengths};
pub use layout::{LayoutStrides, OutputLayout};
pub use modifiers::{Dropout, DropoutMask, ScoreFormat, ScoreModifiers};
pub use results::{RequestedResults, RequestedStatistics, WeightTile};
