//! Weights of codes with scales, in the memory of a device and in the order in which the kernels read them.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

const OP: &str = "coded_weight";

/// The columns of an octet and of a quartet: see `code_numbers.cuh`, which describes the order of codes.
const OCTET: usize = 8;
const QUARTET: usize = 4;

/// A weight (N, K) of codes with a scale for each group of neighbouring columns of a row. The memory is that of the
/// codes and the scales.
#[derive(Debug, Clone)]
pub struct CodedWeight {
    inputs: usize,
    bits: usize,
    group: usize,
    values: CodedValues,
    scales: CodedNumbers,
    /// u32 (N, words): the codes of 2, 4 and 8 bits, or the lower bits of others.
    low: Tensor,
    /// u32 (N, words): the upper bits of codes of 3, 5 and 6 bits.
    high: Option<Tensor>,
}

/// The numbers of codes.
#[derive(Debug, Clone)]
pub enum CodedValues {
    /// `(code - 2^(bits - 1)) · scale`.
    Signed,
    /// `(code - zero) · scale`, with a zero for each group.
    Zeros(CodedNumbers),
    /// `code · scale + minimum`, rounded once, with a minimum for each group.
    Minimums(CodedNumbers),
    /// `table[code] · scale`, for codes of up to 4 bits: f32 (16,).
    Table(Tensor),
    /// Floats of 8 bits with 4 bits of exponent and without infinities, times the scale.
    E4M3,
    /// Floats of 8 bits with 5 bits of exponent, times the scale.
    E5M2,
}

/// A number for each group of each row.
#[derive(Debug, Clone)]
pub enum CodedNumbers {
    /// f16, bf16 or f32 (N, groups).
    Floats(Tensor),
    /// u8 (N, groups): whole numbers.
    Whole(Tensor),
    /// Bytes that are indices of a table of numbers.
    Bytes {
        /// u8 (N, groups).
        bytes: Tensor,
        /// f32 (256,).
        table: Tensor,
    },
    /// `factor · (number - middle)`.
    Nested {
        /// u8 (N, groups).
        numbers: Tensor,
        /// f16 (N, factors): equal numbers of neighbouring groups share one.
        factors: Tensor,
        /// The number that is subtracted first.
        middle: u8,
    },
}

/// Codes (N, K), one byte each, on the host.
#[derive(Debug, Clone, Copy)]
pub struct HostCodes<'a> {
    /// The codes, row by row, each below 2^bits.
    pub codes: &'a [u8],
    /// N.
    pub outputs: usize,
    /// K.
    pub inputs: usize,
    /// The number of bits of a code: 2, 3, 4, 5, 6 or 8.
    pub bits: usize,
}

impl CodedWeight {
    /// Copies a weight to the device of its scales. Every number of columns of a group, `group`, has one scale.
    ///
    /// # Errors
    /// For bits, groups, shapes or dtypes that do not fit, and if memory is short.
    pub fn new(codes: HostCodes, group: usize, values: CodedValues, scales: CodedNumbers) -> Result<Self> {
        let HostCodes { outputs, inputs, bits, .. } = codes;
        if !matches!(bits, 2..=6 | 8) {
            bail!("[{OP}] expected codes of 2, 3, 4, 5, 6 or 8 bits, found {bits}")
        }
        if outputs == 0 || inputs == 0 || group == 0 || !inputs.is_multiple_of(group) {
            bail!("[{OP}] expected groups that divide the columns, found ({outputs}, {inputs}) in groups of {group}")
        }
        if codes.codes.len() != outputs * inputs {
            bail!("[{OP}] expected {outputs} by {inputs} codes, found {}", codes.codes.len())
        }
        let largest = codes.codes.iter().max().copied().unwrap_or(0);
        if bits < 8 && largest >> bits > 0 {
            bail!("[{OP}] expected codes of {bits} bits, found {largest}")
        }
        let groups = inputs / group;
        scales.check("scales", outputs, groups)?;
        match &values {
            CodedValues::Zeros(zeros) => zeros.check("zeros", outputs, groups)?,
            CodedValues::Minimums(minimums) => minimums.check("minimums", outputs, groups)?,
            CodedValues::Table(table) => {
                if bits > 4 || table.dims() != [16] || table.dtype() != DType::F32 {
                    bail!("[{OP}] expected 16 numbers in f32 for codes of up to 4 bits, found {table:?} for {bits}")
                }
            }
            CodedValues::E4M3 | CodedValues::E5M2 if bits != 8 => {
                bail!("[{OP}] expected floats of 8 bits, found codes of {bits} bits")
            }
            CodedValues::Signed | CodedValues::E4M3 | CodedValues::E5M2 => {}
        }
        let device = scales.numbers().device().clone();
        let split = Planes::of(bits);
        let low = split.pack(&codes, split.low_bits, 0, &device)?;
        let high = match split.high_bits {
            0 => None,
            high_bits => Some(split.pack(&codes, high_bits, split.low_bits, &device)?),
        };
        Ok(Self { inputs, bits, group, values, scales, low, high })
    }

    /// Returns N.
    pub fn outputs(&self) -> usize {
        self.low.dims()[0]
    }

    /// Returns K.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Returns the device of the codes.
    pub fn device(&self) -> &Device {
        self.low.device()
    }

    /// Returns the number of bytes of codes and scales on the device.
    pub fn memory(&self) -> usize {
        self.tensors().iter().map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Returns some rows. They share the memory of the weight.
    ///
    /// # Errors
    /// For rows past the last one.
    pub fn rows(&self, rows: Range<usize>) -> Result<Self> {
        self.map_rows(|tensor| tensor.narrow(0, rows.start, rows.len()))
    }

    /// Returns copies of the rows with these numbers, u32 (rows,).
    ///
    /// # Errors
    /// For numbers on another device, and on a CPU for rows past the last one.
    pub fn select_rows(&self, numbers: &Tensor) -> Result<Self> {
        self.map_rows(|tensor| tensor.index_select(numbers, 0))
    }

    /// Applies a function to each tensor that has a row for each row of the weight.
    fn map_rows(&self, of_rows: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let values = match &self.values {
            CodedValues::Zeros(zeros) => CodedValues::Zeros(zeros.map_rows(&of_rows)?),
            CodedValues::Minimums(minimums) => CodedValues::Minimums(minimums.map_rows(&of_rows)?),
            other => other.clone(),
        };
        Ok(Self {
            values,
            scales: self.scales.map_rows(&of_rows)?,
            low: of_rows(&self.low)?,
            high: self.high.as_ref().map(&of_rows).transpose()?,
            ..*self
        })
    }

    pub(super) fn bits(&self) -> usize {
        self.bits
    }

    pub(super) fn group(&self) -> usize {
        self.group
    }

    pub(super) fn groups(&self) -> usize {
        self.inputs / self.group
    }

    pub(super) fn values(&self) -> &CodedValues {
        &self.values
    }

    pub(super) fn scales(&self) -> &CodedNumbers {
        &self.scales
    }

    /// Returns the zeros or the minimums.
    pub(super) fn offsets(&self) -> Option<&CodedNumbers> {
        match &self.values {
            CodedValues::Zeros(offsets) | CodedValues::Minimums(offsets) => Some(offsets),
            _ => None,
        }
    }

    pub(super) fn low(&self) -> &Tensor {
        &self.low
    }

    pub(super) fn high(&self) -> Option<&Tensor> {
        self.high.as_ref()
    }

    fn tensors(&self) -> Vec<&Tensor> {
        let mut tensors = vec![&self.low];
        tensors.extend(&self.high);
        if let CodedValues::Table(table) = &self.values {
            tensors.push(table);
        }
        for numbers in [Some(&self.scales), self.offsets()].into_iter().flatten() {
            tensors.push(numbers.numbers());
            tensors.extend(numbers.table());
        }
        tensors
    }
}

impl CodedNumbers {
    /// Returns the tensor with an entry for each group.
    pub(super) fn numbers(&self) -> &Tensor {
        match self {
            Self::Floats(numbers) | Self::Whole(numbers) => numbers,
            Self::Bytes { bytes, .. } => bytes,
            Self::Nested { numbers, .. } => numbers,
        }
    }

    /// Returns the table or the factors.
    pub(super) fn table(&self) -> Option<&Tensor> {
        match self {
            Self::Floats(_) | Self::Whole(_) => None,
            Self::Bytes { table, .. } => Some(table),
            Self::Nested { factors, .. } => Some(factors),
        }
    }

    /// Returns the code of 0 of nested numbers, whose codes are unsigned; 0 for numbers that are not nested.
    pub(super) fn middle(&self) -> u8 {
        match self {
            Self::Nested { middle, .. } => *middle,
            _ => 0,
        }
    }

    fn map_rows(&self, of_rows: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(match self {
            Self::Floats(numbers) => Self::Floats(of_rows(numbers)?),
            Self::Whole(numbers) => Self::Whole(of_rows(numbers)?),
            Self::Bytes { bytes, table } => Self::Bytes { bytes: of_rows(bytes)?, table: table.clone() },
            Self::Nested { numbers, factors, middle } => {
                Self::Nested { numbers: of_rows(numbers)?, factors: of_rows(factors)?, middle: *middle }
            }
        })
    }

    fn check(&self, what: &str, outputs: usize, groups: usize) -> Result<()> {
        let numbers = self.numbers();
        let has_dtype = match self {
            Self::Floats(_) => matches!(numbers.dtype(), DType::F16 | DType::BF16 | DType::F32),
            _ => numbers.dtype() == DType::U8,
        };
        if numbers.dims() != [outputs, groups] || !has_dtype || !numbers.is_contiguous() {
            bail!("[{OP}] expected {what} ({outputs}, {groups}) in floats or bytes, found {numbers:?}")
        }
        match self {
            Self::Bytes { table, .. } if table.dims() != [256] || table.dtype() != DType::F32 => {
                bail!("[{OP}] expected a table of 256 {what} in f32, found {table:?}")
            }
            Self::Nested { factors, .. } => match *factors.dims() {
                [rows, columns]
                    if rows == outputs
                        && columns > 0
                        && groups.is_multiple_of(columns)
                        && factors.dtype() == DType::F16
                        && factors.is_contiguous() =>
                {
                    Ok(())
                }
                _ => {
                    bail!("[{OP}] expected factors in f16 for the {groups} {what} of {outputs} rows, found {factors:?}")
                }
            },
            _ => Ok(()),
        }
    }
}

/// Returns the number of columns of a chunk for codes of some bits: CODE_CHUNK in the source.
pub(super) fn columns_of_chunk(bits: usize) -> usize {
    if bits == 8 { 16 } else { 32 }
}

/// How the bits of codes are divided into planes.
struct Planes {
    low_bits: usize,
    high_bits: usize,
    chunk: usize,
}

impl Planes {
    fn of(bits: usize) -> Self {
        let low_bits = match bits {
            8 => 8,
            4..=6 => 4,
            _ => 2,
        };
        Self { low_bits, high_bits: bits - low_bits, chunk: columns_of_chunk(bits) }
    }

    /// Copies `bits` bits of each code, from the bit `shift` on, to a device: u32 (N, words).
    fn pack(&self, codes: &HostCodes, bits: usize, shift: usize, device: &Device) -> Result<Tensor> {
        let words_of_chunk = self.chunk * bits / 32;
        let words_of_row = codes.inputs.div_ceil(self.chunk) * words_of_chunk;
        let mask = 0x0101_0101 * ((1u32 << bits) - 1);
        let mut words = vec![0u32; codes.outputs * words_of_row];
        for (row, to) in codes.codes.chunks_exact(codes.inputs).zip(words.chunks_exact_mut(words_of_row)) {
            let chunks = row.chunks(self.chunk).zip(to.chunks_exact_mut(words_of_chunk));
            for (number, (columns, plane)) in chunks.enumerate() {
                for position in 0..self.chunk / QUARTET {
                    let quartet = quartet(columns, self.first_column(number, position));
                    plane[position * bits / 8] |= (quartet >> shift & mask) << (position % (8 / bits) * bits);
                }
            }
        }
        Tensor::from_vec(words, (codes.outputs, words_of_row), device)
    }

    /// Returns the first column, in its chunk, of the quartet at a position of a chunk.
    fn first_column(&self, chunk: usize, position: usize) -> usize {
        let octets = self.chunk / OCTET;
        let octet = (position / 2 + chunk / (64 / self.chunk)) % octets;
        octet * OCTET + position % 2 * QUARTET
    }
}

/// Returns the four codes from a column on as the bytes of a word; 0 behind the last one.
fn quartet(codes: &[u8], column: usize) -> u32 {
    let mut bytes = [0; QUARTET];
    for (byte, &code) in bytes.iter_mut().zip(codes.get(column..).unwrap_or_default()) {
        *byte = code;
    }
    u32::from_le_bytes(bytes)
}
