//! The spellings of layouts, and the names of their projections.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use candle_core::{Error, Result, bail};

use super::layout::{DenseNaming, Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
use candle_attention_modules::base::did_you_mean;
use candle_attention_modules::linear::Projection::Output;

/// The spelling of a layout, and the names of its four projections.
#[derive(Clone, Copy)]
pub(super) struct LinearNames {
    spelling: &'static str,
    pub query: &'static str,
    pub key: &'static str,
    pub value: &'static str,
    pub output: &'static str,
}

/// Returns the names of four projections, which are in the order query, key, value, output.
const fn linear(spelling: &'static str, names: [&'static str; 4]) -> LinearNames {
    let [query, key, value, output] = names;
    LinearNames { spelling, query, key, value, output }
}

/// The layouts of four linear layers, in the order in which they are detected. ALBERT's comes before minGPT's: `query`
/// alone is the inner module of BERT and similar models, whose output projection is outside.
const LINEAR: [WeightLayout; 28] = [
    WeightLayout::Canonical,
    WeightLayout::Book,
    WeightLayout::Short,
    WeightLayout::D2l,
    WeightLayout::Bert,
    WeightLayout::Vit,
    WeightLayout::DistilBert,
    WeightLayout::Opt,
    WeightLayout::Phi,
    WeightLayout::T5,
    WeightLayout::Meta,
    WeightLayout::Diffusers,
    WeightLayout::XTransformers,
    WeightLayout::Albert,
    WeightLayout::MinGpt,
    WeightLayout::InternVl,
    WeightLayout::Ctrl,
    WeightLayout::ModernBertDecoder,
    WeightLayout::Moshi,
    WeightLayout::Nemo,
    WeightLayout::Deberta,
    WeightLayout::Espnet,
    WeightLayout::Mlx,
    WeightLayout::Torchtune,
    WeightLayout::Kimi,
    WeightLayout::QwenOmni,
    WeightLayout::Pix2Struct,
    WeightLayout::Sapiens,
];

impl Naming {
    const ALL: [Self; 5] = [Self::Canonical, Self::Book, Self::Short, Self::D2l, Self::MinGpt];

    pub(super) fn names(self) -> LinearNames {
        match self {
            Self::Canonical => linear("canonical", ["q_proj", "k_proj", "v_proj", "o_proj"]),
            Self::Book => linear("book", ["W_query", "W_key", "W_value", "out_proj"]),
            Self::Short => linear("short", ["Wq", "Wk", "Wv", "Wo"]),
            Self::D2l => linear("d2l", ["W_q", "W_k", "W_v", "W_o"]),
            Self::MinGpt => linear("mingpt", ["query", "key", "value", "proj"]),
        }
    }
}

impl DenseNaming {
    const ALL: [Self; 8] =
        [Self::Canonical, Self::Book, Self::Short, Self::D2l, Self::Opt, Self::Bert, Self::Albert, Self::T5];

    pub(super) fn names(self) -> LinearNames {
        match self {
            Self::Canonical => Naming::Canonical.names(),
            Self::Book => Naming::Book.names(),
            Self::Short => Naming::Short.names(),
            Self::D2l => Naming::D2l.names(),
            Self::Opt => linear("opt", ["q_proj", "k_proj", "v_proj", "out_proj"]),
            Self::Bert => linear("bert", ["self.query", "self.key", "self.value", "output.dense"]),
            Self::Albert => linear("albert", ["query", "key", "value", "dense"]),
            Self::T5 => linear("t5", ["q", "k", "v", "o"]),
        }
    }
}

/// Names of models or programs that are typed instead of a layout, in lower case.
struct Models {
    names: &'static [&'static str],
    /// The layouts that the weights of these models have, as an error lists them.
    layouts: &'static str,
}

const MODELS: [Models; 13] = [
    Models {
        names: &[
            "llama",
            "llama2",
            "llama3",
            "mistral",
            "mixtral",
            "qwen",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3",
            "olmo",
            "olmo2",
            "smollm",
            "smollm2",
            "cohere",
            "granite",
            "starcoder2",
            "deepseek",
            "hf",
            "huggingface",
            "transformers",
        ],
        layouts: "`canonical`, or `meta` in Meta's own files",
    },
    Models { names: &["gpt2", "gpt-2", "openai-gpt"], layouts: "`conv1d`" },
    Models { names: &["nanogpt", "nano-gpt"], layouts: "`packed:c_attn`" },
    Models { names: &["karpathy", "gpt", "lets-build-gpt"], layouts: "`stacked:mingpt` for single heads, or `mingpt`" },
    Models {
        names: &["gpt-neox", "gpt_neox", "gptneox", "neox", "pythia", "bloom", "falcon"],
        layouts: "`packed:query_key_value:by-head`",
    },
    Models { names: &["gpt-bigcode", "gpt_bigcode", "starcoder"], layouts: "`packed:c_attn:by-head`" },
    Models { names: &["gptj", "gpt-j", "bart", "whisper", "clip", "siglip", "gpt-neo"], layouts: "`opt`" },
    Models { names: &["roberta", "xlm-roberta", "electra", "layoutlm"], layouts: "`bert`" },
    Models { names: &["phi2", "phi-2"], layouts: "`phi`" },
    Models { names: &["phi3", "phi-3", "phi4", "phi-4"], layouts: "`packed:qkv_proj`" },
    Models { names: &["mpt", "modernbert"], layouts: "`packed:Wqkv` (MPT) or `packed:Wqkv-Wo` (ModernBERT)" },
    Models { names: &["pytorch", "nn.multiheadattention", "multiheadattention"], layouts: "`torch`" },
    Models { names: &["jax", "nnx", "linen"], layouts: "`flax`, or `dense:canonical` and others for `Dense` layers" },
];

/// The spelling of a packed naming, and the names of its two projections.
#[derive(Clone, Copy)]
pub(super) struct PackedNames {
    spelling: &'static str,
    pub packed: &'static str,
    pub output: &'static str,
}

/// Returns the names of a packed projection and of its output projection.
const fn packed(spelling: &'static str, packed: &'static str, output: &'static str) -> PackedNames {
    PackedNames { spelling, packed, output }
}

impl PackedNaming {
    const ALL: [Self; 11] = [
        Self::QkvProj,
        Self::Wqkv,
        Self::WqkvWo,
        Self::QueryKeyValue,
        Self::CAttn,
        Self::Qkv,
        Self::QkvProjection,
        Self::ToQkv,
        Self::ToQkvToOut0,
        Self::AttProj,
        Self::QkvProjOutProj,
    ];

    pub(super) fn names(self) -> PackedNames {
        match self {
            Self::QkvProj => packed("qkv_proj", "qkv_proj", "o_proj"),
            Self::Wqkv => packed("Wqkv", "Wqkv", "out_proj"),
            Self::WqkvWo => packed("Wqkv-Wo", "Wqkv", "Wo"),
            Self::QueryKeyValue => packed("query_key_value", "query_key_value", "dense"),
            Self::CAttn => packed("c_attn", "c_attn", "c_proj"),
            Self::Qkv => packed("qkv", "qkv", "proj"),
            Self::QkvProjection => packed("qkv-projection", "qkv", "projection"),
            Self::ToQkv => packed("to_qkv", "to_qkv", "to_out"),
            Self::ToQkvToOut0 => packed("to_qkv-to_out.0", "to_qkv", "to_out.0"),
            Self::AttProj => packed("att_proj", "att_proj", "attn_out"),
            Self::QkvProjOutProj => packed("qkv_proj-out_proj", "qkv_proj", "out_proj"),
        }
    }
}

impl WeightLayout {
    /// Returns the names of a layout of four linear layers; `None` for the other layouts.
    pub(super) fn linear_names(self) -> Option<LinearNames> {
        let names = match self {
            Self::Canonical => Naming::Canonical.names(),
            Self::Book => Naming::Book.names(),
            Self::Short => Naming::Short.names(),
            Self::D2l => Naming::D2l.names(),
            Self::Bert => DenseNaming::Bert.names(),
            Self::Vit => linear("vit", ["attention.query", "attention.key", "attention.value", "output.dense"]),
            Self::DistilBert => linear("distilbert", ["q_lin", "k_lin", "v_lin", "out_lin"]),
            Self::Opt => DenseNaming::Opt.names(),
            Self::Phi => linear("phi", ["q_proj", "k_proj", "v_proj", "dense"]),
            Self::T5 => DenseNaming::T5.names(),
            Self::Meta => linear("meta", ["wq", "wk", "wv", "wo"]),
            Self::Diffusers => linear("diffusers", ["to_q", "to_k", "to_v", "to_out.0"]),
            Self::XTransformers => linear("x-transformers", ["to_q", "to_k", "to_v", "to_out"]),
            Self::MinGpt => Naming::MinGpt.names(),
            Self::Albert => DenseNaming::Albert.names(),
            Self::InternVl => linear("internvl", ["q_proj", "k_proj", "v_proj", "projection_layer"]),
            Self::Ctrl => linear("ctrl", ["Wq", "Wk", "Wv", "dense"]),
            Self::ModernBertDecoder => linear("modernbert-decoder", ["q_proj", "k_proj", "v_proj", "Wo"]),
            Self::Moshi => linear("moshi", ["q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear"]),
            Self::Nemo => linear("nemo", ["query_net", "key_net", "value_net", "out_projection"]),
            Self::Deberta => linear("deberta", ["self.query_proj", "self.key_proj", "self.value_proj", "output.dense"]),
            Self::Espnet => linear("espnet", ["linear_q", "linear_k", "linear_v", "linear_out"]),
            Self::Mlx => linear("mlx", ["query_proj", "key_proj", "value_proj", "out_proj"]),
            Self::Torchtune => linear("torchtune", ["q_proj", "k_proj", "v_proj", "output_proj"]),
            Self::Kimi => linear("kimi", ["q_proj", "k_proj", "v_proj", "proj"]),
            Self::QwenOmni => linear("qwen-omni", ["q", "k", "v", "proj"]),
            Self::Pix2Struct => linear("pix2struct", ["query", "key", "value", "output"]),
            Self::Sapiens => linear("sapiens", ["wq", "wk", "wv", "proj"]),
            Self::Flax | Self::Keras | Self::KerasH5 | Self::Dense(_) | Self::InOut(_) => return None,
            Self::Raw(..) | Self::StackedHeads(..) | Self::Torch | Self::Conv1d | Self::Packed(..) => return None,
        };
        Some(names)
    }

    /// Returns the names of a layout whose kernels have a dimension of heads; `None` for the other layouts.
    pub(super) fn names_with_heads(self) -> Option<LinearNames> {
        match self {
            Self::Flax => Some(linear("flax", ["query", "key", "value", "out"])),
            Self::Keras => Some(linear("keras", ["query", "key", "value", "attention_output"])),
            Self::KerasH5 => Some(linear("keras-h5", ["query_dense", "key_dense", "value_dense", "output_dense"])),
            _ => None,
        }
    }

    /// Returns the name that the library of this layout has for a parameter that belongs to no projection, by this
    /// crate's name of it.
    pub(crate) fn parameter_name(self, own: String) -> String {
        let name = match (self, own.as_str()) {
            (Self::Flax, "q_norm.weight") => "query_ln.scale",
            (Self::Flax, "k_norm.weight") => "key_ln.scale",
            (Self::Flax, "q_norm.bias") => "query_ln.bias",
            (Self::Flax, "k_norm.bias") => "key_ln.bias",
            (Self::Torchtune, "q_norm.weight") => "q_norm.scale",
            (Self::Torchtune, "k_norm.weight") => "k_norm.scale",
            _ => return own,
        };
        name.to_string()
    }

    /// Returns the names of the parameters of the output projections of all layouts.
    pub(super) fn output_names() -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        for layout in Self::all() {
            for tensor in layout.tensors(0, true).iter().filter(|tensor| tensor.projections == [Output]) {
                names.insert(tensor.name());
                // A plain parameter, as `raw` has one.
                if layout.linear_names().is_some() || matches!(layout, Self::Packed(..)) {
                    names.insert(tensor.module.clone());
                }
            }
        }
        names
    }

    /// Returns every layout.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let orientations = [Orientation::InOut, Orientation::OutIn];
        let mut all = LINEAR.to_vec();
        all.extend([Self::Flax, Self::Keras, Self::KerasH5]);
        all.extend(DenseNaming::ALL.map(Self::Dense));
        all.extend(Naming::ALL.map(Self::InOut));
        for orientation in orientations {
            all.extend(Naming::ALL.map(|naming| Self::Raw(naming, orientation)));
        }
        for storage in [Storage::Linear].into_iter().chain(orientations.map(Storage::Raw)) {
            all.extend(Naming::ALL.map(|naming| Self::StackedHeads(naming, storage)));
        }
        all.extend([Self::Torch, Self::Conv1d]);
        for order in [QkvOrder::ByPart, QkvOrder::ByHead] {
            all.extend(PackedNaming::ALL.map(|naming| Self::Packed(naming, order)));
        }
        all
    }
}

impl fmt::Display for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raw = |orientation: &Orientation| match orientation {
            Orientation::InOut => "raw",
            Orientation::OutIn => "raw-transposed",
        };
        if let Some(names) = self.linear_names().or_else(|| self.names_with_heads()) {
            return f.write_str(names.spelling);
        }
        match self {
            Self::Dense(naming) => write!(f, "dense:{}", naming.names().spelling),
            Self::InOut(naming) => write!(f, "in-out:{}", naming.names().spelling),
            Self::Raw(naming, orientation) => write!(f, "{}:{}", raw(orientation), naming.names().spelling),
            Self::StackedHeads(naming, Storage::Linear) => write!(f, "stacked:{}", naming.names().spelling),
            Self::StackedHeads(naming, Storage::Raw(orientation)) => {
                write!(f, "stacked-{}:{}", raw(orientation), naming.names().spelling)
            }
            Self::Conv1d => f.write_str("conv1d"),
            Self::Packed(naming, order) => {
                let order = if *order == QkvOrder::ByHead { ":by-head" } else { "" };
                write!(f, "packed:{}{order}", naming.names().spelling)
            }
            _ => f.write_str("torch"),
        }
    }
}

impl FromStr for WeightLayout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = Self::all();
        let known: Vec<_> = all.iter().map(ToString::to_string).collect();
        if let Some(index) = known.iter().position(|name| name == text) {
            return Ok(all[index]);
        }
        if let Some(model) = MODELS.iter().find(|model| model.names.contains(&text.to_lowercase().as_str())) {
            bail!("[weight_layout] unknown layout {text:?}, expected that of the files of {text}: {}", model.layouts)
        }
        let first = known[..5].join(", ");
        let expected = || format!("expected one of: {first}, .. ({} in all, `WeightLayout::all()`)", known.len());
        let hint = did_you_mean(text, known.iter().map(String::as_str), expected);
        bail!("[weight_layout] unknown layout {text:?}, {hint}")
    }
}
