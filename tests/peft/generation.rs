//! Generation by a whole model with several adapters on attention and MLP: each sequence of a batch has the logits
//! that it has with its adapter alone, which are near the logits of merged weights.

use std::collections::HashMap;

use candle_attention::peft::{Adapter, AdapterConfig, Adapters};
use candle_attention::{
    AdaptedLinear, AttentionCache, AttentionInput, MultiHeadAttention, PackedLinear, RmsNorm, rms_norm,
};
use candle_core::{DType, IndexOp, Module, Result, Tensor};
use candle_nn::VarBuilder;
use serde_json::json;

use crate::common::{Model, assert_near, bits, recorded};
use crate::models::Drawn;
use crate::{DEVICE, in_folder};

/// A Llama with adapters by name.
struct Llama {
    embedding: PackedLinear,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: PackedLinear,
}

struct Block {
    before_attention: RmsNorm,
    attention: MultiHeadAttention,
    before_mlp: RmsNorm,
    gate: AdaptedLinear,
    up: AdaptedLinear,
    down: AdaptedLinear,
}

impl Llama {
    fn new(model: &Model, adapters: &Adapters, vb: &VarBuilder<'static>) -> Result<Self> {
        let size = |name: &str| model.config[name].as_u64().expect("a size") as usize;
        let (width, inner) = (size("hidden_size"), size("intermediate_size"));
        let norm = |name: &str| rms_norm(width, model.config["rms_norm_eps"].as_f64().expect("a number"), vb.pp(name));
        let table = |name: &str| PackedLinear::new(&vb.get((size("vocab_size"), width), name)?, None);
        let mut blocks = Vec::new();
        for layer in 0..size("num_hidden_layers") {
            let linear = |name: &str, inputs: usize, outputs: usize| {
                let full = format!("model.layers.{layer}.mlp.{name}");
                let own = vb.pp(&full);
                let linear =
                    PackedLinear::new(&own.get((outputs, inputs), "weight")?, Some(&own.get(outputs, "bias")?))?;
                adapters.load_linear(linear, &full)
            };
            blocks.push(Block {
                before_attention: norm(&format!("model.layers.{layer}.input_layernorm"))?,
                attention: adapters.load_attention(&model.config, layer, vb.clone())?,
                before_mlp: norm(&format!("model.layers.{layer}.post_attention_layernorm"))?,
                gate: linear("gate_proj", width, inner)?,
                up: linear("up_proj", width, inner)?,
                down: linear("down_proj", inner, width)?,
            });
        }
        Ok(Self {
            embedding: table("model.embed_tokens.weight")?,
            blocks,
            norm: norm("model.norm")?,
            head: table("lm_head.weight")?,
        })
    }

    /// Returns the logits (B, T, V) of ids (B, T).
    fn forward(&self, ids: &Tensor, names: &[Option<&str>], caches: &mut [AttentionCache]) -> Result<Tensor> {
        let mut xs = self.embedding.weight_rows(ids)?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            let normed = block.before_attention.forward(&xs)?;
            let input = AttentionInput::new(&normed).with_cache(cache).with_adapters(names);
            xs = block.attention.forward_with(input.with_residual(&xs))?;
            let normed_again = block.before_mlp.forward(&xs)?;
            let gate = block.gate.forward_with_adapters(&normed_again, names)?.silu()?;
            let inner = (gate * block.up.forward_with_adapters(&normed_again, names)?)?;
            xs = (xs + block.down.forward_with_adapters(&inner, names)?)?;
        }
        self.head.forward(&self.norm.forward(&xs)?)
    }

    /// Returns the logits of prompts (B, T) and of `steps` tokens that are chosen after them, (B, T + steps - 1, V).
    fn generate(&self, prompts: &Tensor, names: &[Option<&str>], steps: usize) -> Result<Tensor> {
        let mut caches: Vec<_> = self.blocks.iter().map(|_| AttentionCache::default()).collect();
        let mut all = vec![self.forward(prompts, names, &mut caches)?];
        for _ in 1..steps {
            let last = &all[all.len() - 1];
            let next = last.narrow(1, last.dim(1)? - 1, 1)?.argmax(2)?;
            all.push(self.forward(&next, names, &mut caches)?);
        }
        Tensor::cat(&all, 1)
    }
}

/// The weights of the model with one adapter in them.
struct Merged {
    name: &'static str,
    weights: HashMap<String, Tensor>,
    /// The adapter's file, which is read late.
    _folder: tempfile::TempDir,
}

#[test]
fn lora_chosen_by_sequences_of_a_whole_model_generates_as_each_adapter_alone() -> Result<()> {
    let model = Model::open(&recorded("causal_lm/models/llama"));
    let builder = |tensors| VarBuilder::from_tensors(tensors, DType::F32, &DEVICE);
    let vb = builder(model.weights.clone());
    let mut adapters = Adapters::new();
    let mut merged_weights = Vec::new();
    for (seed, name, alpha) in [(1, "first", 1.0), (2, "second", 0.5)] {
        let mut drawn_model = Drawn::new(&model, seed, alpha / 2.0)?;
        drawn_model.file.retain(|tensor, _| tensor.contains("layers."));
        drawn_model.merged.retain(|tensor, _| tensor.contains("layers."));
        let others = model.weights.iter().filter(|(tensor, _)| !tensor.contains("layers."));
        drawn_model.merged.extend(others.map(|(tensor, weight)| (tensor.clone(), weight.clone())));
        let mut options = AdapterConfig::new(2, alpha, ["q_proj"])?.to_json();
        options["target_modules"] = json!("all-linear");
        let folder = in_folder(&options, &drawn_model.file)?;
        adapters = adapters.with(name, Adapter::open(folder.path(), DType::F32, &DEVICE)?)?;
        merged_weights.push(Merged { name, weights: drawn_model.merged, _folder: folder });
    }
    let llama = Llama::new(&model, &adapters, &vb)?;
    for name in ["first", "second"] {
        adapters.get(name).expect("the adapter was added").check_all_used()?;
    }
    let prompts = Tensor::new(&[[3u32, 14, 15], [9, 26, 5], [3, 14, 15], [3, 14, 15]], &DEVICE)?;
    let names = [Some("first"), Some("second"), None, Some("second")];
    let logits = llama.generate(&prompts, &names, 8)?;
    for (sequence, name) in names.into_iter().enumerate() {
        let prompt = prompts.i(sequence..sequence + 1)?;
        let found = logits.i(sequence..sequence + 1)?;
        let what = format!("sequence {sequence} with {name:?}");
        let alone = llama.generate(&prompt, &[name], 8)?;
        if DEVICE.is_cpu() {
            assert_eq!(bits(&found), bits(&alone), "{what}");
        }
        let weights = match merged_weights.iter().find(|merged| Some(merged.name) == name) {
            Some(merged) => merged.weights.clone(),
            None => model.weights.clone(),
        };
        let merged = Llama::new(&model, &Adapters::new(), &builder(weights))?;
        assert_near(&found, &merged.generate(&prompt, &[None], 8)?, 1e-4, &what);
    }
    // The same prompt has other tokens with another adapter.
    let tokens = logits.argmax(2)?.to_vec2::<u32>()?;
    assert!(tokens[0] != tokens[2] && tokens[3] != tokens[2] && tokens[0] != tokens[3], "{tokens:?}");
    Ok(())
}
