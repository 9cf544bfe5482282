//! This crate's side: forward and backward over variables, and a layer in evaluation.

use candle_attention::{
    AttentionInput, Backend, MultiHeadAttention, MultiHeadAttentionConfig, Plan, SdpaOptions, plan,
    scaled_dot_product_attention,
};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, Device, Layout, Result, Shape, Tensor, Var, bail};
use candle_nn::VarBuilder;

use crate::cell::{Cell, Part};
use crate::common::check::{gap, tolerance};
use crate::common::engine::REFERENCE_BYTES;
use crate::common::inputs::random;

const WEIGHTS: [&str; 4] = ["q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight"];

/// The inputs of every engine.
pub struct Data {
    /// q, k and v, or the input of a layer and its weights.
    pub inputs: Vec<(&'static str, Tensor)>,
    /// The gradient of the output, in its shape.
    pub upstream: Tensor,
}

impl Data {
    pub fn new(cell: &Cell) -> Result<Self> {
        let (shape, e, dtype) = (&cell.shape, cell.embed_dim(), cell.shape.dtype);
        if cell.part == Part::Attention {
            let normal = |h, t| random((shape.b, h, t, shape.d), 1.0, dtype);
            let (q, upstream) = (normal(shape.h, shape.t_q)?, normal(shape.h, shape.t_q)?);
            let (k, v) = (normal(shape.h_kv, shape.t_kv)?, normal(shape.h_kv, shape.t_kv)?);
            return Ok(Self { inputs: vec![("q", q), ("k", k), ("v", v)], upstream });
        }
        let normal = || random((shape.b, shape.t_q, e), 1.0, dtype);
        let mut inputs = vec![("xs", normal()?)];
        for name in WEIGHTS {
            inputs.push((name, random((e, e), (e as f64).recip().sqrt(), dtype)?));
        }
        Ok(Self { inputs, upstream: normal()? })
    }
}

/// A forward and a backward pass whose inputs are all variables.
pub struct Step<'a> {
    cell: &'a Cell,
    backend: Backend,
    vars: Vec<Var>,
    layer: Option<MultiHeadAttention>,
    upstream: Tensor,
}

impl<'a> Step<'a> {
    pub fn new(cell: &'a Cell, data: &Data, backend: Backend) -> Result<Self> {
        let vars = data.inputs.iter().map(|(_, tensor)| Var::from_tensor(tensor)).collect::<Result<Vec<_>>>()?;
        let layer = match cell.part {
            Part::Attention => None,
            Part::Layer | Part::Evaluation => {
                Some(layer(cell, vars.iter().skip(1).map(|var| var.as_tensor().clone()))?)
            }
        };
        Ok(Self { cell, backend, vars, layer, upstream: data.upstream.clone() })
    }

    fn options(&self) -> SdpaOptions {
        let dropout = self.cell.dropout;
        SdpaOptions::default().with_backend(self.backend).with_dropout(dropout, dropout > 0.0)
    }

    /// Returns the path that attention takes.
    pub fn plan(&self) -> Result<Plan> {
        match (&self.layer, self.vars.as_slice()) {
            (Some(layer), [xs, ..]) => layer.plan(&self.input(xs)),
            (None, [q, k, v]) => plan(q, k, v, &self.cell.shape.mask.attention(), &self.options()),
            _ => bail!("[train] expected three inputs or a layer"),
        }
    }

    /// Returns the reason why the step cannot run: the reference path has too little memory for its scores.
    pub fn obstacle(&self) -> Result<Option<String>> {
        let shape = &self.cell.shape;
        let bytes = shape.b * shape.h * shape.t_q * shape.t_kv * size_of::<f32>();
        if bytes < REFERENCE_BYTES || self.plan()?.backend == Backend::Fused {
            return Ok(None);
        }
        Ok(Some(format!("the reference path's scores take {:.1} GiB", bytes as f64 / REFERENCE_BYTES as f64)))
    }

    fn input<'b>(&self, xs: &'b Tensor) -> AttentionInput<'b> {
        AttentionInput::new(xs).with_backend(self.backend)
    }

    fn forward(&self) -> Result<Tensor> {
        match (&self.layer, self.vars.as_slice()) {
            (Some(layer), [xs, ..]) => layer.forward_with(self.input(xs)),
            (None, [q, k, v]) => {
                scaled_dot_product_attention(q, k, v, &self.cell.shape.mask.attention(), &self.options())
            }
            _ => bail!("[train] expected three inputs or a layer"),
        }
    }

    fn pass(&self) -> Result<(Tensor, GradStore)> {
        let ys = self.forward()?;
        let store = ys.apply_op1(Loss { gradient: self.upstream.clone() })?.backward()?;
        Ok((ys, store))
    }

    /// Runs forward and backward once, and returns the output.
    pub fn run(&self) -> Result<Tensor> {
        Ok(self.pass()?.0)
    }

    /// Returns the output, and the gradients of the inputs in their order.
    pub fn results(&self) -> Result<Vec<Tensor>> {
        let (ys, store) = self.pass()?;
        let mut results = vec![ys.detach()];
        for (var, name) in self.vars.iter().zip(1..) {
            let Some(gradient) = store.get(var) else { bail!("input {name} has no gradient") };
            results.push(gradient.clone());
        }
        Ok(results)
    }
}

/// A number whose gradient with respect to its argument is given: `torch.autograd.grad` with `grad_outputs`.
struct Loss {
    gradient: Tensor,
}

impl CustomOp1 for Loss {
    fn name(&self) -> &'static str {
        "loss"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), ().into()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.gradient.clone()))
    }
}

/// A layer over variables, and its frozen copy.
pub struct Evaluation {
    pub trained: MultiHeadAttention,
    pub frozen: MultiHeadAttention,
    pub xs: Tensor,
}

impl Evaluation {
    pub fn new(cell: &Cell) -> Result<Self> {
        let Data { inputs, upstream: xs } = Data::new(cell)?;
        let weights = inputs.iter().skip(1).map(|(_, weight)| weight);
        let vars = weights.map(Var::from_tensor).collect::<Result<Vec<_>>>()?;
        let trained = layer(cell, vars.into_iter().map(Var::into_inner))?;
        let frozen = trained.freeze()?;
        compare(&[trained.forward(&xs)?.detach()], &[frozen.forward(&xs)?])?;
        Ok(Self { trained, frozen, xs })
    }
}

fn layer(cell: &Cell, weights: impl Iterator<Item = Tensor>) -> Result<MultiHeadAttention> {
    let cfg = MultiHeadAttentionConfig::new(cell.embed_dim(), cell.shape.h).with_causal(true);
    let tensors = WEIGHTS.iter().map(ToString::to_string).zip(weights).collect();
    MultiHeadAttention::new(&cfg, VarBuilder::from_tensors(tensors, cell.shape.dtype, &Device::Cpu))
}

/// Checks that outputs and gradients agree with another engine's, within a few roundings of the dtype of the largest
/// entry.
pub fn compare(ours: &[Tensor], theirs: &[Tensor]) -> Result<()> {
    for (n, (found, expected)) in ours.iter().zip(theirs).enumerate() {
        // Each side also rounds intermediate results to the dtype.
        let (difference, allowed) = (gap(found, expected)?, 4.0 * tolerance(found.dtype()));
        if difference > allowed {
            bail!("result {n} differs from ours by {difference:.1e}, expected at most {allowed:.0e}")
        }
    }
    Ok(())
}
