//! The table of model families, and what a row may say, in columns. A family that needs nothing new is one row: its
//! fields and defaults are those of its configuration class in transformers, and a column that a row leaves out is as
//! in the row it extends. The files of rows are laid out by hand, as a table is.

#[rustfmt::skip]
mod decoders;
#[rustfmt::skip]
mod encoders;
#[rustfmt::skip]
mod images_and_sound;

use candle_core::Result;

use super::fields::{Aliases, Fields};
use super::linear::{Latent, Linear};
use super::load::{ModuleNames, at};
use super::positions::Positions;
use super::rope::{Rope, rope};
use super::windows::{Stages, Window};
use candle_attention_core::weights::{PackedNaming, QkvOrder};
use candle_attention_core::{MultiHeadAttentionConfig, WeightLayout};
use candle_attention_modules::gate::OutputGate;
use candle_attention_modules::norm::{QkNormKind, QkNormScope};

const LAYERS: &str = "num_hidden_layers";
pub(super) const HIDDEN: &str = "hidden_size";
pub(super) const HEADS: &str = "num_attention_heads";
/// The usual names of the number of layers, of `embed_dim` and of `num_heads`.
pub(super) const SIZE_NAMES: [&str; 3] = [LAYERS, HIDDEN, HEADS];
/// T5's name of the number of its decoder's layers.
pub(super) const DECODER_LAYERS: &str = "num_decoder_layers";
/// How many layers stand between those that see all keys.
const PATTERN: &str = "sliding_window_pattern";

/// The base model below a head, by itself, and beside images.
pub(super) const MODEL: &[&str] =
    &["model.", "", "model.language_model.", "language_model.model.", "model.text_model."];
/// The text of a model of texts and images.
const TEXT_MODEL: &[&str] = &["text_model.", ""];

const QKV: WeightLayout = WeightLayout::Packed(PackedNaming::Qkv, QkvOrder::ByPart);
const QKV_PROJ: WeightLayout = WeightLayout::Packed(PackedNaming::QkvProj, QkvOrder::ByPart);
const WQKV: WeightLayout = WeightLayout::Packed(PackedNaming::Wqkv, QkvOrder::ByPart);

/// ModernBERT's, as an encoder and as a decoder.
const MODERNBERT_ROPE: Rope = rope(160_000.0, 8192).theta(Number("global_rope_theta", 160_000.0));
const MODERNBERT_WINDOWED_ROPE: Rope =
    rope(10_000.0, 8192).theta(Number("local_rope_theta", 10_000.0)).shares_scaling(true);

/// Every row.
pub(super) fn families() -> impl Iterator<Item = &'static Family> {
    let decoders = [
        decoders::ROWS,
        decoders::GATED,
        decoders::HYBRID,
        decoders::LINEAR,
        decoders::LATENT,
        decoders::GEMMAS,
        decoders::GPTS,
    ];
    let others = [
        encoders::ROWS,
        encoders::BY_DISTANCE,
        images_and_sound::ON_AXES,
        images_and_sound::ROWS,
        images_and_sound::IN_WINDOWS,
        images_and_sound::IN_STAGES,
        encoders::WITH_DECODERS,
    ];
    decoders.into_iter().chain(others).flatten()
}

const DECODER: Family = Family::DECODER;
const LLAMA: Family = DECODER.of("llama").bias(Bias::AllIf("attention_bias", false)).rope(rope(10_000.0, 2048));
/// A key head for each query head, biases, all keys: what most encoders begin with.
const ENCODER: Family = DECODER.sizes([12, 768, 12]).heads(Heads::Equal).bias(Bias::All).mask(Mask::Encoder);

const fn rms_per_head(eps: f64) -> Norm {
    Norm::RMS_PER_HEAD.eps(Number("rms_norm_eps", eps))
}

const fn layer_norm(kind: QkNormKind, scope: QkNormScope) -> Norm {
    Norm::RMS_PER_HEAD.kind(kind).scope(scope).eps(Number("layer_norm_eps", 1e-5))
}

/// Declares a struct and its first value, in which each column has its default, and for each column a method of its
/// name that sets it.
macro_rules! columns {
    (
        $(#[$about:meta])* struct $name:ident, $(#[$of_first:meta])* first $first:ident:
        $($(#[$doc:meta])* $column:ident: $kind:ty = $default:expr,)+
        [None unless set] $($(#[$of:meta])* $option:ident: $some:ty,)*
    ) => {
        $(#[$about])*
        #[derive(Clone, Copy)]
        pub(super) struct $name {
            $($(#[$doc])* pub $column: $kind,)+
            $($(#[$of])* pub $option: Option<$some>,)*
        }

        impl $name {
            $(#[$of_first])*
            pub const $first: Self = Self { $($column: $default,)+ $($option: None,)* };

            $($(#[$doc])* pub const fn $column(self, $column: $kind) -> Self { Self { $column, ..self } })+
            $($(#[$of])* pub const fn $option(self, value: $some) -> Self { Self { $option: Some(value), ..self } })*
        }
    };
}
pub(super) use columns;

columns! {
    /// A value of `model_type`: how its `config.json` describes attention, and where its checkpoints keep it. A default
    /// is that of the class in transformers.
    struct Family,
    /// Grouped heads without positions or biases, causal: what most decoders begin with.
    first DECODER:
    model_type: &'static str = "",
    aliases: Aliases = &[],
    /// Where checkpoints keep the attention module of a layer, and where others do.
    modules: [Option<ModuleNames>; 2] = [Some(at(MODEL, "layers.{}.self_attn", WeightLayout::Canonical)), None],
    /// The fields of the number of layers, of `embed_dim` and of `num_heads`, where `SIZE_NAMES` become aliases.
    names: [&'static str; 3] = SIZE_NAMES,
    /// Whether that is so; not in decoders beside an encoder, whose sizes the usual names are.
    usual_names: bool = true,
    /// Their defaults.
    sizes: [usize; 3] = [32, 4096, 32],
    /// Whether transformers has such defaults; it has none for a model that it does not know by this name.
    has_default_sizes: bool = true,
    heads: Heads = Heads::Grouped(None, None),
    /// Whether heads are always `embed_dim / num_heads` wide, whatever `head_dim` is.
    head_dim_follows: bool = false,
    /// The dropout of the weights; null is 0.
    dropout: Number = Number("attention_dropout", 0.0),
    bias: Bias = Bias::None,
    window: Window = Window::None,
    mask: Mask = Mask::Causal,
    /// Whether values are normalised by the layer that makes them, without a weight.
    value_norm: bool = false,
    /// Whether each head has a logit of its own in the softmax.
    sinks: bool = false,
    /// What the model's softmax attention is, if it is of a kind that is not supported.
    unsupported: Option<&'static str> = None,
    /// Fields that change the numbers, and the one value that is supported, in JSON.
    only: &'static [(&'static str, &'static str)] = &[],
    /// Where a checkpoint keeps the relative bias, or DeBERTa's vectors of distances, if there is such.
    shared_place: SharedPlace = SharedPlace::FirstLayer,
    /// What no other column says, in this order.
    rules: &'static [Rule] = &[],
    [None unless set]
    /// The field with the text's config, in a model that has other parts too.
    section: &'static str,
    /// Where layers stand in stages: `names` and `sizes` are of the first stage's width then.
    stages: Stages,
    /// The parameter below the attention module of the keys' bias, where some files have one beside that of the queries
    /// and others have none.
    key_bias: &'static str,
    rope: Rope,
    /// That of layers with a window, where theirs is another: `rope` is of layers without.
    windowed_rope: Rope,
    qk_norm: Norm,
    gate: OutputGate,
    /// What is added to scores by positions.
    positions: Positions,
    scale: Scale,
    /// The default of `num_kv_shared_layers`, the last layers, which read keys and values of earlier ones.
    kv_shared_layers: usize,
    /// The decoder's self-attention beside an encoder, with the sizes and the dropout of this row.
    decoder: &'static Family,
    /// Its attention to the encoder's outputs, likewise.
    cross: &'static Family,
    /// The sizes of both, where they are others.
    decoder_sizes: [usize; 3],
    /// In place of most columns, for latent attention.
    latent: Latent,
    /// Layers of linear attention among the others.
    linear: Linear,
}

/// A change of the config by fields that no column knows.
pub(super) type Rule = fn(&Fields, MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig>;

impl Family {
    /// A row that begins with this one.
    pub const fn of(self, model_type: &'static str) -> Self {
        self.model_type(model_type)
    }

    /// `num_key_value_heads` and `head_dim`, with a default of the former; the latter follows unless given.
    pub const fn kv_heads(self, default: usize) -> Self {
        self.heads(Heads::Grouped(Some(default), None))
    }

    /// The same with a default of both.
    pub const fn grouped(self, kv_heads: usize, head_dim: usize) -> Self {
        self.heads(Heads::Grouped(Some(kv_heads), Some(head_dim)))
    }

    /// A default of `head_dim`.
    pub const fn head_dim(self, default: usize) -> Self {
        match self.heads {
            Heads::Grouped(kv_heads, _) => self.heads(Heads::Grouped(kv_heads, Some(default))),
            Heads::Equal | Heads::Same(_) | Heads::By(_) => self.heads(Heads::Grouped(None, Some(default))),
        }
    }

    /// The attention module of a layer, `{}`, below the first of these prefixes that a checkpoint has.
    pub const fn at(self, prefixes: &'static [&'static str], path: &'static str, layout: WeightLayout) -> Self {
        self.modules([Some(at(prefixes, path, layout)), None])
    }

    /// Names that other checkpoints have.
    pub const fn or_at(self, prefixes: &'static [&'static str], path: &'static str, layout: WeightLayout) -> Self {
        self.modules([self.modules[0], Some(at(prefixes, path, layout))])
    }

    /// The same names below other prefixes.
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

/// A field with a number, and its default.
#[derive(Clone, Copy)]
pub(super) struct Number(pub &'static str, pub f64);

/// How many key heads there are, and how wide heads are.
#[derive(Clone, Copy)]
pub(super) enum Heads {
    /// A key head for each query head, `embed_dim / num_heads` wide; other fields may only agree.
    Equal,
    /// A key head for each query head; this field may only agree.
    Same(&'static str),
    /// `num_key_value_heads` and `head_dim`; without a default they follow from the other sizes.
    Grouped(Option<usize>, Option<usize>),
    /// So many key heads, for so many query heads.
    By(fn(&Fields, usize) -> Result<usize>),
}

/// Which projections have biases: by a field and its default, or always.
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
    /// The same without the keys.
    OutAndQvIf(&'static str, bool),
    AllButKey,
    /// A field for each.
    Each(&'static [(&'static str, bool); 4]),
}

/// Where a parameter of relative positions is.
#[derive(Clone, Copy)]
pub(super) enum SharedPlace {
    /// In the first layer, for all.
    FirstLayer,
    /// In each layer, for itself.
    EachLayer,
    /// In a module below the layers' prefix, for all.
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
    /// One by the root of a field.
    RootOf(Number),
    /// The usual one, unless this field has another.
    UsualOr(&'static str),
    /// The usual one times a field.
    UsualTimes(Number),
}

/// Which keys a layer sees.
#[derive(Clone, Copy)]
pub(super) enum Mask {
    /// Causal unless `is_causal` is false, which makes an encoder of any decoder: its window is on both sides then, and
    /// one key wider.
    Causal,
    CausalIf(&'static str),
    /// As `Causal`, or with `use_bidirectional_attention` half of the window on each side.
    CausalOrBidirectional,
    /// All keys, or so many on each side.
    Encoder,
}
