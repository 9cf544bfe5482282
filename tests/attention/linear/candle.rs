//! `PackedLinear` and Candle's `Linear`: made from a `VarBuilder`, and converted to each other.

use crate::linear::case::{CPU, Product, TYPES, bits};
use crate::*;

#[test]
fn linear_constructors_use_dtype_of_builder() -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let tensors = [("weight".into(), random((6, 4))?), ("bias".into(), random(6)?)].into();
        let vb = VarBuilder::from_tensors(tensors, dtype, &CPU);
        let xs = random((3, 4))?.to_dtype(dtype)?;
        let weight = vb.get((6, 4), "weight")?;
        let bias = vb.get(6, "bias")?;
        let with = PackedLinear::new(&weight, Some(&bias))?;
        let without = PackedLinear::new(&weight, None)?;
        for (built, expected) in [
            (packed_linear(4, 6, vb.clone())?, &with),
            (packed_linear_b(4, 6, true, vb.clone())?, &with),
            (packed_linear_no_bias(4, 6, vb.clone())?, &without),
            (packed_linear_b(4, 6, false, vb)?, &without),
        ] {
            assert!(built.is_packed() && built.dtype() == dtype);
            assert_eq!(bits(&built.forward(&xs)?), bits(&expected.forward(&xs)?), "{dtype:?}");
        }
    }
    Ok(())
}

/// Reads the hints of Candle as initialisers of PyTorch, with `TorchSeed`.
#[test]
fn linear_new_variables_match_candle_initialisation() -> Result<()> {
    assert!(!packed_linear(4, 6, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU))?.is_packed());
    let seeded = || TorchSeed::new(7).var_builder(DType::F32, &CPU);
    let ours = packed_linear(4, 6, seeded())?.to_linear()?;
    let theirs = candle_nn::linear(4, 6, seeded())?;
    assert_eq!((bits(ours.weight()), ours.bias().map(bits)), (bits(theirs.weight()), theirs.bias().map(bits)));
    Ok(())
}

/// Draws any bits: infinities, NaN with payloads, subnormal numbers.
#[test]
fn linear_weight_round_trips_bit_for_bit() -> Result<()> {
    let raw = |tensor: &Tensor| -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        tensor.write_bytes(&mut bytes)?;
        Ok(bytes)
    };
    for (dtype, size) in [(DType::F32, 4), (DType::BF16, 2), (DType::F16, 2)] {
        for (out, inputs) in [(1, 1), (3, 5), (16, 16), (47, 33), (48, 64), (49, 7), (97, 257), (200, 1031), (1, 600)] {
            let mut drawn = Random::new(out as u64);
            let bytes: Vec<u8> = (0..size * out * inputs).map(|_| drawn.bits() as u8).collect();
            let weight = Tensor::from_raw_buffer(&bytes, dtype, &[out, inputs], &CPU)?;
            // Numbers: a signalling NaN would come back as a quiet one.
            let numbers = random(out)?.to_dtype(dtype)?;
            for instruction_set in InstructionSet::available() {
                for bias in [None, Some(&numbers)] {
                    let linear =
                        PackedLinear::with_instruction_set(&weight, bias, Some(instruction_set))?.to_linear()?;
                    assert!(raw(linear.weight())? == bytes, "{instruction_set}: {dtype:?} {out} × {inputs}");
                    assert_eq!(linear.bias().map(raw).transpose()?, bias.map(raw).transpose()?, "{instruction_set}");
                    assert_eq!((linear.weight().dims2()?, linear.weight().dtype()), ((out, inputs), dtype));
                }
            }
        }
    }
    Ok(())
}

#[test]
fn linear_conversions_from_and_to_candle_agree() -> Result<()> {
    for types in TYPES {
        let (weight, bias, xs) = Product::plain(types, 4, (30, 20)).case().tensors()?;
        let linear = Linear::new(weight, bias);
        let packed = PackedLinear::from_linear(&linear)?;
        assert_eq!((packed.in_dim(), packed.out_dim(), packed.dtype()), (30, 20, types.0));
        assert!(packed.is_packed() && packed.device().is_cpu());
        let again = PackedLinear::try_from(linear)?;
        let back = PackedLinear::try_from(Linear::try_from(again.clone())?)?;
        for other in [&again, &back, &packed.clone()] {
            assert_eq!(bits(&other.forward(&xs)?), bits(&packed.forward(&xs)?));
        }
    }
    Ok(())
}

/// Checks variables, which training changes, and f64: they are not copied, but multiplied by Candle's `Linear` over the
/// same tensors.
#[test]
fn linear_of_variables_or_f64_is_not_packed() -> Result<()> {
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-14)] {
        let [trained, added] = [&[3, 4][..], &[3]].map(|shape| Var::from_tensor(&random(shape)?.to_dtype(dtype)?));
        let trained = trained?;
        let added = added?;
        let xs = random((2, 5, 4))?.to_dtype(dtype)?;
        let plain = Tensor::zeros((3, 4), dtype, &CPU)?;
        for (weight, bias) in [(trained.as_tensor(), None), (trained.as_tensor(), Some(&added)), (&plain, Some(&added))]
        {
            let packed = PackedLinear::new(weight, bias.map(|bias| bias.as_tensor()))?;
            assert!(!packed.is_packed());
            assert_eq!((packed.in_dim(), packed.out_dim(), packed.dtype()), (4, 3, dtype));
            let linear = Linear::new(weight.clone(), bias.map(|bias| bias.as_tensor().clone()));
            for _ in 0..2 {
                let ys = packed.forward(&xs)?;
                assert_close(&ys, &linear.forward(&xs)?, tolerance, "as Candle's own");
                // Candle's product of one column may add in another order than that of all.
                assert_close(&packed.forward_columns(&xs, 1..2)?, &ys.narrow(2, 1, 1)?, tolerance, "a column");
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

/// Checks the gradients of a layer in f64, which the CPU kernels do not compute: with an input that is contiguous, and
/// with one that is not.
#[test]
fn linear_in_f64_has_the_gradients_of_candle() -> Result<()> {
    let variable = |shape: &[usize]| Var::from_tensor(&random(shape)?.to_dtype(DType::F64)?);
    let (weight, bias) = (variable(&[3, 4])?, variable(&[3])?);
    for dims in [[2, 5, 4], [2, 4, 5]] {
        let stored = variable(&dims)?;
        let xs = if dims[2] == 4 { stored.as_tensor().clone() } else { stored.transpose(1, 2)? };
        let factors = random((2, 5, 3))?.to_dtype(DType::F64)?;
        for own_bias in [None, Some(bias.as_tensor())] {
            let candle = Linear::new(weight.as_tensor().clone(), own_bias.cloned());
            let packed = PackedLinear::new(weight.as_tensor(), own_bias)?;
            let found = (packed.forward(&xs)? * &factors)?.sum_all()?.backward()?;
            let expected = (candle.forward(&xs.contiguous()?)? * &factors)?.sum_all()?.backward()?;
            for (name, var) in [("input", &stored), ("weight", &weight), ("bias", &bias)] {
                assert_eq!(found.get(var).is_some(), expected.get(var).is_some(), "{name}");
                if let (Some(own), Some(other)) = (found.get(var), expected.get(var)) {
                    assert_close(own, other, 1e-14, name);
                }
            }
        }
    }
    Ok(())
}
