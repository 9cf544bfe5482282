//! Files of weights in all formats.

mod infer;
mod pickle;
mod pth;
mod safetensors;
mod stored;

#[cfg(feature = "hub")]
pub(crate) use self::safetensors::ShardIndex;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[cfg(not(feature = "hub"))]
use self::safetensors::ShardIndex;
use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use infer::infer_config;
use serde_json::{Value, json};
use stored::{Entry, Scale, Stored};

use candle_attention_core::MultiHeadAttentionConfig;
use candle_attention_core::internal::{TensorSource, detect_with, query_weights};
use candle_attention_core::weights::{PackedNaming, QkvOrder, WeightLayout};
use candle_attention_modules::base::{SCALES, edits, root};

/// Opens the weights at `path` and returns a builder that converts them to `dtype`: [`Checkpoint::open`] and
/// [`Checkpoint::var_builder`] in one.
///
/// # Errors
/// As [`Checkpoint::open`] and [`Checkpoint::var_builder`].
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
    entries: Arc<BTreeMap<String, Entry>>,
    /// The files that are safetensors.
    safetensors: Vec<PathBuf>,
    /// The `model_args` that nanoGPT saves with its weights, or else the config.json next to the files; null without
    /// either.
    config: Value,
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
        let mut n_head = None;
        for file in files.iter().map(AsRef::as_ref) {
            refuse_cut_tensors(file)?;
            let own = if starts_like_a_zip(file)? {
                pth::entries(file).map(|(own, heads)| {
                    n_head = n_head.or(heads);
                    own
                })
            } else {
                safetensors.push(file.to_path_buf());
                safetensors::entries(file)
            };
            for (name, entry) in own.map_err(|error| cannot_read(file, &error))? {
                if entries.contains_key(&name) {
                    bail!("[weights] {name} is in {} and in another file before it", file.display())
                }
                entries.insert(name, entry);
            }
        }
        let config = match n_head {
            Some(n_head) => json!({"model_args": {"n_head": n_head}}),
            None => {
                let text = std::fs::read(first.as_ref().with_file_name("config.json")).unwrap_or_default();
                serde_json::from_slice(&text).unwrap_or_default()
            }
        };
        Ok(Self { entries: Arc::new(entries), safetensors, config })
    }

    /// Returns a builder at the root of the checkpoint, which reads each tensor from its file when a layer requests it.
    ///
    /// float8 (E4M3) weights are multiplied by their scale, `<name>_scale_inv` or `<name>_scale`: one number, one for
    /// each row, or one for each block of 128 by 128. The scales are not tensors of the builder. A builder of
    /// [`DType::F8E4M3`] returns weights as they are stored.
    ///
    /// # Errors
    /// None at present.
    pub fn var_builder(&self, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
        Ok(self.builder(None, dtype, device))
    }

    fn builder(&self, mapped: Option<MmapedSafetensors>, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(Backend { checkpoint: self.clone(), mapped }), dtype, device.clone())
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

    /// Returns the prefixes below which there is an attention layer, numbers in their natural order. The root is "".
    #[must_use]
    pub fn attention_layers(&self) -> Vec<String> {
        let mut suffixes = Vec::from_iter(query_weights());
        // A name that ends with another comes before it.
        suffixes.sort_by_key(|name| std::cmp::Reverse(name.len()));
        let prefix_of = |name: &str| {
            let below =
                |suffix: &String| name.strip_suffix(suffix.as_str()).filter(|p| p.is_empty() || p.ends_with('.'));
            Some(without_head(suffixes.iter().find_map(below)?.trim_end_matches('.')).to_string())
        };
        let mut prefixes: Vec<_> = self.shapes().filter_map(|(name, _)| prefix_of(name)).collect();
        prefixes.sort_by_key(|prefix| natural_order(prefix));
        prefixes.dedup();
        prefixes
    }

    /// Detects the layout below a prefix as [`WeightLayout::detect`] does, from the names and shapes alone. Where they
    /// allow two readings, the checkpoint's own config decides, if it can: the `model_args` that nanoGPT saves with its
    /// weights, or the `config.json` next to the files, by its `model_type` or by `layout`.
    ///
    /// # Errors
    /// As [`WeightLayout::detect`].
    pub fn detect(&self, prefix: &str) -> Result<WeightLayout> {
        detect_with(&LayerTensors { checkpoint: self, prefix: prefix.to_string() }, |layout| {
            names_layout(&self.config, layout)
        })
    }

    /// Infers the config of the layer below a prefix from its shapes: widths, key heads, biases, output projection;
    /// and, where a causal `mask` buffer (T, T) was saved with the layer, causality and the context length. `num_heads`
    /// has to be given, except for a stack of heads, which can be counted, and for nanoGPT's checkpoints, which have
    /// it.
    ///
    /// # Errors
    /// If a tensor is missing, or the shapes do not fit `num_heads`.
    pub fn infer_config(
        &self,
        prefix: &str,
        layout: WeightLayout,
        num_heads: Option<usize>,
    ) -> Result<MultiHeadAttentionConfig> {
        let saved = || self.config["model_args"]["n_head"].as_u64().and_then(|heads| heads.try_into().ok());
        let tensors = LayerTensors { checkpoint: self, prefix: prefix.to_string() };
        infer_config(&tensors, layout, num_heads.or_else(saved))
    }

    /// Returns whether there is a tensor of this name that is not the scale of another.
    fn contains(&self, name: &str) -> bool {
        self.entries.contains_key(name) && !self.is_scale(name)
    }

    /// Returns whether a tensor is the scale of a float8 weight.
    fn is_scale(&self, name: &str) -> bool {
        let weight = SCALES.iter().find_map(|suffix| name.strip_suffix(suffix));
        weight.and_then(|weight| self.entries.get(weight)).is_some_and(Entry::is_float8)
    }

    /// Returns the end of an error about a missing tensor: the layers of the checkpoint, or the names next to the
    /// missing one, the most similar first.
    fn hint(&self, missing: &str) -> String {
        let parents = std::iter::successors(missing.rsplit_once('.'), |(parent, _)| parent.rsplit_once('.'));
        let next_to = |parent: &str| -> Vec<&str> {
            let below = |name: &'_ String| name.strip_prefix(parent).is_some_and(|rest| rest.starts_with('.'));
            self.entries.keys().filter(|name| parent.is_empty() || below(name)).map(String::as_str).collect()
        };
        let found = parents.map(|(parent, _)| (parent, next_to(parent))).find(|(_, names)| !names.is_empty());
        let layers = self.attention_layers();
        if found.is_none() && layers.first().is_some_and(|layer| !layer.is_empty()) {
            return format!("attention weights are below {}", listed(&layers));
        }
        let (parent, mut names) = found.unwrap_or_else(|| ("", next_to("")));
        let last = &missing[parent.len()..];
        names.sort_by_cached_key(|name| edits(last, &name[parent.len()..]));
        if names.is_empty() { "the file has no tensors".to_string() } else { format!("there are {}", listed(&names)) }
    }
}

/// The tensors below a prefix of a checkpoint. Names and shapes come from the headers of the files.
struct LayerTensors<'a> {
    checkpoint: &'a Checkpoint,
    prefix: String,
}

impl LayerTensors<'_> {
    fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }
}

impl TensorSource for LayerTensors<'_> {
    fn prefix(&self) -> String {
        self.prefix.clone()
    }

    fn at(&self, prefix: &str) -> Self {
        Self { checkpoint: self.checkpoint, prefix: prefix.to_string() }
    }

    fn contains(&self, name: &str) -> bool {
        self.checkpoint.contains(&self.full_name(name))
    }

    fn shape(&self, name: &str) -> Result<Vec<usize>> {
        let name = self.full_name(name);
        match self.checkpoint.entries.get(&name) {
            None => bail!("[weights] {name} is missing; {}", self.checkpoint.hint(&name)),
            Some(Entry::Stored(stored)) => Ok(stored.shape.clone()),
            Some(Entry::Unreadable { shape: Some(shape), .. }) => Ok(shape.clone()),
            Some(Entry::Unreadable { shape: None, what }) => bail!("[weights] {name}: {what}"),
        }
    }

    fn hint(&self, missing: &str) -> Result<Option<String>> {
        Ok(Some(self.checkpoint.hint(&self.full_name(missing))))
    }
}

/// Returns the first few names of a list, and their number.
fn listed<S: AsRef<str>>(names: &[S]) -> String {
    let first: Vec<_> = names.iter().take(4).map(|name| format!("{:?}", name.as_ref())).collect();
    let more = if names.len() > 4 { format!(", .. ({} in all)", names.len()) } else { String::new() };
    format!("{}{more}", first.join(", "))
}

/// Reads a checkpoint's tensors for a `VarBuilder`.
struct Backend {
    checkpoint: Checkpoint,
    mapped: Option<MmapedSafetensors>,
}

impl Backend {
    fn find(&self, name: &str) -> Result<&Stored> {
        match self.checkpoint.entries.get(name) {
            Some(Entry::Stored(stored)) => Ok(stored),
            Some(Entry::Unreadable { what, .. }) => Err(Error::msg(what)),
            None => {
                // The reader of a layer finds the hint as the context of the cause.
                let missing = Error::CannotFindTensor { path: name.to_string() };
                Err(missing.context(self.checkpoint.hint(name)).context(format!("[weights] {name} is missing")))
            }
        }
    }

    fn read(&self, name: &str, stored: &Stored, dtype: DType, device: &Device) -> Result<Tensor> {
        let scale = if stored.dtype == DType::F8E4M3 && dtype != DType::F8E4M3 {
            Some(self.scale(name, &stored.shape)?)
        } else {
            None
        };
        let view = self.mapped.as_ref().and_then(|mapped| mapped.get(name).ok());
        stored.read(view.as_ref().map(|view| view.data()), scale.as_ref(), dtype, device)
    }

    fn scale(&self, weight: &str, shape: &[usize]) -> Result<Scale> {
        let named = SCALES.map(|suffix| format!("{weight}{suffix}"));
        let Some(name) = named.iter().find(|name| self.checkpoint.entries.contains_key(*name)) else {
            bail!(
                "{weight} is float8, and the file has no {} for it; a builder of F8E4M3 returns weights as stored",
                named.join(" or ")
            )
        };
        let stored = self.find(name)?;
        let numbers = self.read(name, stored, DType::F32, &Device::Cpu)?;
        match Scale::new(shape, &numbers)? {
            Some(scale) => Ok(scale),
            None => bail!(
                "{weight} is float8 of shape {shape:?} and {name} has shape {:?}, expected one number, one for each row, or one for each block of 128 by 128",
                stored.shape
            ),
        }
    }
}

impl SimpleBackend for Backend {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        if let Some(got) = self.checkpoint.entries.get(name).and_then(Entry::shape)
            && got != shape.dims()
        {
            let msg = format!("shape mismatch for {name}");
            return Err(Error::UnexpectedShape { msg, expected: shape, got: got.into() }.bt());
        }
        self.read(name, self.find(name)?, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.read(name, self.find(name)?, dtype, device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.checkpoint.contains(name)
    }
}

fn cannot_read(file: &Path, error: &Error) -> Error {
    // Candle's text names the file too.
    let text = root(error).to_string();
    Error::msg(format!("[weights] cannot read {}: {}", file.display(), text.lines().next().unwrap_or_default()))
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

/// Returns the prefix of a stack for the prefix `heads.{i}` of one of its heads, and any other prefix unchanged.
fn without_head(prefix: &str) -> &str {
    let Some((stack, _)) = prefix.rsplit_once('.').filter(|(_, head)| head.parse::<usize>().is_ok()) else {
        return prefix;
    };
    match stack.strip_suffix("heads") {
        Some("") => "",
        Some(outer) => outer.strip_suffix('.').unwrap_or(prefix),
        None => prefix,
    }
}

/// Returns a key that sorts `layers.2` before `layers.10`.
fn natural_order(prefix: &str) -> Vec<(u64, String)> {
    prefix.split('.').map(|part| (part.parse().unwrap_or(u64::MAX), part.to_string())).collect()
}

/// Returns whether the config of a checkpoint names this layout: by `layout`, a key of this crate, or by an
/// architecture whose packed rows are in an order that their names do not tell.
fn names_layout(config: &Value, layout: WeightLayout) -> bool {
    // nanoGPT saves `model_args`.
    if config["model_args"]["n_head"].is_number() {
        return layout == WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByPart);
    }
    if let Some(spelling) = config["layout"].as_str() {
        return spelling == layout.to_string();
    }
    let WeightLayout::Packed(_, order) = layout else { return false };
    match config["model_type"].as_str() {
        Some("bloom" | "falcon" | "gpt_bigcode" | "gpt_neox" | "RefinedWeb" | "RefinedWebModel") => {
            order == QkvOrder::ByHead
        }
        Some("chatglm") => order == QkvOrder::ByPart,
        _ => false,
    }
}
