//! A decoder: embedding, blocks of attention and MLP, norm, head.
//!
//! Attention is `hf::load_attention`: projections, rotary positions, norms of queries and keys, windows, grouped heads and
//! the cache are the layer's. What is left of a model is here, and [`Family`] has the differences between families. Biases
//! are those that the checkpoint has.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, MultiHeadAttention, PackedLinear, RopeScaling,
    RotaryEmbedding, hf,
};
use candle_core::{D, DType, Device, IndexOp, Module, Result, Tensor, bail};
use candle_nn::{Activation, Embedding, LayerNorm, RmsNorm, VarBuilder, ops};
use serde_json::Value;

/// What differs between model families outside of attention.
#[derive(Clone, Copy)]
struct Family {
    /// The base model, and in it the embedding, the list of blocks and the last norm.
    names: [&'static str; 4],
    head: &'static str,
    /// The norms of a block: before and after attention, before and after the MLP; "after" is before the residual.
    norms: [Option<&'static str>; 4],
    norm: NormKind,
    eps: f64,
    /// `xs + attention(xs) + mlp(xs)`: attention and the MLP have the same input, and the same norm if there is but one.
    parallel: bool,
    mlp: MlpNames,
    activation: &'static str,
    /// Learned positions, and the row of position 0.
    positions: Option<(&'static str, usize)>,
    embedding_norm: Option<&'static str>,
    /// Embeddings are multiplied by the root of their width.
    scales_embedding: bool,
    ties_embedding: bool,
    /// The default of `logit_scale`.
    logit_scale: f64,
}

#[derive(Clone, Copy, PartialEq)]
enum NormKind {
    Rms,
    /// With 1 added to the weight.
    RmsPlusOne,
    Layer,
}

#[derive(Clone, Copy)]
enum MlpNames {
    /// `down(activation(gate(x)) * up(x))`: the module, whose parameters have Llama's names.
    Gated,
    /// `down(activation(up(x)))`.
    Plain { up: &'static str, down: &'static str },
    /// The same, stored as (in, out).
    Conv1d { up: &'static str, down: &'static str },
    /// A mixture of experts, with Mixtral's names.
    Experts,
}

const LLAMA: Family = Family {
    names: ["model", "embed_tokens", "layers", "norm"],
    head: "lm_head",
    norms: [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
    norm: NormKind::Rms,
    eps: 1e-6,
    parallel: false,
    mlp: MlpNames::Gated,
    activation: "silu",
    positions: None,
    embedding_norm: None,
    scales_embedding: false,
    ties_embedding: false,
    logit_scale: 1.0,
};
const GEMMA: Family = Family {
    norm: NormKind::RmsPlusOne,
    scales_embedding: true,
    ties_embedding: true,
    activation: "gelu_pytorch_tanh",
    ..LLAMA
};
const GPT2: Family = Family {
    names: ["transformer", "wte", "h", "ln_f"],
    norms: [Some("ln_1"), None, Some("ln_2"), None],
    norm: NormKind::Layer,
    eps: 1e-5,
    mlp: MlpNames::Conv1d { up: "mlp.c_fc", down: "mlp.c_proj" },
    activation: "gelu_new",
    positions: Some(("wpe", 0)),
    ties_embedding: true,
    ..LLAMA
};
const GPT_NEOX: Family = Family {
    names: ["gpt_neox", "embed_in", "layers", "final_layer_norm"],
    head: "embed_out",
    norm: NormKind::Layer,
    eps: 1e-5,
    mlp: MlpNames::Plain { up: "mlp.dense_h_to_4h", down: "mlp.dense_4h_to_h" },
    activation: "gelu",
    ..LLAMA
};
/// BLOOM and Falcon.
const BLOOM: Family = Family {
    names: ["transformer", "word_embeddings", "h", "ln_f"],
    activation: "gelu_pytorch_tanh",
    embedding_norm: Some("word_embeddings_layernorm"),
    ties_embedding: true,
    ..GPT_NEOX
};

impl Family {
    fn of(json: &Value) -> Result<Self> {
        let flag = |key: &str, default: bool| json[key].as_bool().unwrap_or(default);
        let one_norm = |name| [Some(name), None, None, None];
        Ok(match json["model_type"].as_str().unwrap_or_default() {
            "llama" | "mistral" | "qwen2" | "qwen3" | "granite" => LLAMA,
            "mixtral" => Self { mlp: MlpNames::Experts, eps: 1e-5, ..LLAMA },
            "phi3" => Self { eps: 1e-5, ..LLAMA },
            "smollm3" => Self { ties_embedding: true, ..LLAMA },
            "glm" => Self { eps: 1.5625e-7, ..LLAMA },
            "glm4" => Self {
                norms: [
                    Some("input_layernorm"),
                    Some("post_self_attn_layernorm"),
                    Some("post_attention_layernorm"),
                    Some("post_mlp_layernorm"),
                ],
                eps: 1.5625e-7,
                ..LLAMA
            },
            "olmo2" => Self {
                norms: [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")],
                eps: 1e-5,
                ..LLAMA
            },
            "cohere" | "cohere2" => Self {
                norms: one_norm("input_layernorm"),
                norm: NormKind::Layer,
                eps: 1e-5,
                parallel: true,
                ties_embedding: true,
                logit_scale: 0.0625,
                ..LLAMA
            },
            "stablelm" => {
                let parallel = flag("use_parallel_residual", false);
                let norms = if parallel { one_norm("input_layernorm") } else { LLAMA.norms };
                Self { norms, norm: NormKind::Layer, eps: 1e-5, parallel, ..LLAMA }
            }
            "starcoder2" => Self {
                norm: NormKind::Layer,
                eps: 1e-5,
                mlp: MlpNames::Plain { up: "mlp.c_fc", down: "mlp.c_proj" },
                activation: "gelu_pytorch_tanh",
                ties_embedding: true,
                ..LLAMA
            },
            "phi" => Self {
                names: ["model", "embed_tokens", "layers", "final_layernorm"],
                norms: one_norm("input_layernorm"),
                norm: NormKind::Layer,
                eps: 1e-5,
                parallel: true,
                mlp: MlpNames::Plain { up: "mlp.fc1", down: "mlp.fc2" },
                activation: "gelu_new",
                ..LLAMA
            },
            "gemma" => GEMMA,
            "gemma2" | "gemma3_text" | "gemma3" => Self {
                norms: [
                    Some("input_layernorm"),
                    Some("post_attention_layernorm"),
                    Some("pre_feedforward_layernorm"),
                    Some("post_feedforward_layernorm"),
                ],
                ..GEMMA
            },
            "gpt2" => GPT2,
            "gpt_bigcode" => Self {
                mlp: MlpNames::Plain { up: "mlp.c_fc", down: "mlp.c_proj" },
                activation: "gelu_pytorch_tanh",
                ..GPT2
            },
            "gptj" => Self {
                norms: one_norm("ln_1"),
                parallel: true,
                mlp: MlpNames::Plain { up: "mlp.fc_in", down: "mlp.fc_out" },
                positions: None,
                ties_embedding: false,
                ..GPT2
            },
            "gpt_neox" => Self { parallel: flag("use_parallel_residual", true), ..GPT_NEOX },
            "bloom" if flag("apply_residual_connection_post_layernorm", false) => {
                bail!("[causal_lm] apply_residual_connection_post_layernorm is true, which is not supported")
            }
            "bloom" => BLOOM,
            "falcon" => {
                let (grouped, parallel) = (flag("new_decoder_architecture", false), flag("parallel_attn", true));
                let norms = match json["num_ln_in_parallel_attn"].as_u64() {
                    None | Some(2) if grouped => [Some("ln_attn"), None, Some("ln_mlp"), None],
                    _ if grouped || parallel => one_norm("input_layernorm"),
                    _ => BLOOM.norms,
                };
                let parallel = grouped || parallel;
                Self { norms, parallel, embedding_norm: None, activation: "gelu", head: "lm_head", ..BLOOM }
            }
            "mpt" => Self {
                names: ["transformer", "wte", "blocks", "norm_f"],
                norms: [Some("norm_1"), None, Some("norm_2"), None],
                mlp: MlpNames::Plain { up: "ffn.up_proj", down: "ffn.down_proj" },
                activation: "gelu",
                positions: None,
                ..GPT2
            },
            "opt" if !flag("do_layer_norm_before", true) || json["word_embed_proj_dim"] != json["hidden_size"] => {
                bail!("[causal_lm] OPT with norms after attention or projected embeddings is not supported")
            }
            "opt" => Self {
                names: ["model.decoder", "embed_tokens", "layers", "final_layer_norm"],
                norms: [Some("self_attn_layer_norm"), None, Some("final_layer_norm"), None],
                mlp: MlpNames::Plain { up: "fc1", down: "fc2" },
                activation: "relu",
                positions: Some(("embed_positions", 2)),
                ..GPT2
            },
            other => bail!(
                "[causal_lm] model_type is {other:?}, expected one of bloom, cohere, cohere2, falcon, gemma, gemma2, gemma3, gemma3_text, glm, glm4, gpt2, gpt_bigcode, gpt_neox, gptj, granite, llama, mistral, mixtral, mpt, olmo2, opt, phi, phi3, qwen2, qwen3, smollm3, stablelm, starcoder2"
            ),
        })
    }

    fn load_norm(&self, width: usize, eps: f64, vb: VarBuilder) -> Result<Norm> {
        Ok(match self.norm {
            NormKind::Rms => Norm::Rms(RmsNorm::new(vb.get(width, "weight")?, eps)),
            NormKind::RmsPlusOne => {
                // In f32: half precision would lose a weight near zero in the sum.
                let weight = vb.get_with_hints_dtype(width, "weight", Default::default(), DType::F32)?;
                Norm::Rms(RmsNorm::new((weight + 1.0)?, eps))
            }
            NormKind::Layer => Norm::Layer(match vb.contains_tensor("bias") {
                true => LayerNorm::new(vb.get(width, "weight")?, vb.get(width, "bias")?, eps),
                false => LayerNorm::new_no_bias(vb.get(width, "weight")?, eps),
            }),
        })
    }

    fn load_mlp(&self, json: &Value, vb: VarBuilder) -> Result<FeedForward> {
        let name = ["hidden_activation", "hidden_act", "activation_function", "activation"];
        let name = name.iter().find_map(|key| json[*key].as_str()).unwrap_or(self.activation);
        let Ok(activation) = serde_json::from_value::<Activation>(name.into()) else {
            bail!("[causal_lm] the activation {name:?} is not one of Candle's")
        };
        let plain = |up, down, transposed| {
            let (up, down) = (weights(&vb.pp(up), transposed)?, weights(&vb.pp(down), transposed)?);
            Mlp::new(up, down, false, activation)
        };
        let gated = |vb: VarBuilder, [gate, up, down]: [&str; 3]| {
            let both = match vb.contains_tensor("gate_up_proj.weight") {
                true => weights(&vb.pp("gate_up_proj"), false)?,
                false => {
                    let (gate, up) = (weights(&vb.pp(gate), false)?, weights(&vb.pp(up), false)?);
                    let bias = gate.1.zip(up.1).map(|(gate, up)| Tensor::cat(&[gate, up], 0)).transpose()?;
                    (Tensor::cat(&[gate.0, up.0], 0)?, bias)
                }
            };
            Mlp::new(both, weights(&vb.pp(down), false)?, true, activation)
        };
        Ok(match self.mlp {
            MlpNames::Plain { up, down } => FeedForward::Dense(plain(up, down, false)?),
            MlpNames::Conv1d { up, down } => FeedForward::Dense(plain(up, down, true)?),
            MlpNames::Gated => FeedForward::Dense(gated(vb.pp("mlp"), ["gate_proj", "up_proj", "down_proj"])?),
            MlpNames::Experts => {
                let vb = vb.pp("block_sparse_moe");
                let experts = (0..required(json, "num_local_experts")?)
                    .map(|expert| gated(vb.pp("experts").pp(expert), ["w1", "w3", "w2"]));
                FeedForward::Experts {
                    router: linear(&vb.pp("gate"))?,
                    experts: experts.collect::<Result<_>>()?,
                    chosen: required(json, "num_experts_per_tok")?,
                }
            }
        })
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

/// A weight (out, in), and the bias if the checkpoint has one.
fn weights(vb: &VarBuilder, transposed: bool) -> Result<(Tensor, Option<Tensor>)> {
    let weight = vb.get_unchecked("weight")?;
    let weight = if transposed { weight.t()?.contiguous()? } else { weight };
    let bias = if vb.contains_tensor("bias") { Some(vb.get(weight.dim(0)?, "bias")?) } else { None };
    Ok((weight, bias))
}

fn linear(vb: &VarBuilder) -> Result<PackedLinear> {
    let (weight, bias) = weights(vb, false)?;
    PackedLinear::new(&weight, bias.as_ref())
}

struct Mlp {
    /// With a gate: its rows and then those of `up`, as one weight.
    up: PackedLinear,
    gated: bool,
    down: PackedLinear,
    activation: Activation,
}

impl Mlp {
    fn new(
        up: (Tensor, Option<Tensor>),
        down: (Tensor, Option<Tensor>),
        gated: bool,
        activation: Activation,
    ) -> Result<Self> {
        let packed = |(weight, bias): (Tensor, Option<Tensor>)| PackedLinear::new(&weight, bias.as_ref());
        Ok(Self { up: packed(up)?, gated, down: packed(down)?, activation })
    }
}

impl Module for Mlp {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        if !self.gated {
            return self.down.forward(&self.activation.forward(&self.up.forward(xs)?)?);
        }
        let inner = self.down.in_dim();
        let gate = self.activation.forward(&self.up.forward_columns(xs, 0..inner)?)?;
        self.down.forward(&(gate * self.up.forward_columns(xs, inner..2 * inner)?)?)
    }
}

enum FeedForward {
    Dense(Mlp),
    /// Each token goes through the `chosen` experts that the router scores highest, weighted by the softmax of their scores.
    Experts {
        router: PackedLinear,
        experts: Vec<Mlp>,
        chosen: usize,
    },
}

impl Module for FeedForward {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (router, experts, chosen) = match self {
            Self::Dense(mlp) => return mlp.forward(xs),
            Self::Experts { router, experts, chosen } => (router, experts, *chosen),
        };
        let tokens = xs.flatten_to(D::Minus2)?;
        let scores = ops::softmax_last_dim(&router.forward(&tokens)?.to_dtype(DType::F32)?)?.to_vec2::<f32>()?;
        // The tokens of each expert, and their weights.
        let mut routes = vec![(Vec::new(), Vec::new()); experts.len()];
        for (token, scores) in scores.iter().enumerate() {
            let mut order: Vec<_> = (0..scores.len()).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            order.truncate(chosen);
            let sum: f32 = order.iter().map(|&expert| scores[expert]).sum();
            for expert in order {
                routes[expert].0.push(token as u32);
                routes[expert].1.push(scores[expert] / sum);
            }
        }
        let mut ys = tokens.zeros_like()?;
        for (expert, (rows, weights)) in experts.iter().zip(routes).filter(|(_, (rows, _))| !rows.is_empty()) {
            let weights = Tensor::from_vec(weights, (rows.len(), 1), xs.device())?.to_dtype(xs.dtype())?;
            let rows = Tensor::new(rows, xs.device())?;
            let own = expert.forward(&tokens.index_select(&rows, 0)?)?.broadcast_mul(&weights)?;
            ys = ys.index_add(&rows, &own, 0)?;
        }
        ys.reshape(xs.shape())
    }
}

struct Block {
    before_attention: Option<Norm>,
    attention: MultiHeadAttention,
    after_attention: Option<Norm>,
    before_mlp: Option<Norm>,
    mlp: FeedForward,
    after_mlp: Option<Norm>,
    parallel: bool,
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
        let sum = self.add(xs, attended)?;
        let mlp_input = match (&self.before_mlp, self.parallel) {
            (None, true) => normed,
            (norm, true) => optional(norm, xs)?,
            (norm, false) => optional(norm, &sum)?,
        };
        self.add(&sum, optional(&self.after_mlp, &self.mlp.forward(&mlp_input)?)?)
    }

    fn add(&self, xs: &Tensor, branch: Tensor) -> Result<Tensor> {
        if self.residual_scale == 1.0 { xs + branch } else { xs + (branch * self.residual_scale)? }
    }
}

/// A causal language model.
pub struct CausalLm {
    embedding: Embedding,
    embedding_norm: Option<Norm>,
    /// Learned positions, and the row of position 0.
    positions: Option<(Embedding, usize)>,
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
        let Some(layers) = ["num_hidden_layers", "n_layer", "n_layers"].iter().find_map(|key| size(json, key)) else {
            bail!("[causal_lm] config.json has no number of layers")
        };
        let number = |key: &str| json[key].as_f64();
        let eps = ["rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"];
        let eps = eps.iter().find_map(|key| number(key)).unwrap_or(family.eps);
        let [base, embed, block, norm] = family.names;
        // A base model without a head has no prefix; OPT's keeps its second part.
        let bare = base.split_once('.').map_or(vb.clone(), |(_, rest)| vb.pp(rest));
        let inner = [vb.pp(base), bare].into_iter().find(|vb| vb.pp(embed).contains_tensor("weight"));
        let Some(inner) = inner else { bail!("[causal_lm] the checkpoint has no {base}.{embed}.weight") };

        let weight = inner.pp(embed).get_unchecked("weight")?;
        let (_, width) = weight.dims2()?;
        let ties = json["tie_word_embeddings"].as_bool().unwrap_or(family.ties_embedding);
        let head = if ties { PackedLinear::new(&weight, None)? } else { linear(&vb.pp(family.head))? };
        let positions = match family.positions {
            Some((name, first)) => Some((Embedding::new(inner.pp(name).get_unchecked("weight")?, width), first)),
            None => None,
        };
        let last_norm = family.load_norm(width, eps, inner.pp(norm))?;
        let embedding_norm =
            family.embedding_norm.map(|name| family.load_norm(width, eps, inner.pp(name))).transpose()?;
        let mut tables: Vec<RotaryEmbedding> = Vec::new();
        let mut blocks = Vec::with_capacity(layers);
        for layer in 0..layers {
            let at = inner.pp(block).pp(layer);
            let norm = |name: Option<&str>| name.map(|name| family.load_norm(width, eps, at.pp(name))).transpose();
            let [before_attention, after_attention, before_mlp, after_mlp] = family.norms;
            blocks.push(Block {
                before_attention: norm(before_attention)?,
                attention: shared(hf::load_attention(json, layer, vb.clone())?, &mut tables)?,
                after_attention: norm(after_attention)?,
                before_mlp: norm(before_mlp)?,
                mlp: family.load_mlp(json, at.clone())?,
                after_mlp: norm(after_mlp)?,
                parallel: family.parallel,
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
            embedding_norm,
            positions,
            embedding_scale,
            blocks,
            norm: last_norm,
            head,
            logit_scale: match family.logit_scale {
                1.0 => 1.0 / number("logits_scaling").unwrap_or(1.0),
                default => number("logit_scale").unwrap_or(default),
            },
            logit_softcap: number("final_logit_softcapping"),
        })
    }

    /// The original context of a scaling whose frequencies change beyond it, and the scaling's name.
    pub fn original_context(&self) -> Option<(usize, &'static str)> {
        self.blocks.iter().find_map(|block| match *block.attention.config().rope()?.scaling() {
            RopeScaling::Dynamic { original_context, .. } => Some((original_context, "dynamic")),
            RopeScaling::LongRope { original_context, .. } => Some((original_context, "longrope")),
            _ => None,
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
        xs = optional(&self.embedding_norm, &xs)?;
        if let Some((positions, first)) = &self.positions {
            let before = caches.first().map(AttentionCache::lens).filter(|lens| !lens.is_empty()).unwrap_or(vec![0; b]);
            let last = positions.embeddings().dim(0)?.saturating_sub(1 + first);
            let at = before
                .iter()
                .flat_map(|&before| (before..before + t).map(|position| (first + position.min(last)) as u32));
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
