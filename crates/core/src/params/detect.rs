//! Which layout a checkpoint is in, and the config that it implies, by the names and shapes in it.

use std::collections::BTreeSet;

use candle_core::{Error, Result, bail};
use candle_nn::VarBuilder;

use super::layout::{GATE_NAMES, LayoutTensor, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
use crate::config::MultiHeadAttentionConfig;
use candle_attention_modules::base::{has, hint, root};
use candle_attention_modules::linear::ProjectionPlace::{Gate, Key, Output, Query, Value};

/// What training loops and compilers put in front of a model's names.
const WRAPPERS: [&str; 5] = ["module", "_orig_mod", "model", "state_dict", "model_state_dict"];

/// A shape that no tensor has: asking for it gives an error with the true one, and reads nothing.
const NO_SHAPE: [usize; 17] = [0; 17];

/// The shape of a tensor that the builder has.
fn shape(vb: &VarBuilder, name: &str) -> Result<Vec<usize>> {
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
    let is_tall = |name: &str| Ok(matches!(shape(vb, name)?.as_slice(), [rows, columns] if rows > columns));
    match layout {
        // `query` alone is the inner module of BERT and its kin, whose output projection is outside.
        WeightLayout::MinGpt => Ok(has(vb, "proj.weight")),
        WeightLayout::Raw(_, way) | WeightLayout::StackedHeads(_, Storage::Raw(way)) => {
            let shape = shape(vb, query)?;
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

/// Rows (out) and columns (in) of a projection, as an `nn.Linear` has them.
#[derive(Clone, Copy)]
struct Matrix {
    rows: usize,
    columns: usize,
}

/// The config that the shapes of a layer imply.
///
/// # Errors
/// Where shapes do not tell, and for weights that do not fit together.
pub fn infer_config(
    vb: &VarBuilder,
    layout: WeightLayout,
    num_heads: Option<usize>,
) -> Result<MultiHeadAttentionConfig> {
    if has(vb, "q_norm.weight") || has(vb, "k_norm.weight") {
        bail!("[weights] the layer normalises queries and keys (q_norm); shapes do not tell how, so give a config")
    }
    if let Some(name) = GATE_NAMES.into_iter().find(|name| has(vb, &format!("{name}.weight"))) {
        bail!("[weights] the layer has an output gate ({name}); shapes do not tell its activation, so give a config")
    }
    let tensors = layout.tensors(0, has(vb, "in_proj_weight"));
    let biases = tensors.iter().filter(|tensor| tensor.is_bias && has(vb, &tensor.name()));
    let biased: Vec<_> = biases.flat_map(|tensor| tensor.places).collect();
    let weights = tensors.iter().filter(|tensor| !tensor.is_bias && !tensor.holds(Gate));
    let (outs, weights): (Vec<_>, Vec<_>) = weights.partition(|tensor| tensor.holds(Output));
    let out = outs.iter().find(|out| has(vb, &out.name()) && !layout.is_stacked());
    let out = out.map(|out| matrix(vb, out)).transpose()?;
    let is_there = |head: &usize| has(vb, &layout.tensors(*head, true)[0].name());
    let counted = layout.is_stacked().then(|| (0..).take_while(is_there).count());
    let [q, k, v] = match weights.as_slice() {
        [joint] => packed(vb, [joint, outs[0]], out, num_heads)?,
        weights => {
            let all = weights.iter().map(|weight| matrix(vb, weight)).collect::<Result<Vec<_>>>()?;
            [all[0], all[1], all[2]]
        }
    };
    let [q, k, v] = [q, k, v].map(|one| Matrix { rows: one.rows.saturating_mul(counted.unwrap_or(1)), ..one });
    let h = match (counted, num_heads) {
        (Some(counted), Some(said)) if counted != said => {
            bail!("[weights] the file has a stack of {counted} heads, but num_heads is {said}")
        }
        (Some(h), _) | (None, Some(h)) if h > 0 => h,
        _ => bail!("[weights] shapes do not tell the number of heads; give num_heads (at least 1)"),
    };
    let head_dim = divide("the query projection", q.rows, h)?;
    let h_kv = divide("the key projection", k.rows, head_dim)?;
    let value_head_dim = divide("the value projection", v.rows, h_kv)?;
    let Some(heads_dim) = h.checked_mul(value_head_dim) else {
        bail!("[weights] {h} heads of {value_head_dim} values are too large to address")
    };
    let mut cfg = MultiHeadAttentionConfig::new(q.columns, h)
        .with_num_kv_heads(h_kv)
        .with_head_dim(head_dim)
        .with_value_head_dim(value_head_dim)
        .with_key_size(k.columns)
        .with_value_size(v.columns)
        .with_q_bias(biased.contains(&&Query))
        .with_k_bias(biased.contains(&&Key))
        .with_v_bias(biased.contains(&&Value))
        .with_out_proj(out.is_some())
        .with_out_bias(out.is_some() && biased.contains(&&Output))
        .with_out_dim(out.map_or(heads_dim, |out| out.rows))
        .with_sinks(has(vb, "sinks"))
        .with_bias_kv(has(vb, "bias_k"));
    let mask = if counted.is_some() { "heads.0.mask" } else { "mask" };
    if layout.has_mask_buffer()
        && has(vb, mask)
        && let &[rows, columns] = shape(vb, mask)?.as_slice()
        && rows == columns
    {
        cfg = cfg.with_causal(true).with_context_length(rows);
    }
    cfg.validate()?;
    Ok(cfg)
}

fn divide(what: &str, rows: usize, by: usize) -> Result<usize> {
    if by == 0 || rows == 0 || !rows.is_multiple_of(by) {
        bail!("[weights] {what} has {rows} rows, which is no multiple of {by}; is num_heads right?")
    }
    Ok(rows / by)
}

fn matrix(vb: &VarBuilder, weight: &LayoutTensor) -> Result<Matrix> {
    let name = weight.name();
    match *shape(vb, &name)?.as_slice() {
        [columns, rows] if weight.is_transposed() => Ok(Matrix { rows, columns }),
        [rows, columns] => Ok(Matrix { rows, columns }),
        ref other => bail!("[weights] {name} has shape {other:?}, expected a matrix"),
    }
}

/// Queries, keys and values of a packed weight, which has (H + 2 · H_kv) · D rows; the input of the output projection,
/// H · D, tells D.
fn packed(
    vb: &VarBuilder,
    [qkv, out]: [&LayoutTensor; 2],
    out_matrix: Option<Matrix>,
    num_heads: Option<usize>,
) -> Result<[Matrix; 3]> {
    let Matrix { rows, columns } = matrix(vb, qkv)?;
    let (qkv, out) = (&qkv.module, &out.module);
    let queries = match out_matrix {
        Some(out) => out.columns,
        None if num_heads == Some(1) => divide(qkv, rows, 3)?,
        None => bail!("[weights] without {out} the rows of {qkv} do not tell which are keys; give a config"),
    };
    let Some(keys) = rows.checked_sub(queries).filter(|rest| rest.is_multiple_of(2)).map(|rest| rest / 2) else {
        bail!("[weights] {qkv} has {rows} rows, which leaves no equal keys and values beside {queries} query rows")
    };
    if let Some(h) = num_heads.filter(|&h| h > 0) {
        divide(qkv, keys, divide(qkv, queries, h)?)?;
    }
    Ok([queries, keys, keys].map(|rows| Matrix { rows, columns }))
}
