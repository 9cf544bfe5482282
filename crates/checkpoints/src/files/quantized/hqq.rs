//! HQQ, as its version 0.2 saves layers: `W_q` with `scale` and `zero`, and each setting as a tensor.
//!
//! The flattened weight is a matrix whose rows are groups, (in · out / group, group), or whose columns are, (group,
//! in · out / group), by the setting `axis`. `W_q` has its rows in parts one after the other: a byte, or a word of 30
//! bits for codes of 3 bits, has a code of each part, the first in the highest bits. A number is
//! `(code - zero) · scale`. Where columns are groups, the scales of neighbouring inputs differ.

use std::sync::Arc;

use candle_core::{Result, bail};

use super::bits::greatest_common_divisor;
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat};
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
    /// The number of rows of the matrix of groups.
    rows: usize,
    /// The number of columns of the matrix of groups.
    columns: usize,
    groups: GroupsAre,
}

/// The part of a matrix that shares a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GroupsAre {
    Rows,
    Columns,
}

/// Finds a layer of HQQ.
pub(super) fn find(module: &Module) -> Result<Option<Found>> {
    let tensors = module.tensors;
    let Some(codes) = tensors.get("W_q") else { return Ok(None) };
    let shape = tensors.integers("shape")?;
    let [outputs, inputs] = shape[..] else { bail!("`shape` is {shape:?}, expected a matrix") };
    let bits = tensors.integer("nbits")?;
    if !matches!(bits, 1..=6 | 8) {
        bail!("`nbits` is {bits}, expected 1 to 6, or 8")
    }
    for name in ["quant_scale", "quant_zero"] {
        if tensors.get(name).is_some() && tensors.integer(name)? != 0 {
            bail!("`{name}` is true, expected scales and zeros that are not quantised")
        }
    }
    let groups_are = match tensors.integer("axis")? {
        0 => GroupsAre::Columns,
        1 => GroupsAre::Rows,
        other => bail!("`axis` is {other}, expected 0 or 1"),
    };
    let groups = match (tensors.matrix("scale"), groups_are) {
        (Some([groups, 1]), GroupsAre::Rows) | (Some([1, groups]), GroupsAre::Columns) => groups,
        (_, GroupsAre::Rows) => bail!("expected `scale` (groups, 1), found {}", tensors.described()),
        (_, GroupsAre::Columns) => bail!("expected `scale` (1, groups), found {}", tensors.described()),
    };
    let count = outputs.checked_mul(inputs).filter(|&count| count > 0);
    let group = match count {
        Some(count) if groups > 0 && count.is_multiple_of(groups) => count / groups,
        _ => bail!("`shape` is {shape:?}, which {groups} groups do not divide"),
    };
    tensors.expect_count("zero", groups)?;
    let (rows, columns) = match groups_are {
        GroupsAre::Rows => (groups, group),
        GroupsAre::Columns => (group, groups),
    };
    let format = Hqq { outputs, inputs, bits, rows, columns, groups: groups_are };
    let expected = columns.checked_mul(format.bytes()).and_then(|row| row.checked_mul(format.stored_rows()));
    if Some(codes.len) != expected {
        let stored = format.stored_rows();
        bail!("`W_q` has {} bytes, expected {stored} rows of {columns} codes of {bits} bits", codes.len)
    }
    let mut used = vec!["W_q", "scale", "zero"];
    used.extend(SETTINGS.iter().filter(|name| tensors.get(name).is_some()));
    Ok(Some(Found { outputs, inputs, format: Arc::new(format), tensors: used }))
}

impl Hqq {
    /// Returns the number of codes in a byte, or in a word of 4 bytes for codes of 3 bits. The rows are divided into as
    /// many parts, and each byte or word has one code of each part.
    fn parts(&self) -> usize {
        if self.bits == 3 { 10 } else { 8 / self.bits }
    }

    /// Returns the size in bytes of the word that has one code of each part.
    fn bytes(&self) -> usize {
        if self.bits == 3 { 4 } else { 1 }
    }

    /// Returns the number of rows of a part.
    fn stored_rows(&self) -> usize {
        self.rows.div_ceil(self.parts())
    }

    /// Reads the scales or zeros of neighbouring inputs, and returns the number of the inputs that share one.
    fn of_inputs(&self, tensors: &Tensors, name: &str) -> Result<(GroupNumbers, usize)> {
        let &Self { outputs, inputs, rows, columns, .. } = self;
        if self.groups == GroupsAre::Columns {
            return Ok((repeated(tensors.numbers(name)?, rows)?, 1));
        }
        // A group may end in the middle of a row.
        let group = greatest_common_divisor(columns, inputs);
        if group == columns {
            return Ok((tensors.numbers(name)?, group));
        }
        let numbers = tensors.f32(name)?;
        let of_group = |at: usize| numbers[at * group / columns];
        Ok((GroupNumbers::F32((0..outputs * inputs / group).map(of_group).collect()), group))
    }
}

impl QuantizedFormat for Hqq {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, bits, rows, columns, .. } = self;
        let stored = tensors.bytes("W_q")?;
        let stored_rows = self.stored_rows();
        let mask = (1u32 << bits) - 1;
        let mut codes = Vec::with_capacity(rows * columns);
        for row in 0..rows {
            let shift = bits * (self.parts() - 1 - row / stored_rows);
            let words = &stored[row % stored_rows * columns * self.bytes()..][..columns * self.bytes()];
            for word in words.chunks(self.bytes()) {
                let word = word.iter().rev().fold(0u32, |word, &byte| word << 8 | u32::from(byte));
                codes.push((word >> shift & mask) as u8);
            }
        }
        let (zeros, _) = self.of_inputs(tensors, "zero")?;
        let (scales, group) = self.of_inputs(tensors, "scale")?;
        Ok(QuantizedWeight {
            outputs,
            inputs,
            bits: bits.max(2),
            codes,
            group,
            values: CodeValues::Zeros(zeros),
            scales,
            input_order: None,
        })
    }
}

/// Returns numbers `count` times, one after the other.
fn repeated(numbers: GroupNumbers, count: usize) -> Result<GroupNumbers> {
    Ok(match numbers {
        GroupNumbers::F16(own) => GroupNumbers::F16(own.repeat(count)),
        GroupNumbers::BF16(own) => GroupNumbers::BF16(own.repeat(count)),
        GroupNumbers::F32(own) => GroupNumbers::F32(own.repeat(count)),
        _ => bail!("expected scales in floats"),
    })
}
