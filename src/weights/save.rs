//! From four linear layers to any layout that can hold them.

use candle_core::{Device, Result, Tensor};
use candle_nn::{Linear, VarBuilder, VarMap};

use super::layout::{Naming, Orientation, QkvOrder, Storage, WeightLayout};
use super::load::{Linears, fits_torch};
use super::rows::PackedQkv;
use super::source::Source;
use crate::MultiHeadAttentionConfig;
use crate::size::fits_in_memory;

type Tensors = Vec<(String, Tensor)>;

pub(crate) fn state_dict(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    projections: &Linears,
) -> Result<Tensors> {
    // Nothing is read: the source is only the voice of the errors.
    let empty = VarBuilder::from_varmap(&VarMap::new(), projections.q.weight().dtype(), &Device::Cpu);
    let errors = Source::new("state_dict", layout, empty);
    let Linears { q, k, v, o } = projections;
    let mut tensors = Vec::new();
    match layout {
        WeightLayout::StackedHeads(naming, storage) => {
            stacked(cfg, (naming, storage), [q, k, v], &errors, &mut tensors)?;
        }
        WeightLayout::Torch => torch(cfg, projections, &errors, &mut tensors)?,
        WeightLayout::Conv1d => {
            let packed = pack(cfg, QkvOrder::ByPart, projections, &errors)?;
            for (name, linear) in [("c_attn", Some(&packed)), ("c_proj", o.as_ref())] {
                let Some(linear) = linear else { continue };
                tensors.push((format!("{name}.weight"), linear.weight().t()?.contiguous()?));
                tensors.extend(linear.bias().map(|bias| (format!("{name}.bias"), bias.clone())));
            }
        }
        WeightLayout::Packed(naming, order) => {
            let [qkv, out] = naming.names();
            push(&mut tensors, qkv, &pack(cfg, order, projections, &errors)?, Storage::Linear, &errors)?;
            if let Some(o) = o {
                push(&mut tensors, out, o, Storage::Linear, &errors)?;
            }
        }
        _ => {
            let Some((names, storage)) = layout.separate() else { return errors.fail("the projections are not apart") };
            for (name, linear) in names.into_iter().zip([Some(q), Some(k), Some(v), o.as_ref()]) {
                if let Some(linear) = linear {
                    push(&mut tensors, name, linear, storage, &errors)?;
                }
            }
            if matches!(layout, WeightLayout::Book | WeightLayout::Short) {
                tensors.extend(mask_buffer(cfg, q, &errors)?.map(|mask| ("mask".to_string(), mask)));
            }
        }
    }
    Ok(tensors)
}

/// One projection under its name.
fn push(tensors: &mut Tensors, name: &str, linear: &Linear, storage: Storage, errors: &Source) -> Result<()> {
    let weight = linear.weight();
    match (storage, linear.bias()) {
        (Storage::Linear, bias) => {
            tensors.push((format!("{name}.weight"), weight.contiguous()?));
            tensors.extend(bias.map(|bias| (format!("{name}.bias"), bias.clone())));
        }
        (_, Some(_)) => return errors.fail(format!("plain parameters have no bias, but {name} has one")),
        (Storage::Raw(Orientation::InOut), None) => tensors.push((name.to_string(), weight.t()?.contiguous()?)),
        (Storage::Raw(Orientation::OutIn), None) => tensors.push((name.to_string(), weight.contiguous()?)),
    }
    Ok(())
}

fn stacked(
    cfg: &MultiHeadAttentionConfig,
    (naming, storage): (Naming, Storage),
    parts: [&Linear; 3],
    errors: &Source,
    tensors: &mut Tensors,
) -> Result<()> {
    if cfg.out_proj() {
        return errors.fail("a stack of heads has no output projection, but the layer has one");
    }
    let h = cfg.num_heads();
    if cfg.num_kv_heads() != h {
        return errors.fail(format!(
            "a stack of heads has keys for each of its {h} heads, but the layer has {}",
            cfg.num_kv_heads()
        ));
    }
    let mask = match naming {
        Naming::Book | Naming::Short => mask_buffer(cfg, parts[0], errors)?,
        Naming::Canonical | Naming::D2l => None,
    };
    for head in 0..h {
        for (name, part) in naming.names().into_iter().zip(parts) {
            let rows = part.weight().dim(0)? / h;
            let own = |tensor: &Tensor| tensor.narrow(0, head * rows, rows);
            let linear = Linear::new(own(part.weight())?, part.bias().map(own).transpose()?);
            push(tensors, &format!("heads.{head}.{name}"), &linear, storage, errors)?;
        }
        tensors.extend(mask.iter().map(|mask| (format!("heads.{head}.mask"), mask.clone())));
    }
    Ok(())
}

fn torch(cfg: &MultiHeadAttentionConfig, projections: &Linears, errors: &Source, tensors: &mut Tensors) -> Result<()> {
    fits_torch(cfg, errors)?;
    let Linears { q, k, v, o } = projections;
    let weights = [q.weight(), k.weight(), v.weight()];
    if cfg.key_size() == cfg.embed_dim() && cfg.value_size() == cfg.embed_dim() {
        let packed = pack(cfg, QkvOrder::ByPart, projections, errors)?;
        tensors.push(("in_proj_weight".into(), packed.weight().clone()));
        tensors.extend(packed.bias().map(|bias| ("in_proj_bias".into(), bias.clone())));
    } else {
        for (name, weight) in ["q_proj_weight", "k_proj_weight", "v_proj_weight"].into_iter().zip(weights) {
            tensors.push((name.into(), weight.contiguous()?));
        }
        let biases: Option<Vec<_>> = [q, k, v].into_iter().map(Linear::bias).collect();
        if let Some(biases) = biases {
            tensors.push(("in_proj_bias".into(), Tensor::cat(&biases, 0)?));
        }
    }
    match o {
        Some(o) => push(tensors, "out_proj", o, Storage::Linear, errors),
        None => Ok(()),
    }
}

fn pack(cfg: &MultiHeadAttentionConfig, order: QkvOrder, projections: &Linears, errors: &Source) -> Result<Linear> {
    let rows = PackedQkv::new(cfg, order, errors)?;
    let Linears { q, k, v, .. } = projections;
    let weight = rows.join([q.weight(), k.weight(), v.weight()])?;
    let bias = match (q.bias(), k.bias(), v.bias()) {
        (Some(q), Some(k), Some(v)) => Some(rows.join([q, k, v])?),
        _ => None,
    };
    Ok(Linear::new(weight, bias))
}

/// The book's `triu(ones(T, T), diagonal=1)`: 1 where a key is hidden.
fn mask_buffer(cfg: &MultiHeadAttentionConfig, like: &Linear, errors: &Source) -> Result<Option<Tensor>> {
    let Some(t) = cfg.context_length().filter(|_| cfg.causal()) else { return Ok(None) };
    // Four bytes an entry, and a copy in the weights' own dtype.
    if !fits_in_memory(&[8, t, t]) {
        return errors.fail(format!("the mask buffer of a context length of {t} does not fit in memory"));
    }
    let hidden: Vec<f32> = (0..t * t).map(|at| if at % t > at / t { 1.0 } else { 0.0 }).collect();
    let mask = Tensor::from_vec(hidden, (t, t), like.weight().device())?;
    Ok(Some(mask.to_dtype(like.weight().dtype())?))
}
