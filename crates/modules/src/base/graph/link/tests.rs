use candle_core::{DType, Device, Var};
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;

use super::*;
use crate::base::graph::numbers::Computed;
use crate::base::graph::{IntoStorage, TrackedOperands, record, with_placeholder};

const SHAPE: [usize; 3] = [4, 32, MIN_ELEMENTS / 128];

/// The kind of link that results have: that of the CPU, or that of CUDA.
#[derive(Clone, Copy)]
enum Kind {
    Messages,
    Placeholder,
}

const KINDS: [Kind; 2] = [Kind::Messages, Kind::Placeholder];

impl Kind {
    /// Adds an operation on tensors of one shape to the graph.
    fn record(
        self,
        operands: &[Option<&Tensor>],
        result: &Tensor,
        backward: impl Fn(&Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let numbers = result.flatten_all()?.to_vec1::<f32>()?;
        match self {
            Self::Messages => record("operation", operands, numbers, result.shape(), backward),
            Self::Placeholder => {
                let TrackedOperands { nodes, senders } = TrackedOperands::new(operands);
                let computed = Computed { storage: numbers.into_storage(), shape: result.shape().clone() };
                let sent = move |stored: &Tensor, gradient: &Tensor| senders.send(backward(stored, gradient)?);
                with_placeholder("operation", &nodes, computed, sent)
            }
        }
    }

    /// Returns x · factor as one operation, with an untracked operand.
    fn scaled(self, xs: &Tensor, factor: f64) -> Result<Tensor> {
        self.record(&[None, Some(xs)], &xs.affine(factor, 0.0)?, move |result, gradient| {
            assert_eq!(result.dims(), gradient.dims());
            assert_eq!(result.elem_count(), result.flatten_all()?.to_vec1::<f32>()?.len());
            Ok(vec![None, Some(gradient.affine(factor, 0.0)?)])
        })
    }

    /// Returns a · b as one operation.
    fn product(self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let (own_a, own_b) = (a.detach(), b.detach());
        self.record(&[Some(a), Some(b)], &(a * b)?, move |_, gradient| {
            Ok(vec![Some((gradient * &own_b)?), Some((gradient * &own_a)?)])
        })
    }
}

fn variable(first: f64) -> Result<Var> {
    let count = SHAPE.iter().product::<usize>() as f64;
    let numbers = Tensor::arange(0f64, count, &Device::Cpu)?.affine(0.25, first)?;
    Var::from_tensor(&numbers.to_dtype(DType::F32)?.reshape(&SHAPE)?)
}

/// Returns factors for the numbers of a loss, all different.
fn factors() -> Result<Tensor> {
    variable(1.0)?.affine(0.5, 0.0).map(|factors| factors.detach())
}

/// Checks the gradient of the sum of `loss`, with respect to a variable.
fn check_gradient(loss: &Tensor, var: &Var, expected: &Tensor) -> Result<()> {
    let found = loss.sum_all()?.backward()?;
    let gradient = found.get(var).expect("a gradient");
    assert_eq!(gradient.flatten_all()?.to_vec1::<f32>()?, expected.flatten_all()?.to_vec1::<f32>()?);
    Ok(())
}

fn for_each_kind(check: impl Fn(Kind) -> Result<()>) -> Result<()> {
    KINDS.into_iter().try_for_each(check)
}

#[test]
fn chain_of_operations_has_the_gradients_of_candle() -> Result<()> {
    for_each_kind(|kind| {
        let xs = variable(1.0)?;
        let first = kind.scaled(&xs, 3.0)?;
        assert!(is_linked(&first));
        let last = kind.scaled(&kind.scaled(&first, 5.0)?, 2.0)?;
        for _ in 0..2 {
            check_gradient(&(&last * factors()?)?, &xs, &factors()?.affine(30.0, 0.0)?)?;
        }
        check_gradient(&first, &xs, &xs.ones_like()?.affine(3.0, 0.0)?)
    })
}

#[test]
fn small_result_has_no_link() -> Result<()> {
    let xs = Var::zeros(MIN_ELEMENTS - 1, DType::F32, &Device::Cpu)?;
    assert!(!is_linked(&Kind::Messages.scaled(&xs, 2.0)?));
    Ok(())
}

#[test]
fn gradient_of_a_view_goes_to_the_result() -> Result<()> {
    for_each_kind(|kind| {
        let xs = variable(1.0)?;
        let result = kind.scaled(&xs, 3.0)?;
        let [a, b, c] = SHAPE;
        let split = reshape_linked(&result, (a, b, 2, c / 2))?;
        let view = transpose_linked(&split, 1, 2)?;
        assert!(is_linked(&view) && !is_linked(&split.transpose(1, 2)?));
        let of_view = factors()?.reshape((a, b, 2, c / 2))?.transpose(1, 2)?.contiguous()?;
        let loss = (kind.scaled(&view, 2.0)? * of_view)?;
        check_gradient(&loss, &xs, &factors()?.affine(6.0, 0.0)?)
    })
}

#[test]
fn result_with_several_users_has_the_sum_of_their_gradients() -> Result<()> {
    for_each_kind(|kind| {
        for users in [1, 2, ENTRIES - 1, ENTRIES, 2 * ENTRIES] {
            let xs = variable(1.0)?;
            let result = kind.scaled(&xs, 2.0)?;
            // One of Candle's operations.
            let mut loss = result.affine(100.0, 0.0)?;
            for user in 0..users {
                loss = (loss + kind.scaled(&result, user as f64)?)?;
            }
            let sum: usize = 2 * (0..users).sum::<usize>() + 200;
            check_gradient(&loss, &xs, &xs.ones_like()?.affine(sum as f64, 0.0)?)?;
        }
        Ok(())
    })
}

#[test]
fn operation_with_one_operand_twice_has_both_gradients() -> Result<()> {
    for_each_kind(|kind| {
        let xs = variable(1.0)?;
        let result = kind.scaled(&xs, 1.0)?;
        let loss = (kind.product(&result, &result)? * factors()?)?;
        check_gradient(&loss, &xs, &(factors()? * xs.affine(2.0, 0.0)?)?)
    })
}

#[test]
fn dropped_results_leave_the_gradients_of_the_others() -> Result<()> {
    for_each_kind(|kind| {
        let xs = variable(1.0)?;
        let last = {
            let first = kind.scaled(&xs, 3.0)?;
            kind.scaled(&transpose_linked(&first, 0, 1)?, 2.0)?
        };
        for _ in 0..2000 {
            drop(reshape_linked(&kind.scaled(&xs, 1.0)?, MIN_ELEMENTS)?);
        }
        check_gradient(&last, &xs, &xs.ones_like()?.affine(6.0, 0.0)?)
    })
}

#[test]
fn parallel_backward_passes_match_a_single_pass() -> Result<()> {
    for_each_kind(|kind| {
        let xs = variable(1.0)?;
        let first = kind.scaled(&xs, 3.0)?;
        let losses =
            (1..17).map(|n| kind.scaled(&kind.scaled(&first, 2.0)?, f64::from(n))).collect::<Result<Vec<_>>>()?;
        let pool = ThreadPoolBuilder::new().num_threads(4).build().expect("a pool");
        pool.install(|| {
            losses
                .par_iter()
                .zip(1..17)
                .try_for_each(|(loss, n)| check_gradient(loss, &xs, &xs.ones_like()?.affine(6.0 * f64::from(n), 0.0)?))
        })
    })
}
