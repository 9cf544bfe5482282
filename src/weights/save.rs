//! From four linear layers to any layout that can hold them.

use candle_core::{Device, Result, Tensor};
use candle_nn::{Linear, VarBuilder, VarMap};

use super::layout::{Form, Kind, QkvOrder, WeightLayout};
use super::load::{Linears, fits_torch};
use super::rows::PackedQkv;
use super::source::Source;
use crate::MultiHeadAttentionConfig;
use crate::size::fits_in_memory;

pub(crate) fn state_dict(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    projections: &Linears,
) -> Result<Vec<(String, Tensor)>> {
    // Nothing is read: the source words the errors.
    let empty = VarBuilder::from_varmap(&VarMap::new(), projections.q.weight().dtype(), &Device::Cpu);
    let errors = Source::new("state_dict", layout, empty);
    let mut writer = Writer { cfg, projections, errors, tensors: Vec::new() };
    let mask = if layout.has_mask_buffer() { writer.mask_buffer()? } else { None };
    let Linears { q, k, v, o } = projections;
    match layout.form() {
        Form::Stacked(names, kind) => writer.stacked(names, kind, mask.as_ref())?,
        Form::Torch => writer.torch()?,
        Form::Packed([qkv, out], kind, order) => {
            let packed = writer.packed(order)?;
            writer.push(qkv, Some(&packed), kind)?;
            writer.push(out, o.as_ref(), kind)?;
        }
        Form::Separate(names, kind) => {
            for (name, linear) in names.into_iter().zip([Some(q), Some(k), Some(v), o.as_ref()]) {
                writer.push(name, linear, kind)?;
            }
            writer.tensors.extend(mask.map(|mask| ("mask".to_string(), mask)));
        }
    }
    Ok(writer.tensors)
}

struct Writer<'a> {
    cfg: &'a MultiHeadAttentionConfig,
    projections: &'a Linears,
    errors: Source<'static>,
    tensors: Vec<(String, Tensor)>,
}

impl Writer<'_> {
    /// One projection under its name.
    fn push(&mut self, name: &str, linear: Option<&Linear>, kind: Kind) -> Result<()> {
        let Some(linear) = linear else { return Ok(()) };
        if matches!(kind, Kind::Raw(_)) && linear.bias().is_some() {
            return self.errors.fail(format!("plain parameters have no bias, but {name} has one"));
        }
        let weight = if kind.is_transposed() { linear.weight().t()? } else { linear.weight().clone() };
        self.tensors.push((kind.weight(name), weight.contiguous()?));
        self.tensors.extend(linear.bias().map(|bias| (format!("{name}.bias"), bias.clone())));
        Ok(())
    }

    fn stacked(&mut self, names: [&str; 4], kind: Kind, mask: Option<&Tensor>) -> Result<()> {
        if self.cfg.out_proj() {
            return self.errors.fail("a stack of heads has no output projection, but the layer has one");
        }
        let (h, h_kv) = (self.cfg.num_heads(), self.cfg.num_kv_heads());
        if h_kv != h {
            let problem = format!("a stack of heads has keys for each of its {h} heads, but the layer has {h_kv}");
            return self.errors.fail(problem);
        }
        let Linears { q, k, v, .. } = self.projections;
        for head in 0..h {
            for (name, part) in names.into_iter().zip([q, k, v]) {
                let rows = part.weight().dim(0)? / h;
                let own = |tensor: &Tensor| tensor.narrow(0, head * rows, rows);
                let linear = Linear::new(own(part.weight())?, part.bias().map(own).transpose()?);
                self.push(&format!("heads.{head}.{name}"), Some(&linear), kind)?;
            }
            self.tensors.extend(mask.map(|mask| (format!("heads.{head}.mask"), mask.clone())));
        }
        Ok(())
    }

    fn torch(&mut self) -> Result<()> {
        fits_torch(self.cfg, &self.errors)?;
        let Linears { q, k, v, o } = self.projections;
        let width = self.cfg.embed_dim();
        if self.cfg.key_size() == width && self.cfg.value_size() == width {
            let packed = self.packed(QkvOrder::ByPart)?;
            self.tensors.push(("in_proj_weight".into(), packed.weight().clone()));
            self.tensors.extend(packed.bias().map(|bias| ("in_proj_bias".into(), bias.clone())));
        } else {
            for (name, linear) in [("q_proj_weight", q), ("k_proj_weight", k), ("v_proj_weight", v)] {
                self.tensors.push((name.into(), linear.weight().contiguous()?));
            }
            let biases: Option<Vec<_>> = [q, k, v].into_iter().map(Linear::bias).collect();
            if let Some(biases) = biases {
                self.tensors.push(("in_proj_bias".into(), Tensor::cat(&biases, 0)?));
            }
        }
        self.push("out_proj", o.as_ref(), Kind::Linear)
    }

    fn packed(&self, order: QkvOrder) -> Result<Linear> {
        let rows = PackedQkv::new(self.cfg, order, &self.errors)?;
        let Linears { q, k, v, .. } = self.projections;
        let weight = rows.join([q.weight(), k.weight(), v.weight()])?;
        let bias = match (q.bias(), k.bias(), v.bias()) {
            (Some(q), Some(k), Some(v)) => Some(rows.join([q, k, v])?),
            _ => None,
        };
        Ok(Linear::new(weight, bias))
    }

    /// The book's `triu(ones(T, T), diagonal=1)`: 1 where a key is hidden.
    fn mask_buffer(&self) -> Result<Option<Tensor>> {
        let Some(t) = self.cfg.context_length().filter(|_| self.cfg.causal()) else { return Ok(None) };
        // Four bytes an entry, and a copy in the weights' own dtype.
        if !fits_in_memory(&[8, t, t]) {
            let problem = format!("the mask buffer of a context length of {t} does not fit in memory");
            return self.errors.fail(problem);
        }
        let hidden: Vec<f32> = (0..t * t).map(|at| if at % t > at / t { 1.0 } else { 0.0 }).collect();
        let like = self.projections.q.weight();
        Ok(Some(Tensor::from_vec(hidden, (t, t), like.device())?.to_dtype(like.dtype())?))
    }
}
