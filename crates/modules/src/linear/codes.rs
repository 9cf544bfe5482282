//! Weights of codes with scales, as quantised checkpoints store them, for the CPU kernels.

use candle_core::{DType, Device, Result, Tensor};
use half::f16;

use super::product::{choose_instruction_set, kernel_error};
use super::{OP, PackedLinear, Weight};
use crate::base::{CodeValues, Dim, Expect, Float8, GroupNumbers, QuantizedWeight, check_memory};
use candle_attention_kernels::linear::{
    Codes, NESTED_BLOCK, NestedScales, PackedWeight, Scales, Values, WeightShape,
};

/// The whole number that stands for 0 in nested scales without minimums, as the kernels read them.
const NESTED_ZERO: i16 = 128;
/// The largest whole number of nested scales with minimums, and the largest code with them.
const LARGEST_NESTED_SCALE: u8 = 63;
const LARGEST_NESTED_CODE: u8 = 127;

impl PackedLinear {
    /// Packs a quantised weight, with `bias` (out,) in f32, bf16 or f16, for inputs in f32, bf16 and f16.
    ///
    /// Codes stay codes: of up to 4 bits they take 4, of 5 to 8 bits 8, with their scales beside them. Products are
    /// summed in f32 and rounded to the input's dtype once, with the bits of [`new`](Self::new) for the
    /// [dequantised](QuantizedWeight::dequantize) numbers in f32. Gradients of the input are products of the same kind.
    ///
    /// The numbers are dequantised to f32 with a bias that is tracked for gradients, and where the kernels would not
    /// have their bits: for groups that are no multiple of 16, and floats of 8 bits that are infinite or NaN.
    ///
    /// # Errors
    /// For a weight whose parts do not fit each other, a bias of another shape or dtype or on another device than the
    /// CPU, and if memory is short.
    pub fn from_quantized(weight: &QuantizedWeight, bias: Option<&Tensor>) -> Result<Self> {
        let &QuantizedWeight { outputs, inputs, .. } = weight;
        let shape = WeightShape { outputs, inputs };
        let wide_bias = match bias {
            Some(bias) => {
                let expect = Expect::one(OP, "bias", bias).shape(&[Dim::Is(outputs)])?;
                expect.float("")?.same_device("the quantised weight", &Device::Cpu)?;
                Some(bias.to_dtype(DType::F32)?)
            }
            None => None,
        };
        let packed = match wide_bias.as_ref().is_some_and(Tensor::track_op) {
            false => pack_quantized(weight, shape)?,
            true => None,
        };
        let linear = match packed {
            Some(packed) => {
                let input_order = match &weight.input_order {
                    Some(order) => Some(Tensor::new(order.as_slice(), &Device::Cpu)?),
                    None => None,
                };
                let own = Weight::Packed(packed.into());
                let linear = Self::from_checked(own, wide_bias.as_ref(), shape, DType::F32, &Device::Cpu)?;
                Self { input_order, ..linear }
            }
            None => {
                check_memory(OP, format_args!("a weight of shape {:?}", (outputs, inputs)), &[outputs, inputs])?;
                Self::new(&weight.dequantize()?, wide_bias.as_ref())?
            }
        };
        Ok(Self { is_quantized: true, ..linear })
    }
}

/// Packs a weight; `None` where the kernels would not have the bits of its numbers.
fn pack_quantized(weight: &QuantizedWeight, shape: WeightShape) -> Result<Option<PackedWeight>> {
    let instruction_set = choose_instruction_set(None, DType::F32)?;
    let is_nested = has_nested_form(weight);
    let scales = KernelNumbers::new(&weight.scales, weight, is_nested);
    let offsets = match &weight.values {
        CodeValues::Zeros(numbers) => Some(KernelNumbers::F32(to_f32(numbers))),
        CodeValues::Minimums(numbers) => Some(KernelNumbers::new(numbers, weight, is_nested)),
        CodeValues::Signed | CodeValues::Table(_) | CodeValues::Float8(_) => None,
    };
    let values = match (&weight.values, &offsets) {
        (CodeValues::Zeros(_), Some(KernelNumbers::F32(zeros))) => Values::Zeros(zeros),
        (_, Some(minimums)) => Values::Minimums(minimums.as_scales()),
        (CodeValues::Table(table), None) => Values::Table(table),
        (CodeValues::Float8(Float8::E4M3), None) => Values::E4M3,
        (CodeValues::Float8(Float8::E5M2), None) => Values::E5M2,
        (_, None) => Values::Signed,
    };
    let &QuantizedWeight { bits, ref codes, group, .. } = weight;
    let all = Codes { bits, codes, group, values, scales: scales.as_scales() };
    PackedWeight::from_codes(&all, shape, instruction_set).map_err(kernel_error)
}

/// The numbers of groups in a form that the kernels take.
enum KernelNumbers<'a> {
    Own(Scales<'a>),
    F32(Vec<f32>),
    Nested { factors: Vec<f16>, numbers: Vec<u8> },
}

impl<'a> KernelNumbers<'a> {
    fn new(all: &'a GroupNumbers, weight: &QuantizedWeight, is_nested: bool) -> Self {
        match all {
            GroupNumbers::F16(numbers) => Self::Own(Scales::F16(numbers)),
            GroupNumbers::BF16(numbers) => Self::Own(Scales::BF16(numbers)),
            GroupNumbers::F32(numbers) => Self::Own(Scales::F32(numbers)),
            GroupNumbers::Bytes { bytes, table } => match table.as_slice().try_into() {
                Ok(table) => Self::Own(Scales::Bytes { bytes, table }),
                Err(_) => Self::F32(to_f32(all)),
            },
            GroupNumbers::Nested { numbers, middle, factors, groups_of_factor } if is_nested => {
                let is_signed = matches!(weight.values, CodeValues::Signed);
                let added = if is_signed { NESTED_ZERO - i16::from(*middle) } else { 0 };
                let repeats = groups_of_factor * weight.group / NESTED_BLOCK;
                Self::Nested {
                    factors: factors.iter().flat_map(|&factor| std::iter::repeat_n(factor, repeats)).collect(),
                    numbers: numbers.iter().map(|&number| (i16::from(number) + added) as u8).collect(),
                }
            }
            GroupNumbers::Whole(_) | GroupNumbers::Nested { .. } => Self::F32(to_f32(all)),
        }
    }

    fn as_scales(&self) -> Scales<'_> {
        match self {
            Self::Own(scales) => *scales,
            Self::F32(numbers) => Scales::F32(numbers),
            Self::Nested { factors, numbers } => Scales::Nested(NestedScales { factors, numbers }),
        }
    }
}

fn to_f32(numbers: &GroupNumbers) -> Vec<f32> {
    (0..numbers.len()).map(|group| numbers.get(group)).collect()
}

/// Returns whether the kernels take the nested scales of a weight, and its minimums if it has any, as they are.
fn has_nested_form(weight: &QuantizedWeight) -> bool {
    let &QuantizedWeight { inputs, group, ref scales, ref values, .. } = weight;
    if !matches!(group, 16 | 32) || !inputs.is_multiple_of(NESTED_BLOCK) {
        return false;
    }
    let has_whole_blocks = |per: usize| (per * group).is_multiple_of(NESTED_BLOCK);
    let GroupNumbers::Nested { numbers, middle, groups_of_factor, .. } = scales else { return false };
    if !has_whole_blocks(*groups_of_factor) {
        return false;
    }
    match values {
        CodeValues::Signed => {
            let added = NESTED_ZERO - i16::from(*middle);
            numbers.iter().all(|&number| (0..256).contains(&(i16::from(number) + added)))
        }
        CodeValues::Minimums(GroupNumbers::Nested { middle: 0, groups_of_factor: per, .. }) => {
            *middle == 0
                && has_whole_blocks(*per)
                && numbers.iter().all(|&number| number <= LARGEST_NESTED_SCALE)
                && weight.codes.iter().all(|&code| code <= LARGEST_NESTED_CODE)
        }
        _ => false,
    }
}
