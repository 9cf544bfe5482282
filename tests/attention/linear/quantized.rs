//! Weights in the types of GGUF files, beside their dequantised numbers.

use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_core::quantized::GgmlDType::*;
use candle_core::quantized::{GgmlDType, QMatMul, QTensor};
use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::{Activation, Linear};

use crate::common::{assert_close, values};
use crate::linear::candle::gradient;
use crate::linear::case::{CPU, bits};

const BLOCKS: [GgmlDType; 5] = [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0];
const K_QUANTS: [GgmlDType; 5] = [Q2K, Q3K, Q4K, Q5K, Q6K];

/// (out, in), with a scale of its own for each row.
fn quantized(shape: (usize, usize), dtype: GgmlDType) -> Result<QTensor> {
    let scales = Tensor::arange(1f32, shape.0 as f32 + 1.0, &CPU)?.reshape((shape.0, 1))?;
    QTensor::quantize(&(Tensor::randn(0.1f32, 1., shape, &CPU)?.broadcast_mul(&scales)? / 10.0)?, dtype)
}

/// What Candle makes of it, in f32.
fn dequantized(weight: &QTensor) -> Result<Tensor> {
    weight.dequantize(&CPU)
}

#[test]
fn blocks_give_the_bits_of_their_numbers() -> Result<()> {
    let bias = Tensor::randn(0f32, 1., 50, &CPU)?;
    for dtype in BLOCKS {
        for bias in [None, Some(&bias)] {
            let weight = quantized((50, 96), dtype)?;
            let numbers = dequantized(&weight)?;
            let (packed, plain) = (PackedLinear::from_qtensor(weight, bias)?, PackedLinear::new(&numbers, bias)?);
            assert!(packed.is_packed());
            assert_eq!((packed.in_dim(), packed.out_dim(), packed.dtype()), (96, 50, DType::F32));
            for rows in [1, 3, 40] {
                let xs = Tensor::randn(0f32, 1., (2, rows, 96), &CPU)?;
                assert_eq!(bits(&packed.forward(&xs)?), bits(&plain.forward(&xs)?), "{dtype:?}, {rows} rows");
                let some = packed.forward_columns(&xs, 7..31)?;
                assert_eq!(bits(&some), bits(&plain.forward_columns(&xs, 7..31)?), "{dtype:?}, {rows} rows");
            }
            let linear = packed.to_linear()?;
            assert_eq!(values(linear.weight()), values(&numbers), "{dtype:?}");
            assert_eq!(linear.bias().map(bits), bias.map(bits));
        }
    }
    Ok(())
}

/// Every code, with scales of either sign and minimums.
#[test]
fn no_code_is_lost() -> Result<()> {
    for (dtype, bytes) in [(Q4_0, 18), (Q4_1, 20), (Q5_0, 22), (Q5_1, 24), (Q8_0, 34)] {
        // A bit less in what may be a scale, which is finite then.
        let byte = |at: usize| (at * 89 + at / 256 * 37 + 11) as u8 & if at % bytes < 4 { 0xbf } else { 0xff };
        let data: Vec<u8> = (0..bytes * 64).map(byte).collect();
        let storage = candle_core::quantized::QStorage::from_data(data.into(), &CPU, dtype)?;
        let weight = QTensor::new(storage, (32, 64))?;
        let numbers = dequantized(&weight)?;
        let linear = PackedLinear::from_qtensor(weight, None)?.to_linear()?;
        assert_eq!(values(linear.weight()), values(&numbers), "{dtype:?}");
    }
    Ok(())
}

#[test]
fn other_types_are_candles_product_or_packed_as_they_are() -> Result<()> {
    let (bias, xs) = (Tensor::randn(0f32, 1., 50, &CPU)?, Tensor::randn(0f32, 1., (2, 5, 256), &CPU)?);
    for dtype in [F32, F16, BF16].into_iter().chain(K_QUANTS) {
        let is_k_quant = K_QUANTS.contains(&dtype);
        let weight = quantized((50, 256), dtype)?;
        let numbers = dequantized(&weight)?;
        let expected = if is_k_quant {
            QMatMul::from_qtensor(quantized_again(&weight)?)?.forward(&xs)?.broadcast_add(&bias)?
        } else {
            PackedLinear::new(&numbers, Some(&bias))?.forward(&xs)?
        };
        let packed = PackedLinear::from_qtensor(weight, Some(&bias))?;
        assert_eq!(packed.is_packed(), !is_k_quant, "{dtype:?}");
        let ys = packed.forward(&xs)?;
        match is_k_quant {
            true => assert_eq!(bits(&ys), bits(&expected), "{dtype:?}"),
            false => assert_close(&ys, &expected, 1e-4, &format!("{dtype:?}")),
        }
        assert_eq!(bits(&packed.forward_columns(&xs, 9..30)?), bits(&ys.narrow(2, 9, 21)?), "{dtype:?}");
        let linear = packed.to_linear()?;
        assert_eq!((values(linear.weight()), linear.weight().dtype()), (values(&numbers), DType::F32));
        assert_eq!(linear.bias().map(bits), Some(bits(&bias)));
        let none = packed.forward(&xs.narrow(1, 0, 0)?)?;
        assert_eq!(none.dims(), [2, 0, 50]);
    }
    Ok(())
}

/// A copy.
fn quantized_again(weight: &QTensor) -> Result<QTensor> {
    let data = weight.data()?.to_vec();
    let storage = candle_core::quantized::QStorage::from_data(data.into(), &CPU, weight.dtype())?;
    QTensor::new(storage, weight.shape())
}

#[test]
fn inputs_have_gradients_over_every_type() -> Result<()> {
    for dtype in BLOCKS.into_iter().chain(K_QUANTS) {
        let weight = quantized((20, 256), dtype)?;
        let linear = Linear::new(dequantized(&weight)?, None);
        let xs = Var::from_tensor(&Tensor::randn(0f32, 1., (3, 256), &CPU)?)?;
        let expected = gradient(&linear.forward(&xs)?, &xs)?;
        let found = gradient(&PackedLinear::from_qtensor(weight, None)?.forward(&xs)?, &xs)?;
        assert_close(&found, &expected, 1e-4, &format!("{dtype:?}"));
    }
    Ok(())
}

#[test]
fn rows_of_every_weight_are_looked_up() -> Result<()> {
    let ids = Tensor::new(&[[3u32, 0, 49], [3, 17, 48]], &CPU)?;
    let check = |weight: &Tensor, packed: &PackedLinear| -> Result<()> {
        let expected = weight.index_select(&ids.flatten_all()?, 0)?.reshape((2, 3, 256))?;
        let rows = packed.weight_rows(&ids)?;
        assert_eq!((rows.dtype(), values(&rows)), (expected.dtype(), values(&expected)), "{packed:?}");
        Ok(())
    };
    for dtype in BLOCKS.into_iter().chain(K_QUANTS) {
        let weight = quantized((50, 256), dtype)?;
        check(&dequantized(&weight)?, &PackedLinear::from_qtensor(weight, None)?)?;
    }
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let weight = Tensor::randn(0f32, 1., (50, 256), &CPU)?.to_dtype(dtype)?;
        check(&weight, &PackedLinear::new(&weight, None)?)?;
    }
    let none = PackedLinear::new(&Tensor::ones((3, 4), DType::F32, &CPU)?, None)?;
    assert_eq!(none.weight_rows(&ids.narrow(0, 0, 0)?)?.dims(), [0, 3, 4]);
    Ok(())
}

/// In one pass where both are of one type, in three operations where they are not.
#[test]
fn gates_of_every_type() -> Result<()> {
    let xs = Tensor::randn(0f32, 1., (3, 256), &CPU)?;
    for (gate, up) in [(Q8_0, Q8_0), (Q4_1, Q4_1), (Q4_0, Q4_1), (Q8_0, F32), (Q4K, Q6K), (Q4K, Q8_0)] {
        let (gate, up) = (quantized((40, 256), gate)?, quantized((40, 256), up)?);
        let [gate, up] = [gate, up].map(|weight| PackedLinear::from_qtensor(weight, None));
        let (gate, up) = (gate?, up?);
        let expected = (gate.forward(&xs)?.silu()? * up.forward(&xs)?)?;
        let ys = PackedGatedLinear::new(gate, up, Activation::Silu)?.forward(&xs)?;
        assert_close(&(ys / 100.0)?, &(expected / 100.0)?, 1e-4, "gated");
    }
    Ok(())
}
