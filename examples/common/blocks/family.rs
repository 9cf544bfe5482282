//! The differences between model families outside of attention, as a table.

use candle_core::{Context, DType, Device, Result, Tensor, bail};
use serde_json::Value;

use super::gpt_oss::Clamp;
use super::mlp::Mixture;

/// The names that checkpoints have for the same module.
pub type Names = &'static [&'static str];

/// The norms of a block, each by its names in checkpoints; a block without a norm has no names for it.
#[derive(Clone, Copy, PartialEq)]
pub struct Norms {
    pub before_attention: Names,
    /// Before the residual is added, unless [`Family::norms_residuals`] is set.
    pub after_attention: Names,
    pub before_mlp: Names,
    /// Like `after_attention`.
    pub after_mlp: Names,
}

impl Norms {
    /// Lists the norms before attention and before the MLP.
    pub const fn before(before_attention: Names, before_mlp: Names) -> Self {
        Self { before_attention, after_attention: &[], before_mlp, after_mlp: &[] }
    }

    /// Lists the norms after attention and after the MLP.
    pub const fn after(after_attention: Names, after_mlp: Names) -> Self {
        Self { before_attention: &[], after_attention, before_mlp: &[], after_mlp }
    }

    /// Returns the names of all norms.
    pub fn all(&self) -> Vec<&'static str> {
        [self.before_attention, self.after_attention, self.before_mlp, self.after_mlp].concat()
    }
}

/// The properties of a model family outside of attention, as far as neither the names in a checkpoint nor its config
/// tell them.
#[derive(Clone, Copy)]
pub struct Family {
    /// The norms of blocks of softmax attention; blocks of linear attention have [`PRE_NORMS`].
    pub norms: Norms,
    /// Whether the norms after attention and MLP come after the residual is added.
    pub norms_residuals: bool,
    /// Whether the first block has its norm before attention like the others.
    pub first_attention_norm: bool,
    pub norm: NormKind,
    /// Whether norms and a plain MLP have to have biases; otherwise they may.
    pub needs_biases: bool,
    /// `xs + attention(xs) + mlp(xs)`: attention and the MLP have the same input, and the same norm if there is but
    /// one.
    pub parallel: bool,
    pub mlp: MlpKind,
    pub activation: &'static str,
    /// Whether embeddings are multiplied by the root of their width.
    pub scales_embedding: bool,
    /// The default of `logit_scale`.
    pub logit_scale: f64,
    /// Whether the residual is several streams, which hyper-connections read and mix.
    pub has_streams: bool,
    /// Whether layers attend to compressed keys.
    pub has_compressed_keys: bool,
}

/// A norm, and its epsilon if the config has none.
#[derive(Clone, Copy)]
pub enum NormKind {
    Rms(f64),
    /// RMS norm with 1 added to the weight.
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
    /// As [`Plain`](Self::Plain), stored as (in, out).
    Conv1d,
    /// Experts in some layers, in others an MLP, which has a gate if [`Mixture::gates_others`] is set.
    Experts(Mixture),
}
use MlpKind::{Conv1d, Experts, Gated, Plain};

/// The names of the projections of an MLP with a gate.
#[derive(Clone, Copy)]
pub struct GatedNames {
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

/// The names in checkpoints: Llama's, Mixtral's, Nomic's, ModernBERT's (whose gate and up are one weight), llama.cpp's.
pub const GATED_MLPS: [GatedNames; 5] = [
    GatedNames { gate: "gate_proj", up: "up_proj", down: "down_proj" },
    GatedNames { gate: "w1", up: "w3", down: "w2" },
    GatedNames { gate: "fc12", up: "fc11", down: "fc2" },
    GatedNames { gate: "Wi", up: "Wi", down: "Wo" },
    GatedNames { gate: "ffn_gate", up: "ffn_up", down: "ffn_down" },
];

/// The names of the projections of an MLP without a gate.
#[derive(Clone, Copy)]
pub struct PlainNames {
    pub up: &'static str,
    pub down: &'static str,
}

/// The names in checkpoints.
pub const PLAIN_MLPS: [PlainNames; 9] = [
    PlainNames { up: "mlp.c_fc", down: "mlp.c_proj" },
    PlainNames { up: "mlp.dense_h_to_4h", down: "mlp.dense_4h_to_h" },
    PlainNames { up: "mlp.fc1", down: "mlp.fc2" },
    PlainNames { up: "mlp.fc_in", down: "mlp.fc_out" },
    PlainNames { up: "ffn.up_proj", down: "ffn.down_proj" },
    PlainNames { up: "fc1", down: "fc2" },
    PlainNames { up: "intermediate.dense", down: "output.dense" },
    PlainNames { up: "ffn.lin1", down: "ffn.lin2" },
    PlainNames { up: "ffn_up", down: "ffn_down" },
];

/// The second names are in OLMo Hybrid's checkpoints, the third in Mistral Large 4's, the last in A.X K2's, whose norms
/// have a gate.
pub const PRE_NORMS: Norms = Norms::before(
    &["input_layernorm", "attention_layer_norm", "attention_norm", "input_layernorm.norm"],
    &["post_attention_layernorm", "feedforward_layer_norm", "ffn_norm", "post_attention_layernorm.norm"],
);
const POST_NORMS: Norms = Norms::after(PRE_NORMS.before_mlp, &["post_feedforward_layernorm"]);
/// The norms of DeepSeek V4.
const DEEPSEEK_V4_NORMS: Norms = Norms::before(&["attn_norm"], &["ffn_norm"]);
/// The norm of a block whose attention and MLP share one.
const SHARED_NORM: Norms = Norms::before(&["input_layernorm"], &[]);
/// The names of any model in llama.cpp's files.
const GGUF_NORMS: Norms = Norms {
    before_attention: &["attn_norm"],
    after_attention: &["post_attention_norm"],
    // The second name is in files of GPT-OSS and of Qwen3.5, which have no norm after attention.
    before_mlp: &["ffn_norm", "post_attention_norm"],
    after_mlp: &["post_ffw_norm"],
};

pub const LLAMA: Family = Family {
    norms: PRE_NORMS,
    norms_residuals: false,
    first_attention_norm: true,
    norm: Rms(1e-6),
    needs_biases: false,
    parallel: false,
    mlp: Gated,
    activation: "silu",
    scales_embedding: false,
    logit_scale: 1.0,
    has_streams: false,
    has_compressed_keys: false,
};
const GEMMA: Family =
    Family { norm: RmsPlusOne(1e-6), scales_embedding: true, activation: "gelu_pytorch_tanh", ..LLAMA };
const GPT2: Family = Family {
    norms: Norms::before(&["ln_1"], &["ln_2"]),
    norm: Layer(1e-5),
    mlp: Conv1d,
    activation: "gelu_new",
    ..LLAMA
};
const GPT_NEOX: Family = Family { norm: Layer(1e-5), mlp: Plain, activation: "gelu", ..LLAMA };
/// The family of BLOOM, Falcon and StarCoder2.
const BLOOM: Family = Family { activation: "gelu_pytorch_tanh", ..GPT_NEOX };

/// Falcon with two norms, of attention and of the MLP.
const FALCON_NORMS: Norms = Norms::before(&["ln_attn"], &["ln_mlp"]);

const MIXTRAL: Mixture = Mixture {
    normalizes: true,
    scale: 1.0,
    gates_others: true,
    has_groups: true,
    corrects_by_bias: false,
    clamp: None,
};
const DEEPSEEK_V2: Mixture = Mixture { normalizes: false, ..MIXTRAL };
/// The experts of Nomic v2.
pub const NOMIC: Mixture = Mixture { gates_others: false, ..DEEPSEEK_V2 };
const DEEPSEEK_V3: Mixture = Mixture { scale: 2.5, ..MIXTRAL };
const DEEPSEEK_V4: Mixture = Mixture {
    scale: 1.5,
    has_groups: false,
    corrects_by_bias: true,
    clamp: Some(Clamp { alpha: 1.0, limit: 10.0, shift: 0.0 }),
    ..MIXTRAL
};
const MINIMAX_M3: Mixture = Mixture { scale: 2.0, has_groups: false, clamp: Some(Clamp::GPT_OSS), ..MIXTRAL };

impl Family {
    /// Returns the family of a `config.json`.
    pub fn of(json: &Value) -> Result<Self> {
        let flag = |key: &str, default: bool| json[key].as_bool().unwrap_or(default);
        Ok(match json["model_type"].as_str().unwrap_or_default() {
            "llama" | "mistral" | "qwen2" | "qwen3" | "granite" | "smollm3" => LLAMA,
            "mixtral" | "gpt_oss" => Self { mlp: Experts(MIXTRAL), norm: Rms(1e-5), ..LLAMA },
            "deepseek_v2" => Self { mlp: Experts(DEEPSEEK_V2), ..LLAMA },
            "axk2" | "deepseek_v3" | "deepseek_v32" | "glm_moe_dsa" | "kimi_k2" => {
                Self { mlp: Experts(DEEPSEEK_V3), ..LLAMA }
            }
            "minimax_m3_vl_text" => Self { mlp: Experts(MINIMAX_M3), norm: RmsPlusOne(1e-6), ..LLAMA },
            "dots3_note_text" | "mistral_large4_text" => Self { mlp: Experts(MIXTRAL), norm: Rms(1e-5), ..LLAMA },
            "phi3" => Self { norm: Rms(1e-5), ..LLAMA },
            "glm" => Self { norm: Rms(1.5625e-7), ..LLAMA },
            "glm4" => {
                let norms = Norms {
                    after_attention: &["post_self_attn_layernorm"],
                    after_mlp: &["post_mlp_layernorm"],
                    ..PRE_NORMS
                };
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
                let norms = Norms {
                    before_attention: PRE_NORMS.before_attention,
                    before_mlp: &["pre_feedforward_layernorm"],
                    ..POST_NORMS
                };
                Self { norms, ..GEMMA }
            }
            "gpt2" => GPT2,
            "gpt_bigcode" => Self { mlp: Plain, activation: "gelu_pytorch_tanh", ..GPT2 },
            "gptj" => Self { norms: Norms::before(&["ln_1"], &[]), parallel: true, mlp: Plain, ..GPT2 },
            "gpt_neox" => Self { parallel: flag("use_parallel_residual", true), ..GPT_NEOX },
            "bloom" if flag("apply_residual_connection_post_layernorm", false) => {
                bail!("[causal_lm] apply_residual_connection_post_layernorm is true, which is not supported")
            }
            "bloom" => BLOOM,
            "falcon" => {
                let grouped = flag("new_decoder_architecture", false);
                let parallel = grouped || flag("parallel_attn", true);
                let norms = match json["num_ln_in_parallel_attn"].as_u64() {
                    None | Some(2) if grouped => FALCON_NORMS,
                    _ if parallel => SHARED_NORM,
                    _ => BLOOM.norms,
                };
                Self { norms, parallel, activation: "gelu", ..BLOOM }
            }
            "mpt" => Self { norms: Norms::before(&["norm_1"], &["norm_2"]), ..GPT_NEOX },
            "opt" if !flag("do_layer_norm_before", true) || json["word_embed_proj_dim"] != json["hidden_size"] => {
                bail!("[causal_lm] OPT with norms after attention or projected embeddings is not supported")
            }
            "opt" => {
                let norms = Norms::before(&["self_attn_layer_norm"], &["final_layer_norm"]);
                Self { norms, activation: "relu", ..GPT_NEOX }
            }
            "deepseek_v4" => Self {
                mlp: Experts(DEEPSEEK_V4),
                norms: DEEPSEEK_V4_NORMS,
                has_streams: true,
                has_compressed_keys: true,
                ..LLAMA
            },
            name @ ("glm5_next_text" | "hy_v4") => bail!(
                "[causal_lm] model_type is {name:?}, whose residuals are several streams (hyper-connections), which is \
                 not supported"
            ),
            name @ "qwen4_exp_text" => bail!(
                "[causal_lm] model_type is {name:?}, whose residuals have gates and which embeds n-grams, which is not \
                 supported"
            ),
            "" => bail!("[causal_lm] config.json names no model_type"),
            other => bail!(
                "[causal_lm] model_type is {other:?}, expected one of axk2, bloom, cohere, cohere2, deepseek_v2, \
                 deepseek_v3, deepseek_v32, deepseek_v4, dots3_note_text, falcon, gemma, gemma2, gemma3, gemma3_text, \
                 glm, glm4, glm_moe_dsa, gpt2, gpt_bigcode, gpt_neox, gpt_oss, gptj, granite, kimi_k2, kimi_linear, \
                 llama, minimax_m3_vl_text, mistral, mistral_large4_text, mixtral, mpt, olmo2, olmo_hybrid, opt, phi, \
                 phi3, qwen2, qwen3, qwen3_5_moe_text, qwen3_5_text, qwen3_next, smollm3, stablelm, starcoder2"
            ),
        })
    }

    /// Returns the family with llama.cpp's names, which are the same for all families. Files of Mixtral, which have
    /// experts, have Llama's architecture.
    pub fn in_gguf(self, has_experts: bool) -> Result<Self> {
        let mlp = match self.mlp {
            Gated if has_experts => Experts(MIXTRAL),
            Plain | Conv1d => Plain,
            own => own,
        };
        if self.norms == FALCON_NORMS {
            bail!("[causal_lm] GGUF files of Falcon with two norms are not supported")
        }
        let renamed = |own: Names, gguf: Names| if own.is_empty() { own } else { gguf };
        let norms = Norms {
            before_attention: renamed(self.norms.before_attention, GGUF_NORMS.before_attention),
            after_attention: renamed(self.norms.after_attention, GGUF_NORMS.after_attention),
            before_mlp: renamed(self.norms.before_mlp, GGUF_NORMS.before_mlp),
            after_mlp: renamed(self.norms.after_mlp, GGUF_NORMS.after_mlp),
        };
        // The converter adds the 1.
        let norm = if let RmsPlusOne(eps) = self.norm { Rms(eps) } else { self.norm };
        Ok(Self { norms, norm, mlp, ..self })
    }

    /// Returns the factor on embeddings of this width in a model that computes in `dtype`.
    pub fn embedding_scale(&self, json: &Value, width: usize, dtype: DType) -> Result<f64> {
        if !self.scales_embedding {
            return Ok(json["embedding_multiplier"].as_f64().unwrap_or(1.0));
        }
        // In the dtype of the embeddings, as Gemma rounds it.
        Tensor::new((width as f64).sqrt(), &Device::Cpu)?.to_dtype(dtype)?.to_dtype(DType::F64)?.to_scalar()
    }

    /// Returns the name of the activation of MLPs.
    pub fn activation_name<'a>(&self, json: &'a Value) -> &'a str {
        let names = ["hidden_activation", "hidden_act", "activation_function", "activation"];
        names.iter().find_map(|key| json[*key].as_str()).unwrap_or(self.activation)
    }
}

/// The scale and the softcap of a family's logits.
#[derive(Debug, Clone, Copy)]
pub struct LogitScaling {
    factor: f64,
    softcap: Option<f64>,
}

impl LogitScaling {
    /// Returns the scaling of a `config.json`.
    pub fn of(family: &Family, json: &Value) -> Self {
        let factor = if family.logit_scale == 1.0 {
            1.0 / json["logits_scaling"].as_f64().unwrap_or(1.0)
        } else {
            json["logit_scale"].as_f64().unwrap_or(family.logit_scale)
        };
        Self { factor, softcap: json["final_logit_softcapping"].as_f64() }
    }

    /// Computes a model's logits from the output of its head.
    pub fn forward(&self, logits: Tensor) -> Result<Tensor> {
        let scaled = if self.factor == 1.0 { logits } else { (logits * self.factor)? };
        match self.softcap {
            Some(softcap) => (scaled / softcap)?.tanh()? * softcap,
            None => Ok(scaled),
        }
    }
}

/// Returns the config of a model's text, which a model that also processes images has apart.
pub fn text_config(json: &Value) -> &Value {
    json.get("text_config").filter(|text| text.is_object()).unwrap_or(json)
}

/// Returns whether the head of a model is its embeddings again; `None` if the `config.json` does not say it.
pub fn ties_embeddings(json: &Value) -> Option<bool> {
    let key = "tie_word_embeddings";
    json[key].as_bool().or(text_config(json)[key].as_bool())
}

/// The names of a config's field for the number of blocks.
pub const LAYERS: &[&str] = &["num_hidden_layers", "n_layer", "n_layers"];

/// Returns the number in a config's field.
pub fn size(json: &Value, key: &str) -> Option<usize> {
    json[key].as_u64().and_then(|size| usize::try_from(size).ok())
}

/// Returns the number in the first of several fields.
///
/// # Errors
/// If the config has none of them.
pub fn required(json: &Value, keys: &[&str]) -> Result<usize> {
    let size = keys.iter().find_map(|key| size(json, key));
    size.with_context(|| format!("[causal_lm] config.json has no size {}", keys.join(" or ")))
}
