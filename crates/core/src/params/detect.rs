//! Detects the layout of a checkpoint by the names and shapes in it.

use std::collections::BTreeSet;

use candle_core::{Result, bail};
use candle_nn::VarBuilder;

use super::layout::{Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
use super::source::TensorSource;
use candle_attention_modules::linear::Projection::{Output, Query};

/// The prefixes that training loops, compilers and PEFT put in front of a model's names.
const WRAPPERS: [&str; 6] = ["module", "_orig_mod", "model", "state_dict", "model_state_dict", "base_model.model"];

impl WeightLayout {
    /// Detects the layout of the attention layer at the builder's prefix.
    ///
    /// Plain parameters that are not square are taken as (in, out), as `nn.Parameter(torch.rand(d_in, d_out))` makes
    /// them. Read the other way they do not fit the config, and loading says so. Packed rows are taken to be by part,
    /// except under `query_key_value` and `c_attn`, whose two orders are both in use: a file that was
    /// [saved](crate::MultiHeadAttention::save) as, say, `packed:qkv_proj:by-head` has to be named.
    ///
    /// The weights that are plain parameters, kernels, or packed under `c_attn`, are read to know their shapes. Layouts
    /// `in-out:..` have the names of (out, in) weights, and are never detected.
    ///
    /// # Errors
    /// If nothing there looks like attention, or nothing is there yet, as in a new `VarMap`; and where names and shapes
    /// allow two readings (a square plain parameter, a packed weight whose name is used for two row orders), an error
    /// that names both.
    /// `candle_attention::weights::Checkpoint::detect` asks the checkpoint's own config too, and reads no weights.
    pub fn detect(vb: &VarBuilder) -> Result<Self> {
        detect_with(vb, |_| false)
    }
}

/// Detects the layout of tensors as [`WeightLayout::detect`] does. Where names and shapes allow several readings, the
/// one for which `is_meant` returns true is chosen.
///
/// # Errors
/// As [`WeightLayout::detect`].
pub fn detect_with(tensors: &impl TensorSource, is_meant: impl Fn(WeightLayout) -> bool) -> Result<WeightLayout> {
    let place = match tensors.prefix() {
        prefix if prefix.is_empty() => "at the root of the file".to_string(),
        prefix => format!("below {prefix:?}"),
    };
    if tensors.contains("w_v.weight") && tensors.contains("W_q.weight") {
        bail!("[weight_layout] {place} are the weights of an AdditiveAttention (w_v), not of a multi-head layer")
    }
    let readings = readings(tensors)?;
    if let [layout] = readings[..] {
        return Ok(layout);
    }
    if let Some(layout) = readings.iter().find(|layout| is_meant(**layout)) {
        return Ok(*layout);
    }
    if readings.is_empty() {
        for name in query_weights() {
            if let Some(quantized) = tensors.quantized(&name) {
                bail!("[weight_layout] {name} {place} {quantized}")
            }
        }
        let elsewhere = elsewhere(tensors)?;
        let count = WeightLayout::all().len();
        bail!("[weight_layout] no attention weights {place} under the names of any of {count} layouts; {elsewhere}")
    }
    let readings: Vec<_> = readings.iter().map(|layout| format!("`{layout}`{}", used_by(*layout))).collect();
    bail!("[weight_layout] the weights {place} can be read as {}; name the one meant", readings.join(" or as "))
}

/// Returns the models that use one of two orders, for the error that asks for one.
fn used_by(layout: WeightLayout) -> &'static str {
    match layout {
        WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByPart) => " (nanoGPT)",
        WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByHead) => " (GPT-BigCode)",
        WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByPart) => " (ChatGLM)",
        WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByHead) => " (GPT-NeoX, Bloom, Falcon)",
        _ => "",
    }
}

/// Returns the prefixes that wrappers put in front of a model's names: one of them, or two.
pub fn wrapper_prefixes() -> impl Iterator<Item = String> {
    let outer_and_inner = WRAPPERS.into_iter().flat_map(|outer| WRAPPERS.map(|inner| format!("{outer}.{inner}")));
    WRAPPERS.into_iter().map(str::to_string).chain(outer_and_inner)
}

/// Returns where attention weights are instead: behind the prefix of a wrapper, without the first part of this prefix,
/// in part here, or as the source tells.
///
/// # Errors
/// For a builder that makes parameters and has none yet.
fn elsewhere(tensors: &impl TensorSource) -> Result<String> {
    let prefix = tensors.prefix();
    let mut candidates: Vec<_> = wrapper_prefixes().map(|wrapper| format!("{wrapper}.{prefix}")).collect();
    if let Some((_, rest)) = prefix.split_once('.') {
        candidates.push(rest.to_string());
    }
    for candidate in &candidates {
        let candidate = candidate.trim_matches('.');
        if !readings(&tensors.at(candidate))?.is_empty() {
            return Ok(format!("they are below {candidate:?}, from the root of the file"));
        }
    }
    let hint = tensors.hint("q_proj.weight")?;
    let others = hint.unwrap_or_else(|| "is a prefix missing (`vb.pp(..)`)?".to_string());
    Ok(match partly_there(tensors) {
        Some(found) => format!("{found}; {others}"),
        None => others,
    })
}

/// Returns the weights that are there of the layout of which the most are, for an error; `None` if none is there.
fn partly_there(tensors: &impl TensorSource) -> Option<String> {
    let mut most = Vec::new();
    let mut nearest = None;
    for layout in WeightLayout::all() {
        let mut names = layout.weight_names();
        names.retain(|name| tensors.contains(name));
        if names.len() > most.len() {
            most = names;
            nearest = Some(layout);
        }
    }
    let layout = nearest?;
    let query = layout.weight_name(Query, true);
    Some(format!("of the layout `{layout}`, {} is there, but {query} is not", most.join(" and ")))
}

/// A layout that names and shapes allow.
struct Reading {
    layout: WeightLayout,
    /// The name of the weight of the query projection.
    query: String,
    /// The name of the weight of the output projection.
    output: String,
    /// Whether the output projection is there.
    has_output: bool,
}

/// Returns every layout that the names and shapes allow. Of several that share the name of the query projection, those
/// whose output projection is there count, or else those with the names of the first.
pub(super) fn readings(tensors: &impl TensorSource) -> Result<Vec<WeightLayout>> {
    let mut found = Vec::new();
    for layout in WeightLayout::all() {
        let one_width = tensors.contains("in_proj_weight");
        let query = layout.weight_name(Query, one_width);
        let output = layout.weight_name(Output, one_width);
        if tensors.contains(&query) && fits(tensors, layout, &query)? {
            found.push(Reading { layout, has_output: tensors.contains(&output), query, output });
        }
    }
    let counts = |reading: &Reading| {
        let alike: Vec<&Reading> = found.iter().filter(|other| other.query == reading.query).collect();
        if alike.iter().any(|other| other.has_output) { reading.has_output } else { alike[0].output == reading.output }
    };
    Ok(found.iter().filter(|reading| counts(reading)).map(|reading| reading.layout).collect())
}

/// Returns whether a layout whose query projection is there may be the one that is meant.
fn fits(tensors: &impl TensorSource, layout: WeightLayout, query: &str) -> Result<bool> {
    match layout {
        WeightLayout::Raw(_, way) | WeightLayout::StackedHeads(_, Storage::Raw(way)) => {
            let shape = tensors.shape(query)?;
            Ok(matches!(shape[..], [rows, columns] if way == Orientation::InOut || rows == columns))
        }
        WeightLayout::Flax | WeightLayout::Keras | WeightLayout::KerasH5 => Ok(tensors.shape(query)?.len() == 3),
        WeightLayout::Dense(_) => Ok(tensors.shape(query)?.len() == 2),
        // Weights (out, in) have the same names.
        WeightLayout::InOut(_) => Ok(false),
        WeightLayout::Conv1d => Ok(!is_tall(tensors, query)?),
        WeightLayout::Packed(PackedNaming::CAttn, _) => is_tall(tensors, query),
        WeightLayout::Packed(naming, order) => Ok(order == QkvOrder::ByPart || naming == PackedNaming::QueryKeyValue),
        _ => Ok(true),
    }
}

/// Returns whether a matrix has more rows than columns.
fn is_tall(tensors: &impl TensorSource, name: &str) -> Result<bool> {
    Ok(matches!(tensors.shape(name)?[..], [rows, columns] if rows > columns))
}

/// Returns the names of the weights that mark a layer: the query projections of all layouts.
pub fn query_weights() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for layout in WeightLayout::all() {
        for one_width in [true, false] {
            names.insert(layout.weight_name(Query, one_width));
        }
    }
    names
}
