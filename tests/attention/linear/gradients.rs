//! Gradients of projections: those of Candle's operations in f64, whatever is tracked.

use std::ops::Range;

use candle_attention::cpu::Tier;
use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::Activation;

use super::case::{CPU, TYPES, bits};
use super::followed::{ACTIVATIONS, STEPS, by_candle, followed};
use crate::common::{assert_near, values};
use crate::tensors::{gradients, random, variable};
use crate::threads::pool;

const INPUTS: usize = 37;
const OUTPUTS: usize = 51;

/// How far numbers of a dtype may be from those of f64, relative to the largest: the output and its gradient are
/// rounded once, as numbers of the weight's type where it is the shorter.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2e-2,
        DType::F16 => 3e-3,
        _ => 1e-5,
    }
}

/// xs (.., in), weight (out, in) and bias, by Candle's own operations.
fn candles([xs, weight, bias]: [&Tensor; 3], columns: Range<usize>) -> Result<Tensor> {
    let rows = xs.reshape(((), INPUTS))?;
    rows.matmul(&weight.t()?)?.broadcast_add(bias)?.narrow(1, columns.start, columns.len())
}

/// All three, or one alone: beside weights that are plain, and so packed, and beside a plain input. Of all columns and
/// of some, on every tier; and what is tracked gives the bits of packed weights.
#[test]
fn whatever_is_tracked_has_the_gradient_of_f64() -> Result<()> {
    for (of_weight, of_input) in TYPES {
        for dims in [vec![INPUTS], vec![1, INPUTS], vec![2, 1, 3, INPUTS], vec![7, INPUTS], vec![2, 300, INPUTS]] {
            let all = [(&dims[..], of_input), (&[OUTPUTS, INPUTS], of_weight), (&[OUTPUTS], of_weight)];
            let drawn = all.map(|(shape, dtype)| (random(shape)? * 0.5)?.to_dtype(of_weight)?.to_dtype(dtype));
            let [xs, weight, bias] = drawn;
            let drawn = [xs?, weight?, bias?];
            for tracked in [[true; 3], [true, false, false], [false, true, false], [false, false, true]] {
                let leaf = |n: usize, tensor: Tensor| match tracked[n] {
                    true => Ok(Var::from_tensor(&tensor)?.into_inner()),
                    false => Ok(tensor),
                };
                let of = |dtype: Option<DType>| -> Result<Vec<Tensor>> {
                    let cast =
                        |(n, tensor): (usize, &Tensor)| leaf(n, tensor.to_dtype(dtype.unwrap_or(tensor.dtype()))?);
                    drawn.iter().enumerate().map(cast).collect()
                };
                let some = |leaves: &[Tensor]| -> Vec<Tensor> {
                    leaves.iter().zip(tracked).filter(|(_, tracked)| *tracked).map(|(leaf, _)| leaf.clone()).collect()
                };
                let (leaves, wide) = (of(None)?, of(Some(DType::F64))?);
                for columns in [0..OUTPUTS, 8..42] {
                    let exact = candles([&wide[0], &wide[1], &wide[2]], columns.clone())?;
                    let expected = gradients(&exact, &some(&wide).iter().collect::<Vec<_>>())?;
                    for tier in Tier::available() {
                        let linear = PackedLinear::with_tier(&leaves[1], Some(&leaves[2]), Some(tier))?;
                        assert_eq!(linear.is_packed(), tracked == [true, false, false]);
                        let ys = linear.forward_columns(&leaves[0], columns.clone())?;
                        // Half precision under f32 is widened first, and then summed in the same order.
                        let frozen = linear.freeze()?;
                        assert!(frozen.is_packed() && ys.track_op());
                        assert!(bits(&ys) == bits(&frozen.forward_columns(&leaves[0], columns.clone())?), "{tier}");
                        let found = gradients(&ys, &some(&leaves).iter().collect::<Vec<_>>())?;
                        for (found, expected) in found.iter().zip(&expected) {
                            let what = format!("{tier}: {of_weight:?} for {of_input:?} {dims:?}, {tracked:?}");
                            assert_near(found, expected, tolerance(of_weight), &what);
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// A view of a variable, or what is computed from it.
type Make = fn(&Tensor) -> Result<Tensor>;

/// Inputs of any strides; weights transposed as GPT-2 has them, parts of a whole, merged from adapters: a gradient
/// reaches the variable below.
#[test]
fn views_of_variables_and_what_is_computed_from_them_have_gradients() -> Result<()> {
    let scaled: Make = |var| var.broadcast_mul(&var.sqr()?.sum_keepdim(1)?.sqrt()?.recip()?);
    let plain: Make = |var| Ok(var.clone());
    let (weight, xs) = ([OUTPUTS, INPUTS], [4, 3, INPUTS + 5]);
    let makes: [(&[usize], Make, &[usize], Make); 8] = [
        (&xs, |xs| xs.narrow(2, 2, INPUTS), &weight, plain),
        (&xs, |xs| xs.narrow(2, 2, INPUTS)?.transpose(0, 1), &weight, plain),
        (&xs, |xs| xs.get_on_dim(1, 1)?.narrow(1, 0, INPUTS), &weight, plain),
        // Rows that are one row get the sum.
        (&[1, INPUTS], |xs| xs.broadcast_as((6, INPUTS)), &weight, plain),
        (&[2, 9, INPUTS], plain, &[INPUTS, OUTPUTS], |var| var.t()),
        (&[2, 9, INPUTS], plain, &[OUTPUTS + 9, INPUTS + 3], |var| var.narrow(0, 4, OUTPUTS)?.narrow(1, 2, INPUTS)),
        (&[2, 9, INPUTS], plain, &weight, |var| Tensor::ones((OUTPUTS, INPUTS), var.dtype(), &CPU)? + (var * 0.5)?),
        (&[2, 9, INPUTS], plain, &weight, scaled),
    ];
    let bias = random(OUTPUTS)?;
    for (n, (shape, of_xs, of_weight, make)) in makes.into_iter().enumerate() {
        let (var, weight) = (variable(shape)?, variable(of_weight)?);
        let leaves = [var.as_tensor(), weight.as_tensor()];
        let (xs, made) = (of_xs(&var)?, make(&weight)?);
        let expected = gradients(&candles([&xs.contiguous()?, &made, &bias], 0..OUTPUTS)?, &leaves)?;
        for (found, expected) in
            gradients(&PackedLinear::new(&made, Some(&bias))?.forward(&xs)?, &leaves)?.iter().zip(&expected)
        {
            assert_near(found, expected, 1e-5, &format!("view {n}"));
        }
        let frozen = PackedLinear::new(&made.detach(), Some(&bias))?.forward(&xs)?;
        assert_near(&gradients(&frozen, &leaves[..1])?[0], &expected[0], 1e-5, &format!("view {n}, packed"));
    }
    Ok(())
}

/// An activation, a residual and a gate: of all that is tracked, over packed weights and over variables.
#[test]
fn what_follows_a_product_has_gradients() -> Result<()> {
    let [xs, residual, gate, up] = [(6, INPUTS), (6, OUTPUTS), (OUTPUTS, INPUTS), (OUTPUTS, INPUTS)].map(variable);
    let (xs, residual, gate, up) = (xs?, residual?, gate?, up?);
    for are_trained in [false, true] {
        let [gate, up] =
            [&gate, &up].map(|var| if are_trained { var.as_tensor().clone() } else { var.as_detached_tensor() });
        let [of_gate, of_up] = [&gate, &up].map(|weight| PackedLinear::new(weight, None));
        let linears = [&of_gate?, &of_up?];
        for activation in ACTIVATIONS {
            let found = followed(linears, activation, [&xs, &residual])?;
            let products = [xs.matmul(&gate.t()?)?, xs.matmul(&up.t()?)?];
            let expected = by_candle([&products[0], &products[1]], activation, &residual)?;
            for (n, what) in STEPS.into_iter().enumerate() {
                assert_near(&found[n], &expected[n], 1e-5, what);
                let (with_residual, with_up) = ([true, false, true, false][n], n == 3 && are_trained);
                let leaves = [(&*xs, true), (&*residual, with_residual), (&gate, are_trained), (&up, with_up)];
                let leaves: Vec<_> = leaves.into_iter().filter(|(_, is_used)| *is_used).map(|(leaf, _)| leaf).collect();
                for (found, expected) in gradients(&found[n], &leaves)?.iter().zip(&gradients(&expected[n], &leaves)?) {
                    assert_near(found, expected, 1e-4, &format!("{what}, {activation:?}, trained: {are_trained}"));
                }
            }
            let of_residual = &followed(linears, activation, [&xs.detach(), &residual])?[0];
            gradients(of_residual, &[&residual])?;
        }
    }
    Ok(())
}

#[test]
fn a_projection_follows_its_variables_and_a_frozen_one_does_not() -> Result<()> {
    let (gate, up, xs) = (variable((OUTPUTS, INPUTS))?, variable((OUTPUTS, INPUTS))?, random((4, INPUTS))?);
    let [of_gate, of_up] = [&gate, &up].map(|var| PackedLinear::new(var, None));
    let gated = PackedGatedLinear::new(of_gate?, of_up?, Activation::Silu)?;
    let tracked = PackedLinear::new(&gate, None)?.with_activation(Activation::Silu)?;
    let (frozen, frozen_gated) = (tracked.freeze()?, gated.freeze()?);
    assert_eq!(frozen.activation(), Some(Activation::Silu));
    let (before, before_gated) = (tracked.forward(&xs)?, gated.forward(&xs)?);
    gate.set(&random((OUTPUTS, INPUTS))?)?;
    let activated = xs.matmul(&gate.t()?)?.silu()?;
    for (found, expected, what) in [
        (tracked.forward(&xs)?, &activated, "after a step"),
        (gated.forward(&xs)?, &(&activated * xs.matmul(&up.t()?)?)?, "gated, after a step"),
        (frozen.forward(&xs)?, &before, "frozen before it"),
        (frozen_gated.forward(&xs)?, &before_gated, "gated, frozen before it"),
    ] {
        assert_near(&found, expected, 1e-5, what);
    }
    assert!(!frozen.forward(&xs)?.track_op() && !frozen_gated.forward(&xs)?.track_op());
    assert_eq!(bits(&frozen.freeze()?.forward(&xs)?), bits(&frozen.forward(&xs)?), "frozen twice");
    Ok(())
}

#[test]
fn threads_change_no_bit_of_a_gradient() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let [xs, weight, bias] = [&[3, 400, 130][..], &[200, 130], &[200]]
            .map(|shape| Var::from_tensor(&(random(shape)? * 0.5)?.to_dtype(dtype)?));
        let (xs, weight, bias) = (xs?, weight?, bias?);
        let frozen = PackedLinear::new(&random((130, 200))?.to_dtype(dtype)?, None)?;
        let all = || -> Result<Vec<u64>> {
            let ys = frozen.forward(&PackedLinear::new(&weight, Some(&bias))?.forward(&xs)?)?;
            Ok(gradients(&ys, &[&xs, &weight, &bias])?.iter().flat_map(bits).collect())
        };
        let one = pool(1).install(all)?;
        assert!(one == pool(3).install(all)? && one == all()?, "{dtype:?}");
    }
    Ok(())
}

/// No rows, no inputs, no outputs; over variables and over packed weights.
#[test]
fn nothing_has_gradients_of_nothing() -> Result<()> {
    for (rows, inputs, outputs) in [(0, 3, 2), (2, 0, 3), (2, 3, 0)] {
        let [xs, weight, bias] = [&[rows, inputs][..], &[outputs, inputs], &[outputs]].map(variable);
        let (xs, weight, bias) = (xs?, weight?, bias?);
        let ys = PackedLinear::new(&weight, Some(&bias))?.forward(&xs)?;
        assert_eq!(ys.dims(), [rows, outputs]);
        let store = ys.sum_all()?.backward()?;
        for (var, expected) in [(&xs, 0.0), (&weight, 0.0), (&bias, rows as f64)] {
            let found = values(store.get(var).expect("a gradient"));
            assert_eq!(found, vec![expected; var.elem_count()], "{rows} {inputs} {outputs}");
        }
    }
    let packed = PackedLinear::new(&random((3, 4))?, None)?;
    for (rows, columns) in [(2, 1..1), (0, 0..3)] {
        let xs = variable((rows, 4))?;
        let store = packed.forward_columns(&xs, columns)?.sum_all()?.backward()?;
        assert_eq!(store.get(&xs).map(values), Some(vec![0.0; rows * 4]));
    }
    Ok(())
}
