//! The naming schemes, as data.

use std::fmt;
use std::str::FromStr;

use candle_core::{Error, Result, bail};

use candle_attention_modules::base::did_you_mean;
use candle_attention_modules::linear::Projection::{self, Gate, Key, Output, Query, Value};

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
/// | `albert` | query, key, value, dense | ALBERT |
/// | `internvl` | q_proj, k_proj, v_proj, projection_layer | InternVL's and Janus' images |
/// | `ctrl` | Wq, Wk, Wv, dense | CTRL |
/// | `modernbert-decoder` | q_proj, k_proj, v_proj, Wo | ModernBERT as a decoder |
/// | `moshi` | q_proj.linear, k_proj.linear, v_proj.linear, o_proj.linear | Moshi |
/// | `nemo` | query_net, key_net, value_net, out_projection | NeMo's decoders, Cohere's transcription |
/// | `deberta` | self.query_proj, self.key_proj, self.value_proj, output.dense | DeBERTa v2 and v3 |
/// | `espnet` | linear_q, linear_k, linear_v, linear_out | ESPnet's conformers, wav2vec 2.0's in transformers |
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
/// | `packed:att_proj` | att_proj, attn_out; rows by part | Molmo |
/// | `packed:query_key_value` | query_key_value, dense; rows by part | ChatGLM |
/// | `packed:query_key_value:by-head` | query_key_value, dense; rows by head | GPT-NeoX, Bloom, Falcon |
/// | `packed:c_attn` | c_attn, c_proj, not transposed; rows by part | nanoGPT, GPT-BigCode with one key head |
/// | `packed:c_attn:by-head` | c_attn, c_proj, not transposed; rows by head | GPT-BigCode |
/// | `packed:qkv` | qkv, proj; rows by part | timm |
/// | `packed:qkv-projection` | qkv, projection; rows by part | BLIP's images |
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
    /// query, key, value, dense.
    Albert,
    /// q_proj, k_proj, v_proj, projection_layer.
    InternVl,
    /// Wq, Wk, Wv, dense.
    Ctrl,
    /// q_proj, k_proj, v_proj, Wo.
    ModernBertDecoder,
    /// q_proj.linear, k_proj.linear, v_proj.linear, o_proj.linear.
    Moshi,
    /// query_net, key_net, value_net, out_projection.
    Nemo,
    /// self.query_proj, self.key_proj, self.value_proj, output.dense.
    Deberta,
    /// linear_q, linear_k, linear_v, linear_out.
    Espnet,
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
    /// qkv, projection.
    QkvProjection,
    /// to_qkv, to_out.
    ToQkv,
    /// to_qkv, to_out.0.
    ToQkvToOut0,
    /// att_proj, attn_out.
    AttProj,
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
static LINEAR: [(WeightLayout, &str, [&str; 4]); 22] = [
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
    // Before minGPT's: `query` alone is the inner module of BERT and its kin, whose output projection is outside.
    (WeightLayout::Albert, "albert", ["query", "key", "value", "dense"]),
    (WeightLayout::MinGpt, "mingpt", ["query", "key", "value", "proj"]),
    (WeightLayout::InternVl, "internvl", ["q_proj", "k_proj", "v_proj", "projection_layer"]),
    (WeightLayout::Ctrl, "ctrl", ["Wq", "Wk", "Wv", "dense"]),
    (WeightLayout::ModernBertDecoder, "modernbert-decoder", ["q_proj", "k_proj", "v_proj", "Wo"]),
    (WeightLayout::Moshi, "moshi", ["q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear"]),
    (WeightLayout::Nemo, "nemo", ["query_net", "key_net", "value_net", "out_projection"]),
    (WeightLayout::Deberta, "deberta", ["self.query_proj", "self.key_proj", "self.value_proj", "output.dense"]),
    (WeightLayout::Espnet, "espnet", ["linear_q", "linear_k", "linear_v", "linear_out"]),
];

/// The packed namings, in the order of their type: spelling, and the names of the packed and the output projection.
static PACKED: [(PackedNaming, &str, [&str; 2]); 10] = [
    (PackedNaming::QkvProj, "qkv_proj", ["qkv_proj", "o_proj"]),
    (PackedNaming::Wqkv, "Wqkv", ["Wqkv", "out_proj"]),
    (PackedNaming::WqkvWo, "Wqkv-Wo", ["Wqkv", "Wo"]),
    (PackedNaming::QueryKeyValue, "query_key_value", ["query_key_value", "dense"]),
    (PackedNaming::CAttn, "c_attn", ["c_attn", "c_proj"]),
    (PackedNaming::Qkv, "qkv", ["qkv", "proj"]),
    (PackedNaming::QkvProjection, "qkv-projection", ["qkv", "projection"]),
    (PackedNaming::ToQkv, "to_qkv", ["to_qkv", "to_out"]),
    (PackedNaming::ToQkvToOut0, "to_qkv-to_out.0", ["to_qkv", "to_out.0"]),
    (PackedNaming::AttProj, "att_proj", ["att_proj", "attn_out"]),
];

impl Naming {
    pub(crate) const ALL: [Self; 4] = [Self::Canonical, Self::Book, Self::Short, Self::D2l];

    /// Its layout of linear layers, spelling, and names of query, key, value and output: the first rows of [`LINEAR`].
    fn row(self) -> &'static (WeightLayout, &'static str, [&'static str; 4]) {
        &LINEAR[self as usize]
    }
}

impl WeightLayout {
    /// The names of every layout's output projection.
    pub(super) fn output_names() -> impl Iterator<Item = &'static str> {
        LINEAR.iter().map(|(.., names)| names[3]).chain(PACKED.iter().map(|(.., names)| names[1]))
    }

    /// Every layout.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let ways = [Orientation::InOut, Orientation::OutIn];
        let raw = ways.into_iter().flat_map(|way| Naming::ALL.map(|naming| Self::Raw(naming, way)));
        let storages = [Storage::Linear].into_iter().chain(ways.map(Storage::Raw));
        let stacked = storages.flat_map(|storage| Naming::ALL.map(|naming| Self::StackedHeads(naming, storage)));
        let orders = [QkvOrder::ByPart, QkvOrder::ByHead].into_iter();
        let packed = orders.flat_map(|order| PACKED.iter().map(move |(naming, ..)| Self::Packed(*naming, order)));
        let linear = LINEAR.iter().map(|(layout, ..)| *layout);
        linear.chain(raw).chain(stacked).chain([Self::Torch, Self::Conv1d]).chain(packed).collect()
    }

    /// The weights and biases of the projections, as far as a layer has them, in the order in which PyTorch draws them:
    /// what detection, inference, loading and saving go by. Of a stack those of one head; `torch` has a weight each for
    /// queries, keys and values where their inputs are of several widths.
    #[doc(hidden)]
    pub fn tensors(self, head: usize, one_width: bool) -> Vec<LayoutTensor> {
        // Of query, key, value and output, or of the first three together and of output.
        let (names, kind): (&[&str], _) = match self {
            Self::Raw(naming, way) | Self::StackedHeads(naming, Storage::Raw(way)) => (&naming.row().2, Kind::Raw(way)),
            Self::StackedHeads(naming, Storage::Linear) => (&naming.row().2, Kind::Linear),
            Self::Conv1d => (&["c_attn", "c_proj"], Kind::Conv1d),
            Self::Packed(naming, _) => (&PACKED[naming as usize].2, Kind::Linear),
            _ => match LINEAR.iter().find(|(layout, ..)| *layout == self) {
                Some((.., names)) => (names, Kind::Linear),
                None => return torch(one_width),
            },
        };
        let prefix = if self.is_stacked() { format!("heads.{head}.") } else { String::new() };
        // Linear layers may be beside a gate of their kind.
        let gate = if kind == Kind::Linear && !self.is_stacked() { Some((&PLACES[4..], &GATE_NAMES[0])) } else { None };
        let modules = PLACES[..4].chunks(if names.len() == 2 { 3 } else { 1 }).zip(names).chain(gate);
        modules.flat_map(|(places, name)| LayoutTensor::of_module(format!("{prefix}{name}"), kind, places)).collect()
    }

    /// The weights of the query projection, or the first of them, and of the output projection; for inputs of
    /// `one_width` or of several, which makes a difference to `torch`.
    #[doc(hidden)]
    pub fn query_and_output(self, one_width: bool) -> [String; 2] {
        let tensors = self.tensors(0, one_width);
        let weight = |place| tensors.iter().filter(|tensor| tensor.holds(place)).map(LayoutTensor::name).next();
        [Query, Output].map(|place| weight(place).unwrap_or_default())
    }

    /// Whether each head is a module of its own.
    #[doc(hidden)]
    pub fn is_stacked(self) -> bool {
        matches!(self, Self::StackedHeads(..))
    }

    /// Whether the modules of this layout register their causal mask as a buffer, `mask`; elsewhere a tensor of that
    /// name is something else.
    #[doc(hidden)]
    pub fn has_mask_buffer(self) -> bool {
        matches!(self, Self::Book | Self::Short | Self::StackedHeads(Naming::Book | Naming::Short, _))
    }
}

/// Those of `torch.nn.MultiheadAttention`.
fn torch(one_width: bool) -> Vec<LayoutTensor> {
    let out = LayoutTensor::of_module("out_proj", Kind::OutProj, &PLACES[3..4]);
    let [joint, bias] = LayoutTensor::of_module("in_proj", Kind::InProj, &PLACES[..3]);
    let each = PLACES.chunks(1).zip(["q_proj", "k_proj", "v_proj"]);
    let each = each.map(|(places, name)| LayoutTensor { module: name.into(), places, ..joint.clone() });
    let weights = if one_width { vec![joint.clone()] } else { each.collect() };
    out.into_iter().chain(weights).chain([bias]).collect()
}

/// The names of a gate's own projection, the first of which is the crate's own.
pub const GATE_NAMES: [&str; 2] = ["gate_proj", "g_proj"];

/// The projections in the order in which layouts name them.
static PLACES: [Projection; 5] = [Query, Key, Value, Output, Gate];

/// A weight or a bias of a layout.
#[derive(Debug, Clone)]
pub struct LayoutTensor {
    /// The linear layer that has it, or the plain parameter.
    pub module: String,
    pub(super) kind: Kind,
    /// Whether it is a bias.
    pub is_bias: bool,
    /// The projections whose rows it holds.
    pub places: &'static [Projection],
}

impl LayoutTensor {
    /// A weight and its bias.
    fn of_module(module: impl Into<String>, kind: Kind, places: &'static [Projection]) -> [Self; 2] {
        let weight = Self { module: module.into(), kind, is_bias: false, places };
        [weight.clone(), Self { is_bias: true, ..weight }]
    }

    /// As a file has it.
    pub fn name(&self) -> String {
        let part = if self.is_bias { "bias" } else { "weight" };
        match self.kind {
            Kind::Raw(_) if !self.is_bias => self.module.clone(),
            Kind::InProj => format!("{}_{part}", self.module),
            _ => format!("{}.{part}", self.module),
        }
    }

    /// Whether it holds rows of a projection's weight.
    pub fn holds(&self, place: Projection) -> bool {
        !self.is_bias && self.places.contains(&place)
    }

    /// Whether it is (in, out).
    pub fn is_transposed(&self) -> bool {
        !self.is_bias && matches!(self.kind, Kind::Conv1d | Kind::Raw(Orientation::InOut))
    }
}

/// How projections are stored: a [`Storage`], or as GPT-2 or `torch.nn.MultiheadAttention` has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `.weight` (out, in) and perhaps `.bias`.
    Linear,
    /// `.weight` (in, out) and perhaps `.bias`.
    Conv1d,
    /// The weight itself.
    Raw(Orientation),
    /// `_weight` (out, in), and perhaps `in_proj_bias` for all of q, k and v.
    InProj,
    /// As a linear layer, whose bias begins with zeros.
    OutProj,
}

impl fmt::Display for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raw = |orientation: &Orientation| match orientation {
            Orientation::InOut => "raw",
            Orientation::OutIn => "raw-transposed",
        };
        match self {
            Self::Raw(naming, orientation) => write!(f, "{}:{}", raw(orientation), naming.row().1),
            Self::StackedHeads(naming, Storage::Linear) => write!(f, "stacked:{}", naming.row().1),
            Self::StackedHeads(naming, Storage::Raw(way)) => write!(f, "stacked-{}:{}", raw(way), naming.row().1),
            Self::Conv1d => f.write_str("conv1d"),
            Self::Packed(naming, order) => {
                let order = if *order == QkvOrder::ByHead { ":by-head" } else { "" };
                write!(f, "packed:{}{order}", PACKED[*naming as usize].1)
            }
            _ => f.write_str(LINEAR.iter().find(|(layout, ..)| layout == self).map_or("torch", |(_, name, _)| name)),
        }
    }
}

impl FromStr for WeightLayout {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let all = Self::all();
        let known: Vec<_> = all.iter().map(ToString::to_string).collect();
        if let Some(at) = known.iter().position(|name| name == text) {
            return Ok(all[at]);
        }
        let first = known[..5].join(", ");
        let first = || format!("expected one of: {first}, .. ({} in all, `WeightLayout::all()`)", known.len());
        let hint = did_you_mean(text, known.iter().map(String::as_str), first);
        bail!("[weight_layout] unknown layout {text:?}, {hint}")
    }
}
