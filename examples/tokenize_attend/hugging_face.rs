//! Checkpoints of Hugging Face models: the embedding and norm in front of a layer, as the model itself has them.
//!
//! Only architectures whose attention this crate computes as the model does: learned positions, no rotation.

use std::collections::HashMap;
use std::path::Path;

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer};
use candle_attention::weights::Checkpoint;
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use candle_core::{Device, Result, Tensor, bail};
use candle_nn::{VarBuilder, layer_norm};

use crate::args::Args;
use crate::checkpoint::{below, prefix};
use crate::system::{System, check_vocabulary};

pub fn open(
    args: &Args,
    json: &serde_json::Value,
    checkpoint: &Checkpoint,
    tokenizer: SimpleTokenizer,
    device: &Device,
) -> Result<System> {
    let model_type = json["model_type"].as_str().unwrap_or_default();
    let family = match model_type {
        "bert" => Family::Bert,
        "gpt2" => Family::Gpt2,
        other => bail!("models of type {other:?} are not supported here; those of type bert and gpt2 are"),
    };
    family.refuse_variants(json)?;
    let size = |key: &str| match json[key].as_u64() {
        Some(size) if size > 0 => Ok(size as usize),
        _ => bail!("config.json has no {key}"),
    };
    let prefix = prefix(args, checkpoint, Path::new("the checkpoint"))?;
    let vb = checkpoint.var_builder(args.dtype, device)?;
    let layout = checkpoint.detect(&prefix)?;
    let (width, heads, eps) = match family {
        Family::Bert => (size("hidden_size")?, size("num_attention_heads")?, json["layer_norm_eps"].as_f64()),
        Family::Gpt2 => (size("n_embd")?, size("n_head")?, json["layer_norm_epsilon"].as_f64()),
    };
    let cfg = MultiHeadAttentionConfig::new(width, heads).with_bias(true).with_causal(family == Family::Gpt2);

    let tables = family.tables(checkpoint, &vb)?;
    let (vocab_size, positions) = (tables["embedding.weight"].dim(0)?, tables["position_embedding.weight"].dim(0)?);
    let tables = VarBuilder::from_tensors(tables, args.dtype, device);
    let embedding =
        EmbeddingLayer::new(&EmbeddingConfig::new(vocab_size, width).with_max_positions(positions), tables)?;
    check_vocabulary(&tokenizer, &embedding)?;
    let norm = layer_norm(width, eps.unwrap_or(family.eps()), below(&vb, &family.norm(checkpoint, &prefix)?))?;
    let layer = MultiHeadAttention::load(&cfg, layout, below(&vb, &prefix))?;
    let embedded_by = match args.layer {
        0 => format!("{model_type}'s embedding, positions and layer norm"),
        n => format!("{model_type}'s embedding, positions and layer norm; the {n} blocks before layer {n} are not run"),
    };
    Ok(System {
        tokenizer,
        layer,
        weights: format!("{prefix} (layout {layout})"),
        embedded_by,
        embedding,
        norm: Some(norm),
    })
}

#[derive(Clone, Copy, PartialEq)]
enum Family {
    Bert,
    Gpt2,
}

impl Family {
    /// Settings under which the model computes something else than this program would.
    fn refuse_variants(self, json: &serde_json::Value) -> Result<()> {
        let expected = |key: &str, usual: serde_json::Value| match &json[key] {
            serde_json::Value::Null => Ok(()),
            value if *value == usual => Ok(()),
            value => bail!("config.json has {key} {value}, and only {usual} is supported here"),
        };
        match self {
            Self::Bert => {
                expected("position_embedding_type", "absolute".into())?;
                expected("is_decoder", false.into())
            }
            Self::Gpt2 => {
                expected("scale_attn_weights", true.into())?;
                expected("scale_attn_by_inverse_layer_idx", false.into())
            }
        }
    }

    fn eps(self) -> f64 {
        match self {
            Self::Bert => 1e-12,
            Self::Gpt2 => 1e-5,
        }
    }

    /// Token and position tables under the names that [`EmbeddingLayer`] reads. BERT adds the vector of segment 0 to
    /// every token, which goes into the positions here.
    fn tables(self, checkpoint: &Checkpoint, vb: &VarBuilder) -> Result<HashMap<String, Tensor>> {
        let read = |name: &str| -> Result<Tensor> {
            let (name, shape) = find(checkpoint, name)?;
            vb.get(shape, &name)
        };
        let (tokens, positions) = match self {
            Self::Bert => {
                let segment = read("embeddings.token_type_embeddings.weight")?.narrow(0, 0, 1)?;
                let positions = read("embeddings.position_embeddings.weight")?.broadcast_add(&segment)?;
                (read("embeddings.word_embeddings.weight")?, positions)
            }
            Self::Gpt2 => (read("wte.weight")?, read("wpe.weight")?),
        };
        Ok(HashMap::from([("embedding.weight".into(), tokens), ("position_embedding.weight".into(), positions)]))
    }

    /// The prefix of the layer norm between the embedding and the attention of a layer.
    fn norm(self, checkpoint: &Checkpoint, prefix: &str) -> Result<String> {
        match self {
            Self::Bert => {
                let weight = ["embeddings.LayerNorm.weight", "embeddings.LayerNorm.gamma"]
                    .into_iter()
                    .find_map(|name| find(checkpoint, name).ok());
                let Some((name, _)) = weight else { bail!("the checkpoint has no embeddings.LayerNorm") };
                Ok(name.rsplit_once('.').map(|(norm, _)| norm.to_string()).unwrap_or(name))
            }
            Self::Gpt2 => Ok(match prefix.strip_suffix("attn") {
                Some(block) => format!("{block}ln_1"),
                None => "ln_1".to_string(),
            }),
        }
    }
}

/// The tensor whose name is, or ends with, the one given: files differ in the prefix of the model.
fn find(checkpoint: &Checkpoint, name: &str) -> Result<(String, Vec<usize>)> {
    let ending = format!(".{name}");
    let mut shapes = checkpoint.shapes();
    match shapes.find(|(full_name, _)| *full_name == name || full_name.ends_with(&ending)) {
        Some((full_name, shape)) => Ok((full_name.to_string(), shape.to_vec())),
        None => bail!("the checkpoint has no {name}"),
    }
}
