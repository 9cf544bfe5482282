//! Weights in the types of GGUF files, beside their dequantised numbers.

use candle_attention::{PackedGatedLinear, PackedLinear};
use candle_core::quantized::GgmlDType::*;
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Activation, Linear};

use crate::common::{assert_close, values};
use crate::linear::case::{CPU, bits};
use crate::tensors::{gradients, random, variable};

const BLOCKS: [GgmlDType; 5] = [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0];
const K_QUANTS: [GgmlDType; 5] = [Q2K, Q3K, Q4K, Q5K, Q6K];

/// (out, in), with a scale of its own for each row; and what Candle makes of it, in f32.
fn quantized(shape: (usize, usize), dtype: GgmlDType) -> Result<(QTensor, Tensor)> {
    let scales = Tensor::arange(1f32, shape.0 as f32 + 1.0, &CPU)?.reshape((shape.0, 1))?;
    let weight = QTensor::quantize(&((random(shape)? + 0.1)?.broadcast_mul(&scales)? / 10.0)?, dtype)?;
    let numbers = weight.dequantize(&CPU)?;
    Ok((weight, numbers))
}

#[test]
fn blocks_give_the_bits_of_their_numbers() -> Result<()> {
    let bias = random(50)?;
    for (dtype, bias) in BLOCKS.into_iter().flat_map(|dtype| [(dtype, None), (dtype, Some(&bias))]) {
        let (weight, numbers) = quantized((50, 96), dtype)?;
        let (packed, plain) = (PackedLinear::from_qtensor(weight, bias)?, PackedLinear::new(&numbers, bias)?);
        assert!(packed.is_packed());
        assert_eq!((packed.in_dim(), packed.out_dim(), packed.dtype()), (96, 50, DType::F32));
        for (rows, columns) in [1, 3, 40].into_iter().flat_map(|rows| [(rows, 0..50), (rows, 7..31)]) {
            let xs = random((2, rows, 96))?;
            let [found, expected] = [&packed, &plain].map(|linear| linear.forward_columns(&xs, columns.clone()));
            assert_eq!(bits(&found?), bits(&expected?), "{dtype:?}, {rows} rows");
        }
        let linear = packed.to_linear()?;
        assert_eq!(values(linear.weight()), values(&numbers), "{dtype:?}");
        assert_eq!(linear.bias().map(bits), bias.map(bits));
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
        let weight = QTensor::new(QStorage::from_data(data.into(), &CPU, dtype)?, (32, 64))?;
        let numbers = weight.dequantize(&CPU)?;
        let linear = PackedLinear::from_qtensor(weight, None)?.to_linear()?;
        assert_eq!(values(linear.weight()), values(&numbers), "{dtype:?}");
    }
    Ok(())
}

#[test]
fn other_types_are_candles_product_or_packed_as_they_are() -> Result<()> {
    let (bias, xs) = (random(50)?, random((2, 5, 256))?);
    for dtype in [F32, F16, BF16].into_iter().chain(K_QUANTS) {
        let is_k_quant = K_QUANTS.contains(&dtype);
        let (weight, numbers) = quantized((50, 256), dtype)?;
        let copy = QTensor::new(QStorage::from_data(weight.data()?.to_vec().into(), &CPU, dtype)?, weight.shape())?;
        let packed = PackedLinear::from_qtensor(weight, Some(&bias))?;
        assert_eq!(packed.is_packed(), !is_k_quant, "{dtype:?}");
        let ys = packed.forward(&xs)?;
        if is_k_quant {
            let expected = QMatMul::from_qtensor(copy)?.forward(&xs)?.broadcast_add(&bias)?;
            assert_eq!(bits(&ys), bits(&expected), "{dtype:?}");
        } else {
            let expected = PackedLinear::new(&numbers, Some(&bias))?.forward(&xs)?;
            assert_close(&ys, &expected, 1e-4, &format!("{dtype:?}"));
        }
        assert_eq!(bits(&packed.forward_columns(&xs, 9..30)?), bits(&ys.narrow(2, 9, 21)?), "{dtype:?}");
        let linear = packed.to_linear()?;
        assert_eq!((values(linear.weight()), linear.weight().dtype()), (values(&numbers), DType::F32));
        assert_eq!(linear.bias().map(bits), Some(bits(&bias)));
        assert_eq!(packed.forward(&xs.narrow(1, 0, 0)?)?.dims(), [2, 0, 50]);
    }
    Ok(())
}

#[test]
fn inputs_have_gradients_over_every_type() -> Result<()> {
    for dtype in BLOCKS.into_iter().chain(K_QUANTS) {
        let ((weight, numbers), xs) = (quantized((20, 256), dtype)?, variable((3, 256))?);
        let expected = gradients(&Linear::new(numbers, None).forward(&xs)?, &[&xs])?;
        let found = gradients(&PackedLinear::from_qtensor(weight, None)?.forward(&xs)?, &[&xs])?;
        assert_close(&found[0], &expected[0], 1e-4, &format!("{dtype:?}"));
    }
    Ok(())
}

#[test]
fn rows_of_every_weight_are_looked_up() -> Result<()> {
    let ids = Tensor::new(&[[3u32, 0, 49], [3, 17, 48]], &CPU)?;
    let mut linears = Vec::new();
    for dtype in BLOCKS.into_iter().chain(K_QUANTS) {
        let (weight, numbers) = quantized((50, 256), dtype)?;
        linears.push((numbers, PackedLinear::from_qtensor(weight, None)?));
    }
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let weight = random((50, 256))?.to_dtype(dtype)?;
        linears.push((weight.clone(), PackedLinear::new(&weight, None)?));
    }
    for (weight, linear) in linears {
        let expected = weight.index_select(&ids.flatten_all()?, 0)?.reshape((2, 3, 256))?;
        let rows = linear.weight_rows(&ids)?;
        assert_eq!((rows.dtype(), values(&rows)), (expected.dtype(), values(&expected)), "{linear:?}");
        assert_eq!(linear.weight_rows(&ids.narrow(0, 0, 0)?)?.dims(), [0, 3, 256]);
    }
    Ok(())
}

/// In one pass where both are of one type, in three operations where they are not.
#[test]
fn gates_of_every_type() -> Result<()> {
    let xs = random((3, 256))?;
    for types in [[Q8_0, Q8_0], [Q4_1, Q4_1], [Q4_0, Q4_1], [Q8_0, F32], [Q4K, Q6K], [Q4K, Q8_0]] {
        let [gate, up] = types.map(|dtype| PackedLinear::from_qtensor(quantized((40, 256), dtype)?.0, None));
        let (gate, up) = (gate?, up?);
        let expected = (gate.forward(&xs)?.silu()? * up.forward(&xs)?)?;
        let ys = PackedGatedLinear::new(gate, up, Activation::Silu)?.forward(&xs)?;
        assert_close(&(ys / 100.0)?, &(expected / 100.0)?, 1e-4, &format!("{types:?}"));
    }
    Ok(())
}
