//! A file that somebody exported: the layer is found by its names and shapes.

use std::collections::HashMap;
use std::path::Path;

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer};
use candle_attention::weights::Checkpoint;
use candle_attention::{MultiHeadAttention, WeightLayout};
use candle_core::{Device, Result, bail};
use candle_nn::VarBuilder;

use crate::args::Args;
use crate::system::{System, check_vocabulary, drawn_embedding, refuse_cross_attention, refuse_layer, tokenizer};

/// The last part of the name under which models keep their token embedding.
const TABLES: [&str; 7] = [
    "embedding.weight",
    "embeddings.weight",
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_emb.weight",
    "token_embedding.weight",
];

pub fn file(args: &Args, file: &Path, device: &Device) -> Result<System> {
    let checkpoint = Checkpoint::open(file)?;
    let prefix = prefix(args, &checkpoint, file)?;
    let layout = match args.layout {
        Some(layout) => layout,
        None => checkpoint.detect(&prefix)?,
    };
    if args.heads.is_none() && !matches!(layout, WeightLayout::StackedHeads(..)) {
        bail!("{} does not tell the number of heads; say it with --heads", file.display())
    }
    let cfg = checkpoint.infer_config(&prefix, layout, args.heads)?;
    refuse_cross_attention(&cfg)?;
    let tokenizer = tokenizer(args, None)?;
    let vb = checkpoint.var_builder(args.dtype, device)?;
    let (embedding, embedded_by) = embedding(args, &checkpoint, &vb, &tokenizer, cfg.embed_dim())?;
    check_vocabulary(&tokenizer, &embedding)?;
    let layer = MultiHeadAttention::load(&cfg, layout, below(&vb, &prefix))?;
    let place = if prefix.is_empty() { String::new() } else { format!(", {prefix}") };
    let causal = if cfg.causal() { ", causal by its mask buffer" } else { "" };
    let weights = format!("{}{place} (layout {layout}{causal})", file.display());
    Ok(System { tokenizer, layer, weights, embedded_by, embedding, norm: None })
}

/// The prefix of layer `--layer`.
pub fn prefix(args: &Args, checkpoint: &Checkpoint, file: &Path) -> Result<String> {
    let layers = checkpoint.attention_layers();
    if layers.is_empty() {
        let names: Vec<_> = checkpoint.shapes().map(|(name, _)| name).take(5).collect();
        bail!(
            "{} holds no attention layer that any layout names; its tensors begin with {}",
            file.display(),
            names.join(", ")
        )
    }
    refuse_layer(args, layers.len())?;
    Ok(layers[args.layer].clone())
}

pub fn below<'a>(vb: &VarBuilder<'a>, prefix: &str) -> VarBuilder<'a> {
    if prefix.is_empty() { vb.clone() } else { vb.pp(prefix) }
}

/// The file's own table of width E, or a drawn one.
fn embedding(
    args: &Args,
    checkpoint: &Checkpoint,
    vb: &VarBuilder,
    tokenizer: &SimpleTokenizer,
    embed_dim: usize,
) -> Result<(EmbeddingLayer, String)> {
    let is_table = |name: &str, shape: &[usize]| {
        let named = TABLES.iter().any(|table| name == *table || name.ends_with(&format!(".{table}")));
        named && !name.contains("position") && shape.len() == 2 && shape[1] == embed_dim
    };
    let found = checkpoint.shapes().find(|(name, shape)| is_table(name, shape));
    let Some((name, shape)) = found.map(|(name, shape)| (name.to_string(), shape.to_vec())) else {
        return drawn_embedding(args, tokenizer, embed_dim, vb.device());
    };
    let table = vb.get((shape[0], embed_dim), &name)?;
    let vb = VarBuilder::from_tensors(HashMap::from([("embedding.weight".into(), table)]), vb.dtype(), vb.device());
    Ok((EmbeddingLayer::new(&EmbeddingConfig::new(shape[0], embed_dim), vb)?, name))
}
