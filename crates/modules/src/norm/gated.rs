//! A norm of rows times an activated gate on a CPU: one pass, which keeps only its inputs for the backward pass.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType};

use super::rows::{OP, RowNorm, parameter};
use crate::base::rowwise::{Element, Rows, map_heads, read, with_contiguous_rows, with_float};
use crate::gate::GateActivation;

/// `RowNorm(x) · activation(gate)` of rows (D,), without a mean or a bias, in f32 and rounded once.
#[derive(Debug, Clone, Copy)]
pub(super) struct GatedNorm {
    pub norm: RowNorm,
    pub activation: GateActivation,
}

/// Rows in memory.
#[derive(Clone, Copy)]
struct View<'a, E> {
    elements: &'a [E],
    layout: &'a Layout,
}

impl GatedNorm {
    /// Views (B, T, H, D) of one shape and dtype, and a weight (D,) in f32, to a contiguous tensor. Each of the three
    /// may be tracked for gradients.
    pub fn apply(self, xs: &Tensor, weight: &Tensor, gate: &Tensor) -> Result<Tensor> {
        with_contiguous_rows(xs)?.apply_op3(weight, &with_contiguous_rows(gate)?, self)
    }

    /// What `of` writes of each row of `xs`, beside the same row of `others`.
    fn map<E: Element<Wide = f32>, const N: usize>(
        xs: View<E>,
        others: [View<E>; N],
        of: impl Fn(&[f32], [&[f32]; N], &mut [f32]) + Sync,
    ) -> Result<Vec<E>> {
        let rows = others.iter().map(|view| Rows::new(view.layout)).collect::<Result<Vec<_>>>()?;
        map_heads(xs.elements, xs.layout, |token| {
            let (of, rows) = (&of, &rows);
            move |head, xs: &[f32], ys: &mut [f32]| {
                let mut wide: [Vec<f32>; N] = std::array::from_fn(|_| Vec::new());
                let mut own = rows.iter().zip(&others).zip(&mut wide).filter_map(|((rows, view), wide)| {
                    rows.heads(token).nth(head).map(|row| E::widen(&view.elements[row], wide))
                });
                of(xs, std::array::from_fn(|_| own.next().unwrap_or_default()), ys);
            }
        })
    }

    fn forward<E: Element<Wide = f32>>(self, xs: View<E>, weight: &[f32], gate: View<E>) -> Result<Vec<E>> {
        Self::map(xs, [gate], |xs, [gate], ys| {
            let moments = self.norm.moments(xs);
            for (((y, &x), weight), &gate) in ys.iter_mut().zip(xs).zip(weight).zip(gate) {
                *y = moments.normed(x) * weight * self.activation.with_slope(gate).0;
            }
        })
    }

    /// The gradients of rows, weight and gate.
    fn backward<E: Element<Wide = f32> + WithDType>(
        self,
        [xs, weight, gate]: [&Tensor; 3],
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let gradient = with_contiguous_rows(&gradient.detach())?;
        let (of_normed, of_gate) = {
            let [xs, gate, gradient, weight] = [xs, gate, &gradient, weight].map(read);
            let xs = View::<E> { elements: xs.elements()?, layout: xs.layout };
            let gate = View { elements: gate.elements()?, layout: gate.layout };
            let gradient = View { elements: gradient.elements()?, layout: gradient.layout };
            let weight = parameter(weight.elements()?, weight.layout)?;
            let of_normed = Self::map(gradient, [gate], |gradient, [gate], own| {
                for ((own, gradient), &gate) in own.iter_mut().zip(gradient).zip(gate) {
                    *own = gradient * self.activation.with_slope(gate).0;
                }
            })?;
            let of_gate = Self::map(gate, [gradient, xs], |gate, [gradient, xs], own| {
                let moments = self.norm.moments(xs);
                let all = own.iter_mut().zip(gate).zip(gradient).zip(xs).zip(weight);
                for ((((own, &gate), gradient), &x), weight) in all {
                    *own = gradient * moments.normed(x) * weight * self.activation.with_slope(gate).1;
                }
            })?;
            (of_normed, of_gate)
        };
        let tensor = |numbers| Tensor::from_vec(numbers, gate.shape(), gate.device());
        let [of_xs, of_weight, _] = self.norm.backward::<E>([xs, weight, &weight.detach()], &tensor(of_normed)?)?;
        Ok([of_xs, of_weight, gate.track_op().then(|| tensor(of_gate)).transpose()?])
    }
}

impl CustomOp3 for GatedNorm {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        xs: &CpuStorage,
        layout: &Layout,
        weight: &CpuStorage,
        of_weight: &Layout,
        gate: &CpuStorage,
        of_gate: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let weight = parameter(weight.as_slice()?, of_weight)?;
        let ys = with_float!(OP, xs.dtype(), |E| {
            let xs = View { elements: xs.as_slice::<E>()?, layout };
            let gate = View { elements: gate.as_slice()?, layout: of_gate };
            self.forward(xs, weight, gate).map(E::to_cpu_storage_owned)
        });
        Ok((ys?, layout.shape().clone()))
    }

    fn bwd(
        &self,
        xs: &Tensor,
        weight: &Tensor,
        gate: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let all = [xs, weight, gate];
        let gradients = with_float!(OP, xs.dtype(), |E| self.backward::<E>(all, gradient));
        Ok(gradients?.into())
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Result, Tensor, Var};

    use crate::gate::GateActivation;
    use crate::norm::RmsNorm;

    /// The output, and the gradients of rows, weight and gate, in f64. Rows and gate are views.
    fn run(all: &[Tensor; 4], activation: GateActivation, dtype: DType) -> Result<Vec<Tensor>> {
        let [xs, weight, gate, upstream] = all;
        let var = |tensor: &Tensor| Var::from_tensor(&tensor.to_dtype(dtype)?);
        let [xs, weight, gate] = [var(xs)?, var(weight)?, var(gate)?];
        let norm = RmsNorm::new(weight.as_tensor().clone(), 1e-6)?;
        let ys = norm.forward_gated(&xs.transpose(1, 2)?, &gate.narrow(3, 1, xs.dim(3)?)?, activation)?;
        let gradients = (ys.to_dtype(DType::F64)? * upstream)?.sum_all()?.backward()?;
        let found = [&xs, &weight, &gate].map(|var| gradients.get(var).cloned().expect("a gradient"));
        [ys].into_iter().chain(found).map(|tensor| tensor.to_dtype(DType::F64)).collect()
    }

    /// The same as in Candle's own operations over f64, in every dtype and with every activation.
    #[test]
    fn one_pass_is_norm_times_gate() -> Result<()> {
        let random = |shape: &[usize]| Tensor::randn(0f64, 1., shape, &Device::Cpu);
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2), (DType::F16, 2e-3)] {
            for activation in [GateActivation::Sigmoid, GateActivation::Softplus, GateActivation::Silu] {
                let mut all =
                    [random(&[2, 3, 5, 33])?, random(&[33])?, random(&[2, 5, 3, 35])?, random(&[2, 5, 3, 33])?];
                for tensor in &mut all {
                    *tensor = tensor.to_dtype(dtype)?.to_dtype(DType::F64)?;
                }
                let (own, expected) = (run(&all, activation, dtype)?, run(&all, activation, DType::F64)?);
                for (n, (own, expected)) in own.iter().zip(&expected).enumerate() {
                    let largest = |xs: &Tensor| xs.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>();
                    let error = largest(&(own - expected)?)? / largest(expected)?;
                    assert!(error <= tolerance, "{dtype:?} {activation:?}: result {n} is off by {error:e}");
                }
            }
        }
        Ok(())
    }
}
