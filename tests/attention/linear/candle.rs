//! Beside Candle's `Linear`: made from a `VarBuilder`, converted to and fro, and trained.

use std::collections::HashMap;

use candle_attention::cpu::Tier;
use candle_attention::{PackedLinear, packed_linear, packed_linear_b, packed_linear_no_bias};
use candle_core::{CpuStorage, DType, Module, Result, Storage, Tensor, Var};
use candle_nn::{Linear, VarBuilder, VarMap};
use half::{bf16, f16};

use crate::array::Random;
use crate::common::{assert_close, values};
use crate::linear::case::{CPU, Product, TYPES, bits};

#[test]
fn tensors_are_packed_in_the_builders_dtype() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (weight, bias) = (Tensor::randn(0f32, 1., (6, 4), &CPU)?, Tensor::randn(0f32, 1., 6, &CPU)?);
        let tensors = HashMap::from([("weight".to_string(), weight), ("bias".to_string(), bias)]);
        let vb = VarBuilder::from_tensors(tensors, dtype, &CPU);
        let xs = Tensor::randn(0f32, 1., (3, 4), &CPU)?.to_dtype(dtype)?;
        let (weight, bias) = (vb.get((6, 4), "weight")?, vb.get(6, "bias")?);
        let (with, without) = (PackedLinear::new(&weight, Some(&bias))?, PackedLinear::new(&weight, None)?);
        for (built, expected) in [
            (packed_linear(4, 6, vb.clone())?, &with),
            (packed_linear_b(4, 6, true, vb.clone())?, &with),
            (packed_linear_no_bias(4, 6, vb.clone())?, &without),
            (packed_linear_b(4, 6, false, vb.clone())?, &without),
        ] {
            assert!(built.is_packed() && built.dtype() == dtype);
            assert_eq!(bits(&built.forward(&xs)?), bits(&expected.forward(&xs)?), "{dtype:?}");
        }
    }
    Ok(())
}

/// New variables are drawn as Candle draws them, and learn.
#[test]
fn variables_are_made_as_candle_makes_them() -> Result<()> {
    let (vars, others) = (VarMap::new(), VarMap::new());
    let layer = packed_linear(400, 300, VarBuilder::from_varmap(&vars, DType::F32, &CPU))?;
    let candles = candle_nn::linear(400, 300, VarBuilder::from_varmap(&others, DType::F32, &CPU))?;
    assert!(!layer.is_packed());
    let spread = |tensor: &Tensor| {
        let numbers = values(tensor);
        let largest = numbers.iter().fold(0f64, |most, x| most.max(x.abs()));
        ((numbers.iter().map(|x| x * x).sum::<f64>() / numbers.len() as f64).sqrt(), largest)
    };
    let linear = layer.to_linear()?;
    let (ours, theirs) = (spread(linear.weight()), spread(candles.weight()));
    assert!((ours.0 / theirs.0 - 1.0).abs() < 0.02, "weights of deviation {} and {}", ours.0, theirs.0);
    let (ours, theirs) = (spread(linear.bias().expect("a bias")), spread(candles.bias().expect("a bias")));
    assert!(ours.1 <= 0.05 && theirs.1 <= 0.05 && (ours.0 / theirs.0 - 1.0).abs() < 0.2, "biases {ours:?} {theirs:?}");

    let xs = Tensor::randn(0f32, 1., (2, 400), &CPU)?;
    let before = layer.forward(&xs)?;
    for var in vars.all_vars() {
        var.set(&(var.as_tensor() * 2.0)?)?;
    }
    assert_close(&layer.forward(&xs)?, &(before * 2.0)?, 1e-4, "after a step");
    Ok(())
}

/// The bits of a tensor's elements, NaN's sign and payload included.
fn raw(tensor: &Tensor) -> Result<Vec<u32>> {
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let range = layout.start_offset()..layout.start_offset() + layout.shape().elem_count();
    Ok(match &*storage {
        Storage::Cpu(CpuStorage::F32(data)) => data[range].iter().map(|x| x.to_bits()).collect(),
        Storage::Cpu(CpuStorage::BF16(data)) => data[range].iter().map(|x| u32::from(x.to_bits())).collect(),
        Storage::Cpu(CpuStorage::F16(data)) => data[range].iter().map(|x| u32::from(x.to_bits())).collect(),
        _ => panic!("f32, bf16 or f16 on the CPU"),
    })
}

/// Any bits at all: infinities, NaN with payloads, subnormal numbers.
fn any_bits(shape: (usize, usize), dtype: DType, seed: u64) -> Result<Tensor> {
    let mut random = Random::new(seed);
    let words = (0..shape.0 * shape.1).map(|_| random.bits());
    match dtype {
        DType::F32 => Tensor::from_iter(words.map(|word| f32::from_bits(word as u32)), &CPU),
        DType::BF16 => Tensor::from_iter(words.map(|word| bf16::from_bits(word as u16)), &CPU),
        _ => Tensor::from_iter(words.map(|word| f16::from_bits(word as u16)), &CPU),
    }?
    .reshape(shape)
}

#[test]
fn a_weight_comes_back_to_the_bit() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (n, shape) in [(1, 1), (3, 5), (16, 16), (47, 33), (48, 64), (49, 7), (97, 257), (200, 1031), (1, 600)]
            .into_iter()
            .enumerate()
        {
            let weight = any_bits(shape, dtype, n as u64)?;
            // Numbers: a signalling NaN would come back as a quiet one.
            let bias = Tensor::randn(0f32, 1., shape.0, &CPU)?.to_dtype(dtype)?;
            for tier in Tier::available() {
                for bias in [None, Some(&bias)] {
                    let linear = PackedLinear::with_tier(&weight, bias, Some(tier))?.to_linear()?;
                    assert!(raw(linear.weight())? == raw(&weight)?, "{tier}: {dtype:?} {shape:?}");
                    assert_eq!(linear.bias().map(raw).transpose()?, bias.map(raw).transpose()?, "{tier}");
                    assert_eq!((linear.weight().dims2()?, linear.weight().dtype()), (shape, dtype));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn both_conversions_agree_and_say_what_they_hold() -> Result<()> {
    for (of_weight, of_input) in TYPES {
        let (weight, bias, xs) = Product::plain((of_weight, of_input), 4, (30, 20)).case().tensors()?;
        let linear = Linear::new(weight, bias);
        let packed = PackedLinear::from_linear(&linear)?;
        assert_eq!((packed.in_dim(), packed.out_dim(), packed.dtype()), (30, 20, of_weight));
        assert!(packed.is_packed() && packed.device().is_cpu());
        let again = PackedLinear::try_from(linear.clone())?;
        let back = PackedLinear::try_from(Linear::try_from(again.clone())?)?;
        let ys = bits(&packed.forward(&xs)?);
        for other in [&again, &back, &packed.clone()] {
            assert_eq!(bits(&other.forward(&xs)?), ys);
        }
    }
    Ok(())
}

/// What training changes is not copied: it is Candle's `Linear` over the same variables.
#[test]
fn variables_stay_where_they_are() -> Result<()> {
    for dtype in [DType::F32, DType::F64] {
        let weight = Var::from_tensor(&Tensor::randn(0f32, 1., (3, 4), &CPU)?.to_dtype(dtype)?)?;
        let bias = Var::from_tensor(&Tensor::randn(0f32, 1., 3, &CPU)?.to_dtype(dtype)?)?;
        let xs = Tensor::randn(0f32, 1., (2, 5, 4), &CPU)?.to_dtype(dtype)?;
        let plain = Tensor::zeros((3, 4), dtype, &CPU)?;
        for (weight, bias) in [(weight.as_tensor(), None), (weight.as_tensor(), Some(&bias)), (&plain, Some(&bias))] {
            let packed = PackedLinear::new(weight, bias.map(|bias| bias.as_tensor()))?;
            assert!(!packed.is_packed());
            assert_eq!((packed.in_dim(), packed.out_dim(), packed.dtype()), (4, 3, dtype));
            let linear = Linear::new(weight.clone(), bias.map(|bias| bias.as_tensor().clone()));
            for _ in 0..2 {
                let ys = packed.forward(&xs)?;
                assert_close(&ys, &linear.forward(&xs)?, 1e-6, "as Candle's own");
                // Candle's product of one column may add in another order than that of all.
                assert_close(&packed.forward_columns(&xs, 1..2)?, &ys.narrow(2, 1, 1)?, 1e-6, "a column");
                assert_eq!(packed.forward(&xs.get(0)?.get(0)?)?.dims(), [3]);
                if let Some(bias) = bias {
                    bias.set(&(bias.as_tensor() * 2.0)?)?;
                }
            }
            assert_eq!(packed.to_linear()?.weight().id(), weight.id());
        }
    }
    Ok(())
}

/// f64 is not packed, and computed in f64.
#[test]
fn doubles_are_candles_own() -> Result<()> {
    let weight = Tensor::new(&[[1f64, 1e-12]], &CPU)?;
    let packed = PackedLinear::new(&weight, None)?;
    assert!(!packed.is_packed());
    let ys = packed.forward(&Tensor::new(&[[1f64, 1.0]], &CPU)?)?;
    assert_eq!(ys.to_vec2::<f64>()?, [[1.0 + 1e-12]]);
    Ok(())
}

/// The gradient of `sum(ys · weights)`, for `weights` that differ from entry to entry.
pub fn gradient(ys: &Tensor, of: &Tensor) -> Result<Tensor> {
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
