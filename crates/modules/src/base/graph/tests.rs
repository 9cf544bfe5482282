use candle_core::{Device, Var};
use rayon::ThreadPoolBuilder;
use rayon::prelude::*;

use super::*;

/// Returns x·y and x + y + z + .., for `operands` numbers x, y, z, .., as one operation with two results.
fn product_and_sum(operands: &[Var]) -> Result<[Tensor; 2]> {
    let values: Vec<f32> = operands.iter().map(|var| var.to_scalar::<f32>()).collect::<Result<_>>()?;
    let tensors: Vec<Option<&Tensor>> = operands.iter().map(|var| Some(var.as_tensor())).collect();
    let product = vec![values[0] * values[1]];
    let sum: Vec<f32> = vec![values.iter().sum()];
    let shapes = [Shape::from(()), Shape::from(())];
    record_two("product-and-sum", &tensors, shapes, product, sum, move |result, of_product, of_sum| {
        assert_eq!(result.to_scalar::<f32>()?, values[0] * values[1]);
        let of_product = of_product.to_scalar::<f32>()?;
        let of_sum = of_sum.map_or(Ok(0.0), |gradient| gradient.to_scalar::<f32>())?;
        let mut gradients = vec![of_sum; values.len()];
        gradients[0] += of_product * values[1];
        gradients[1] += of_product * values[0];
        gradients.into_iter().map(|gradient| Tensor::new(gradient, &Device::Cpu).map(Some)).collect()
    })
}

/// Returns the number as it is. Its backward pass waits for other tasks of the thread pool, as kernels do: a worker
/// that waits may start another backward pass.
fn waiting(xs: &Tensor) -> Result<Tensor> {
    record("waiting", &[Some(xs)], vec![xs.to_scalar::<f32>()?], (), |_, gradient| {
        let wait = || (0..100).for_each(|_| std::thread::yield_now());
        rayon::join(wait, wait);
        Ok(vec![Some(gradient.clone())])
    })
}

fn variables(count: usize) -> Result<Vec<Var>> {
    (0..count).map(|n| Var::new(n as f32 + 2.0, &Device::Cpu)).collect()
}

/// Returns the gradients of all operands, 0 where there is none.
fn gradients(loss: &Tensor, operands: &[Var]) -> Result<Vec<f32>> {
    let found = loss.backward()?;
    operands.iter().map(|var| found.get(var).map_or(Ok(0.0), |gradient| gradient.to_scalar::<f32>())).collect()
}

/// Returns d(a · product + b · sum) for the operands 2, 3, 4, ..
fn expected(count: usize, a: f32, b: f32) -> Vec<f32> {
    (0..count)
        .map(|n| match n {
            0 => 3.0 * a + b,
            1 => 2.0 * a + b,
            _ => b,
        })
        .collect()
}

#[test]
fn record_two_with_any_number_of_operands_has_gradients_of_both_results() -> Result<()> {
    for count in 2..10 {
        let operands = variables(count)?;
        let [product, sum] = product_and_sum(&operands)?;
        let both = (product.affine(5.0, 0.0)? + sum.affine(7.0, 0.0)?)?;
        assert_eq!(gradients(&both, &operands)?, expected(count, 5.0, 7.0));
        assert_eq!(gradients(&product, &operands)?, expected(count, 1.0, 0.0));
        assert_eq!(gradients(&sum, &operands)?, expected(count, 0.0, 1.0));
        assert_eq!(gradients(&(&sum + &sum)?, &operands)?, expected(count, 0.0, 2.0));
    }
    Ok(())
}

#[test]
fn record_two_with_parallel_backward_passes_matches_a_single_pass() -> Result<()> {
    let operands = variables(7)?;
    let [product, sum] = product_and_sum(&operands)?;
    let loss = |n: usize| {
        let (product, sum) = (product.affine(n as f64, 0.0)?, sum.affine(3.0 * n as f64, 0.0)?);
        if n.is_multiple_of(2) { waiting(&product)? + sum } else { product + waiting(&sum)? }
    };
    let losses = (1..257).map(loss).collect::<Result<Vec<_>>>()?;
    for threads in [4, 5, 8] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let found: Vec<Vec<f32>> =
            pool.install(|| losses.par_iter().map(|own| gradients(own, &operands)).collect::<Result<_>>())?;
        for (n, gradients) in found.iter().enumerate() {
            assert_eq!(gradients, &expected(7, n as f32 + 1.0, 3.0 * (n as f32 + 1.0)), "loss {n}, {threads} threads");
        }
    }
    Ok(())
}

#[test]
fn record_two_after_a_failed_backward_pass_has_the_right_gradients() -> Result<()> {
    let operands = variables(7)?;
    let [product, sum] = product_and_sum(&operands)?;
    for failing in [&product, &sum] {
        let other = if std::ptr::eq(failing, &product) { &sum } else { &product };
        // Candle has no backward pass for this operation, which keeps a single number.
        let failing = failing.reshape((1, 1, 1, 1))?.upsample_bilinear2d(1, 1, false)?.reshape(())?;
        for loss in [(&failing + other.affine(80.0, 0.0)?)?, (other.affine(80.0, 0.0)? + &failing)?] {
            assert!(loss.backward().is_err());
            assert_eq!(gradients(&product, &operands)?, expected(7, 1.0, 0.0));
            assert_eq!(gradients(&sum, &operands)?, expected(7, 0.0, 1.0));
        }
    }
    Ok(())
}

#[test]
fn record_with_an_untracked_operand_has_gradients_of_the_others() -> Result<()> {
    let operands = variables(6)?;
    let constant = Tensor::new(10f32, &Device::Cpu)?;
    let mut tensors: Vec<Option<&Tensor>> = operands.iter().map(|var| Some(var.as_tensor())).collect();
    tensors.insert(1, None);
    tensors.insert(3, Some(&constant));
    let result = record("count", &tensors, vec![0f32], (), |_, gradient| {
        (0..8u8).map(|n| gradient.affine(f64::from(n), 0.0).map(Some)).collect()
    })?;
    assert_eq!(gradients(&result, &operands)?, [0.0, 2.0, 4.0, 5.0, 6.0, 7.0]);
    Ok(())
}
