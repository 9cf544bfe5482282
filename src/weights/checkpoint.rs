//! Files of weights, whatever their format.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{DType, Device, Error, Result, bail};
use candle_nn::VarBuilder;

use super::detect::{self, Names, query_suffixes};
use super::index::ShardIndex;
use super::pth::Pth;
use super::source::root;
use super::{WeightLayout, infer};
use crate::MultiHeadAttentionConfig;
use crate::size::is_addressable;

/// A builder over the weights at `path`, converted to `dtype` as they are read: `Checkpoint::open` and
/// [`Checkpoint::var_builder`] in one. Safetensors files are memory-mapped: they must not be changed while the builder
/// lives.
///
/// # Errors
/// As those.
pub fn open(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
    Checkpoint::open(path)?.var_builder(dtype, device)
}

/// The names and shapes of a checkpoint's tensors; their values are read when a builder asks for them.
#[derive(Debug, Clone)]
pub struct Checkpoint {
    format: Format,
    shapes: BTreeMap<String, Vec<usize>>,
}

#[derive(Debug, Clone)]
enum Format {
    Safetensors(Vec<PathBuf>),
    Pth(Pth),
}

impl Checkpoint {
    /// Opens a safetensors file, a `.pth` file that `torch.save` wrote of a state dict (one that lies in a dict is found
    /// below its key), or a folder that holds `model.safetensors`, its shards with `model.safetensors.index.json`,
    /// `pytorch_model.bin` or `model.pth`. The format is told by the content, not by the name.
    ///
    /// # Errors
    /// If there is no such file, or it is truncated, or it is neither format; the message names the file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if path.is_dir() { Self::from_files(&files_in(path)?) } else { Self::from_files(&[path]) }
    }

    /// Opens one file, or the safetensors shards of one checkpoint.
    ///
    /// # Errors
    /// As [`open`](Self::open), and for several files of which one is not safetensors.
    pub fn from_files<P: AsRef<Path>>(files: &[P]) -> Result<Self> {
        let files: Vec<_> = files.iter().map(|file| file.as_ref().to_path_buf()).collect();
        if let [file] = files.as_slice()
            && starts_like_a_zip(file)?
        {
            let pth = Pth::open(file).map_err(|error| named(file, error))?;
            let shapes = pth.shapes().map(|(name, shape)| (name.to_string(), shape.to_vec())).collect();
            return Ok(Self { format: Format::Pth(pth), shapes });
        }
        if files.is_empty() {
            bail!("[weights] expected at least one file, found none")
        }
        let mut shapes = BTreeMap::new();
        for file in &files {
            let tensors = mapped(std::slice::from_ref(file)).map_err(|error| named(file, error))?;
            for (name, view) in tensors.tensors() {
                let shape = view.shape().to_vec();
                if !is_addressable(&shape) {
                    bail!("[weights] {name} in {} has shape {shape:?}, which is too large to address", file.display())
                }
                if shapes.insert(name.clone(), shape).is_some() {
                    bail!("[weights] {name} is in {} and in another file before it", file.display())
                }
            }
        }
        Ok(Self { format: Format::Safetensors(files), shapes })
    }

    /// A builder at the root of the checkpoint. Safetensors files are memory-mapped: they must not be changed while the
    /// builder lives.
    ///
    /// # Errors
    /// If the file can no longer be read.
    pub fn var_builder(&self, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
        Ok(match &self.format {
            Format::Safetensors(files) => VarBuilder::from_backend(Box::new(mapped(files)?), dtype, device.clone()),
            Format::Pth(pth) => VarBuilder::from_backend(Box::new(pth.clone()), dtype, device.clone()),
        })
    }

    /// Names and shapes of all tensors, in alphabetical order.
    pub fn shapes(&self) -> impl Iterator<Item = (&str, &[usize])> {
        self.shapes.iter().map(|(name, shape)| (name.as_str(), shape.as_slice()))
    }

    /// The prefixes below which there is an attention layer, numbers in their natural order; the root is "".
    pub fn attention_layers(&self) -> Vec<String> {
        let suffixes = query_suffixes();
        let prefix_of = |name: &str| {
            let suffix = suffixes.iter().find(|suffix| name == *suffix || name.ends_with(&format!(".{suffix}")))?;
            Some(without_head(name[..name.len() - suffix.len()].trim_end_matches('.')).to_string())
        };
        let mut prefixes: Vec<_> = self.shapes.keys().filter_map(|name| prefix_of(name)).collect();
        prefixes.sort_by_key(|prefix| natural_order(prefix));
        prefixes.dedup();
        prefixes
    }

    /// [`WeightLayout::detect`] below a prefix, from the names and shapes alone.
    ///
    /// # Errors
    /// As [`WeightLayout::detect`].
    pub fn detect(&self, prefix: &str) -> Result<WeightLayout> {
        detect::detect(&Below { checkpoint: self, prefix })
    }

    /// The config that the shapes below a prefix imply: widths, key heads, biases, output projection; and, where a
    /// causal `mask` buffer (T, T) was saved with the layer, causality and the context length. `num_heads` has to be
    /// said, except for a stack of heads, which counts itself.
    ///
    /// # Errors
    /// If a tensor is missing, or the shapes do not fit `num_heads`.
    pub fn infer_config(
        &self,
        prefix: &str,
        layout: WeightLayout,
        num_heads: Option<usize>,
    ) -> Result<MultiHeadAttentionConfig> {
        infer::infer_config(&Below { checkpoint: self, prefix }, layout, num_heads)
    }
}

/// A checkpoint seen from below a prefix.
struct Below<'a> {
    checkpoint: &'a Checkpoint,
    prefix: &'a str,
}

impl Below<'_> {
    fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }
}

impl Names for Below<'_> {
    fn has(&self, name: &str) -> bool {
        self.checkpoint.shapes.contains_key(&self.full_name(name))
    }

    fn shape(&self, name: &str) -> Result<Vec<usize>> {
        let name = self.full_name(name);
        match self.checkpoint.shapes.get(&name) {
            Some(shape) => Ok(shape.clone()),
            None => bail!("[weights] {name} is missing"),
        }
    }

    fn prefix(&self) -> String {
        self.prefix.to_string()
    }
}

fn mapped(files: &[PathBuf]) -> Result<MmapedSafetensors> {
    // SAFETY: the mapping is sound while nobody changes the files. That cannot be enforced from here; `open` and
    // `var_builder` ask it of their callers in their documentation.
    unsafe { MmapedSafetensors::multi(files) }
}

fn named(file: &Path, error: Error) -> Error {
    // Candle's own naming of the file would say it twice.
    let text = root(&error).to_string();
    let text = text.lines().next().unwrap_or_default();
    Error::msg(format!("[weights] cannot read {}: {text}", file.display()))
}

/// `torch.save` writes zip archives; a safetensors file opens with the length of its JSON header.
fn starts_like_a_zip(file: &Path) -> Result<bool> {
    let mut head = Vec::new();
    std::fs::File::open(file)
        .and_then(|open| open.take(9).read_to_end(&mut head))
        .map_err(|error| named(file, error.into()))?;
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

fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let single = folder.join("model.safetensors");
    if single.is_file() {
        return Ok(vec![single]);
    }
    let index = folder.join("model.safetensors.index.json");
    if index.is_file() {
        let fault = |fault: String| Error::msg(format!("[weights] {} {fault}", index.display()));
        let parsed = ShardIndex::read(&index, ".safetensors").map_err(fault)?;
        return Ok(parsed.shards(None).map_err(fault)?.into_iter().map(|shard| folder.join(shard)).collect());
    }
    let others = ["pytorch_model.bin", "model.pth"].map(|name| folder.join(name));
    match others.into_iter().find(|file| file.is_file()) {
        Some(file) => Ok(vec![file]),
        None => bail!(
            "[weights] {} holds no model.safetensors, model.safetensors.index.json, pytorch_model.bin or model.pth",
            folder.display()
        ),
    }
}

/// The prefix of a stack from that of one of its heads, `heads.{i}`; any other prefix as it is.
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

/// A key that sorts `layers.2` before `layers.10`.
fn natural_order(prefix: &str) -> Vec<(u64, String)> {
    prefix.split('.').map(|part| (part.parse().unwrap_or(u64::MAX), part.to_string())).collect()
}
