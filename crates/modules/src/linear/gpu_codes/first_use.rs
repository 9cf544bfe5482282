//! The cases of layers whose weights are codes.

use candle_attention_cuda::{CodedLinear, CodedWeight};
use candle_attention_metal::MetalRows;
use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};

use super::{CudaRows, DequantizeCall, LinearCodesCall, RowsKernel, coded_weight, dequantized};
use crate::base::first_use::{ComparedResult, FirstUseCase, case_numbers};
use crate::base::{CodeValues, GroupNumbers, QuantizedWeight};

/// The case of linear layers of codes: the numbers of weights, and products with them.
pub(crate) const CODES_CASE: FirstUseCase =
    FirstUseCase { operation: "linear layer of codes", is_new: true, run: cuda_case };

/// The case of linear layers of codes on Metal.
pub(crate) const METAL_CODES_CASE: FirstUseCase =
    FirstUseCase { operation: "linear layer of codes on Metal", is_new: true, run: metal_case };

/// The outputs and inputs of the weights.
const OUTPUTS: usize = 20;
const INPUTS: usize = 512;

/// Computes codes of 4 bits with zeros, as GPTQ and AWQ store them, and of 6 bits with nested scales, as GGUF files do,
/// by the CUDA kernels and by the CPU.
fn cuda_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let mut compared = Vec::new();
    for weight in [weight_with_zeros()?, weight_with_nested_scales()?] {
        let product = |call: LinearCodesCall| -> Result<Tensor> {
            call.plan()?;
            CudaRows { kernel: RowsKernel::Codes(call.into()), shape: (1, OUTPUTS).into() }.run()
        };
        compared.extend(compare(&weight, 1, device, dtype, product, |coded| dequantized(coded, dtype))?);
    }
    Ok(compared)
}

/// Computes the codes of [`cuda_case`], and codes of a table of which rows are no multiple of what a thread loads, by
/// the Metal kernels and by the CPU.
fn metal_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let weights = [(1, weight_with_zeros()?), (3, weight_with_nested_scales()?), (2, weight_with_table()?)];
    let mut compared = Vec::new();
    for (rows, weight) in weights {
        let product = |call: LinearCodesCall| MetalRows::Codes(call.into()).forward();
        let numbers =
            |coded: &CodedWeight| MetalRows::Dequantize(DequantizeCall { weight: coded.clone(), dtype }).forward();
        compared.extend(compare(&weight, rows, device, dtype, product, numbers)?);
    }
    Ok(compared)
}

/// Computes a product of some rows, and the numbers of the weight, by kernels and by the CPU.
fn compare(
    weight: &QuantizedWeight,
    rows: usize,
    device: &Device,
    dtype: DType,
    product: impl Fn(LinearCodesCall) -> Result<Tensor>,
    numbers: impl Fn(&CodedWeight) -> Result<Tensor>,
) -> Result<Vec<ComparedResult>> {
    let xs = case_numbers(&[rows, weight.inputs], 1, dtype)?;
    let expected_numbers = weight.dequantize()?;
    let expected = xs.to_dtype(DType::F64)?.matmul(&expected_numbers.to_dtype(DType::F64)?.t()?)?;
    let coded = coded_weight(weight, device)?;
    let linear = CodedLinear { weight: coded.clone(), bias: None };
    let call = LinearCodesCall { xs: xs.to_device(device)?, linear, activation: None, up: None, residual: None };
    Ok(vec![
        ComparedResult { name: "the product", found: product(call)?, expected },
        ComparedResult { name: "the numbers of the weight", found: numbers(&coded)?, expected: expected_numbers },
    ])
}

fn weight_with_zeros() -> Result<QuantizedWeight> {
    let groups = OUTPUTS * INPUTS / 32;
    let weight = QuantizedWeight {
        outputs: OUTPUTS,
        inputs: INPUTS,
        bits: 4,
        codes: whole_numbers(OUTPUTS * INPUTS, 2, 16)?,
        group: 32,
        values: CodeValues::Zeros(GroupNumbers::Whole(whole_numbers(groups, 3, 16)?)),
        scales: GroupNumbers::F16(halves(groups, 4)?),
        input_order: None,
    };
    weight.checked()
}

fn weight_with_nested_scales() -> Result<QuantizedWeight> {
    let groups = OUTPUTS * INPUTS / 16;
    let weight = QuantizedWeight {
        outputs: OUTPUTS,
        inputs: INPUTS,
        bits: 6,
        codes: whole_numbers(OUTPUTS * INPUTS, 5, 64)?,
        group: 16,
        values: CodeValues::Signed,
        scales: GroupNumbers::Nested {
            numbers: whole_numbers(groups, 6, 256)?,
            middle: 128,
            factors: halves(groups / 16, 7)?,
            groups_of_factor: 16,
        },
        input_order: None,
    };
    weight.checked()
}

fn weight_with_table() -> Result<QuantizedWeight> {
    let inputs = 75;
    let weight = QuantizedWeight {
        outputs: OUTPUTS,
        inputs,
        bits: 4,
        codes: whole_numbers(OUTPUTS * inputs, 8, 16)?,
        group: 15,
        values: CodeValues::Table(std::array::from_fn(|code| code as f32 * code as f32 / 128.0 - 1.0)),
        scales: GroupNumbers::BF16(vec![bf16::from_f32(0.75); OUTPUTS * inputs / 15]),
        input_order: None,
    };
    weight.checked()
}

/// Returns fixed whole numbers below a limit.
fn whole_numbers(count: usize, seed: u64, below: usize) -> Result<Vec<u8>> {
    let numbers = case_numbers(&[count], seed, DType::F32)?.to_vec1::<f32>()?;
    Ok(numbers
        .into_iter()
        .map(|number| (((number + 1.5) / 3.0 * below as f32) as usize).min(below - 1) as u8)
        .collect())
}

/// Returns fixed numbers in f16, so small that products are far from its largest number.
fn halves(count: usize, seed: u64) -> Result<Vec<f16>> {
    let numbers: Tensor = case_numbers(&[count], seed, DType::F32)?;
    Ok(numbers.to_vec1::<f32>()?.into_iter().map(|number| f16::from_f32(0.01 * number)).collect())
}
