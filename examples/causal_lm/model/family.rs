//! What differs between model families outside of attention, as a table.

use candle_core::{Result, bail};
use candle_nn::Activation;
use serde_json::Value;

use super::experts::Experts;
use super::weights::Weights;

/// The norms of a block: before and after attention, before and after the MLP; "after" is before the residual.
type Norms = [Option<&'static str>; 4];

/// What differs between model families outside of attention, and neither the names in a checkpoint nor its config say.
#[derive(Clone, Copy)]
pub struct Family {
    pub norms: Norms,
    /// Those of blocks of linear attention.
    pub linear_norms: Norms,
    /// Other names that a checkpoint may have for norms.
    pub renamed_norms: &'static [(&'static str, &'static str)],
    pub norm: NormKind,
    /// `xs + attention(xs) + mlp(xs)`: attention and the MLP have the same input, and the same norm if there is but
    /// one.
    pub parallel: bool,
    pub mlp: MlpKind,
    pub activation: &'static str,
    /// Embeddings are multiplied by the root of their width.
    pub scales_embedding: bool,
    /// The default of `logit_scale`.
    pub logit_scale: f64,
}

/// A norm, and its epsilon unless the config has one.
#[derive(Clone, Copy)]
pub enum NormKind {
    Rms(f64),
    /// With 1 added to the weight.
    RmsPlusOne(f64),
    Layer(f64),
}
use NormKind::{Layer, Rms, RmsPlusOne};

#[derive(Clone, Copy)]
pub enum MlpKind {
    /// `down(activation(gate(x)) * up(x))`, with Llama's names.
    Gated,
    /// The same with llama.cpp's names, below the block itself.
    Ffn,
    /// `down(activation(up(x)))`: the names of up and down.
    Plain(&'static str, &'static str),
    /// The same, stored as (in, out).
    Conv1d(&'static str, &'static str),
    /// A mixture of experts, where layers have them: unless the config says which do, all but as many
    /// [`Gated`](Self::Gated) ones at the beginning.
    Experts(LoadExperts, usize),
}
use MlpKind::{Conv1d, Experts as Mixture, Ffn, Gated, Plain};

/// Reads the experts of a layer, below its prefix.
pub type LoadExperts = fn(&Value, &Weights, Activation) -> Result<Experts>;

/// A block whose attention and MLP share a norm.
const SHARED_NORM: Norms = [Some("input_layernorm"), None, None, None];
const PRE_NORMS: Norms = [Some("input_layernorm"), None, Some("post_attention_layernorm"), None];
const POST_NORMS: Norms = [None, Some("post_attention_layernorm"), None, Some("post_feedforward_layernorm")];
const LLAMA: Family = Family {
    norms: PRE_NORMS,
    linear_norms: PRE_NORMS,
    renamed_norms: &[],
    norm: Rms(1e-6),
    parallel: false,
    mlp: Gated,
    activation: "silu",
    scales_embedding: false,
    logit_scale: 1.0,
};
/// As published, in the place of the names that transformers has for them; it saves every one by them.
const OLMO_HYBRID_NORMS: &[(&str, &str)] =
    &[("input_layernorm", "attention_layer_norm"), ("post_attention_layernorm", "feedforward_layer_norm")];
const GEMMA: Family =
    Family { norm: RmsPlusOne(1e-6), scales_embedding: true, activation: "gelu_pytorch_tanh", ..LLAMA };
const GPT2: Family = Family {
    norms: [Some("ln_1"), None, Some("ln_2"), None],
    norm: Layer(1e-5),
    mlp: Conv1d("mlp.c_fc", "mlp.c_proj"),
    activation: "gelu_new",
    ..LLAMA
};
const GPT_NEOX: Family =
    Family { norm: Layer(1e-5), mlp: Plain("mlp.dense_h_to_4h", "mlp.dense_4h_to_h"), activation: "gelu", ..LLAMA };
/// BLOOM and Falcon.
const BLOOM: Family = Family { activation: "gelu_pytorch_tanh", ..GPT_NEOX };

impl Family {
    /// The family of a `config.json`.
    pub fn of(json: &Value) -> Result<Self> {
        let flag = |key: &str, default: bool| json[key].as_bool().unwrap_or(default);
        Ok(match json["model_type"].as_str().unwrap_or_default() {
            "llama" | "mistral" | "qwen2" | "qwen3" | "granite" | "smollm3" => LLAMA,
            "mixtral" => Self { mlp: Mixture(Experts::mixtral, 0), norm: Rms(1e-5), ..LLAMA },
            "gpt_oss" => Self { mlp: Mixture(Experts::gpt_oss, 0), norm: Rms(1e-5), ..LLAMA },
            "deepseek_v2" => Self { mlp: Mixture(Experts::deepseek_v2, 0), ..LLAMA },
            "deepseek_v3" | "kimi_k2" => Self { mlp: Mixture(Experts::deepseek_v3, 3), ..LLAMA },
            "phi3" => Self { norm: Rms(1e-5), ..LLAMA },
            "glm" => Self { norm: Rms(1.5625e-7), ..LLAMA },
            "glm4" => {
                let norms =
                    ["input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"];
                Self { norms: norms.map(Some), norm: Rms(1.5625e-7), ..LLAMA }
            }
            "olmo2" => Self { norms: POST_NORMS, norm: Rms(1e-5), ..LLAMA },
            "olmo_hybrid" => Self { norms: POST_NORMS, renamed_norms: OLMO_HYBRID_NORMS, ..LLAMA },
            "kimi_linear" => Self { mlp: Mixture(Experts::kimi, 1), norm: Rms(1e-5), ..LLAMA },
            "qwen3_next" | "qwen3_5_moe_text" => {
                Self { mlp: Mixture(Experts::qwen, 0), norm: RmsPlusOne(1e-6), ..LLAMA }
            }
            "qwen3_5_text" => Self { norm: RmsPlusOne(1e-6), ..LLAMA },
            "cohere" | "cohere2" => {
                Self { norms: SHARED_NORM, norm: Layer(1e-5), parallel: true, logit_scale: 0.0625, ..LLAMA }
            }
            "stablelm" => {
                let parallel = flag("use_parallel_residual", false);
                let norms = if parallel { SHARED_NORM } else { LLAMA.norms };
                Self { norms, norm: Layer(1e-5), parallel, ..LLAMA }
            }
            "starcoder2" => {
                let (mlp, activation) = (Plain("mlp.c_fc", "mlp.c_proj"), "gelu_pytorch_tanh");
                Self { norm: Layer(1e-5), mlp, activation, ..LLAMA }
            }
            "phi" => Self {
                norms: SHARED_NORM,
                norm: Layer(1e-5),
                parallel: true,
                mlp: Plain("mlp.fc1", "mlp.fc2"),
                activation: "gelu_new",
                ..LLAMA
            },
            "gemma" => GEMMA,
            "gemma2" | "gemma3_text" | "gemma3" => {
                let norms = [
                    "input_layernorm",
                    "post_attention_layernorm",
                    "pre_feedforward_layernorm",
                    "post_feedforward_layernorm",
                ];
                Self { norms: norms.map(Some), ..GEMMA }
            }
            "gpt2" => GPT2,
            "gpt_bigcode" => Self { mlp: Plain("mlp.c_fc", "mlp.c_proj"), activation: "gelu_pytorch_tanh", ..GPT2 },
            "gptj" => Self {
                norms: [Some("ln_1"), None, None, None],
                parallel: true,
                mlp: Plain("mlp.fc_in", "mlp.fc_out"),
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
                    _ if grouped || parallel => SHARED_NORM,
                    _ => BLOOM.norms,
                };
                let parallel = grouped || parallel;
                Self { norms, parallel, activation: "gelu", ..BLOOM }
            }
            "mpt" => Self {
                norms: [Some("norm_1"), None, Some("norm_2"), None],
                mlp: Plain("ffn.up_proj", "ffn.down_proj"),
                activation: "gelu",
                ..GPT2
            },
            "opt" if !flag("do_layer_norm_before", true) || json["word_embed_proj_dim"] != json["hidden_size"] => {
                bail!("[causal_lm] OPT with norms after attention or projected embeddings is not supported")
            }
            "opt" => Self {
                norms: [Some("self_attn_layer_norm"), None, Some("final_layer_norm"), None],
                mlp: Plain("fc1", "fc2"),
                activation: "relu",
                ..GPT2
            },
            other => bail!(
                "[causal_lm] model_type is {other:?}, expected one of bloom, cohere, cohere2, deepseek_v2, deepseek_v3, falcon, gemma, gemma2, gemma3, gemma3_text, glm, glm4, gpt2, gpt_bigcode, gpt_neox, gpt_oss, gptj, granite, kimi_linear, llama, mistral, mixtral, mpt, olmo2, olmo_hybrid, opt, phi, phi3, qwen2, qwen3, qwen3_5_moe_text, qwen3_5_text, qwen3_next, smollm3, stablelm, starcoder2"
            ),
        })
    }

    /// The names that a checkpoint may have for a norm.
    pub fn names_of(&self, norm: &'static str) -> Vec<&'static str> {
        let others = self.renamed_norms.iter().filter(|(usual, _)| *usual == norm).map(|(_, other)| *other);
        std::iter::once(norm).chain(others).collect()
    }

    /// The same with llama.cpp's names, which are one list for all families.
    pub fn in_gguf(self) -> Result<Self> {
        let mlp = match self.mlp {
            Gated | Ffn => Ffn,
            Plain(..) | Conv1d(..) => Plain("ffn_up", "ffn_down"),
            Mixture(..) => bail!("[causal_lm] experts of GGUF files are not supported"),
        };
        if self.norms[2] == Some("ln_mlp") {
            bail!("[causal_lm] GGUF files of Falcon with two norms are not supported")
        }
        let [before_attention, after_attention, before_mlp, after_mlp] = self.norms;
        Ok(Self {
            norms: [
                before_attention.and(Some("attn_norm")),
                after_attention.and(Some("post_attention_norm")),
                before_mlp.and(Some("ffn_norm")),
                after_mlp.and(Some("post_ffw_norm")),
            ],
            // The converter adds the 1.
            norm: if let RmsPlusOne(eps) = self.norm { Rms(eps) } else { self.norm },
            mlp,
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
