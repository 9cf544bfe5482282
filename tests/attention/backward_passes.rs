//! Several backward passes over one graph, of operations with two results: attention with its log-sum-exp, and the
//! gated delta rule with its states.

use rayon::prelude::*;

use crate::*;

/// The results of an operation with two, and the variables that they depend on.
struct TwoResults {
    variables: Vec<Var>,
    output: Tensor,
    second: Tensor,
}

impl TwoResults {
    fn attention_with_lse() -> Result<Self> {
        let shapes = [(1, 4, 40, 16), (1, 2, 50, 16), (1, 2, 50, 16)];
        let variables =
            shapes.into_iter().map(|shape| Var::randn(0f32, 1., shape, &CPU)).collect::<Result<Vec<_>>>()?;
        let [q, k, v] = [0, 1, 2].map(|n| variables[n].as_tensor());
        let mask = AttentionMask::causal();
        let (output, second) = scaled_dot_product_attention_with_lse(q, k, v, &mask, &SdpaOptions::default())?;
        Ok(Self { variables, output, second })
    }

    fn gated_delta_rule() -> Result<Self> {
        let shape = (1, 4, 40, 16);
        let mut variables = (0..3).map(|_| Var::randn(0f32, 0.3, shape, &CPU)).collect::<Result<Vec<_>>>()?;
        variables.push(Var::rand(-0.5f32, 0.0, (1, 4, 40), &CPU)?);
        variables.push(Var::rand(0f32, 1.0, (1, 4, 40), &CPU)?);
        let [q, k, v, decay, beta] = [0, 1, 2, 3, 4].map(|n| variables[n].as_tensor());
        let options = DeltaOptions::default();
        let (output, second) = gated_delta_rule(q, k, v, Some(decay), Some(beta), None, &options)?;
        Ok(Self { variables, output, second })
    }

    /// Returns a loss of both results, another one for each number.
    fn loss(&self, n: usize) -> Result<Tensor> {
        let output = self.output.affine(0.5 + n as f64, 0.0)?.sqr()?.sum_all()?;
        let second = self.second.affine(3.0 * n as f64 - 7.0, 0.0)?.sum_all()?;
        output + second
    }

    /// Returns the bits of the gradients of all variables.
    fn gradients(&self, loss: &Tensor) -> Result<Vec<u64>> {
        let found = loss.backward()?;
        Ok(self.variables.iter().flat_map(|var| found.get(var).map(bits).unwrap_or_default()).collect())
    }
}

fn backward_passes_in_parallel_match_each_alone(operation: &TwoResults) -> Result<()> {
    let losses = (0..64).map(|n| operation.loss(n)).collect::<Result<Vec<_>>>()?;
    let alone = losses.iter().map(|loss| operation.gradients(loss)).collect::<Result<Vec<_>>>()?;
    for threads in [4, 5, 8] {
        let found: Vec<_> =
            pool(threads).install(|| losses.par_iter().map(|loss| operation.gradients(loss)).collect::<Result<_>>())?;
        let wrong: Vec<_> = (0..losses.len()).filter(|n| found[*n] != alone[*n]).collect();
        assert!(
            wrong.is_empty(),
            "{threads} threads: the gradients of losses {wrong:?} differ from those of a pass alone"
        );
    }
    Ok(())
}

#[test]
fn attention_with_lse_backward_passes_in_parallel_match_each_alone() -> Result<()> {
    backward_passes_in_parallel_match_each_alone(&TwoResults::attention_with_lse()?)
}

#[test]
fn gated_delta_rule_backward_passes_in_parallel_match_each_alone() -> Result<()> {
    backward_passes_in_parallel_match_each_alone(&TwoResults::gated_delta_rule()?)
}

fn gradients_after_a_failed_backward_pass_match_those_before(operation: &TwoResults) -> Result<()> {
    let of_output = operation.output.sum_all()?;
    let of_second = operation.second.sum_all()?;
    let expected = [operation.gradients(&of_output)?, operation.gradients(&of_second)?];
    for (fails, works) in [(&of_output, &of_second), (&of_second, &of_output)] {
        let works = works.affine(80.0, 0.0)?;
        // Candle has no backward pass for this operation, which keeps a single number.
        let fails = fails.reshape((1, 1, 1, 1))?.upsample_bilinear2d(1, 1, false)?.reshape(())?;
        for loss in [(&works + &fails)?, (&fails + &works)?] {
            assert!(loss.backward().is_err(), "the pass goes through an operation without a backward pass");
            assert!(operation.gradients(&of_output)? == expected[0], "the gradients of the output");
            assert!(operation.gradients(&of_second)? == expected[1], "the gradients of the second result");
        }
    }
    Ok(())
}

#[test]
fn attention_with_lse_gradients_after_a_failed_backward_pass_match_those_before() -> Result<()> {
    gradients_after_a_failed_backward_pass_match_those_before(&TwoResults::attention_with_lse()?)
}

#[test]
fn gated_delta_rule_gradients_after_a_failed_backward_pass_match_those_before() -> Result<()> {
    gradients_after_a_failed_backward_pass_match_those_before(&TwoResults::gated_delta_rule()?)
}
