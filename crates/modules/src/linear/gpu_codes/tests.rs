//! Linear layers of codes on the CUDA and Metal kernels, which emulators run on tensors of the CPU.

use candle_attention_cuda::{NewDevice, SourceFault, on_new_device};
use candle_attention_metal::launches_of_thread;
use candle_core::Var;
use candle_nn::Activation as Function;
use half::{bf16, f16};

use super::*;
use crate::linear::PackedGatedLinear;

/// Numbers of a fixed sequence, the same in each run.
struct Draws(u64);

impl Draws {
    fn next(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }

    /// Returns numbers from -1 to 1 with 11 bits.
    fn floats(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next(2001) as f32 / 1000.0 - 1.0).collect()
    }

    fn bytes(&mut self, count: usize, below: usize) -> Vec<u8> {
        (0..count).map(|_| self.next(below) as u8).collect()
    }

    fn tensor(&mut self, dims: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::from_vec(self.floats(dims.iter().product()), dims, &Device::Cpu)?.to_dtype(dtype)
    }
}

#[derive(Clone, Copy)]
enum Numbers {
    F16,
    BF16,
    F32,
    Whole,
    Bytes,
    Nested { groups_of_factor: usize },
}

impl Numbers {
    fn draw(self, count: usize, draws: &mut Draws) -> GroupNumbers {
        let floats = draws.floats(count);
        match self {
            Self::F16 => GroupNumbers::F16(floats.into_iter().map(f16::from_f32).collect()),
            Self::BF16 => GroupNumbers::BF16(floats.into_iter().map(bf16::from_f32).collect()),
            Self::F32 => GroupNumbers::F32(floats),
            Self::Whole => GroupNumbers::Whole(draws.bytes(count, 16)),
            Self::Bytes => GroupNumbers::Bytes { bytes: draws.bytes(count, 256), table: draws.floats(256) },
            Self::Nested { groups_of_factor } => GroupNumbers::Nested {
                numbers: draws.bytes(count, 64),
                middle: 32,
                factors: draws.floats(count / groups_of_factor).into_iter().map(f16::from_f32).collect(),
                groups_of_factor,
            },
        }
    }
}

enum Values {
    Signed,
    Zeros(Numbers),
    Minimums(Numbers),
    Table,
    Float8(Float8),
}

/// A format, the shape of a weight of it, and the dtype and the number of the inputs that it is multiplied by.
struct Form {
    bits: usize,
    group: usize,
    values: Values,
    scales: Numbers,
    outputs: usize,
    inputs: usize,
    dtype: DType,
    rows: usize,
}

impl Form {
    fn draw(&self, draws: &mut Draws) -> Result<QuantizedWeight> {
        let &Self { bits, group, outputs, inputs, .. } = self;
        let groups = outputs * inputs / group;
        let values = match self.values {
            Values::Signed => CodeValues::Signed,
            Values::Zeros(zeros) => CodeValues::Zeros(zeros.draw(groups, draws)),
            Values::Minimums(minimums) => CodeValues::Minimums(minimums.draw(groups, draws)),
            Values::Table => CodeValues::Table(std::array::from_fn(|_| draws.floats(1)[0])),
            Values::Float8(float) => CodeValues::Float8(float),
        };
        let codes = match self.values {
            // Without infinities and NaN, which another test has.
            Values::Float8(_) => {
                draws.bytes(outputs * inputs, 240).iter().map(|code| (code % 120) | ((code / 120) << 7)).collect()
            }
            _ => draws.bytes(outputs * inputs, 1 << bits),
        };
        let scales = self.scales.draw(groups, draws);
        QuantizedWeight { outputs, inputs, bits, codes, group, values, scales, input_order: None }.checked()
    }
}

/// Returns forms that together have each number of bits, each kind of values and of numbers, groups of all sizes,
/// and widths that are and are not multiples of what a lane loads.
fn forms() -> Vec<Form> {
    use DType::{BF16, F16, F32};
    let form = |bits, group, values, scales, (outputs, inputs), dtype, rows| Form {
        bits,
        group,
        values,
        scales,
        outputs,
        inputs,
        dtype,
        rows,
    };
    let nested = |groups_of_factor| Numbers::Nested { groups_of_factor };
    vec![
        form(4, 128, Values::Signed, Numbers::F16, (5, 2176), F32, 1),
        form(4, 32, Values::Zeros(Numbers::Whole), Numbers::BF16, (33, 96), BF16, 1),
        form(4, 64, Values::Zeros(Numbers::F32), Numbers::F32, (7, 128), F16, 1),
        form(8, 32, Values::Zeros(Numbers::F16), Numbers::F16, (4, 160), F32, 1),
        form(4, 32, Values::Minimums(nested(8)), nested(8), (9, 512), F32, 3),
        form(2, 16, Values::Minimums(nested(16)), nested(16), (6, 256), BF16, 1),
        form(5, 32, Values::Minimums(Numbers::BF16), Numbers::F16, (8, 1088), F32, 1),
        form(6, 16, Values::Signed, nested(16), (5, 256), F16, 8),
        form(3, 96, Values::Zeros(Numbers::Bytes), Numbers::F16, (5, 96), F32, 2),
        form(4, 64, Values::Table, Numbers::F32, (6, 192), F32, 1),
        form(3, 16, Values::Table, Numbers::Bytes, (5, 48), BF16, 1),
        form(8, 40, Values::Float8(Float8::E4M3), Numbers::BF16, (3, 80), F32, 1),
        form(8, 144, Values::Float8(Float8::E5M2), Numbers::Whole, (10, 144), BF16, 1),
        form(4, 3, Values::Signed, Numbers::F16, (4, 75), F32, 1),
        form(6, 24, Values::Minimums(Numbers::F32), Numbers::F32, (4, 72), F32, 1),
    ]
}

fn coded(weight: &QuantizedWeight, bias: Option<&Tensor>) -> Result<PackedLinear> {
    PackedLinear::with_codes(coded_weight(weight, &Device::Cpu)?, weight.input_order.as_deref(), bias, DType::F32)
}

fn bits_of(numbers: &Tensor) -> Result<Vec<u32>> {
    let floats = numbers.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    Ok(floats.into_iter().map(f32::to_bits).collect())
}

/// Checks numbers against others in f64, to the error of sums in f32 that are rounded to their dtype once.
fn assert_close(found: &Tensor, expected: &Tensor) -> Result<()> {
    assert_eq!(found.dims(), expected.dims());
    let allowed = match found.dtype() {
        DType::BF16 => 4e-3,
        DType::F16 => 5e-4,
        _ => 1e-6,
    };
    let largest = expected.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()?;
    let difference = (found.to_dtype(DType::F64)? - expected)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>()?;
    assert!(difference <= allowed * largest, "{difference:e} of {largest}");
    Ok(())
}

/// Returns `xs weightᵀ` in f64.
fn exact(xs: &Tensor, weight: &QuantizedWeight) -> Result<Tensor> {
    xs.to_dtype(DType::F64)?.matmul(&weight.dequantize()?.to_dtype(DType::F64)?.t()?)
}

#[test]
fn cuda_codes_have_the_numbers_of_the_quantised_weight() -> Result<()> {
    let mut draws = Draws(1);
    for form in forms() {
        let weight = form.draw(&mut draws)?;
        let on_device = coded_weight(&weight, &Device::Cpu)?;
        let found = dequantized(&on_device, form.dtype)?;
        assert_eq!(bits_of(&found)?, bits_of(&weight.dequantize()?.to_dtype(form.dtype)?)?);
        let code_bytes = weight.outputs * weight.inputs.next_multiple_of(32) * weight.bits / 8;
        let numbers = weight.outputs * weight.inputs / weight.group;
        assert!(on_device.memory() <= code_bytes + 8 * numbers + 2 * 4 * 256 + 64);
    }
    Ok(())
}

#[test]
fn cuda_rows_of_codes_match_products_with_the_numbers() -> Result<()> {
    let mut draws = Draws(2);
    for form in forms() {
        let weight = form.draw(&mut draws)?;
        let linear = coded(&weight, None)?;
        let xs = draws.tensor(&[form.rows, form.inputs], form.dtype)?;
        let call = linear.cuda_rows(&xs, 0..form.outputs, None).expect("the kernel runs the call");
        assert_close(&call.run()?, &exact(&xs, &weight)?)?;
    }
    Ok(())
}

#[test]
fn cuda_rows_of_codes_do_not_depend_on_other_rows() -> Result<()> {
    let mut draws = Draws(3);
    let form = &forms()[4];
    let linear = coded(&form.draw(&mut draws)?, None)?;
    let run = |xs: &Tensor| linear.cuda_rows(xs, 0..form.outputs, None).expect("the kernel runs the call").run();
    let all = draws.tensor(&[3, form.inputs], DType::F32)?;
    let together = run(&all)?;
    for row in 0..3 {
        assert_eq!(bits_of(&together.get(row)?)?, bits_of(&run(&all.get(row)?)?)?);
    }
    Ok(())
}

#[test]
fn cuda_rows_of_codes_with_epilogue_and_input_order_match_separate_operations() -> Result<()> {
    let mut draws = Draws(4);
    let form = &forms()[1];
    let inputs = form.inputs as u32;
    let order = (0..inputs).map(|column| column * 35 % inputs).collect();
    let weight = QuantizedWeight { input_order: Some(order), ..form.draw(&mut draws)? }.checked()?;
    let bias = draws.tensor(&[form.outputs], DType::BF16)?;
    let linear = coded(&weight, Some(&bias))?.with_activation(Function::Silu)?;
    let xs = draws.tensor(&[1, 1, form.inputs], DType::BF16)?;
    let residual = draws.tensor(&[1, 1, 20], DType::BF16)?;
    let found = linear.cuda_rows(&xs, 9..29, Some(&residual)).expect("the kernel runs the call").run()?;
    let double = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F64);
    let before = (exact(&xs.get(0)?, &weight)?.flatten_all()? + double(&bias)?)?.narrow(0, 9, 20)?;
    let expected = (before.silu()? + double(&residual)?)?.reshape((1, 1, 20))?;
    assert_close(&found, &expected)?;

    let dequantized = weight.dequantize()?;
    assert_eq!(bits_of(linear.to_linear()?.weight())?, bits_of(&dequantized)?);
    let ids = Tensor::new(&[3u32, 0, 32], &Device::Cpu)?;
    assert_eq!(bits_of(&linear.weight_rows(&ids)?)?, bits_of(&dequantized.index_select(&ids, 0)?)?);
    Ok(())
}

#[test]
fn cuda_rows_of_gated_layer_of_codes_match_separate_operations() -> Result<()> {
    let mut draws = Draws(5);
    let form = &forms()[9];
    let (gate, up) = (form.draw(&mut draws)?, form.draw(&mut draws)?);
    let xs = draws.tensor(&[1, form.inputs], DType::F32)?;
    let expected = (exact(&xs, &gate)?.silu()? * exact(&xs, &up)?)?;
    let gated = PackedGatedLinear::new(coded(&gate, None)?, coded(&up, None)?, Function::Silu)?;
    let call = gated.cuda_rows(&xs).expect("the kernel runs the call");
    assert_close(&call.run()?, &expected)
}

#[test]
fn metal_codes_have_the_numbers_of_the_quantised_weight() -> Result<()> {
    let mut draws = Draws(1);
    for form in forms() {
        let weight = form.draw(&mut draws)?;
        let call = DequantizeCall { weight: coded_weight(&weight, &Device::Cpu)?, dtype: form.dtype };
        let found = MetalRows::Dequantize(call).forward()?;
        assert_eq!(found.dtype(), form.dtype);
        assert_eq!(bits_of(&found)?, bits_of(&weight.dequantize()?.to_dtype(form.dtype)?)?);
    }
    Ok(())
}

#[test]
fn metal_rows_of_codes_match_products_with_the_numbers() -> Result<()> {
    let mut draws = Draws(2);
    for form in forms() {
        let weight = form.draw(&mut draws)?;
        let linear = coded(&weight, None)?;
        let xs = draws.tensor(&[form.rows, form.inputs], form.dtype)?;
        let before = launches_of_thread();
        let found = linear.metal_rows(&xs, 0..form.outputs, None).expect("the kernel runs the call")?;
        assert_eq!(launches_of_thread(), before + 1);
        assert_close(&found, &exact(&xs, &weight)?)?;
    }
    let many = draws.tensor(&[9, 2176], DType::F32)?;
    let linear = coded(&forms()[0].draw(&mut draws)?, None)?;
    assert!(linear.metal_rows(&many, 0..5, None).is_none(), "more rows than the kernel computes");
    let tracked = Var::from_tensor(&many.narrow(0, 0, 1)?)?;
    assert!(linear.metal_rows(&tracked, 0..5, None).is_none(), "gradients");
    Ok(())
}

#[test]
fn metal_rows_of_codes_with_epilogue_and_input_order_match_separate_operations() -> Result<()> {
    let mut draws = Draws(4);
    let form = &forms()[1];
    let order = (0..form.inputs as u32).map(|column| column * 35 % form.inputs as u32).collect();
    let weight = QuantizedWeight { input_order: Some(order), ..form.draw(&mut draws)? }.checked()?;
    let bias = draws.tensor(&[form.outputs], DType::BF16)?;
    let linear = coded(&weight, Some(&bias))?.with_activation(Function::Silu)?;
    let xs = draws.tensor(&[1, 1, form.inputs], DType::BF16)?;
    let residual = draws.tensor(&[1, 1, 20], DType::BF16)?;
    let found = linear.metal_rows(&xs, 9..29, Some(&residual)).expect("the kernel runs the call")?;
    let double = |tensor: &Tensor| tensor.flatten_all()?.to_dtype(DType::F64);
    let before = (exact(&xs.get(0)?, &weight)?.flatten_all()? + double(&bias)?)?.narrow(0, 9, 20)?;
    assert_close(&found, &(before.silu()? + double(&residual)?)?.reshape((1, 1, 20))?)
}

#[test]
fn metal_rows_of_gated_layer_of_codes_match_separate_operations() -> Result<()> {
    let mut draws = Draws(5);
    // Codes of a table, of which each weight has its own, and codes of two planes.
    for form in [&forms()[9], &forms()[7]] {
        let (gate, up) = (form.draw(&mut draws)?, form.draw(&mut draws)?);
        let xs = draws.tensor(&[form.rows, form.inputs], DType::F32)?;
        let expected = (exact(&xs, &gate)?.silu()? * exact(&xs, &up)?)?;
        let gated = PackedGatedLinear::new(coded(&gate, None)?, coded(&up, None)?, Function::Silu)?;
        assert_close(&gated.metal_rows(&xs).expect("the kernel runs the call")?, &expected)?;
    }
    Ok(())
}

#[test]
fn panels_of_codes_have_the_outputs_and_the_gradients_of_the_numbers() -> Result<()> {
    let mut draws = Draws(6);
    let form = &forms()[0];
    let weight = form.draw(&mut draws)?;
    let on_device = coded_weight(&weight, &Device::Cpu)?;
    let bias = Var::from_tensor(&draws.tensor(&[form.outputs], DType::F32)?)?;
    let xs = Var::from_tensor(&draws.tensor(&[2, 6, form.inputs], DType::F32)?)?;
    let factors = draws.tensor(&[2, 6, form.outputs], DType::F32)?;
    let plain = PackedLinear::new(&weight.dequantize()?, Some(bias.as_tensor()))?;
    let expected = plain.product(&xs, 0..form.outputs, None)?;
    let of_expected = (&expected * &factors)?.backward()?;
    for panel_bytes in [PANEL_BYTES, 2 * 4 * form.inputs, 1] {
        let found = affine_in_panels(&xs, on_device.clone(), Some(bias.as_tensor()), panel_bytes)?;
        assert_close(&found, &expected.to_dtype(DType::F64)?)?;
        let gradients = (&found * &factors)?.backward()?;
        for variable in [&xs, &bias] {
            let [own, other] = [&gradients, &of_expected].map(|all| all.get(variable).expect("a gradient"));
            assert_close(own, &other.to_dtype(DType::F64)?)?;
        }
    }
    Ok(())
}

#[test]
fn cuda_codes_of_float8_that_are_not_finite_stay_so() -> Result<()> {
    let codes = (0..=255).collect();
    let scales = GroupNumbers::F32(vec![1.0]);
    for float in [Float8::E4M3, Float8::E5M2] {
        let values = CodeValues::Float8(float);
        let (outputs, inputs, bits, group, input_order) = (1, 256, 8, 256, None);
        let weight = QuantizedWeight {
            outputs,
            inputs,
            bits,
            group,
            values,
            input_order,
            codes: Vec::clone(&codes),
            scales: scales.clone(),
        };
        let found = dequantized(&coded_weight(&weight, &Device::Cpu)?, DType::F32)?.flatten_all()?;
        for (code, number) in found.to_vec1::<f32>()?.into_iter().enumerate() {
            let expected = float.number(code as u8);
            assert!(number == expected || number.is_nan() && expected.is_nan(), "{code}: {number}, {expected}");
        }
    }
    Ok(())
}

/// Pairs of groups with the zeros and scales of the first.
const WRONG_GROUPS: SourceFault = SourceFault {
    file: "code_numbers.cuh",
    text: "const i64 at = row * groups + group;",
    replacement: "const i64 at = row * groups + group / 2 * 2;",
};

#[test]
fn wrong_kernel_of_codes_at_first_use_leaves_weights_dequantized() -> Result<()> {
    if let Err(reason) = is_available(&Device::Cpu) {
        println!("skipped: {reason}");
        return Ok(());
    }
    let folder = tempfile::tempdir()?;
    let wrong = NewDevice::new("a device with wrong groups", folder.path()).with_fault(WRONG_GROUPS);
    assert!(!on_new_device(&wrong, || PackedLinear::has_kernels_of_codes(&Device::Cpu)));
    assert!(PackedLinear::has_kernels_of_codes(&Device::Cpu), "where the kernels have been run");
    Ok(())
}
