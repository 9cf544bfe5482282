//! The layouts of weights: names, packing and order.

use std::fmt;
use std::str::FromStr;

use candle_core::{Error, Result, bail};

use candle_attention_modules::base::did_you_mean;
use candle_attention_modules::linear::Projection::{self, Gate, Key, Output, Query, Value};

/// The layout in which a checkpoint stores the projections of one attention layer.
///
/// Every layout has a spelling, which `Display` writes and `FromStr` reads:
///
/// | spelling | parameters | comes from |
/// | --- | --- | --- |
/// | `canonical` | q_proj, k_proj, v_proj, o_proj | Llama and similar models; [`MultiHeadAttention::new`] reads it |
/// | `book` | W_query, W_key, W_value, out_proj | Raschka, Build a Large Language Model (From Scratch) |
/// | `short` | Wq, Wk, Wv, Wo | |
/// | `d2l` | W_q, W_k, W_v, W_o | Dive into Deep Learning |
/// | `bert` | self.query, self.key, self.value, output.dense | BERT and similar models |
/// | `vit` | attention.query, attention.key, attention.value, output.dense | ViT and similar models in transformers |
/// | `distilbert` | q_lin, k_lin, v_lin, out_lin | DistilBERT |
/// | `opt` | q_proj, k_proj, v_proj, out_proj | OPT, GPT-J, and many others |
/// | `phi` | q_proj, k_proj, v_proj, dense | Phi and Phi-2 |
/// | `t5` | q, k, v, o | T5 and similar models |
/// | `meta` | wq, wk, wv, wo | Meta's own Llama files; their rotary positions are interleaved ([`RopeStyle::Interleaved`]) |
/// | `diffusers` | to_q, to_k, to_v, to_out.0 | diffusers, latent diffusion |
/// | `x-transformers` | to_q, to_k, to_v, to_out; query head h reads key head h % H_kv | x-transformers |
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
/// | `stacked-raw-transposed:short` .. | the same as plain (out, in) parameters | |
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
/// Every packed spelling accepts `:by-head`. A persistent `mask` buffer in the file is passed over.
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
    /// `heads.{i}.<names>`: a module for each head, without an output projection. It loads into one layer.
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

/// The form in which a projection is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Storage {
    /// An `nn.Linear`: `.weight` (out, in) and perhaps `.bias`.
    Linear,
    /// The parameter itself.
    Raw(Orientation),
}

/// The order of the dimensions of a plain parameter.
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
    /// For each key head: its query heads, the key, the value. With a key head for each query head that is (H, 3, D),
    /// as in GPT-NeoX and Bloom; with fewer it is Falcon's grouping.
    ByHead,
}

/// The spelling of a layout, and the names of its four projections.
#[derive(Clone, Copy)]
struct LinearNames {
    spelling: &'static str,
    query: &'static str,
    key: &'static str,
    value: &'static str,
    output: &'static str,
}

/// Returns the names of four projections, which are in the order query, key, value, output.
const fn linear(spelling: &'static str, names: [&'static str; 4]) -> LinearNames {
    let [query, key, value, output] = names;
    LinearNames { spelling, query, key, value, output }
}

/// The layouts of four linear layers, in the order in which they are detected. ALBERT's comes before minGPT's: `query`
/// alone is the inner module of BERT and similar models, whose output projection is outside.
const LINEAR: [WeightLayout; 22] = [
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
];

impl Naming {
    pub(crate) const ALL: [Self; 4] = [Self::Canonical, Self::Book, Self::Short, Self::D2l];

    fn names(self) -> LinearNames {
        match self {
            Self::Canonical => linear("canonical", ["q_proj", "k_proj", "v_proj", "o_proj"]),
            Self::Book => linear("book", ["W_query", "W_key", "W_value", "out_proj"]),
            Self::Short => linear("short", ["Wq", "Wk", "Wv", "Wo"]),
            Self::D2l => linear("d2l", ["W_q", "W_k", "W_v", "W_o"]),
        }
    }
}

/// The spelling of a packed naming, and the names of its two projections.
#[derive(Clone, Copy)]
struct PackedNames {
    spelling: &'static str,
    packed: &'static str,
    output: &'static str,
}

impl PackedNaming {
    const ALL: [Self; 10] = [
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
    ];

    fn names(self) -> PackedNames {
        let (spelling, packed, output) = match self {
            Self::QkvProj => ("qkv_proj", "qkv_proj", "o_proj"),
            Self::Wqkv => ("Wqkv", "Wqkv", "out_proj"),
            Self::WqkvWo => ("Wqkv-Wo", "Wqkv", "Wo"),
            Self::QueryKeyValue => ("query_key_value", "query_key_value", "dense"),
            Self::CAttn => ("c_attn", "c_attn", "c_proj"),
            Self::Qkv => ("qkv", "qkv", "proj"),
            Self::QkvProjection => ("qkv-projection", "qkv", "projection"),
            Self::ToQkv => ("to_qkv", "to_qkv", "to_out"),
            Self::ToQkvToOut0 => ("to_qkv-to_out.0", "to_qkv", "to_out.0"),
            Self::AttProj => ("att_proj", "att_proj", "attn_out"),
        };
        PackedNames { spelling, packed, output }
    }
}

impl WeightLayout {
    /// Returns the names of a layout of four linear layers; `None` for the other layouts.
    fn linear_names(self) -> Option<LinearNames> {
        let names = match self {
            Self::Canonical => Naming::Canonical.names(),
            Self::Book => Naming::Book.names(),
            Self::Short => Naming::Short.names(),
            Self::D2l => Naming::D2l.names(),
            Self::Bert => linear("bert", ["self.query", "self.key", "self.value", "output.dense"]),
            Self::Vit => linear("vit", ["attention.query", "attention.key", "attention.value", "output.dense"]),
            Self::DistilBert => linear("distilbert", ["q_lin", "k_lin", "v_lin", "out_lin"]),
            Self::Opt => linear("opt", ["q_proj", "k_proj", "v_proj", "out_proj"]),
            Self::Phi => linear("phi", ["q_proj", "k_proj", "v_proj", "dense"]),
            Self::T5 => linear("t5", ["q", "k", "v", "o"]),
            Self::Meta => linear("meta", ["wq", "wk", "wv", "wo"]),
            Self::Diffusers => linear("diffusers", ["to_q", "to_k", "to_v", "to_out.0"]),
            Self::XTransformers => linear("x-transformers", ["to_q", "to_k", "to_v", "to_out"]),
            Self::MinGpt => linear("mingpt", ["query", "key", "value", "proj"]),
            Self::Albert => linear("albert", ["query", "key", "value", "dense"]),
            Self::InternVl => linear("internvl", ["q_proj", "k_proj", "v_proj", "projection_layer"]),
            Self::Ctrl => linear("ctrl", ["Wq", "Wk", "Wv", "dense"]),
            Self::ModernBertDecoder => linear("modernbert-decoder", ["q_proj", "k_proj", "v_proj", "Wo"]),
            Self::Moshi => linear("moshi", ["q_proj.linear", "k_proj.linear", "v_proj.linear", "o_proj.linear"]),
            Self::Nemo => linear("nemo", ["query_net", "key_net", "value_net", "out_projection"]),
            Self::Deberta => linear("deberta", ["self.query_proj", "self.key_proj", "self.value_proj", "output.dense"]),
            Self::Espnet => linear("espnet", ["linear_q", "linear_k", "linear_v", "linear_out"]),
            Self::Raw(..) | Self::StackedHeads(..) | Self::Torch | Self::Conv1d | Self::Packed(..) => return None,
        };
        Some(names)
    }

    /// Returns the names of the output projections of all layouts.
    pub(super) fn output_names() -> impl Iterator<Item = &'static str> {
        let of_linear = LINEAR.into_iter().filter_map(Self::linear_names).map(|names| names.output);
        of_linear.chain(PackedNaming::ALL.into_iter().map(|naming| naming.names().output))
    }

    /// Returns every layout.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let orientations = [Orientation::InOut, Orientation::OutIn];
        let mut all = LINEAR.to_vec();
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

    /// Returns the weights and biases of the projections that a layer in this layout may have, in the order in which
    /// PyTorch draws them. Detection, inference of configs, loading and saving go by this list. For a stack they are
    /// the tensors of one head. The layout `torch` has a weight each for queries, keys and values unless their inputs
    /// are of `one_width`.
    #[doc(hidden)]
    pub fn tensors(self, head: usize, one_width: bool) -> Vec<LayoutTensor> {
        if let Some(names) = self.linear_names() {
            return with_gate(of_four(names, "", Kind::Linear));
        }
        match self {
            Self::Raw(naming, orientation) => of_four(naming.names(), "", Kind::Raw(orientation)),
            Self::StackedHeads(naming, storage) => {
                let kind = match storage {
                    Storage::Linear => Kind::Linear,
                    Storage::Raw(orientation) => Kind::Raw(orientation),
                };
                of_four(naming.names(), &format!("heads.{head}."), kind)
            }
            Self::Conv1d => of_packed("c_attn", "c_proj", Kind::Conv1d),
            Self::Packed(naming, _) => {
                let PackedNames { packed, output, .. } = naming.names();
                with_gate(of_packed(packed, output, Kind::Linear))
            }
            _ => of_torch(one_width),
        }
    }

    /// Returns the names of the weight of the query projection, or the first weight that has a part of it, and of the
    /// weight of the output projection. For the layout `torch` they depend on whether inputs are of `one_width`.
    #[doc(hidden)]
    pub fn query_and_output(self, one_width: bool) -> [String; 2] {
        let tensors = self.tensors(0, one_width);
        let weight = |projection| tensors.iter().find(|tensor| tensor.holds(projection)).map(LayoutTensor::name);
        [Query, Output].map(|projection| weight(projection).unwrap_or_default())
    }

    /// Returns whether each head is a module.
    #[doc(hidden)]
    pub fn is_stacked(self) -> bool {
        matches!(self, Self::StackedHeads(..))
    }

    /// Returns whether the modules of this layout register their causal mask as a buffer, `mask`. In other layouts a
    /// tensor of that name is something else.
    #[doc(hidden)]
    pub fn has_mask_buffer(self) -> bool {
        matches!(self, Self::Book | Self::Short | Self::StackedHeads(Naming::Book | Naming::Short, _))
    }
}

/// Returns the tensors of four projections.
fn of_four(names: LinearNames, prefix: &str, kind: Kind) -> Vec<LayoutTensor> {
    let modules: [(&str, &'static [Projection]); 4] =
        [(names.query, &[Query]), (names.key, &[Key]), (names.value, &[Value]), (names.output, &[Output])];
    let of_module = |(name, projections)| LayoutTensor::of_module(format!("{prefix}{name}"), kind, projections);
    modules.into_iter().flat_map(of_module).collect()
}

/// Returns the tensors of a packed projection and an output projection.
fn of_packed(packed: &str, output: &str, kind: Kind) -> Vec<LayoutTensor> {
    let packed = LayoutTensor::of_module(packed, kind, &[Query, Key, Value]);
    packed.into_iter().chain(LayoutTensor::of_module(output, kind, &[Output])).collect()
}

/// Adds the projection of an output gate, which linear layers may have with them.
fn with_gate(mut tensors: Vec<LayoutTensor>) -> Vec<LayoutTensor> {
    tensors.extend(LayoutTensor::of_module(GATE_NAMES[0], Kind::Linear, &[Gate]));
    tensors
}

/// Returns the tensors of `torch.nn.MultiheadAttention`.
fn of_torch(one_width: bool) -> Vec<LayoutTensor> {
    let mut tensors: Vec<_> = LayoutTensor::of_module("out_proj", Kind::OutProj, &[Output]).into();
    let [weight, bias] = LayoutTensor::of_module("in_proj", Kind::InProj, &[Query, Key, Value]);
    if one_width {
        tensors.push(weight);
    } else {
        let each: [(&str, &'static [Projection]); 3] = [("q_proj", &[Query]), ("k_proj", &[Key]), ("v_proj", &[Value])];
        tensors.extend(each.map(|(name, projections)| {
            let [own_weight, _] = LayoutTensor::of_module(name, Kind::InProj, projections);
            own_weight
        }));
    }
    tensors.push(bias);
    tensors
}

/// The names of the projection of an output gate: this crate's, and another that models have.
pub const GATE_NAMES: [&str; 2] = ["gate_proj", "g_proj"];

/// A weight or a bias of a layout.
#[derive(Debug, Clone)]
pub struct LayoutTensor {
    /// The name of the linear layer that has it, or of the plain parameter.
    pub module: String,
    pub(super) kind: Kind,
    /// Whether it is a bias.
    pub is_bias: bool,
    /// The projections whose rows it has.
    pub projections: &'static [Projection],
}

impl LayoutTensor {
    /// Returns a weight and its bias.
    fn of_module(module: impl Into<String>, kind: Kind, projections: &'static [Projection]) -> [Self; 2] {
        let weight = Self { module: module.into(), kind, is_bias: false, projections };
        [weight.clone(), Self { is_bias: true, ..weight }]
    }

    /// Returns the name in a file.
    pub fn name(&self) -> String {
        let suffix = if self.is_bias { "bias" } else { "weight" };
        match self.kind {
            Kind::Raw(_) if !self.is_bias => self.module.clone(),
            Kind::InProj => format!("{}_{suffix}", self.module),
            Kind::Raw(_) | Kind::Linear | Kind::Conv1d | Kind::OutProj => format!("{}.{suffix}", self.module),
        }
    }

    /// Returns whether the tensor has rows of a projection's weight.
    pub fn holds(&self, projection: Projection) -> bool {
        !self.is_bias && self.projections.contains(&projection)
    }

    /// Returns whether the tensor is (in, out).
    pub fn is_transposed(&self) -> bool {
        !self.is_bias && matches!(self.kind, Kind::Conv1d | Kind::Raw(Orientation::InOut))
    }
}

/// The form of a stored projection: a [`Storage`], or that of GPT-2 or `torch.nn.MultiheadAttention`.
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
    /// A linear layer whose bias begins with zeros.
    OutProj,
}

impl fmt::Display for WeightLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let raw = |orientation: &Orientation| match orientation {
            Orientation::InOut => "raw",
            Orientation::OutIn => "raw-transposed",
        };
        if let Some(names) = self.linear_names() {
            return f.write_str(names.spelling);
        }
        match self {
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
        if let Some(at) = known.iter().position(|name| name == text) {
            return Ok(all[at]);
        }
        let first = known[..5].join(", ");
        let first = || format!("expected one of: {first}, .. ({} in all, `WeightLayout::all()`)", known.len());
        let hint = did_you_mean(text, known.iter().map(String::as_str), first);
        bail!("[weight_layout] unknown layout {text:?}, {hint}")
    }
}
