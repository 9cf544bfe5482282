//! Reads the header of a GGUF file: its metadata, and the names, shapes, types and places of its tensors.
//!
//! Candle's [`Content::read`] refuses a file with one tensor of a type that Candle does not have. Here such a tensor
//! becomes an entry of the metadata ([`OTHER_TENSORS`]), since a [`Content`] cannot describe it.

use std::collections::HashMap;
use std::io::{self, BufReader, Read, Seek, SeekFrom};

use candle_core::quantized::gguf_file::{Content, DEFAULT_ALIGNMENT, TensorInfo as CandleInfo, Value, VersionedMagic};
use candle_core::{Error, Result, bail};

use candle_attention_modules::ggml::GgmlType;

/// The beginning of the metadata keys of tensors whose type Candle does not have. The name of the tensor follows. The
/// value is a list: the number of the type, the offset, and the dimensions, the first one first.
pub(super) const OTHER_TENSORS: &str = "candle_attention.tensor.";

/// The first four bytes of a file.
const MAGIC: u32 = 0x4655_4747;

/// llama.cpp's limits, and the deepest lists of lists.
const MOST_DIMENSIONS: u32 = 4;
const DEEPEST_LIST: usize = 64;

/// Reads the header of a file, which may have tensors of any type. The number of bytes that is allocated follows the
/// size of the file.
///
/// # Errors
/// For a file that is no GGUF file, and one that cannot be read.
pub fn read<R: Read + Seek>(reader: &mut R) -> Result<Content> {
    let size = reader.seek(SeekFrom::End(0))?;
    reader.seek(SeekFrom::Start(0))?;
    let header = Header { reader: BufReader::new(reader), size, position: 0, version: VersionedMagic::GgufV3 };
    header.read().map_err(|error| match &error {
        Error::Io(cause) if cause.kind() == io::ErrorKind::UnexpectedEof => {
            Error::msg("[gguf] the file ends within its header, expected a whole GGUF file")
        }
        Error::Io(cause) => Error::msg(format!("[gguf] {cause}")),
        _ => error,
    })
}

/// The header of a file that is being read.
struct Header<R> {
    reader: BufReader<R>,
    /// The size of the file in bytes.
    size: u64,
    /// The number of bytes that were read.
    position: u64,
    version: VersionedMagic,
}

impl<R: Read + Seek> Header<R> {
    fn read(mut self) -> Result<Content> {
        let magic = self.u32()?;
        if magic != MAGIC {
            bail!("[gguf] the file begins with 0x{magic:08x}, expected GGUF's 0x{MAGIC:08x}")
        }
        self.version = match self.u32()? {
            1 => VersionedMagic::GgufV1,
            2 => VersionedMagic::GgufV2,
            3 => VersionedMagic::GgufV3,
            other if (1..=3).contains(&other.swap_bytes()) => {
                bail!("[gguf] the bytes of numbers have the order of a big-endian machine, expected little-endian")
            }
            other => bail!("[gguf] the version is {other}, expected 1, 2 or 3"),
        };
        let tensor_count = self.length()?;
        let entry_count = self.length()?;
        // The fewest bytes of an entry and of a tensor: a text without characters, a type and a value; a text, the
        // number of dimensions, a type and an offset.
        let length_bytes = self.length_bytes();
        let entry_bytes = entry_count.saturating_mul(length_bytes + 4 + 1);
        let needed = entry_bytes.saturating_add(tensor_count.saturating_mul(length_bytes + 4 + 4 + 8));
        let remaining = self.remaining();
        if needed > remaining {
            bail!(
                "[gguf] the header declares {tensor_count} tensors and {entry_count} metadata entries, which need at \
                 least {needed} bytes, but only {remaining} remain"
            )
        }
        let mut metadata = HashMap::new();
        for _ in 0..entry_count {
            self.read_entry(&mut metadata)?;
        }
        let mut tensor_infos = HashMap::new();
        for _ in 0..tensor_count {
            self.read_tensor(&mut tensor_infos, &mut metadata)?;
        }
        let alignment = alignment(&metadata)?;
        let Some(tensor_data_offset) = self.position.checked_next_multiple_of(alignment) else {
            bail!("[gguf] general.alignment is {alignment}, expected less than the size of the file")
        };
        Ok(Content { magic: self.version, metadata, tensor_infos, tensor_data_offset })
    }

    /// Reads a key and its value.
    fn read_entry(&mut self, metadata: &mut HashMap<String, Value>) -> Result<()> {
        let key = self.text()?;
        let kind = self.u32()?;
        let value = self.value(kind, 0)?;
        if key.starts_with(OTHER_TENSORS) {
            bail!("[gguf] the metadata have the key {key}, which is reserved")
        }
        if metadata.contains_key(&key) {
            bail!("[gguf] the metadata have the key {key} twice")
        }
        metadata.insert(key, value);
        Ok(())
    }

    /// Reads the description of a tensor. One of a type that Candle does not have is added to the metadata.
    fn read_tensor(
        &mut self,
        infos: &mut HashMap<String, CandleInfo>,
        metadata: &mut HashMap<String, Value>,
    ) -> Result<()> {
        let name = self.text()?;
        let rank = self.u32()?;
        if rank > MOST_DIMENSIONS {
            bail!("[gguf] {name} has {rank} dimensions, expected at most {MOST_DIMENSIONS}")
        }
        let mut dims = Vec::with_capacity(rank as usize);
        for _ in 0..rank {
            // The widest unsigned number that a dimension can have, if it does not fit: such a tensor is too large.
            dims.push(usize::try_from(self.length()?).unwrap_or(usize::MAX));
        }
        // The file has the last dimension first.
        dims.reverse();
        let type_number = self.u32()?;
        let offset = self.u64()?;
        let info = TensorInfo { type_number, offset, dims };
        if infos.contains_key(&name) || metadata.contains_key(&format!("{OTHER_TENSORS}{name}")) {
            bail!("[gguf] the file has the tensor {name} twice")
        }
        info.insert(name, infos, metadata);
        Ok(())
    }

    /// Returns the number of bytes that were not read yet.
    fn remaining(&self) -> u64 {
        self.size.saturating_sub(self.position)
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        self.position += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// Returns the number of bytes of a length.
    fn length_bytes(&self) -> u64 {
        if self.version == VersionedMagic::GgufV1 { 4 } else { 8 }
    }

    /// Reads a length, a count or a dimension.
    fn length(&mut self) -> Result<u64> {
        if self.version == VersionedMagic::GgufV1 { self.u32().map(u64::from) } else { self.u64() }
    }

    /// Reads a text. Bytes that are no UTF-8 are replaced, and zeros at the end are removed, since files have both.
    fn text(&mut self) -> Result<String> {
        let length = self.length()?;
        let remaining = self.remaining();
        if length > remaining {
            bail!("[gguf] a text has {length} bytes, but only {remaining} remain in the file")
        }
        let mut bytes = vec![0; length as usize];
        self.reader.read_exact(&mut bytes)?;
        self.position += length;
        while bytes.last() == Some(&0) {
            bytes.pop();
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Reads a value of a kind; `depth` is the number of lists that it is in.
    fn value(&mut self, kind: u32, depth: usize) -> Result<Value> {
        Ok(match kind {
            0 => Value::U8(u8::from_le_bytes(self.bytes()?)),
            1 => Value::I8(i8::from_le_bytes(self.bytes()?)),
            2 => Value::U16(u16::from_le_bytes(self.bytes()?)),
            3 => Value::I16(i16::from_le_bytes(self.bytes()?)),
            4 => Value::U32(self.u32()?),
            5 => Value::I32(i32::from_le_bytes(self.bytes()?)),
            6 => Value::F32(f32::from_le_bytes(self.bytes()?)),
            7 => match self.bytes::<1>()? {
                [0] => Value::Bool(false),
                [1] => Value::Bool(true),
                [other] => bail!("[gguf] a value of true or false is {other}, expected 0 or 1"),
            },
            8 => Value::String(self.text()?),
            9 => self.list(depth)?,
            10 => Value::U64(self.u64()?),
            11 => Value::I64(i64::from_le_bytes(self.bytes()?)),
            12 => Value::F64(f64::from_le_bytes(self.bytes()?)),
            other => bail!("[gguf] a value has kind {other}, expected one of 0 to 12"),
        })
    }

    /// Reads a list.
    fn list(&mut self, depth: usize) -> Result<Value> {
        if depth >= DEEPEST_LIST {
            bail!("[gguf] the metadata have more than {DEEPEST_LIST} lists in one another")
        }
        let kind = self.u32()?;
        let length = self.length()?;
        let least_bytes = match kind {
            2 | 3 => 2,
            4..=6 => 4,
            8 => self.length_bytes(),
            9 => 4 + self.length_bytes(),
            10..=12 => 8,
            _ => 1,
        };
        let needed = length.saturating_mul(least_bytes);
        let remaining = self.remaining();
        if needed > remaining {
            bail!("[gguf] a list of {length} entries needs at least {needed} bytes, but only {remaining} remain")
        }
        let mut entries = Vec::new();
        for _ in 0..length {
            entries.push(self.value(kind, depth + 1)?);
        }
        Ok(Value::Array(entries))
    }
}

/// Returns the number of bytes of which the place of each tensor is a multiple.
fn alignment(metadata: &HashMap<String, Value>) -> Result<u64> {
    let alignment = match metadata.get("general.alignment") {
        Some(&Value::U8(bytes)) => bytes.into(),
        Some(&Value::U16(bytes)) => bytes.into(),
        Some(&Value::U32(bytes)) => bytes.into(),
        Some(&Value::I8(bytes)) => u64::try_from(bytes).unwrap_or(DEFAULT_ALIGNMENT),
        Some(&Value::I16(bytes)) => u64::try_from(bytes).unwrap_or(DEFAULT_ALIGNMENT),
        Some(&Value::I32(bytes)) => u64::try_from(bytes).unwrap_or(DEFAULT_ALIGNMENT),
        _ => DEFAULT_ALIGNMENT,
    };
    if alignment == 0 {
        bail!("[gguf] general.alignment is 0, expected at least 1")
    }
    Ok(alignment)
}

/// The description of a tensor in a file.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// The number of the tensor's type, as `ggml.h` lists types.
    pub type_number: u32,
    /// The number of bytes from the beginning of the file's tensors to this one.
    pub offset: u64,
    /// The shape: rows first, the numbers of a row last.
    pub dims: Vec<usize>,
}

impl TensorInfo {
    /// Finds a tensor of a file.
    pub(super) fn find(content: &Content, name: &str) -> Option<Self> {
        if let Some(info) = content.tensor_infos.get(name) {
            let type_number = GgmlType::number_of(info.ggml_dtype);
            return Some(Self { type_number, offset: info.offset, dims: info.shape.dims().to_vec() });
        }
        let Some(Value::Array(numbers)) = content.metadata.get(&format!("{OTHER_TENSORS}{name}")) else { return None };
        let [Value::U32(type_number), Value::U64(offset), stored_dims @ ..] = numbers.as_slice() else { return None };
        let mut dims = Vec::with_capacity(stored_dims.len());
        for dim in stored_dims {
            dims.push(usize::try_from(dim.to_u64().ok()?).ok()?);
        }
        Some(Self { type_number: *type_number, offset: *offset, dims })
    }

    /// Adds the tensor to a file: to its metadata, if Candle does not have its type.
    pub(super) fn insert(
        self,
        name: String,
        infos: &mut HashMap<String, CandleInfo>,
        metadata: &mut HashMap<String, Value>,
    ) {
        if let Some(ggml_dtype) = GgmlType::find(self.type_number).and_then(GgmlType::in_candle) {
            infos.insert(name, CandleInfo { ggml_dtype, shape: self.dims.into(), offset: self.offset });
            return;
        }
        let mut numbers = vec![Value::U32(self.type_number), Value::U64(self.offset)];
        numbers.extend(self.dims.into_iter().map(|dim| Value::U64(dim as u64)));
        metadata.insert(format!("{OTHER_TENSORS}{name}"), Value::Array(numbers));
    }
}

/// Returns the description of a tensor of a file that [`read`] or [`open`](super::open) read; `None` if the file does
/// not have it.
pub fn tensor_info(content: &Content, name: &str) -> Option<TensorInfo> {
    TensorInfo::find(content, name)
}

/// Returns the names of all tensors of a file that [`read`] or [`open`](super::open) read, in no order. A
/// [`Content`] lists the tensors of Candle's types alone.
pub fn tensor_names(content: &Content) -> impl Iterator<Item = &str> {
    let others = content.metadata.keys().filter_map(|key| key.strip_prefix(OTHER_TENSORS));
    content.tensor_infos.keys().map(String::as_str).chain(others)
}

/// Returns whether a file has a tensor of this name.
pub(super) fn has_tensor(content: &Content, name: &str) -> bool {
    content.tensor_infos.contains_key(name) || content.metadata.contains_key(&format!("{OTHER_TENSORS}{name}"))
}
