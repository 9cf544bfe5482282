//! A config from the shapes of a checkpoint.

use candle_core::{Result, bail};
use candle_nn::VarBuilder;

use super::detect::shape;
use super::layout::{Form, Kind, Orientation, WeightLayout};
use super::source::has;
use crate::MultiHeadAttentionConfig;

/// Rows (out) and columns (in) of a projection, as an `nn.Linear` has them.
#[derive(Clone, Copy)]
struct Matrix {
    rows: usize,
    columns: usize,
}

/// What the shapes say.
struct Shapes {
    qkv: [Matrix; 3],
    qkv_bias: [bool; 3],
    out: Option<Matrix>,
    out_bias: bool,
    /// Set by a stack of heads.
    heads: Option<usize>,
}

pub(super) fn infer_config(
    vb: &VarBuilder,
    layout: WeightLayout,
    num_heads: Option<usize>,
) -> Result<MultiHeadAttentionConfig> {
    if has(vb, "q_norm.weight") || has(vb, "k_norm.weight") {
        bail!("[weights] the layer normalises queries and keys (q_norm); shapes do not tell how, so give a config")
    }
    let shapes = match layout.form() {
        Form::Separate(names, kind) => separate(vb, names, kind)?,
        Form::Stacked(names, kind) => stacked(vb, names, kind)?,
        Form::Packed(names, kind, _) => packed(vb, names, kind, num_heads)?,
        Form::Torch => torch(vb)?,
    };
    let h = match (shapes.heads, num_heads) {
        (Some(counted), Some(said)) if counted != said => {
            bail!("[weights] the file has a stack of {counted} heads, but num_heads is {said}")
        }
        (Some(h), _) | (None, Some(h)) if h > 0 => h,
        _ => bail!("[weights] shapes do not tell the number of heads; give num_heads (at least 1)"),
    };
    let [q, k, v] = shapes.qkv;
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
        .with_q_bias(shapes.qkv_bias[0])
        .with_k_bias(shapes.qkv_bias[1])
        .with_v_bias(shapes.qkv_bias[2])
        .with_out_proj(shapes.out.is_some())
        .with_out_bias(shapes.out_bias)
        .with_out_dim(shapes.out.map_or(heads_dim, |out| out.rows))
        .with_sinks(has(vb, "sinks"))
        .with_bias_kv(has(vb, "bias_k"));
    let mask = if shapes.heads.is_some() { "heads.0.mask" } else { "mask" };
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

fn matrix(vb: &VarBuilder, name: &str, kind: Kind) -> Result<Matrix> {
    let name = kind.weight(name);
    match *shape(vb, &name)?.as_slice() {
        [columns, rows] if kind.is_transposed() => Ok(Matrix { rows, columns }),
        [rows, columns] => Ok(Matrix { rows, columns }),
        ref other => bail!("[weights] {name} has shape {other:?}, expected a matrix"),
    }
}

/// The matrix of an output projection, if there is one.
fn output(vb: &VarBuilder, name: &str, kind: Kind) -> Result<Option<Matrix>> {
    if has(vb, &kind.weight(name)) { matrix(vb, name, kind).map(Some) } else { Ok(None) }
}

fn has_bias(vb: &VarBuilder, name: &str) -> bool {
    has(vb, &format!("{name}.bias"))
}

fn separate(vb: &VarBuilder, names: [&str; 4], kind: Kind) -> Result<Shapes> {
    let [q, k, v, o] = names;
    Ok(Shapes {
        qkv: [matrix(vb, q, kind)?, matrix(vb, k, kind)?, matrix(vb, v, kind)?],
        qkv_bias: [q, k, v].map(|name| has_bias(vb, name)),
        out: output(vb, o, kind)?,
        out_bias: has_bias(vb, o),
        heads: None,
    })
}

fn stacked(vb: &VarBuilder, names: [&str; 4], kind: Kind) -> Result<Shapes> {
    let heads = (0..).take_while(|head| has(vb, &kind.weight(&format!("heads.{head}.{}", names[0])))).count();
    let [q, k, v, o] = names.map(|name| format!("heads.0.{name}"));
    let first = separate(vb, [&q, &k, &v, &o], kind)?;
    let qkv = first.qkv.map(|Matrix { rows, columns }| Matrix { rows: rows.saturating_mul(heads), columns });
    Ok(Shapes { qkv, out: None, out_bias: false, heads: Some(heads), ..first })
}

fn torch(vb: &VarBuilder) -> Result<Shapes> {
    let part = |name| matrix(vb, name, Kind::Raw(Orientation::OutIn));
    let qkv = if has(vb, "in_proj_weight") {
        let Matrix { rows, columns } = part("in_proj_weight")?;
        [Matrix { rows: divide("in_proj_weight", rows, 3)?, columns }; 3]
    } else {
        [part("q_proj_weight")?, part("k_proj_weight")?, part("v_proj_weight")?]
    };
    Ok(Shapes {
        qkv,
        qkv_bias: [has(vb, "in_proj_bias"); 3],
        out: Some(matrix(vb, "out_proj", Kind::Linear)?),
        out_bias: has_bias(vb, "out_proj"),
        heads: None,
    })
}

/// A packed weight has (H + 2 · H_kv) · D rows; the input of the output projection, H · D, tells D.
fn packed(vb: &VarBuilder, names: [&str; 2], kind: Kind, num_heads: Option<usize>) -> Result<Shapes> {
    let [qkv, out] = names;
    let Matrix { rows, columns } = matrix(vb, qkv, kind)?;
    let out_matrix = output(vb, out, kind)?;
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
    Ok(Shapes {
        qkv: [queries, keys, keys].map(|rows| Matrix { rows, columns }),
        qkv_bias: [has_bias(vb, qkv); 3],
        out: out_matrix,
        out_bias: has_bias(vb, out),
        heads: None,
    })
}
