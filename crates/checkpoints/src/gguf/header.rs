//! The header of a file: metadata, and where its tensors are.

use std::io::{self, Read, Seek, SeekFrom};

use candle_core::quantized::gguf_file::Content;
use candle_core::{Error, Result};

use candle_attention_core::internal::root;

/// The header of a file, which everything here reads: [`Content::read`], but for a file whose `general.alignment` is 0,
/// at which that panics.
///
/// # Errors
/// For such a file, one that is no GGUF file, and one that cannot be read.
pub fn read<R: Read + Seek>(reader: &mut R) -> Result<Content> {
    Content::read(&mut Header { reader, next: Next::Other })
        .map_err(|error| Error::msg(format!("[gguf] {}", root(&error))))
}

/// A file that Candle reads piece by piece: a key, the type of its value, the value.
struct Header<'a, R> {
    reader: &'a mut R,
    next: Next,
}

enum Next {
    TypeOfAlignment,
    Alignment,
    Other,
}

impl<R: Read> Read for Header<'_, R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.reader.read(bytes)
    }

    fn read_exact(&mut self, bytes: &mut [u8]) -> io::Result<()> {
        self.reader.read_exact(bytes)?;
        let are_zeros = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
        self.next = match (&self.next, &*bytes) {
            // Candle takes zeros off the end of a key.
            (_, key) if key.strip_prefix(b"general.alignment").is_some_and(are_zeros) => Next::TypeOfAlignment,
            (Next::TypeOfAlignment, [_, _, _, _]) => Next::Alignment,
            // Candle takes wider integers for no alignment.
            (Next::Alignment, value) if value.len() <= 4 && are_zeros(value) => {
                return Err(io::Error::other("general.alignment is 0, expected at least 1"));
            }
            _ => Next::Other,
        };
        Ok(())
    }
}

impl<R: Seek> Seek for Header<'_, R> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.reader.seek(to)
    }

    fn stream_position(&mut self) -> io::Result<u64> {
        self.reader.stream_position()
    }
}
