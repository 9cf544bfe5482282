//! Attention weights under the names that other libraries give them: which names, packings and orders there are, and
//! how the projections of a layer are read from them and written to them.

mod detect;
mod layout;
mod tensors;

pub use detect::{detect_with, infer_config, query_weights};
pub use layout::{Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
pub use tensors::projection_shape;

use candle_core::{Error, Result, Tensor};
use candle_nn::Linear;
use layout::Form;
use tensors::{GATE_NAMES, Part, heads_of, projection_tensors};

use crate::config::{KvSource, MultiHeadAttentionConfig};
use candle_attention_modules::base::{Heads, Parameter, Source, Spec, fits_in_memory};
use candle_attention_modules::gate::GatePlace;
use candle_attention_modules::linear::{ByPlace, ProjectionPlace, ProjectionRows};

/// The projections in any layout, or this process's part of each, where the config is the whole layer's.
///
/// # Errors
/// For a config that the layout cannot hold, and for a missing or misshapen tensor.
pub(crate) fn load_projections(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    source: &Source,
) -> Result<ByPlace<ProjectionRows>> {
    let has_weight = |name: &&str| source.has(&format!("{name}.weight"));
    let gate_name = GATE_NAMES.into_iter().find(has_weight).unwrap_or(GATE_NAMES[0]);
    let tensors = projection_tensors(cfg, layout, gate_name).or_else(|problem| source.fail(problem))?;
    if !cfg.output_gate().is_some_and(|gate| gate.place != GatePlace::Query) {
        for parameter in ["weight", "bias"] {
            source.refuse(&format!("{gate_name}.{parameter}"), "the config says there is no such gate")?;
        }
    }
    let own_inputs = source.own_range(Heads::Query, projection_shape(cfg, ProjectionPlace::Output).1);
    let mut projections = ByPlace::<ProjectionRows>::new();
    for mut tensor in tensors {
        let beside = tensor.is_bias.then(|| bias_beside(&tensor.spec.name)).flatten();
        if let Some(beside) = beside.filter(|name| source.has(name)) {
            tensor.spec = Spec::new(beside, tensor.spec.shape, tensor.spec.init);
        }
        if !tensor.is_wanted {
            source.refuse(&tensor.spec.name, "the config says there is no such bias")?;
            continue;
        }
        // Of the rows of this process's heads those that are in the tensor.
        let own_rows = |Part { place, rows, first }: &Part| {
            let own = source.own_range(heads_of(*place), projection_shape(cfg, *place).0);
            own.start.clamp(*first, first + rows.count()) - first..own.end.clamp(*first, first + rows.count()) - first
        };
        match tensor.parts.as_slice() {
            [Part { place: ProjectionPlace::Output, .. }] => {
                let stored = match tensor.is_bias {
                    true => source.bias_of_sum(tensor.read(source)?)?,
                    false => tensor.read_part(1, own_inputs.clone(), source)?,
                };
                projections.entry(ProjectionPlace::Output).or_default().push(stored.into(), tensor.is_bias);
            }
            parts => {
                // A tensor of several is read once.
                let whole = if parts.len() > 1 { Some(tensor.read(source)?) } else { None };
                for part in parts {
                    let own = own_rows(part);
                    let rows = match &whole {
                        Some(whole) => Parameter::of(whole.clone(), part.rows.clone()).narrow(own)?,
                        None if own.is_empty() => continue,
                        None => tensor.read_part(0, own, source)?.into(),
                    };
                    projections.entry(part.place).or_default().push(rows, tensor.is_bias);
                }
            }
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
    Ok(projections)
}

/// The parameter beside the projections in which BEiT's and VideoMAE's first files keep a bias.
fn bias_beside(name: &str) -> Option<String> {
    let names = [("query.bias", "q_bias"), ("key.bias", "k_bias"), ("value.bias", "v_bias")];
    names.into_iter().find_map(|(usual, beside)| Some(format!("{}{beside}", name.strip_suffix(usual)?)))
}

/// No layout's output projection may be there, whatever its name: without it the numbers are others.
fn refuse_out_proj(source: &Source) -> Result<()> {
    for name in WeightLayout::output_names() {
        for name in [format!("{name}.weight"), format!("{name}.bias"), name.to_string()] {
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
    projections: &ByPlace<Linear>,
) -> Result<Vec<(String, Tensor)>> {
    let fail = |problem: String| Error::msg(format!("[state_dict] {problem} (layout {layout})"));
    let mut named = Vec::new();
    for tensor in projection_tensors(cfg, layout, GATE_NAMES[0]).map_err(fail)?.filter(|tensor| tensor.is_wanted) {
        let rows_of = |place: ProjectionPlace| {
            let linear = projections.get(&place)?;
            if tensor.is_bias { linear.bias() } else { Some(linear.weight()) }
        };
        if let Some(stored) = tensor.join(rows_of)? {
            named.push((tensor.spec.name, stored));
        }
    }
    let mask_size = cfg.context_length().filter(|_| cfg.causal() && layout.has_mask_buffer());
    if let (Some(t), Some((_, weight))) = (mask_size, named.first()) {
        // Four bytes an entry, and a copy in the weights' own dtype.
        if !fits_in_memory(&[8, t, t]) {
            return Err(fail(format!("the mask buffer of a context length of {t} does not fit in memory")));
        }
        // The book's `triu(ones(T, T), diagonal=1)`: 1 where a key is hidden.
        let hidden: Vec<f32> = (0..t * t).map(|at| if at % t > at / t { 1.0 } else { 0.0 }).collect();
        let mask = Tensor::from_vec(hidden, (t, t), weight.device())?.to_dtype(weight.dtype())?;
        match layout.form() {
            Form::Stacked(..) => {
                named.extend((0..cfg.num_heads()).map(|head| (format!("heads.{head}.mask"), mask.clone())))
            }
            _ => named.push(("mask".to_string(), mask)),
        }
    }
    Ok(named)
}
