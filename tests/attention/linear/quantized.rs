//! Weights in the types of GGUF files, compared with their dequantised numbers.

use candle_core::quantized::GgmlDType::*;
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};
use half::f16;
use proptest::collection::vec;

use crate::linear::case::{CPU, bits};
use crate::*;

const BLOCKS: [GgmlDType; 5] = [Q4_0, Q4_1, Q5_0, Q5_1, Q8_0];
const K_QUANTS: [GgmlDType; 5] = [Q2K, Q3K, Q4K, Q5K, Q6K];

/// Draws a weight (out, in) with a different scale for each row, and returns its dequantised numbers in f32 too, by
/// Candle.
fn quantized(shape: (usize, usize), dtype: GgmlDType) -> Result<(QTensor, Tensor)> {
    let scales = Tensor::arange(1f32, shape.0 as f32 + 1.0, &CPU)?.reshape((shape.0, 1))?;
    let weight = QTensor::quantize(&((random(shape)? + 0.1)?.broadcast_mul(&scales)? / 10.0)?, dtype)?;
    let numbers = weight.dequantize(&CPU)?;
    Ok((weight, numbers))
}

/// Checks that quantised types have the bits of their dequantised weights. All types have gradients, row lookup and
/// conversion back to numbers.
#[test]
fn gguf_types_match_their_dequantised_weights() -> Result<()> {
    let added = random(50)?;
    let ids = Tensor::new(&[[3u32, 0, 49], [3, 17, 48]], &CPU)?;
    let types = BLOCKS.into_iter().chain(K_QUANTS).chain([F32, F16, BF16]);
    for (dtype, bias) in types.flat_map(|dtype| [(dtype, None), (dtype, Some(&added))]) {
        let (weight, numbers) = quantized((50, 256), dtype)?;
        let packed = PackedLinear::from_qtensor(weight, bias)?;
        let plain = PackedLinear::new(&numbers, bias)?;
        assert!(packed.is_packed(), "{dtype:?}");
        assert_eq!((packed.in_dim(), packed.out_dim()), (256, 50));
        let is_half = [F16, BF16].contains(&dtype);
        assert!(is_half || packed.dtype() == DType::F32, "{dtype:?}");
        for rows in [0, 1, 3, 40] {
            let xs = random((2, rows, 256))?;
            let ys = packed.forward(&xs)?;
            assert_eq!(ys.dims(), [2, rows, 50]);
            if BLOCKS.contains(&dtype) || K_QUANTS.contains(&dtype) {
                assert_eq!(bits(&ys), bits(&plain.forward(&xs)?), "{dtype:?}");
            } else {
                assert_close(&ys, &plain.forward(&xs)?, 1e-4, &format!("{dtype:?}"));
            }
            assert_eq!(bits(&packed.forward_columns(&xs, 7..31)?), bits(&ys.narrow(2, 7, 24)?), "{dtype:?}, {rows}");
        }
        let row = random(256)?;
        assert_eq!(bits(&packed.forward(&row)?), bits(&packed.forward(&row.reshape((1, 256))?)?), "{dtype:?}");
        let linear = packed.to_linear()?;
        assert_eq!(values(linear.weight()), values(&numbers), "{dtype:?}");
        // Half precision stays what it is without a bias in f32.
        assert!(linear.weight().dtype() == DType::F32 || is_half && bias.is_none(), "{dtype:?}");
        assert_eq!(linear.bias().map(bits), bias.map(bits));
        assert_rows(&packed, &numbers, &ids)?;
        let xs = variable((3, 256))?;
        let expected = gradients(&Linear::new(numbers, None).forward(&xs)?, &[&xs])?;
        assert_close(&gradients(&packed.forward(&xs)?, &[&xs])?[0], &expected[0], 1e-3, &format!("{dtype:?}"));
    }
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let weight = random((50, 256))?.to_dtype(dtype)?;
        assert_rows(&PackedLinear::new(&weight, None)?, &weight, &ids)?;
    }
    Ok(())
}

/// Checks that a K-quant with a bias that is trained is multiplied by Candle, with the gradient of the bias.
#[test]
fn gguf_k_quant_with_tracked_bias_has_gradient() -> Result<()> {
    for dtype in K_QUANTS {
        let (weight, _) = quantized((50, 256), dtype)?;
        let copy = QTensor::new(QStorage::from_data(weight.data()?.to_vec().into(), &CPU, dtype)?, weight.shape())?;
        let bias = variable(50)?;
        let linear = PackedLinear::from_qtensor(weight, Some(&bias))?;
        let xs = random((3, 256))?;
        let ys = linear.forward(&xs)?;
        let expected = QMatMul::from_qtensor(copy)?.forward(&xs)?.broadcast_add(&bias)?;
        assert_eq!(bits(&ys), bits(&expected), "{dtype:?}");
        assert_eq!(values(&gradients(&ys, &[&bias])?[0]), values(&gradients(&expected, &[&bias])?[0]), "{dtype:?}");
    }
    Ok(())
}

/// Checks that the type of K-quants with a scale in f32, which files have in products only, is packed in f32.
#[test]
fn gguf_q8_k_has_bits_of_dequantised_weight() -> Result<()> {
    let (weight, numbers) = quantized((50, 256), Q8K)?;
    let packed = PackedLinear::from_qtensor(weight, None)?;
    let xs = random((3, 256))?;
    assert_eq!(bits(&packed.forward(&xs)?), bits(&PackedLinear::new(&numbers, None)?.forward(&xs)?));
    Ok(())
}

/// Checks that a row has the same bits with any other rows.
#[test]
fn gguf_types_have_rows_of_the_same_bits_for_any_number_of_rows() -> Result<()> {
    let xs = random((70, 512))?;
    for dtype in BLOCKS.into_iter().chain(K_QUANTS).chain([F32, F16, BF16]) {
        let (weight, _) = quantized((64, 512), dtype)?;
        let packed = PackedLinear::from_qtensor(weight, None)?;
        let inputs = xs.to_dtype(packed.dtype())?;
        let all = packed.forward(&inputs)?;
        for rows in [1, 2, 3, 8, 33] {
            let some = packed.forward(&inputs.narrow(0, 5, rows)?)?;
            assert_eq!(bits(&some), bits(&all.narrow(0, 5, rows)?), "{dtype:?}, {rows} rows");
        }
    }
    Ok(())
}

/// Checks the rows of a weight (50, 256) that are looked up.
fn assert_rows(linear: &PackedLinear, weight: &Tensor, ids: &Tensor) -> Result<()> {
    let expected = weight.index_select(&ids.flatten_all()?, 0)?.reshape((2, 3, 256))?;
    let rows = linear.weight_rows(ids)?;
    assert_eq!((rows.dtype(), values(&rows)), (linear.dtype(), values(&expected)), "{linear:?}");
    assert_eq!(linear.weight_rows(&ids.narrow(0, 0, 0)?)?.dims(), [0, 3, 256]);
    Ok(())
}

/// Checks scales of either sign, and minimums.
#[test]
fn gguf_types_keep_every_code() -> Result<()> {
    for dtype in [BLOCKS, K_QUANTS].concat() {
        let bytes = dtype.type_size();
        // Without the highest bit of its exponent, a scale or a minimum is finite.
        let is_in_half =
            |at: usize| halves_of_block(dtype).iter().any(|half| (*half..half + 2).contains(&(at % bytes)));
        let bits = |at: usize| if is_in_half(at) { 0xbf } else { 0xff };
        let byte = |at: usize| (at * 89 + at / 256 * 37 + 11) as u8 & bits(at);
        let data: Vec<u8> = (0..bytes * 32 * 256 / dtype.block_size()).map(byte).collect();
        let weight = QTensor::new(QStorage::from_data(data.into(), &CPU, dtype)?, (32, 256))?;
        let numbers = weight.dequantize(&CPU)?;
        let linear = PackedLinear::from_qtensor(weight, None)?.to_linear()?;
        assert_eq!(values(linear.weight()), values(&numbers), "{dtype:?}");
    }
    Ok(())
}

/// Draws any 16 bits as a scale or a minimum, and often a zero of either sign, a subnormal, infinite or largest number,
/// or NaN.
fn any_half() -> impl Strategy<Value = f16> {
    let special = select(vec![
        f16::ZERO,
        f16::NEG_ZERO,
        f16::MIN_POSITIVE_SUBNORMAL,
        -f16::MAX_SUBNORMAL,
        f16::MAX,
        f16::MIN,
        f16::INFINITY,
        f16::NEG_INFINITY,
        f16::NAN,
    ]);
    prop_oneof![special, (-1f32..1.0).prop_map(f16::from_f32), any::<u16>().prop_map(f16::from_bits)]
}

/// Returns where the numbers in f16 of a block begin.
fn halves_of_block(dtype: GgmlDType) -> &'static [usize] {
    match dtype {
        Q4_0 | Q5_0 | Q8_0 => &[0],
        Q4_1 | Q5_1 | Q4K | Q5K => &[0, 2],
        Q2K => &[80, 82],
        Q3K => &[108],
        Q6K => &[208],
        other => panic!("{other:?} is not drawn"),
    }
}

/// Draws a type, and the bytes of the blocks of `elements` numbers.
fn any_blocks(elements: usize) -> impl Strategy<Value = (GgmlDType, Vec<u8>)> {
    select([BLOCKS, K_QUANTS].concat()).prop_flat_map(move |dtype| {
        let places = halves_of_block(dtype);
        let bytes = vec(any::<u8>(), dtype.type_size());
        let block = (vec(any_half(), places.len()), bytes).prop_map(|(halves, mut block)| {
            for (&at, number) in places.iter().zip(halves) {
                block[at..at + 2].copy_from_slice(&number.to_le_bytes());
            }
            block
        });
        vec(block, elements / dtype.block_size()).prop_map(move |blocks| (dtype, blocks.concat()))
    })
}

/// Returns the bits of each number, with one pattern for all NaN.
fn bits_with_one_nan(tensor: &Tensor) -> Vec<u32> {
    let numbers = tensor.flatten_all().and_then(|all| all.to_vec1::<f32>()).expect("a tensor of f32");
    numbers.into_iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Compares blocks of any scales and minimums with their dequantised numbers, bit for bit: the weight itself, and
/// products with dense rows, with rows so small that products round to zeros of either sign, and with rows of a single
/// 1.
#[test]
fn gguf_blocks_with_any_scale_match_dequantized_weight() {
    let out = 18;
    let inputs = 256;
    for_all(96, any_blocks(out * inputs), |(dtype, data)| {
        let weight = QTensor::new(QStorage::from_data(data.into(), &CPU, dtype)?, (out, inputs))?;
        let numbers = weight.dequantize(&CPU)?;
        let packed = PackedLinear::from_qtensor(weight, None)?;
        let plain = PackedLinear::new(&numbers, None)?;
        assert_eq!(bits_with_one_nan(packed.to_linear()?.weight()), bits_with_one_nan(&numbers), "{dtype:?}");
        for rows in [1, 3, 40] {
            let dense = random((rows, inputs))?;
            let single_ones = Tensor::eye(inputs, DType::F32, &CPU)?.narrow(0, 5, rows)?;
            for xs in [(&dense * 1e-40)?, dense, single_ones] {
                let ys = packed.forward(&xs)?;
                let expected = plain.forward(&xs)?;
                assert_eq!(bits_with_one_nan(&ys), bits_with_one_nan(&expected), "{dtype:?}, {rows} rows");
            }
        }
        Ok(())
    });
}

/// Checks gate and up projections of one type, which are one pass, and of two types, which are three operations.
#[test]
fn gguf_types_in_gated_linear_match_separate_products() -> Result<()> {
    let xs = random((3, 256))?;
    for types in [[Q8_0, Q8_0], [Q4_1, Q4_1], [Q4_0, Q4_1], [Q8_0, F32], [Q4K, Q6K], [Q4K, Q8_0]] {
        let linear = |dtype| PackedLinear::from_qtensor(quantized((40, 256), dtype)?.0, None);
        let gate = linear(types[0])?;
        let up = linear(types[1])?;
        let expected = (gate.forward(&xs)?.silu()? * up.forward(&xs)?)?;
        let ys = PackedGatedLinear::new(gate, up, Activation::Silu)?.forward(&xs)?;
        assert_close(&(ys / 100.0)?, &(expected / 100.0)?, 1e-4, &format!("{types:?}"));
    }
    Ok(())
}
