//! The codes, scales and minimums of a weight in the form that the CPU kernels take.

use half::f16;

use crate::base::{CodeValues, Float8, GroupNumbers, QuantizedWeight};
use candle_attention_kernels::linear::{Codes, NESTED_BLOCK, NestedScales, Scales, Values};

/// The whole number that is read as 0 in nested scales without minimums, as the kernels read them.
const NESTED_ZERO: i16 = 128;
/// The largest whole number of nested scales with minimums, and the largest code with them.
const LARGEST_NESTED_SCALE: u8 = 63;
const LARGEST_NESTED_CODE: u8 = 127;

/// Calls a function with the codes of a weight in the form that the kernels take.
pub(super) fn with_kernel_codes<T>(weight: &QuantizedWeight, call: impl FnOnce(&Codes) -> T) -> T {
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
    call(&Codes { bits, codes, group, values, scales: scales.as_scales() })
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
                let has_minimums = matches!(weight.values, CodeValues::Minimums(_));
                let added = if has_minimums { 0 } else { NESTED_ZERO - i16::from(*middle) };
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
        CodeValues::Signed | CodeValues::Table(_) => {
            let added = NESTED_ZERO - i16::from(*middle);
            numbers.iter().all(|&number| (0..256).contains(&(i16::from(number) + added)))
        }
        CodeValues::Minimums(GroupNumbers::Nested { middle: 0, groups_of_factor: per, .. }) => {
            *middle == 0
                && has_whole_blocks(*per)
                && numbers.iter().copied().max() <= Some(LARGEST_NESTED_SCALE)
                && weight.codes.iter().copied().max() <= Some(LARGEST_NESTED_CODE)
        }
        _ => false,
    }
}
