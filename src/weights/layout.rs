//! The naming schemes, as data.

use std::fmt;
use std::str::FromStr;

use candle_core::{Error, Result};

/// How a checkpoint lays out the projections of one attention layer.
///
/// Every layout has a spelling, which `Display` writes and `FromStr` reads:
///
/// | spelling | parameters | comes from |
/// | --- | --- | --- |
/// | `canonical` | q_proj, k_proj, v_proj, o_proj | Llama and its kin; what [`MultiHeadAttention::new`] reads |
/// | `book` | W_query, W_key, W_value, out_proj | Raschka, Build a Large Language Model (From Scratch) |
/// | `short` | Wq, Wk, Wv, Wo | |
/// | `d2l` | W_q, W_k, W_v, W_o | Dive into Deep Learning |
/// | `bert` | self.query, self.key, self.value, output.dense | BERT and its kin |
/// | `vit` | attention.query, attention.key, attention.value, output.dense | ViT and its kin in transformers |
/// | `distilbert` | q_lin, k_lin, v_lin, out_lin | DistilBERT |
/// | `opt` | q_proj, k_proj, v_proj, out_proj | OPT, GPT-J, and many others |
/// | `phi` | q_proj, k_proj, v_proj, dense | Phi and Phi-2 |
/// | `t5` | q, k, v, o | T5 and its kin |
/// | `meta` | wq, wk, wv, wo | Meta's own Llama files; their rotary positions are interleaved ([`RopeStyle::Interleaved`]) |
/// | `diffusers` | to_q, to_k, to_v, to_out.0 | diffusers, latent diffusion |
/// | `x-transformers` | to_q, to_k, to_v, to_out | x-transformers |
/// | `mingpt` | query, key, value, proj | minGPT |
/// | `raw:book` (`:short`, `:d2l`, `:canonical`) | the same names as plain (in, out) parameters, x · W | `nn.Parameter(torch.rand(d_in, d_out))` |
/// | `raw-transposed:book` .. | plain (out, in) parameters, x · Wᵀ | |
/// | `stacked:book` .. | heads.{i}.W_query .., no output projection | a `ModuleList` of single heads |
/// | `stacked-raw:short` .. | heads.{i}.Wq .. as plain (in, out) parameters | |
/// | `stacked-raw-transposed:short` .. | likewise (out, in) | |
/// | `torch` | in_proj_weight (or q_proj_weight, k_proj_weight, v_proj_weight), in_proj_bias, bias_k, bias_v, out_proj | `torch.nn.MultiheadAttention` |
/// | `conv1d` | c_attn, c_proj, transposed | GPT-2 |
/// | `packed:qkv_proj` | qkv_proj, o_proj; rows by part | Phi-3 |
/// | `packed:Wqkv` | Wqkv, out_proj; rows by part | MPT |
/// | `packed:Wqkv-Wo` | Wqkv, Wo; rows by part | ModernBERT |
/// | `packed:query_key_value` | query_key_value, dense; rows by part | ChatGLM |
/// | `packed:query_key_value:by-head` | query_key_value, dense; rows by head | GPT-NeoX, Bloom, Falcon |
/// | `packed:c_attn` | c_attn, c_proj, not transposed; rows by part | nanoGPT, GPT-BigCode with one key head |
/// | `packed:c_attn:by-head` | c_attn, c_proj, not transposed; rows by head | GPT-BigCode |
/// | `packed:qkv` | qkv, proj; rows by part | timm |
/// | `packed:to_qkv` | to_qkv, to_out; rows by part | lucidrains' vit-pytorch (`SimpleViT`) and others |
/// | `packed:to_qkv-to_out.0` | to_qkv, to_out.0; rows by part | lucidrains' vit-pytorch |
///
/// Any packed spelling takes `:by-head`. A persistent `mask` buffer in the file is passed over.
///
/// [`MultiHeadAttention::new`]: crate::MultiHeadAttention::new
/// [`RopeStyle::Interleaved`]: crate::RopeStyle::Interleaved
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightLayout {
    /// q_proj, k_proj, v_proj, o_proj.
    Canonical,
    /// W_query, W_key, W_value, out_proj.
    Book,
    /// Wq, Wk, Wv, Wo.
    Short,
    /// W_q, W_k, W_v, W_o.
    D2l,
    /// self.query, self.key, self.value, output.dense.
    Bert,
    /// attention.query, attention.key, attention.value, output.dense.
    Vit,
    /// q_lin, k_lin, v_lin, out_lin.
    DistilBert,
    /// q_proj, k_proj, v_proj, out_proj.
    Opt,
    /// q_proj, k_proj, v_proj, dense.
    Phi,
    /// q, k, v, o.
    T5,
    /// wq, wk, wv, wo.
    Meta,
    /// to_q, to_k, to_v, to_out.0.
    Diffusers,
    /// to_q, to_k, to_v, to_out.
    XTransformers,
    /// query, key, value, proj.
    MinGpt,
    /// Plain parameters without `.weight`, stored (in, out) or (out, in), without biases.
    Raw(Naming, Orientation),
    /// `heads.{i}.<names>`, one single-head module after the other, without an output projection; loads into one layer.
    StackedHeads(Naming, Storage),
    /// The packed in_proj of `torch.nn.MultiheadAttention`.
    Torch,
    /// GPT-2's transposed c_attn and c_proj.
    Conv1d,
    /// Query, key and value rows in one weight.
    Packed(PackedNaming, QkvOrder),
}

/// Parameter names of the query, key, value and output projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Naming {
    /// q_proj, k_proj, v_proj, o_proj.
    Canonical,
    /// W_query, W_key, W_value, out_proj.
    Book,
    /// Wq, Wk, Wv, Wo.
    Short,
    /// W_q, W_k, W_v, W_o.
    D2l,
}

/// How a projection is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Storage {
    /// An `nn.Linear`: `.weight` (out, in) and perhaps `.bias`.
    Linear,
    /// The parameter itself.
    Raw(Orientation),
}

/// Which dimension of a plain parameter comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Orientation {
    /// (in, out), for x · W.
    InOut,
    /// (out, in), for x · Wᵀ.
    OutIn,
}

/// Parameter names of a packed projection and its output projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PackedNaming {
    /// qkv_proj, o_proj.
    QkvProj,
    /// Wqkv, out_proj.
    Wqkv,
    /// Wqkv, Wo.
    WqkvWo,
    /// query_key_value, dense.
    QueryKeyValue,
    /// c_attn, c_proj.
    CAttn,
    /// qkv, proj.
    Qkv,
    /// to_qkv, to_out.
    ToQkv,
    /// to_qkv, to_out.0.
    ToQkvToOut0,
}

/// The order of rows in a packed weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QkvOrder {
    /// All queries, then all keys, then all values.
    ByPart,
    /// For each key head: its query heads, the key, the value. With as many key heads as query heads that is
    /// (H, 3, D), as in GPT-NeoX and Bloom; with fewer it is Falcon's grouping.
    ByHead,
}

/// The layouts of four linear layers: spelling, and the names of query, key, value and output.
const LINEAR: [(WeightLayout, &str, [&str; 4]); 14] = [
    (WeightLayout::Canonical, "canonical", ["q_proj", "k_proj", "v_proj", "o_proj"]),
    (WeightLayout::Book, "book", ["W_query", "W_key", "W_value", "out_proj"]),
    (WeightLayout::Short, "short", ["Wq", "Wk", "Wv", "Wo"]),
    (WeightLayout::D2l, "d2l", ["W_q", "W_k", "W_v", "W_o"]),
    (WeightLayout::Bert, "bert", ["self.query", "self.key", "self.value", "output.dense"]),
    (WeightLayout::Vit, "vit", ["attention.query", "attention.key", "attention.value", "output.dense"]),
    (WeightLayout::DistilBert, "distilbert", ["q_lin", "k_lin", "v_lin", "out_lin"]),
    (WeightLayout::Opt, "opt", ["q_proj", "k_proj", "v_proj", "out_proj"]),
    (WeightLayout::Phi, "phi", ["q_proj", "k_proj", "v_proj", "dense"]),
    (WeightLayout::T5, "t5", ["q", "k", "v", "o"]),
    (WeightLayout::Meta, "meta", ["wq", "wk", "wv", "wo"]),
    (WeightLayout::Diffusers, "diffusers", ["to_q", "to_k", "to_v", "to_out.0"]),
    (WeightLayout::XTransformers, "x-transformers", ["to_q", "to_k", "to_v", "to_out"]),
    (WeightLayout::MinGpt, "mingpt", ["query", "key", "value", "proj"]),
];

/// The packed namings: spelling, and the names of the packed and the output projection.
const PACKED: [(PackedNaming, &str, [&str; 2]); 8] = [
    (PackedNaming::QkvProj, "qkv_proj", ["qkv_proj", "o_proj"]),
    (PackedNaming::Wqkv, "Wqkv", ["Wqkv", "out_proj"]),
    (PackedNaming::WqkvWo, "Wqkv-Wo", ["Wqkv", "Wo"]),
    (PackedNaming::QueryKeyValue, "query_key_value", ["query_key_value", "dense"]),
    (PackedNaming::CAttn, "c_attn", ["c_attn", "c_proj"]),
    (PackedNaming::Qkv, "qkv", ["qkv", "proj"]),
    (PackedNaming::ToQkv, "to_qkv", ["to_qkv", "to_out"]),
    (PackedNaming::ToQkvToOut0, "to_qkv-to_out.0", ["to_qkv", "to_out.0"]),
];

impl Naming {
    pub(crate) const ALL: [Self; 4] = [Self::Canonical, Self::Book, Self::Short, Self::D2l];

    fn layout(self) -> WeightLayout {
        match self {
            Self::Canonical => WeightLayout::Canonical,
            Self::Book => WeightLayout::Book,
            Self::Short => WeightLayout::Short,
            Self::D2l => WeightLayout::D2l,
        }
    }

    /// Query, key, value, output.
    pub(crate) fn names(self) -> [&'static str; 4] {
        self.layout().linear().map_or_else(Default::default, |(_, names)| names)
    }
}

impl PackedNaming {
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        PACKED.iter().map(|(naming, ..)| *naming)
    }

    /// The packed projection and the output projection.
    pub(crate) fn names(self) -> [&'static str; 2] {
        PACKED.iter().find(|(naming, ..)| *naming == self).map_or_else(Default::default, |(.., names)| *names)
    }
}

impl WeightLayout {
    /// The layouts of four linear layers, each under a name of its own, and these names.
    pub(super) fn all_linear() -> impl Iterator<Item = (Self, [&'static str; 4])> {
        LINEAR.iter().map(|(layout, _, names)| (*layout, *names))
    }

    /// The names of every layout's output projection.
    pub(super) fn output_names() -> impl Iterator<Item = &'static str> {
        LINEAR.iter().map(|(.., names)| names[3]).chain(PACKED.iter().map(|(.., names)| names[1]))
    }

    /// Every layout.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut all: Vec<_> = Self::all_linear().map(|(layout, _)| layout).collect();
        for orientation in [Orientation::InOut, Orientation::OutIn] {
            all.extend(Naming::ALL.map(|naming| Self::Raw(naming, orientation)));
        }
        for storage in [Storage::Linear, Storage::Raw(Orientation::InOut), Storage::Raw(Orientation::OutIn)] {
            all.extend(Naming::ALL.map(|naming| Self::StackedHeads(naming, storage)));
        }
        all.extend([Self::Torch, Self::Conv1d]);
        for order in [QkvOrder::ByPart, QkvOrder::ByHead] {
            all.extend(PackedNaming::all().map(|naming| Self::Packed(naming, order)));
        }
        all
    }

    /// Spelling and names of a layout of four linear layers.
    fn linear(self) -> Option<(&'static str, [&'static str; 4])> {
        LINEAR.iter().find(|(layout, ..)| *layout == self).map(|(_, spelling, names)| (*spelling, *names))
    }

    /// How the layout keeps its projections: what detection, inference, loading and saving go by.
    pub(super) fn form(self) -> Form {
        match self {
            Self::Raw(naming, orientation) => Form::Separate(naming.names(), Kind::Raw(orientation)),
            Self::StackedHeads(naming, Storage::Linear) => Form::Stacked(naming.names(), Kind::Linear),
            Self::StackedHeads(naming, Storage::Raw(way)) => Form::Stacked(naming.names(), Kind::Raw(way)),
            Self::Conv1d => Form::Packed(["c_attn", "c_proj"], Kind::Conv1d, QkvOrder::ByPart),
            Self::Packed(naming, order) => Form::Packed(naming.names(), Kind::Linear, order),
            _ => self.linear().map_or(Form::Torch, |(_, names)| Form::Separate(names, Kind::Linear)),
        }
    }

    /// A parameter that every layer in this layout has: its query projection, or the first part of it.
    pub(crate) fn query_parameter(self) -> String {
        match self.form() {
            Form::Separate([query, ..], kind) => kind.weight(query),
            Form::Stacked([query, ..], kind) => kind.weight(&format!("heads.0.{query}")),
            Form::Packed([qkv, _], kind, _) => kind.weight(qkv),
            // `torch.nn.MultiheadAttention` over one input width.
            Form::Torch => "in_proj_weight".to_string(),
        }
    }

    /// Whether the modules of this layout register their causal mask as a buffer, `mask`; elsewhere a tensor of that
    /// name is something else.
    pub(super) fn has_mask_buffer(self) -> bool {
        matches!(self, Self::Book | Self::Short | Self::StackedHeads(Naming::Book | Naming::Short, _))
    }
}

/// How a layout keeps its projections.
pub(super) enum Form {
    /// Query, key, value and output, each under its name.
    Separate([&'static str; 4], Kind),
    /// Query, key and value of each head below `heads.{i}`; no output projection.
    Stacked([&'static str; 4], Kind),
    /// Query, key and value in one, and the output projection.
    Packed([&'static str; 2], Kind, QkvOrder),
    /// That of `torch.nn.MultiheadAttention`.
    Torch,
}

/// How one projection is stored: a [`Storage`], or GPT-2's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `.weight` (out, in) and perhaps `.bias`.
    Linear,
    /// `.weight` (in, out) and perhaps `.bias`.
    Conv1d,
    /// The weight itself.
    Raw(Orientation),
}

impl Kind {
    /// The name of the weight of a projection.
    pub fn weight(self, projection: &str) -> String {
        if let Self::Raw(_) = self { projection.to_string() } else { format!("{projection}.weight") }
    }

    /// Whether the weight is (in, out).
    pub fn is_transposed(self) -> bool {
        matches!(self, Self::Conv1d | Self::Raw(Orientation::InOut))
    }
}

impl fmt::Display for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raw = |orientation: &Orientation| match orientation {
            Orientation::InOut => "raw",
            Orientation::OutIn => "raw-transposed",
        };
        match self {
            Self::Raw(naming, orientation) => write!(f, "{}:{}", raw(orientation), naming.layout()),
            Self::StackedHeads(naming, Storage::Linear) => write!(f, "stacked:{}", naming.layout()),
            Self::StackedHeads(naming, Storage::Raw(orientation)) => {
                write!(f, "stacked-{}:{}", raw(orientation), naming.layout())
            }
            Self::Torch => f.write_str("torch"),
            Self::Conv1d => f.write_str("conv1d"),
            Self::Packed(naming, order) => {
                let spelling =
                    PACKED.iter().find(|(other, ..)| other == naming).map_or("", |(_, spelling, _)| spelling);
                write!(f, "packed:{spelling}{}", if *order == QkvOrder::ByHead { ":by-head" } else { "" })
            }
            linear => f.write_str(linear.linear().map_or("", |(spelling, _)| spelling)),
        }
    }
}

impl FromStr for WeightLayout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Self::all().into_iter().find(|layout| layout.to_string() == text).ok_or_else(|| {
            let known: Vec<_> = Self::all().iter().map(ToString::to_string).collect();
            Error::msg(format!("[weight_layout] unknown layout {text:?}, expected one of: {}", known.join(", ")))
        })
    }
}
