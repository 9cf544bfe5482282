//! A tensor in a file: its offset and dtype, and how it is read.

use std::fs::File;
use std::io::{Cursor, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Device, Error, Result, Tensor, bail};

use candle_attention_modules::base::{filled, fits_in_memory};

/// The number of elements that are read and converted at once.
const CHUNK: usize = 1 << 20;

/// The rows and columns of a block of a float8 weight that shares a scale, as in DeepSeek.
const BLOCK: usize = 128;

/// An entry of a file.
#[derive(Debug, Clone)]
pub(super) enum Entry {
    /// A tensor that can be read.
    Stored(Stored),
    /// A tensor of a dtype or layout that Candle does not have. Reading it is an error.
    Unreadable {
        /// The shape, if the file has it.
        shape: Option<Vec<usize>>,
        /// The text of the error.
        what: String,
    },
}

impl Entry {
    /// Returns the shape, if it is known.
    pub(super) fn shape(&self) -> Option<&[usize]> {
        match self {
            Self::Stored(stored) => Some(&stored.shape),
            Self::Unreadable { shape, .. } => shape.as_deref(),
        }
    }

    /// Returns whether it is a float8 tensor (E4M3).
    pub(super) fn is_float8(&self) -> bool {
        matches!(self, Self::Stored(stored) if stored.dtype == DType::F8E4M3)
    }
}

/// A tensor in a file.
#[derive(Debug, Clone)]
pub(super) struct Stored {
    pub file: Arc<Path>,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// The strides in elements; `None` where the elements are in row-major order without gaps.
    pub strides: Option<Vec<usize>>,
    /// The offset of the first element in the file, in bytes.
    pub start: u64,
    /// The number of elements of the storage that the tensor is a view of.
    pub storage_len: usize,
}

impl Stored {
    /// Reads the tensor as `dtype` on `device`, from the file or from `mapped`. A float8 tensor is multiplied by its
    /// scale.
    ///
    /// Elements are converted a chunk at a time, so that reading needs little more memory than the result.
    pub(super) fn read(
        &self,
        mapped: Option<&[u8]>,
        scale: Option<&Scale>,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let count = self.shape.iter().product();
        let own_dtype = self.dtype;
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
        let step = scale.map_or(CHUNK, |scale| (CHUNK / scale.columns).max(1) * scale.columns).min(count.max(1));
        let mut bytes = bytes(step * size)?;
        for start in (0..count).step_by(step) {
            let bytes = &mut bytes[..step.min(count - start) * size];
            elements.read_exact(bytes).map_err(|error| self.unreadable(error))?;
            let chunk = Tensor::from_raw_buffer(bytes, own_dtype, &[bytes.len() / size], &Device::Cpu)?;
            let chunk = match scale {
                Some(scale) => scale.apply(&chunk, start)?,
                None => chunk,
            };
            result.slice_set(&chunk.to_dtype(dtype)?.to_device(device)?, 0, start)?;
        }
        result.reshape(self.shape.as_slice())
    }

    /// Returns a reader of the elements in row-major order, without gaps.
    fn elements<'a>(&self, mapped: Option<&'a [u8]>) -> Result<Box<dyn Read + 'a>> {
        if let Some(mapped) = mapped {
            return Ok(Box::new(mapped));
        }
        let open = || -> std::io::Result<File> {
            let mut file = File::open(&self.file)?;
            file.seek(SeekFrom::Start(self.start))?;
            Ok(file)
        };
        let mut file = open().map_err(|error| self.unreadable(error))?;
        let size = self.dtype.size_in_bytes();
        match (&self.strides, self.strides.as_deref().and_then(|strides| span(&self.shape, strides))) {
            (Some(strides), Some(span)) => {
                let mut view = bytes(span * size)?;
                file.read_exact(&mut view).map_err(|error| self.unreadable(error))?;
                Ok(Box::new(Cursor::new(gather(&view, size, &self.shape, strides)?)))
            }
            _ => Ok(Box::new(file)),
        }
    }

    fn unreadable(&self, error: std::io::Error) -> Error {
        let file = self.file.display();
        Error::msg(match error.kind() {
            ErrorKind::UnexpectedEof => {
                format!("[weights] {file} ends before the tensor does; it was whole when it was opened")
            }
            _ => format!("[weights] cannot read {file}: {error}"),
        })
    }
}

/// The scale of a float8 weight: element (i, j) is multiplied by `values[i / block[0]][j / block[1]]`.
#[derive(Debug)]
pub(super) struct Scale {
    /// The number of columns of the weight.
    columns: usize,
    /// The number of rows and of columns that share a scale.
    block: [usize; 2],
    /// The scales, one row of blocks after the other.
    values: Vec<Vec<f32>>,
}

impl Scale {
    /// Returns a scale of one number, of one for each row, or of one for each block of 128 by 128; `None` for another
    /// shape.
    pub(super) fn new(weight: &[usize], scale: &Tensor) -> Result<Option<Self>> {
        let (rows, columns) = match *weight {
            [rows, columns] => (rows, columns),
            _ => (1, weight.iter().product()),
        };
        let (grid, block) = match *scale.dims() {
            _ if scale.elem_count() == 1 => ((1, 1), [rows, columns]),
            [n] | [n, 1] if n == rows => ((n, 1), [1, columns]),
            [n, m] if n == rows.div_ceil(BLOCK) && m == columns.div_ceil(BLOCK) => ((n, m), [BLOCK, BLOCK]),
            _ => return Ok(None),
        };
        let values = scale.to_dtype(DType::F32)?.reshape(grid)?.to_vec2()?;
        Ok(Some(Self { columns: columns.max(1), block: block.map(|len| len.max(1)), values }))
    }

    /// Multiplies whole rows, in a flat tensor that begins with element `start`.
    fn apply(&self, chunk: &Tensor, start: usize) -> Result<Tensor> {
        let mut values: Vec<f32> = chunk.to_dtype(DType::F32)?.to_vec1()?;
        for (row, i) in values.chunks_mut(self.columns).zip(start / self.columns..) {
            for (part, scale) in row.chunks_mut(self.block[1]).zip(&self.values[i / self.block[0]]) {
                part.iter_mut().for_each(|x| *x *= scale);
            }
        }
        let len = values.len();
        Tensor::from_vec(values, len, &Device::Cpu)
    }
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
    let mut gathered = bytes(shape.iter().product::<usize>() * size)?;
    let mut index = vec![0; shape.len()];
    for element in gathered.chunks_exact_mut(size) {
        let at: usize = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        element.copy_from_slice(&view[at * size..][..size]);
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

fn bytes(len: usize) -> Result<Vec<u8>> {
    match filled(&[len], 0) {
        Some(bytes) => Ok(bytes),
        None => bail!("{len} bytes do not fit in memory"),
    }
}
