//! Norms of rows on a CPU as operations in Candle's graph, by themselves and times an activated gate: one pass over the
//! rows forward, which keeps only its inputs, and one backward.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};
use rayon::prelude::*;

use crate::base::rowwise::{Element, HeadRows, TASK_ELEMENTS, map_heads, read, with_contiguous_rows, with_float};
use crate::base::{gradient_of, record};
use crate::gate::GateActivation;

const OP: &str = "norm";

/// Sums are kept in this many lanes, so that the compiler vectorises them.
const LANES: usize = 16;

/// The most tasks of a backward pass. Each has sums of its own for the gradients of weight and bias; how many there are
/// depends on the shape alone, so that the bits of these gradients do too.
const MOST_TASKS: usize = 64;

/// `(x - mean) / sqrt(variance + eps) · weight + bias` of each row, rounded once; where the mean stays, `mean` is 0 and
/// `variance` the mean square.
///
/// Candle's own norms have no backward pass, want contiguous inputs and a weight (D,), and its layer norm finds the
/// variance as a difference of squares, which loses the digits of numbers that are far from zero.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowNorm {
    pub subtracts_mean: bool,
    pub eps: f32,
    /// Whether rows are multiplied by an activated gate in the place of a bias.
    pub gate: Option<GateActivation>,
}

impl RowNorm {
    /// A view (D,), (T, D), (B, T, D) or (B, T, H, D) in f32, bf16 or f16 to a contiguous tensor of its shape and
    /// dtype. Weight and bias are (D,) or (H, D), contiguous, in f32; an empty bias adds nothing. A gate is a view of
    /// the shape and dtype of the rows, whose weight is (D,). Each of the three may be tracked for gradients.
    pub fn apply(self, xs: &Tensor, weight: &Tensor, bias_or_gate: &Tensor) -> Result<Tensor> {
        let operands = [with_contiguous_rows(xs)?, weight.clone(), with_contiguous_rows(bias_or_gate)?];
        with_float!(OP, xs.dtype(), |E| {
            let ys = self.with_rows(&operands, |rows: &NormRows<E>| rows.normed())?;
            let own = operands.clone();
            let backward = move |_: &Tensor, gradient: &Tensor| self.gradients::<E>(&own, gradient);
            record(OP, &operands.each_ref().map(Some), ys, xs.shape(), backward)
        })
    }

    fn with_rows<E: Element, R>(
        self,
        operands: &[Tensor; 3],
        run: impl FnOnce(&NormRows<E>) -> Result<R>,
    ) -> Result<R> {
        let [xs, weight, other] = operands.each_ref().map(read);
        let (bias, gate): (&[f32], _) = match self.gate {
            Some(_) => (&[], Some(other.rows()?)),
            None => (other.contiguous()?, None),
        };
        run(&NormRows { norm: self, xs: xs.rows()?, weight: weight.contiguous()?, bias, gate })
    }

    /// The gradients of rows, weight, and bias or gate, as far as these are tracked.
    fn gradients<E: Element>(self, operands: &[Tensor; 3], gradient: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let ([xs, weight, other], gradient) = (operands.each_ref().map(Some), with_contiguous_rows(gradient)?);
        self.with_rows(operands, |rows: &NormRows<E>| {
            let gradient = read(&gradient);
            let gradient = gradient.rows()?;
            let is_tracked = |operand: Option<&Tensor>| operand.is_some_and(Tensor::track_op);
            let wants = [is_tracked(weight), is_tracked(other) && self.gate.is_none()];
            let (of_xs, [of_weight, of_bias]) = rows.gradients(&gradient, wants);
            let of_other = match rows.gate() {
                Some((gate, activation)) => gradient_of(other, Some(rows.of_gate(gate, activation, &gradient)))?,
                None => gradient_of(other, Some(of_bias))?,
            };
            Ok(vec![gradient_of(xs, Some(of_xs))?, gradient_of(weight, Some(of_weight))?, of_other])
        })
    }

    fn moments(self, row: &[f32]) -> Moments {
        let d = row.len() as f32;
        let mean = if self.subtracts_mean { sum(row, row, |x, _| x) / d } else { 0.0 };
        let variance = sum(row, row, |x, _| (x - mean) * (x - mean)) / d;
        Moments { mean, factor: (variance + self.eps).sqrt().recip() }
    }
}

/// What a row is normalised with.
#[derive(Clone, Copy)]
struct Moments {
    mean: f32,
    /// 1 over the root of the variance.
    factor: f32,
}

impl Moments {
    pub fn normed(self, x: f32) -> f32 {
        (x - self.mean) * self.factor
    }
}

/// A head's part of numbers (D,), which all heads have, or (H, D).
fn of_head(numbers: &[f32], head: usize, d: usize) -> Range<usize> {
    if numbers.len() == d { 0..d } else { head * d..(head + 1) * d }
}

/// What a norm is given, in memory.
struct NormRows<'a, E> {
    norm: RowNorm,
    xs: HeadRows<'a, E>,
    weight: &'a [f32],
    /// Empty where nothing is added.
    bias: &'a [f32],
    gate: Option<HeadRows<'a, E>>,
}

impl<'a, E: Element> NormRows<'a, E> {
    fn gate(&self) -> Option<(&HeadRows<'a, E>, GateActivation)> {
        self.gate.as_ref().zip(self.norm.gate)
    }

    fn normed(&self) -> Result<Vec<E>> {
        let (&HeadRows { tokens, h, d, .. }, weight) = (&self.xs, self.weight);
        let bias = Some(self.bias).filter(|bias| !bias.is_empty());
        for numbers in [weight, bias.unwrap_or(weight)] {
            if tokens * h * d > 0 && numbers.len() != d && numbers.len() != h * d {
                bail!("[{OP}] there are {} weights, expected {d}, or {h} times {d}", numbers.len())
            }
        }
        Ok(map_heads(&self.xs, |token| {
            let gate = self.gate().map(|(gate, activation)| (gate.of_token(token), activation));
            move |head, xs: &[f32], ys: &mut [f32]| {
                let (moments, mut wide) = (self.norm.moments(xs), Vec::new());
                let row = ys.iter_mut().zip(xs).zip(&weight[of_head(weight, head, d)]);
                match bias {
                    Some(bias) => row
                        .zip(&bias[of_head(bias, head, d)])
                        .for_each(|(((y, &x), weight), bias)| *y = moments.normed(x) * weight + bias),
                    None => row.for_each(|((y, &x), weight)| *y = moments.normed(x) * weight),
                }
                if let Some((gate, activation)) = &gate {
                    let gate = E::widen(gate(head), &mut wide);
                    ys.iter_mut().zip(gate).for_each(|(y, &gate)| *y *= activation.with_slope(gate).0);
                }
            }
        }))
    }

    /// The gradients of the rows, and of weight and bias, which are empty where they are not wanted.
    fn gradients(&self, gradients: &HeadRows<E>, wants: [bool; 2]) -> (Vec<E>, [Vec<f32>; 2]) {
        let &HeadRows { tokens, h, d, .. } = &self.xs;
        let zeros = || wants.map(|wanted| vec![0.0; if wanted { self.weight.len() } else { 0 }]);
        let (mut of_xs, mut sums) = (vec![E::default(); tokens * h * d], zeros());
        if of_xs.is_empty() {
            return (of_xs, sums);
        }
        let of_task = tokens.div_ceil(MOST_TASKS).max(TASK_ELEMENTS.div_ceil(h * d));
        let task = |(task, of_xs): (usize, &mut [E])| {
            let (mut sums, mut gated) = (zeros(), vec![E::default(); d]);
            let [mut of_x, mut of_gradient, mut of_gate, mut of_gated, mut scratch] = <[Vec<f32>; 5]>::default();
            for (token, own) in (task * of_task..).zip(of_xs.chunks_exact_mut(h * d)) {
                let (x, gradient) = (self.xs.of_token(token), gradients.of_token(token));
                let gate = self.gate().map(|(gate, activation)| (gate.of_token(token), activation));
                for (head, own) in own.chunks_exact_mut(d).enumerate() {
                    let x = E::widen(x(head), &mut of_x);
                    let mut gradient = E::widen(gradient(head), &mut of_gradient);
                    if let Some((gate, activation)) = &gate {
                        // Rounded as the normed rows of the forward pass would be.
                        let numbers = gradient.iter().zip(E::widen(gate(head), &mut of_gate));
                        E::write(&mut gated, &mut scratch, |gated| {
                            for (gated, (gradient, &gate)) in gated.iter_mut().zip(numbers) {
                                *gated = gradient * activation.with_slope(gate).0;
                            }
                        });
                        gradient = E::widen(&gated, &mut of_gated);
                    }
                    E::write(own, &mut scratch, |own| self.row_gradients(head, [x, gradient], own, &mut sums));
                }
            }
            sums
        };
        let parts: Vec<_> = if tokens <= of_task {
            vec![task((0, &mut of_xs))]
        } else {
            of_xs.par_chunks_mut(of_task * h * d).enumerate().map(task).collect()
        };
        for part in &parts {
            for (sum, part) in sums.iter_mut().zip(part) {
                sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            }
        }
        (of_xs, sums)
    }

    /// The gradient of a row, and its part of those of weight and bias, as far as they are wanted.
    fn row_gradients(&self, head: usize, [xs, gradient]: [&[f32]; 2], of_xs: &mut [f32], sums: &mut [Vec<f32>; 2]) {
        let (d, moments) = (xs.len() as f32, self.norm.moments(xs));
        let (own, [of_weight, of_bias]) = (of_head(self.weight, head, xs.len()), sums);
        if !of_weight.is_empty() {
            let sums = of_weight[own.clone()].iter_mut().zip(gradient).zip(xs);
            sums.for_each(|((sum, gradient), &x)| *sum += gradient * moments.normed(x));
        }
        if !of_bias.is_empty() {
            of_bias[own.clone()].iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
        }
        // Of the normed row, whose parts along ones and along itself do not reach the inputs.
        for ((of_x, gradient), weight) in of_xs.iter_mut().zip(gradient).zip(&self.weight[own]) {
            *of_x = gradient * weight;
        }
        let mean = if self.norm.subtracts_mean { sum(of_xs, of_xs, |of_x, _| of_x) / d } else { 0.0 };
        let along = sum(of_xs, xs, |of_x, x| of_x * moments.normed(x)) / d;
        for (of_x, &x) in of_xs.iter_mut().zip(xs) {
            *of_x = (*of_x - mean - moments.normed(x) * along) * moments.factor;
        }
    }

    /// The gradients of the gate.
    fn of_gate(&self, gates: &HeadRows<E>, activation: GateActivation, gradients: &HeadRows<E>) -> Vec<E> {
        map_heads(gates, |token| {
            let (row, gradient) = (self.xs.of_token(token), gradients.of_token(token));
            move |head, gate: &[f32], own: &mut [f32]| {
                let [mut of_row, mut of_gradient] = <[Vec<f32>; 2]>::default();
                let (row, gradient) = (E::widen(row(head), &mut of_row), E::widen(gradient(head), &mut of_gradient));
                let moments = self.norm.moments(row);
                for ((((own, &gate), gradient), &x), weight) in
                    own.iter_mut().zip(gate).zip(gradient).zip(row).zip(self.weight)
                {
                    *own = gradient * moments.normed(x) * weight * activation.with_slope(gate).1;
                }
            }
        })
    }
}

/// The sum over two rows of one length.
fn sum(xs: &[f32], ys: &[f32], of: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let ((xs, xs_rest), (ys, ys_rest)) = (xs.as_chunks::<LANES>(), ys.as_chunks::<LANES>());
    for (xs, ys) in xs.iter().zip(ys) {
        for (lane, (&x, &y)) in lanes.iter_mut().zip(xs.iter().zip(ys)) {
            *lane += of(x, y);
        }
    }
    for (lane, (&x, &y)) in lanes.iter_mut().zip(xs_rest.iter().zip(ys_rest)) {
        *lane += of(x, y);
    }
    lanes.iter().sum()
}
