//! Weights that are tracked for gradients: the numbers of packed ones, and gradients for all that is tracked.

use candle_attention::cpu::Tier;
use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::{Activation, Linear};

use super::case::{CPU, TYPES, bits};
use crate::common::{assert_close, values};

const F32: DType = DType::F32;
const DTYPES: [DType; 3] = [F32, DType::BF16, DType::F16];
const INPUTS: usize = 37;
const OUTPUTS: usize = 51;

fn random(shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, 0.5, shape, &CPU)?.to_dtype(dtype)
}

fn variable(shape: &[usize], dtype: DType) -> Result<Var> {
    Var::from_tensor(&random(shape, dtype)?)
}

/// The gradients of a sum in which each output has a factor of its own.
fn gradients(ys: &Tensor, of: &[&Var]) -> Result<Vec<Tensor>> {
    let factors = (Tensor::arange(0f32, ys.elem_count() as f32, &CPU)? * 0.37)?.sin()?;
    let loss = (ys * factors.reshape(ys.dims())?.to_dtype(ys.dtype())?)?.sum_all()?;
    let store = loss.backward()?;
    Ok(of.iter().map(|var| store.get(var).expect("a gradient").clone()).collect())
}

/// How far numbers of a dtype may be from those of f64, relative to the largest: the output and its gradient are
/// rounded once.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2e-2,
        DType::F16 => 3e-3,
        _ => 1e-5,
    }
}

#[track_caller]
fn assert_near(found: &Tensor, expected: &Tensor, dtype: DType, what: &str) {
    let largest = values(expected).into_iter().map(f64::abs).fold(1e-30, f64::max);
    assert_close(found, expected, tolerance(dtype) * largest, what);
}

#[test]
fn variables_give_the_bits_of_packed_weights_on_every_tier() -> Result<()> {
    for (of_weight, of_input) in TYPES {
        let (weight, bias) = (variable(&[OUTPUTS, INPUTS], of_weight)?, variable(&[OUTPUTS], of_weight)?);
        let xs = random(&[3, 71, INPUTS], of_input)?;
        for tier in Tier::available() {
            for bias in [None, Some(&bias)] {
                let tracked = PackedLinear::with_tier(&weight, bias.map(Var::as_tensor), Some(tier))?;
                let frozen = tracked.freeze()?;
                assert!(!tracked.is_packed() && frozen.is_packed());
                for columns in [0..OUTPUTS, 5..50] {
                    let ys = tracked.forward_columns(&xs, columns.clone())?;
                    assert!(ys.track_op());
                    // Half precision under f32 is widened first, and then summed in the same order.
                    let same = bits(&ys) == bits(&frozen.forward_columns(&xs, columns)?);
                    assert!(same, "{tier}: {of_weight:?} for {of_input:?}");
                }
            }
        }
    }
    Ok(())
}

/// f64 by Candle's own operations is what they are held to.
#[test]
fn inputs_weights_and_biases_have_gradients() -> Result<()> {
    for (of_weight, of_input) in TYPES {
        for rows in [1, 7, 300] {
            let leaves = [&[2, rows, INPUTS][..], &[OUTPUTS, INPUTS], &[OUTPUTS]];
            let [xs, weight, bias] = leaves.map(|shape| random(shape, of_weight));
            let [xs, weight, bias] = [xs?.to_dtype(of_input)?, weight?, bias?].map(|tensor| Var::from_tensor(&tensor));
            let (xs, weight, bias) = (xs?, weight?, bias?);
            let wide = [&xs, &weight, &bias].map(|var| Var::from_tensor(&var.to_dtype(DType::F64)?));
            let [wide_xs, wide_weight, wide_bias] = wide;
            let (wide_xs, wide_weight, wide_bias) = (wide_xs?, wide_weight?, wide_bias?);
            let exact = wide_xs.reshape(((), INPUTS))?.matmul(&wide_weight.t()?)?.broadcast_add(&wide_bias)?;
            let expected = gradients(&exact, &[&wide_xs, &wide_weight, &wide_bias])?;
            for tier in Tier::available() {
                let linear = PackedLinear::with_tier(&weight, Some(&bias), Some(tier))?;
                let found = gradients(&linear.forward(&xs)?, &[&xs, &weight, &bias])?;
                for ((found, expected), name) in found.iter().zip(&expected).zip(["xs", "weight", "bias"]) {
                    let what = format!("{tier}: {name} of {of_weight:?} for {of_input:?}, {rows} rows");
                    assert_near(found, expected, of_weight, &what);
                }
            }
        }
    }
    Ok(())
}

/// Transposed as GPT-2 has it, parts of a whole, merged from adapters: a gradient reaches the variable below.
#[test]
fn views_of_variables_and_what_is_computed_from_them_have_gradients() -> Result<()> {
    type Make = fn(&Tensor) -> Result<Tensor>;
    let scaled: Make = |var| var.broadcast_mul(&var.sqr()?.sum_keepdim(1)?.sqrt()?.recip()?);
    let makes: [(&str, [usize; 2], Make); 4] = [
        ("transposed", [INPUTS, OUTPUTS], |var| var.t()),
        ("a part", [OUTPUTS + 9, INPUTS + 3], |var| var.narrow(0, 4, OUTPUTS)?.narrow(1, 2, INPUTS)),
        ("merged", [OUTPUTS, INPUTS], |var| Tensor::ones((OUTPUTS, INPUTS), var.dtype(), &CPU)? + (var * 0.5)?),
        ("weight norm", [OUTPUTS, INPUTS], scaled),
    ];
    for (name, shape, make) in makes {
        let (var, xs) = (variable(&shape, F32)?, variable(&[2, 9, INPUTS], F32)?);
        let weight = make(&var)?;
        let found = gradients(&PackedLinear::new(&weight, None)?.forward(&xs)?, &[&xs, &var])?;
        let rows = xs.reshape(((), INPUTS))?;
        let expected = gradients(&Linear::new(weight, None).forward(&rows)?, &[&xs, &var])?;
        for (found, expected) in found.iter().zip(&expected) {
            assert_near(found, expected, F32, name);
        }
    }
    Ok(())
}

/// Where one operand alone is tracked, it has the gradient that it has beside the others.
#[test]
fn what_is_tracked_alone_has_its_gradient() -> Result<()> {
    for dtype in DTYPES {
        let (xs, weight, bias) =
            (variable(&[5, INPUTS], dtype)?, variable(&[OUTPUTS, INPUTS], dtype)?, variable(&[OUTPUTS], dtype)?);
        let of = |xs: &Tensor, weight: &Tensor, bias: &Tensor, var: &Var| {
            gradients(&PackedLinear::new(weight, Some(bias))?.forward(xs)?, &[var])
        };
        let plain = [&xs, &weight, &bias].map(Var::as_detached_tensor);
        let [plain_xs, plain_weight, plain_bias] = &plain;
        for (n, var) in [&xs, &weight, &bias].into_iter().enumerate() {
            let alone = match n {
                0 => of(&xs, plain_weight, plain_bias, var)?,
                1 => of(plain_xs, &weight, plain_bias, var)?,
                _ => of(plain_xs, plain_weight, &bias, var)?,
            };
            assert_near(&alone[0], &of(&xs, &weight, &bias, var)?[0], dtype, &format!("{n} in {dtype:?}"));
        }
    }
    Ok(())
}

#[test]
fn a_projection_follows_its_variables_and_a_frozen_one_does_not() -> Result<()> {
    let (weight, xs) = (variable(&[OUTPUTS, INPUTS], F32)?, random(&[4, INPUTS], F32)?);
    let tracked = PackedLinear::new(&weight, None)?.with_activation(Activation::Silu)?;
    let gated = PackedGatedLinear::new(PackedLinear::new(&weight, None)?, tracked_up(&weight)?, Activation::Silu)?;
    let (frozen, frozen_gated) = (tracked.freeze()?, gated.freeze()?);
    assert_eq!(frozen.activation(), Some(Activation::Silu));
    let before = tracked.forward(&xs)?;
    assert_close(&frozen.forward(&xs)?, &before, 1e-5, "frozen");
    assert_close(&frozen_gated.forward(&xs)?, &gated.forward(&xs)?, 1e-5, "gated");
    assert!(!frozen.forward(&xs)?.track_op() && !frozen_gated.forward(&xs)?.track_op());
    weight.set(&random(&[OUTPUTS, INPUTS], F32)?)?;
    let expected = Linear::new(weight.as_tensor().clone(), None).forward(&xs)?.silu()?;
    assert_close(&tracked.forward(&xs)?, &expected, 1e-5, "after a step");
    assert_close(&frozen.forward(&xs)?, &before, 1e-5, "frozen before it");
    // Twice: what is frozen already is the same.
    assert_eq!(bits(&frozen.freeze()?.forward(&xs)?), bits(&frozen.forward(&xs)?));
    Ok(())
}

fn tracked_up(gate: &Var) -> Result<PackedLinear> {
    PackedLinear::new(&(gate.as_tensor() * 0.5)?, None)
}

/// An activation, a residual and a gate over variables.
#[test]
fn what_follows_a_product_has_gradients() -> Result<()> {
    let (xs, gate, up) =
        (variable(&[6, INPUTS], F32)?, variable(&[OUTPUTS, INPUTS], F32)?, variable(&[OUTPUTS, INPUTS], F32)?);
    let residual = variable(&[6, OUTPUTS], F32)?;
    let linear = |var: &Var| PackedLinear::new(var, None);
    let candles = |var: &Var| Linear::new(var.as_tensor().clone(), None).forward(&xs);
    for activation in [Activation::Gelu, Activation::GeluPytorchTanh, Activation::Silu, Activation::Relu] {
        let leaves = [&xs, &gate, &residual];
        let ys = linear(&gate)?.with_activation(activation)?.forward_with_residual(&xs, &residual)?;
        let expected = (activation.forward(&candles(&gate)?)? + residual.as_tensor())?;
        for (found, expected) in gradients(&ys, &leaves)?.iter().zip(&gradients(&expected, &leaves)?) {
            assert_near(found, expected, F32, &format!("{activation:?} and a residual"));
        }
        let leaves = [&xs, &gate, &up];
        let ys = PackedGatedLinear::new(linear(&gate)?, linear(&up)?, activation)?.forward(&xs)?;
        let expected = (activation.forward(&candles(&gate)?)? * candles(&up)?)?;
        for (found, expected) in gradients(&ys, &leaves)?.iter().zip(&gradients(&expected, &leaves)?) {
            assert_near(found, expected, F32, &format!("gated by {activation:?}"));
        }
    }
    Ok(())
}

#[test]
fn threads_change_no_bit_of_a_gradient() -> Result<()> {
    for dtype in DTYPES {
        let (xs, weight) = (variable(&[3, 400, 130], dtype)?, variable(&[200, 130], dtype)?);
        let (bias, frozen) = (variable(&[200], dtype)?, PackedLinear::new(&random(&[130, 200], dtype)?, None)?);
        let all = || -> Result<Vec<u64>> {
            let ys = frozen.forward(&PackedLinear::new(&weight, Some(&bias))?.forward(&xs)?)?;
            Ok(gradients(&ys, &[&xs, &weight, &bias])?.iter().flat_map(bits).collect())
        };
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
        let one = pool(1).install(all)?;
        assert!(one == pool(3).install(all)? && one == all()?, "{dtype:?}");
    }
    Ok(())
}

/// No rows, no inputs, no outputs.
#[test]
fn nothing_has_gradients_of_nothing() -> Result<()> {
    for (rows, inputs, outputs) in [(0, 3, 2), (2, 0, 3), (2, 3, 0)] {
        let (xs, weight) = (variable(&[rows, inputs], F32)?, variable(&[outputs, inputs], F32)?);
        let bias = variable(&[outputs], F32)?;
        let ys = PackedLinear::new(&weight, Some(&bias))?.forward(&xs)?;
        assert_eq!(ys.dims(), [rows, outputs]);
        let store = ys.sum_all()?.backward()?;
        for (var, expected) in [(&xs, 0.0), (&weight, 0.0), (&bias, rows as f64)] {
            let found = values(store.get(var).expect("a gradient"));
            assert_eq!(found, vec![expected; var.elem_count()], "{rows} {inputs} {outputs}");
        }
    }
    Ok(())
}
