//! Infers the config of a layer from the names and shapes of its tensors.

use candle_core::{Result, bail};

use candle_attention_core::internal::{GATE_NAME, LayoutTensor, MaskBuffer, OTHER_GATE_NAME, TensorSource};
use candle_attention_core::{MultiHeadAttentionConfig, WeightLayout};
use candle_attention_modules::base::StoredDims;
use candle_attention_modules::linear::Projection::{Gate, Key, Output, Query, Value};
use candle_attention_modules::norm::{KEY_NORM_NAMES, QUERY_NORM_NAMES};

/// The size of a projection: rows (out) and columns (in), as an `nn.Linear` has them.
#[derive(Clone, Copy)]
struct ProjectionSize {
    rows: usize,
    columns: usize,
}

/// The sizes of the projections of queries, keys and values.
struct Inputs {
    query: ProjectionSize,
    key: ProjectionSize,
    value: ProjectionSize,
}

/// Returns the config that the shapes of a layer imply.
///
/// # Errors
/// If the shapes allow several configs, and for weights that do not fit together.
pub(super) fn infer_config(
    tensors: &impl TensorSource,
    layout: WeightLayout,
    num_heads: Option<usize>,
) -> Result<MultiHeadAttentionConfig> {
    refuse_untold(tensors)?;
    let named = layout.tensors(0, tensors.contains("in_proj_weight"));
    for tensor in named.iter().filter(|tensor| !tensor.is_bias) {
        let name = tensor.name();
        if let Some(quantized) = tensors.quantized(&name) {
            bail!("[weights] {name} {quantized}")
        }
    }
    let mut biased = Vec::new();
    for tensor in named.iter().filter(|tensor| tensor.is_bias) {
        let other = tensor.other_name();
        if tensors.contains(&tensor.name()) || other.is_some_and(|name| tensors.contains(&name)) {
            biased.extend(tensor.projections);
        }
    }
    if let WeightLayout::Packed(..) = layout {
        let separate = LayoutTensor::separate_biases();
        for tensor in separate.iter().filter(|tensor| tensors.contains(&tensor.name())) {
            biased.extend(tensor.projections);
        }
    }
    let Some(out_weight) = named.iter().find(|tensor| tensor.holds(Output)) else {
        bail!("[weights] the layout {layout} has no output projection")
    };
    let out = if tensors.contains(&out_weight.name()) { Some(matrix(tensors, out_weight)?) } else { None };
    let stack = layout.is_stacked().then(|| stacked_heads(tensors, layout));
    let counted = match stack {
        Some(heads) => Some(heads),
        None => heads_of_kernel(tensors, &named)?,
    };
    let inputs = inputs(tensors, &named, out_weight, out, num_heads)?;
    let h = match (counted, num_heads) {
        (Some(counted), Some(given)) if counted != given => {
            let what = if stack.is_some() { "a stack of" } else { "kernels of" };
            bail!("[weights] the file has {what} {counted} heads, but num_heads is {given}")
        }
        (Some(h), _) | (None, Some(h)) if h > 0 => h,
        _ => bail!("[weights] shapes do not tell the number of heads; give num_heads (at least 1)"),
    };
    // A stack has the rows of one head in each tensor.
    let rows = |matrix: ProjectionSize| matrix.rows.saturating_mul(stack.unwrap_or(1));
    let head_dim = divide("the query projection", rows(inputs.query), h)?;
    let h_kv = divide("the key projection", rows(inputs.key), head_dim)?;
    let value_head_dim = divide("the value projection", rows(inputs.value), h_kv)?;
    let Some(heads_dim) = h.checked_mul(value_head_dim) else {
        bail!("[weights] {h} heads of {value_head_dim} values are too large to address")
    };
    let mut cfg = MultiHeadAttentionConfig::new(inputs.query.columns, h)
        .with_num_kv_heads(h_kv)
        .with_head_dim(head_dim)
        .with_value_head_dim(value_head_dim)
        .with_kdim(inputs.key.columns)
        .with_vdim(inputs.value.columns)
        .with_q_bias(biased.contains(&Query))
        .with_k_bias(biased.contains(&Key))
        .with_v_bias(biased.contains(&Value))
        .with_out_proj(out.is_some())
        .with_out_bias(out.is_some() && biased.contains(&Output))
        .with_out_dim(out.map_or(heads_dim, |out| out.rows))
        .with_sinks(tensors.contains("sinks"))
        .with_bias_kv(tensors.contains("bias_k"));
    if tensors.contains("mem_k")
        && let [_, count, _] = tensors.shape("mem_k")?[..]
    {
        cfg = cfg.with_num_mem_kv(count);
    }
    if let Some(MaskBuffer { name, .. }) = layout.mask_buffer() {
        let mask = if stack.is_some() { format!("heads.0.{name}") } else { name.to_string() };
        if tensors.contains(&mask)
            && let [queries, keys] = tensors.shape(&mask)?[..]
            && queries == keys
        {
            cfg = cfg.with_causal(true).with_context_length(keys);
        }
    }
    cfg.validate()?;
    Ok(cfg)
}

/// Refuses layers with options that shapes do not tell.
fn refuse_untold(tensors: &impl TensorSource) -> Result<()> {
    let norms = QUERY_NORM_NAMES.iter().chain(KEY_NORM_NAMES);
    if let Some(norm) = norms.into_iter().find(|norm| tensors.contains(&norm.weight_name())) {
        bail!(
            "[weights] the layer normalises queries and keys ({}); shapes do not tell how, so give a config",
            norm.module
        )
    }
    if let Some(name) =
        [GATE_NAME, OTHER_GATE_NAME].into_iter().find(|name| tensors.contains(&format!("{name}.weight")))
    {
        bail!("[weights] the layer has an output gate ({name}); shapes do not tell its activation, so give a config")
    }
    Ok(())
}

/// Returns the number of heads of the query kernel, if kernels have a dimension of heads.
fn heads_of_kernel(tensors: &impl TensorSource, named: &[LayoutTensor]) -> Result<Option<usize>> {
    let Some(query) = named.iter().find(|tensor| tensor.holds(Query) && tensor.dims() == StoredDims::InHeads) else {
        return Ok(None);
    };
    match tensors.shape(&query.name())?[..] {
        [_, heads, _] => Ok(Some(heads)),
        _ => Ok(None),
    }
}

/// Returns the number of heads of a stack.
fn stacked_heads(tensors: &impl TensorSource, layout: WeightLayout) -> usize {
    let mut heads = 0;
    while tensors.contains(&layout.tensors(heads, true)[0].name()) {
        heads += 1;
    }
    heads
}

/// Returns the sizes of the projections of queries, keys and values.
fn inputs(
    tensors: &impl TensorSource,
    named: &[LayoutTensor],
    out_weight: &LayoutTensor,
    out: Option<ProjectionSize>,
    num_heads: Option<usize>,
) -> Result<Inputs> {
    let mut weights = named.iter().filter(|tensor| !tensor.is_bias && !tensor.holds(Gate) && !tensor.holds(Output));
    let Some(first) = weights.next() else { bail!("[weights] the layout has no projections") };
    let (Some(second), Some(third)) = (weights.next(), weights.next()) else {
        return packed(matrix(tensors, first)?, &first.module, &out_weight.module, out, num_heads);
    };
    let mut query = matrix(tensors, first)?;
    let mut key = matrix(tensors, second)?;
    if second.holds(Query) {
        std::mem::swap(&mut query, &mut key);
    }
    Ok(Inputs { query, key, value: matrix(tensors, third)? })
}

fn divide(what: &str, rows: usize, by: usize) -> Result<usize> {
    if by == 0 || rows == 0 || !rows.is_multiple_of(by) {
        bail!("[weights] {what} has {rows} rows, which is no multiple of {by}; is num_heads right?")
    }
    Ok(rows / by)
}

fn matrix(tensors: &impl TensorSource, weight: &LayoutTensor) -> Result<ProjectionSize> {
    let name = weight.name();
    let shape = tensors.shape(&name)?;
    match (weight.dims(), &shape[..]) {
        (StoredDims::OutIn, &[rows, columns]) => Ok(ProjectionSize { rows, columns }),
        (StoredDims::InOut, &[columns, rows]) => Ok(ProjectionSize { rows, columns }),
        (StoredDims::InHeads, &[columns, heads, width]) => {
            Ok(ProjectionSize { rows: heads.saturating_mul(width), columns })
        }
        (StoredDims::HeadsOut, &[heads, width, rows]) => {
            Ok(ProjectionSize { rows, columns: heads.saturating_mul(width) })
        }
        (StoredDims::InHeads | StoredDims::HeadsOut, other) => {
            bail!("[weights] {name} has shape {other:?}, expected three dimensions")
        }
        (_, other) => bail!("[weights] {name} has shape {other:?}, expected a matrix"),
    }
}

/// Divides the rows of a packed weight, which has (H + 2 · H_kv) · D of them, into queries, keys and values. The input
/// of the output projection, H · D, tells the number of query rows.
fn packed(
    weight: ProjectionSize,
    name: &str,
    out_name: &str,
    out: Option<ProjectionSize>,
    num_heads: Option<usize>,
) -> Result<Inputs> {
    let ProjectionSize { rows, columns } = weight;
    if name == "c_attn" && columns == rows.saturating_mul(3) && rows > 0 {
        bail!(
            "[weights] {name} has {rows} outputs and {columns} inputs, expected three times as many outputs as inputs: \
             GPT-2's file has the layout `conv1d`, nanoGPT's `packed:c_attn`"
        )
    }
    let queries = match out {
        Some(out) => out.columns,
        None if num_heads == Some(1) => divide(name, rows, 3)?,
        None => bail!("[weights] without {out_name} the rows of {name} do not tell which are keys; give a config"),
    };
    let Some(rest) = rows.checked_sub(queries).filter(|rest| rest.is_multiple_of(2)) else {
        bail!(
            "[weights] {name} has {rows} rows, which is not {queries} query rows and the same number of keys and values"
        )
    };
    let keys = rest / 2;
    if let Some(h) = num_heads.filter(|&h| h > 0) {
        divide(name, keys, divide(name, queries, h)?)?;
    }
    let part = |count| ProjectionSize { rows: count, columns };
    Ok(Inputs { query: part(queries), key: part(keys), value: part(keys) })
}
