//! What runs: a tokenizer, an embedding and an attention layer, from whichever source was named.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use candle_attention::init::TorchSeed;
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer, Split};
use candle_attention::weights::Checkpoint;
use candle_attention::{
    AttentionInput, AttentionMask, LayerOutput, MultiHeadAttention, MultiHeadAttentionConfig, MultiHeadLatentAttention,
    RopeAxisLayout, WeightLayout,
};
use candle_core::{DType, Device, Error, Module, Result, Tensor, bail};
use candle_nn::VarBuilder;
use serde::Deserialize;
use serde_json::Value;

use crate::args::Args;
use crate::attention_only::{AttentionOnly, AttentionOnlyConfig, Block};
use crate::common::{fetch, one_line, read_json};
use crate::hugging_face;

/// The front end of the tutorial: its vocabulary and its layer.
const VOCABULARY: [&str; 7] = ["<pad>", "hello", "world", "how", "are", "you", "?"];
const HIDDEN_SIZE: usize = 1536;
const NUM_HEADS: usize = 16;
/// The last part of the name under which models keep their token embedding.
pub const TABLES: [&str; 10] = [
    "embed_tokens",
    "wte",
    "word_embeddings",
    "tok_embeddings",
    "embed_in",
    "shared",
    "tok_emb",
    "token_embedding",
    "embedding",
    "embeddings",
];

pub struct System {
    pub words: Words,
    pub layer: Layer,
    /// Where the attention weights came from.
    pub weights: String,
    /// Where the hidden states come from.
    pub embedded_by: String,
    pub embedding: EmbeddingLayer,
    /// Between the embedding and the layer, in order: norms, and blocks of a model that is attention alone.
    pub before: Vec<Box<dyn Module>>,
}

pub struct Words {
    pub tokenizer: SimpleTokenizer,
    /// Where the vocabulary comes from, if from no file and not from the tutorial.
    pub said_by: Option<&'static str>,
}

#[expect(clippy::large_enum_variant, reason = "a program has one")]
pub enum Layer {
    MultiHead(MultiHeadAttention),
    Latent(MultiHeadLatentAttention),
}

impl System {
    pub fn open(args: &Args, device: &Device) -> Result<Self> {
        if let Some(model) = &args.model {
            folder(args, model, device)
        } else if let Some(file) = &args.weights {
            exported(args, file, device)
        } else if let Some(id) = &args.model_id {
            hub(args, id, device)
        } else {
            seeded(args, device)
        }
    }

    /// Ids (B, T) to the layer's input (B, T, E).
    pub fn hidden_states(&self, ids: &Tensor) -> Result<Tensor> {
        self.before.iter().try_fold(self.embedding.forward(ids)?, |hidden, module| module.forward(&hidden))
    }
}

impl Layer {
    pub fn attend(&self, xs: &Tensor, mask: &AttentionMask) -> Result<LayerOutput> {
        let input = AttentionInput::new(xs).with_mask(mask);
        match self {
            Self::MultiHead(layer) => match layer.config().rope().and_then(|rope| rope.axes()) {
                Some(axes) if matches!(axes.layout(), RopeAxisLayout::Axial | RopeAxisLayout::AxialDealt) => {
                    // An encoder of images, whose patches are in rows and columns: the words are one row of patches.
                    let mut positions =
                        vec![Tensor::zeros(xs.dim(1)?, DType::F32, xs.device())?; axes.sections().len()];
                    if let Some(columns) = positions.last_mut() {
                        *columns = Tensor::arange(0f32, xs.dim(1)? as f32, xs.device())?;
                    }
                    layer.forward_with_weights(input.with_axis_positions(&Tensor::stack(&positions, 0)?))
                }
                _ => layer.forward_with_weights(input),
            },
            Self::Latent(layer) => layer.forward_with_weights(input),
        }
    }

    pub fn embed_dim(&self) -> usize {
        match self {
            Self::MultiHead(layer) => layer.config().embed_dim(),
            Self::Latent(layer) => layer.config().embed_dim(),
        }
    }

    /// Heads of queries and of keys, and the width of a head.
    pub fn heads(&self) -> (usize, usize, usize) {
        match self {
            Self::MultiHead(layer) => {
                let cfg = layer.config();
                (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim())
            }
            Self::Latent(layer) => {
                let cfg = layer.config();
                (cfg.num_heads(), cfg.num_heads(), cfg.head_dim())
            }
        }
    }

    pub fn is_causal(&self) -> bool {
        match self {
            Self::MultiHead(layer) => layer.config().causal(),
            Self::Latent(layer) => layer.config().causal(),
        }
    }

    /// Whether a learned key follows those of the tokens.
    pub fn has_learned_key(&self) -> bool {
        matches!(self, Self::MultiHead(layer) if layer.config().bias_kv())
    }
}

/// The tutorial's own layer, its weights drawn in PyTorch's order: embedding first.
fn seeded(args: &Args, device: &Device) -> Result<System> {
    chosen_layer(args, 1, 0)?;
    let words = words(args, None)?;
    let seed = TorchSeed::new(args.seed);
    let vb = seed.var_builder(args.dtype, device);
    let cfg = MultiHeadAttentionConfig::new(HIDDEN_SIZE, NUM_HEADS).with_qkv_bias(true).with_dropout(0.1);
    let embedding = EmbeddingLayer::new(&EmbeddingConfig::new(words.tokenizer.vocab_size(), HIDDEN_SIZE), vb.clone())?;
    let layer = Layer::MultiHead(MultiHeadAttention::new(&cfg, vb)?);
    let drawn = format!("drawn as PyTorch draws them after torch.manual_seed({})", args.seed);
    Ok(System { words, layer, embedded_by: drawn.clone(), weights: drawn, embedding, before: vec![] })
}

/// The part of a `config.json` of `models/` that says how to run the folder.
#[derive(Deserialize)]
struct FolderConfig {
    layout: String,
    layer: Value,
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
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("models");
    let named = [model.to_path_buf(), Path::new("models").join(model), models.join(model)];
    let Some(model) = named.into_iter().find(|folder| folder.is_dir()) else {
        let mut there: Vec<_> = std::fs::read_dir(models).into_iter().flatten().flatten().collect();
        there.retain(|entry| entry.path().join("config.json").is_file());
        let mut there: Vec<_> = there.iter().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        there.sort_unstable();
        bail!("--model: there is no folder {} here or in models/, which has {}", model.display(), there.join(", "))
    };
    let config = model.join("config.json");
    if !config.is_file() {
        bail!("--model: {} has no config.json; give a folder with a config.json", model.display())
    }
    let json = read_json("--model", &config)?;
    let own_tokenizer = Some(model.join("tokenizer.json")).filter(|file| file.is_file());
    let words = words(args, own_tokenizer)?;
    if json.get("model_type").is_some() {
        let mut system = hugging_face::open(args, &json, &Checkpoint::open(&model)?, words, device)?;
        system.weights = format!("{}, {}", model.display(), system.weights);
        return Ok(system);
    }
    if json.get("num_layers").is_some() {
        return attention_only(args, json, &model, words, device);
    }
    let refused = |error| {
        let path = config.display();
        Error::msg(format!("--model: {path} describes no attention layer ({error}); choose another folder"))
    };
    let folder: FolderConfig = serde_json::from_value(json).map_err(refused)?;
    let Ok(layout) = folder.layout.parse::<WeightLayout>() else {
        let (path, layout) = (model.display(), folder.layout);
        bail!("--model: {path} holds no multi-head layer but `{layout}`; choose another folder")
    };
    let cfg: MultiHeadAttentionConfig = serde_json::from_value(folder.layer).map_err(refused)?;
    refuse_cross_attention(&cfg)?;
    chosen_layer(args, 1, 0)?;

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
        None => drawn_embedding(args, &words, cfg.embed_dim(), device)?,
    };
    check_vocabulary(&words, &embedding)?;
    let layer = Layer::MultiHead(MultiHeadAttention::load(&cfg, layout, vb)?);
    Ok(System { words, layer, weights, embedded_by, embedding, before: vec![] })
}

/// A model of attention layers alone, as the example `induction_heads` writes it; the blocks before the layer are run.
fn attention_only(args: &Args, json: Value, model: &Path, words: Words, device: &Device) -> Result<System> {
    let refused = |error| Error::msg(format!("--model: {} is no such model: {error}", model.display()));
    let cfg: AttentionOnlyConfig = serde_json::from_value(json).map_err(refused)?;
    let n = chosen_layer(args, cfg.num_layers, cfg.num_layers.saturating_sub(1))?;
    let file = model.join("model.safetensors");
    let AttentionOnly { embedding, mut blocks, .. } =
        AttentionOnly::new(&cfg, Checkpoint::open(&file)?.var_builder(args.dtype, device)?)?;
    check_vocabulary(&words, &embedding)?;
    blocks.truncate(n + 1);
    let Some(Block { norm, attention }) = blocks.pop() else { bail!("--model: {} has no layer", model.display()) };
    let mut before: Vec<Box<dyn Module>> = blocks.into_iter().map(|block| Box::new(block) as _).collect();
    before.push(Box::new(norm));
    let weights = format!("{}, layer {n} of {}", file.display(), cfg.num_layers);
    let embedded_by = "the model's own embedding, and what is before the layer".to_string();
    Ok(System { words, layer: Layer::MultiHead(attention), weights, embedded_by, embedding, before })
}

/// A file that somebody exported: the layer is found by its names and shapes.
fn exported(args: &Args, file: &Path, device: &Device) -> Result<System> {
    let checkpoint = Checkpoint::open(file)?;
    let layers = checkpoint.attention_layers();
    if layers.is_empty() {
        let names: Vec<_> = checkpoint.shapes().map(|(name, _)| name).take(5).collect();
        let (path, names) = (file.display(), names.join(", "));
        bail!("{path} holds no attention layer that any layout names; its tensors begin with {names}")
    }
    let prefix = &layers[chosen_layer(args, layers.len(), 0)?];
    let layout = match args.layout {
        Some(layout) => layout,
        None => checkpoint
            .detect(prefix)
            .map_err(|error| Error::msg(format!("{}; --layout chooses one", one_line(&error))))?,
    };
    if args.heads.is_none() && !matches!(layout, WeightLayout::StackedHeads(..)) {
        bail!("{} does not tell the number of heads; say it with --heads", file.display())
    }
    let cfg = checkpoint.infer_config(prefix, layout, args.heads).map_err(|error| match args.heads {
        Some(heads) => Error::msg(format!("--heads {heads}: {}", one_line(&error))),
        None => error,
    })?;
    refuse_cross_attention(&cfg)?;
    let words = words(args, None)?;
    let vb = checkpoint.var_builder(args.dtype, device)?;
    let (embedding, embedded_by) = embedding(args, &checkpoint, &vb, &words, cfg.embed_dim())?;
    check_vocabulary(&words, &embedding)?;
    let below = if prefix.is_empty() { vb } else { vb.pp(prefix) };
    let layer = Layer::MultiHead(MultiHeadAttention::load(&cfg, layout, below)?);
    let place = if prefix.is_empty() { String::new() } else { format!(", {prefix}") };
    let causal = if cfg.causal() { ", causal by its mask buffer" } else { "" };
    let weights = format!("{}{place} (layout {layout}{causal})", file.display());
    Ok(System { words, layer, weights, embedded_by, embedding, before: vec![] })
}

/// The file's own table of width E, or a drawn one.
fn embedding(
    args: &Args,
    checkpoint: &Checkpoint,
    vb: &VarBuilder,
    words: &Words,
    embed_dim: usize,
) -> Result<(EmbeddingLayer, String)> {
    let is_table = |name: &str, shape: &[usize]| {
        let table = name.strip_suffix(".weight").and_then(|table| table.rsplit('.').next());
        table.is_some_and(|table| TABLES.contains(&table)) && shape.len() == 2 && shape[1] == embed_dim
    };
    let Some((name, shape)) = checkpoint.shapes().find(|(name, shape)| is_table(name, shape)) else {
        return drawn_embedding(args, words, embed_dim, vb.device());
    };
    let table = vb.get((shape[0], embed_dim), name)?;
    let vb = VarBuilder::from_tensors(HashMap::from([("embedding.weight".into(), table)]), vb.dtype(), vb.device());
    Ok((EmbeddingLayer::new(&EmbeddingConfig::new(shape[0], embed_dim), vb)?, name.to_string()))
}

/// A checkpoint of the hub, from its folder in the cache.
fn hub(args: &Args, id: &str, device: &Device) -> Result<System> {
    let folder = fetch("tokenize_attend", id, &[])?;
    let json = read_json("--model-id", &folder.join("config.json"))?;
    let words = words(args, Some(folder.join("tokenizer.json")).filter(|file| file.is_file()))?;
    let mut system = hugging_face::open(args, &json, &Checkpoint::open(&folder)?, words, device)?;
    let commit = folder.file_name().unwrap_or_default();
    system.weights = format!("{id} at {}, {}", commit.display(), system.weights);
    Ok(system)
}

/// --tokenizer, else the source's own, else the tutorial's seven words, else the words of the texts.
fn words(args: &Args, own: Option<PathBuf>) -> Result<Words> {
    let split = if args.punctuation { Split::Punctuation } else { Split::Whitespace };
    if let Some(file) = args.tokenizer.as_ref().or(own.as_ref()) {
        let tokenizer = SimpleTokenizer::from_file(file)?;
        let tokenizer = if args.punctuation { tokenizer.with_split(split) } else { tokenizer };
        return Ok(Words { tokenizer, said_by: None });
    }
    let tutorial = SimpleTokenizer::from_words(VOCABULARY)?.with_split(split);
    if args.texts.iter().all(|text| tutorial.encode(text).is_ok()) {
        return Ok(Words { tokenizer: tutorial, said_by: None });
    }
    let said_by = Some("the words of the text are the vocabulary, since no file gives one");
    Ok(Words { tokenizer: SimpleTokenizer::from_texts(&args.texts, split)?, said_by })
}

/// An embedding for a layer that came without one.
pub fn drawn_embedding(
    args: &Args,
    words: &Words,
    embed_dim: usize,
    device: &Device,
) -> Result<(EmbeddingLayer, String)> {
    let vb: VarBuilder = TorchSeed::new(args.seed).var_builder(args.dtype, device);
    let embedding = EmbeddingLayer::new(&EmbeddingConfig::new(words.tokenizer.vocab_size(), embed_dim), vb)?;
    Ok((embedding, format!("drawn after torch.manual_seed({}), since the weights hold none", args.seed)))
}

/// An error if the tokenizer has ids for which the embedding has no row.
pub fn check_vocabulary(words: &Words, embedding: &EmbeddingLayer) -> Result<()> {
    let (words, rows) = (words.tokenizer.vocab_size(), embedding.vocab_size());
    if words > rows {
        bail!("the tokenizer has {words} tokens, but the embedding {rows} rows; give the model's own with --tokenizer")
    }
    Ok(())
}

/// An error for a layer that attends to another kind of input than it attends from.
fn refuse_cross_attention(cfg: &MultiHeadAttentionConfig) -> Result<()> {
    let widths = [cfg.embed_dim(), cfg.key_size(), cfg.value_size()];
    if widths.iter().any(|&width| width != widths[0]) {
        bail!(
            "the layer reads queries, keys and values of widths {widths:?}, which no one text gives; choose another folder or file"
        )
    }
    Ok(())
}

/// --layer, or another where it is not given; an error for one that a source of `count` layers does not have.
fn chosen_layer(args: &Args, count: usize, otherwise: usize) -> Result<usize> {
    match args.layer.unwrap_or(otherwise) {
        layer if layer >= count => bail!("--layer {layer} is out of range: there are {count}, numbered from 0"),
        layer => Ok(layer),
    }
}
