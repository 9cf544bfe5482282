//! Attention weights under the names that other libraries give them: which names, packings and orders there are, and
//! how the projections of a layer are read from them and written to them.

mod detect;
mod foreign;
mod layout;
mod tensors;

pub use detect::{detect_with, query_weights, stored_shape};
pub use layout::{GATE_NAMES, LayoutTensor, Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
pub use tensors::projection_shape;

use candle_core::{Result, Tensor, bail};
use candle_nn::Linear;
use foreign::{OTHER_OUTPUTS, refuse_foreign};
use tensors::projection_tensors;

use crate::config::{KvSharing, MultiHeadAttentionConfig};
use candle_attention_modules::base::{Heads, Source, WeightAndBias, fits_in_memory};
use candle_attention_modules::gate::GateLayout;
use candle_attention_modules::linear::{ByPlace, Projection, Projections};

/// The projections in any layout, or this process's part of each, where the config is the whole layer's.
///
/// # Errors
/// For a config that the layout cannot hold, and for a missing or misshapen tensor.
pub(crate) fn load_projections(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    source: &Source,
) -> Result<Projections> {
    let own_heads = source.own_range(Heads::Query, cfg.num_heads());
    let tensors = projection_tensors(source.op, cfg, layout, own_heads)?;
    if !cfg.output_gate().is_some_and(|gate| gate.layout != GateLayout::FusedWithQuery) {
        let names = GATE_NAMES.into_iter().flat_map(|name| ["weight", "bias"].map(|part| format!("{name}.{part}")));
        source.refuse(names, "the config says there is no such gate")?;
    }
    let has_gate = source.has(&format!("{}.weight", GATE_NAMES[0]));
    let is_there = |name: &String| source.has(name) && !(has_gate && name.starts_with(GATE_NAMES[1]));
    let mut projections = ByPlace::<WeightAndBias>::new();
    for mut tensor in tensors {
        let stored = &mut tensor.joint.spec.stored;
        if let Some(other) = other_name(stored).filter(is_there) {
            *stored = other;
        }
        for (place, rows) in tensor.places.iter().zip(tensor.joint.read(source)?) {
            projections.entry(*place).or_default().push(rows, tensor.is_bias);
        }
    }
    if !cfg.out_proj() {
        refuse_out_proj(source)?;
    }
    refuse_foreign(layout, cfg.num_heads(), source)?;
    // The published files of layers that read those of an earlier one have both, which nobody reads.
    if cfg.kv_sharing() == KvSharing::KeysAsValues {
        let all = layout.tensors(0, true);
        let values = all.iter().filter(|tensor| tensor.holds(Projection::Value)).map(LayoutTensor::name);
        source.refuse(values, "the config says that values are the keys' projection")?;
    }
    if layout.is_stacked() {
        let h = cfg.num_heads();
        (0..h).try_for_each(|head| refuse_out_proj(&source.pp("heads").pp(head)))?;
        if source.has(&layout.tensors(h, true)[0].name()) {
            return source.fail(format!("the file has more than the {h} heads of the config"));
        }
    }
    Projections::new(&projections, source.vb.dtype(), source.vb.device())
}

/// The other name of a gate's projection; and the parameter beside projections in which the first files of BEiT and
/// VideoMAE keep a bias.
fn other_name(name: &str) -> Option<String> {
    let gate = (GATE_NAMES[0], GATE_NAMES[1]);
    let names = [("query.bias", "q_bias"), ("key.bias", "k_bias"), ("value.bias", "v_bias"), gate];
    names.into_iter().find_map(|(usual, other)| name.contains(usual).then(|| name.replace(usual, other)))
}

/// No layout's output projection may be there, whatever its name: without it the numbers are others.
fn refuse_out_proj(source: &Source) -> Result<()> {
    let of = |name: &str| [format!("{name}.weight"), format!("{name}.bias"), name.to_string()];
    source.refuse(
        WeightLayout::output_names().chain(OTHER_OUTPUTS).flat_map(of),
        "the config says there is no output projection",
    )
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
    let mut named = Vec::new();
    for tensor in projection_tensors("state_dict", cfg, layout, 0..cfg.num_heads())? {
        if let Some(stored) = tensor.join(projections)? {
            named.push((tensor.joint.spec.name, stored));
        }
    }
    let mask_size = cfg.context_length().filter(|_| cfg.causal() && layout.has_mask_buffer());
    if let (Some(t), Some((_, weight))) = (mask_size, named.first()) {
        // Four bytes an entry, and a copy in the weights' own dtype.
        if !fits_in_memory(&[8, t, t]) {
            bail!("[state_dict] the mask buffer of a context length of {t} does not fit in memory (layout {layout})")
        }
        // The book's `triu(ones(T, T), diagonal=1)`: 1 where a key is hidden.
        let mask = Tensor::tril2(t, weight.dtype(), weight.device())?.affine(-1.0, 1.0)?;
        match layout.is_stacked() {
            true => named.extend((0..cfg.num_heads()).map(|head| (format!("heads.{head}.mask"), mask.clone()))),
            false => named.push(("mask".to_string(), mask)),
        }
    }
    Ok(named)
}
