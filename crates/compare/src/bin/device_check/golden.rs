//! The layers of `models/`, with PyTorch's inputs and outputs.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_attention::init::TorchSeed;
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_attention::{
    AttentionInput, AttentionMask, FullyMaskedRows, MultiHeadAttention, MultiHeadAttentionConfig, ValidLens,
    WeightLayout, weights,
};
use candle_core::{DType, Device, Error, Module, Result, Tensor, bail};
use serde_json::Value;

use super::check::{Checked, DTYPES, allowed, relative_error};
use super::progress::Progress;
use super::table::Row;

/// Checks every folder that has a layer, in each dtype.
pub fn check(device: &Device, models: &Path, tolerance: f64, progress: &Progress) -> Result<Row> {
    let mut row = Row::new("layers of models/");
    let mut others = Vec::new();
    for folder in folders(models)? {
        let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        progress.note(&name);
        let golden = Golden::open(&folder)?;
        if !golden.is_layer() {
            others.push(name);
            continue;
        }
        for dtype in DTYPES {
            row.add(dtype, golden.check(dtype, device), tolerance * allowed(dtype), &name);
        }
    }
    if !others.is_empty() {
        row.skip(others.len(), &format!("{} folders are no layers", others.len()));
    }
    Ok(row)
}

fn folders(models: &Path) -> Result<Vec<PathBuf>> {
    let Ok(entries) = std::fs::read_dir(models) else {
        bail!("there is no folder {}, expected models/ of the repository: see --models", models.display())
    };
    let mut folders: Vec<_> = entries.map(|entry| Ok(entry?.path())).collect::<Result<_>>()?;
    folders.retain(|folder| folder.join("config.json").is_file() && folder.join("io.safetensors").is_file());
    folders.sort();
    Ok(folders)
}

struct Golden {
    folder: PathBuf,
    config: Value,
    io: HashMap<String, Tensor>,
}

impl Golden {
    fn open(folder: &Path) -> Result<Self> {
        let config =
            serde_json::from_str(&std::fs::read_to_string(folder.join("config.json"))?).map_err(Error::wrap)?;
        let io = candle_core::safetensors::load(folder.join("io.safetensors"), &Device::Cpu)?;
        Ok(Self { folder: folder.into(), config, io })
    }

    fn layout(&self) -> Option<WeightLayout> {
        self.config["layout"].as_str()?.parse().ok()
    }

    /// Returns whether the folder is a layer of this crate with results in f64, outside of training.
    fn is_layer(&self) -> bool {
        let cfg = serde_json::from_value::<MultiHeadAttentionConfig>(self.config["layer"].clone());
        let exact = self.io.keys().any(|name| name.ends_with(".expected_f64"));
        self.layout().is_some() && cfg.is_ok() && exact && self.config["mode"] == "eval"
    }

    /// Returns the largest error over all cases of the folder.
    fn check(&self, dtype: DType, device: &Device) -> Result<Checked> {
        let Some(layout) = self.layout() else { bail!("config.json names no layout") };
        let cfg: MultiHeadAttentionConfig =
            serde_json::from_value(self.config["layer"].clone()).map_err(Error::wrap)?;
        let file = self.folder.join("model.safetensors");
        let vb = if file.is_file() {
            weights::open(file, dtype, device)?
        } else {
            let Some(seed) = self.config["manual_seed"].as_u64() else { bail!("config.json names no manual_seed") };
            TorchSeed::new(seed).var_builder(dtype, device)
        };
        let table = &self.config["embedding"];
        let embedding = match (table["vocab_size"].as_u64(), table["embed_dim"].as_u64()) {
            (Some(vocab), Some(width)) => {
                Some(EmbeddingLayer::new(&EmbeddingConfig::new(vocab as usize, width as usize), vb.clone())?)
            }
            _ => None,
        };
        let layer = MultiHeadAttention::load(&cfg, layout, vb)?;
        let cases: BTreeSet<_> = self.io.keys().filter_map(|name| Some(name.split_once('.')?.0)).collect();
        let mut error = 0f64;
        for case in cases {
            let find = |name: &str| self.io.get(&format!("{case}.{name}"));
            let input = |name: &str| find(name).map(|tensor| tensor.to_dtype(dtype)?.to_device(device)).transpose();
            let mask = mask(&find, device)?;
            let xs = match (&embedding, find("ids")) {
                (Some(embedding), Some(ids)) => Some(embedding.forward(&ids.to_device(device)?)?),
                _ => input("x")?,
            };
            let [q, k, v] = match xs {
                Some(xs) => [Some(xs), None, None],
                None if find("q").is_some() => [input("q")?, input("k")?, input("v")?],
                None => [input("queries")?, input("keys")?, input("values")?],
            };
            let Some(q) = q else { bail!("case {case} has no input") };
            let mut call = AttentionInput::new(&q).with_mask(&mask);
            if let (Some(k), Some(v)) = (&k, &v) {
                call = call.with_key_value(k, v);
            }
            let Some(expected) = find("expected_f64") else { bail!("case {case} has no expected_f64") };
            error = error.max(relative_error(&layer.forward_with(call)?, expected)?);
        }
        Ok(Checked { error, plan: None })
    }
}

/// Returns the mask of d2l's lengths, or of PyTorch's tensors in which 1 means masked.
fn mask<'a>(find: &impl Fn(&str) -> Option<&'a Tensor>, device: &Device) -> Result<AttentionMask> {
    let mut mask = AttentionMask::none();
    if let Some(lens) = find("valid_lens") {
        mask = mask.with_valid_lens(ValidLens::from_tensor(lens)?).with_fully_masked_rows(FullyMaskedRows::Uniform);
    }
    if let Some(hidden) = find("attn_mask") {
        mask = mask.with_bool_mask(&hidden.eq(0u8)?.to_device(device)?);
    }
    if let Some(hidden) = find("key_padding_mask") {
        mask = mask.and(&AttentionMask::from_attention_mask(&hidden.eq(0u8)?.to_device(device)?)?);
    }
    Ok(mask)
}
