//! Checkpoints of Hugging Face models: attention is `hf::load_attention`; what a model has in front of it stands here.

use std::collections::HashMap;

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_attention::weights::Checkpoint;
use candle_attention::{LayerNorm, RmsNorm, hf};
use candle_core::{D, DType, Device, Error, Module, Result, Tensor};
use candle_nn::VarBuilder;
use serde_json::Value;

use crate::args::Args;
use crate::common::one_line;
use crate::system::{Layer, System, TABLES, Words, check_vocabulary, drawn_embedding};

const POSITIONS: [&str; 3] = ["wpe", "position_embeddings", "embed_positions"];
const EMBEDDING_NORMS: [&str; 4] = ["embeddings.LayerNorm", "embeddings.norm", "word_embeddings_layernorm", "emb_ln"];
/// The norm right before the attention of a block, in models whose norms stand before and not behind the residual.
const BLOCK_NORMS: [&str; 8] = [
    "layers.{}.input_layernorm",
    "layers.{}.self_attn_layer_norm",
    "layers.{}.attn_norm",
    "h.{}.input_layernorm",
    "h.{}.ln_attn",
    "h.{}.ln_1",
    "blocks.{}.norm_1",
    "encoder.block.{}.layer.0.layer_norm",
];
/// Models whose norms subtract the mean though they have no bias.
const WITHOUT_NORM_BIAS: [&str; 4] = ["cohere", "cohere2", "modernbert", "mpt"];

pub fn open(args: &Args, json: &Value, checkpoint: &Checkpoint, words: Words, device: &Device) -> Result<System> {
    let vb = checkpoint.var_builder(args.dtype, device)?;
    let n = args.layer.unwrap_or(0);
    let layer = if hf::latent_attention_config(json, n).is_ok() {
        hf::load_latent_attention(json, n, vb.clone()).map(Layer::Latent)
    } else {
        hf::load_attention(json, n, vb.clone()).map(Layer::MultiHead)
    };
    let layer =
        layer.map_err(|error| if n > 0 { Error::msg(format!("--layer {n}: {}", one_line(&error))) } else { error })?;
    let model_type = json["model_type"].as_str().unwrap_or_default();
    // The text of a model that has more parts.
    let text = json.get("text_config").unwrap_or(json);
    let front = Front { model_type, json: text, checkpoint, vb: &vb, width: layer.embed_dim() };
    let (embedding, embedded_by) = match front.embedding()? {
        Some(embedding) => (embedding, format!("{model_type}'s embedding")),
        None => drawn_embedding(args, &words, layer.embed_dim(), device)?,
    };
    check_vocabulary(&words, &embedding)?;
    let norms = front.norms(n)?;
    let with_norm = if norms.is_empty() { "" } else { ", and the norm before attention" };
    let without = match n {
        0 => String::new(),
        n => format!("; the {n} blocks before layer {n} are not run"),
    };
    let (weights, embedded_by) = (format!("layer {n} of {model_type}"), format!("{embedded_by}{with_norm}{without}"));
    Ok(System { words, layer, weights, embedded_by, embedding, before: norms })
}

/// What stands in front of the attention of a layer.
struct Front<'a> {
    model_type: &'a str,
    json: &'a Value,
    checkpoint: &'a Checkpoint,
    vb: &'a VarBuilder<'a>,
    /// E.
    width: usize,
}

impl Front<'_> {
    /// Tokens, with what is added to each of them and to each position, where the checkpoint has a table of width E.
    fn embedding(&self) -> Result<Option<EmbeddingLayer>> {
        let Some(mut table) = self.table(&TABLES)? else { return Ok(None) };
        let scale = if self.model_type.starts_with("gemma") {
            // In the dtype of the embeddings, as Gemma rounds it.
            let root = Tensor::new((self.width as f64).sqrt(), &Device::Cpu)?.to_dtype(table.dtype())?;
            Some(root.to_dtype(DType::F64)?.to_scalar()?)
        } else {
            self.json["embedding_multiplier"].as_f64()
        };
        if let Some(scale) = scale {
            table = (table * scale)?;
        }
        if let Some(segments) = self.table(&["token_type_embeddings"])? {
            table = table.broadcast_add(&segments.narrow(0, 0, 1)?)?;
        }
        let mut cfg = EmbeddingConfig::new(table.dim(0)?, self.width);
        let mut tables = HashMap::from([("embedding.weight".to_string(), table)]);
        if let Some(positions) = self.table(&POSITIONS)? {
            let first = match self.model_type {
                "opt" => 2,
                "roberta" => self.json["pad_token_id"].as_u64().unwrap_or(1) as usize + 1,
                _ => 0,
            };
            let positions = positions.narrow(0, first, positions.dim(0)?.saturating_sub(first))?;
            cfg = cfg.with_max_positions(positions.dim(0)?);
            tables.insert("position_embedding.weight".to_string(), positions);
        }
        let vb = VarBuilder::from_tensors(tables, self.vb.dtype(), self.vb.device());
        EmbeddingLayer::new(&cfg, vb).map(Some)
    }

    /// The norm behind the embedding and that before the attention of a layer, as far as the checkpoint has them.
    fn norms(&self, layer: usize) -> Result<Vec<Box<dyn Module>>> {
        let block = BLOCK_NORMS.map(|name| name.replace("{}", &layer.to_string()));
        let block: &[String] = if self.json["do_layer_norm_before"] == false { &[] } else { &block };
        let embedding = EMBEDDING_NORMS.iter().find_map(|name| self.norm(name));
        embedding.into_iter().chain(block.iter().find_map(|name| self.norm(name))).collect()
    }

    fn norm(&self, name: &str) -> Option<Result<Box<dyn Module>>> {
        // Old checkpoints have TensorFlow's names.
        let find = |part: &str| self.find(&format!("{name}.{part}"));
        let weight = find("weight").or_else(|| find("gamma"))?;
        let bias = find("bias").or_else(|| find("beta"));
        let is_bert = ["bert", "distilbert", "nomic_bert", "roberta"].contains(&self.model_type);
        let has_mean = bias.is_some() || WITHOUT_NORM_BIAS.contains(&self.model_type);
        let keys = ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"];
        let eps = keys.iter().find_map(|key| self.json[*key].as_f64());
        let eps = eps.unwrap_or(if is_bert {
            1e-12
        } else if has_mean {
            1e-5
        } else {
            1e-6
        });
        let get = |name: &str| self.vb.get(self.width, name);
        let norm = || -> Result<Box<dyn Module>> {
            let weight = get(&weight)?;
            Ok(match bias {
                Some(bias) => Box::new(LayerNorm::new(weight, get(&bias)?, eps)?),
                None if has_mean => Box::new(LayerNorm::new_no_bias(weight, eps)?),
                None if self.model_type.starts_with("gemma") => Box::new(RmsNorm::plus_one(weight, eps)?),
                None => Box::new(RmsNorm::new(weight, eps)?),
            })
        };
        Some(norm())
    }

    /// The first of the tables that is there, if it has width E.
    fn table(&self, names: &[&str]) -> Result<Option<Tensor>> {
        let Some(name) = names.iter().find_map(|name| self.find(&format!("{name}.weight"))) else { return Ok(None) };
        let table = self.vb.get_unchecked(&name)?;
        Ok((table.rank() == 2 && table.dim(D::Minus1)? == self.width).then_some(table))
    }

    /// The tensor whose name is, or ends with, the one given: files differ in the prefix of the model.
    fn find(&self, name: &str) -> Option<String> {
        let ending = format!(".{name}");
        let mut names = self.checkpoint.shapes().map(|(name, _)| name).filter(|name| !name.contains("vision"));
        names.find(|full| *full == name || full.ends_with(&ending)).map(str::to_string)
    }
}
