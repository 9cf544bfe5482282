//! The files of a checkpoint.

use std::path::PathBuf;

#[cfg(feature = "hub")]
use candle_attention::hub::{HubFiles, HubModel};
use candle_attention::text::SimpleTokenizer;
use candle_attention::weights::Checkpoint;
use candle_core::{DType, Device, Result, bail};
use candle_nn::VarBuilder;
use serde_json::Value;

use crate::args::Args;
use crate::common::read_json;
use crate::recipe::Recipe;

pub struct Files {
    pub folder: PathBuf,
}

impl Files {
    pub fn of(args: &Args) -> Result<Self> {
        let folder = match (&args.model, &args.model_id) {
            (Some(folder), _) => folder.clone(),
            (None, Some(id)) => hub(id)?,
            (None, None) => bail!("[sentence_embedding] expected --model or --model-id"),
        };
        for name in ["config.json", "tokenizer.json"] {
            if !folder.join(name).is_file() {
                bail!("[sentence_embedding] {} has no {name}", folder.display())
            }
        }
        Ok(Self { folder })
    }

    pub fn config(&self) -> Result<Value> {
        read_json("sentence_embedding", &self.folder.join("config.json"))
    }

    /// Cuts texts at the recipe's length.
    pub fn tokenizer(&self, recipe: &Recipe) -> Result<SimpleTokenizer> {
        let tokenizer = SimpleTokenizer::from_file(self.folder.join("tokenizer.json"))?;
        Ok(match recipe.max_tokens {
            Some(max_tokens) => tokenizer.with_truncation(max_tokens)?,
            None => tokenizer,
        })
    }

    pub fn var_builder(&self, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
        Checkpoint::open(&self.folder)?.var_builder(dtype, device)
    }
}

#[cfg(feature = "hub")]
fn hub(id: &str) -> Result<PathBuf> {
    use crate::recipe;
    let with = |model: HubModel, files: &[String]| files.iter().try_fold(model, |model, file| model.with_file(file));
    let folder = |files: &HubFiles| files.config.parent().map(std::path::Path::to_path_buf).unwrap_or_default();
    let files = with(HubModel::new(id)?, &recipe::FILES.map(str::to_string))?.fetch()?;
    // Of the same commit, what modules.json names.
    let modules = recipe::module_files(&folder(&files))?;
    Ok(folder(&with(HubModel::new(id)?.with_revision(&files.commit)?, &modules)?.fetch()?))
}

#[cfg(not(feature = "hub"))]
fn hub(_: &str) -> Result<PathBuf> {
    bail!("--model-id needs the hub: run again with `cargo run --features hub --example sentence_embedding ..`")
}
