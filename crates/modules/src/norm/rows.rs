//! Norms of rows on a CPU as operations in Candle's graph: a norm alone, and a norm times an activated gate.
//!
//! The forward pass reads each row once and keeps nothing but its inputs; the backward pass computes the mean and the
//! variance again.

use candle_core::{Result, Tensor, bail};

use super::passes::{AffineSlices, GateGradient, GatedBackward, GatedForward, NormBackward, NormForward, RowNorm};
use crate::base::rowwise::{
    HeadRows, Sums, TASK_ELEMENTS, TensorElement, map_rows, read, with_contiguous_rows, with_float,
};
use crate::base::{gradient_of, record};
use crate::gate::GateActivation;

const OP: &str = "norm";

/// The largest number of tasks of a backward pass. Each task has its own partial sums of the gradients of weight and
/// bias. The number of tasks depends on the shape alone, and so do the bits of these gradients.
const MOST_TASKS: usize = 64;

/// The parameters of a norm in f32, contiguous: (D,), or (H, D) with a weight for each head.
#[derive(Debug, Clone)]
pub(super) struct Affine {
    /// The factor of a normed number.
    pub weight: Tensor,
    /// The number that is added to the product.
    pub bias: Option<Tensor>,
}

impl RowNorm {
    /// Computes `normed(x) · weight + bias` of each row, rounded once.
    ///
    /// `xs` is a view (D,), (T, D), (B, T, D) or (B, T, H, D) in f32, bf16 or f16. The result is contiguous and has the
    /// shape and dtype of `xs`. Gradients reach all tensors.
    pub fn apply(self, xs: &Tensor, affine: &Affine) -> Result<Tensor> {
        let operands = NormInputs { xs: with_contiguous_rows(xs)?, affine: affine.clone() };
        with_float!(OP, xs.dtype(), |E| {
            let ys = self.normed::<E>(&operands)?;
            let own = operands.clone();
            let backward = move |_: &Tensor, gradient: &Tensor| {
                let gradients = self.gradients::<E>(&own, gradient)?;
                Ok(vec![gradients.xs, gradients.weight, gradients.bias])
            };
            let inputs = [Some(&operands.xs), Some(&operands.affine.weight), operands.affine.bias.as_ref()];
            record(OP, &inputs, ys, xs.shape(), backward)
        })
    }

    /// Computes `normed(x) · weight · activation(gate)` of each row, rounded once.
    ///
    /// `xs` is as in [`apply`](Self::apply), `weight` (D,) is contiguous and in f32, and `gate` is a view of the shape
    /// and dtype of `xs`. Gradients reach all tensors.
    pub fn apply_gated(
        self,
        xs: &Tensor,
        weight: &Tensor,
        gate: &Tensor,
        activation: GateActivation,
    ) -> Result<Tensor> {
        let operands = GatedOperands {
            xs: with_contiguous_rows(xs)?,
            weight: weight.clone(),
            gate: with_contiguous_rows(gate)?,
            activation,
        };
        with_float!(OP, xs.dtype(), |E| {
            let ys = self.normed_and_gated::<E>(&operands)?;
            let own = operands.clone();
            let backward = move |_: &Tensor, gradient: &Tensor| {
                let gradients = self.gated_gradients::<E>(&own, gradient)?;
                Ok(vec![gradients.xs, gradients.weight, gradients.gate])
            };
            let inputs = [Some(&operands.xs), Some(&operands.weight), Some(&operands.gate)];
            record(OP, &inputs, ys, xs.shape(), backward)
        })
    }

    fn normed<E: TensorElement>(self, operands: &NormInputs) -> Result<Vec<E>> {
        let xs = read(&operands.xs);
        let rows = xs.rows::<E>()?;
        let weight = read(&operands.affine.weight);
        let bias = operands.affine.bias.as_ref().map(read);
        let affine = AffineSlices {
            weight: weight.contiguous()?,
            bias: match &bias {
                Some(numbers) => Some(numbers.contiguous()?),
                None => None,
            },
        };
        check_parameter(affine.weight, &rows)?;
        if let Some(numbers) = affine.bias {
            check_parameter(numbers, &rows)?;
        }
        Ok(map_rows(&rows, [&rows], None, &NormForward { norm: self, affine }).rows)
    }

    fn normed_and_gated<E: TensorElement>(self, operands: &GatedOperands) -> Result<Vec<E>> {
        let xs = read(&operands.xs);
        let weight = read(&operands.weight);
        let gate = read(&operands.gate);
        let rows = xs.rows::<E>()?;
        let weight = weight.contiguous()?;
        check_parameter(weight, &rows)?;
        let pass = GatedForward {
            forward: NormForward { norm: self, affine: AffineSlices { weight, bias: None } },
            activation: operands.activation,
        };
        Ok(map_rows(&rows, [&rows, &gate.rows()?], None, &pass).rows)
    }

    fn gradients<E: TensorElement>(self, operands: &NormInputs, gradient: &Tensor) -> Result<NormInputGradients> {
        let gradient = with_contiguous_rows(gradient)?;
        let xs = read(&operands.xs);
        let weight = read(&operands.affine.weight);
        let gradient_storage = read(&gradient);
        let rows = xs.rows::<E>()?;
        let weight = weight.contiguous()?;
        let weight_sums = if operands.affine.weight.track_op() { weight.len() } else { 0 };
        let bias_sums = match &operands.affine.bias {
            Some(bias) if bias.track_op() => bias.elem_count(),
            _ => 0,
        };
        let pass = NormBackward { norm: self, weight, weight_sums };
        let sums = sums(&rows, weight_sums + bias_sums);
        let mut found = map_rows::<E, E, _, 2>(&rows, [&rows, &gradient_storage.rows()?], Some(sums), &pass);
        let bias_grad = found.sums.split_off(weight_sums);
        Ok(NormInputGradients {
            xs: gradient_of(Some(&operands.xs), Some(found.rows))?,
            weight: gradient_of(Some(&operands.affine.weight), Some(found.sums))?,
            bias: gradient_of(operands.affine.bias.as_ref(), Some(bias_grad))?,
        })
    }

    fn gated_gradients<E: TensorElement>(self, operands: &GatedOperands, gradient: &Tensor) -> Result<GatedGradients> {
        let gradient = with_contiguous_rows(gradient)?;
        let xs = read(&operands.xs);
        let weight = read(&operands.weight);
        let gate = read(&operands.gate);
        let gradient_storage = read(&gradient);
        let rows = xs.rows::<E>()?;
        let weight = weight.contiguous()?;
        let views = [&rows, &gradient_storage.rows()?, &gate.rows()?];
        let weight_sums = if operands.weight.track_op() { weight.len() } else { 0 };
        let pass = GatedBackward {
            backward: NormBackward { norm: self, weight, weight_sums },
            activation: operands.activation,
        };
        let found = map_rows::<E, E, _, 3>(&rows, views, Some(sums(&rows, weight_sums)), &pass);
        let gate_grad = if operands.gate.track_op() {
            let gate_pass = GateGradient { norm: self, weight, activation: operands.activation };
            Some(map_rows::<E, E, _, 3>(&rows, views, None, &gate_pass).rows)
        } else {
            None
        };
        Ok(GatedGradients {
            xs: gradient_of(Some(&operands.xs), Some(found.rows))?,
            weight: gradient_of(Some(&operands.weight), Some(found.sums))?,
            gate: gradient_of(Some(&operands.gate), gate_grad)?,
        })
    }
}

/// The inputs of a norm.
#[derive(Clone)]
struct NormInputs {
    xs: Tensor,
    affine: Affine,
}

/// The gradients of [`NormInputs`].
struct NormInputGradients {
    xs: Option<Tensor>,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

/// The inputs of a norm times an activated gate.
#[derive(Clone)]
struct GatedOperands {
    xs: Tensor,
    weight: Tensor,
    gate: Tensor,
    activation: GateActivation,
}

/// The gradients of [`GatedOperands`].
struct GatedGradients {
    xs: Option<Tensor>,
    weight: Option<Tensor>,
    gate: Option<Tensor>,
}

/// Checks that a parameter is (D,), or (H, D) with a row for each head.
fn check_parameter<E>(numbers: &[f32], rows: &HeadRows<E>) -> Result<()> {
    let &HeadRows { tokens, h, d, .. } = rows;
    if tokens * h * d > 0 && numbers.len() != d && numbers.len() != h * d {
        bail!("[{OP}] there are {} weights, expected {d}, or {h} times {d}", numbers.len())
    }
    Ok(())
}

/// Returns how `count` sums over rows are split into tasks.
fn sums<E>(rows: &HeadRows<E>, count: usize) -> Sums {
    let fewest_tokens = TASK_ELEMENTS.div_ceil((rows.h * rows.d).max(1));
    Sums { count, tokens_of_task: rows.tokens.div_ceil(MOST_TASKS).max(fewest_tokens) }
}
