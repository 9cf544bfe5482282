//! The computations of a norm over one row.

use std::ops::Range;

use crate::base::rowwise::{Row, RowPass, TensorElement};
use crate::gate::GateActivation;

/// The number of partial sums that a sum over a row is split into, so that the compiler vectorises it.
const LANES: usize = 16;

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

impl RowNorm {
    /// Returns the mean and the scaling factor of a row.
    #[inline]
    fn moments(self, row: &[f32]) -> Moments {
        let d = row.len() as f32;
        let mean = if self.subtracts_mean { sum(row, row, |x, _| x) / d } else { 0.0 };
        let variance = sum(row, row, |x, _| (x - mean) * (x - mean)) / d;
        Moments { mean, factor: (variance + self.eps).sqrt().recip() }
    }
}

/// The parameters of a norm in f32: (D,), or (H, D) with a weight for each head.
#[derive(Clone, Copy)]
pub(super) struct AffineSlices<'a> {
    pub weight: &'a [f32],
    pub bias: Option<&'a [f32]>,
}

/// `normed(x) · weight + bias`.
pub(super) struct NormForward<'a> {
    pub norm: RowNorm,
    pub affine: AffineSlices<'a>,
}

impl NormForward<'_> {
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

impl<E> RowPass<E, 1> for NormForward<'_> {
    type Scratch = ();

    fn compute(&self, row: Row<1>, (): &mut ()) {
        let [xs] = row.inputs;
        self.compute(row.head, xs, row.output);
    }
}

/// `normed(x) · weight · activation(gate)`.
pub(super) struct GatedForward<'a> {
    pub forward: NormForward<'a>,
    pub activation: GateActivation,
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
pub(super) struct NormBackward<'a> {
    pub norm: RowNorm,
    pub weight: &'a [f32],
    /// The number of sums of the weight's gradient. The sums of the bias follow them.
    pub weight_sums: usize,
}

impl NormBackward<'_> {
    #[inline]
    fn compute(&self, head: usize, xs: &[f32], gradient: &[f32], xs_grad: &mut [f32], sums: &mut [f32]) {
        let d = xs.len() as f32;
        let moments = self.norm.moments(xs);
        let weight_range = head_range(self.weight, head, xs.len());
        let (all_weight_sums, all_bias_sums) = sums.split_at_mut(self.weight_sums);
        let bias_range = head_range(all_bias_sums, head, xs.len());
        // Either is empty if its parameter is not tracked for gradients.
        let weight_sums = all_weight_sums.get_mut(weight_range.clone()).unwrap_or_default();
        let bias_sums = all_bias_sums.get_mut(bias_range).unwrap_or_default();
        for ((total, dy), &x) in weight_sums.iter_mut().zip(gradient).zip(xs) {
            *total += dy * moments.normed(x);
        }
        for (total, dy) in bias_sums.iter_mut().zip(gradient) {
            *total += dy;
        }
        // The gradient of the normed row. Its components along ones and along the normed row do not reach the inputs.
        for ((dx, dy), w) in xs_grad.iter_mut().zip(gradient).zip(&self.weight[weight_range]) {
            *dx = dy * w;
        }
        let mean = if self.norm.subtracts_mean { sum(xs_grad, xs_grad, |dx, _| dx) / d } else { 0.0 };
        let along = sum(xs_grad, xs, |dx, x| dx * moments.normed(x)) / d;
        for (dx, &x) in xs_grad.iter_mut().zip(xs) {
            *dx = (*dx - mean - moments.normed(x) * along) * moments.factor;
        }
    }
}

impl<E> RowPass<E, 2> for NormBackward<'_> {
    type Scratch = ();

    fn compute(&self, row: Row<2>, (): &mut ()) {
        let [xs, gradient] = row.inputs;
        self.compute(row.head, xs, gradient, row.output, row.sums);
    }
}

/// [`NormBackward`] of a norm that is multiplied by an activated gate.
pub(super) struct GatedBackward<'a> {
    pub backward: NormBackward<'a>,
    pub activation: GateActivation,
}

/// The scratch buffers of a task of [`GatedBackward`].
pub(super) struct GatedScratch<E> {
    gated: Vec<E>,
    widened: Vec<f32>,
}

impl<E> Default for GatedScratch<E> {
    fn default() -> Self {
        Self { gated: Vec::new(), widened: Vec::new() }
    }
}

impl<E: TensorElement> RowPass<E, 3> for GatedBackward<'_> {
    type Scratch = GatedScratch<E>;

    fn compute(&self, row: Row<3>, scratch: &mut GatedScratch<E>) {
        let [xs, gradient, gate] = row.inputs;
        // Rounded, as the normed rows of separate operations would be.
        scratch.gated.resize(xs.len(), E::default());
        E::write(&mut scratch.gated, &mut scratch.widened, |gated| {
            for ((normed_grad, dy), &g) in gated.iter_mut().zip(gradient).zip(gate) {
                *normed_grad = dy * self.activation.value_and_slope(g).value;
            }
        });
        let normed_grad = E::widen(&scratch.gated, &mut scratch.widened);
        self.backward.compute(row.head, xs, normed_grad, row.output, row.sums);
    }
}

/// The gradient of a gate before its activation.
pub(super) struct GateGradient<'a> {
    pub norm: RowNorm,
    pub weight: &'a [f32],
    pub activation: GateActivation,
}

impl<E> RowPass<E, 3> for GateGradient<'_> {
    type Scratch = ();

    fn compute(&self, row: Row<3>, (): &mut ()) {
        let [xs, gradient, gate] = row.inputs;
        let moments = self.norm.moments(xs);
        for (n, gate_grad) in row.output.iter_mut().enumerate() {
            let slope = self.activation.value_and_slope(gate[n]).slope;
            *gate_grad = gradient[n] * moments.normed(xs[n]) * self.weight[n] * slope;
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

/// Returns the sum of a term of each pair of entries of two rows of one length.
#[inline]
fn sum(xs: &[f32], ys: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (x_chunks, x_rest) = xs.as_chunks::<LANES>();
    let (y_chunks, y_rest) = ys.as_chunks::<LANES>();
    for (x_chunk, y_chunk) in x_chunks.iter().zip(y_chunks) {
        for (lane, (&x, &y)) in lanes.iter_mut().zip(x_chunk.iter().zip(y_chunk)) {
            *lane += term(x, y);
        }
    }
    for (lane, (&x, &y)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *lane += term(x, y);
    }
    lanes.iter().sum()
}
