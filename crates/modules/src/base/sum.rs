//! Sums of many tensors in Candle's graph.

use std::ops::Range;

use candle_core::{Result, Tensor};

/// The terms of a group, which are added one after the other.
const GROUP: usize = 64;

/// Returns the sum of `term(n)` for each n of a range, which is not empty.
///
/// Candle walks through a graph by recursion, and thousands of additions one after the other overflow the stack of a
/// thread. Groups of 64 terms are therefore added first, and then their sums, so that the graph of n terms is
/// 64 log₆₄(n) additions deep.
pub fn sum_of_terms(terms: Range<usize>, term: &impl Fn(usize) -> Result<Tensor>) -> Result<Tensor> {
    // The number of terms that each step adds: one, or the terms of a group.
    let mut step = 1usize;
    while terms.len() > step.saturating_mul(GROUP) {
        step *= GROUP;
    }
    let sum_of_step = |start: usize| {
        if step == 1 { term(start) } else { sum_of_terms(start..terms.end.min(start + step), term) }
    };
    let mut sum = sum_of_step(terms.start)?;
    for start in terms.clone().step_by(step).skip(1) {
        sum = (sum + sum_of_step(start)?)?;
    }
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    #[test]
    fn sum_of_many_terms_matches_sum_of_integers() -> Result<()> {
        for (start, end) in [(0, 1), (3, 5), (0, 64), (1, 66), (5, 4_200), (0, 5_000)] {
            let term = |n: usize| Tensor::new(n as f64, &Device::Cpu);
            let expected = (start..end).sum::<usize>() as f64;
            let sum = sum_of_terms(start..end, &term)?;
            assert_eq!((sum.dtype(), sum.to_scalar::<f64>()?), (DType::F64, expected), "{start}..{end}");
        }
        Ok(())
    }
}
