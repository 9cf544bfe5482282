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

pub use expect::{Dim, Expect, FLOATS, accumulation_dtype, check_keys_and_values};
pub use nearest::{did_you_mean, edits, nearest};
pub use number::{filled, fits_in_memory, is_addressable};
pub use options::{Options, options};
pub use parameters::{HeadDim, Heads, Parameter, ParameterList, Spec, Stored, frozen, save, untrained};
pub use rowwise::executor;
pub use share::{HeadShard, Rows, Share, part};
pub use source::{DRAWN_THEN_ZEROED, LINEAR_WEIGHT, SCALES, Source, has, hint, linear_bias, root, whole};

// `options!` names it where it is used.
#[doc(hidden)]
pub use pastey;
