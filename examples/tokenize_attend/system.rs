//! What runs: a tokenizer, an embedding and an attention layer, from whichever source was named.

use std::path::{Path, PathBuf};

use candle_attention::init::TorchSeed;
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer, Split};
use candle_attention::weights::Checkpoint;
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{Device, Error, Module, Result, Tensor, bail};
use candle_nn::VarBuilder;
use serde::Deserialize;

use crate::args::Args;
use crate::{checkpoint, hugging_face};

/// The front end of the tutorial: its vocabulary and its layer.
const VOCABULARY: [&str; 7] = ["<pad>", "hello", "world", "how", "are", "you", "?"];
const HIDDEN_SIZE: usize = 1536;
const NUM_HEADS: usize = 16;

pub struct System {
    pub tokenizer: SimpleTokenizer,
    pub layer: MultiHeadAttention,
    /// Where the attention weights came from.
    pub weights: String,
    /// Where the hidden states come from.
    pub embedded_by: String,
    pub(crate) embedding: EmbeddingLayer,
    pub(crate) norm: Option<candle_nn::LayerNorm>,
}

impl System {
    pub fn open(args: &Args, device: &Device) -> Result<Self> {
        if let Some(model) = &args.model {
            return folder(args, model, device);
        }
        if let Some(file) = &args.weights {
            return checkpoint::file(args, file, device);
        }
        if let Some(id) = &args.model_id {
            return hub(args, id, device);
        }
        seeded(args, device)
    }

    /// Ids (B, T) to the layer's input (B, T, E).
    pub fn hidden_states(&self, ids: &Tensor) -> Result<Tensor> {
        let hidden = self.embedding.forward(ids)?;
        match &self.norm {
            Some(norm) => norm.forward(&hidden),
            None => Ok(hidden),
        }
    }
}

/// The tutorial's own layer, its weights drawn in PyTorch's order: embedding first.
fn seeded(args: &Args, device: &Device) -> Result<System> {
    refuse_layer(args, 1)?;
    let tokenizer = tokenizer(args, None)?;
    let seed = TorchSeed::new(args.seed);
    let vb = seed.var_builder(args.dtype, device);
    let cfg = MultiHeadAttentionConfig::new(HIDDEN_SIZE, NUM_HEADS).with_qkv_bias(true).with_dropout(0.1);
    let embedding = EmbeddingLayer::new(&EmbeddingConfig::new(tokenizer.vocab_size(), HIDDEN_SIZE), vb.clone())?;
    let layer = MultiHeadAttention::new(&cfg, vb)?;
    let drawn = format!("drawn as PyTorch draws them after torch.manual_seed({})", args.seed);
    Ok(System { tokenizer, layer, embedded_by: drawn.clone(), weights: drawn, embedding, norm: None })
}

/// The part of a `config.json` of `models/` that says how to run the folder.
#[derive(Deserialize)]
struct FolderConfig {
    layout: String,
    layer: serde_json::Value,
    embedding: Option<EmbeddingTable>,
    manual_seed: Option<u64>,
    weights: Option<String>,
}

#[derive(Deserialize)]
struct EmbeddingTable {
    vocab_size: usize,
}

/// A folder of `models/`, or a Hugging Face checkpoint.
fn folder(args: &Args, model: &Path, device: &Device) -> Result<System> {
    let named = [
        model.to_path_buf(),
        Path::new("models").join(model),
        Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(model),
    ];
    let Some(model) = named.into_iter().find(|folder| folder.is_dir()) else {
        bail!("there is no folder {} here or in models/", model.display())
    };
    let config = model.join("config.json");
    let text = std::fs::read_to_string(&config).map_err(|error| {
        Error::msg(format!("cannot read {}: {error}; give a folder with a config.json", config.display()))
    })?;
    let json: serde_json::Value =
        serde_json::from_str(&text).map_err(|error| Error::msg(format!("{} is no JSON: {error}", config.display())))?;
    let own_tokenizer = Some(model.join("tokenizer.json")).filter(|file| file.is_file());
    if json.get("model_type").is_some() {
        let tokenizer = tokenizer(args, own_tokenizer)?;
        return hugging_face::open(args, &json, &Checkpoint::open(&model)?, tokenizer, device);
    }
    let folder: FolderConfig = serde_json::from_value(json).map_err(|error| {
        Error::msg(format!("{} describes no attention layer ({error}); choose another folder", config.display()))
    })?;
    let layout: WeightLayout = folder.layout.parse().map_err(|_| {
        Error::msg(format!(
            "{} holds no multi-head layer but `{}`; choose another folder",
            model.display(),
            folder.layout
        ))
    })?;
    let cfg: MultiHeadAttentionConfig =
        serde_json::from_value(folder.layer).map_err(|error| Error::msg(format!("{}: {error}", config.display())))?;
    refuse_cross_attention(&cfg)?;
    refuse_layer(args, 1)?;
    let tokenizer = tokenizer(args, own_tokenizer)?;

    let file = match folder.weights.as_deref().and_then(|weights| weights.strip_suffix("/model.safetensors")) {
        Some(sibling) => model.with_file_name(sibling).join("model.safetensors"),
        None => model.join("model.safetensors"),
    };
    let (vb, weights) = match folder.manual_seed {
        Some(seed) if !file.is_file() => (
            TorchSeed::new(seed).var_builder(args.dtype, device),
            format!("drawn as PyTorch draws them after torch.manual_seed({seed})"),
        ),
        _ => {
            let vb = Checkpoint::open(&file)?.var_builder(args.dtype, device)?;
            (vb, format!("{} (layout {layout})", file.display()))
        }
    };
    let (embedding, embedded_by) = match folder.embedding {
        Some(table) => {
            let cfg = EmbeddingConfig::new(table.vocab_size, cfg.embed_dim());
            (EmbeddingLayer::new(&cfg, vb.clone())?, "the model's own embedding".to_string())
        }
        None => drawn_embedding(args, &tokenizer, cfg.embed_dim(), device)?,
    };
    check_vocabulary(&tokenizer, &embedding)?;
    let layer = MultiHeadAttention::load(&cfg, layout, vb)?;
    Ok(System { tokenizer, layer, weights, embedded_by, embedding, norm: None })
}

#[cfg(feature = "hub")]
fn hub(args: &Args, id: &str, device: &Device) -> Result<System> {
    let files = candle_attention::hub::HubModel::new(id)?.fetch()?;
    let text = std::fs::read_to_string(&files.config)?;
    let json = serde_json::from_str(&text).map_err(|error| Error::msg(format!("config.json of {id}: {error}")))?;
    let tokenizer = tokenizer(args, files.tokenizer)?;
    let mut system = hugging_face::open(args, &json, &Checkpoint::from_files(&files.weights)?, tokenizer, device)?;
    system.weights = format!("{id} at {}, {}", files.commit, system.weights);
    Ok(system)
}

#[cfg(not(feature = "hub"))]
fn hub(_: &Args, _: &str, _: &Device) -> Result<System> {
    bail!("--model-id needs the hub: run again with `cargo run --features hub --example tokenize_attend ..`")
}

/// --tokenizer, else the source's own, else the tutorial's seven words.
pub fn tokenizer(args: &Args, own: Option<PathBuf>) -> Result<SimpleTokenizer> {
    let tokenizer = match args.tokenizer.as_ref().or(own.as_ref()) {
        Some(file) => SimpleTokenizer::from_file(file)?,
        None => SimpleTokenizer::from_words(VOCABULARY)?,
    };
    if !args.punctuation {
        return Ok(tokenizer);
    }
    Ok(tokenizer.with_split(Split::Punctuation))
}

/// An embedding for a layer that came without one.
pub fn drawn_embedding(
    args: &Args,
    tokenizer: &SimpleTokenizer,
    embed_dim: usize,
    device: &Device,
) -> Result<(EmbeddingLayer, String)> {
    let vb: VarBuilder = TorchSeed::new(args.seed).var_builder(args.dtype, device);
    let embedding = EmbeddingLayer::new(&EmbeddingConfig::new(tokenizer.vocab_size(), embed_dim), vb)?;
    Ok((embedding, format!("drawn after torch.manual_seed({}), since the weights hold none", args.seed)))
}

/// An error if the tokenizer has ids for which the embedding has no row.
pub fn check_vocabulary(tokenizer: &SimpleTokenizer, embedding: &EmbeddingLayer) -> Result<()> {
    let (words, rows) = (tokenizer.vocab_size(), embedding.vocab_size());
    if words > rows {
        bail!("the tokenizer has {words} tokens, but the embedding {rows} rows; give the model's own with --tokenizer")
    }
    Ok(())
}

/// An error for a layer that attends to another kind of input than it attends from.
pub fn refuse_cross_attention(cfg: &MultiHeadAttentionConfig) -> Result<()> {
    let widths = [cfg.embed_dim(), cfg.key_size(), cfg.value_size()];
    if widths.iter().any(|&width| width != widths[0]) {
        bail!(
            "the layer reads queries, keys and values of widths {widths:?}, which no one text gives; choose another folder or file"
        )
    }
    Ok(())
}

/// An error if --layer names a layer that a source of `count` layers does not have.
pub fn refuse_layer(args: &Args, count: usize) -> Result<()> {
    if args.layer >= count {
        bail!("--layer {} is out of range: there are {count}, numbered from 0", args.layer)
    }
    Ok(())
}
