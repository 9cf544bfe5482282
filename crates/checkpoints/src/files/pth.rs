//! State dicts as `torch.save` writes them: a zip archive of a pickle and, uncompressed, the storages it refers to.
//!
//! Candle's reader panics on pickles that are not as expected, reads no tensor with gaps between its elements, and
//! passes over unknown dtypes.
//!
//! A pickle can refer to one object many times, so that a small file describes many tensors with long names and shapes,
//! within many calls: names, ranks and calls are bounded.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Error, Result, Shape, bail};
use zip::read::ZipFile;
use zip::{CompressionMethod, ZipArchive};

use super::pickle::{Id, MAX_NAME, Object, Pickle};
use super::stored::{StoredEntry, TensorLocation, span};
use candle_attention_modules::base::is_addressable;

/// The largest number of bytes of all names and of the descriptions of unreadable tensors: several times the number of
/// the largest checkpoints.
const MAX_NAMES: usize = 1 << 26;
/// The largest number of dimensions of a tensor.
const MAX_RANK: usize = 16;
/// The largest number of calls around the call that makes a tensor. A parameter has one, a parameter of a subclass two.
const MAX_WRAPPERS: usize = 16;

/// The contents of a file.
pub(super) struct PthContents {
    /// The tensors by name. The names of a nested dict are `key.name`.
    pub entries: BTreeMap<String, StoredEntry>,
    /// `n_head` of the `model_args` that nanoGPT saves with its state dict.
    pub n_head: Option<i64>,
}

/// Reads the contents of a file.
///
/// # Errors
/// For a file that is no such archive, or whose tensors reach beyond their storages.
pub(super) fn contents(path: &Path) -> Result<PthContents> {
    let file = File::open(path)?;
    let file_len = file.metadata()?.len();
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(Error::msg)?;
    let root_of = |name: &str| {
        let root = name.strip_suffix("data.pkl")?;
        (root.is_empty() || root.ends_with('/')).then(|| root.to_string())
    };
    let roots: Vec<_> = archive.file_names().flatten().filter_map(|name| root_of(&name)).collect();
    let [root] = roots.as_slice() else {
        bail!("a zip archive with {} files named data.pkl, expected the one of torch.save", roots.len())
    };
    let root = root.clone();
    if let Ok(order) = bytes_of(&mut archive, &format!("{root}byteorder"))
        && order != b"little"
    {
        bail!("byte order {:?}, expected \"little\"", String::from_utf8_lossy(&order))
    }
    let pickle = bytes_of(&mut archive, &format!("{root}data.pkl"))?;
    let pickle = Pickle::read(&pickle).map_err(|problem| Error::msg(format!("data.pkl: {problem}")))?;
    let mut reader = Reader { path: path.into(), archive, file_len, root, pickle, storages: HashMap::new() };
    Ok(PthContents { entries: reader.state_dict()?, n_head: reader.n_head() })
}

/// The bytes of a storage in the file.
#[derive(Debug, Clone, Copy)]
struct PthStorage {
    start: u64,
    len: usize,
}

/// An archive that is being opened.
struct Reader {
    path: Arc<Path>,
    archive: ZipArchive<BufReader<File>>,
    file_len: u64,
    root: String,
    pickle: Pickle,
    /// The storages that were found, which tensors often share.
    storages: HashMap<String, PthStorage>,
}

impl Reader {
    fn n_head(&self) -> Option<i64> {
        let pickle = &self.pickle;
        let value = |dict: Id, key: &str| match pickle.get(dict) {
            Object::Dict(entries) => {
                entries.iter().find(|&&(name, _)| pickle.text(name) == Some(key)).map(|entry| entry.1)
            }
            _ => None,
        };
        value(value(pickle.top, "model_args")?, "n_head").and_then(|n_head| pickle.int(n_head))
    }

    fn state_dict(&mut self) -> Result<BTreeMap<String, StoredEntry>> {
        if !matches!(self.pickle.get(self.pickle.top), Object::Dict(_)) {
            bail!("{} was saved, expected a state dict (`module.state_dict()`)", self.describe(self.pickle.top))
        }
        let mut tensors = BTreeMap::new();
        let mut names_len = 0;
        // A dict can contain itself, so each is read once.
        let mut seen = HashSet::from([self.pickle.top]);
        let mut open = vec![(String::new(), self.pickle.top)];
        while let Some((prefix, dict)) = open.pop() {
            let Object::Dict(entries) = self.pickle.get(dict) else { continue };
            for (key, value) in entries.clone() {
                let name = match self.pickle.get(key) {
                    Object::Text(text) => text.clone(),
                    Object::Int(number) => number.to_string(),
                    _ => continue,
                };
                if prefix.len() + name.len() > MAX_NAME {
                    bail!("a name of {} bytes, expected at most {MAX_NAME}", prefix.len() + name.len())
                }
                let name = format!("{prefix}{name}");
                names_len += name.len();
                if names_len > MAX_NAMES {
                    bail!("names of more than {MAX_NAMES} bytes in all")
                }
                match self.pickle.get(value) {
                    Object::Dict(_) if seen.insert(value) => open.push((format!("{name}."), value)),
                    Object::Call { function, arguments } => {
                        let entry = self.entry(&name, *function, *arguments)?;
                        if let StoredEntry::Unreadable { problem, .. } = &entry {
                            names_len += problem.len();
                        }
                        if tensors.insert(name.clone(), entry).is_some() {
                            bail!("the tensor {name} is in the file twice")
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(tensors)
    }

    /// Reads the tensor that a call makes, through the calls of parameters and subclasses around it.
    fn entry(&mut self, name: &str, mut function: Id, mut arguments: Id) -> Result<StoredEntry> {
        for _ in 0..=MAX_WRAPPERS {
            if self.pickle.global(function) == Some("torch._utils._rebuild_tensor_v2") {
                return self.tensor(name, arguments);
            }
            let Some(inner) = self.wrapped_call(function, arguments) else {
                return Ok(self.unreadable(name, &self.describe(function)));
            };
            (function, arguments) = inner;
        }
        bail!("the tensor {name} is wrapped in more than {MAX_WRAPPERS} calls")
    }

    /// Returns the function and the arguments of the call that a parameter or a subclass wraps.
    fn wrapped_call(&self, function: Id, arguments: Id) -> Option<(Id, Id)> {
        let items = self.pickle.tuple(arguments).unwrap_or_default();
        match (self.pickle.global(function)?, items) {
            ("torch._tensor._rebuild_from_type_v2", &[inner, _, inner_arguments, ..]) => Some((inner, inner_arguments)),
            ("torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state", &[data, ..]) => {
                match *self.pickle.get(data) {
                    Object::Call { function: inner, arguments: inner_arguments } => Some((inner, inner_arguments)),
                    _ => None,
                }
            }
            _ => None,
        }
    }

    /// Reads the arguments of `_rebuild_tensor_v2`: storage, offset, shape, strides, and others that do not change
    /// values.
    fn tensor(&mut self, name: &str, arguments: Id) -> Result<StoredEntry> {
        let malformed = || Error::msg(format!("the tensor {name} is not described as torch.save does"));
        let &[storage_id, offset, shape, strides, ..] = self.pickle.tuple(arguments).unwrap_or_default() else {
            return Err(malformed());
        };
        let (class, key) = self.storage_class_and_key(storage_id).ok_or_else(malformed)?;
        let Some(dtype) = dtype(class) else { return Ok(self.unreadable(name, class)) };
        let (Some(offset), Some(shape), Some(strides)) = (self.size(offset), self.sizes(shape), self.sizes(strides))
        else {
            return Err(malformed());
        };
        if shape.len() != strides.len() {
            return Err(malformed());
        }
        if !is_addressable(&shape) {
            bail!("the tensor {name} has shape {shape:?}, which is too large to address")
        }
        let key = key.to_string();
        let storage = self.storage(&key)?;
        let element = dtype.size_in_bytes();
        let storage_len = storage.len / element;
        let within = match span(&shape, &strides) {
            Some(span) => offset.checked_add(span).is_some_and(|end| end <= storage_len),
            None => shape.contains(&0),
        };
        if !within {
            bail!(
                "the tensor {name} of shape {shape:?}, strides {strides:?} and offset {offset} reaches beyond its \
                 storage of {storage_len} elements"
            )
        }
        let strides = (!Shape::from(shape.as_slice()).is_contiguous(&strides)).then_some(strides);
        let start = storage.start.saturating_add((offset as u64).saturating_mul(element as u64));
        let file = self.path.clone();
        Ok(StoredEntry::Stored(TensorLocation { file, dtype, shape, strides, start, storage_len, is_one_more: false }))
    }

    /// Returns the class of a storage, which tells its dtype, and its name in the archive.
    fn storage_class_and_key(&self, id: Id) -> Option<(&str, &str)> {
        let Object::Persistent(description) = *self.pickle.get(id) else { return None };
        let &[tag, class, key, ..] = self.pickle.tuple(description)? else { return None };
        if self.pickle.text(tag)? != "storage" {
            return None;
        }
        Some((self.pickle.global(class)?, self.pickle.text(key)?))
    }

    fn size(&self, id: Id) -> Option<usize> {
        self.pickle.int(id).and_then(|value| usize::try_from(value).ok())
    }

    fn sizes(&self, id: Id) -> Option<Vec<usize>> {
        let ids = self.pickle.tuple(id).filter(|ids| ids.len() <= MAX_RANK)?;
        ids.iter().map(|&size| self.size(size)).collect()
    }

    fn unreadable(&self, name: &str, kind: &str) -> StoredEntry {
        let problem = format!("{} has {name} as {kind}, which cannot be read", self.path.display());
        StoredEntry::Unreadable { dtype: None, shape: None, problem, raw: None }
    }

    fn storage(&mut self, key: &str) -> Result<PthStorage> {
        if let Some(storage) = self.storages.get(key) {
            return Ok(*storage);
        }
        let name = format!("{}data/{key}", self.root);
        let file = uncompressed(&mut self.archive, &name)?;
        let end = file.data_start().and_then(|start| start.checked_add(file.size()));
        let (Some(start), Ok(len), true) =
            (file.data_start(), usize::try_from(file.size()), end.is_some_and(|end| end <= self.file_len))
        else {
            bail!("{name} has {} bytes, which the file does not have", file.size())
        };
        let storage = PthStorage { start, len };
        self.storages.insert(key.to_string(), storage);
        Ok(storage)
    }

    /// Describes an object, for errors.
    fn describe(&self, id: Id) -> String {
        match self.pickle.get(id) {
            Object::Global(name) => name.clone(),
            Object::Call { function, .. } => {
                format!("an object of {}", self.pickle.global(*function).unwrap_or("a class"))
            }
            Object::Tuple(items) => format!("a tuple of {}", items.len()),
            Object::Text(_) => "a text".into(),
            Object::Int(_) => "a number".into(),
            _ => "something else".into(),
        }
    }
}

/// Reads a small file of the archive.
fn bytes_of(archive: &mut ZipArchive<BufReader<File>>, name: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    uncompressed(archive, name)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Opens a file of the archive that is not compressed.
fn uncompressed<'a>(archive: &'a mut ZipArchive<BufReader<File>>, name: &str) -> Result<ZipFile<'a, BufReader<File>>> {
    let file = archive.by_name(name).map_err(|error| Error::msg(format!("{name}: {error}")))?;
    if file.compression() != CompressionMethod::Stored {
        bail!("{name} is compressed, expected it as torch.save writes it")
    }
    Ok(file)
}

fn dtype(class: &str) -> Option<DType> {
    Some(match class {
        "torch.FloatStorage" => DType::F32,
        "torch.DoubleStorage" => DType::F64,
        "torch.HalfStorage" => DType::F16,
        "torch.BFloat16Storage" => DType::BF16,
        "torch.ByteStorage" | "torch.BoolStorage" => DType::U8,
        "torch.ShortStorage" => DType::I16,
        "torch.IntStorage" => DType::I32,
        "torch.LongStorage" => DType::I64,
        _ => return None,
    })
}
