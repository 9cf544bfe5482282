//! Norms of rows on a CPU as Candle's custom operations, by themselves and times an activated gate: one pass over the
//! rows forward, which keeps only its inputs, and one backward.

use std::ops::Range;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Result, Shape, Tensor, WithDType, bail};
use rayon::prelude::*;

use crate::base::rowwise::{
    self, Element, HeadRows, Op3, Operand, TASK_ELEMENTS, Ternary, map_heads, read, with_contiguous_rows, with_float,
};
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
        with_contiguous_rows(xs)?.apply_op3(weight, &with_contiguous_rows(bias_or_gate)?, Op3(self))
    }

    fn moments(self, row: &[f32]) -> Moments {
        let d = row.len() as f32;
        let mean = if self.subtracts_mean { sum(row, row, |x, _| x) / d } else { 0.0 };
        let variance = sum(row, row, |x, _| (x - mean) * (x - mean)) / d;
        Moments { mean, factor: (variance + self.eps).sqrt().recip() }
    }

    /// An empty bias adds nothing.
    fn rows<E: Element>(
        self,
        xs: &HeadRows<E>,
        weight: &[f32],
        bias: &[f32],
        gate: Option<(&HeadRows<E>, GateActivation)>,
    ) -> Result<Vec<E>> {
        let &HeadRows { tokens, h, d, .. } = xs;
        let bias = Some(bias).filter(|bias| !bias.is_empty());
        for numbers in [weight, bias.unwrap_or(weight)] {
            if tokens * h * d > 0 && numbers.len() != d && numbers.len() != h * d {
                bail!("[{OP}] there are {} weights, expected {d}, or {h} times {d}", numbers.len())
            }
        }
        Ok(map_heads(xs, |token| {
            let gate = gate.map(|(gate, activation)| (gate.of_token(token), activation));
            move |head, xs: &[f32], ys: &mut [f32]| {
                let (moments, mut wide) = (self.moments(xs), Vec::new());
                let row = ys.iter_mut().zip(xs).zip(&weight[of_head(weight, head, d)]);
                match (bias, &gate) {
                    (Some(bias), _) => row
                        .zip(&bias[of_head(bias, head, d)])
                        .for_each(|(((y, &x), weight), bias)| *y = moments.normed(x) * weight + bias),
                    (None, Some((gate, activation))) => {
                        row.zip(E::widen(gate(head), &mut wide)).for_each(|(((y, &x), weight), &gate)| {
                            *y = moments.normed(x) * weight * activation.with_slope(gate).0;
                        })
                    }
                    (None, None) => row.for_each(|((y, &x), weight)| *y = moments.normed(x) * weight),
                }
            }
        }))
    }

    /// The gradients of rows, weight and bias, as far as these are tracked.
    fn gradients<E: Element + WithDType>(
        self,
        [xs, weight, bias]: [&Tensor; 3],
        gradient: &Tensor,
    ) -> Result<[Option<Tensor>; 3]> {
        let gradient = with_contiguous_rows(&gradient.detach())?;
        let [rows, gradients, numbers] = [xs, &gradient, weight].map(read);
        let backward = Backward {
            norm: self,
            xs: HeadRows::<E>::new(rows.elements()?, rows.layout)?,
            gradient: HeadRows::new(gradients.elements()?, gradients.layout)?,
            weight: numbers.contiguous()?,
            wants: [weight.track_op(), bias.track_op()],
        };
        let (of_xs, [of_weight, of_bias]) = backward.run();
        Ok([gradient_of(xs, of_xs)?, gradient_of(weight, of_weight)?, gradient_of(bias, of_bias)?])
    }

    /// The gradients of rows, weight and gate.
    fn gated_gradients<E: Element + WithDType>(
        self,
        [xs, weight, gate]: [&Tensor; 3],
        gradient: &Tensor,
        activation: GateActivation,
    ) -> Result<[Option<Tensor>; 3]> {
        let gradient = with_contiguous_rows(&gradient.detach())?;
        let (of_normed, of_gate) = {
            let [rows, gates, gradients, numbers] = [xs, gate, &gradient, weight].map(read);
            let rows = HeadRows::<E>::new(rows.elements()?, rows.layout)?;
            let gates = HeadRows::<E>::new(gates.elements()?, gates.layout)?;
            let gradients = HeadRows::<E>::new(gradients.elements()?, gradients.layout)?;
            let weight = numbers.contiguous::<f32>()?;
            let of_normed = map_heads(&gradients, |token| {
                let gate = gates.of_token(token);
                move |head, gradient: &[f32], own: &mut [f32]| {
                    let mut wide = Vec::new();
                    let gate = E::widen(gate(head), &mut wide);
                    for ((own, gradient), &gate) in own.iter_mut().zip(gradient).zip(gate) {
                        *own = gradient * activation.with_slope(gate).0;
                    }
                }
            });
            let of_gate = map_heads(&gates, |token| {
                let (row, gradient) = (rows.of_token(token), gradients.of_token(token));
                move |head, gate: &[f32], own: &mut [f32]| {
                    let mut wide = [Vec::new(), Vec::new()];
                    let [of_row, of_gradient] = &mut wide;
                    let (row, gradient) = (E::widen(row(head), of_row), E::widen(gradient(head), of_gradient));
                    let moments = self.moments(row);
                    let all = own.iter_mut().zip(gate).zip(gradient).zip(row).zip(weight);
                    for ((((own, &gate), gradient), &x), weight) in all {
                        *own = gradient * moments.normed(x) * weight * activation.with_slope(gate).1;
                    }
                }
            });
            (of_normed, of_gate)
        };
        let of_normed = Tensor::from_vec(of_normed, gate.shape(), gate.device())?;
        let [of_xs, of_weight, _] = self.gradients::<E>([xs, weight, &weight.detach()], &of_normed)?;
        Ok([of_xs, of_weight, gradient_of(gate, of_gate)?])
    }
}

/// The gradient of a tensor, if it is tracked.
fn gradient_of<E: WithDType>(tensor: &Tensor, numbers: Vec<E>) -> Result<Option<Tensor>> {
    tensor.track_op().then(|| Tensor::from_vec(numbers, tensor.shape(), tensor.device())).transpose()
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

fn of_head(parameter: &[f32], head: usize, d: usize) -> Range<usize> {
    if parameter.len() == d { 0..d } else { head * d..(head + 1) * d }
}

struct Backward<'a, E> {
    norm: RowNorm,
    xs: HeadRows<'a, E>,
    gradient: HeadRows<'a, E>,
    weight: &'a [f32],
    /// The gradients of weight and bias.
    wants: [bool; 2],
}

impl<E: Element> Backward<'_, E> {
    /// The gradients of the rows, and of weight and bias, which are empty where they are not wanted.
    fn run(&self) -> (Vec<E>, [Vec<f32>; 2]) {
        let &HeadRows { tokens, h, d, .. } = &self.xs;
        let mut of_xs = vec![E::default(); tokens * h * d];
        let mut sums = self.zeros();
        if of_xs.is_empty() {
            return (of_xs, sums);
        }
        let of_task = tokens.div_ceil(MOST_TASKS).max(TASK_ELEMENTS.div_ceil(h * d));
        let parts: Vec<_> = if tokens <= of_task {
            vec![self.task(0, &mut of_xs)]
        } else {
            let tasks = of_xs.par_chunks_mut(of_task * h * d).enumerate();
            tasks.map(|(task, of_xs)| self.task(task * of_task, of_xs)).collect()
        };
        for part in &parts {
            for (sum, part) in sums.iter_mut().zip(part) {
                sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            }
        }
        (of_xs, sums)
    }

    fn zeros(&self) -> [Vec<f32>; 2] {
        self.wants.map(|wanted| vec![0.0; if wanted { self.weight.len() } else { 0 }])
    }

    /// Writes the gradients of some tokens, and gives their part of those of weight and bias.
    fn task(&self, first: usize, of_xs: &mut [E]) -> [Vec<f32>; 2] {
        let (mut sums, [mut of_x, mut of_gradient, mut scratch]) = (self.zeros(), Default::default());
        let &HeadRows { h, d, .. } = &self.xs;
        for (token, own) in of_xs.chunks_exact_mut(h * d).enumerate() {
            let (x, gradient) = (self.xs.of_token(first + token), self.gradient.of_token(first + token));
            for (head, own) in own.chunks_exact_mut(d).enumerate() {
                let rows = [E::widen(x(head), &mut of_x), E::widen(gradient(head), &mut of_gradient)];
                E::write(own, &mut scratch, |own| self.row(head, rows, own, &mut sums));
            }
        }
        sums
    }

    /// The gradient of a row, and its part of those of weight and bias.
    fn row(&self, head: usize, [xs, gradient]: [&[f32]; 2], of_xs: &mut [f32], sums: &mut [Vec<f32>; 2]) {
        let (d, moments) = (xs.len() as f32, self.norm.moments(xs));
        let (own, [of_weight, of_bias]) = (of_head(self.weight, head, xs.len()), sums);
        if self.wants[0] {
            let sums = of_weight[own.clone()].iter_mut().zip(gradient).zip(xs);
            sums.for_each(|((sum, gradient), &x)| *sum += gradient * moments.normed(x));
        }
        if self.wants[1] {
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

impl Ternary for RowNorm {
    const NAME: &'static str = OP;

    fn forward(
        &self,
        [(xs, layout), (weight, of_weight), (third, of_third)]: [Operand; 3],
    ) -> Result<(CpuStorage, Shape)> {
        let weight = rowwise::contiguous(weight.as_slice()?, of_weight)?;
        let ys = with_float!(OP, xs.dtype(), |E| {
            let xs = HeadRows::<E>::new(xs.as_slice()?, layout)?;
            E::to_cpu_storage_owned(match self.gate {
                Some(activation) => {
                    let gate = HeadRows::new(third.as_slice()?, of_third)?;
                    self.rows(&xs, weight, &[], Some((&gate, activation)))?
                }
                None => self.rows(&xs, weight, rowwise::contiguous(third.as_slice()?, of_third)?, None)?,
            })
        });
        Ok((ys, layout.shape().clone()))
    }

    fn backward(&self, operands: [&Tensor; 3], _: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        with_float!(OP, operands[0].dtype(), |E| match self.gate {
            Some(gate) => self.gated_gradients::<E>(operands, gradient, gate),
            None => self.gradients::<E>(operands, gradient),
        })
    }
}
