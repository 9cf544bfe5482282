//! The buffers of a cache: keys and values as floats, or as codes with scales.

use std::fmt;
use std::ops::Range;

use candle_core::{D, DType, Result, Tensor, bail};

use super::OP;
use super::quantize::{QuantizedRows, quantize};
use super::rotation::{Hadamard, rotated};
use super::tokens::NewTokens;
use crate::sdpa::decoded;
use candle_attention_call::{KvCodeFormat, KvScales};
use candle_attention_modules::base::{self, accumulation_dtype, part};

/// The format in which a cache stores keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StorageFormat {
    Floats(DType),
    Codes(KvCodeFormat),
}

impl fmt::Display for StorageFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Floats(dtype) => write!(f, "{dtype:?}"),
            Self::Codes(format) => write!(f, "{format}"),
        }
    }
}

impl StorageFormat {
    /// Checks that keys and values of these head dimensions can be stored.
    pub fn check_widths(self, op: &str, d: usize, d_v: usize) -> Result<()> {
        let Self::Codes(format) = self else { return Ok(()) };
        for (name, width) in [("keys", d), ("values", d_v)] {
            if !width.is_multiple_of(format.block()) {
                bail!(
                    "[{op}] {name} have {width} numbers in each head, expected a multiple of {} for {format}",
                    format.block()
                )
            }
        }
        Ok(())
    }

    /// Checks that the first scales of keys are the scales of the values in their first `d_v` columns.
    pub fn check_latents(self, op: &str, d: usize, d_v: usize) -> Result<()> {
        let Self::Codes(codes) = self else { return Ok(()) };
        let has_same_groups = codes.scales(d) == 1 || codes.group(d) == codes.group(d_v);
        if !has_same_groups {
            bail!(
                "[{op}] the latents of a token have {d_v} of {d} numbers, expected a multiple of {} for {self}",
                codes.group(d)
            )
        }
        Ok(())
    }
}

/// Keys or values.
#[derive(Debug, Clone)]
pub(crate) struct Buffer {
    /// Floats (B, H_kv, capacity, width) in a cache, (pages, page size, H_kv, width) in pages; of codes, their bytes.
    pub entries: Tensor,
    pub codes: Option<BufferCodes>,
}

/// The format, scales and rotation of codes.
#[derive(Debug, Clone)]
pub(crate) struct BufferCodes {
    pub format: KvCodeFormat,
    /// (.., scales of a row).
    pub scales: Tensor,
    /// The rotation of the rows before they became codes.
    pub rotation: Option<Hadamard>,
}

impl Buffer {
    /// Returns rows of any strides as a cache stores them. Rows that are rotated have blocks which divide all `widths`.
    pub fn encode(rows: &Tensor, format: StorageFormat, widths: &[usize]) -> Result<Self> {
        let rows = rows.detach();
        match format {
            StorageFormat::Floats(dtype) => Ok(Self { entries: rows.to_dtype(dtype)?.contiguous()?, codes: None }),
            StorageFormat::Codes(format) => {
                let rotation = Hadamard::of(format, widths);
                let QuantizedRows { codes, scales } = quantize(&rotated(&rows, rotation)?, format)?;
                Ok(Self { entries: codes, codes: Some(BufferCodes { format, scales, rotation }) })
            }
        }
    }

    /// Returns floats: a view of the buffer, or the numbers of its codes in `dtype`.
    pub fn floats(&self, dtype: DType) -> Result<Tensor> {
        match &self.codes {
            Some(BufferCodes { format, scales, rotation }) => {
                rotated(&decoded(&self.entries, scales, *format, dtype)?, *rotation)
            }
            None => Ok(self.entries.clone()),
        }
    }

    /// Returns the width of the rows in numbers.
    fn width(&self) -> usize {
        let entries = self.entries.dims().last().copied().unwrap_or(0);
        self.codes.as_ref().map_or(entries, |codes| codes.format.numbers(entries))
    }

    /// Returns the rotation of the rows.
    pub fn rotation(&self) -> Option<Hadamard> {
        self.codes.as_ref().and_then(|codes| codes.rotation)
    }

    /// Returns the tensors of the buffer.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.entries].into_iter().chain(self.codes.as_ref().map(|codes| &codes.scales))
    }

    /// Returns a view of the first columns of the rows: the values of latents.
    pub fn first_columns(&self, width: usize) -> Result<Self> {
        let Some(of_all) = &self.codes else {
            return Ok(Self { entries: self.entries.narrow(D::Minus1, 0, width)?, codes: None });
        };
        let scales = of_all.scales.narrow(D::Minus1, 0, of_all.format.scales(width))?;
        let entries = self.entries.narrow(D::Minus1, 0, of_all.format.bytes(width))?;
        Ok(Self { entries, codes: Some(BufferCodes { scales, ..*of_all }) })
    }

    /// Combines several buffers of one format: each tensor of the result is made by `combine` of this tensor of all.
    ///
    /// # Errors
    /// Without buffers, and as `combine`.
    pub fn combined(all: &[Self], combine: impl Fn(&[&Tensor]) -> Result<Tensor>) -> Result<Self> {
        let Some(first) = all.first() else { bail!("[{OP}] there are no buffers to combine") };
        let entries: Vec<_> = all.iter().map(|buffer| &buffer.entries).collect();
        let mut codes = None;
        if let Some(of_first) = &first.codes {
            let scales: Vec<_> = all.iter().filter_map(|buffer| Some(&buffer.codes.as_ref()?.scales)).collect();
            codes = Some(BufferCodes { scales: combine(&scales)?, ..*of_first });
        }
        Ok(Self { entries: combine(&entries)?, codes })
    }

    /// Returns the buffer with a function applied to its tensors.
    pub fn try_map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let codes = match &self.codes {
            Some(codes) => Some(BufferCodes { scales: f(&codes.scales)?, ..*codes }),
            None => None,
        };
        Ok(Self { entries: f(&self.entries)?, codes })
    }
}

/// Keys (B, H_kv, capacity, D) and values (B, H_kv, capacity, D_v), as floats or as codes. Views made by
/// [`rows`](Self::rows) share the storage: what is written to one is written to all.
#[derive(Debug, Clone)]
pub(super) struct KvBuffers {
    keys: Buffer,
    /// `None` if the values are the first `d_v` columns of the keys, which are then latents.
    values: Option<Buffer>,
    d_v: usize,
}

/// Rows of one sequence in the buffers of keys and values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct StoredRows {
    pub sequence: usize,
    /// The number of first rows, which store sink tokens and come before `rows`.
    pub sinks: usize,
    pub rows: Range<usize>,
}

/// The number of sequences, and of positions of each, that buffers have memory for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Room {
    pub sequences: usize,
    pub positions: usize,
}

/// The sizes of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KvSizes {
    pub h_kv: usize,
    pub d: usize,
    pub d_v: usize,
}

/// The shapes of keys and values, for errors.
pub(super) struct KvShapes {
    pub keys: String,
    pub values: String,
}

/// Keys (B, H_kv, rows, D) and values (B, H_kv, rows, D_v) as floats.
pub(crate) struct KvFloats {
    pub k: Tensor,
    pub v: Tensor,
}

impl KvFloats {
    /// Returns a copy of keys and values (B, H_kv, T, ..), in which `others` (1, H_kv, n, ..) follow the keys of every
    /// sequence.
    pub fn followed_by(&self, others: &Self) -> Result<Self> {
        let joined = |first: &Tensor, last: &Tensor| {
            let (_, h_kv, n, width) = last.dims4()?;
            let each = last.broadcast_as((first.dim(0)?, h_kv, n, width))?.contiguous()?;
            Tensor::cat(&[first, &each], 2)
        };
        Ok(Self { k: joined(&self.k, &others.k)?, v: joined(&self.v, &others.v)? })
    }
}

/// The codes of keys and values, and their scales.
pub(super) struct KvCodes {
    pub k: Tensor,
    pub v: Tensor,
    pub scales: KvScales<Tensor>,
    pub rotations: KvRotations,
}

/// The rotations of keys and of values before they became codes.
#[derive(Clone, Copy)]
pub(super) struct KvRotations {
    pub k: Option<Hadamard>,
    pub v: Option<Hadamard>,
}

impl KvBuffers {
    /// Returns buffers of keys and of values, which are the first `d_v` columns of the keys without `values`.
    pub fn of(keys: Buffer, values: Option<Buffer>, d_v: usize) -> Self {
        Self { keys, values, d_v }
    }

    /// Returns the buffers of keys and of values.
    pub fn into_parts(self) -> (Buffer, Option<Buffer>) {
        (self.keys, self.values)
    }

    /// Returns keys and values of any strides as a cache stores them. Without values, these are the first `d_v` columns
    /// of the keys.
    pub fn encode(k: &Tensor, v: Option<&Tensor>, d_v: usize, format: StorageFormat) -> Result<Self> {
        let d = k.dim(3)?;
        format.check_widths(OP, d, d_v)?;
        let Some(v) = v else {
            format.check_latents(OP, d, d_v)?;
            return Ok(Self { keys: Buffer::encode(k, format, &[d, d_v])?, values: None, d_v });
        };
        Ok(Self { keys: Buffer::encode(k, format, &[d])?, values: Some(Buffer::encode(v, format, &[d_v])?), d_v })
    }

    /// Returns buffers of zeros in the format of these.
    pub fn zeros(&self, room: Room) -> Result<Self> {
        self.try_map(|tensor| {
            let (_, h, _, width) = tensor.dims4()?;
            let dims = [room.sequences, h, room.positions, width];
            check_memory(&dims, tensor.dtype())?;
            Tensor::zeros(&dims, tensor.dtype(), tensor.device())
        })
    }

    /// Returns new buffers that store rows of some sequences, the first row of each in row 0.
    pub fn gather(&self, sequences: &[StoredRows], room: Room) -> Result<Self> {
        let gathered = self.zeros(room)?;
        for (n, stored) in sequences.iter().enumerate() {
            gathered.write_stored(n, self, stored)?;
        }
        Ok(gathered)
    }

    /// Returns a copy in new memory.
    pub fn copy(&self) -> Result<Self> {
        self.try_map(|tensor| {
            check_memory(tensor.dims(), tensor.dtype())?;
            tensor.force_contiguous()
        })
    }

    /// Returns the number of positions of a sequence that there is memory for.
    pub fn capacity(&self) -> usize {
        self.keys.entries.dims()[2]
    }

    /// Returns the numbers of sequences and positions that there is memory for.
    pub fn room(&self) -> Room {
        Room { sequences: self.keys.entries.dims()[0], positions: self.capacity() }
    }

    /// Returns the format in which keys and values are stored.
    pub fn format(&self) -> StorageFormat {
        match &self.keys.codes {
            Some(codes) => StorageFormat::Codes(codes.format),
            None => StorageFormat::Floats(self.keys.entries.dtype()),
        }
    }

    /// Returns the dtype in which attention to the floats is computed, for a layer whose keys have `key_dtype`.
    pub fn float_dtype(&self, key_dtype: DType) -> DType {
        match self.keys.codes {
            Some(_) => accumulation_dtype(key_dtype),
            None => self.keys.entries.dtype(),
        }
    }

    /// Returns whether sequences of other buffers can be written to these, if there is memory for them.
    pub fn accepts(&self, other: &Self) -> bool {
        // The numbers of sequences and of positions, dimensions 0 and 2, may differ.
        let fits = |tensor: &Tensor, written: &Tensor| {
            tensor.dtype() == written.dtype()
                && tensor.device().same_device(written.device())
                && [1, 3].iter().all(|&dim| tensor.dims()[dim] == written.dims()[dim])
        };
        self.format() == other.format()
            && self.values.is_some() == other.values.is_some()
            && self.d_v == other.d_v
            && self.tensors().zip(other.tensors()).all(|(tensor, written)| fits(tensor, written))
    }

    /// Returns the sizes of keys and values; `None` for latents.
    pub fn sizes(&self) -> Option<KvSizes> {
        let &[_, h_kv, _, _] = self.keys.entries.dims() else { return None };
        self.values.as_ref().map(|_| KvSizes { h_kv, d: self.keys.width(), d_v: self.d_v })
    }

    /// Returns the shapes of keys and values.
    pub fn shapes(&self) -> KvShapes {
        let shape = |buffer: &Buffer| {
            let dims = buffer.entries.dims();
            format!("({}, {}, T, {}) on {:?}", dims[0], dims[1], buffer.width(), buffer.entries.device().location())
        };
        let values = match &self.values {
            Some(values) => shape(values),
            None => format!("in their first {} columns", self.d_v),
        };
        KvShapes { keys: shape(&self.keys), values }
    }

    /// Returns the number of bytes of all buffers.
    pub fn bytes(&self) -> usize {
        self.tensors().map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Returns keys and values as floats: views of the buffers, or the numbers of codes in `dtype`.
    pub fn floats(&self, dtype: DType) -> Result<KvFloats> {
        let k = self.keys.floats(dtype)?;
        let v = match &self.values {
            Some(values) => values.floats(dtype)?,
            None => part(&k, 3, 0..self.d_v)?,
        };
        Ok(KvFloats { k, v })
    }

    /// Returns some columns of the keys as floats.
    pub fn key_columns(&self, columns: &Range<usize>, dtype: DType) -> Result<Tensor> {
        match &self.keys.codes {
            // A number of a block depends on the others.
            Some(codes) if codes.format.block() > 1 => part(&self.keys.floats(dtype)?, 3, columns.clone()),
            codes => {
                let entries = part(&self.keys.entries, 3, columns.clone())?;
                Buffer { entries, codes: codes.clone() }.floats(dtype)
            }
        }
    }

    /// Returns the codes of keys and values, if they are stored as codes.
    pub fn codes(&self) -> Result<Option<KvCodes>> {
        let Some(of_keys) = &self.keys.codes else { return Ok(None) };
        let format = of_keys.format;
        let values = match &self.values {
            Some(values) => values.clone(),
            None => self.keys.first_columns(self.d_v)?,
        };
        let Some(of_values) = values.codes else { return Ok(None) };
        Ok(Some(KvCodes {
            k: self.keys.entries.clone(),
            v: values.entries,
            scales: KvScales { format, k: of_keys.scales.clone(), v: of_values.scales },
            rotations: KvRotations { k: of_keys.rotation, v: of_values.rotation },
        }))
    }

    /// Returns a view of some rows of all sequences.
    pub fn rows(&self, rows: &Range<usize>) -> Result<Self> {
        self.try_map(|tensor| tensor.narrow(2, rows.start, rows.len()))
    }

    /// Returns a view of the first `n` sequences.
    pub fn first_sequences(&self, n: usize) -> Result<Self> {
        self.try_map(|tensor| tensor.narrow(0, 0, n))
    }

    /// Returns a view of some rows of one sequence, as buffers of a batch of 1.
    pub fn rows_of_sequence(&self, sequence: usize, rows: &Range<usize>) -> Result<Self> {
        self.rows(rows)?.try_map(|tensor| tensor.narrow(0, sequence, 1))
    }

    /// Writes all rows of `from` to every sequence, from row `start` on.
    pub fn write(&self, start: usize, from: &Self) -> Result<()> {
        for (tensor, rows) in self.tensors().zip(from.tensors()) {
            if rows.elem_count() > 0 {
                tensor.slice_set(&rows.contiguous()?, 2, start)?;
            }
        }
        Ok(())
    }

    /// Writes all rows of `from`, buffers of one sequence, to one sequence, from row `start` on.
    pub fn write_sequence(&self, sequence: usize, start: usize, from: &Self) -> Result<()> {
        self.try_map(|tensor| tensor.narrow(0, sequence, 1))?.write(start, from)
    }

    /// Writes stored rows of other buffers to one sequence, the first row to row 0.
    pub fn write_stored(&self, sequence: usize, from: &Self, stored: &StoredRows) -> Result<()> {
        let StoredRows { sequence: source, sinks, ref rows } = *stored;
        if sinks > 0 {
            self.write_sequence(sequence, 0, &from.rows_of_sequence(source, &(0..sinks))?)?;
        }
        self.write_sequence(sequence, sinks, &from.rows_of_sequence(source, rows)?)
    }

    /// Writes the tokens of a call behind the first rows of each sequence, of which there are `counts`.
    pub fn append(&self, kv: &Self, counts: &[usize], new: &NewTokens) -> Result<()> {
        let start = counts.first().copied().unwrap_or(0);
        if new.all_valid() && counts.iter().all(|&count| count == start) {
            return self.write(start, kv);
        }
        for (sequence, (&count, tokens)) in counts.iter().zip(&new.tokens).enumerate() {
            self.write_sequence(sequence, count, &kv.rows_of_sequence(sequence, tokens)?)?;
        }
        Ok(())
    }

    fn try_map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let keys = self.keys.try_map(&f)?;
        let values = match &self.values {
            Some(values) => Some(values.try_map(&f)?),
            None => None,
        };
        Ok(Self { keys, values, d_v: self.d_v })
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        [&self.keys].into_iter().chain(&self.values).flat_map(Buffer::tensors)
    }
}

fn check_memory(dims: &[usize], dtype: DType) -> Result<()> {
    base::check_memory(OP, format_args!("a buffer of {dims:?}"), &[dims, &[dtype.size_in_bytes()]].concat())
}
