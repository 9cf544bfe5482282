//! What differs between model families outside of attention, as a table.

use candle_core::{Result, bail};
use candle_nn::Activation;
use serde_json::Value;

use super::experts::Experts;
use super::weights::Weights;

/// What differs between model families outside of attention.
#[derive(Clone, Copy)]
pub struct Family {
    /// The base model, and in it the embedding, the list of blocks and the last norm.
    pub names: [&'static str; 4],
    pub head: &'static str,
    /// The norms of a block: before and after attention, before and after the MLP; "after" is before the residual.
    pub norms: [Option<&'static str>; 4],
    pub norm: NormKind,
    pub eps: f64,
    /// `xs + attention(xs) + mlp(xs)`: attention and the MLP have the same input, and the same norm if there is but
    /// one.
    pub parallel: bool,
    /// Attention is `hf::load_latent_attention`.
    pub latent: bool,
    pub mlp: MlpKind,
    pub activation: &'static str,
    /// Learned positions, and the row of position 0.
    pub positions: Option<(&'static str, usize)>,
    pub embedding_norm: Option<&'static str>,
    /// Embeddings are multiplied by the root of their width.
    pub scales_embedding: bool,
    pub ties_embedding: bool,
    /// The default of `logit_scale`.
    pub logit_scale: f64,
}

#[derive(Clone, Copy)]
pub enum NormKind {
    Rms,
    /// With 1 added to the weight.
    RmsPlusOne,
    Layer,
}

#[derive(Clone, Copy)]
pub enum MlpKind {
    /// `down(activation(gate(x)) * up(x))`, with Llama's names.
    Gated,
    /// The same with llama.cpp's names, below the block itself.
    Ffn,
    /// `down(activation(up(x)))`.
    Plain { up: &'static str, down: &'static str },
    /// The same, stored as (in, out).
    Conv1d { up: &'static str, down: &'static str },
    /// A mixture of experts, with as many [`Gated`](Self::Gated) layers before it as `first_k_dense_replace` says, or
    /// by default.
    Experts { load: LoadExperts, dense_layers: usize },
}

/// Reads the experts of a layer, below its prefix.
pub type LoadExperts = fn(&Value, &Weights, Activation) -> Result<Experts>;

const LLAMA: Family = Family {
    names: ["model", "embed_tokens", "layers", "norm"],
    head: "lm_head",
    norms: [Some("input_layernorm"), None, Some("post_attention_layernorm"), None],
    norm: NormKind::Rms,
    eps: 1e-6,
    parallel: false,
    latent: false,
    mlp: MlpKind::Gated,
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
const DEEPSEEK_V2: Family =
    Family { latent: true, mlp: MlpKind::Experts { load: Experts::deepseek_v2, dense_layers: 0 }, ..LLAMA };
const GPT2: Family = Family {
    names: ["transformer", "wte", "h", "ln_f"],
    norms: [Some("ln_1"), None, Some("ln_2"), None],
    norm: NormKind::Layer,
    eps: 1e-5,
    mlp: MlpKind::Conv1d { up: "mlp.c_fc", down: "mlp.c_proj" },
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
    mlp: MlpKind::Plain { up: "mlp.dense_h_to_4h", down: "mlp.dense_4h_to_h" },
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
    /// The family of a `config.json`.
    pub fn of(json: &Value) -> Result<Self> {
        let flag = |key: &str, default: bool| json[key].as_bool().unwrap_or(default);
        let one_norm = |name| [Some(name), None, None, None];
        Ok(match json["model_type"].as_str().unwrap_or_default() {
            "llama" | "mistral" | "qwen2" | "qwen3" | "granite" => LLAMA,
            "mixtral" => Self { mlp: MlpKind::Experts { load: Experts::mixtral, dense_layers: 0 }, eps: 1e-5, ..LLAMA },
            "gpt_oss" => Self { mlp: MlpKind::Experts { load: Experts::gpt_oss, dense_layers: 0 }, eps: 1e-5, ..LLAMA },
            "deepseek_v2" => DEEPSEEK_V2,
            "deepseek_v3" | "kimi_k2" => {
                Self { mlp: MlpKind::Experts { load: Experts::deepseek_v3, dense_layers: 3 }, ..DEEPSEEK_V2 }
            }
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
                mlp: MlpKind::Plain { up: "mlp.c_fc", down: "mlp.c_proj" },
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
                mlp: MlpKind::Plain { up: "mlp.fc1", down: "mlp.fc2" },
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
                mlp: MlpKind::Plain { up: "mlp.c_fc", down: "mlp.c_proj" },
                activation: "gelu_pytorch_tanh",
                ..GPT2
            },
            "gptj" => Self {
                norms: one_norm("ln_1"),
                parallel: true,
                mlp: MlpKind::Plain { up: "mlp.fc_in", down: "mlp.fc_out" },
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
                mlp: MlpKind::Plain { up: "ffn.up_proj", down: "ffn.down_proj" },
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
                mlp: MlpKind::Plain { up: "fc1", down: "fc2" },
                activation: "relu",
                positions: Some(("embed_positions", 2)),
                ..GPT2
            },
            other => bail!(
                "[causal_lm] model_type is {other:?}, expected one of bloom, cohere, cohere2, deepseek_v2, deepseek_v3, falcon, gemma, gemma2, gemma3, gemma3_text, glm, glm4, gpt2, gpt_bigcode, gpt_neox, gpt_oss, gptj, granite, llama, mistral, mixtral, mpt, olmo2, opt, phi, phi3, qwen2, qwen3, smollm3, stablelm, starcoder2"
            ),
        })
    }

    /// The same with llama.cpp's names, which are one list for all families.
    pub fn in_gguf(self) -> Result<Self> {
        let mlp = match self.mlp {
            MlpKind::Gated | MlpKind::Ffn => MlpKind::Ffn,
            MlpKind::Plain { .. } | MlpKind::Conv1d { .. } => MlpKind::Plain { up: "ffn_up", down: "ffn_down" },
            MlpKind::Experts { .. } => bail!("[causal_lm] experts of GGUF files are not supported"),
        };
        if self.norms[2] == Some("ln_mlp") {
            bail!("[causal_lm] GGUF files of Falcon with two norms are not supported")
        }
        let [before_attention, after_attention, before_mlp, after_mlp] = self.norms;
        Ok(Self {
            names: [self.names[0], "token_embd", "blk", "output_norm"],
            head: "output",
            norms: [
                before_attention.and(Some("attn_norm")),
                after_attention.and(Some("post_attention_norm")),
                before_mlp.and(Some("ffn_norm")),
                after_mlp.and(Some("post_ffw_norm")),
            ],
            // The converter adds the 1.
            norm: if let NormKind::RmsPlusOne = self.norm { NormKind::Rms } else { self.norm },
            mlp,
            positions: self.positions.map(|(_, first)| ("position_embd", first)),
            embedding_norm: self.embedding_norm.and(Some("token_embd_norm")),
            ..self
        })
    }

    /// Of the MLP.
    pub fn activation(&self, json: &Value) -> Result<Activation> {
        let name = ["hidden_activation", "hidden_act", "activation_function", "activation"];
        let name = name.iter().find_map(|key| json[*key].as_str()).unwrap_or(self.activation);
        let Ok(activation) = serde_json::from_value::<Activation>(name.into()) else {
            bail!("[causal_lm] the activation {name:?} is not one of Candle's")
        };
        Ok(activation)
    }
}
