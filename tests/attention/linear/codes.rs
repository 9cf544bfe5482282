//! Layers of quantised weights on each device, compared with products of the dequantised weight in f64: few rows, which
//! a kernel multiplies with the codes on a GPU, many rows, gradients, rows of the weight, and a gate.

use candle_core::quantized::{GgmlDType, QTensor};

use crate::*;

crate::on_each_device!(
    linear_of_gguf_codes_matches_f64,
    linear_of_codes_with_few_and_many_rows_matches_f64,
    linear_of_codes_with_activation_residual_and_some_columns_matches_f64,
    linear_of_codes_has_gradient_of_input,
    gated_linear_of_codes_matches_f64,
);

const INPUTS: usize = 192;
const OUTPUTS: usize = 37;

/// Returns fixed numbers from -1 to 1.
fn numbers_of(seed: u64, dims: &[usize]) -> Result<Tensor> {
    let mut random = Random::new(seed);
    let numbers: Vec<f32> = (0..dims.iter().product()).map(|_| random.up_to(2000) as f32 / 1000.0 - 1.0).collect();
    Tensor::from_vec(numbers, dims, &CPU)
}

/// Returns a weight in each format that the crate quantises to.
fn weights() -> Result<Vec<QuantizedWeight>> {
    let formats = [QuantizationFormat::Int8, QuantizationFormat::Int4 { group: 32 }, QuantizationFormat::Nf4];
    let mut weights = Vec::new();
    for (seed, format) in (1..).zip(formats) {
        weights.push(QuantizedWeight::quantize(&numbers_of(seed, &[OUTPUTS, INPUTS])?, format)?);
    }
    // Columns in another order than the inputs.
    let order = (0..INPUTS as u32).map(|column| column * 35 % INPUTS as u32).collect();
    weights.push(QuantizedWeight { input_order: Some(order), ..weights[1].clone() }.checked()?);
    Ok(weights)
}

/// Returns `xs weightᵀ + bias` in f64 of inputs that are rounded to a dtype.
fn exact(xs: &Tensor, dtype: DType, weight: &QuantizedWeight, bias: &Tensor) -> Result<Tensor> {
    let wide = |tensor: &Tensor| tensor.to_dtype(dtype)?.to_dtype(DType::F64);
    wide(xs)?.matmul(&weight.dequantize()?.to_dtype(DType::F64)?.t()?)?.broadcast_add(&wide(bias)?)
}

/// Checks numbers whose sums are in f32 and rounded to their dtype. On a GPU, many rows are multiplied with numbers of
/// the weight that are rounded to the dtype.
fn assert_matches(found: &Tensor, expected: &Tensor, what: &str) {
    let allowed = if found.dtype() == DType::F32 { 3e-6 } else { 1e-2 };
    assert_near(found, expected, allowed, what);
}

fn linear_of_codes_with_few_and_many_rows_matches_f64(device: &Device) -> Result<()> {
    let bias = numbers_of(9, &[OUTPUTS])?;
    for weight in weights()? {
        for dtype in [DType::F32, DType::BF16] {
            let own_bias = bias.to_dtype(dtype)?.to_device(device)?;
            let linear = PackedLinear::from_quantized_on(&weight, Some(&own_bias), dtype, device)?;
            for rows in [1, 3, 8, 9] {
                let xs = numbers_of(10, &[rows, INPUTS])?;
                let found = linear.forward(&xs.to_dtype(dtype)?.to_device(device)?)?;
                assert_matches(&found, &exact(&xs, dtype, &weight, &bias)?, &format!("{rows} rows in {dtype:?}"));
            }
        }
    }
    Ok(())
}

fn linear_of_codes_with_activation_residual_and_some_columns_matches_f64(device: &Device) -> Result<()> {
    let bias = numbers_of(9, &[OUTPUTS])?;
    let xs = numbers_of(10, &[2, INPUTS])?;
    let residual = numbers_of(11, &[2, 20])?;
    for weight in weights()? {
        let linear = PackedLinear::from_quantized_on(&weight, Some(&bias.to_device(device)?), DType::F32, device)?;
        let linear = linear.with_activation(Activation::Silu)?;
        let found = linear.product(&xs.to_device(device)?, 9..29, Some(&residual.to_device(device)?))?;
        let before = exact(&xs, DType::F32, &weight, &bias)?.narrow(1, 9, 20)?;
        assert_matches(&found, &(before.silu()? + residual.to_dtype(DType::F64)?)?, "some columns");

        let dequantized = weight.dequantize()?;
        let ids = Tensor::new(&[3u32, 0, 36], &CPU)?;
        assert_eq!(bits(&linear.weight_rows(&ids)?), bits(&dequantized.index_select(&ids, 0)?));
        assert_eq!(bits(linear.to_linear()?.weight()), bits(&dequantized));
    }
    Ok(())
}

fn linear_of_codes_has_gradient_of_input(device: &Device) -> Result<()> {
    let bias = numbers_of(9, &[OUTPUTS])?;
    let factors = numbers_of(12, &[2, OUTPUTS])?;
    for weight in weights()? {
        let linear = PackedLinear::from_quantized_on(&weight, Some(&bias.to_device(device)?), DType::F32, device)?;
        let xs = Var::from_tensor(&numbers_of(10, &[2, INPUTS])?.to_device(device)?)?;
        let loss = (linear.forward(&xs)? * factors.to_device(device)?)?.sum_all()?;
        let gradients = loss.backward()?;
        let found = gradients.get(&xs).expect("a gradient");
        let expected = factors.to_dtype(DType::F64)?.matmul(&weight.dequantize()?.to_dtype(DType::F64)?)?;
        assert_matches(found, &expected, "the gradient");
    }
    Ok(())
}

fn gated_linear_of_codes_matches_f64(device: &Device) -> Result<()> {
    let none = Tensor::zeros(OUTPUTS, DType::F32, &CPU)?;
    for weight in weights()? {
        let linear = || PackedLinear::from_quantized_on(&weight, None, DType::F32, device);
        let gated = PackedGatedLinear::new(linear()?, linear()?, Activation::Silu)?;
        for rows in [1, 9] {
            let xs = numbers_of(10, &[rows, INPUTS])?;
            let product = exact(&xs, DType::F32, &weight, &none)?;
            let found = gated.forward(&xs.to_device(device)?)?;
            assert_matches(&found, &(product.silu()? * &product)?, &format!("{rows} rows"));
        }
    }
    Ok(())
}

/// K-quants are left out: Candle's own product multiplies them on Metal.
fn linear_of_gguf_codes_matches_f64(device: &Device) -> Result<()> {
    for dtype in [GgmlDType::Q4_0, GgmlDType::Q5_1, GgmlDType::Q8_0] {
        let weight = QTensor::quantize(&numbers_of(1, &[OUTPUTS, INPUTS])?.to_device(device)?, dtype)?;
        let numbers = weight.dequantize(device)?.to_device(&CPU)?.to_dtype(DType::F64)?;
        let linear = PackedLinear::from_qtensor(weight, None)?;
        for rows in [1, 9] {
            let xs = numbers_of(10, &[rows, INPUTS])?;
            let found = linear.forward(&xs.to_device(device)?)?;
            assert_matches(
                &found,
                &xs.to_dtype(DType::F64)?.matmul(&numbers.t()?)?,
                &format!("{dtype:?}, {rows} rows"),
            );
        }
    }
    Ok(())
}
