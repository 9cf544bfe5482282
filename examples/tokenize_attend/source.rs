//! A tokenizer, an attention layer and its input, from the source that the command line names.

use std::path::Path;

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, PaddingSide, SimpleTokenizer, Split};
use candle_attention::weights::Checkpoint;
use candle_attention::{AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig, TorchSeed};
use candle_core::{Context, Device, Error, Module, Result, Tensor, bail};
use serde_json::{Value, from_value};

use crate::Args;
use crate::attention_only::{AttentionOnly, AttentionOnlyConfig};
use crate::common::{Files, one_line};
use crate::decoder::CausalLm;
use crate::encoder::Encoder;

pub struct Source {
    pub tokenizer: SimpleTokenizer,
    pub input: Input,
    pub layer: MultiHeadAttention,
    /// The origin of the weights and of the input.
    pub weights: String,
    pub embedding: String,
}

/// A function from token ids (B, T) to the layer's input (B, T, E). The mask is that of the padding.
type Input = Box<dyn Fn(&Tensor, &AttentionMask) -> Result<Tensor>>;

impl Source {
    pub fn open(args: &Args, device: &Device) -> Result<Self> {
        match &args.weights {
            Some(file) => Self::exported(args, file, None, device),
            None if args.model.is_given() => Self::folder(args, device),
            None => Self::tutorial(args, device),
        }
    }

    /// Opens the tutorial's layer, whose weights are drawn in PyTorch's order: embedding first.
    fn tutorial(args: &Args, device: &Device) -> Result<Self> {
        let tokenizer = tokenizer(args, None)?;
        let drawn = "drawn as PyTorch draws them after torch.manual_seed(0)";
        let vb = TorchSeed::new(0).var_builder(args.model.dtype, device);
        let table = EmbeddingLayer::new(&EmbeddingConfig::new(tokenizer.vocab_size(), 1536), vb.clone())?;
        let layer = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(1536, 16).with_qkv_bias(true), vb)?;
        Ok(Self { tokenizer, input: alone(table), layer, weights: drawn.into(), embedding: drawn.into() })
    }

    /// Opens the layer in a file, described by a `config.json` of `models/`, or else by its names and shapes.
    fn exported(args: &Args, file: &Path, config: Option<Value>, device: &Device) -> Result<Self> {
        let checkpoint = Checkpoint::open(file)?;
        let n = args.layer.unwrap_or(0);
        let layers = checkpoint.attention_layers();
        let prefix = layers.get(n).with_context(|| format!("[tokenize_attend] no layer {n} in {}", file.display()))?;
        let layout = args.layout.map_or_else(|| checkpoint.detect(prefix), Ok)?;
        let cfg = match config {
            Some(mut config) => from_value(config["layer"].take()).map_err(Error::wrap)?,
            None => {
                let inferred = checkpoint.infer_config(prefix, layout, args.heads);
                // The number has the name of this program's option.
                inferred.map_err(|error| Error::Msg(one_line(&error).replace("num_heads", "--heads")))?
            }
        };
        let vb = checkpoint.var_builder(args.model.dtype, device)?.pp(prefix);
        let (own, embedding) = match vb.contains_tensor("embedding.weight") {
            true => (vb.clone(), "the file's"),
            false => (TorchSeed::new(0).var_builder(vb.dtype(), device), "drawn, since the file has none"),
        };
        let tokenizer = tokenizer(args, file.parent())?;
        let table = EmbeddingLayer::new(&EmbeddingConfig::new(tokenizer.vocab_size(), cfg.embed_dim()), own)?;
        let layer = MultiHeadAttention::load(&cfg, layout, vb)?;
        let weights = format!("{} ({layout})", file.display());
        Ok(Self { tokenizer, input: alone(table), layer, weights, embedding: embedding.into() })
    }

    /// Opens a folder of `models/`, or a Hugging Face checkpoint.
    fn folder(args: &Args, device: &Device) -> Result<Self> {
        let mut model_args = args.model.clone();
        if let Some(folder) = model_args.model.as_mut().filter(|folder| !folder.is_dir()) {
            let named = Path::new(env!("CARGO_MANIFEST_DIR")).join("models").join(&folder);
            if !named.is_dir() {
                bail!("[tokenize_attend] {}: neither a folder nor the name of one in models/", folder.display())
            }
            *folder = named;
        }
        let Files { folder, config, vb } = model_args.open(&[])?;
        if config.get("layout").is_some() {
            return Self::exported(args, &folder.join("model.safetensors"), Some(config), device);
        }
        if !folder.join("tokenizer.json").is_file() {
            bail!("[tokenize_attend] {} has no tokenizer.json, which splits texts into tokens", folder.display())
        }
        let tokenizer = tokenizer(args, Some(&folder))?;
        let mut n = args.layer.unwrap_or(0);
        let layers;
        let (layer, input): (_, Input) = if let Ok(cfg) = from_value::<AttentionOnlyConfig>(config.clone()) {
            let transformer = AttentionOnly::new(&cfg, vb)?;
            layers = transformer.blocks.len();
            n = args.layer.unwrap_or(layers.saturating_sub(1));
            let layer = transformer.blocks.get(n).map(|block| block.attention.clone());
            (layer, Box::new(move |ids, _| transformer.attention_input(ids, n)))
        } else if Encoder::is_one(&config) {
            let encoder = Encoder::load(&config, vb, |_, _| {})?;
            layers = encoder.blocks.len();
            let layer = encoder.blocks.attention(n).cloned();
            (layer, Box::new(move |ids, padding| encoder.attention_input(ids, padding, n)))
        } else {
            let decoder = CausalLm::load(&config, vb, |_, _| {})?;
            layers = decoder.blocks.len();
            let layer = decoder.blocks.attention(n).cloned();
            (layer, Box::new(move |ids, padding| decoder.attention_input(ids, padding, n)))
        };
        if n >= layers {
            bail!("[tokenize_attend] {} has no layer {n}, expected 0 to {}", folder.display(), layers.saturating_sub(1))
        }
        let weights = format!("{}, layer {n}", folder.display());
        let layer = layer.with_context(|| format!("[tokenize_attend] no multi-head attention in {weights}"))?;
        Ok(Self { tokenizer, input, layer, weights, embedding: "the model's".into() })
    }
}

/// Returns the input of a layer that is not part of a model.
fn alone(table: EmbeddingLayer) -> Input {
    Box::new(move |ids, _| table.forward(ids))
}

/// Opens the tokenizer.json of a folder, else the tutorial's words, else the words of the texts.
fn tokenizer(args: &Args, folder: Option<&Path>) -> Result<SimpleTokenizer> {
    let file = folder.map(|folder| folder.join("tokenizer.json")).filter(|file| file.is_file());
    let tutorial = SimpleTokenizer::from_words(["<pad>", "hello", "world", "how", "are", "you", "?"])?;
    let tokenizer = match file {
        Some(file) => SimpleTokenizer::from_file(file)?,
        None if args.texts.iter().all(|text| tutorial.encode(text).is_ok()) => tutorial,
        None => SimpleTokenizer::from_texts(&args.texts, Split::Whitespace)?,
    };
    // A tokenizer without a padding token is used for texts of one length.
    Ok(tokenizer.clone().with_padding_side(PaddingSide::Right).unwrap_or(tokenizer))
}
