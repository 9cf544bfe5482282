//! Norms of rows on a CPU as operations in Candle's graph: a norm alone, and a norm times an activated gate.
//!
//! The forward pass reads each row once and keeps nothing but its inputs; the backward pass computes the mean and the
//! variance again.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use crate::base::rowwise::{
    Element, HeadRows, Row, RowPass, Sums, TASK_ELEMENTS, map_rows, read, with_contiguous_rows, with_float,
};
use crate::base::{gradient_of, record};
use crate::gate::GateActivation;

const OP: &str = "norm";

/// The number of partial sums that a sum over a row is split into, so that the compiler vectorises it.
const LANES: usize = 16;

/// The largest number of tasks of a backward pass. Each task has its own partial sums of the gradients of weight and
/// bias. The number of tasks depends on the shape alone, and so do the bits of these gradients.
const MOST_TASKS: usize = 64;

/// The statistics of a norm: `normed(x) = (x - mean) / sqrt(variance + eps)`. Without `subtracts_mean` the mean is 0,
/// and the variance is the mean square.
///
/// Candle's own norms have no backward pass and need contiguous inputs and a weight (D,). Its layer norm computes the
/// variance as a difference of squares, which loses the digits of numbers that are far from zero.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowNorm {
    pub subtracts_mean: bool,
    pub eps: f32,
}

/// The parameters of a norm in f32, contiguous: (D,), or (H, D) with a weight for each head.
#[derive(Debug, Clone)]
pub(super) struct Affine {
    /// The factor of a normed number.
    pub weight: Tensor,
    /// The number that is added to the product.
    pub bias: Option<Tensor>,
}

/// The slices of [`Affine`].
#[derive(Clone, Copy)]
struct AffineSlices<'a> {
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
}

impl RowNorm {
    /// Computes `normed(x) · weight + bias` of each row, rounded once.
    ///
    /// `xs` is a view (D,), (T, D), (B, T, D) or (B, T, H, D) in f32, bf16 or f16. The result is contiguous and has the
    /// shape and dtype of `xs`. Gradients reach all tensors.
    pub fn apply(self, xs: &Tensor, affine: &Affine) -> Result<Tensor> {
        let operands = Operands { xs: with_contiguous_rows(xs)?, affine: affine.clone() };
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

    fn normed<E: Element>(self, operands: &Operands) -> Result<Vec<E>> {
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
        Ok(map_rows(&rows, [&rows], None, &Forward { norm: self, affine }).rows)
    }

    fn normed_and_gated<E: Element>(self, operands: &GatedOperands) -> Result<Vec<E>> {
        let (xs, weight, gate) = (read(&operands.xs), read(&operands.weight), read(&operands.gate));
        let rows = xs.rows::<E>()?;
        let weight = weight.contiguous()?;
        check_parameter(weight, &rows)?;
        let pass = GatedForward {
            forward: Forward { norm: self, affine: AffineSlices { weight, bias: None } },
            activation: operands.activation,
        };
        Ok(map_rows(&rows, [&rows, &gate.rows()?], None, &pass).rows)
    }

    fn gradients<E: Element>(self, operands: &Operands, gradient: &Tensor) -> Result<Gradients> {
        let gradient = with_contiguous_rows(gradient)?;
        let (xs, weight, gradient) = (read(&operands.xs), read(&operands.affine.weight), read(&gradient));
        let rows = xs.rows::<E>()?;
        let weight = weight.contiguous()?;
        let weight_sums = if operands.affine.weight.track_op() { weight.len() } else { 0 };
        let bias_sums = match &operands.affine.bias {
            Some(bias) if bias.track_op() => bias.elem_count(),
            _ => 0,
        };
        let pass = Backward { norm: self, weight, weight_sums };
        let sums = sums(&rows, weight_sums + bias_sums);
        let mut found = map_rows::<E, E, _, 2>(&rows, [&rows, &gradient.rows()?], Some(sums), &pass);
        let of_bias = found.sums.split_off(weight_sums);
        Ok(Gradients {
            xs: gradient_of(Some(&operands.xs), Some(found.rows))?,
            weight: gradient_of(Some(&operands.affine.weight), Some(found.sums))?,
            bias: gradient_of(operands.affine.bias.as_ref(), Some(of_bias))?,
        })
    }

    fn gated_gradients<E: Element>(self, operands: &GatedOperands, gradient: &Tensor) -> Result<GatedGradients> {
        let gradient = with_contiguous_rows(gradient)?;
        let (xs, weight) = (read(&operands.xs), read(&operands.weight));
        let (gate, gradient) = (read(&operands.gate), read(&gradient));
        let rows = xs.rows::<E>()?;
        let weight = weight.contiguous()?;
        let views = [&rows, &gradient.rows()?, &gate.rows()?];
        let weight_sums = if operands.weight.track_op() { weight.len() } else { 0 };
        let pass =
            GatedBackward { backward: Backward { norm: self, weight, weight_sums }, activation: operands.activation };
        let found = map_rows::<E, E, _, 3>(&rows, views, Some(sums(&rows, weight_sums)), &pass);
        let of_gate = if operands.gate.track_op() {
            let gate_pass = GateGradient { norm: self, weight, activation: operands.activation };
            Some(map_rows::<E, E, _, 3>(&rows, views, None, &gate_pass).rows)
        } else {
            None
        };
        Ok(GatedGradients {
            xs: gradient_of(Some(&operands.xs), Some(found.rows))?,
            weight: gradient_of(Some(&operands.weight), Some(found.sums))?,
            gate: gradient_of(Some(&operands.gate), of_gate)?,
        })
    }

    #[inline]
    fn moments(self, row: &[f32]) -> Moments {
        let d = row.len() as f32;
        let mean = if self.subtracts_mean { sum(row, row, |x, _| x) / d } else { 0.0 };
        let variance = sum(row, row, |x, _| (x - mean) * (x - mean)) / d;
        Moments { mean, factor: (variance + self.eps).sqrt().recip() }
    }
}

/// The inputs of a norm.
#[derive(Clone)]
struct Operands {
    xs: Tensor,
    affine: Affine,
}

/// The gradients of [`Operands`].
struct Gradients {
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

/// `normed(x) · weight + bias`.
struct Forward<'a> {
    norm: RowNorm,
    affine: AffineSlices<'a>,
}

impl Forward<'_> {
    #[inline]
    fn compute(&self, head: usize, xs: &[f32], ys: &mut [f32]) {
        let d = xs.len();
        let moments = self.norm.moments(xs);
        let weight = &self.affine.weight[head_range(self.affine.weight, head, d)];
        match self.affine.bias {
            Some(all) => {
                let bias = &all[head_range(all, head, d)];
                for (((y, &x), w), b) in ys.iter_mut().zip(xs).zip(weight).zip(bias) {
                    *y = moments.normed(x) * w + b;
                }
            }
            None => {
                for ((y, &x), w) in ys.iter_mut().zip(xs).zip(weight) {
                    *y = moments.normed(x) * w;
                }
            }
        }
    }
}

impl<E> RowPass<E, 1> for Forward<'_> {
    type Scratch = ();

    fn compute(&self, row: Row<1>, (): &mut ()) {
        let [xs] = row.inputs;
        self.compute(row.head, xs, row.output);
    }
}

/// `normed(x) · weight · activation(gate)`.
struct GatedForward<'a> {
    forward: Forward<'a>,
    activation: GateActivation,
}

impl<E> RowPass<E, 2> for GatedForward<'_> {
    type Scratch = ();

    fn compute(&self, row: Row<2>, (): &mut ()) {
        let [xs, gate] = row.inputs;
        self.forward.compute(row.head, xs, row.output);
        for (y, &g) in row.output.iter_mut().zip(gate) {
            *y *= self.activation.value_and_slope(g).value;
        }
    }
}

/// The gradient of rows, and the sums that are the gradients of weight and bias.
struct Backward<'a> {
    norm: RowNorm,
    weight: &'a [f32],
    /// The number of sums of the weight's gradient. The sums of the bias follow them.
    weight_sums: usize,
}

impl Backward<'_> {
    #[inline]
    fn compute(&self, head: usize, xs: &[f32], gradient: &[f32], of_xs: &mut [f32], sums: &mut [f32]) {
        let d = xs.len() as f32;
        let moments = self.norm.moments(xs);
        let own = head_range(self.weight, head, xs.len());
        let (of_weight, of_bias) = sums.split_at_mut(self.weight_sums);
        // Either is empty if its parameter is not tracked for gradients.
        let of_weight = of_weight.get_mut(own.clone()).unwrap_or_default();
        let bias_range = head_range(of_bias, head, xs.len());
        let of_bias = of_bias.get_mut(bias_range).unwrap_or_default();
        for ((total, dy), &x) in of_weight.iter_mut().zip(gradient).zip(xs) {
            *total += dy * moments.normed(x);
        }
        for (total, dy) in of_bias.iter_mut().zip(gradient) {
            *total += dy;
        }
        // The gradient of the normed row. Its components along ones and along the normed row do not reach the inputs.
        for ((of_x, dy), w) in of_xs.iter_mut().zip(gradient).zip(&self.weight[own]) {
            *of_x = dy * w;
        }
        let mean = if self.norm.subtracts_mean { sum(of_xs, of_xs, |of_x, _| of_x) / d } else { 0.0 };
        let along = sum(of_xs, xs, |of_x, x| of_x * moments.normed(x)) / d;
        for (of_x, &x) in of_xs.iter_mut().zip(xs) {
            *of_x = (*of_x - mean - moments.normed(x) * along) * moments.factor;
        }
    }
}

impl<E> RowPass<E, 2> for Backward<'_> {
    type Scratch = ();

    fn compute(&self, row: Row<2>, (): &mut ()) {
        let [xs, gradient] = row.inputs;
        self.compute(row.head, xs, gradient, row.output, row.sums);
    }
}

/// [`Backward`] of a norm that is multiplied by an activated gate.
struct GatedBackward<'a> {
    backward: Backward<'a>,
    activation: GateActivation,
}

/// The memory of a task of [`GatedBackward`].
struct GatedScratch<E> {
    gated: Vec<E>,
    widened: Vec<f32>,
}

impl<E> Default for GatedScratch<E> {
    fn default() -> Self {
        Self { gated: Vec::new(), widened: Vec::new() }
    }
}

impl<E: Element> RowPass<E, 3> for GatedBackward<'_> {
    type Scratch = GatedScratch<E>;

    fn compute(&self, row: Row<3>, scratch: &mut GatedScratch<E>) {
        let [xs, gradient, gate] = row.inputs;
        // Rounded, as the normed rows of separate operations would be.
        scratch.gated.resize(xs.len(), E::default());
        E::write(&mut scratch.gated, &mut scratch.widened, |gated| {
            for ((of_normed, dy), &g) in gated.iter_mut().zip(gradient).zip(gate) {
                *of_normed = dy * self.activation.value_and_slope(g).value;
            }
        });
        let of_normed = E::widen(&scratch.gated, &mut scratch.widened);
        self.backward.compute(row.head, xs, of_normed, row.output, row.sums);
    }
}

/// The gradient of a gate before its activation.
struct GateGradient<'a> {
    norm: RowNorm,
    weight: &'a [f32],
    activation: GateActivation,
}

impl<E> RowPass<E, 3> for GateGradient<'_> {
    type Scratch = ();

    fn compute(&self, row: Row<3>, (): &mut ()) {
        let [xs, gradient, gate] = row.inputs;
        let moments = self.norm.moments(xs);
        for (n, of_gate) in row.output.iter_mut().enumerate() {
            let slope = self.activation.value_and_slope(gate[n]).slope;
            *of_gate = gradient[n] * moments.normed(xs[n]) * self.weight[n] * slope;
        }
    }
}

/// The mean of a row, and the factor that scales the row to a variance of 1.
#[derive(Clone, Copy)]
struct Moments {
    mean: f32,
    /// 1 / sqrt(variance + eps).
    factor: f32,
}

impl Moments {
    #[inline]
    fn normed(self, x: f32) -> f32 {
        (x - self.mean) * self.factor
    }
}

/// Returns the part of a head in numbers (D,), which all heads share, or (H, D).
#[inline]
fn head_range(numbers: &[f32], head: usize, d: usize) -> Range<usize> {
    if numbers.len() == d { 0..d } else { head * d..(head + 1) * d }
}

/// Returns the sum of `of` over two rows of one length.
#[inline]
fn sum(xs: &[f32], ys: &[f32], of: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (x_chunks, x_rest) = xs.as_chunks::<LANES>();
    let (y_chunks, y_rest) = ys.as_chunks::<LANES>();
    for (x_chunk, y_chunk) in x_chunks.iter().zip(y_chunks) {
        for (lane, (&x, &y)) in lanes.iter_mut().zip(x_chunk.iter().zip(y_chunk)) {
            *lane += of(x, y);
        }
    }
    for (lane, (&x, &y)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *lane += of(x, y);
    }
    lanes.iter().sum()
}
