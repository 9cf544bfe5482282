//! HQQ, as its version 0.2 saves layers: `W_q` with `scale` and `zero`, and each setting as a tensor.
//!
//! The flattened weight is a matrix of groups, (in · out / group, group). `W_q` has its rows in parts one after the
//! other: a byte, or a word of 30 bits for codes of 3 bits, has a code of each part, the first in the highest bits. A
//! number is `(code - zero) · scale`.

use std::sync::Arc;

use candle_core::{Result, bail};

use super::bits::greatest_common_divisor;
use super::tensors::Tensors;
use super::{Format, Found, Module};
use candle_attention_modules::base::{CodeValues, GroupNumbers, QuantizedWeight};

/// The settings that are tensors of the layer.
const SETTINGS: [&str; 16] = [
    "axis",
    "channel_wise",
    "compute_dtype",
    "encoded_state_dict",
    "group_size",
    "nbits",
    "offload_meta",
    "optimize",
    "packing",
    "quant_scale",
    "quant_zero",
    "round_zero",
    "shape",
    "stores_quant_config",
    "unpack_view_dtype",
    "view_as_float",
];

#[derive(Debug)]
struct Hqq {
    outputs: usize,
    inputs: usize,
    bits: usize,
    group: usize,
    /// The number of groups of the flattened weight.
    groups: usize,
}

/// Finds a layer of HQQ.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    let Some(codes) = tensors.get("W_q") else { return Ok(None) };
    let shape = tensors.integers("shape")?;
    let [outputs, inputs] = shape[..] else { bail!("`shape` is {shape:?}, expected a matrix") };
    let bits = tensors.integer("nbits")?;
    if !matches!(bits, 1..=4 | 8) {
        bail!("`nbits` is {bits}, expected 1, 2, 3, 4 or 8")
    }
    for name in ["quant_scale", "quant_zero"] {
        if tensors.get(name).is_some() && tensors.integer(name)? != 0 {
            bail!("`{name}` is true, expected scales and zeros that are not quantised")
        }
    }
    if tensors.integer("axis")? != 1 {
        bail!("`axis` is 0, expected 1: scales of neighbouring inputs, not of neighbouring outputs")
    }
    let Some(scales) = tensors.matrix("scale") else { bail!("`scale` is no matrix, expected (groups, 1)") };
    let [groups, 1] = scales else { bail!("`scale` has shape {scales:?}, expected (groups, 1)") };
    let count = outputs.checked_mul(inputs).filter(|&count| count > 0);
    let group = match count {
        Some(count) if groups > 0 && count.is_multiple_of(groups) => count / groups,
        _ => bail!("`shape` is {shape:?}, which {groups} groups do not divide"),
    };
    tensors.expect_count("zero", groups)?;
    let format = Hqq { outputs, inputs, bits, group, groups };
    let expected = group.checked_mul(format.bytes()).and_then(|row| row.checked_mul(format.rows()));
    if Some(codes.len) != expected {
        bail!("`W_q` has {} bytes, expected {} rows of {group} codes of {bits} bits", codes.len, format.rows())
    }
    let mut used = vec!["W_q", "scale", "zero"];
    used.extend(SETTINGS.iter().filter(|name| tensors.get(name).is_some()));
    Ok(Some(Found { outputs, inputs, format: Arc::new(format), tensors: used }))
}

impl Hqq {
    /// Returns the number of parts of the rows, each of which has a code in a byte or word.
    fn parts(&self) -> usize {
        if self.bits == 3 { 10 } else { 8 / self.bits }
    }

    /// Returns the number of bytes that have a code of each part.
    fn bytes(&self) -> usize {
        if self.bits == 3 { 4 } else { 1 }
    }

    /// Returns the number of rows of a part.
    fn rows(&self) -> usize {
        self.groups.div_ceil(self.parts())
    }
}

impl Format for Hqq {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, bits, group, groups } = self;
        let stored = tensors.bytes("W_q")?;
        let rows = self.rows();
        let mask = (1u32 << bits) - 1;
        let mut codes = Vec::with_capacity(groups * group);
        for row in 0..groups {
            let shift = bits * (self.parts() - 1 - row / rows);
            let words = &stored[row % rows * group * self.bytes()..][..group * self.bytes()];
            for word in words.chunks(self.bytes()) {
                let word = word.iter().rev().fold(0u32, |word, &byte| word << 8 | u32::from(byte));
                codes.push((word >> shift & mask) as u8);
            }
        }
        // A group may end in the middle of a row.
        let group_of_row = greatest_common_divisor(group, inputs);
        let of_rows = |name| -> Result<GroupNumbers> {
            if group_of_row == group {
                return tensors.numbers(name);
            }
            let numbers = tensors.f32(name)?;
            let of_group = |at: usize| numbers[at * group_of_row / group];
            Ok(GroupNumbers::F32((0..outputs * inputs / group_of_row).map(of_group).collect()))
        };
        Ok(QuantizedWeight {
            outputs,
            inputs,
            bits: bits.max(2),
            codes,
            group: group_of_row,
            values: CodeValues::Zeros(of_rows("zero")?),
            scales: of_rows("scale")?,
            input_order: None,
        })
    }
}
