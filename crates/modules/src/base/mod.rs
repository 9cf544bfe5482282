//! What every room stands on: options, numbers, what a tensor is expected to be, rows of tensors, operations in
//! Candle's graph, parameters by name, and shares of them.

mod expect;
mod graph;
mod nearest;
mod options;
mod parameters;
pub mod rowwise;
mod source;
mod sum;

pub use expect::{
    Dim, Expect, FLOATS, accumulation_dtype, check_entries, check_keys_and_values, check_memory, filled,
    fits_in_memory, is_addressable,
};
pub use graph::{gradient_of, record, record_two};
pub use nearest::{did_you_mean, edits, nearest};
pub use options::{Options, count, options, yes};
pub use parameters::{
    HeadShard, Heads, Joint, NO_BIAS, Parameter, ParameterList, QueryHeadOrder, Share, Spec, WeightAndBias, frozen,
    part, save, variables_without_gradient,
};
pub use rowwise::executor;
pub use source::{DRAWN_THEN_ZEROED, LINEAR_WEIGHT, SCALES, Source, has, hint, linear_bias, root, whole};
pub use sum::sum_of_terms;

// `options!` names it where it is used.
#[doc(hidden)]
pub use pastey;

pub mod number {
    //! What a number that somebody sets is expected to be.

    pub use crate::base::expect::{above_zero, epsilon, expect, finite, probability, size, within};
}
