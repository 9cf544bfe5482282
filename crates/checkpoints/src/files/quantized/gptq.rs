//! GPTQ: `qweight` (in · bits / 32, out) of I32, with `qzeros` (groups, out · bits / 32), `scales` (groups, out) and
//! `g_idx` (in), the group of each input.
//!
//! A number is `(code - zero) · scale`. In the first format zeros are stored less one. auto-round saves layers so too.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;

use super::bits::{add_one_to_codes, append_planes, append_stream, transpose_words};
use super::groups::Groups;
use super::packed_words::{Packing, packing};
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat};
use candle_attention_modules::base::{CodeValues, GroupNumbers, QuantizedWeight};

/// The bits of codes that are looked for where the config's do not fit.
const BITS: [usize; 7] = [4, 8, 3, 2, 6, 5, 7];

/// A layer of GPTQ.
#[derive(Debug)]
struct Gptq {
    outputs: usize,
    inputs: usize,
    bits: usize,
    /// The number of groups.
    groups: usize,
    /// The number of inputs of a group, for a layer without `g_idx`.
    group_size: usize,
    zeros_less_one: bool,
    /// Whether the codes are in planes.
    planes: bool,
}

/// Finds a layer of GPTQ.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    if tensors.get("qweight").is_none() {
        return Ok(None);
    }
    let Some(packing) = packing(module.settings)? else {
        bail!("expected `quantization_config` of GPTQ, AWQ or auto-round in the config.json next to the file")
    };
    let Packing::Gptq { zeros_less_one, planes } = packing else { return Ok(None) };
    let [Some([words, outputs]), Some([groups, zero_words]), Some(scales)] =
        ["qweight", "qzeros", "scales"].map(|name| tensors.matrix(name))
    else {
        bail!("expected `qweight`, `qzeros` and `scales` of two dimensions, found {}", tensors.described())
    };
    let list = tensors.get("g_idx").map(|list| list.shape.as_slice());
    let are_words =
        ["qweight", "qzeros"].iter().all(|name| tensors.get(name).is_some_and(|own| own.dtype == Dtype::I32));
    let is_empty = words == 0 || outputs == 0 || groups == 0;
    if !are_words || scales != [groups, outputs] || list.is_some_and(|shape| shape.len() != 1) || is_empty {
        bail!(
            "expected `qweight` (in · bits / 32, out) and `qzeros` (groups, out · bits / 32) of I32, `scales` (groups, \
             out) and `g_idx` (in), found {}",
            tensors.described()
        )
    }
    let inputs_of_list = list.map(|shape| shape[0]);
    let settings = module.settings.object();
    let own_bits = settings["bits"].as_u64().map(|bits| bits as usize);
    let Some(bits) = own_bits.into_iter().chain(BITS).find(|&bits| {
        let fits = |codes: usize, count: usize| codes.checked_mul(bits).is_some_and(|own| own.div_ceil(32) == count);
        BITS.contains(&bits) && fits(outputs, zero_words) && inputs_of_list.is_none_or(|inputs| fits(inputs, words))
    }) else {
        bail!("expected codes of 2 to 8 bits in words of 32, found {}", tensors.described())
    };
    let inputs = inputs_of_list.unwrap_or(words * 32 / bits);
    let group_size = match settings["group_size"].as_u64() {
        Some(size) if size > 0 && inputs.div_ceil(size as usize) == groups => size as usize,
        _ if inputs.is_multiple_of(groups) => inputs / groups,
        _ => bail!("expected groups of {inputs} inputs, found {}", tensors.described()),
    };
    let planes = matches!(bits, 5..=7) || (planes && bits == 3);
    let format = Arc::new(Gptq { outputs, inputs, bits, groups, group_size, zeros_less_one, planes });
    Ok(Some(Found { outputs, inputs, format, tensors: vec!["qweight", "qzeros", "scales", "g_idx"] }))
}

impl Gptq {
    /// Appends the codes of a row of words.
    fn append(&self, words: &[u8], codes: &mut Vec<u8>) {
        if self.planes {
            append_planes(words, self.bits, codes);
        } else {
            append_stream(words, self.bits, codes);
        }
    }

    /// Reads the zeros (groups, out).
    fn zeros(&self, tensors: &Tensors) -> Result<Vec<u8>> {
        let &Self { outputs, bits, .. } = self;
        let mut words = tensors.bytes("qzeros")?;
        let are_whole = 32 % bits == 0;
        if self.zeros_less_one && are_whole {
            add_one_to_codes(&mut words, bits);
        }
        let mut zeros = Vec::with_capacity(self.groups * outputs);
        for row in words.chunks_exact(words.len() / self.groups) {
            let end = zeros.len() + outputs;
            self.append(row, &mut zeros);
            if zeros.len() < end {
                bail!("expected zeros of {outputs} outputs in `qzeros`, found {}", tensors.described())
            }
            zeros.truncate(end);
        }
        if self.zeros_less_one && !are_whole {
            let mask = (1u8 << bits) - 1;
            zeros.iter_mut().for_each(|zero| *zero = (*zero + 1) & mask);
        }
        Ok(zeros)
    }

    /// Reads the groups of the inputs.
    fn groups(&self, tensors: &Tensors) -> Result<Groups> {
        match tensors.get("g_idx") {
            Some(_) => Groups::of_list(&tensors.whole("g_idx")?, self.groups),
            None => Ok(Groups::of_neighbours(self.inputs, self.group_size)),
        }
    }
}

impl QuantizedFormat for Gptq {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, bits, .. } = self;
        let groups = self.groups(tensors)?;
        let words = tensors.bytes("qweight")?;
        let words_of_row = words.len() / 4 / outputs.max(1);
        let by_output = transpose_words(&words, words_of_row, outputs);
        drop(words);
        let mut codes = Vec::with_capacity(outputs * inputs + 32);
        for row in by_output.chunks_exact((words_of_row * 4).max(1)) {
            let start = codes.len();
            self.append(row, &mut codes);
            if codes.len() < start + inputs {
                bail!("expected codes of {inputs} inputs in `qweight`, found {}", tensors.described())
            }
            codes.truncate(start + inputs);
            groups.sort_codes(&mut codes[start..]);
        }
        let at = |output: usize, group: usize| group * outputs + output;
        let zeros = self.zeros(tensors)?;
        // The zeros of symmetric layers.
        let are_middle = bits != 7 && zeros.iter().all(|zero| usize::from(*zero) == 1 << (bits - 1));
        let values = if are_middle {
            CodeValues::Signed
        } else {
            CodeValues::Zeros(groups.numbers(outputs, &GroupNumbers::Whole(zeros), at)?)
        };
        Ok(QuantizedWeight {
            outputs,
            inputs,
            // A code of 7 bits is one of 8.
            bits: if bits == 7 { 8 } else { bits },
            codes,
            group: groups.size,
            values,
            scales: groups.numbers(outputs, &tensors.numbers("scales")?, at)?,
            input_order: groups.input_order,
        })
    }
}
