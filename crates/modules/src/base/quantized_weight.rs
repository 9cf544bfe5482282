//! Weights of codes with scales, as quantised checkpoints store them.

use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};
use half::f16;

use super::group_numbers::{GroupNumbers, OP};

/// A weight (out, in) of codes with scales. Each group of neighbouring inputs of an output has a scale. The weight is
/// in memory, on no device.
///
/// [`dequantize`](Self::dequantize) defines the numbers of the weight. Products with a packed weight have the bits of
/// products with these numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedWeight {
    /// The number of outputs.
    pub outputs: usize,
    /// The number of inputs.
    pub inputs: usize,
    /// The number of bits of a code: 2, 3, 4, 5, 6 or 8.
    pub bits: usize,
    /// The codes (out, in), one byte each, below 2^bits.
    pub codes: Vec<u8>,
    /// The number of neighbouring inputs that share a scale. It divides the number of inputs.
    pub group: usize,
    /// How a code and the numbers of its group become a number.
    pub values: CodeValues,
    /// The scales (out, in / group).
    pub scales: GroupNumbers,
    /// The input of the layer that each column of codes belongs to; `None` where the columns are in the order of the
    /// inputs. GPTQ with `desc_act` has another order: it quantises inputs in the order of their activations.
    pub input_order: Option<Vec<u32>>,
}

/// How a code and the numbers of its group become a number of the weight, in f32.
#[derive(Debug, Clone, PartialEq)]
pub enum CodeValues {
    /// `(code - 2^(bits - 1)) · scale`.
    Signed,
    /// `(code - zero) · scale`, with a zero for each group.
    Zeros(GroupNumbers),
    /// `code · scale + minimum`, rounded once, with a minimum for each group.
    Minimums(GroupNumbers),
    /// `table[code] · scale`, for codes of 4 bits.
    Table([f32; 16]),
    /// A float of 8 bits times the scale.
    Float8(Float8),
}

/// A float of 8 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Float8 {
    /// 4 bits of exponent and 3 of mantissa, without infinities.
    E4M3,
    /// 5 bits of exponent and 2 of mantissa.
    E5M2,
}

impl Float8 {
    /// Returns the number of a code.
    #[must_use]
    pub fn number(self, code: u8) -> f32 {
        let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
        let magnitude = code & 0x7f;
        match self {
            Self::E4M3 if magnitude == 0x7f => f32::NAN,
            // The exponent and the mantissa at their places in f32, read with the bias of f32, 127, instead of 7.
            Self::E4M3 => sign * f32::from_bits(u32::from(magnitude) << 20) * 2f32.powi(120),
            Self::E5M2 => f16::from_bits(u16::from(code) << 8).to_f32(),
        }
    }
}

impl QuantizedWeight {
    /// Returns the weight if its parts fit each other.
    ///
    /// # Errors
    /// For other bits than [`bits`](Self::bits) lists, a group that does not divide the inputs, lists of other
    /// lengths than the shape says, a code that exceeds its bits, and an order that does not have each input once.
    pub fn checked(self) -> Result<Self> {
        let Self { outputs, inputs, bits, group, .. } = self;
        if !matches!(bits, 2..=6 | 8) {
            bail!("[{OP}] expected codes of 2, 3, 4, 5, 6 or 8 bits, found {bits}")
        }
        if group == 0 || !inputs.is_multiple_of(group) {
            bail!("[{OP}] expected groups that divide the {inputs} inputs, found groups of {group}")
        }
        let Some(count) = outputs.checked_mul(inputs) else {
            bail!("[{OP}] a weight of {outputs} by {inputs} is too large to address")
        };
        if self.codes.len() != count {
            bail!("[{OP}] expected {count} codes, found {}", self.codes.len())
        }
        let largest = self.codes.iter().copied().max().unwrap_or(0);
        if bits < 8 && largest >> bits > 0 {
            bail!("[{OP}] expected codes of {bits} bits, found {largest}")
        }
        let groups = count / group;
        self.scales.check("scales", groups, inputs / group)?;
        match &self.values {
            CodeValues::Zeros(zeros) => zeros.check("zeros", groups, inputs / group)?,
            CodeValues::Minimums(minimums) => minimums.check("minimums", groups, inputs / group)?,
            CodeValues::Table(_) if bits > 4 => bail!("[{OP}] expected codes of 4 bits for a table, found {bits} bits"),
            CodeValues::Float8(_) if bits != 8 => bail!("[{OP}] expected floats of 8 bits, found codes of {bits} bits"),
            CodeValues::Signed | CodeValues::Table(_) | CodeValues::Float8(_) => {}
        }
        if let Some(order) = &self.input_order {
            let mut is_there = vec![false; inputs];
            for &input in order {
                match is_there.get_mut(input as usize) {
                    Some(seen) if !*seen => *seen = true,
                    _ => bail!("[{OP}] expected an order of the {inputs} inputs, found {input} twice or past them"),
                }
            }
            if order.len() != inputs {
                bail!("[{OP}] expected an order of the {inputs} inputs, found one of {}", order.len())
            }
        }
        Ok(self)
    }

    /// Returns the numbers of the weight in f32, (out, in), with each column at its input.
    ///
    /// # Errors
    /// If they do not fit in memory.
    pub fn dequantize(&self) -> Result<Tensor> {
        let &Self { outputs, inputs, .. } = self;
        let mut numbers = vec![0f32; outputs * inputs];
        for output in 0..outputs {
            self.dequantize_row(output, &mut numbers[output * inputs..][..inputs]);
        }
        Tensor::from_vec(numbers, (outputs, inputs), &Device::Cpu)
    }

    /// Writes the numbers of an output.
    fn dequantize_row(&self, output: usize, to: &mut [f32]) {
        let middle = (1u32 << (self.bits - 1)) as f32;
        for column in 0..self.inputs {
            let at = output * self.inputs + column;
            let code = self.codes[at];
            let group = at / self.group;
            let scale = self.scales.get(group);
            let number = match &self.values {
                CodeValues::Signed => (f32::from(code) - middle) * scale,
                CodeValues::Zeros(zeros) => (f32::from(code) - zeros.get(group)) * scale,
                CodeValues::Minimums(minimums) => f32::from(code).mul_add(scale, minimums.get(group)),
                CodeValues::Table(table) => table[usize::from(code)] * scale,
                CodeValues::Float8(float) => float.number(code) * scale,
            };
            let input = self.input_order.as_ref().map_or(column, |order| order[column] as usize);
            to[input] = number;
        }
    }

    /// Returns some of the outputs, one range after the other.
    ///
    /// # Errors
    /// For a range past the outputs.
    pub fn rows(&self, ranges: &[Range<usize>]) -> Result<Self> {
        let groups = self.inputs / self.group;
        let mut codes = Vec::new();
        let mut runs = Vec::new();
        for range in ranges {
            if range.start > range.end || range.end > self.outputs {
                bail!("[{OP}] expected outputs of 0..{}, found {range:?}", self.outputs)
            }
            codes.extend_from_slice(&self.codes[range.start * self.inputs..range.end * self.inputs]);
            runs.push(range.start * groups..range.end * groups);
        }
        let outputs = ranges.iter().map(Range::len).sum();
        Ok(Self { outputs, codes, input_order: self.input_order.clone(), ..self.with_groups(&runs) })
    }

    /// Returns the columns of some inputs: one rank's share of a layer whose inputs are divided.
    ///
    /// # Errors
    /// For inputs that are not whole groups, and for a weight whose columns are in another order than its inputs.
    pub fn columns(&self, range: Range<usize>) -> Result<Self> {
        let &Self { outputs, inputs, group, .. } = self;
        let step = group * self.groups_of_factor();
        if range.start > range.end || range.end > inputs {
            bail!("[{OP}] expected inputs of 0..{inputs}, found {range:?}")
        }
        if self.input_order.is_some() && range.len() != inputs {
            bail!(
                "[{OP}] expected a weight whose columns are in the order of its inputs (desc_act is false), to cut it"
            )
        }
        if !range.start.is_multiple_of(step) || !range.end.is_multiple_of(step) {
            bail!("[{OP}] expected whole groups of {step} inputs, found {range:?}")
        }
        let mut codes = Vec::with_capacity(outputs * range.len());
        let mut runs = Vec::with_capacity(outputs);
        for output in 0..outputs {
            codes.extend_from_slice(&self.codes[output * inputs..][range.clone()]);
            let first = output * (inputs / group);
            runs.push(first + range.start / group..first + range.end / group);
        }
        Ok(Self { inputs: range.len(), codes, input_order: self.input_order.clone(), ..self.with_groups(&runs) })
    }

    /// Returns the number of groups that share a factor of their scales.
    fn groups_of_factor(&self) -> usize {
        match &self.scales {
            GroupNumbers::Nested { groups_of_factor, .. } => *groups_of_factor,
            _ => 1,
        }
    }

    /// Returns a weight with the numbers of some groups, without codes.
    fn with_groups(&self, runs: &[Range<usize>]) -> Self {
        let values = match &self.values {
            CodeValues::Zeros(zeros) => CodeValues::Zeros(zeros.select(runs)),
            CodeValues::Minimums(minimums) => CodeValues::Minimums(minimums.select(runs)),
            other => other.clone(),
        };
        Self {
            outputs: self.outputs,
            inputs: self.inputs,
            bits: self.bits,
            codes: Vec::new(),
            group: self.group,
            values,
            scales: self.scales.select(runs),
            input_order: None,
        }
    }

    /// Returns the outputs of several weights, one after the other; `None` where they have different formats, so that
    /// one packed weight cannot have all of them.
    #[must_use]
    pub fn join(all: &[&Self]) -> Option<Self> {
        let (first, rest) = all.split_first()?;
        let mut joined = (*first).clone();
        joined.codes.reserve_exact(rest.iter().map(|next| next.codes.len()).sum());
        for next in rest {
            let is_alike = joined.inputs == next.inputs
                && joined.bits == next.bits
                && joined.group == next.group
                && joined.input_order == next.input_order;
            let values_are_alike = match (&mut joined.values, &next.values) {
                (CodeValues::Zeros(own), CodeValues::Zeros(other))
                | (CodeValues::Minimums(own), CodeValues::Minimums(other)) => own.append(other),
                (own, other) => own == other,
            };
            if !is_alike || !values_are_alike || !joined.scales.append(&next.scales) {
                return None;
            }
            joined.codes.extend_from_slice(&next.codes);
            joined.outputs += next.outputs;
        }
        Some(joined)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weight(values: CodeValues, bits: usize) -> QuantizedWeight {
        let codes = (0..4 * 8).map(|n| (n * 5 % (1 << bits)) as u8).collect();
        let scales = GroupNumbers::F32((1..=8).map(|n| n as f32 / 4.0).collect());
        QuantizedWeight { outputs: 4, inputs: 8, bits, codes, group: 4, values, scales, input_order: None }
    }

    fn kinds() -> Vec<QuantizedWeight> {
        let zeros = GroupNumbers::Whole((0..8).collect());
        let minimums = GroupNumbers::F16((0..8).map(|n| f16::from_f32(n as f32 - 3.5)).collect());
        let table = std::array::from_fn(|n| n as f32 * 0.5 - 3.0);
        vec![
            weight(CodeValues::Signed, 5),
            weight(CodeValues::Zeros(zeros), 4),
            weight(CodeValues::Minimums(minimums), 6),
            weight(CodeValues::Table(table), 4),
            weight(CodeValues::Float8(Float8::E4M3), 8),
        ]
    }

    fn numbers(weight: &QuantizedWeight) -> Result<Vec<Vec<f32>>> {
        weight.dequantize()?.to_vec2()
    }

    #[test]
    fn float8_numbers_are_those_of_the_formats() {
        let e4m3 = |code| Float8::E4M3.number(code);
        assert_eq!([e4m3(0x38), e4m3(0xb8), e4m3(0x7e), e4m3(0x01)], [1.0, -1.0, 448.0, 2f32.powi(-9)]);
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let e5m2 = |code| Float8::E5M2.number(code);
        assert_eq!([e5m2(0x3c), e5m2(0xbc), e5m2(0x7b), e5m2(0x01)], [1.0, -1.0, 57344.0, 2f32.powi(-16)]);
        assert!(e5m2(0x7c).is_infinite() && e5m2(0x7e).is_nan());
    }

    #[test]
    fn quantized_rows_and_columns_have_the_numbers_of_the_whole() -> Result<()> {
        for whole in kinds() {
            let expected = numbers(&whole)?;
            let rows = whole.rows(&[2..4, 0..1])?.checked()?;
            assert_eq!(numbers(&rows)?, [&expected[2..], &expected[..1]].concat());
            let columns = whole.columns(4..8)?.checked()?;
            assert_eq!(numbers(&columns)?, expected.iter().map(|row| row[4..].to_vec()).collect::<Vec<_>>());
            let top = whole.rows(std::slice::from_ref(&(0..3)))?;
            let bottom = whole.rows(std::slice::from_ref(&(3..4)))?;
            assert_eq!(QuantizedWeight::join(&[&top, &bottom]).as_ref(), Some(&whole));
            assert!(whole.columns(2..8).is_err() && whole.rows(&[0..1, 3..5]).is_err());
        }
        let [signed, zeros, ..] = &kinds()[..] else { bail!("five kinds") };
        assert_eq!(QuantizedWeight::join(&[signed, zeros]), None);
        Ok(())
    }

    #[test]
    fn columns_of_codes_are_read_at_their_inputs() -> Result<()> {
        let plain = weight(CodeValues::Signed, 4);
        let order = vec![3, 1, 0, 2, 7, 6, 5, 4];
        let ordered = QuantizedWeight { input_order: Some(order.clone()), ..plain.clone() }.checked()?;
        for (row, expected) in numbers(&ordered)?.iter().zip(numbers(&plain)?) {
            for (column, &input) in order.iter().enumerate() {
                assert_eq!(row[input as usize], expected[column]);
            }
        }
        let twice = QuantizedWeight { input_order: Some(vec![0; 8]), ..plain };
        assert!(twice.checked().is_err());
        Ok(())
    }
}
