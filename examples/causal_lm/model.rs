//! A decoder of the Llama family, GPT-2 or GPT BigCode: embedding, blocks of attention and MLP, norm, head.
//!
//! Attention is `hf::load_attention`: projections, rotary positions, norms of queries and keys, windows, grouped heads and
//! the cache are the layer's. What is left of a model stands here, and [`Family`] says where models differ.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, MultiHeadAttention, PackedLinear, RotaryEmbedding, hf,
};
use candle_core::{DType, Device, IndexOp, Module, Result, Tensor, bail};
use candle_nn::{Activation, Embedding, LayerNorm, RmsNorm, VarBuilder};
use serde_json::Value;

/// Where architectures differ outside of attention.
struct Family {
    /// The names of a block's norms: before and after attention, before and after the MLP. "After" is before the residual.
    norms: [Option<&'static str>; 4],
    /// The last norm.
    norm: &'static str,
    /// What is added to a norm's weight.
    norm_offset: f64,
    /// GPT-2's names, learned positions, layer norms and biases, and an MLP without a gate.
    is_gpt: bool,
    /// Weights of the MLP are stored as (in, out).
    is_transposed: bool,
    /// Embeddings times the root of their width.
    scales_embedding: bool,
    ties_embedding: bool,
    activation: &'static str,
    eps: f64,
}

impl Family {
    fn of(json: &Value) -> Result<Self> {
        let llama = Self {
            norms: [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
            norm: "norm",
            norm_offset: 0.0,
            is_gpt: false,
            is_transposed: false,
            scales_embedding: false,
            ties_embedding: false,
            activation: "silu",
            eps: 1e-6,
        };
        let model_type = json["model_type"].as_str().unwrap_or_default();
        Ok(match model_type {
            "llama" | "mistral" | "qwen2" | "qwen3" | "granite" => llama,
            "phi3" => Self { eps: 1e-5, ..llama },
            "smollm3" => Self { ties_embedding: true, ..llama },
            "gemma2" | "gemma3_text" | "gemma3" => Self {
                norms: [
                    Some("input_layernorm"),
                    Some("post_attention_layernorm"),
                    Some("pre_feedforward_layernorm"),
                    Some("post_feedforward_layernorm"),
                ],
                norm_offset: 1.0,
                scales_embedding: true,
                ties_embedding: true,
                activation: "gelu_pytorch_tanh",
                ..llama
            },
            "olmo2" => Self {
                norms: [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")],
                eps: 1e-5,
                ..llama
            },
            "gpt2" | "gpt_bigcode" => Self {
                norms: [Some("ln_1"), None, Some("ln_2"), None],
                norm: "ln_f",
                is_gpt: true,
                is_transposed: model_type == "gpt2",
                ties_embedding: true,
                activation: if model_type == "gpt2" { "gelu_new" } else { "gelu_pytorch_tanh" },
                eps: 1e-5,
                ..llama
            },
            other => bail!(
                "[causal_lm] model_type is {other:?}, expected one of llama, mistral, qwen2, qwen3, gemma2, gemma3_text, phi3, olmo2, granite, smollm3, gpt2, gpt_bigcode"
            ),
        })
    }

    fn norm(&self, width: usize, eps: f64, vb: VarBuilder) -> Result<Norm> {
        let weight = vb.get(width, "weight")?;
        if self.is_gpt {
            return Ok(Norm::Layer(LayerNorm::new(weight, vb.get(width, "bias")?, eps)));
        }
        // In f32: half precision would round a weight near zero away beside 1.
        let weight = if self.norm_offset == 0.0 {
            weight
        } else {
            (vb.get_with_hints_dtype(width, "weight", Default::default(), DType::F32)? + self.norm_offset)?
        };
        Ok(Norm::Rms(RmsNorm::new(weight, eps)))
    }
}

enum Norm {
    Rms(RmsNorm),
    Layer(LayerNorm),
}

impl Module for Norm {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Rms(norm) if norm.weight().dtype() != xs.dtype() => {
                norm.forward(&xs.to_dtype(norm.weight().dtype())?)?.to_dtype(xs.dtype())
            }
            Self::Rms(norm) => norm.forward(xs),
            Self::Layer(norm) => norm.forward(xs),
        }
    }
}

/// `down(activation(gate(x)) · up(x))`, or without a gate `down(activation(up(x)))`.
struct Mlp {
    /// The rows of the gate, then those of `up`, as one weight.
    up: PackedLinear,
    is_gated: bool,
    down: PackedLinear,
    activation: Activation,
}

impl Mlp {
    fn load(family: &Family, json: &Value, width: usize, vb: VarBuilder) -> Result<Self> {
        let name =
            ["hidden_activation", "hidden_act", "activation_function"].iter().find_map(|key| json[*key].as_str());
        let Ok(activation) = serde_json::from_value(name.unwrap_or(family.activation).into()) else {
            bail!("[causal_lm] the activation {name:?} is not one of Candle's")
        };
        let vb = vb.pp("mlp");
        if family.is_gpt {
            let inner = size(json, "n_inner").unwrap_or(4 * width);
            let linear = |name: &str, (i, o): (usize, usize)| {
                let vb = vb.pp(name);
                let weight = match family.is_transposed {
                    true => vb.get((i, o), "weight")?.t()?.contiguous()?,
                    false => vb.get((o, i), "weight")?,
                };
                PackedLinear::new(&weight, Some(&vb.get(o, "bias")?))
            };
            let (up, down) = (linear("c_fc", (width, inner))?, linear("c_proj", (inner, width))?);
            return Ok(Self { up, is_gated: false, down, activation });
        }
        let inner = required(json, "intermediate_size")?;
        let linear = |name: &str, i: usize, o: usize| {
            let weight = vb.pp(name).get((o, i), "weight")?;
            let has_bias = json["mlp_bias"].as_bool().unwrap_or(false);
            Ok::<_, candle_core::Error>((weight, if has_bias { Some(vb.pp(name).get(o, "bias")?) } else { None }))
        };
        let up = if vb.contains_tensor("gate_up_proj.weight") {
            linear("gate_up_proj", width, 2 * inner)?
        } else {
            let ((gate, gate_bias), (up, up_bias)) =
                (linear("gate_proj", width, inner)?, linear("up_proj", width, inner)?);
            let bias = gate_bias.zip(up_bias).map(|(gate, up)| Tensor::cat(&[gate, up], 0)).transpose()?;
            (Tensor::cat(&[gate, up], 0)?, bias)
        };
        let down = linear("down_proj", inner, width)?;
        Ok(Self {
            up: PackedLinear::new(&up.0, up.1.as_ref())?,
            is_gated: true,
            down: PackedLinear::new(&down.0, down.1.as_ref())?,
            activation,
        })
    }
}

impl Module for Mlp {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        if !self.is_gated {
            return self.down.forward(&self.activation.forward(&self.up.forward(xs)?)?);
        }
        let inner = self.down.in_dim();
        let gate = self.activation.forward(&self.up.forward_columns(xs, 0..inner)?)?;
        self.down.forward(&(gate * self.up.forward_columns(xs, inner..2 * inner)?)?)
    }
}

struct Block {
    before_attention: Option<Norm>,
    attention: MultiHeadAttention,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    mlp: Mlp,
    after_mlp: Option<Norm>,
    residual_scale: f64,
}

impl Block {
    fn forward(&self, xs: &Tensor, lens: Option<&[usize]>, cache: &mut AttentionCache) -> Result<Tensor> {
        let normed = optional(&self.before_attention, xs)?;
        let mut input = AttentionInput::new(&normed).with_cache(cache);
        if let Some(lens) = lens {
            input = input.with_valid_lens(lens);
        }
        let attended = optional(&self.after_attention, &self.attention.forward_with(input)?)?;
        let xs = self.add(xs, attended)?;
        let mixed = optional(&self.after_mlp, &self.mlp.forward(&optional(&self.before_mlp, &xs)?)?)?;
        self.add(&xs, mixed)
    }

    fn add(&self, xs: &Tensor, branch: Tensor) -> Result<Tensor> {
        if self.residual_scale == 1.0 { xs + branch } else { xs + (branch * self.residual_scale)? }
    }
}

/// A causal language model.
pub struct CausalLm {
    embedding: Embedding,
    /// Learned positions, where there are any.
    positions: Option<Embedding>,
    embedding_scale: f64,
    blocks: Vec<Block>,
    norm: Norm,
    head: PackedLinear,
    logit_scale: f64,
    logit_softcap: Option<f64>,
}

impl CausalLm {
    /// From a `config.json` and a builder at the checkpoint's root; `loaded` is told of every block.
    pub fn load(json: &Value, vb: VarBuilder, mut loaded: impl FnMut(usize, usize)) -> Result<Self> {
        // A model that sees as well keeps the text's config apart.
        let json = json.get("text_config").filter(|text| text.is_object()).unwrap_or(json);
        let family = Family::of(json)?;
        let names = if family.is_gpt { ["n_embd", "n_layer"] } else { ["hidden_size", "num_hidden_layers"] };
        let (width, layers) = (required(json, names[0])?, required(json, names[1])?);
        let vocab = required(json, "vocab_size")?;
        let number = |key: &str| json[key].as_f64();
        let eps = number("rms_norm_eps").or(number("layer_norm_epsilon")).unwrap_or(family.eps);
        let (base, embed, block) =
            if family.is_gpt { ("transformer", "wte", "h") } else { ("model", "embed_tokens", "layers") };
        let inner = [vb.pp(base), vb.clone()].into_iter().find(|vb| vb.pp(embed).contains_tensor("weight"));
        let Some(inner) = inner else { bail!("[causal_lm] the checkpoint has no {base}.{embed}.weight") };

        let weight = inner.pp(embed).get((vocab, width), "weight")?;
        let ties = json["tie_word_embeddings"].as_bool().unwrap_or(family.ties_embedding);
        let head = if ties { weight.clone() } else { vb.pp("lm_head").get((vocab, width), "weight")? };
        let positions = match family.is_gpt {
            true => {
                Some(Embedding::new(inner.pp("wpe").get((required(json, "n_positions")?, width), "weight")?, width))
            }
            false => None,
        };
        let mut tables: Vec<RotaryEmbedding> = Vec::new();
        let mut blocks = Vec::with_capacity(layers);
        for layer in 0..layers {
            let at = inner.pp(block).pp(layer);
            let norm = |name: Option<&str>| name.map(|name| family.norm(width, eps, at.pp(name))).transpose();
            let [before_attention, after_attention, before_mlp, after_mlp] = family.norms;
            blocks.push(Block {
                before_attention: norm(before_attention)?,
                attention: shared(hf::load_attention(json, layer, vb.clone())?, &mut tables)?,
                after_attention: norm(after_attention)?,
                before_mlp: norm(before_mlp)?,
                mlp: Mlp::load(&family, json, width, at.clone())?,
                after_mlp: norm(after_mlp)?,
                residual_scale: number("residual_multiplier").unwrap_or(1.0),
            });
            loaded(layer + 1, layers);
        }
        let embedding_scale = if family.scales_embedding {
            // In the dtype of the embeddings, as Gemma rounds it.
            let scale = Tensor::new((width as f64).sqrt(), &Device::Cpu)?.to_dtype(weight.dtype())?;
            scale.to_dtype(DType::F64)?.to_scalar()?
        } else {
            number("embedding_multiplier").unwrap_or(1.0)
        };
        Ok(Self {
            embedding: Embedding::new(weight, width),
            positions,
            embedding_scale,
            blocks,
            norm: family.norm(width, eps, inner.pp(family.norm))?,
            head: PackedLinear::new(&head, None)?,
            logit_scale: 1.0 / number("logits_scaling").unwrap_or(1.0),
            logit_softcap: number("final_logit_softcapping"),
        })
    }

    /// A cache for each block: `config` is told the block's own.
    pub fn caches(&self, config: impl Fn(AttentionCacheConfig) -> AttentionCacheConfig) -> Result<Vec<AttentionCache>> {
        let of_block =
            |block: &Block| AttentionCache::new(&config(AttentionCacheConfig::for_layer(block.attention.config())));
        self.blocks.iter().map(of_block).collect()
    }

    /// Token ids (B, T), of which each sequence has `lens` (all T unless given), to hidden states (B, T, E). Positions go on
    /// from what the caches hold.
    pub fn forward(&self, ids: &Tensor, lens: Option<&[usize]>, caches: &mut [AttentionCache]) -> Result<Tensor> {
        let (b, t) = ids.dims2()?;
        let mut xs = self.embedding.forward(ids)?;
        if self.embedding_scale != 1.0 {
            xs = (xs * self.embedding_scale)?;
        }
        if let Some(positions) = &self.positions {
            let before = caches.first().map(AttentionCache::lens).filter(|lens| !lens.is_empty()).unwrap_or(vec![0; b]);
            let last = positions.embeddings().dim(0)?.saturating_sub(1);
            let at = before.iter().flat_map(|&before| (before..before + t).map(|position| position.min(last) as u32));
            let longest = before.iter().enumerate().map(|(i, before)| before + lens.map_or(t, |lens| lens[i])).max();
            if longest > Some(last + 1) {
                bail!("[causal_lm] {} positions are more than the model's {}", longest.unwrap_or(0), last + 1)
            }
            let at = Tensor::from_vec(at.collect::<Vec<_>>(), (b, t), ids.device())?;
            xs = (xs + positions.forward(&at)?)?;
        }
        for (block, cache) in self.blocks.iter().zip(caches) {
            xs = block.forward(&xs, lens, cache)?;
        }
        self.norm.forward(&xs)
    }

    /// Hidden states (.., E) to logits (.., V) in f32.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let mut logits = self.head.forward(hidden)?.to_dtype(DType::F32)?;
        if self.logit_scale != 1.0 {
            logits = (logits * self.logit_scale)?;
        }
        match self.logit_softcap {
            Some(softcap) => (logits / softcap)?.tanh()? * softcap,
            None => Ok(logits),
        }
    }

    /// The logits (B, V) that follow the last token of each sequence.
    pub fn next_logits(&self, ids: &Tensor, lens: &[usize], caches: &mut [AttentionCache]) -> Result<Tensor> {
        let hidden = self.forward(ids, Some(lens), caches)?;
        let last = lens.iter().enumerate().map(|(sequence, &len)| hidden.i((sequence, len.saturating_sub(1))));
        self.logits(&Tensor::stack(&last.collect::<Result<Vec<_>>>()?, 0)?)
    }
}

fn optional(norm: &Option<Norm>, xs: &Tensor) -> Result<Tensor> {
    norm.as_ref().map_or_else(|| Ok(xs.clone()), |norm| norm.forward(xs))
}

/// A layer with the rotary tables of an earlier one that has the same.
fn shared(layer: MultiHeadAttention, tables: &mut Vec<RotaryEmbedding>) -> Result<MultiHeadAttention> {
    let (Some(rope), head_dim) = (layer.config().rope().cloned(), layer.config().head_dim()) else { return Ok(layer) };
    let known = tables.iter().find(|table| *table.config() == rope && table.head_dim() == head_dim).cloned();
    let table = match known {
        Some(table) => table,
        None => {
            tables.push(RotaryEmbedding::new(&rope, head_dim)?);
            tables[tables.len() - 1].clone()
        }
    };
    layer.with_rotary(table)
}

fn size(json: &Value, key: &str) -> Option<usize> {
    json[key].as_u64().and_then(|size| usize::try_from(size).ok())
}

fn required(json: &Value, key: &str) -> Result<usize> {
    let Some(size) = size(json, key) else { bail!("[causal_lm] config.json has no size {key}") };
    Ok(size)
}
