//! Gradients of an input through a packed weight, and of variables through one that is not packed.

use candle_attention::PackedLinear;
use candle_attention::cpu::Tier;
use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::Linear;

use crate::common::{assert_close, values};
use crate::linear::case::{CPU, Product, TYPES};

/// The gradient of `sum(ys · weights)`, for `weights` that differ from entry to entry.
fn gradient(ys: &Tensor, of: &Tensor) -> Result<Tensor> {
    let count = ys.elem_count();
    let weights =
        (Tensor::arange(0f32, count as f32, &CPU)? * 0.37)?.sin()?.reshape(ys.dims())?.to_dtype(ys.dtype())?;
    let gradients = (ys * weights)?.sum_all()?.backward()?;
    Ok(gradients.get(of).expect("the input has a gradient").clone())
}

#[test]
fn an_input_has_the_gradient_that_candles_linear_gives() -> Result<()> {
    for (of_weight, of_input) in TYPES {
        for dims in [vec![13], vec![1, 13], vec![6, 13], vec![2, 3, 13], vec![2, 1, 3, 13]] {
            let (weight, bias, _) = Product::plain((of_weight, of_input), 2, (13, 21)).case().tensors()?;
            let xs = Var::from_tensor(&Tensor::randn(0f32, 1., dims.as_slice(), &CPU)?.to_dtype(of_input)?)?;
            let wide = |tensor: &Tensor| tensor.to_dtype(of_input);
            let linear = Linear::new(wide(&weight)?, bias.as_ref().map(wide).transpose()?);
            let rows = xs.reshape(((), 13))?;
            let (expected, expected_of_columns) =
                (gradient(&linear.forward(&rows)?, &xs)?, gradient(&linear.forward(&rows)?.narrow(1, 4, 9)?, &xs)?);
            // Candle multiplies f16 and bf16 in their own precision here, on both sides.
            let tolerance = if of_input == DType::F32 { 1e-5 } else { 0.1 };
            for tier in Tier::available() {
                let packed = PackedLinear::with_tier(&weight, bias.as_ref(), Some(tier))?;
                assert!(packed.is_packed());
                let what = format!("{tier}: {of_weight:?} for {of_input:?} {dims:?}");
                assert_close(&gradient(&packed.forward(&xs)?, &xs)?, &expected, tolerance, &what);
                let some = packed.forward_columns(&xs, 4..13)?;
                assert_close(&gradient(&some, &xs)?, &expected_of_columns, tolerance, &what);
            }
        }
    }
    Ok(())
}

/// Through a view, each entry gets its own; rows that are one row get the sum.
#[test]
fn views_of_an_input_have_gradients() -> Result<()> {
    let (weight, _, _) = Product::plain(TYPES[0], 2, (5, 7)).case().tensors()?;
    let (packed, linear) = (PackedLinear::new(&weight, None)?, Linear::new(weight, None));
    let xs = Var::from_tensor(&Tensor::randn(0f32, 1., (4, 3, 10), &CPU)?)?;
    let one = Var::from_tensor(&Tensor::randn(0f32, 1., (1, 5), &CPU)?)?;
    let views = [
        (&xs, xs.narrow(2, 2, 5)?),
        (&xs, xs.narrow(2, 2, 5)?.transpose(0, 1)?),
        (&xs, xs.get_on_dim(1, 1)?.narrow(1, 0, 5)?),
        (&one, one.broadcast_as((6, 5))?),
    ];
    for (n, (var, view)) in views.into_iter().enumerate() {
        let expected = gradient(&linear.forward(&view.contiguous()?)?, var)?;
        assert_close(&gradient(&packed.forward(&view)?, var)?, &expected, 1e-5, &format!("view {n}"));
    }
    Ok(())
}

#[test]
fn nothing_has_a_gradient_of_nothing() -> Result<()> {
    let packed = PackedLinear::new(&Tensor::ones((3, 4), DType::F32, &CPU)?, None)?;
    let xs = Var::from_tensor(&Tensor::ones((2, 4), DType::F32, &CPU)?)?;
    let none = packed.forward_columns(&xs, 1..1)?.sum_all()?.backward()?;
    assert_eq!(none.get(&xs).map(values), Some(vec![0.0; 8]), "no outputs");
    let xs = Var::from_tensor(&Tensor::ones((0, 4), DType::F32, &CPU)?)?;
    let none = packed.forward(&xs)?.sum_all()?.backward()?;
    assert_eq!(none.get(&xs).map(Tensor::dims), Some([0, 4].as_slice()), "no rows");
    Ok(())
}

#[test]
fn variables_have_the_gradients_that_candles_linear_gives() -> Result<()> {
    let var = |shape: &[usize]| Var::from_tensor(&Tensor::randn(0f32, 1., shape, &CPU)?);
    let (weight, bias, xs) = (var(&[7, 5])?, var(&[7])?, var(&[2, 3, 5])?);
    let packed = PackedLinear::new(&weight, Some(&bias))?;
    let linear = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
    for of in [&weight, &bias, &xs] {
        let expected = gradient(&linear.forward(&xs)?, of)?;
        assert_close(&gradient(&packed.forward(&xs)?, of)?, &expected, 1e-5, "the whole");
        let expected = gradient(&linear.forward(&xs)?.narrow(2, 2, 3)?, of)?;
        assert_close(&gradient(&packed.forward_columns(&xs, 2..5)?, of)?, &expected, 1e-5, "some columns");
    }
    Ok(())
}
