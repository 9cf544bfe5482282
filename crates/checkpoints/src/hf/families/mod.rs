//! The table of model families. A row is a family, and its columns describe the family's attention. A family that needs
//! nothing new is one row: it has the fields and defaults of its configuration class in transformers, and a column
//! that is not set is that of the row it extends. The files of rows are formatted as a table.

#[rustfmt::skip]
mod decoders;
#[rustfmt::skip]
mod encoders;
#[rustfmt::skip]
mod gpts;
#[rustfmt::skip]
mod images_and_sound;
#[rustfmt::skip]
mod on_axes;
#[rustfmt::skip]
mod segmenters;

use candle_core::Result;

use super::columns::{Number, columns};
use super::compressed::CompressedKeys;
use super::fields::{Aliases, Fields};
use super::latent::Latent;
use super::linear::Linear;
use super::names::{DECODER_LAYERS, HEADS, HIDDEN, LAYERS, MODEL, ModuleNames, PATTERN, at};
use super::positions::Positions;
use super::rope::{Rope, rope};
use super::windows::{Stages, Window};
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_core::{MultiHeadAttentionConfig, WeightLayout};
use candle_attention_modules::gate::OutputGate;
use candle_attention_modules::norm::{QkNormKind, QkNormScope};

/// The prefixes of the text of a model of texts and images.
const TEXT_MODEL: &[&str] = &["text_model.", ""];

const QKV: WeightLayout = WeightLayout::Packed(PackedNaming::Qkv, QkvOrder::ByPart);
const QKV_PROJ: WeightLayout = WeightLayout::Packed(PackedNaming::QkvProj, QkvOrder::ByPart);
const WQKV: WeightLayout = WeightLayout::Packed(PackedNaming::Wqkv, QkvOrder::ByPart);

/// The rotary positions of ModernBERT, as an encoder and as a decoder.
const MODERNBERT_ROPE: Rope = rope(160_000.0, 8192).theta(Number("global_rope_theta", 160_000.0));
const MODERNBERT_WINDOWED_ROPE: Rope =
    rope(10_000.0, 8192).theta(Number("local_rope_theta", 10_000.0)).shares_scaling(true);

/// Returns every row.
pub(super) fn families() -> impl Iterator<Item = &'static Family> {
    let decoders = [
        decoders::ROWS,
        decoders::GATED,
        decoders::HYBRID,
        decoders::LATENT,
        decoders::COMPRESSED,
        decoders::GEMMAS,
        gpts::ROWS,
    ];
    let others = [
        encoders::ROWS,
        encoders::BY_DISTANCE,
        on_axes::ROWS,
        images_and_sound::ROWS,
        images_and_sound::IN_WINDOWS,
        images_and_sound::IN_STAGES,
        segmenters::ROWS,
        encoders::WITH_DECODERS,
    ];
    decoders.into_iter().chain(others).flatten()
}

const DECODER: Family = Family::DECODER;
const LLAMA: Family = DECODER.of("llama").bias(Bias::AllIf("attention_bias", false)).rope(rope(10_000.0, 2048));
/// The row that most encoders extend: a key head for each query head, biases, and attention to all keys.
const ENCODER: Family =
    DECODER.layers(12).width(768).query_heads(12).heads(Heads::Equal).bias(Bias::All).mask(Mask::Encoder);

const fn rms_per_head(eps: f64) -> Norm {
    Norm::RMS_PER_HEAD.eps(Number("rms_norm_eps", eps))
}

const fn layer_norm(kind: QkNormKind, scope: QkNormScope) -> Norm {
    Norm::RMS_PER_HEAD.kind(kind).scope(scope).eps(Number("layer_norm_eps", 1e-5))
}

columns! {
    /// A family of models: a value of `model_type`, how its `config.json` describes attention, and where its
    /// checkpoints store it. Defaults are taken from the class in transformers.
    struct Family,
    /// The row that most decoders extend: grouped heads without positions or biases, causal.
    first DECODER:
    /// The value of `model_type`.
    model_type: &'static str = "",
    /// Other names of fields.
    aliases: Aliases = &[],
    /// The names of the attention module of a layer, and those that other checkpoints use.
    modules: [Option<ModuleNames>; 2] = [Some(at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical)), None],
    /// The fields of the sizes.
    size_names: SizeNames = SizeNames::USUAL,
    /// Whether the usual names are aliases of the fields of the sizes. They are not in the decoder of a model with an
    /// encoder, where they name the encoder's sizes.
    usual_names: bool = true,
    /// The defaults of the sizes.
    default_sizes: Sizes = Sizes { layers: 32, embed_dim: 4096, num_heads: 32 },
    /// Whether transformers has such defaults. It has none for a model that it does not know by this name.
    has_default_sizes: bool = true,
    /// The number of key heads and the width of heads.
    heads: Heads = Heads::Grouped(None, None),
    /// Whether heads are always `embed_dim / num_heads` wide, also if `head_dim` is another number.
    head_dim_follows: bool = false,
    /// The dropout of the weights; null is 0.
    dropout: Number = Number("attention_dropout", 0.0),
    /// The projections that have biases.
    bias: Bias = Bias::None,
    /// The layers that have a window.
    window: Window = Window::None,
    /// The keys that a layer attends to.
    mask: Mask = Mask::Causal,
    /// Whether layers that project values normalise them, without a weight.
    value_norm: bool = false,
    /// Whether each head has a sink: a learned logit in the softmax.
    sinks: bool = false,
    /// Fields that change the output, and the one value that is supported, in JSON.
    only: &'static [(&'static str, &'static str)] = &[],
    /// The place of the relative bias, or of DeBERTa's vectors of distances, if the family has one.
    shared_place: SharedPlace = SharedPlace::FirstLayer,
    /// Attention of the model besides the self-attention of its layers.
    named: &'static [NamedAttention] = &[],
    /// The number of attention modules of a layer, which count as layers.
    attentions_of_layer: usize = 1,
    /// Whether the model has the module once, and not in each layer.
    once: bool = false,
    /// Changes of the config that no other column describes, in this order.
    rules: &'static [Rule] = &[],
    [None unless set]
    /// A module inside of the attention module, with which the caller changes the input of keys and values.
    of_caller: &'static str,
    /// The name of the sinks in checkpoints, where it is not `sinks`.
    sinks_name: &'static str,
    /// The field with the config of the text, in a model that has other parts too.
    section: &'static str,
    /// The stages of layers, if there are any. The default width is then that of the first stage.
    stages: Stages,
    /// The parameter of the keys' bias below the attention module, where some files with a bias of queries have it and
    /// others do not.
    key_bias: &'static str,
    /// The rotary positions.
    rope: Rope,
    /// The rotary positions of layers with a window, where they differ. `rope` is then that of layers without.
    windowed_rope: Rope,
    /// The norm of queries and keys.
    qk_norm: Norm,
    /// The gate of the attention output.
    gate: OutputGate,
    /// Relative positions, which change the scores.
    positions: Positions,
    /// The scale of the scores.
    scale: Scale,
    /// The default of `num_kv_shared_layers`: the number of last layers, which read keys and values of earlier layers.
    kv_shared_layers: usize,
    /// The self-attention of the decoder of a model with an encoder, with the sizes and the dropout of this row.
    decoder: &'static Family,
    /// The attention of the decoder to the encoder's outputs, with the sizes and the dropout of this row.
    cross: &'static Family,
    /// The default sizes of the decoder, where they differ.
    default_decoder_sizes: Sizes,
    /// Latent attention, for which most columns have no use.
    latent: Latent,
    /// Attention to compressed keys, for which most columns have no use.
    compressed: CompressedKeys,
    /// Layers of linear attention among the others.
    linear: Linear,
}

/// Attention of a model besides the self-attention of its layers: of another stack of layers, or to other inputs.
#[derive(Clone, Copy)]
pub(super) struct NamedAttention {
    /// The name by which callers request it, mostly that of its module.
    pub name: &'static str,
    pub family: Family,
}

/// A change of the config by fields that no column describes.
pub(super) type Rule = fn(&Fields, MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig>;

/// The names of the fields of a model's sizes.
#[derive(Clone, Copy)]
pub(super) struct SizeNames {
    /// The number of layers, or of the layers of each stage.
    pub layers: &'static str,
    pub embed_dim: &'static str,
    pub num_heads: &'static str,
}

impl SizeNames {
    /// The names that most families use.
    pub const USUAL: Self = Self { layers: LAYERS, embed_dim: HIDDEN, num_heads: HEADS };

    /// Returns the usual names that are aliases of these: (usual, own).
    pub fn aliases(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let usual = Self::USUAL;
        let pairs = [(usual.layers, self.layers), (usual.embed_dim, self.embed_dim), (usual.num_heads, self.num_heads)];
        pairs.into_iter().filter(|(alias, own)| alias != own)
    }
}

/// A model's sizes.
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    /// The number of layers.
    pub layers: usize,
    pub embed_dim: usize,
    pub num_heads: usize,
}

impl Family {
    /// Sets the field of the number of layers.
    pub const fn layers_from(self, layers: &'static str) -> Self {
        self.size_names(SizeNames { layers, ..self.size_names })
    }

    /// Sets the field of `embed_dim`.
    pub const fn width_from(self, embed_dim: &'static str) -> Self {
        self.size_names(SizeNames { embed_dim, ..self.size_names })
    }

    /// Sets the field of `num_heads`.
    pub const fn query_heads_from(self, num_heads: &'static str) -> Self {
        self.size_names(SizeNames { num_heads, ..self.size_names })
    }

    /// Sets the default of the number of layers.
    pub const fn layers(self, layers: usize) -> Self {
        self.default_sizes(Sizes { layers, ..self.default_sizes })
    }

    /// Sets the default of `embed_dim`.
    pub const fn width(self, embed_dim: usize) -> Self {
        self.default_sizes(Sizes { embed_dim, ..self.default_sizes })
    }

    /// Sets the default of `num_heads`.
    pub const fn query_heads(self, num_heads: usize) -> Self {
        self.default_sizes(Sizes { num_heads, ..self.default_sizes })
    }

    /// Begins a row that extends this one.
    pub const fn of(self, model_type: &'static str) -> Self {
        self.model_type(model_type)
    }

    /// Sets the fields `num_key_value_heads`, with a default, and `head_dim`, which follows from the other sizes if it
    /// is not given.
    pub const fn kv_heads(self, default: usize) -> Self {
        self.heads(Heads::Grouped(Some(default), None))
    }

    /// Sets the fields `num_key_value_heads` and `head_dim`, with defaults of both.
    pub const fn grouped(self, kv_heads: usize, head_dim: usize) -> Self {
        self.heads(Heads::Grouped(Some(kv_heads), Some(head_dim)))
    }

    /// Sets the default of `head_dim`.
    pub const fn head_dim(self, default: usize) -> Self {
        match self.heads {
            Heads::Grouped(kv_heads, _) => self.heads(Heads::Grouped(kv_heads, Some(default))),
            Heads::Equal | Heads::Same(_) | Heads::By(_) => self.heads(Heads::Grouped(None, Some(default))),
        }
    }

    /// Sets the attention module of a layer, `{}`, below the first of these prefixes that a checkpoint has.
    pub const fn at(self, prefixes: &'static [&'static str], path: &'static str, layout: WeightLayout) -> Self {
        self.modules([Some(at(prefixes, path, layout)), None])
    }

    /// Adds the names that other checkpoints use.
    pub const fn or_at(self, prefixes: &'static [&'static str], path: &'static str, layout: WeightLayout) -> Self {
        self.modules([self.modules[0], Some(at(prefixes, path, layout))])
    }

    /// Sets the prefixes of all names.
    pub const fn below(self, prefixes: &'static [&'static str]) -> Self {
        let [first, second] = self.modules;
        self.modules([below(first, prefixes), below(second, prefixes)])
    }
}

const fn below(names: Option<ModuleNames>, prefixes: &'static [&'static str]) -> Option<ModuleNames> {
    match names {
        Some(names) => Some(ModuleNames { prefixes, ..names }),
        None => None,
    }
}

/// The number of key heads, and the width of heads.
#[derive(Clone, Copy)]
pub(super) enum Heads {
    /// A key head for each query head, `embed_dim / num_heads` wide; other fields may only agree.
    Equal,
    /// A key head for each query head; this field may only agree.
    Same(&'static str),
    /// `num_key_value_heads` and `head_dim`; without a default they follow from the other sizes.
    Grouped(Option<usize>, Option<usize>),
    /// The number of key heads that this function returns for the number of query heads.
    By(fn(&Fields, usize) -> Result<usize>),
}

/// The projections that have biases: by a field and its default, or always.
#[derive(Clone, Copy)]
pub(super) enum Bias {
    None,
    All,
    AllIf(&'static str, bool),
    Qkv,
    QkvIf(&'static str, bool),
    Out,
    /// The output projection always, the others by a field.
    OutAndQkvIf(&'static str, bool),
    /// The output projection always, queries and values by a field.
    OutAndQvIf(&'static str, bool),
    AllButKey,
    /// A field for each.
    Each(&'static [(&'static str, bool); 4]),
}

/// The place of a parameter of relative positions.
#[derive(Clone, Copy)]
pub(super) enum SharedPlace {
    /// The parameter is in the first layer, and all layers use it.
    FirstLayer,
    /// Each layer has its own parameter.
    EachLayer,
    /// The parameter is in a module below the layers' prefix, and all layers use it.
    Module(&'static str),
}

columns! {
    /// A norm of queries and keys.
    struct Norm,
    first RMS_PER_HEAD:
    kind: QkNormKind = QkNormKind::Rms,
    scope: QkNormScope = QkNormScope::PerHead,
    /// The epsilon of the model's other norms.
    eps: Number = Number("rms_norm_eps", 1e-6),
    [None unless set]
    /// The field that turns it on.
    flag: &'static str,
}

/// The scale of the scores.
#[derive(Clone, Copy)]
pub(super) enum Scale {
    Fixed(f64),
    Field(Number),
    /// 1 over the root of a field.
    RootOf(Number),
    /// The usual one, unless this field has another.
    UsualOr(&'static str),
    /// The usual one times a field.
    UsualTimes(Number),
}

/// The keys that a layer attends to.
#[derive(Clone, Copy)]
pub(super) enum Mask {
    /// Causal unless `is_causal` is false, which makes an encoder of any decoder: its window is on both sides then, and
    /// one key wider.
    Causal,
    CausalIf(&'static str),
    /// As `Causal`, or with `use_bidirectional_attention` half of the window on each side.
    CausalOrBidirectional,
    /// All keys, or a window on each side.
    Encoder,
}
