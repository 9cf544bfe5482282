//! Attention weights under the names of other libraries: names, packing and order, and how the projections of a layer
//! are read and written.

mod detect;
mod foreign;
mod layout;
mod layout_tensors;
mod modules;
mod names;
mod source;
mod tensors;

pub use detect::{detect_with, query_weights, wrapper_prefixes};
pub use layout::{Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
pub use layout_tensors::{GATE_NAME, LayoutTensor, OTHER_GATE_NAME};
pub(crate) use modules::module_weights;
pub use modules::{AdaptableModule, AdapterMatrices};
pub use source::TensorSource;
pub use tensors::{ProjectionShape, projection_shape};

use candle_core::{Result, Tensor, bail};
use candle_nn::Linear;
use foreign::{OTHER_OUTPUTS, refuse_foreign};
use tensors::projection_tensors;

use crate::config::{KvSharing, MultiHeadAttentionConfig};
use candle_attention_modules::base::{Heads, ParameterReader, WeightAndBias, fits_in_memory};
use candle_attention_modules::gate::GateLayout;
use candle_attention_modules::linear::{ByProjection, Projection, Projections};

/// Loads the projections in any layout, or this rank's shard of each. The config is that of the whole layer.
///
/// # Errors
/// For a config that does not fit the layout, for a missing or misshapen tensor, and for parameters that the layer
/// would pass over although they change the output.
pub(crate) fn load_projections(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    reader: &ParameterReader,
) -> Result<Projections> {
    let own_heads = reader.own_range(Heads::Query, cfg.num_heads());
    let tensors = projection_tensors(reader.op, cfg, layout, own_heads)?;
    if !cfg.output_gate().is_some_and(|gate| gate.layout != GateLayout::FusedWithQuery) {
        let modules = [GATE_NAME, OTHER_GATE_NAME].into_iter();
        let names = modules.flat_map(|module| [format!("{module}.weight"), format!("{module}.bias")]);
        reader.refuse(names, "the config says there is no such gate")?;
    }
    let has_gate = reader.has(&format!("{GATE_NAME}.weight"));
    let mut projections = ByProjection::<WeightAndBias>::new();
    for mut tensor in tensors {
        let stored = &mut tensor.tensor.spec.stored;
        if let Some(other) = other_name(stored)
            && reader.has(&other)
            && !(has_gate && other.starts_with(OTHER_GATE_NAME))
        {
            *stored = other;
        }
        for (projection, rows) in tensor.projections.iter().zip(tensor.tensor.read(reader)?) {
            let parameters = projections.entry(*projection).or_default();
            if tensor.is_bias { parameters.push_bias(rows) } else { parameters.push_weight(rows) }
        }
    }
    refuse_unused(cfg, layout, reader)?;
    Projections::new(&projections, reader.vb.dtype(), reader.vb.device())
}

/// Refuses parameters that change the output and that a layer of this config would pass over.
fn refuse_unused(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, reader: &ParameterReader) -> Result<()> {
    if !cfg.out_proj() {
        refuse_out_proj(reader)?;
    }
    refuse_foreign(layout, cfg.num_heads(), reader)?;
    // The published files of layers that read the keys and values of an earlier layer have both, and no model reads
    // them.
    if cfg.kv_sharing() == KvSharing::KeysAsValues {
        let all = layout.tensors(0, true);
        let values = all.iter().filter(|tensor| tensor.holds(Projection::Value)).map(LayoutTensor::name);
        reader.refuse(values, "the config says that values are the keys' projection")?;
    }
    if layout.is_stacked() {
        let h = cfg.num_heads();
        for head in 0..h {
            refuse_out_proj(&reader.pp("heads").pp(head))?;
        }
        if reader.has(&layout.tensors(h, true)[0].name()) {
            return reader.fail(format!("the file has more than the {h} heads of the config"));
        }
    }
    Ok(())
}

/// Returns the other name that some files have for a parameter: that of a gate's projection; and the parameters outside
/// the projections in which the first files of BEiT and VideoMAE store biases.
fn other_name(name: &str) -> Option<String> {
    for (usual, other) in
        [("query.bias", "q_bias"), ("key.bias", "k_bias"), ("value.bias", "v_bias"), (GATE_NAME, OTHER_GATE_NAME)]
    {
        if name.contains(usual) {
            return Some(name.replace(usual, other));
        }
    }
    None
}

/// Refuses an output projection of any layout, which would change the output.
fn refuse_out_proj(reader: &ParameterReader) -> Result<()> {
    let names_of = |name: &str| [format!("{name}.weight"), format!("{name}.bias"), name.to_string()];
    let names = WeightLayout::output_names().chain(OTHER_OUTPUTS).flat_map(names_of);
    reader.refuse(names, "the config says there is no output projection")
}

/// Returns the tensors of a layer's projections, and the mask that some layouts store: the inverse of
/// [`load_projections`].
///
/// # Errors
/// For a config that does not fit the layout.
pub(crate) fn state_dict(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    projections: &ByProjection<Linear>,
) -> Result<Vec<(String, Tensor)>> {
    let mut named = Vec::new();
    for tensor in projection_tensors("state_dict", cfg, layout, 0..cfg.num_heads())? {
        if let Some(stored) = tensor.join(projections)? {
            named.push((tensor.tensor.spec.name, stored));
        }
    }
    let mask_size = cfg.context_length().filter(|_| cfg.causal() && layout.has_mask_buffer());
    if let Some(t) = mask_size
        && let Some((_, weight)) = named.first()
    {
        // Four bytes an entry, and a copy in the dtype of the weights.
        if !fits_in_memory(&[8, t, t]) {
            bail!("[state_dict] the mask buffer of a context length of {t} does not fit in memory (layout {layout})")
        }
        // The book's `triu(ones(T, T), diagonal=1)`: 1 where a key is masked.
        let mask = Tensor::tril2(t, weight.dtype(), weight.device())?.affine(-1.0, 1.0)?;
        if layout.is_stacked() {
            named.extend((0..cfg.num_heads()).map(|head| (format!("heads.{head}.mask"), mask.clone())));
        } else {
            named.push(("mask".to_string(), mask));
        }
    }
    Ok(named)
}
