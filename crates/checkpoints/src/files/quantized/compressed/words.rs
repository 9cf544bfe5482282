//! Integers of 1 to 8 bits in words of 32.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;

use super::super::bits::{append_stream, transpose_words};
use super::super::groups::Groups;
use super::super::tensors::Tensors;
use super::super::{Found, Module, QuantizedFormat, passed_over};
use super::{CompressedSizes, scheme_of, sizes};
use candle_attention_modules::base::{CodeValues, GroupNumbers, QuantizedWeight};

/// How codes lie in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Packed {
    /// One after the other, over the ends of words.
    Stream,
    /// Without codes over the ends of words, as older versions write.
    WholeCodes,
}

/// A weight in words.
#[derive(Debug)]
struct WordWeight {
    /// The sizes, with the outputs of all matrices, one after the other.
    sizes: CompressedSizes,
    /// The number of matrices: 1, or that of experts.
    matrices: usize,
    bits: usize,
    packed: Packed,
}

pub(super) fn find(module: &Module) -> Result<Found> {
    let tensors = module.tensors;
    let scheme = scheme_of(module)?;
    let bits = scheme.bits;
    let shape = tensors.get("weight_shape").map(|_| tensors.whole("weight_shape")).transpose()?;
    let stored = tensors.get("weight_packed").map(|own| own.shape.as_slice());
    let is_whole = |number: &i64| usize::try_from(*number).unwrap_or(0);
    let shape: Vec<usize> = shape.iter().flatten().map(is_whole).collect();
    let (Some([experts @ .., rows, words]), [of_experts @ .., outputs, inputs]) = (stored, shape.as_slice()) else {
        bail!("expected `weight_packed` of two dimensions and `weight_shape` (2), found {}", tensors.described())
    };
    if experts.len() > 1 || experts != of_experts || experts == [0] {
        bail!(
            "expected `weight_packed` of two dimensions and `weight_shape` (2), or of three and `weight_shape` (3), \
             found {} with the shape {shape:?}",
            tensors.described()
        )
    }
    let (rows, words, outputs, inputs) = (*rows, *words, *outputs, *inputs);
    let packed = match inputs.checked_mul(bits) {
        _ if !matches!(bits, 1..=8) || rows != outputs => None,
        Some(all) if all.div_ceil(32) == words => Some(Packed::Stream),
        _ if inputs.div_ceil(32 / bits) == words => Some(Packed::WholeCodes),
        _ => None,
    };
    let Some(packed) = packed else {
        bail!(
            "expected codes of {bits} bits of a weight ({outputs}, {inputs}) in `weight_packed` (out, in · bits / 32), \
             found {}",
            tensors.described()
        )
    };
    let matrices = experts.first().copied().unwrap_or(1);
    let Some(all_outputs) = matrices.checked_mul(outputs) else {
        bail!("{matrices} matrices are too large to address")
    };
    let sizes = sizes(module, all_outputs, inputs, &scheme)?;
    if let Some(list) = tensors.get("weight_g_idx")
        && list.shape != [inputs]
    {
        bail!("expected `weight_g_idx` ({inputs}), found {}", tensors.described())
    }
    let format = WordWeight { sizes, matrices, bits, packed };
    format.check_zeros(tensors)?;
    let mut used = vec!["weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"];
    used.extend(passed_over(module));
    Ok(Found { outputs: all_outputs, inputs, format: Arc::new(format), tensors: used })
}

impl WordWeight {
    /// Appends `count` codes of a row of words.
    fn append(&self, words: &[u8], count: usize, codes: &mut Vec<u8>) {
        let end = codes.len() + count;
        match self.packed {
            Packed::Stream => append_stream(words, self.bits, codes),
            Packed::WholeCodes => {
                for word in words.chunks_exact(4) {
                    append_stream(word, self.bits, codes);
                }
            }
        }
        codes.truncate(end);
    }

    /// Returns the number of words of `count` codes.
    fn words_of(&self, count: usize) -> usize {
        match self.packed {
            Packed::Stream => (count * self.bits).div_ceil(32),
            Packed::WholeCodes => count.div_ceil(32 / self.bits),
        }
    }

    /// Checks the shape of the zeros: in words along the outputs, or integers like the scales.
    fn check_zeros(&self, tensors: &Tensors) -> Result<()> {
        let Some(zeros) = tensors.get("weight_zero_point") else { return Ok(()) };
        let CompressedSizes { outputs, inputs, blocks, scale_columns } = self.sizes;
        let count = blocks.grid(outputs, inputs).iter().product::<usize>();
        let words = self.words_of(outputs / self.matrices);
        let fits = match (zeros.dtype, zeros.shape.as_slice()) {
            (Dtype::I32, [words_of_zeros, columns]) => {
                self.matrices == 1 && blocks.rows == 1 && [*words_of_zeros, *columns] == [words, scale_columns]
            }
            (Dtype::I32, own) => blocks.rows == 1 && own == [self.matrices, words, scale_columns],
            (Dtype::I8, own) => own.iter().product::<usize>() == count,
            _ => false,
        };
        if fits {
            return Ok(());
        }
        bail!(
            "expected `weight_zero_point` (out · bits / 32, groups) of I32, or of I8 and the shape of the scales, found {}",
            tensors.described()
        )
    }

    /// Reads the zero points as unsigned codes, in the shape of the scales. The file has signed ones, less by half of
    /// the number of codes.
    fn zeros(&self, tensors: &Tensors) -> Result<GroupNumbers> {
        let middle = 1u8 << (self.bits - 1);
        let &CompressedSizes { outputs, scale_columns, .. } = &self.sizes;
        let Some(stored) = tensors.get("weight_zero_point") else {
            return Ok(GroupNumbers::Whole(vec![
                middle;
                self.sizes.blocks.grid(outputs, self.sizes.inputs)[0] * scale_columns
            ]));
        };
        let bytes = tensors.bytes("weight_zero_point")?;
        if stored.dtype == Dtype::I8 {
            return Ok(GroupNumbers::Whole(bytes.into_iter().map(|zero| zero.wrapping_add(middle)).collect()));
        }
        let outputs_of_matrix = outputs / self.matrices;
        let words = self.words_of(outputs_of_matrix);
        let mut zeros = vec![0; outputs * scale_columns];
        for (matrix, own) in bytes.chunks_exact(words * scale_columns * 4).enumerate() {
            let by_group = transpose_words(own, words, scale_columns);
            for (group, row) in by_group.chunks_exact(words * 4).enumerate() {
                let mut of_group = Vec::new();
                self.append(row, outputs_of_matrix, &mut of_group);
                for (output, zero) in of_group.into_iter().enumerate() {
                    zeros[(matrix * outputs_of_matrix + output) * scale_columns + group] = zero;
                }
            }
        }
        Ok(GroupNumbers::Whole(zeros))
    }

    /// Reads the groups of the inputs.
    fn groups(&self, tensors: &Tensors) -> Result<Groups> {
        let CompressedSizes { inputs, blocks, scale_columns, .. } = self.sizes;
        if tensors.get("weight_g_idx").is_none() {
            return Ok(Groups::of_neighbours(inputs, blocks.columns));
        }
        let list = tensors.whole("weight_g_idx")?;
        // A list that was never set.
        if list.iter().all(|group| *group == -1) {
            return Ok(Groups::of_neighbours(inputs, blocks.columns));
        }
        Groups::of_list(&list, scale_columns)
    }
}

impl QuantizedFormat for WordWeight {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let CompressedSizes { outputs, inputs, blocks, scale_columns } = self.sizes;
        let groups = self.groups(tensors)?;
        let words = tensors.bytes("weight_packed")?;
        let mut codes = Vec::with_capacity(outputs * inputs + 32);
        for row in words.chunks_exact(self.words_of(inputs) * 4) {
            let start = codes.len();
            self.append(row, inputs, &mut codes);
            groups.sort_codes(&mut codes[start..]);
        }
        // A code of 1 bit is one of 2 bits, and a code of 7 bits one of 8.
        let bits = match self.bits {
            1 => 2,
            7 => 8,
            other => other,
        };
        let of_blocks = |numbers: &GroupNumbers| blocks.numbers(outputs, &groups, numbers, scale_columns);
        let values = if bits == self.bits && tensors.get("weight_zero_point").is_none() {
            CodeValues::Signed
        } else {
            CodeValues::Zeros(of_blocks(&self.zeros(tensors)?)?)
        };
        let scales = of_blocks(&tensors.numbers("weight_scale")?)?;
        let input_order = groups.input_order;
        Ok(QuantizedWeight { outputs, inputs, bits, codes, group: groups.size, values, scales, input_order })
    }
}
