//! The windows of a model's layers; and models whose layers are in stages, counted through all of them.

use candle_core::Result;
use serde::Deserialize;
use serde_json::{Value, json};

use super::fields::Fields;
use super::layer_kinds::{self, alternates_rotary, is_fourth_from_last};

const SIZE: &str = "sliding_window";

/// The windows of a model's layers.
#[derive(Clone, Copy)]
pub(super) enum Window {
    None,
    /// `sliding_window`, or this default, in all layers.
    All(Option<usize>),
    /// `sliding_window`, or this default, in layers with "sliding_attention" in `layer_types`, or else in layers of a
    /// pattern.
    Layers(Pattern, Option<usize>),
    /// `sliding_window`, or this default, in layers of a pattern except the last layer.
    NeverLast(Pattern, usize),
    /// `sliding_window` in layers from `max_window_layers` on, which has this default, if `use_sliding_window` is true:
    /// many configurations that have a `sliding_window` turn it off.
    From(usize),
    By(fn(&Fields) -> Result<Option<usize>>),
}

/// A pattern of layers with a window, for configurations without `layer_types`.
#[derive(Clone, Copy)]
pub(super) enum Pattern {
    NoLayer,
    /// The first of every `n` layers.
    FirstOf(usize),
    /// All but the first of every `n` layers.
    ButFirstOf(usize),
    /// All but the last of every `n` layers.
    ButLastOf(usize),
    /// All but the last of every `n` layers, where `n` is a field with a default.
    ButLastBy(&'static str, usize),
}

impl Window {
    /// Returns the window of a layer.
    pub fn of(self, fields: &Fields) -> Result<Option<usize>> {
        match self {
            Self::None => Ok(None),
            Self::All(default) => fields.nullable(SIZE, default),
            Self::Layers(pattern, default) => sliding(fields, pattern.has(fields)?, default),
            Self::NeverLast(..) if fields.layer + 1 == fields.num_layers => Ok(None),
            Self::NeverLast(pattern, default) => sliding(fields, pattern.has(fields)?, Some(default)),
            Self::From(first) => from(fields, first),
            Self::By(rule) => rule(fields),
        }
    }
}

impl Pattern {
    /// Returns whether a layer belongs to the pattern.
    fn has(self, fields: &Fields) -> Result<bool> {
        let is_last_of = |n| (fields.layer + 1).is_multiple_of(n);
        Ok(match self {
            Self::NoLayer => false,
            Self::FirstOf(n) => fields.layer.is_multiple_of(n),
            Self::ButFirstOf(n) => !fields.layer.is_multiple_of(n),
            Self::ButLastOf(n) => !is_last_of(n),
            Self::ButLastBy(name, default) => !is_last_of(fields.get_or(name, default)?),
        })
    }
}

/// Returns the window of a layer that has one by `layer_types`, or without that by the rule of the family.
fn sliding(fields: &Fields, otherwise: bool, default: Option<usize>) -> Result<Option<usize>> {
    if !is_sliding(fields, otherwise)? {
        return Ok(None);
    }
    match fields.nullable(SIZE, default)? {
        Some(window) => Ok(Some(window)),
        None => fields.fail("a layer has sliding_attention, but sliding_window is not given"),
    }
}

fn is_sliding(fields: &Fields, otherwise: bool) -> Result<bool> {
    match fields.of_layer("layer_types")? {
        None => Ok(otherwise),
        Some(kind) if kind == "sliding_attention" => Ok(true),
        Some(kind) if kind == "full_attention" || kind == "attention" => Ok(false),
        Some(kind) => fields.fail(format!(
            "layer_types has {kind} for layer {}, expected \"full_attention\" or \"sliding_attention\"",
            fields.layer
        )),
    }
}

fn from(fields: &Fields, first: usize) -> Result<Option<usize>> {
    let used = fields.flag("use_sliding_window", false)?;
    let given = used && fields.nullable(SIZE, Some(4096))?.is_some();
    let first = fields.count("max_window_layers", first)?;
    let window = sliding(fields, given && fields.layer >= first, Some(4096))?;
    if window.is_some() && !used {
        return fields.fail(format!("layer {} has sliding_attention, but use_sliding_window is false", fields.layer));
    }
    Ok(window)
}

/// Returns the window of a Dots 3 layer. Published configurations have another name for its size.
pub(super) fn dots3(fields: &Fields) -> Result<Option<usize>> {
    if layer_kinds::dots3(fields)? != "sliding_attention" {
        return Ok(None);
    }
    match fields.optional(SIZE)? {
        Some(window) => Ok(Some(window)),
        None => fields.get_or("sliding_window_size", 512).map(Some),
    }
}

/// Returns the window of a Dots layer: from `max_window_layers` on.
pub(super) fn dots(fields: &Fields) -> Result<Option<usize>> {
    let given = fields.nullable(SIZE, Some(4096))?.is_some();
    sliding(fields, given && fields.layer >= fields.get_or("max_window_layers", 62)?, Some(4096))
}

/// Returns the window of an EXAONE 4 layer: all but every `sliding_window_pattern`-th layer have one, if there is one.
pub(super) fn exaone(fields: &Fields) -> Result<Option<usize>> {
    match fields.nullable(SIZE, Some(4096))? {
        Some(_) => Window::Layers(Pattern::ButLastBy("sliding_window_pattern", 4), Some(4096)).of(fields),
        None => Ok(None),
    }
}

/// Returns the window of a Ministral layer: by `layer_types`, or in all layers if it is not null.
pub(super) fn ministral(fields: &Fields) -> Result<Option<usize>> {
    sliding(fields, fields.nullable(SIZE, Some(4096))?.is_some(), Some(4096))
}

/// Returns the window of a layer of Qwen 3's mixtures of experts: in all layers or in none.
pub(super) fn qwen3_moe(fields: &Fields) -> Result<Option<usize>> {
    if fields.flag("use_sliding_window", false)? { fields.nullable(SIZE, Some(4096)) } else { Ok(None) }
}

/// Returns the window of a SmolLM 3 layer: in layers without rotary positions, if windows are used.
pub(super) fn smollm3(fields: &Fields) -> Result<Option<usize>> {
    let used = fields.flag("use_sliding_window", false)? && fields.get(SIZE).is_some();
    sliding(fields, used && !alternates_rotary(fields)?, None)
}

/// Returns the window of a Muse Glimmer layer: all but every fourth layer have one, counted from the last.
pub(super) fn muse_glimmer(fields: &Fields) -> Result<Option<usize>> {
    sliding(fields, !is_fourth_from_last(fields), Some(2048))
}

/// Returns the window of a ModernBERT layer on each side: all but every `global_attn_every_n_layers`-th layer have one,
/// half of `local_attention`.
pub(super) fn modernbert(fields: &Fields) -> Result<Option<usize>> {
    let side = fields.get_or("local_attention", 128)? / 2;
    fields.agrees(SIZE, side)?;
    let interval = fields.get_or("global_attn_every_n_layers", 3)?;
    Ok(is_sliding(fields, !fields.layer.is_multiple_of(interval))?.then_some(side))
}

/// Returns the window of a GPT-Neo layer, by `attention_layers` or by `attention_types`, which has lists of kinds of
/// layers and how often each list is repeated.
pub(super) fn gpt_neo(fields: &Fields) -> Result<Option<usize>> {
    let kind = match fields.of_layer("attention_layers")? {
        Some(kind) => kind.clone(),
        None => repeated_kind(fields)?,
    };
    match kind.as_str() {
        Some("global") => Ok(None),
        Some("local") => fields.get_or("window_size", 256).map(Some),
        _ => fields.fail(format!("layer {} has {kind}, expected \"global\" or \"local\"", fields.layer)),
    }
}

fn repeated_kind(fields: &Fields) -> Result<Value> {
    let default = json!([[["global", "local"], 12]]);
    let given = fields.get("attention_types").unwrap_or(&default);
    let Ok(types) = Vec::<(Vec<Value>, usize)>::deserialize(given) else {
        return fields.fail(format!("attention_types is {given}, expected a list of lists of kinds and their number"));
    };
    let mut before = 0usize;
    for (kinds, times) in types {
        let after = before.saturating_add(kinds.len().saturating_mul(times));
        if fields.layer < after {
            return Ok(kinds[(fields.layer - before) % kinds.len()].clone());
        }
        before = after;
    }
    fields.fail(format!("attention_types has kinds of {before} layers, expected one for each layer"))
}

/// Returns the window of a MiniMax layer: every other layer has softmax attention, with a window if there is one.
pub(super) fn minimax(fields: &Fields) -> Result<Option<usize>> {
    if fields.get("layer_types").is_none() && !fields.layer.is_multiple_of(2) {
        return fields.fail(format!("layer {} has linear_attention, expected softmax attention", fields.layer));
    }
    sliding(fields, false, None)?;
    fields.nullable(SIZE, None)
}

/// Returns the window of an LFM 3 layer: even layers but the first have softmax attention, every other of them with a
/// window.
pub(super) fn lfm3(fields: &Fields) -> Result<Option<usize>> {
    refuse_lfm3_convolution(fields)?;
    sliding(fields, fields.layer.is_multiple_of(4), Some(256))
}

/// Refuses a convolution of LFM 3, where `layer_types` does not name the kinds of layers.
fn refuse_lfm3_convolution(fields: &Fields) -> Result<()> {
    let layer = fields.layer;
    if fields.get("layer_types").is_none() && (!layer.is_multiple_of(2) || layer == 0) {
        return fields.fail(format!("layer {layer} has conv, expected softmax attention"));
    }
    Ok(())
}

/// Returns the window of a Flint layer: all layers but the first two, every fourth and the last have one.
pub(super) fn flint(fields: &Fields) -> Result<Option<usize>> {
    let layer = fields.layer;
    let is_full = layer < 2 || layer % 4 == 1 || layer + 1 == fields.num_layers;
    sliding(fields, !is_full, Some(513))
}

/// Refuses the first layer and the last of the texts of SAM 3 Lite, which are convolutions if `use_repmixer_blocks` is
/// true.
pub(super) fn between_convolutions(fields: &Fields) -> Result<Option<usize>> {
    let layer = fields.layer;
    if fields.flag("use_repmixer_blocks", true)? && (layer == 0 || layer + 1 == fields.num_layers) {
        return fields.fail(format!("layer {layer} is a convolution, expected softmax attention"));
    }
    Ok(None)
}

/// Refuses layers of LFM 3's images that are not of kind "full_attention": without `layer_types` even layers but the
/// first have attention.
pub(super) fn lfm3_images(fields: &Fields) -> Result<Option<usize>> {
    refuse_lfm3_convolution(fields)?;
    sliding(fields, false, None)
}

/// Refuses layers of Granite 4 that are not of kind "attention".
pub(super) fn granite_hybrid(fields: &Fields) -> Result<Option<usize>> {
    match fields.get("layer_types") {
        Some(_) => sliding(fields, false, None),
        None => no_window(fields, false),
    }
}

/// Refuses layers of Bamba that are not in `attn_layer_indices`.
pub(super) fn bamba(fields: &Fields) -> Result<Option<usize>> {
    let listed = fields.optional::<Vec<usize>>("attn_layer_indices")?.unwrap_or_default();
    no_window(fields, listed.contains(&fields.layer))
}

/// Refuses layers of Jamba but one of each period.
pub(super) fn jamba(fields: &Fields) -> Result<Option<usize>> {
    let offset = fields.count("attn_layer_offset", 4)?;
    no_window(fields, fields.layer % fields.get_or("attn_layer_period", 8)? == offset)
}

/// Returns the window of a Nemotron H layer. Layers of softmax attention are named by `layers_block_type`, or by the
/// stars of `hybrid_override_pattern`.
pub(super) fn nemotron_h(fields: &Fields) -> Result<Option<usize>> {
    let has_softmax = match fields.of_layer("layers_block_type")? {
        Some(kind) => *kind == "full_attention" || *kind == "attention",
        None => {
            let pattern = fields.optional::<&str>("hybrid_override_pattern")?.unwrap_or("ME*-");
            pattern.chars().nth(fields.layer) == Some('*')
        }
    };
    no_window(fields, has_softmax)?;
    fields.nullable(SIZE, None)
}

/// Returns the window of a RecurrentGemma layer. `block_types` is repeated through the layers.
pub(super) fn recurrent_gemma(fields: &Fields) -> Result<Option<usize>> {
    let usual = [json!("recurrent"), json!("recurrent"), json!("attention")];
    let types = fields.get("block_types").and_then(Value::as_array).filter(|types| !types.is_empty());
    let types = types.map_or(&usual[..], Vec::as_slice);
    no_window(fields, types[fields.layer % types.len()] == "attention")?;
    fields.get_or("attention_window_size", 2048).map(Some)
}

/// Returns no window for a layer of softmax attention, and refuses a recurrence.
fn no_window(fields: &Fields, has_softmax: bool) -> Result<Option<usize>> {
    match has_softmax {
        true => Ok(None),
        false => fields.fail(format!("layer {} is a recurrence, expected softmax attention", fields.layer)),
    }
}

/// The stages of a model: their layers, heads and widths.
#[derive(Clone, Copy)]
pub(super) struct Stages {
    /// The default of `depths`.
    pub depths: &'static [usize],
    /// The default of the heads of each stage.
    pub heads: &'static [usize],
    pub widths: Widths,
}

/// The widths of stages.
#[derive(Clone, Copy)]
pub(super) enum Widths {
    Equal,
    /// Each stage is twice as wide as the one before.
    Doubled,
    /// A list of the widths, with this default.
    Each(&'static [usize]),
}

impl Stages {
    /// Returns the stage of the layer, and its number there.
    pub fn place(&self, fields: &Fields) -> Result<[usize; 2]> {
        let depths = fields.get_or("depths", self.depths.to_vec())?;
        let mut number = fields.layer;
        for (stage, &depth) in depths.iter().enumerate() {
            match number.checked_sub(depth) {
                Some(rest) => number = rest,
                None => return Ok([stage, number]),
            }
        }
        fields.fail(format!("there is no layer {}, depths is {depths:?}", fields.layer))
    }

    /// Returns `embed_dim` of the layer, from the field `name` with the width of the first stage, which has this
    /// default, or with the widths of all stages.
    pub fn width(&self, fields: &Fields, name: &str, first: usize) -> Result<usize> {
        let [stage, _] = self.place(fields)?;
        let times = match self.widths {
            Widths::Each(defaults) => return of_stage(fields, name, defaults, stage),
            Widths::Equal => Some(1),
            Widths::Doubled => u32::try_from(stage).ok().and_then(|stage| 2usize.checked_pow(stage)),
        };
        let first = fields.get_or(name, first)?;
        match times.and_then(|times| first.checked_mul(times)) {
            Some(width) => Ok(width),
            None => fields.fail(format!("stage {stage} is too wide to address, from {first}")),
        }
    }

    /// Returns the number of heads of the layer, from the field `name` with the numbers of all stages.
    pub fn num_heads(&self, fields: &Fields, name: &str) -> Result<usize> {
        let [stage, _] = self.place(fields)?;
        of_stage(fields, name, self.heads, stage)
    }
}

/// Reads the number of a stage in a list with the numbers of all stages.
fn of_stage(fields: &Fields, name: &str, defaults: &[usize], stage: usize) -> Result<usize> {
    let each = fields.get_or(name, defaults.to_vec())?;
    match each.get(stage) {
        Some(&number) if number > 0 => Ok(number),
        _ => fields.fail(format!("{name} is {each:?}, expected at least 1 for stage {stage}")),
    }
}
