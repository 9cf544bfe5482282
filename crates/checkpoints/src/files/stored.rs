//! A tensor in a file: its offset and dtype, and how it is read.

use std::io::{Cursor, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::quantized::QuantizedEntry;
use super::quantized::floats::float8_of;
use super::raw::{RawTensor, open_at, read_error, zeroed};
use candle_attention_modules::base::{FLOATS, accumulation_dtype, fits_in_memory};

/// The number of elements that are read and converted at once.
const CHUNK: usize = 1 << 20;

/// A tensor that a file lists.
#[derive(Debug, Clone)]
pub(super) enum StoredEntry {
    /// A tensor that can be read.
    Stored(TensorLocation),
    /// A tensor of a dtype or layout that Candle does not have. Reading it is an error.
    Unreadable {
        /// The dtype, if Candle does not have it.
        dtype: Option<String>,
        /// The shape, if the file has it.
        shape: Option<Vec<usize>>,
        /// The text of the error.
        problem: String,
        /// The bytes, where a method of quantisation may read them.
        raw: Option<RawTensor>,
    },
    /// The weight of a quantised layer.
    Quantized {
        weight: QuantizedEntry,
        /// The tensor `weight` without its scales, if it has floats of 8 bits that Candle has too.
        unscaled: Option<TensorLocation>,
    },
}

impl StoredEntry {
    /// Returns the shape, if it is known.
    pub(super) fn shape(&self) -> Option<&[usize]> {
        match self {
            Self::Stored(stored) => Some(&stored.shape),
            Self::Unreadable { shape, .. } => shape.as_deref(),
            Self::Quantized { weight, .. } => Some(&weight.shape),
        }
    }

    /// Returns the bytes of a tensor that are in a file without gaps; `None` for other tensors.
    pub(super) fn raw(&self) -> Option<RawTensor> {
        match self {
            Self::Stored(stored) if stored.strides.is_none() && !stored.is_one_more => Some(RawTensor {
                file: stored.file.clone(),
                dtype: stored.dtype.into(),
                shape: stored.shape.clone(),
                start: stored.start,
                len: stored.shape.iter().product::<usize>() * stored.dtype.size_in_bytes(),
            }),
            Self::Unreadable { raw, .. } => raw.clone(),
            Self::Stored(_) | Self::Quantized { .. } => None,
        }
    }

    /// Returns the dtype of a tensor that has no floats, such as the codes of quantised weights.
    pub(super) fn packed_dtype(&self) -> Option<String> {
        match self {
            Self::Stored(stored) if stored.dtype != DType::F8E4M3 && !FLOATS.contains(&stored.dtype) => {
                Some(format!("{:?}", stored.dtype))
            }
            Self::Stored(_) | Self::Quantized { .. } => None,
            Self::Unreadable { dtype, .. } => dtype.clone(),
        }
    }

    /// Returns whether the tensor has floats of 8 bits, without scales.
    pub(super) fn is_float8(&self) -> bool {
        match self {
            Self::Stored(stored) => stored.dtype == DType::F8E4M3,
            Self::Unreadable { raw: Some(raw), .. } => float8_of(raw.dtype).is_some(),
            Self::Unreadable { raw: None, .. } | Self::Quantized { .. } => false,
        }
    }

    /// Returns a tensor of floats of 8 bits that Candle has too (E4M3).
    pub(super) fn into_float8(self) -> Option<TensorLocation> {
        match self {
            Self::Stored(stored) if stored.dtype == DType::F8E4M3 => Some(stored),
            _ => None,
        }
    }
}

/// A tensor that can be read: its location in a file.
#[derive(Debug, Clone)]
pub(super) struct TensorLocation {
    pub file: Arc<Path>,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// The strides in elements; `None` where the elements are in row-major order without gaps.
    pub strides: Option<Vec<usize>>,
    /// The offset of the first element in the file, in bytes.
    pub start: u64,
    /// The number of elements of the storage that the tensor is a view of.
    pub storage_len: usize,
    /// Whether the file has `1 + w` where PyTorch stores `w`. Reading subtracts 1.
    pub is_one_more: bool,
}

impl TensorLocation {
    /// Reads the tensor as `dtype` on `device`, from the file or from `mapped`.
    ///
    /// Elements are converted a chunk at a time, so that reading needs little more memory than the result.
    pub(super) fn read(&self, mapped: Option<&[u8]>, dtype: DType, device: &Device) -> Result<Tensor> {
        let count = self.shape.iter().product();
        let size = self.dtype.size_in_bytes();
        if count > self.storage_len {
            bail!(
                "shape {:?} repeats the {} elements of a storage (an expanded tensor); save it after .contiguous()",
                self.shape,
                self.storage_len
            )
        }
        if !fits_in_memory(&[count, dtype.size_in_bytes()]) {
            bail!("{count} elements do not fit in memory")
        }
        let result = Tensor::zeros(count, dtype, device)?;
        let mut elements = self.elements(mapped)?;
        let chunk_len = CHUNK.min(count.max(1));
        let mut buffer = zeroed(chunk_len * size)?;
        for start in (0..count).step_by(chunk_len) {
            let bytes = &mut buffer[..chunk_len.min(count - start) * size];
            elements.read_exact(bytes).map_err(|error| read_error(&self.file, &error))?;
            let chunk = Tensor::from_raw_buffer(bytes, self.dtype, &[bytes.len() / size], &Device::Cpu)?;
            result.slice_set(&chunk.to_dtype(dtype)?.to_device(device)?, 0, start)?;
        }
        let result = if self.is_one_more { one_less(&result)? } else { result };
        result.reshape(self.shape.as_slice())
    }

    /// Returns some rows of a matrix; `None` for a tensor that is no matrix, or has gaps between its elements.
    pub(super) fn rows(&self, rows: Range<usize>) -> Option<Self> {
        let &[_, columns] = self.shape.as_slice() else { return None };
        if self.strides.is_some() {
            return None;
        }
        Some(Self {
            shape: vec![rows.len(), columns],
            start: self.start + (rows.start * columns * self.dtype.size_in_bytes()) as u64,
            storage_len: rows.len() * columns,
            ..self.clone()
        })
    }

    /// Returns a reader of the elements in row-major order, without gaps.
    fn elements<'a>(&self, mapped: Option<&'a [u8]>) -> Result<Box<dyn Read + 'a>> {
        if let Some(mapped) = mapped {
            return Ok(Box::new(mapped));
        }
        let mut file = open_at(&self.file, self.start).map_err(|error| read_error(&self.file, &error))?;
        if let Some(strides) = &self.strides
            && let Some(span) = span(&self.shape, strides)
        {
            let size = self.dtype.size_in_bytes();
            let mut view = zeroed(span * size)?;
            file.read_exact(&mut view).map_err(|error| read_error(&self.file, &error))?;
            return Ok(Box::new(Cursor::new(gather(&view, size, &self.shape, strides)?)));
        }
        Ok(Box::new(file))
    }
}

/// Subtracts 1, and rounds once.
pub(crate) fn one_less(tensor: &Tensor) -> Result<Tensor> {
    (tensor.to_dtype(accumulation_dtype(tensor.dtype()))? - 1.0)?.to_dtype(tensor.dtype())
}

/// Returns the number of elements from the first of a view to its last; `None` for a view without elements, or one that
/// is too large to address.
pub(super) fn span(shape: &[usize], strides: &[usize]) -> Option<usize> {
    shape
        .iter()
        .zip(strides)
        .try_fold(1usize, |span, (&dim, &stride)| span.checked_add(dim.checked_sub(1)?.checked_mul(stride)?))
}

/// Returns the elements of a view without the gaps between them.
fn gather(view: &[u8], size: usize, shape: &[usize], strides: &[usize]) -> Result<Vec<u8>> {
    let mut gathered = zeroed(shape.iter().product::<usize>() * size)?;
    let mut index = vec![0; shape.len()];
    for element in gathered.chunks_exact_mut(size) {
        let offset: usize = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        element.copy_from_slice(&view[offset * size..][..size]);
        for (i, &dim) in index.iter_mut().zip(shape).rev() {
            *i += 1;
            if *i < dim {
                break;
            }
            *i = 0;
        }
    }
    Ok(gathered)
}
