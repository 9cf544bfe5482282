//! To and from Candle's `Linear`.

use candle_attention::PackedLinear;
use candle_attention::cpu::Tier;
use candle_core::{CpuStorage, DType, Module, Result, Storage, Tensor, Var};
use candle_nn::Linear;
use half::{bf16, f16};

use crate::array::Random;
use crate::common::assert_close;
use crate::linear::case::{CPU, Product, TYPES, bits};

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
    let mut words = (0..shape.0 * shape.1).map(|_| random.bits());
    match dtype {
        DType::F32 => Tensor::from_vec(words.map(|word| f32::from_bits(word as u32)).collect::<Vec<_>>(), shape, &CPU),
        DType::BF16 => {
            Tensor::from_vec(words.map(|word| bf16::from_bits(word as u16)).collect::<Vec<_>>(), shape, &CPU)
        }
        _ => Tensor::from_vec(words.by_ref().map(|word| f16::from_bits(word as u16)).collect::<Vec<_>>(), shape, &CPU),
    }
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
                    assert_eq!(
                        (linear.weight().dims(), linear.weight().dtype()),
                        ([shape.0, shape.1].as_slice(), dtype)
                    );
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
