//! A Mistral of candle-transformers, and the same model with its attention swapped for this crate's layer: `cargo bench
//! -p candle-attention-compare --bench swapped -- --model after`. It prints the tokens/s of generation.
//!
//! The model has the sizes of SmolLM2-135M, and random weights. The logits of both models are compared before one is
//! timed. `cargo bench --bench shared` can time it with busy neighbours.

use std::collections::HashMap;
use std::time::Instant;

use candle_attention::{
    AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, PackedGatedLinear, PackedLinear,
    RopeConfig, packed_linear_no_bias,
};
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::{Activation, Embedding, Linear, RmsNorm, VarBuilder, embedding, linear_no_bias, rms_norm};
use candle_transformers::models::mistral;
use clap::{Parser, ValueEnum};

const VOCAB: usize = 49_152;
const EMBED_DIM: usize = 576;
const INNER: usize = 1536;
const LAYERS: usize = 30;
const NUM_HEADS: usize = 9;
const NUM_KV_HEADS: usize = 3;
const EPSILON: f64 = 1e-5;
const ROPE_THETA: f64 = 10_000.0;

/// The tokens of the prompt, which is not timed.
const PROMPT: usize = 256;

#[derive(Parser)]
struct Args {
    /// The model that is timed
    #[arg(long, value_enum, default_value_t = Kind::After)]
    model: Kind,
    /// Tokens that are generated
    #[arg(long, default_value_t = 64)]
    tokens: usize,
    /// Weights and activations in bf16
    #[arg(long)]
    bf16: bool,
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// The model of candle-transformers
    Before,
    /// This crate's attention in that model
    After,
    /// This crate's attention, and packed products in MLP and head
    Packed,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let dtype = if args.bf16 { DType::BF16 } else { DType::F32 };
    let weights = weights(dtype)?;
    let vb = || VarBuilder::from_tensors(weights.clone(), dtype, &Device::Cpu);
    let ids: Vec<u32> = (0..PROMPT as u32).map(|index| (index * 7919 + 13) % VOCAB as u32).collect();
    let mut model = Model::load(args.model, vb())?;
    if args.model != Kind::Before {
        compare(&mut model, &mut Model::load(Kind::Before, vb())?, &ids[..16], dtype)?;
    }
    model.clear();
    model.logits(&ids, 0)?;
    let start = Instant::now();
    for token in 0..args.tokens {
        model.logits(&ids[token..=token], PROMPT + token)?;
    }
    println!("{:.1} tokens/s", args.tokens as f64 / start.elapsed().as_secs_f64());
    Ok(())
}

/// Returns random weights with the names of a Mistral's checkpoint.
fn weights(dtype: DType) -> Result<HashMap<String, Tensor>> {
    let kv_dim = EMBED_DIM / NUM_HEADS * NUM_KV_HEADS;
    let mut tensors = HashMap::new();
    let mut add = |name: String, out_dim: usize, in_dim: usize| -> Result<()> {
        let weight = Tensor::randn(0f32, (in_dim as f32).powf(-0.5), (out_dim, in_dim), &Device::Cpu)?;
        tensors.insert(format!("{name}.weight"), weight.to_dtype(dtype)?);
        Ok(())
    };
    add("model.embed_tokens".into(), VOCAB, EMBED_DIM)?;
    add("lm_head".into(), VOCAB, EMBED_DIM)?;
    for layer in 0..LAYERS {
        let name = |module: &str| format!("model.layers.{layer}.{module}");
        add(name("self_attn.q_proj"), EMBED_DIM, EMBED_DIM)?;
        add(name("self_attn.k_proj"), kv_dim, EMBED_DIM)?;
        add(name("self_attn.v_proj"), kv_dim, EMBED_DIM)?;
        add(name("self_attn.o_proj"), EMBED_DIM, EMBED_DIM)?;
        add(name("mlp.gate_proj"), INNER, EMBED_DIM)?;
        add(name("mlp.up_proj"), INNER, EMBED_DIM)?;
        add(name("mlp.down_proj"), EMBED_DIM, INNER)?;
    }
    let mut norms = vec!["model.norm".to_string()];
    for layer in 0..LAYERS {
        norms.push(format!("model.layers.{layer}.input_layernorm"));
        norms.push(format!("model.layers.{layer}.post_attention_layernorm"));
    }
    for norm in norms {
        tensors.insert(format!("{norm}.weight"), Tensor::ones(EMBED_DIM, dtype, &Device::Cpu)?);
    }
    Ok(tensors)
}

/// Compares the logits of two models on a prompt and on one more token.
fn compare(model: &mut Model, before: &mut Model, ids: &[u32], dtype: DType) -> Result<()> {
    let (last, prompt) = ids.split_last().expect("ids");
    let largest = |tensor: &Tensor| tensor.abs()?.max_all()?.to_scalar::<f32>();
    let most = if dtype == DType::F32 { 1e-4 } else { 0.1 };
    for (tokens, position) in [(prompt, 0), (&[*last][..], prompt.len())] {
        let expected = before.logits(tokens, position)?.to_dtype(DType::F32)?.flatten_all()?;
        let found = model.logits(tokens, position)?.to_dtype(DType::F32)?.flatten_all()?;
        let gap = largest(&(found - &expected)?)? / largest(&expected)?;
        if gap.is_nan() || gap > most {
            bail!("[swapped] the logits differ by {gap:.1e} of the largest, expected at most {most:.0e}")
        }
    }
    Ok(())
}

enum Model {
    Before(mistral::Model),
    After(Swapped),
}

impl Model {
    fn load(kind: Kind, vb: VarBuilder) -> Result<Self> {
        if kind != Kind::Before {
            return Ok(Self::After(Swapped::load(kind == Kind::Packed, vb)?));
        }
        let config = mistral::Config {
            vocab_size: VOCAB,
            hidden_size: EMBED_DIM,
            intermediate_size: INNER,
            num_hidden_layers: LAYERS,
            num_attention_heads: NUM_HEADS,
            head_dim: None,
            num_key_value_heads: NUM_KV_HEADS,
            hidden_act: Activation::Silu,
            max_position_embeddings: 4096,
            rms_norm_eps: EPSILON,
            rope_theta: ROPE_THETA,
            sliding_window: None,
            use_flash_attn: false,
        };
        Ok(Self::Before(mistral::Model::new(&config, vb)?))
    }

    /// Returns the logits after the last of the ids, the first of which is at a position.
    fn logits(&mut self, ids: &[u32], position: usize) -> Result<Tensor> {
        let ids = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
        match self {
            Self::Before(model) => model.forward(&ids, position),
            Self::After(model) => model.forward(&ids),
        }
    }

    fn clear(&mut self) {
        match self {
            Self::Before(model) => model.clear_kv_cache(),
            Self::After(model) => {
                for layer in &mut model.layers {
                    layer.cache.reset();
                }
            }
        }
    }
}

/// The model of candle-transformers with another attention.
struct Swapped {
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Box<dyn Module>,
}

struct Layer {
    input_norm: RmsNorm,
    attention: MultiHeadAttention,
    cache: AttentionCache,
    mlp_norm: RmsNorm,
    mlp: Box<dyn Module>,
}

/// The MLP as in candle-transformers.
struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// The MLP with packed products.
struct PackedMlp {
    gated: PackedGatedLinear,
    down: PackedLinear,
}

impl Swapped {
    fn load(is_packed: bool, vb: VarBuilder) -> Result<Self> {
        let config = MultiHeadAttentionConfig::new(EMBED_DIM, NUM_HEADS)
            .with_num_kv_heads(NUM_KV_HEADS)
            .with_rope(RopeConfig::new(ROPE_THETA))
            .with_causal(true);
        let model = vb.pp("model");
        let mut layers = Vec::new();
        for index in 0..LAYERS {
            let layer = model.pp("layers").pp(index);
            layers.push(Layer {
                input_norm: rms_norm(EMBED_DIM, EPSILON, layer.pp("input_layernorm"))?,
                attention: MultiHeadAttention::new(&config, layer.pp("self_attn"))?,
                cache: AttentionCache::default(),
                mlp_norm: rms_norm(EMBED_DIM, EPSILON, layer.pp("post_attention_layernorm"))?,
                mlp: load_mlp(is_packed, layer.pp("mlp"))?,
            });
        }
        let head: Box<dyn Module> = if is_packed {
            Box::new(packed_linear_no_bias(EMBED_DIM, VOCAB, vb.pp("lm_head"))?)
        } else {
            Box::new(linear_no_bias(EMBED_DIM, VOCAB, vb.pp("lm_head"))?)
        };
        Ok(Self {
            embedding: embedding(VOCAB, EMBED_DIM, model.pp("embed_tokens"))?,
            layers,
            norm: rms_norm(EMBED_DIM, EPSILON, model.pp("norm"))?,
            head,
        })
    }

    fn forward(&mut self, ids: &Tensor) -> Result<Tensor> {
        let mut xs = self.embedding.forward(ids)?;
        for layer in &mut self.layers {
            let normed = layer.input_norm.forward(&xs)?;
            xs = (&xs + layer.attention.forward_with(AttentionInput::new(&normed).with_cache(&mut layer.cache))?)?;
            xs = (&xs + layer.mlp.forward(&layer.mlp_norm.forward(&xs)?)?)?;
        }
        let last = xs.narrow(1, xs.dim(1)? - 1, 1)?;
        self.head.forward(&self.norm.forward(&last)?)
    }
}

fn load_mlp(is_packed: bool, vb: VarBuilder) -> Result<Box<dyn Module>> {
    let [gate, up, down] = ["gate_proj", "up_proj", "down_proj"].map(|name| vb.pp(name));
    if is_packed {
        let packed_gate = packed_linear_no_bias(EMBED_DIM, INNER, gate)?;
        let packed_up = packed_linear_no_bias(EMBED_DIM, INNER, up)?;
        return Ok(Box::new(PackedMlp {
            gated: PackedGatedLinear::new(packed_gate, packed_up, Activation::Silu)?,
            down: packed_linear_no_bias(INNER, EMBED_DIM, down)?,
        }));
    }
    Ok(Box::new(Mlp {
        gate: linear_no_bias(EMBED_DIM, INNER, gate)?,
        up: linear_no_bias(EMBED_DIM, INNER, up)?,
        down: linear_no_bias(INNER, EMBED_DIM, down)?,
    }))
}

impl Module for Mlp {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.down.forward(&(self.gate.forward(xs)?.silu()? * self.up.forward(xs)?)?)
    }
}

impl Module for PackedMlp {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.down.forward(&self.gated.forward(xs)?)
    }
}
