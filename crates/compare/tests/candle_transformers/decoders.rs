//! Decoders of this crate and of candle-transformers as functions from token ids (B, T) at positions from `offset` on
//! to the logits (B, V) after the last. A function stores earlier tokens.

use candle_core::{DType, Device, Result, Tensor, bail};
use candle_nn::VarBuilder;
use candle_transformers::models::{bigcode, gemma3, llama, mistral, phi3, qwen3};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::our_decoder::CausalLm;
use crate::{Weights, builder};

pub type Decoder = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor>>;

/// Returns the example `causal_lm`, which counts positions itself.
pub fn this_crate(json: &Value, weights: &Weights) -> Result<Decoder> {
    let model = CausalLm::load(json, builder(weights), |_, _| {})?;
    let mut caches = model.caches(|config| config)?;
    Ok(Box::new(move |ids, _| {
        let (b, t) = ids.dims2()?;
        model.next_logits(ids, &vec![t; b], &mut caches)
    }))
}

/// Returns the model of candle-transformers.
pub fn candle_transformers(json: &Value, vb: VarBuilder) -> Result<Decoder> {
    Ok(match json["model_type"].as_str().unwrap_or_default() {
        "llama" => {
            let config = config::<llama::LlamaConfig>(json)?.into_config(false);
            let model = llama::Llama::load(vb, &config)?;
            let mut cache = llama::Cache::new(true, DType::F32, &config, &Device::Cpu)?;
            Box::new(move |ids, offset| model.forward(ids, offset, &mut cache))
        }
        "mistral" => {
            let mut model = mistral::Model::new(&config(json)?, vb)?;
            Box::new(move |ids, offset| model.forward(ids, offset)?.squeeze(1))
        }
        "qwen3" => {
            let mut model = qwen3::ModelForCausalLM::new(&config(json)?, vb)?;
            Box::new(move |ids, offset| model.forward(ids, offset)?.squeeze(1))
        }
        "gemma3_text" => {
            let mut model = gemma3::Model::new(false, &config(json)?, vb)?;
            Box::new(move |ids, offset| model.forward(ids, offset)?.squeeze(1))
        }
        "phi3" => {
            let mut model = phi3::Model::new(&config(json)?, vb)?;
            Box::new(move |ids, offset| model.forward(ids, offset)?.squeeze(1))
        }
        "gpt_bigcode" => {
            let mut model = bigcode::GPTBigCode::load(vb, bigcode_config(json))?;
            Box::new(move |ids, offset| model.forward(ids, offset))
        }
        other => bail!("no model of candle-transformers for {other:?}"),
    })
}

fn config<C: DeserializeOwned>(json: &Value) -> Result<C> {
    serde_json::from_value(json.clone()).map_err(candle_core::Error::wrap)
}

/// Builds the config of GPT BigCode, which candle-transformers cannot read from JSON.
fn bigcode_config(json: &Value) -> bigcode::Config {
    let size = |key: &str| json[key].as_u64().expect("a size") as usize;
    bigcode::Config {
        vocab_size: size("vocab_size"),
        max_position_embeddings: size("n_positions"),
        num_hidden_layers: size("n_layer"),
        hidden_size: size("n_embd"),
        layer_norm_epsilon: 1e-5,
        n_inner: Some(size("n_inner")),
        num_attention_heads: size("n_head"),
        multi_query: json["multi_query"] != false,
        use_cache: true,
    }
}

/// Returns the logits after each call, where `calls` has the number of ids (B, T) of each.
pub fn logits(decoder: &mut Decoder, ids: &Tensor, calls: &[usize]) -> Result<Vec<Tensor>> {
    let mut offset = 0;
    let mut all = Vec::with_capacity(calls.len());
    for &t in calls {
        all.push(decoder(&ids.narrow(1, offset, t)?.contiguous()?, offset)?);
        offset += t;
    }
    Ok(all)
}
