//! What every room stands on: options, numbers, what a tensor is expected to be, rows of tensors, parameters by name,
//! and shares of them.

mod expect;
mod nearest;
pub(crate) mod number;
mod options;
mod parameters;
pub(crate) mod rowwise;
mod share;
mod source;

pub use expect::{Dim, Expect, FLOATS, accumulation_dtype};
pub use nearest::{did_you_mean, edits, nearest};
pub use number::{filled, fits_in_memory, is_addressable};
pub use parameters::untrained;
pub use share::{HeadShard, Share};
pub use source::{SCALES, Source, has, root, whole};

pub(crate) use expect::check_keys_and_values;
pub(crate) use options::{Options, options};
pub(crate) use parameters::{HeadDim, Heads, Parameter, ParameterList, Spec, Stored, frozen, save};
pub(crate) use rowwise::executor;
pub(crate) use share::{Rows, part};
pub(crate) use source::{DRAWN_THEN_ZEROED, LINEAR_WEIGHT, hint, linear_bias};
