//! Attention weights under the names of other libraries: names, packing and order, and how the projections of a layer
//! are read and written.

mod detect;
mod foreign;
mod forgotten;
mod layout;
mod layout_tensors;
mod modules;
mod names;
mod nearest;
mod rope_style;
mod source;
mod tensors;

use detect::readings;
pub use detect::{detect_with, query_weights, wrapper_prefixes};
pub use layout::{DenseNaming, Naming, Orientation, PackedNaming, QkvOrder, Storage, WeightLayout};
pub use layout_tensors::{GATE_NAME, LayoutTensor, MaskBuffer, OTHER_GATE_NAME};
pub use modules::{AdaptableModule, AdapterMatrices, ParameterName};
pub(crate) use modules::{Replacement, module_weights, replaced_rows, warn_of_adapter};
pub use nearest::nearest_layout;
pub use source::TensorSource;
pub use tensors::{ProjectionShape, projection_shape};

use candle_core::{Error, Result, Tensor, bail};
use candle_nn::{Linear, VarBuilder};
use foreign::refuse_foreign;
use forgotten::forgotten_option;
use layout_tensors::other_name;
use rope_style::warn_of_rope_style;
use tensors::{ProjectionTensor, has_separate_biases, projection_tensors};

use crate::config::{KvSharing, MultiHeadAttentionConfig};
use candle_attention_modules::base::{Heads, ParameterReader, WeightAndBias, fits_in_memory, root};
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
    warn_of_rope_style(cfg, layout, reader);
    let own_heads = reader.own_range(Heads::Query, cfg.num_heads());
    let separate_biases = has_separate_biases(cfg, layout) || stores_separate_biases(layout, reader);
    let tensors = projection_tensors(reader.op, cfg, layout, own_heads, separate_biases)?;
    if !cfg.output_gate().is_some_and(|gate| gate.layout != GateLayout::FusedWithQuery) {
        let modules = [GATE_NAME, OTHER_GATE_NAME].into_iter();
        let names = modules.flat_map(|module| [format!("{module}.weight"), format!("{module}.bias")]);
        reader.refuse(names, "the config says there is no such gate")?;
    }
    let projections = read_projections(cfg, layout, tensors, reader)?;
    refuse_other_biases(layout, separate_biases, reader)?;
    refuse_unused(cfg, layout, reader)?;
    Projections::new(&projections, reader.vb.dtype(), reader.vb.device())
}

/// Returns whether a file has biases of q, k and v next to a packed weight, and no packed bias.
fn stores_separate_biases(layout: WeightLayout, reader: &ParameterReader) -> bool {
    let has_packed_bias =
        || layout.tensors(0, true).iter().any(|tensor| is_packed_bias(tensor) && reader.has(&tensor.name()));
    let has_own = || LayoutTensor::separate_biases().iter().any(|tensor| reader.has(&tensor.name()));
    matches!(layout, WeightLayout::Packed(..)) && has_own() && !has_packed_bias()
}

fn is_packed_bias(tensor: &LayoutTensor) -> bool {
    tensor.is_bias && tensor.projections.len() > 1
}

/// Refuses biases of q, k and v under a name that was not read.
fn refuse_other_biases(layout: WeightLayout, separate_biases: bool, reader: &ParameterReader) -> Result<()> {
    if separate_biases {
        let tensors = layout.tensors(0, true);
        let packed = tensors.iter().filter(|tensor| is_packed_bias(tensor)).map(LayoutTensor::name);
        return reader.refuse(packed, "the config says that some of q, k and v have no bias");
    }
    let mut unread: Vec<_> = LayoutTensor::separate_biases().iter().map(LayoutTensor::name).collect();
    for tensor in layout.tensors(0, true).iter().filter(|tensor| tensor.is_bias) {
        let Some(other) = tensor.other_name() else { continue };
        unread.retain(|name| *name != other);
        // The tensor was read under its first name.
        if reader.has(&tensor.name()) {
            unread.push(other);
        }
    }
    reader.refuse(unread, "no projection reads it, or the projection has another bias too")
}

/// The names that models have for the module of their attention.
const MODULES: [&str; 5] = ["self_attn", "attn", "attention", "self_attention", "mha"];

/// Reads the weights and biases of projections.
fn read_projections(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    tensors: impl Iterator<Item = ProjectionTensor>,
    reader: &ParameterReader,
) -> Result<ByProjection<WeightAndBias>> {
    let has_gate = reader.has(&format!("{GATE_NAME}.weight"));
    let mut projections = ByProjection::<WeightAndBias>::new();
    for mut tensor in tensors {
        let stored = &mut tensor.tensor.spec.stored;
        let is_gate_found = has_gate && tensor.projections == [Projection::Gate];
        if let Some(other) = other_name(stored, tensor.is_bias, tensor.projections)
            && reader.has(&other)
            && !is_gate_found
            && (!tensor.is_bias || !reader.has(stored))
        {
            *stored = other;
        }
        warn_of_adapter(&tensor.tensor.spec.stored, reader);
        let read =
            tensor.tensor.read(reader).map_err(|error| match forgotten_option(cfg, layout, &tensor, reader) {
                Some(option) => Error::msg(format!("{}; {option}", root(&error))),
                None => with_layout_found(error, layout, reader),
            })?;
        for (projection, rows) in tensor.projections.iter().zip(read) {
            let parameters = projections.entry(*projection).or_default();
            if tensor.is_bias { parameters.push_bias(rows) } else { parameters.push_weight(rows) }
        }
    }
    Ok(projections)
}

/// Adds to the error about a missing tensor the layout of the weights that are there, if they are in another layout, or
/// the module that has them.
fn with_layout_found(error: Error, layout: WeightLayout, reader: &ParameterReader) -> Error {
    let own = [true, false].map(|one_width| layout.weight_name(Projection::Query, one_width));
    if own.iter().any(|name| reader.has(name)) {
        return error;
    }
    match readings(&reader.vb) {
        Ok(found) if !found.is_empty() => {
            let quoted: Vec<_> = found.iter().map(|other| format!("`{other}`")).collect();
            let names = quoted.join(" or ");
            Error::msg(format!("{}; the weights there have the layout {names}, for `load`", root(&error)))
        }
        _ => match MODULES.iter().find(|module| has_weights(&reader.vb.pp(module))) {
            Some(module) => Error::msg(format!("{}; attention weights are in `vb.pp({module:?})`", root(&error))),
            None => error,
        },
    }
}

/// Returns whether a builder has the weights of an attention layer in any layout.
fn has_weights(vb: &VarBuilder) -> bool {
    readings(vb).is_ok_and(|found| !found.is_empty())
}

/// Refuses parameters that change the output and that a layer of this config would pass over.
fn refuse_unused(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, reader: &ParameterReader) -> Result<()> {
    if !cfg.out_proj() {
        refuse_out_proj(reader)?;
    }
    refuse_foreign(layout, cfg, reader)?;
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

/// Refuses an output projection of any layout, which would change the output.
fn refuse_out_proj(reader: &ParameterReader) -> Result<()> {
    reader.refuse(WeightLayout::output_names(), "the config says there is no output projection")
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
    let separate_biases = has_separate_biases(cfg, layout);
    for tensor in projection_tensors("state_dict", cfg, layout, 0..cfg.num_heads(), separate_biases)? {
        if let Some(stored) = tensor.join(projections)? {
            named.push((tensor.tensor.spec.name, stored));
        }
    }
    let mask_buffer = layout.mask_buffer().filter(|_| cfg.causal());
    if let (Some(t), Some(MaskBuffer { name, attends })) = (cfg.context_length(), mask_buffer)
        && let Some((_, weight)) = named.first()
    {
        // Four bytes an entry, and a copy in the dtype of the weights.
        if !fits_in_memory(&[8, t, t]) {
            bail!("[state_dict] the mask buffer of a context length of {t} does not fit in memory (layout {layout})")
        }
        // The book's `triu(ones(T, T), diagonal=1)` is 1 where a key is masked, the tutorial's `tril` where it is not.
        let mask = Tensor::tril2(t, weight.dtype(), weight.device())?.affine(2.0 * attends - 1.0, 1.0 - attends)?;
        if layout.is_stacked() {
            named.extend((0..cfg.num_heads()).map(|head| (format!("heads.{head}.{name}"), mask.clone())));
        } else {
            named.push((name.to_string(), mask));
        }
    }
    Ok(named)
}
