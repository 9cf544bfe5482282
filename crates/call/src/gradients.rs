//! The inputs that have gradients, and the requested gradients.

use crate::layout::OutputLayout;

/// A value for each input of attention that has a gradient: the input itself, its gradient, or whether its gradient is
/// requested.
///
/// `R` is the type of the values for queries, keys and values, `M` that of the values for the score modifiers and for
/// the sinks: where these are stored in different types, their values are too.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PerInput<R, M = R> {
    /// The queries.
    pub q: R,
    /// The keys.
    pub k: R,
    /// The values.
    pub v: R,
    /// The bias of each score.
    pub bias: M,
    /// The bias of each distance between a query and a key.
    pub relative_bias: M,
    /// The slopes of ALiBi.
    pub alibi_slopes: M,
    /// The sinks.
    pub sinks: M,
}

impl<T> PerInput<T> {
    /// Returns the values in the order of the fields.
    pub fn in_order(self) -> [T; 7] {
        let Self { q, k, v, bias, relative_bias, alibi_slopes, sinks } = self;
        [q, k, v, bias, relative_bias, alibi_slopes, sinks]
    }

    /// Returns what `change` makes of each value.
    pub fn map<U>(self, mut change: impl FnMut(T) -> U) -> PerInput<U> {
        let Self { q, k, v, bias, relative_bias, alibi_slopes, sinks } = self;
        PerInput {
            q: change(q),
            k: change(k),
            v: change(v),
            bias: change(bias),
            relative_bias: change(relative_bias),
            alibi_slopes: change(alibi_slopes),
            sinks: change(sinks),
        }
    }
}

/// The gradients that a backward pass computes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestedGradients {
    /// The order in memory of the gradients of queries, keys and values.
    pub layout: OutputLayout,
    /// Whether the gradient of each input is requested.
    pub of: PerInput<bool>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn per_input_in_order_has_every_field_once() {
        let numbers = PerInput { q: 0, k: 1, v: 2, bias: 3, relative_bias: 4, alibi_slopes: 5, sinks: 6 };
        assert_eq!(numbers.in_order(), [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!(numbers.map(|n| 10 * n).in_order(), [0, 10, 20, 30, 40, 50, 60]);
    }
}
