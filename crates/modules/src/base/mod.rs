//! What every room stands on: options, numbers, what a tensor is expected to be, rows of tensors, parameters by name,
//! and shares of them.

mod expect;
mod nearest;
pub mod number;
mod options;
mod parameters;
pub mod rowwise;
mod share;
mod source;

pub use expect::{Dim, Expect, FLOATS, accumulation_dtype};
pub use nearest::{did_you_mean, edits, nearest};
pub use number::{filled, fits_in_memory, is_addressable};
pub use parameters::untrained;
pub use share::{HeadShard, Share};
pub use source::{SCALES, Source, has, root, whole};

pub use expect::check_keys_and_values;
#[doc(hidden)]
pub use pastey;

pub use options::{Options, options};
pub use parameters::{HeadDim, Heads, Parameter, ParameterList, Spec, Stored, frozen, save};
pub use rowwise::executor;
pub use share::{Rows, part};
pub use source::{DRAWN_THEN_ZEROED, LINEAR_WEIGHT, hint, linear_bias};
