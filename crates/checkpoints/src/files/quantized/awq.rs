//! AWQ: `qweight` (in, out · bits / 32) of I32 with `qzeros` (groups, out · bits / 32) and `scales` (groups, out).
//!
//! A number is `(code - zero) · scale`. In a word of 4 bits, the codes of 8 outputs are in the order 0, 2, 4, 6, 1, 3,
//! 5, 7. Layers of the version `gemv` have `qweight` (out, in · bits / 32), in the order of the inputs, with `scales`
//! (out, groups) and `qzeros` (out, groups · bits / 32), both of which may have more columns than there are groups.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;

use super::bits::append_stream;
use super::groups::Groups;
use super::packed_words::{Packing, packing};
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat, awq_fast};
use candle_attention_modules::base::{CodeValues, GroupNumbers, QuantizedWeight};

/// The output of each code in a word of 4 bits.
const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// The sizes of a layer.
#[derive(Debug, Clone, Copy)]
struct AwqSizes {
    outputs: usize,
    inputs: usize,
    bits: usize,
    /// The number of inputs of a group.
    group: usize,
}

/// A layer of the version `gemm`.
#[derive(Debug)]
struct Gemm(AwqSizes);

/// A layer of the version `gemv`.
#[derive(Debug)]
struct Gemv {
    sizes: AwqSizes,
    /// The number of columns of `scales`.
    columns: usize,
}

/// Finds a layer of AWQ.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    if tensors.get("qweight").is_none() {
        return Ok(None);
    }
    let object = module.settings.object();
    let number = |keys: [&str; 2]| keys.iter().find_map(|key| object[*key].as_u64()).map(|number| number as usize);
    let bits = number(["bits", "w_bit"]).unwrap_or(4);
    let group = number(["group_size", "q_group_size"]);
    let packing = match packing(module.settings)? {
        Some(packing @ (Packing::AwqGemm | Packing::AwqGemv)) => packing,
        Some(Packing::AwqGemvFast) => return awq_fast::find(module, bits, group).map(Some),
        Some(Packing::Gptq { .. }) | None => return Ok(None),
    };
    let [Some(codes), Some(zeros), Some(scales)] = ["qweight", "qzeros", "scales"].map(|name| tensors.matrix(name))
    else {
        bail!("expected `qweight`, `qzeros` and `scales` of two dimensions, found {}", tensors.described())
    };
    let are_words =
        ["qweight", "qzeros"].iter().all(|name| tensors.get(name).is_some_and(|own| own.dtype == Dtype::I32));
    let format: Option<(AwqSizes, Arc<dyn QuantizedFormat>)> = match packing {
        _ if !are_words || !matches!(bits, 2..=8) => None,
        Packing::AwqGemm => gemm(codes, zeros, scales, bits).map(|sizes| (sizes, Arc::new(Gemm(sizes)) as _)),
        _ => gemv(codes, zeros, scales, bits, group).map(|sizes| {
            let format: Arc<dyn QuantizedFormat> = Arc::new(Gemv { sizes, columns: scales[1] });
            (sizes, format)
        }),
    };
    let Some((AwqSizes { outputs, inputs, .. }, format)) = format else {
        let shapes = match packing {
            Packing::AwqGemm => {
                "`qweight` (in, out · bits / 32) and `qzeros` (groups, out · bits / 32) of I32 and `scales` (groups, out)"
            }
            _ => {
                "`qweight` (out, in · bits / 32) and `qzeros` (out, groups · bits / 32) of I32 and `scales` (out, groups)"
            }
        };
        bail!("expected codes of {bits} bits, {shapes}, found {}", tensors.described())
    };
    Ok(Some(Found { outputs, inputs, format, tensors: vec!["qweight", "qzeros", "scales"] }))
}

/// Returns the sizes of a layer of the version `gemm`; `None` where the shapes do not fit each other.
fn gemm(codes: [usize; 2], zeros: [usize; 2], scales: [usize; 2], bits: usize) -> Option<AwqSizes> {
    let [inputs, words] = codes;
    let [groups, outputs] = scales;
    let is_whole = groups > 0 && inputs > 0 && inputs.is_multiple_of(groups);
    if !is_whole || zeros != [groups, words] || outputs == 0 || outputs.checked_mul(bits)?.div_ceil(32) != words {
        return None;
    }
    // The order of the codes in a word is that of whole words.
    if bits == 4 && !outputs.is_multiple_of(ORDER.len()) {
        return None;
    }
    Some(AwqSizes { outputs, inputs, bits, group: inputs / groups })
}

/// Returns the sizes of a layer of the version `gemv`; `None` where the shapes do not fit each other.
fn gemv(
    codes: [usize; 2],
    zeros: [usize; 2],
    scales: [usize; 2],
    bits: usize,
    group: Option<usize>,
) -> Option<AwqSizes> {
    let [outputs, words] = codes;
    let inputs = words.checked_mul(32)? / bits;
    let group = group.unwrap_or(inputs);
    let is_whole = outputs > 0 && inputs > 0 && group > 0 && inputs.is_multiple_of(group);
    let fits_groups = scales[1] >= inputs / group.max(1) && scales[1].checked_mul(bits)?.div_ceil(32) == zeros[1];
    (is_whole && fits_groups && scales[0] == outputs && zeros[0] == outputs).then_some(AwqSizes {
        outputs,
        inputs,
        bits,
        group,
    })
}

impl AwqSizes {
    /// Returns the codes of words whose rows have codes of all outputs, in the order of the outputs.
    fn codes_of_outputs(self, words: &[u8]) -> Vec<u8> {
        let Self { outputs, bits, .. } = self;
        let words_of_row = (outputs * bits).div_ceil(32);
        let mut codes = Vec::with_capacity(words.len() * 8 / bits);
        for row in words.chunks_exact(words_of_row * 4) {
            let start = codes.len();
            append_stream(row, bits, &mut codes);
            codes.truncate(start + outputs);
            if bits == 4 {
                for word in codes[start..].chunks_exact_mut(ORDER.len()) {
                    let mut sorted = [0; ORDER.len()];
                    for (code, output) in word.iter().zip(ORDER) {
                        sorted[output] = *code;
                    }
                    word.copy_from_slice(&sorted);
                }
            }
        }
        codes
    }

    /// Returns the weight of codes (out, in) and the zeros and scales of its groups.
    fn weight(self, codes: Vec<u8>, zeros: GroupNumbers, scales: GroupNumbers) -> QuantizedWeight {
        let Self { outputs, inputs, bits, group } = self;
        let values = CodeValues::Zeros(zeros);
        // A code of 7 bits is one of 8.
        let bits = if bits == 7 { 8 } else { bits };
        QuantizedWeight { outputs, inputs, bits, codes, group, values, scales, input_order: None }
    }
}

impl QuantizedFormat for Gemm {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let AwqSizes { outputs, inputs, group, .. } = self.0;
        let by_input = self.0.codes_of_outputs(&tensors.bytes("qweight")?);
        let codes = transposed(&by_input, inputs, outputs);
        drop(by_input);
        let zeros = GroupNumbers::Whole(self.0.codes_of_outputs(&tensors.bytes("qzeros")?));
        let groups = Groups::of_neighbours(inputs, group);
        let at = |output: usize, index: usize| index * outputs + output;
        let scales = groups.numbers(outputs, &tensors.numbers("scales")?, at)?;
        Ok(self.0.weight(codes, groups.numbers(outputs, &zeros, at)?, scales))
    }
}

impl QuantizedFormat for Gemv {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { sizes, columns } = self;
        let AwqSizes { outputs, inputs, bits, group } = sizes;
        let mut codes = Vec::with_capacity(outputs * inputs);
        append_stream(&tensors.bytes("qweight")?, bits, &mut codes);
        let zero_words = tensors.bytes("qzeros")?;
        let mut zeros = Vec::with_capacity(outputs * columns);
        for row in zero_words.chunks_exact(zero_words.len() / outputs) {
            let end = zeros.len() + columns;
            append_stream(row, bits, &mut zeros);
            zeros.truncate(end);
        }
        let groups = Groups::of_neighbours(inputs, group);
        let at = |output: usize, index: usize| output * columns + index;
        let scales = groups.numbers(outputs, &tensors.numbers("scales")?, at)?;
        Ok(sizes.weight(codes, groups.numbers(outputs, &GroupNumbers::Whole(zeros), at)?, scales))
    }
}

/// Returns the codes of a matrix (rows, columns) as a matrix (columns, rows).
fn transposed(codes: &[u8], rows: usize, columns: usize) -> Vec<u8> {
    // Codes of a cache line.
    const BLOCK: usize = 64;
    let mut transposed = vec![0; codes.len()];
    for first in (0..columns).step_by(BLOCK) {
        let last = columns.min(first + BLOCK);
        for row in 0..rows {
            for column in first..last {
                transposed[column * rows + row] = codes[row * columns + column];
            }
        }
    }
    transposed
}
