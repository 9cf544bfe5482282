//! What differs between model families outside of attention, as a table.

use candle_core::{Context, Result, bail};
use serde_json::Value;

use super::mlp::Mixture;

/// The norms of a block: before and after attention, before and after the MLP; "after" is before the residual. Each by
/// the names that a checkpoint may have for it; a block without the norm has none.
pub type Norms = [&'static [&'static str]; 4];

/// What differs between model families outside of attention, and neither the names in a checkpoint nor its config say.
#[derive(Clone, Copy)]
pub struct Family {
    /// Of blocks of softmax attention; those of linear attention have [`PRE_NORMS`].
    pub norms: Norms,
    /// "After" is behind the residual.
    pub behind_residuals: bool,
    /// Whether the first block has its norm before attention, as the others.
    pub first_attention_norm: bool,
    pub norm: NormKind,
    /// Whether norms and a plain MLP have to have biases; otherwise they may.
    pub needs_biases: bool,
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
    /// `down(activation(gate(x)) * up(x))`.
    Gated,
    /// `down(activation(up(x)))`.
    Plain,
    /// The same, stored as (in, out).
    Conv1d,
    /// Experts in some layers, in others what Llama has.
    Experts(Mixture),
}
use MlpKind::{Conv1d, Experts, Gated, Plain};

/// The names of gate, up and down that checkpoints have: Llama's, Mixtral's, Nomic's, ModernBERT's and llama.cpp's.
pub const GATED_MLPS: [[&str; 3]; 5] = [
    ["gate_proj", "up_proj", "down_proj"],
    ["w1", "w3", "w2"],
    ["fc12", "fc11", "fc2"],
    ["Wi", "Wi", "Wo"],
    ["ffn_gate", "ffn_up", "ffn_down"],
];
/// Those of up and down.
pub const PLAIN_MLPS: [[&str; 2]; 9] = [
    ["mlp.c_fc", "mlp.c_proj"],
    ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"],
    ["mlp.fc1", "mlp.fc2"],
    ["mlp.fc_in", "mlp.fc_out"],
    ["ffn.up_proj", "ffn.down_proj"],
    ["fc1", "fc2"],
    ["intermediate.dense", "output.dense"],
    ["ffn.lin1", "ffn.lin2"],
    ["ffn_up", "ffn_down"],
];

/// The second names are those of OLMo Hybrid's checkpoints.
pub const PRE_NORMS: Norms =
    [&["input_layernorm", "attention_layer_norm"], &[], &["post_attention_layernorm", "feedforward_layer_norm"], &[]];
const POST_NORMS: Norms = [&[], PRE_NORMS[2], &[], &["post_feedforward_layernorm"]];
/// A block whose attention and MLP share a norm.
const SHARED_NORM: Norms = [&["input_layernorm"], &[], &[], &[]];
/// Those of any model in llama.cpp's files.
const GGUF_NORMS: Norms = [&["attn_norm"], &["post_attention_norm"], &["ffn_norm"], &["post_ffw_norm"]];

pub const LLAMA: Family = Family {
    norms: PRE_NORMS,
    behind_residuals: false,
    first_attention_norm: true,
    norm: Rms(1e-6),
    needs_biases: false,
    parallel: false,
    mlp: Gated,
    activation: "silu",
    scales_embedding: false,
    logit_scale: 1.0,
};
const GEMMA: Family =
    Family { norm: RmsPlusOne(1e-6), scales_embedding: true, activation: "gelu_pytorch_tanh", ..LLAMA };
const GPT2: Family =
    Family { norms: [&["ln_1"], &[], &["ln_2"], &[]], norm: Layer(1e-5), mlp: Conv1d, activation: "gelu_new", ..LLAMA };
const GPT_NEOX: Family = Family { norm: Layer(1e-5), mlp: Plain, activation: "gelu", ..LLAMA };
/// BLOOM, Falcon and StarCoder2.
const BLOOM: Family = Family { activation: "gelu_pytorch_tanh", ..GPT_NEOX };

const MIXTRAL: Mixture = Mixture { normalizes: true, scale: 1.0 };
const DEEPSEEK_V2: Mixture = Mixture { normalizes: false, ..MIXTRAL };
const DEEPSEEK_V3: Mixture = Mixture { scale: 2.5, ..MIXTRAL };

impl Family {
    /// The family of a `config.json`.
    pub fn of(json: &Value) -> Result<Self> {
        let flag = |key: &str, default: bool| json[key].as_bool().unwrap_or(default);
        Ok(match json["model_type"].as_str().unwrap_or_default() {
            "llama" | "mistral" | "qwen2" | "qwen3" | "granite" | "smollm3" => LLAMA,
            "mixtral" | "gpt_oss" => Self { mlp: Experts(MIXTRAL), norm: Rms(1e-5), ..LLAMA },
            "deepseek_v2" => Self { mlp: Experts(DEEPSEEK_V2), ..LLAMA },
            "deepseek_v3" | "kimi_k2" => Self { mlp: Experts(DEEPSEEK_V3), ..LLAMA },
            "phi3" => Self { norm: Rms(1e-5), ..LLAMA },
            "glm" => Self { norm: Rms(1.5625e-7), ..LLAMA },
            "glm4" => {
                let norms: Norms = [PRE_NORMS[0], &["post_self_attn_layernorm"], PRE_NORMS[2], &["post_mlp_layernorm"]];
                Self { norms, norm: Rms(1.5625e-7), ..LLAMA }
            }
            "olmo2" => Self { norms: POST_NORMS, norm: Rms(1e-5), ..LLAMA },
            "olmo_hybrid" => Self { norms: POST_NORMS, ..LLAMA },
            "kimi_linear" => Self { mlp: Experts(DEEPSEEK_V3), norm: Rms(1e-5), ..LLAMA },
            "qwen3_next" | "qwen3_5_moe_text" => Self { mlp: Experts(MIXTRAL), norm: RmsPlusOne(1e-6), ..LLAMA },
            "qwen3_5_text" => Self { norm: RmsPlusOne(1e-6), ..LLAMA },
            "cohere" | "cohere2" => {
                Self { norms: SHARED_NORM, norm: Layer(1e-5), parallel: true, logit_scale: 0.0625, ..LLAMA }
            }
            "stablelm" => {
                let parallel = flag("use_parallel_residual", false);
                let norms = if parallel { SHARED_NORM } else { LLAMA.norms };
                Self { norms, norm: Layer(1e-5), parallel, ..LLAMA }
            }
            "starcoder2" => BLOOM,
            "phi" => Self { norms: SHARED_NORM, parallel: true, activation: "gelu_new", ..GPT_NEOX },
            "gemma" => GEMMA,
            "gemma2" | "gemma3_text" | "gemma3" => {
                let norms = [PRE_NORMS[0], POST_NORMS[1], &["pre_feedforward_layernorm"], POST_NORMS[3]];
                Self { norms, ..GEMMA }
            }
            "gpt2" => GPT2,
            "gpt_bigcode" => Self { mlp: Plain, activation: "gelu_pytorch_tanh", ..GPT2 },
            "gptj" => Self { norms: [&["ln_1"], &[], &[], &[]], parallel: true, mlp: Plain, ..GPT2 },
            "gpt_neox" => Self { parallel: flag("use_parallel_residual", true), ..GPT_NEOX },
            "bloom" if flag("apply_residual_connection_post_layernorm", false) => {
                bail!("[causal_lm] apply_residual_connection_post_layernorm is true, which is not supported")
            }
            "bloom" => BLOOM,
            "falcon" => {
                let grouped = flag("new_decoder_architecture", false);
                let parallel = grouped || flag("parallel_attn", true);
                let norms: Norms = match json["num_ln_in_parallel_attn"].as_u64() {
                    None | Some(2) if grouped => [&["ln_attn"], &[], &["ln_mlp"], &[]],
                    _ if parallel => SHARED_NORM,
                    _ => BLOOM.norms,
                };
                Self { norms, parallel, activation: "gelu", ..BLOOM }
            }
            "mpt" => Self { norms: [&["norm_1"], &[], &["norm_2"], &[]], ..GPT_NEOX },
            "opt" if !flag("do_layer_norm_before", true) || json["word_embed_proj_dim"] != json["hidden_size"] => {
                bail!("[causal_lm] OPT with norms after attention or projected embeddings is not supported")
            }
            "opt" => {
                let norms: Norms = [&["self_attn_layer_norm"], &[], &["final_layer_norm"], &[]];
                Self { norms, activation: "relu", ..GPT_NEOX }
            }
            other => bail!(
                "[causal_lm] model_type is {other:?}, expected one of bloom, cohere, cohere2, deepseek_v2, deepseek_v3, falcon, gemma, gemma2, gemma3, gemma3_text, glm, glm4, gpt2, gpt_bigcode, gpt_neox, gpt_oss, gptj, granite, kimi_linear, llama, mistral, mixtral, mpt, olmo2, olmo_hybrid, opt, phi, phi3, qwen2, qwen3, qwen3_5_moe_text, qwen3_5_text, qwen3_next, smollm3, stablelm, starcoder2"
            ),
        })
    }

    /// The same with llama.cpp's names, which are one list for all families.
    pub fn in_gguf(self) -> Result<Self> {
        let mlp = match self.mlp {
            Gated => Gated,
            Plain | Conv1d => Plain,
            Experts(_) => bail!("[causal_lm] experts of GGUF files are not supported"),
        };
        if self.norms[2] == ["ln_mlp"] {
            bail!("[causal_lm] GGUF files of Falcon with two norms are not supported")
        }
        let norms = std::array::from_fn(|i| if self.norms[i].is_empty() { &[][..] } else { GGUF_NORMS[i] });
        // The converter adds the 1.
        let norm = if let RmsPlusOne(eps) = self.norm { Rms(eps) } else { self.norm };
        Ok(Self { norms, norm, mlp, ..self })
    }

    /// Of MLPs.
    pub fn activation_name<'a>(&self, json: &'a Value) -> &'a str {
        let names = ["hidden_activation", "hidden_act", "activation_function", "activation"];
        names.iter().find_map(|key| json[*key].as_str()).unwrap_or(self.activation)
    }
}

/// The names of a config's field for the number of blocks.
pub const LAYERS: &[&str] = &["num_hidden_layers", "n_layer", "n_layers"];

/// The number of a config's field.
pub fn size(json: &Value, key: &str) -> Option<usize> {
    json[key].as_u64().and_then(|size| usize::try_from(size).ok())
}

/// That of the first of these fields.
pub fn required(json: &Value, keys: &[&str]) -> Result<usize> {
    let size = keys.iter().find_map(|key| size(json, key));
    size.with_context(|| format!("[causal_lm] config.json has no size {}", keys.join(" or ")))
}
