//! Files of weights in all formats.

mod at_load;
mod backend;
mod infer;
mod layers;
pub(crate) mod mlx;
mod pickle;
mod pth;
mod quantized;
mod raw;
mod safetensors;
mod stored;

#[cfg(feature = "hub")]
pub(crate) use self::safetensors::ShardIndex;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(not(feature = "hub"))]
use self::safetensors::ShardIndex;
use backend::CheckpointBackend;
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Error, Result, bail};
use candle_nn::VarBuilder;
use mlx::Origin;
use quantized::Settings;
use quantized::float8::{ScaleBlock, USUAL_BLOCK};
use serde_json::{Value, json};
use stored::StoredEntry;

pub(crate) use layers::OF_MLX;
pub(crate) use stored::one_less;

use candle_attention_modules::base::{ConfigMethod, QuantizationFormat, SCALES, moved_names, root};

/// Opens the weights at `path` and returns a builder that converts them to `dtype`: [`Checkpoint::open`] and
/// [`Checkpoint::var_builder`] in one.
///
/// # Errors
/// As [`Checkpoint::open`] and [`Checkpoint::var_builder`].
#[doc(alias("load_state_dict", "load_file"))]
pub fn open(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    Checkpoint::open(path)?.var_builder(dtype, device)
}

/// Opens weights as [`open`] does, with safetensors files mapped into memory instead of read. Files of `torch.save` are
/// read.
///
/// # Safety
/// As [`VarBuilder::from_mmaped_safetensors`]: while the builder lives, no process may write to the files or truncate
/// them.
///
/// # Errors
/// As [`open`].
pub unsafe fn open_mmaped(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    let checkpoint = Checkpoint::open(path)?;
    // SAFETY: the files do not change while they are mapped, which this function requires of its caller.
    let mapped = unsafe { MmapedSafetensors::multi(&checkpoint.safetensors)? };
    Ok(checkpoint.builder(Some(mapped), dtype, device))
}

/// The names and shapes of a checkpoint's tensors; a builder over it reads their values.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    entries: Arc<BTreeMap<String, StoredEntry>>,
    /// The files that are safetensors.
    safetensors: Vec<PathBuf>,
    /// The `model_args` that nanoGPT saves with its weights, or else the config.json next to the files; null without
    /// either.
    config: Value,
    /// The library that wrote the files.
    origin: Origin,
    /// The format in which plain weights of linear layers are read.
    quantization: Option<QuantizationFormat>,
}

/// The files that a folder may have, in the order in which they are looked for.
const FILES: [&str; 10] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pth",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "diffusion_pytorch_model.bin",
    "consolidated.safetensors",
    "consolidated.00.pth",
];

impl Checkpoint {
    /// Opens a safetensors file, a file that `torch.save` wrote of a state dict (one in a dict is found below its key),
    /// the index of a checkpoint's shards (`model.safetensors.index.json`, `pytorch_model.bin.index.json`), or a folder
    /// with one of these under its usual name. The content of a file tells its format, not the name.
    ///
    /// Names with `/` between their parts, as flax and Keras have, become names with `.`, so that a prefix of a builder
    /// finds them.
    ///
    /// In a model that MLX converted, convolutions (C, K, 1) become (C, 1, K), and norms that MLX stores as `1 + w`
    /// become `w`, as PyTorch stores both. The header of a file, or the shapes of its convolutions, show that MLX wrote
    /// it; its layers, or the `config.json` next to it, show which model it is.
    ///
    /// # Errors
    /// If there is no such file, or it is truncated, or it is neither format; the message names the file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if !path.is_dir() {
            return if path.extension().is_some_and(|extension| extension == "json") {
                Self::from_files(&shards(path)?)
            } else {
                Self::from_files(&[path])
            };
        }
        match FILES.iter().map(|name| path.join(name)).find(|file| file.is_file()) {
            Some(file) => Self::open(file),
            None => bail!("[weights] {} has none of {}", path.display(), FILES.join(", ")),
        }
    }

    /// Opens one file, or the shards of one checkpoint.
    ///
    /// # Errors
    /// As [`open`](Self::open), and for a tensor that is in two files.
    pub fn from_files<P: AsRef<Path>>(files: &[P]) -> Result<Self> {
        let [first, ..] = files else { bail!("[weights] expected at least one file, found none") };
        let mut entries = BTreeMap::new();
        let mut safetensors = Vec::new();
        let mut files_of_mlx = BTreeSet::new();
        let mut metadata = HashMap::new();
        let mut n_head = None;
        for file in files.iter().map(AsRef::as_ref) {
            refuse_cut_tensors(file)?;
            let file_entries = if starts_like_a_zip(file)? {
                let contents = pth::contents(file).map_err(|error| cannot_read(file, &error))?;
                n_head = n_head.or(contents.n_head);
                contents.entries
            } else {
                safetensors.push(file.to_path_buf());
                let contents = safetensors::contents(file).map_err(|error| cannot_read(file, &error))?;
                if contents.is_of_mlx {
                    files_of_mlx.insert(Arc::from(file));
                }
                metadata.extend(contents.metadata);
                contents.entries
            };
            for (name, entry) in with_dots(file_entries) {
                if entries.contains_key(&name) {
                    bail!("[weights] {name} is in {} and in another file before it", file.display())
                }
                entries.insert(name, entry);
            }
        }
        let config = match n_head {
            Some(n_head) => json!({"model_args": {"n_head": n_head}}),
            None => config_next_to(first.as_ref()),
        };
        let origin = mlx::undo(&mut entries, &files_of_mlx, &config);
        join_quantized(&mut entries, &config, &metadata);
        Ok(Self { entries: Arc::new(entries), safetensors, config, origin, quantization: None })
    }

    /// Returns a builder at the root of the checkpoint, which reads each tensor from its file when a layer requests it.
    ///
    /// A quantised layer has one weight (out, in), which the builder returns dequantised. A builder of
    /// [`DType::F8E4M3`] returns floats of 8 bits as stored, without their scales. A weight of a method that is not
    /// read is an error that names the method.
    ///
    /// # Errors
    /// None at present.
    pub fn var_builder(&self, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
        Ok(self.builder(None, dtype, device))
    }

    fn builder(&self, mapped: Option<MmapedSafetensors>, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(
            Box::new(CheckpointBackend { checkpoint: self.clone(), mapped }),
            dtype,
            device.clone(),
        )
    }

    /// Returns the files that are safetensors, for Candle's builders, which read no other files.
    #[must_use]
    pub fn safetensors(&self) -> &[PathBuf] {
        &self.safetensors
    }

    /// Returns the names and shapes of all tensors, in alphabetical order.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.entries.iter().filter_map(|(name, entry)| Some((name.as_str(), entry.shape()?)))
    }

    /// Returns whether there is a tensor of this name that is not the scale of another.
    fn contains(&self, name: &str) -> bool {
        self.entry(name).is_some() && !self.is_scale(name)
    }

    /// Returns the tensor of this name, also of a name with `/` as in the file, and of a name with an empty part:
    /// `vb.pp("")` puts a `.` in front of each name.
    fn entry(&self, name: &str) -> Option<&StoredEntry> {
        let in_file = self.entries.get(name);
        if in_file.is_some() {
            return in_file;
        }
        let parts: Vec<_> = name.split(['/', '.']).filter(|part| !part.is_empty()).collect();
        self.entries.get(&parts.join("."))
    }

    /// Returns the name under which the checkpoint has a tensor that is not the scale of another: this name, or the
    /// name to which PEFT moved the tensor.
    fn stored_name(&self, name: &str) -> Option<String> {
        std::iter::once(name.to_string()).chain(moved_names(name)).find(|stored| self.contains(stored))
    }

    /// Returns the blocks of floats of 8 bits that share a scale, by the config or else the usual ones.
    fn block(&self) -> ScaleBlock {
        Settings::new(&self.config).block().unwrap_or(USUAL_BLOCK)
    }

    /// Returns whether a tensor is the scale of floats of 8 bits that it does not fit.
    fn is_scale(&self, name: &str) -> bool {
        let weight = SCALES.iter().find_map(|suffix| name.strip_suffix(suffix));
        weight.and_then(|weight| self.entry(weight)).is_some_and(StoredEntry::is_float8)
    }
}

/// Returns the tensors of a file with `.` in their names for `/`, which flax and Keras write between the parts of a
/// name. A name stays as it is if another tensor has the name with `.`.
fn with_dots(entries: BTreeMap<String, StoredEntry>) -> BTreeMap<String, StoredEntry> {
    let (with_slashes, mut renamed): (BTreeMap<_, _>, BTreeMap<_, _>) =
        entries.into_iter().partition(|(name, _)| name.contains('/'));
    for (name, entry) in with_slashes {
        let with_dots = name.replace('/', ".");
        let is_free = !renamed.contains_key(&with_dots);
        renamed.insert(if is_free { with_dots } else { name }, entry);
    }
    renamed
}

/// Returns the config.json next to a file; null without one. ModelOpt may write what it says of quantisation into
/// hf_quant_config.json.
fn config_next_to(file: &Path) -> Value {
    let read = |name| -> Value {
        let text = std::fs::read(file.with_file_name(name)).unwrap_or_default();
        serde_json::from_slice(&text).unwrap_or_default()
    };
    let mut config = read("config.json");
    if ConfigMethod::object(&config).is_none()
        && let Some(quantization) = read("hf_quant_config.json").get("quantization")
    {
        match config.as_object_mut() {
            Some(object) => drop(object.insert("quantization_config".to_string(), quantization.clone())),
            None => config = json!({"quantization_config": quantization}),
        }
    }
    config
}

/// Replaces the tensors of quantised layers by one weight each.
fn join_quantized(entries: &mut BTreeMap<String, StoredEntry>, config: &Value, metadata: &HashMap<String, String>) {
    let raw = entries.iter().filter_map(|(name, entry)| Some((name.clone(), entry.raw()?))).collect();
    let quantized = quantized::layers(&raw, config, metadata);
    for layer in quantized.layers {
        let removed: Vec<_> = layer.tensors.iter().map(|tensor| entries.remove(tensor)).collect();
        let entry = match layer.entry {
            Ok(weight) => {
                // The weight itself is among the tensors of its layer.
                let unscaled = removed.into_iter().flatten().find_map(StoredEntry::into_float8);
                StoredEntry::Quantized { weight, unscaled }
            }
            Err(error) => {
                let problem = root(&error).to_string();
                let dtype = entries.get(&layer.weight).and_then(StoredEntry::packed_dtype);
                StoredEntry::Unreadable { dtype, shape: None, problem, raw: None }
            }
        };
        entries.insert(layer.weight, entry);
    }
    for name in quantized.unused {
        entries.remove(&name);
    }
}

fn cannot_read(file: &Path, error: &Error) -> Error {
    // Candle's text names the file too.
    let text = root(error).to_string();
    let text = text.lines().next().unwrap_or_default();
    // The texts of safetensors for a file of another length than its header says.
    let is_other_length = ["file not fully covered", "invalid header length"].iter().any(|end| text.ends_with(end));
    let hint = if is_other_length { "; was the file written or downloaded whole?" } else { "" };
    Error::msg(format!("[weights] cannot read {}: {text}{hint}", file.display()))
}

/// Refuses a file of one rank of a Llama checkpoint by Meta, which has a part of each tensor.
fn refuse_cut_tensors(file: &Path) -> Result<()> {
    let Some(name) = file.file_name().and_then(|name| name.to_str()) else { return Ok(()) };
    let is_part = name.strip_prefix("consolidated.").is_some_and(|rest| rest.ends_with(".pth"));
    if is_part && ["consolidated.00.pth", "consolidated.01.pth"].iter().all(|part| file.with_file_name(part).is_file())
    {
        bail!(
            "[weights] {} is one of several files that each have a part of every tensor, consolidated.00.pth and on, \
             expected whole tensors; merge them first, as transformers' convert_llama_weights_to_hf.py does",
            file.display()
        )
    }
    Ok(())
}

/// Returns whether a file begins as a zip archive of `torch.save`. A safetensors file begins with the length of its
/// JSON header.
fn starts_like_a_zip(file: &Path) -> Result<bool> {
    let mut head = Vec::new();
    std::fs::File::open(file)
        .and_then(|open| open.take(9).read_to_end(&mut head))
        .map_err(|error| cannot_read(file, &error.into()))?;
    if head.starts_with(b"GGUF") {
        bail!("[weights] {} is a GGUF file, expected a call of `gguf::open`", file.display())
    }
    if head.get(8) == Some(&b'{') {
        return Ok(false);
    }
    if head.starts_with(b"\x80\x02") {
        bail!("[weights] {} is a pickle of PyTorch before 1.6; load it there and save it again", file.display())
    }
    if !head.starts_with(b"PK") {
        bail!("[weights] {} is neither a safetensors file nor a .pth file of torch.save", file.display())
    }
    Ok(true)
}

/// Returns the files that an index names.
fn shards(index: &Path) -> Result<Vec<PathBuf>> {
    let fault = |fault: String| Error::msg(format!("[weights] {} {fault}", index.display()));
    let is_bin = index.file_name().is_some_and(|name| name.to_string_lossy().contains(".bin."));
    let parsed = ShardIndex::read(index, if is_bin { ".bin" } else { ".safetensors" }).map_err(fault)?;
    Ok(parsed.shards(None).map_err(fault)?.into_iter().map(|shard| index.with_file_name(shard)).collect())
}
