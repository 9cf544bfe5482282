//! A config from the shapes of a checkpoint.

use candle_core::{Result, bail};

use super::detect::Names;
use super::layout::{Naming, Orientation, Storage, WeightLayout};
use crate::MultiHeadAttentionConfig;

/// What the shapes say: (out, in) of each projection and which have a bias.
struct Shapes {
    qkv: [(usize, usize); 3],
    qkv_bias: [bool; 3],
    out: Option<(usize, usize)>,
    out_bias: bool,
    /// Set by a stack of heads.
    heads: Option<usize>,
}

pub(super) fn infer_config(
    names: &dyn Names,
    layout: WeightLayout,
    num_heads: Option<usize>,
) -> Result<MultiHeadAttentionConfig> {
    if names.has("q_norm.weight") || names.has("k_norm.weight") {
        bail!("[weights] the layer normalises queries and keys (q_norm); shapes do not tell how, so give a config")
    }
    let shapes = match layout {
        WeightLayout::StackedHeads(naming, storage) => stacked(names, naming, storage)?,
        WeightLayout::Torch => torch(names)?,
        WeightLayout::Conv1d => packed(names, ["c_attn", "c_proj"], Storage::Raw(Orientation::InOut), num_heads)?,
        WeightLayout::Packed(naming, _) => packed(names, naming.names(), Storage::Linear, num_heads)?,
        _ => separate(names, layout)?,
    };
    let h = match (shapes.heads, num_heads) {
        (Some(counted), Some(said)) if counted != said => {
            bail!("[weights] the file has a stack of {counted} heads, but num_heads is {said}")
        }
        (Some(h), _) | (None, Some(h)) if h > 0 => h,
        _ => bail!("[weights] shapes do not tell the number of heads; give num_heads (at least 1)"),
    };
    let [q, k, v] = shapes.qkv;
    let head_dim = divide("the query projection", q.0, h)?;
    let h_kv = divide("the key projection", k.0, head_dim)?;
    let value_head_dim = divide("the value projection", v.0, h_kv)?;
    let mut cfg = MultiHeadAttentionConfig::new(q.1, h)
        .with_num_kv_heads(h_kv)
        .with_head_dim(head_dim)
        .with_value_head_dim(value_head_dim)
        .with_key_size(k.1)
        .with_value_size(v.1)
        .with_q_bias(shapes.qkv_bias[0])
        .with_k_bias(shapes.qkv_bias[1])
        .with_v_bias(shapes.qkv_bias[2])
        .with_out_proj(shapes.out.is_some())
        .with_out_bias(shapes.out_bias)
        .with_out_dim(shapes.out.map_or(h * value_head_dim, |out| out.0))
        .with_sinks(names.has("sinks"))
        .with_bias_kv(names.has("bias_k"));
    // The buffer of the modules that register one; elsewhere a tensor of this name is something else.
    let mask = match layout {
        WeightLayout::Book | WeightLayout::Short => Some("mask"),
        WeightLayout::StackedHeads(Naming::Book | Naming::Short, _) => Some("heads.0.mask"),
        _ => None,
    };
    if let Some(mask) = mask.filter(|name| names.has(name))
        && let &[rows, columns] = names.shape(mask)?.as_slice()
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

/// (out, in) of a projection.
fn shape(names: &dyn Names, name: &str, storage: Storage) -> Result<(usize, usize)> {
    let name = if storage == Storage::Linear { format!("{name}.weight") } else { name.to_string() };
    match (names.shape(&name)?.as_slice(), storage) {
        (&[out_dim, in_dim], Storage::Linear | Storage::Raw(Orientation::OutIn)) => Ok((out_dim, in_dim)),
        (&[in_dim, out_dim], Storage::Raw(Orientation::InOut)) => Ok((out_dim, in_dim)),
        (other, _) => bail!("[weights] {name} has shape {other:?}, expected a matrix"),
    }
}

fn has_projection(names: &dyn Names, name: &str, storage: Storage) -> bool {
    if storage == Storage::Linear { names.has(&format!("{name}.weight")) } else { names.has(name) }
}

fn has_bias(names: &dyn Names, name: &str) -> bool {
    names.has(&format!("{name}.bias"))
}

fn separate(names: &dyn Names, layout: WeightLayout) -> Result<Shapes> {
    let Some(([q, k, v, o], storage)) = layout.separate() else {
        bail!("[weights] the projections of {layout} are not apart")
    };
    let out = has_projection(names, o, storage).then(|| shape(names, o, storage)).transpose()?;
    Ok(Shapes {
        qkv: [shape(names, q, storage)?, shape(names, k, storage)?, shape(names, v, storage)?],
        qkv_bias: [q, k, v].map(|name| has_bias(names, name)),
        out,
        out_bias: has_bias(names, o),
        heads: None,
    })
}

fn stacked(names: &dyn Names, naming: Naming, storage: Storage) -> Result<Shapes> {
    let [q, k, v, _] = naming.names();
    let mut heads = 0;
    while has_projection(names, &format!("heads.{heads}.{q}"), storage) {
        heads += 1;
    }
    let whole = |name: &str| -> Result<(usize, usize)> {
        let (out_dim, in_dim) = shape(names, &format!("heads.0.{name}"), storage)?;
        Ok((out_dim.saturating_mul(heads), in_dim))
    };
    Ok(Shapes {
        qkv: [whole(q)?, whole(k)?, whole(v)?],
        qkv_bias: [q, k, v].map(|name| has_bias(names, &format!("heads.0.{name}"))),
        out: None,
        out_bias: false,
        heads: Some(heads),
    })
}

fn torch(names: &dyn Names) -> Result<Shapes> {
    let qkv = if names.has("in_proj_weight") {
        let (rows, in_dim) = shape(names, "in_proj_weight", Storage::Raw(Orientation::OutIn))?;
        [(divide("in_proj_weight", rows, 3)?, in_dim); 3]
    } else {
        let part = |name| shape(names, name, Storage::Raw(Orientation::OutIn));
        [part("q_proj_weight")?, part("k_proj_weight")?, part("v_proj_weight")?]
    };
    Ok(Shapes {
        qkv,
        qkv_bias: [names.has("in_proj_bias"); 3],
        out: Some(shape(names, "out_proj", Storage::Linear)?),
        out_bias: has_bias(names, "out_proj"),
        heads: None,
    })
}

/// A packed weight has (H + 2 · H_kv) · D rows; the input of the output projection, H · D, tells D.
fn packed(names: &dyn Names, [qkv, out]: [&str; 2], storage: Storage, num_heads: Option<usize>) -> Result<Shapes> {
    let transposed = storage == Storage::Raw(Orientation::InOut);
    let matrix = |name: &str| {
        let (out_dim, in_dim) = shape(names, name, Storage::Linear)?;
        Ok::<_, candle_core::Error>(if transposed { (in_dim, out_dim) } else { (out_dim, in_dim) })
    };
    let (rows, in_dim) = matrix(qkv)?;
    let out_shape = has_projection(names, out, Storage::Linear).then(|| matrix(out)).transpose()?;
    let queries = match out_shape {
        Some((_, heads)) => heads,
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
        qkv: [(queries, in_dim), (keys, in_dim), (keys, in_dim)],
        qkv_bias: [has_bias(names, qkv); 3],
        out: out_shape,
        out_bias: has_bias(names, out),
        heads: None,
    })
}
