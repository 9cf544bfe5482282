//! State dicts as `torch.save` writes them: a zip archive of a pickle and, uncompressed, the storages it refers to.
//!
//! Candle's own reader takes well-meant files only: it panics on pickles that are not as expected, reads no tensor with
//! gaps between its elements, and passes over dtypes it does not know.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::Init;
use candle_nn::var_builder::SimpleBackend;
use zip::{CompressionMethod, ZipArchive};

use super::pickle::{Id, Object, Pickle};
use crate::size::{filled, is_addressable};

/// The tensors of a file, by their names: of a nested dict as `key.name`.
#[derive(Debug, Clone)]
pub(super) struct Pth {
    path: PathBuf,
    tensors: BTreeMap<String, Entry>,
}

#[derive(Debug, Clone)]
enum Entry {
    Stored(Stored),
    /// Something that this crate does not read, and what it is: an error for those who ask for it only.
    Unreadable(String),
}

/// A view into a storage, in elements.
#[derive(Debug, Clone)]
struct Stored {
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<usize>,
    offset: usize,
    storage: Storage,
}

/// Where the bytes of a storage lie in the file.
#[derive(Debug, Clone, Copy)]
struct Storage {
    start: u64,
    len: usize,
}

impl Pth {
    /// # Errors
    /// For a file that is no such archive, or whose tensors do not lie within their storages.
    pub(super) fn open(path: &Path) -> Result<Self> {
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
        if let Ok(order) = contents(&mut archive, &format!("{root}byteorder"))
            && order != b"little"
        {
            bail!("byte order {:?}, expected \"little\"", String::from_utf8_lossy(&order))
        }
        let pickle = contents(&mut archive, &format!("{root}data.pkl"))?;
        let pickle = Pickle::read(&pickle).map_err(|problem| Error::msg(format!("data.pkl: {problem}")))?;
        let mut reader = Reader { archive, file_len, root, pickle, storages: HashMap::new() };
        let tensors = reader.state_dict()?;
        Ok(Self { path: path.to_path_buf(), tensors })
    }

    /// Names and shapes of the tensors that can be read.
    pub(super) fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.tensors.iter().filter_map(|(name, entry)| match entry {
            Entry::Stored(stored) => Some((name.as_str(), stored.shape.as_slice())),
            Entry::Unreadable(_) => None,
        })
    }

    fn find(&self, name: &str) -> Result<&Stored> {
        match self.tensors.get(name) {
            Some(Entry::Stored(stored)) => Ok(stored),
            Some(Entry::Unreadable(what)) => bail!("{} holds {what}, which cannot be read", self.path.display()),
            None => Err(Error::CannotFindTensor { path: name.to_string() }.bt()),
        }
    }

    /// The elements of a view, in the order of its shape.
    fn read(&self, stored: &Stored) -> Result<Tensor> {
        let Stored { dtype, shape, strides, offset, storage } = stored;
        let size = dtype.size_in_bytes();
        let count: usize = shape.iter().product();
        let Some(span) = span(shape, strides) else { return Tensor::zeros(shape.as_slice(), *dtype, &Device::Cpu) };
        if count > storage.len / size {
            bail!(
                "shape {shape:?} repeats the {} elements of a storage (an expanded tensor); save it after .contiguous()",
                storage.len / size
            )
        }
        let mut file = File::open(&self.path)?;
        file.seek(SeekFrom::Start(storage.start + (offset * size) as u64))?;
        let mut bytes = buffer(span * size)?;
        file.read_exact(&mut bytes)?;
        if span != count || !is_row_major(shape, strides) {
            bytes = gather(&bytes, stored)?;
        }
        Tensor::from_raw_buffer(&bytes, *dtype, shape, &Device::Cpu)
    }
}

impl SimpleBackend for Pth {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let got = Shape::from(self.find(name)?.shape.as_slice());
        if got != shape {
            let msg = format!("shape mismatch for {name}");
            return Err(Error::UnexpectedShape { msg, expected: shape, got }.bt());
        }
        self.get_unchecked(name, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.read(self.find(name)?)?.to_dtype(dtype)?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

/// An archive that is being opened.
struct Reader {
    archive: ZipArchive<BufReader<File>>,
    file_len: u64,
    root: String,
    pickle: Pickle,
    /// Tensors often share one.
    storages: HashMap<String, Storage>,
}

impl Reader {
    fn state_dict(&mut self) -> Result<BTreeMap<String, Entry>> {
        if !matches!(self.pickle.get(self.pickle.top), Object::Dict(_)) {
            bail!("{} was saved, expected a state dict (`module.state_dict()`)", self.describe(self.pickle.top))
        }
        let mut tensors = BTreeMap::new();
        // A dict can stand in itself: each is looked at once.
        let mut seen = HashSet::from([self.pickle.top]);
        let mut open = vec![(String::new(), self.pickle.top)];
        while let Some((prefix, dict)) = open.pop() {
            let Object::Dict(entries) = self.pickle.get(dict) else { continue };
            for (key, value) in entries.clone() {
                let name = match self.pickle.get(key) {
                    Object::Text(text) => format!("{prefix}{text}"),
                    Object::Int(number) => format!("{prefix}{number}"),
                    _ => continue,
                };
                match self.pickle.get(value) {
                    Object::Dict(_) if seen.insert(value) => open.push((format!("{name}."), value)),
                    Object::Call { function, arguments } => {
                        let entry = self.entry(&name, *function, *arguments)?;
                        if tensors.insert(name.clone(), entry).is_some() {
                            bail!("the tensor {name} stands there twice")
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(tensors)
    }

    fn entry(&mut self, name: &str, mut function: Id, mut arguments: Id) -> Result<Entry> {
        // Parameters and subclasses wrap a tensor. A call refers to objects that stand before it: the loop ends.
        loop {
            let items = self.pickle.tuple(arguments).unwrap_or_default();
            let inner = match (self.pickle.global(function), items) {
                (Some("torch._utils._rebuild_tensor_v2"), _) => return self.tensor(name, arguments),
                (Some("torch._tensor._rebuild_from_type_v2"), &[function, _, arguments, ..]) => {
                    Some((function, arguments))
                }
                (
                    Some("torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state"),
                    &[data, ..],
                ) => match *self.pickle.get(data) {
                    Object::Call { function, arguments } => Some((function, arguments)),
                    _ => None,
                },
                _ => None,
            };
            let Some(inner) = inner else {
                return Ok(Entry::Unreadable(format!("{name} as {}", self.describe(function))));
            };
            (function, arguments) = inner;
        }
    }

    /// The arguments of `_rebuild_tensor_v2`: storage, offset, shape, strides, and what has no bearing on the values.
    fn tensor(&mut self, name: &str, arguments: Id) -> Result<Entry> {
        let malformed = || Error::msg(format!("the tensor {name} is not described as torch.save does"));
        let arguments = self.pickle.tuple(arguments).unwrap_or_default();
        let &[storage, offset, shape, strides, ..] = arguments else { return Err(malformed()) };
        let Object::Persistent(storage) = *self.pickle.get(storage) else { return Err(malformed()) };
        let storage = self.pickle.tuple(storage).ok_or_else(malformed)?;
        let &[tag, class, key, ..] = storage else { return Err(malformed()) };
        let (Some("storage"), Some(class), Some(key)) =
            (self.pickle.text(tag), self.pickle.global(class), self.pickle.text(key))
        else {
            return Err(malformed());
        };
        let Some(dtype) = dtype(class) else { return Ok(Entry::Unreadable(format!("{name} as {class}"))) };
        let size = |id: Id| self.pickle.int(id).and_then(|value| usize::try_from(value).ok());
        let sizes = |id: Id| self.pickle.tuple(id)?.iter().map(|&id| size(id)).collect::<Option<Vec<_>>>();
        let (Some(offset), Some(shape), Some(strides)) = (size(offset), sizes(shape), sizes(strides)) else {
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
        let elements = storage.len / dtype.size_in_bytes();
        let within = match span(&shape, &strides) {
            Some(span) => offset.checked_add(span).is_some_and(|end| end <= elements),
            None => shape.contains(&0),
        };
        if !within {
            bail!(
                "the tensor {name} of shape {shape:?}, strides {strides:?} and offset {offset} reaches beyond its storage of {elements} elements"
            )
        }
        Ok(Entry::Stored(Stored { dtype, shape, strides, offset, storage }))
    }

    fn storage(&mut self, key: &str) -> Result<Storage> {
        if let Some(storage) = self.storages.get(key) {
            return Ok(*storage);
        }
        let name = format!("{}data/{key}", self.root);
        let file = self.archive.by_name(&name).map_err(|error| Error::msg(format!("{name}: {error}")))?;
        if file.compression() != CompressionMethod::Stored {
            bail!("{name} is compressed, expected it as torch.save writes it")
        }
        let end = file.data_start().and_then(|start| start.checked_add(file.size()));
        let (Some(start), Ok(len), true) =
            (file.data_start(), usize::try_from(file.size()), end.is_some_and(|end| end <= self.file_len))
        else {
            bail!("{name} has {} bytes, which the file does not hold", file.size())
        };
        let storage = Storage { start, len };
        self.storages.insert(key.to_string(), storage);
        Ok(storage)
    }

    /// An object in words, for errors.
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

/// A small file of the archive.
fn contents(archive: &mut ZipArchive<BufReader<File>>, name: &str) -> Result<Vec<u8>> {
    let file = archive.by_name(name).map_err(|error| Error::msg(format!("{name}: {error}")))?;
    if file.compression() != CompressionMethod::Stored {
        bail!("{name} is compressed, expected it as torch.save writes it")
    }
    let mut bytes = Vec::new();
    let mut reader = file;
    reader.read_to_end(&mut bytes)?;
    Ok(bytes)
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

/// Elements from the first of a view to its last; `None` for a view without elements, or one too large to address.
fn span(shape: &[usize], strides: &[usize]) -> Option<usize> {
    shape
        .iter()
        .zip(strides)
        .try_fold(1usize, |span, (&dim, &stride)| span.checked_add(dim.checked_sub(1)?.checked_mul(stride)?))
}

fn is_row_major(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(&dim, &stride)| {
        let fits = dim == 1 || stride == expected;
        expected *= dim;
        fits
    })
}

/// The elements of a view, without the gaps between them.
fn gather(bytes: &[u8], Stored { dtype, shape, strides, .. }: &Stored) -> Result<Vec<u8>> {
    let size = dtype.size_in_bytes();
    let count: usize = shape.iter().product();
    let mut gathered = buffer(count * size)?;
    let mut index = vec![0; shape.len()];
    for element in gathered.chunks_exact_mut(size) {
        let at: usize = index.iter().zip(strides).map(|(i, stride)| i * stride).sum();
        element.copy_from_slice(&bytes[at * size..][..size]);
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

fn buffer(len: usize) -> Result<Vec<u8>> {
    match filled(&[len], 0) {
        Some(bytes) => Ok(bytes),
        None => bail!("{len} bytes do not fit in memory"),
    }
}
