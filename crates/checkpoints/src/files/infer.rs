//! The config that the names and shapes of a layer imply.

use candle_core::{Result, bail};
use candle_nn::VarBuilder;

use candle_attention_core::internal::{GATE_NAMES, LayoutTensor, stored_shape};
use candle_attention_core::{MultiHeadAttentionConfig, WeightLayout};
use candle_attention_modules::base::has;
use candle_attention_modules::linear::Projection::{Gate, Key, Output, Query, Value};

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
pub(super) fn infer_config(
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
        .with_kdim(k.columns)
        .with_vdim(v.columns)
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
        && let &[rows, columns] = stored_shape(vb, mask)?.as_slice()
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
    match *stored_shape(vb, &name)?.as_slice() {
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
