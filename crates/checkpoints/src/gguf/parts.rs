//! Files in parts, as llama.cpp's `gguf-split` writes them: `name-00001-of-00003.gguf` and its followers.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Error, Result, bail};

use super::file::Blocks;
use super::header::{self, OTHER_TENSORS, TensorInfo, tensor_names};
use super::metadata::whole;
use candle_attention_modules::base::root;
use candle_attention_modules::ggml::GgmlType;

const PART: &str = "split.no";
const PARTS: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// A GGUF file of one or more parts.
///
/// ```no_run
/// use candle_attention::gguf;
/// use candle_core::Device;
/// # fn main() -> candle_core::Result<()> {
/// let mut file = gguf::open("model-00001-of-00003.gguf")?;
/// let attention = gguf::load_attention(&file.content, &mut file.reader, 0, &Device::Cpu)?;
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct GgufFile {
    /// The metadata of the first part, and the tensors of all parts.
    pub content: Content,
    /// A reader of all parts, to which the places of the tensors refer.
    pub reader: PartsReader,
}

/// Opens a file, by its first part if it has several, and reads the headers of all parts.
///
/// # Errors
/// As [`read`](super::read), with the name of the file; for a file that is not the first part, for a part that is
/// missing, and for parts that do not belong together.
pub fn open(path: impl AsRef<Path>) -> Result<GgufFile> {
    let path = path.as_ref();
    let mut parts = vec![FilePart::open(path)?];
    let first = &parts[0];
    let count = first.count(PARTS)?.unwrap_or(1);
    if count > 1 {
        let names = PartNames::of(path, first.count(PART)?.unwrap_or(0), count)?;
        for index in 1..count {
            let part = FilePart::open(&names.part(index))?;
            part.check(index, count)?;
            parts.push(part);
        }
    }
    joined(parts)
}

/// The names of the parts of a file.
struct PartNames {
    /// The folder, and the beginning of the name.
    folder: PathBuf,
    stem: String,
    count: usize,
}

impl PartNames {
    /// Returns the names of the parts, from the path of the first.
    fn of(path: &Path, index: usize, count: usize) -> Result<Self> {
        let own = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
        let Some(stem) = own.strip_suffix(&suffix(index, count)) else {
            bail!(
                "[gguf] {} is part {} of {count}, expected a name that ends with {}, by which the other parts are found",
                path.display(),
                index + 1,
                suffix(index, count)
            )
        };
        let names = Self { folder, stem: stem.to_string(), count };
        if index != 0 {
            bail!(
                "[gguf] {} is part {} of {count}, and has a part of the model; expected the first part, {}",
                path.display(),
                index + 1,
                names.part(0).display()
            )
        }
        Ok(names)
    }

    fn part(&self, index: usize) -> PathBuf {
        self.folder.join(format!("{}{}", self.stem, suffix(index, self.count)))
    }
}

/// Returns the end of the name of a part.
fn suffix(index: usize, count: usize) -> String {
    format!("-{:05}-of-{count:05}.gguf", index + 1)
}

/// One part of a file.
struct FilePart {
    path: PathBuf,
    content: Content,
    reader: File,
    /// The size in bytes.
    size: u64,
}

impl FilePart {
    fn open(path: &Path) -> Result<Self> {
        let named = |error: Error| {
            let text = root(&error).to_string();
            Error::msg(format!("[gguf] {}: {}", path.display(), text.trim_start_matches("[gguf] ")))
        };
        let mut reader = File::open(path).map_err(|error| named(error.into()))?;
        let content = header::read(&mut reader).map_err(named)?;
        let size = reader.seek(SeekFrom::End(0)).map_err(|error| named(error.into()))?;
        Ok(Self { path: path.to_path_buf(), content, reader, size })
    }

    fn fail<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        bail!("[gguf] {}: {message}", self.path.display())
    }

    /// Reads a whole number of the metadata.
    fn count(&self, key: &str) -> Result<Option<usize>> {
        let Some(found) = self.content.metadata.get(key) else { return Ok(None) };
        match whole(found) {
            Some(number) => Ok(Some(number)),
            None => self.fail(format!("{key} is {}, expected a whole number", super::metadata::shown(found))),
        }
    }

    /// Checks that this is part `index` of `count`.
    fn check(&self, index: usize, count: usize) -> Result<()> {
        for (key, expected) in [(PARTS, count), (PART, index)] {
            match self.count(key)? {
                Some(found) if found == expected => {}
                Some(found) => return self.fail(format!("{key} is {found}, expected {expected}")),
                None => return self.fail(format!("the metadata has no {key}, expected {expected}")),
            }
        }
        Ok(())
    }
}

/// Joins the parts of a file. The places of tensors become those in a reader of all parts.
fn joined(parts: Vec<FilePart>) -> Result<GgufFile> {
    let is_split = parts.len() > 1;
    let total = parts[0].count(TENSORS)?;
    let mut content: Option<Content> = None;
    let mut reader = PartsReader { parts: Vec::new(), position: 0 };
    let mut start = 0;
    for part in parts {
        if is_split {
            if let (Some(own), Some(expected)) = (part.count(TENSORS)?, total)
                && own != expected
            {
                return part.fail(format!("{TENSORS} is {own}, and {expected} in the first part"));
            }
            check_places(&part)?;
        }
        let FilePart { path, content: own, reader: file, size } = part;
        let placed = at(own, start);
        reader.parts.push(OpenPart { path: path.clone(), file, start, size });
        start += size;
        let Some(all) = &mut content else {
            content = Some(placed);
            continue;
        };
        let Content { metadata, tensor_infos, .. } = placed;
        let others = metadata.into_iter().filter(|(key, _)| key.starts_with(OTHER_TENSORS));
        let twice = |name: &str| format!("[gguf] {}: {name} is in an earlier part too", path.display());
        for (key, value) in others {
            let name = key.strip_prefix(OTHER_TENSORS).unwrap_or(&key);
            if header::has_tensor(all, name) {
                bail!("{}", twice(name))
            }
            all.metadata.insert(key, value);
        }
        for (name, info) in tensor_infos {
            if header::has_tensor(all, &name) {
                bail!("{}", twice(&name))
            }
            all.tensor_infos.insert(name, info);
        }
    }
    let Some(mut content) = content else { bail!("[gguf] expected a file with at least one part") };
    if is_split {
        let found = tensor_names(&content).count();
        if let Some(expected) = total.filter(|&expected| expected != found) {
            bail!(
                "[gguf] {}: {TENSORS} is {expected}, but all {} parts have {found} tensors",
                reader.parts[0].path.display(),
                reader.parts.len()
            )
        }
        // The content is that of a whole file.
        for key in [PART, PARTS, TENSORS] {
            content.metadata.remove(key);
        }
    }
    Ok(GgufFile { content, reader })
}

/// Checks that the tensors of a part end within it, since the reader of all parts would go on with the next one.
fn check_places(part: &FilePart) -> Result<()> {
    for name in tensor_names(&part.content) {
        let Some(info) = TensorInfo::find(&part.content, name) else { continue };
        // A tensor of an unknown type has an unknown size, and is not read.
        if GgmlType::find(info.type_number).is_none() {
            continue;
        }
        let bytes = Blocks::of(name, &info)?.bytes as u64;
        let end = part.content.tensor_data_offset.saturating_add(info.offset).saturating_add(bytes);
        if end > part.size {
            return part.fail(format!("{name} ends at byte {end}, but the file has {}", part.size));
        }
    }
    Ok(())
}

/// Returns the content of a part that begins at byte `start` of all parts, with the places of tensors from the
/// beginning of the first part on.
fn at(part: Content, start: u64) -> Content {
    let Content { magic, mut metadata, mut tensor_infos, tensor_data_offset } = part;
    let first = start.saturating_add(tensor_data_offset);
    for info in tensor_infos.values_mut() {
        info.offset = info.offset.saturating_add(first);
    }
    for (key, value) in &mut metadata {
        if key.starts_with(OTHER_TENSORS)
            && let Value::Array(numbers) = value
            && let Some(Value::U64(offset)) = numbers.get_mut(1)
        {
            *offset = offset.saturating_add(first);
        }
    }
    Content { magic, metadata, tensor_infos, tensor_data_offset: 0 }
}

/// A reader of the parts of a file, one after the other.
#[derive(Debug)]
pub struct PartsReader {
    parts: Vec<OpenPart>,
    position: u64,
}

#[derive(Debug)]
struct OpenPart {
    path: PathBuf,
    file: File,
    /// The number of bytes of all earlier parts.
    start: u64,
    /// The size in bytes.
    size: u64,
}

impl PartsReader {
    /// Opens the same files again, for a reader with its own position.
    ///
    /// # Errors
    /// If a file cannot be opened.
    pub fn reopen(&self) -> Result<Self> {
        let mut parts = Vec::with_capacity(self.parts.len());
        for OpenPart { path, start, size, .. } in &self.parts {
            let named = |error| Error::msg(format!("[gguf] {}: {error}", path.display()));
            parts.push(OpenPart {
                path: path.clone(),
                file: File::open(path).map_err(named)?,
                start: *start,
                size: *size,
            });
        }
        Ok(Self { parts, position: 0 })
    }
}

impl Read for PartsReader {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let position = self.position;
        let Some(part) = self.parts.iter_mut().find(|part| (part.start..part.start + part.size).contains(&position))
        else {
            return Ok(0);
        };
        let within = position - part.start;
        part.file.seek(SeekFrom::Start(within))?;
        let count = usize::try_from(part.size - within).unwrap_or(usize::MAX).min(bytes.len());
        let read = part.file.read(&mut bytes[..count])?;
        self.position += read as u64;
        Ok(read)
    }
}

impl Seek for PartsReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let size = self.parts.last().map_or(0, |part| part.start + part.size);
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(offset) => size.checked_add_signed(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        let Some(position) = position else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a seek to a negative position"));
        };
        self.position = position;
        Ok(position)
    }
}
