//! Which layout a checkpoint is in, by the names and shapes in it.

use std::collections::BTreeSet;

use candle_core::{Error, Result, bail};
use candle_nn::VarBuilder;

use super::layout::{Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
use candle_attention_modules::base::{has, hint, root};

/// What training loops and compilers put in front of a model's names.
const WRAPPERS: [&str; 5] = ["module", "_orig_mod", "model", "state_dict", "model_state_dict"];

/// A shape that no tensor has: asking for it gives an error with the true one, and reads nothing.
const NO_SHAPE: [usize; 17] = [0; 17];

/// The shape of a tensor that the builder has.
pub fn stored_shape(vb: &VarBuilder, name: &str) -> Result<Vec<usize>> {
    let error = match vb.get(NO_SHAPE.to_vec(), name) {
        Ok(tensor) => return Ok(tensor.dims().to_vec()),
        Err(error) => error,
    };
    match root(&error) {
        Error::UnexpectedShape { got, .. } => Ok(got.dims().to_vec()),
        Error::CannotFindTensor { .. } => Err(error),
        other => {
            let (other, no_shape) = (other.to_string(), format!("{NO_SHAPE:?}"));
            // A `VarMap` says what it was asked for.
            let reason = if other.contains(&no_shape) { String::new() } else { format!(" ({other})") };
            bail!(
                "[weight_layout] the shape of {name}, which tells its layout, cannot be had from this builder{reason}; \
                 name the layout"
            )
        }
    }
}

impl WeightLayout {
    /// The layout of the attention layer at the builder's prefix.
    ///
    /// Plain parameters that are not square are taken as (in, out), as `nn.Parameter(torch.rand(d_in, d_out))` makes
    /// them; read the other way they do not fit the config, and loading says so. Packed rows are taken to be by part
    /// but under `query_key_value` and `c_attn`, whose two orders are both in use: a file that was
    /// [saved](crate::MultiHeadAttention::save) as, say, `packed:qkv_proj:by-head` has to be named.
    ///
    /// # Errors
    /// If nothing there looks like attention, or nothing is there yet, as in a new `VarMap`; and where names and shapes
    /// leave two readings (a square plain parameter, a packed weight whose name is used for two row orders), an error
    /// that names both.
    /// `candle_attention::weights::Checkpoint::detect` asks the checkpoint's own config too.
    pub fn detect(vb: &VarBuilder) -> Result<Self> {
        detect_with(vb, |_| false)
    }
}

/// [`WeightLayout::detect`], which asks `is_meant` of each layout where names and shapes leave several readings.
///
/// # Errors
/// As those of [`WeightLayout::detect`].
pub fn detect_with(vb: &VarBuilder, is_meant: impl Fn(WeightLayout) -> bool) -> Result<WeightLayout> {
    let place = match vb.prefix() {
        prefix if prefix.is_empty() => "at the root of the file".to_string(),
        prefix => format!("below {prefix:?}"),
    };
    if has(vb, "w_v.weight") && has(vb, "W_q.weight") {
        bail!("[weight_layout] {place} are the weights of an AdditiveAttention (w_v), not of a multi-head layer")
    }
    let readings = readings(vb)?;
    let chosen = readings.iter().find(|layout| is_meant(**layout));
    match (readings.as_slice(), chosen) {
        ([layout], _) | (_, Some(layout)) => Ok(*layout),
        ([], _) => {
            let elsewhere = elsewhere(vb)?;
            let weights = query_weights();
            let names: BTreeSet<_> = weights.iter().map(|name| name.trim_end_matches(".weight")).collect();
            let names = Vec::from_iter(names).join(", ");
            bail!("[weight_layout] no attention weights {place}: looked for the query projections {names}; {elsewhere}")
        }
        _ => {
            let readings: Vec<_> = readings.iter().map(|layout| format!("`{layout}`{}", used_by(*layout))).collect();
            bail!("[weight_layout] the weights {place} can be read as {}; name the one meant", readings.join(" or as "))
        }
    }
}

/// Who uses one of two orders, for the error that asks.
fn used_by(layout: WeightLayout) -> &'static str {
    match layout {
        WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByPart) => " (nanoGPT)",
        WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByHead) => " (GPT-BigCode)",
        WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByPart) => " (ChatGLM)",
        WeightLayout::Packed(PackedNaming::QueryKeyValue, QkvOrder::ByHead) => " (GPT-NeoX, Bloom, Falcon)",
        _ => "",
    }
}

/// Where attention weights are instead: behind a wrapper's prefix, without the first part of this one, or as the
/// builder tells.
///
/// # Errors
/// For a builder that makes parameters and has none yet: there is nothing to look for.
fn elsewhere(vb: &VarBuilder) -> Result<String> {
    let prefix = vb.prefix();
    let one_or_two = std::iter::once("").chain(WRAPPERS);
    let wrapped = one_or_two.flat_map(|outer| WRAPPERS.map(|inner| format!("{outer}.{inner}.{prefix}")));
    let without_first = prefix.split_once('.').map(|(_, rest)| rest.to_string());
    for candidate in wrapped.chain(without_first) {
        let candidate = candidate.trim_matches('.');
        if !readings(&vb.root().pp(candidate))?.is_empty() {
            return Ok(format!("they are below {candidate:?}, from the root of the file"));
        }
    }
    let missing = vb.get_unchecked("q_proj.weight").err();
    // What reads files says that it cannot find the tensor.
    if let Some(Error::Msg(_)) = missing.as_ref().map(root) {
        let below = if prefix.is_empty() { String::new() } else { format!(" below {prefix:?}") };
        bail!(
            "[weight_layout] nothing of attention is there{below} yet: a `VarMap`, a `TorchSeed` and `VarBuilder::zeros` \
             make parameters when a layer asks for them; name a layout, as `WeightLayout::Canonical`"
        )
    }
    let hint = missing.map(|error| hint(&error)).unwrap_or_default();
    Ok(if hint.is_empty() { "is a prefix missing (`vb.pp(..)`)?".to_string() } else { hint })
}

/// Every layout that the names and shapes allow.
fn readings(vb: &VarBuilder) -> Result<Vec<WeightLayout>> {
    let mut found = Vec::new();
    for layout in WeightLayout::all() {
        let [query, out] = layout.query_and_output(has(vb, "in_proj_weight"));
        if has(vb, &query) && fits(vb, layout, &query)? {
            found.push((layout, [query, out]));
        }
    }
    // Of several that share the name of the query projection, those whose output projection is there, or the first.
    let has_out = |[_, out]: &[String; 2]| has(vb, out);
    let is_chosen = |names: &[String; 2]| {
        let mut alike = found.iter().map(|(_, names)| names).filter(|[query, _]| *query == names[0]);
        if alike.clone().any(has_out) { has_out(names) } else { alike.next() == Some(names) }
    };
    Ok(found.iter().filter(|(_, names)| is_chosen(names)).map(|(layout, _)| *layout).collect())
}

/// Whether a layout whose query projection is there may be the one that is meant.
fn fits(vb: &VarBuilder, layout: WeightLayout, query: &str) -> Result<bool> {
    let is_tall = |name: &str| Ok(matches!(stored_shape(vb, name)?.as_slice(), [rows, columns] if rows > columns));
    match layout {
        WeightLayout::Raw(_, way) | WeightLayout::StackedHeads(_, Storage::Raw(way)) => {
            let shape = stored_shape(vb, query)?;
            Ok(way == Orientation::InOut || matches!(shape.as_slice(), [rows, columns] if rows == columns))
        }
        WeightLayout::Conv1d => is_tall(query).map(|tall| !tall),
        WeightLayout::Packed(PackedNaming::CAttn, _) => is_tall(query),
        WeightLayout::Packed(naming, order) => Ok(order == QkvOrder::ByPart || naming == PackedNaming::QueryKeyValue),
        _ => Ok(true),
    }
}

/// The weights that mark a layer, each once: the query projections of all layouts.
pub fn query_weights() -> BTreeSet<String> {
    let of = |layout: WeightLayout| [true, false].map(|one_width| layout.query_and_output(one_width));
    WeightLayout::all().into_iter().flat_map(of).map(|[query, _]| query).collect()
}
