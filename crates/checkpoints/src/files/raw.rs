//! The bytes of a tensor in a file.

use std::fs::File;
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use candle_core::{Error, Result, bail};
use safetensors::Dtype;

use candle_attention_modules::base::filled;

/// The bytes of a tensor in a file, of any dtype.
#[derive(Debug, Clone)]
pub(super) struct RawTensor {
    pub file: Arc<Path>,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// The offset of the first byte in the file.
    pub start: u64,
    /// The number of bytes.
    pub len: usize,
}

impl RawTensor {
    /// Reads the bytes.
    pub(super) fn read(&self) -> Result<Vec<u8>> {
        let mut bytes = zeroed(self.len)?;
        let mut file = open_at(&self.file, self.start).map_err(|error| read_error(&self.file, &error))?;
        file.read_exact(&mut bytes).map_err(|error| read_error(&self.file, &error))?;
        Ok(bytes)
    }
}

/// Opens a file at an offset.
pub(super) fn open_at(path: &Path, start: u64) -> std::io::Result<File> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(start))?;
    Ok(file)
}

/// Returns the error of a file that was opened and cannot be read.
pub(super) fn read_error(path: &Path, error: &std::io::Error) -> Error {
    let file = path.display();
    Error::msg(match error.kind() {
        ErrorKind::UnexpectedEof => {
            format!("[weights] {file} ends before the tensor does; it was whole when it was opened")
        }
        _ => format!("[weights] cannot read {file}: {error}"),
    })
}

/// Returns `len` bytes of 0.
pub(super) fn zeroed(len: usize) -> Result<Vec<u8>> {
    match filled(&[len], 0) {
        Some(bytes) => Ok(bytes),
        None => bail!("{len} bytes do not fit in memory"),
    }
}
