//! The projections of a layer or of one process's heads, from any layout and to any layout that can hold them.

use candle_core::{Error, Result, Tensor};

use super::layout::{Form, WeightLayout};
use super::tensors::{GATE_NAMES, Rows, projection_tensors};
use crate::base::{HeadShard, Part, Source, fits_in_memory};
use crate::config::{KvSource, MultiHeadAttentionConfig};
use crate::gate::GatePlace;
use crate::linear::{Linears, LoadedProjections, PROJECTIONS, ProjectionRows};

/// The projections in any layout; of a `shard`, its part of each, where the config is the whole layer's.
///
/// # Errors
/// For a config that the layout cannot hold, and for a missing or misshapen tensor.
pub(crate) fn load_projections(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    shard: Option<HeadShard>,
    source: &Source,
) -> Result<LoadedProjections> {
    let has_weight = |name: &&str| source.has(&format!("{name}.weight"));
    let gate_name = GATE_NAMES.into_iter().find(has_weight).unwrap_or(GATE_NAMES[0]);
    let tensors = projection_tensors(cfg, layout, gate_name).or_else(|problem| source.fail(problem))?;
    if !cfg.output_gate().is_some_and(|gate| gate.place != GatePlace::Query) {
        source.refuse(&format!("{gate_name}.weight"), "the config says there is no such gate")?;
    }
    let shares = shard.map(|shard| {
        let (queries, keys) = shard.shares(cfg.num_heads(), cfg.num_kv_heads());
        [queries, keys, keys, queries, queries]
    });
    let mut projections: [ProjectionRows; PROJECTIONS] = Default::default();
    for mut tensor in tensors {
        if let Some(beside) =
            tensor.is_bias.then(|| bias_beside(&tensor.name)).flatten().filter(|name| source.has(name))
        {
            tensor.name = beside;
        }
        if !tensor.is_wanted {
            source.refuse(&tensor.name, "the config says there is no such bias")?;
            continue;
        }
        let part = match (tensor.rows, shares) {
            // A share of the heads is one of rows, or of the columns of the output projection, whose bias is whole.
            (Rows::Projection(i), Some(shares)) if i != 3 || !tensor.is_bias => {
                Some(Part { dim: usize::from((i == 3) != tensor.is_transposed), share: shares[i] })
            }
            _ => None,
        };
        let stored = source.get_part(&tensor.shape, &tensor.name, tensor.init, part)?;
        let stored = match (tensor.rows, shard) {
            // Each process's output is added to the others': one of them adds the bias.
            (Rows::Projection(3), Some(shard)) if tensor.is_bias && shard.rank() > 0 => stored.zeros_like()?,
            _ if tensor.is_transposed => stored.t()?,
            _ => stored,
        };
        for (i, piece) in tensor.rows.split(stored) {
            let piece = match (tensor.rows, shares) {
                (Rows::Head { head, .. }, Some(shares)) if !shares[i].range(cfg.num_heads()).contains(&head) => {
                    continue;
                }
                (Rows::Several { .. }, Some(shares)) => piece.share(shares[i])?,
                _ => piece,
            };
            projections[i].push(piece, tensor.is_bias);
        }
    }
    if !cfg.out_proj() {
        refuse_out_proj(source)?;
    }
    // The published files of layers that read those of an earlier one have both, which nobody reads.
    if let (KvSource::KeysAsValues, Form::Separate([.., value, _], kind)) = (cfg.kv_source(), layout.form()) {
        source.refuse(&kind.weight(value), "the config says that values are the keys' projection")?;
    }
    if let Form::Stacked([query, ..], kind) = layout.form() {
        let h = cfg.num_heads();
        (0..h).try_for_each(|head| refuse_out_proj(&source.pp("heads").pp(head)))?;
        if source.has(&kind.weight(&format!("heads.{h}.{query}"))) {
            return source.fail(format!("the file has more than the {h} heads of the config"));
        }
    }
    Ok(projections.map(|rows| (!rows.is_empty()).then_some(rows)))
}

/// The parameter beside the projections in which BEiT's and VideoMAE's first files keep a bias.
fn bias_beside(name: &str) -> Option<String> {
    let names = [("query.bias", "q_bias"), ("key.bias", "k_bias"), ("value.bias", "v_bias")];
    names.into_iter().find_map(|(usual, beside)| Some(format!("{}{beside}", name.strip_suffix(usual)?)))
}

/// No layout's output projection may be there, whatever its name: without it the numbers are others.
fn refuse_out_proj(source: &Source) -> Result<()> {
    for name in WeightLayout::output_names() {
        for name in [format!("{name}.weight"), name.to_string()] {
            source.refuse(&name, "the config says there is no output projection")?;
        }
    }
    Ok(())
}

/// The inverse of [`load_projections`]: the tensors of a layer's projections, and the mask that some layouts keep.
///
/// # Errors
/// For a config that the layout cannot hold.
pub(crate) fn state_dict(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    projections: &Linears,
) -> Result<Vec<(String, Tensor)>> {
    let fail = |problem: String| Error::msg(format!("[state_dict] {problem} (layout {layout})"));
    let Linears { q, k, v, o, gate } = projections;
    let linears = [Some(q), k.as_ref(), v.as_ref(), o.as_ref(), gate.as_ref()];
    let mut named = Vec::new();
    for tensor in projection_tensors(cfg, layout, GATE_NAMES[0]).map_err(fail)?.filter(|tensor| tensor.is_wanted) {
        let rows_of =
            |i: usize| linears[i].and_then(|linear| if tensor.is_bias { linear.bias() } else { Some(linear.weight()) });
        let Some(stored) = tensor.rows.join(rows_of)? else { continue };
        let stored = if tensor.is_transposed { stored.t()? } else { stored };
        named.push((tensor.name, stored.contiguous()?));
    }
    if let Some(t) = cfg.context_length().filter(|_| cfg.causal() && layout.has_mask_buffer()) {
        // Four bytes an entry, and a copy in the weights' own dtype.
        if !fits_in_memory(&[8, t, t]) {
            return Err(fail(format!("the mask buffer of a context length of {t} does not fit in memory")));
        }
        // The book's `triu(ones(T, T), diagonal=1)`: 1 where a key is hidden.
        let hidden: Vec<f32> = (0..t * t).map(|at| if at % t > at / t { 1.0 } else { 0.0 }).collect();
        let mask = Tensor::from_vec(hidden, (t, t), q.weight().device())?.to_dtype(q.weight().dtype())?;
        match layout.form() {
            Form::Stacked(..) => {
                named.extend((0..cfg.num_heads()).map(|head| (format!("heads.{head}.mask"), mask.clone())))
            }
            _ => named.push(("mask".to_string(), mask)),
        }
    }
    Ok(named)
}
