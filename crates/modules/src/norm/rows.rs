//! Norms of rows on a CPU as operations in Candle's graph, by themselves and times an activated gate: one pass over the
//! rows forward, which keeps only its inputs, and one backward.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use crate::base::rowwise::{Element, HeadRows, Sums, TASK_ELEMENTS, map_rows, read, with_contiguous_rows, with_float};
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
    pub fn apply(self, xs: &Tensor, [weight, bias_or_gate]: &[Tensor; 2]) -> Result<Tensor> {
        let operands = [with_contiguous_rows(xs)?, weight.clone(), with_contiguous_rows(bias_or_gate)?];
        with_float!(OP, xs.dtype(), |E| {
            let (ys, own) = (self.normed::<E>(&operands)?, operands.clone());
            let backward = move |_: &Tensor, gradient: &Tensor| self.gradients::<E>(&own, gradient);
            record(OP, &operands.each_ref().map(Some), ys, xs.shape(), backward)
        })
    }

    fn normed<E: Element>(self, operands: &[Tensor; 3]) -> Result<Vec<E>> {
        let [xs, weight, other] = operands.each_ref().map(read);
        let (rows, weight) = (xs.rows::<E>()?, weight.contiguous()?);
        let (bias, gate) = match self.gate {
            Some(_) => (&[][..], Some(other.rows()?)),
            None => (other.contiguous()?, None),
        };
        let &HeadRows { tokens, h, d, .. } = &rows;
        let bias = Some(bias).filter(|bias| !bias.is_empty());
        for numbers in [weight, bias.unwrap_or(weight)] {
            if tokens * h * d > 0 && numbers.len() != d && numbers.len() != h * d {
                bail!("[{OP}] there are {} weights, expected {d}, or {h} times {d}", numbers.len())
            }
        }
        let normed = move |head, [xs, gate]: [&[f32]; 2], ys: &mut [f32], _: &mut [f32]| {
            let moments = self.moments(xs);
            let row = ys.iter_mut().zip(xs).zip(&weight[of_head(weight, head, d)]);
            match bias {
                Some(bias) => row
                    .zip(&bias[of_head(bias, head, d)])
                    .for_each(|(((y, &x), weight), bias)| *y = moments.normed(x) * weight + bias),
                None => row.for_each(|((y, &x), weight)| *y = moments.normed(x) * weight),
            }
            if let Some(activation) = self.gate {
                ys.iter_mut().zip(gate).for_each(|(y, &gate)| *y *= activation.with_slope(gate).0);
            }
        };
        Ok(map_rows(&rows, [Some(&rows), gate.as_ref()], None, |_| normed).0)
    }

    /// The gradients of rows, weight, and bias or gate, as far as these are tracked.
    fn gradients<E: Element>(self, operands: &[Tensor; 3], gradient: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let gradient = with_contiguous_rows(gradient)?;
        let ([xs, weight, other], gradient) = (operands.each_ref().map(read), read(&gradient));
        let (xs, weight, gradient) = (xs.rows::<E>()?, weight.contiguous()?, gradient.rows()?);
        let gate = self.gate.map(|_| other.rows()).transpose()?;
        let views = [Some(&xs), Some(&gradient), gate.as_ref()];
        let [_, weight_sums, bias_sums] = operands.each_ref().map(|own| if own.track_op() { weight.len() } else { 0 });
        let bias_sums = if self.gate.is_some() { 0 } else { bias_sums };
        let tokens_of_task = xs.tokens.div_ceil(MOST_TASKS).max(TASK_ELEMENTS.div_ceil((xs.h * xs.d).max(1)));
        let wanted = Sums { count: weight_sums + bias_sums, tokens_of_task };
        let (of_xs, mut sums) = map_rows(&xs, views, Some(wanted), |_| {
            let (mut gated, mut scratch) = (Vec::new(), Vec::new());
            move |head, [x, mut gradient, gate]: [&[f32]; 3], of_x: &mut [f32], sums: &mut [f32]| {
                if let Some(activation) = self.gate {
                    // Rounded as the normed rows of the forward pass would be.
                    gated.resize(x.len(), E::default());
                    E::write(&mut gated, &mut scratch, |gated| {
                        for ((gated, gradient), &gate) in gated.iter_mut().zip(gradient).zip(gate) {
                            *gated = gradient * activation.with_slope(gate).0;
                        }
                    });
                    gradient = E::widen(&gated, &mut scratch);
                }
                let (own, (of_weight, of_bias)) = (of_head(weight, head, x.len()), sums.split_at_mut(weight_sums));
                let sums = [of_weight, of_bias].map(|sums| sums.get_mut(own.clone()).unwrap_or_default());
                self.row_gradients(&weight[own], [x, gradient], of_x, sums);
            }
        });
        let of_bias = sums.split_off(weight_sums);
        let [own, of_weight, other] = operands.each_ref().map(Some);
        let of_other = match self.gate {
            None => gradient_of(other, Some(of_bias))?,
            Some(activation) => {
                let of_gate = move |_, [x, gradient, gate]: [&[f32]; 3], own: &mut [f32], _: &mut [f32]| {
                    let moments = self.moments(x);
                    for ((((own, &gate), gradient), &x), weight) in
                        own.iter_mut().zip(gate).zip(gradient).zip(x).zip(weight)
                    {
                        *own = gradient * moments.normed(x) * weight * activation.with_slope(gate).1;
                    }
                };
                gradient_of::<E>(other, Some(map_rows(&xs, views, None, |_| of_gate).0))?
            }
        };
        Ok(vec![gradient_of::<E>(own, Some(of_xs))?, gradient_of(of_weight, Some(sums))?, of_other])
    }

    /// The gradient of a row, and its part of those of weight and bias, as far as they are wanted.
    fn row_gradients(
        self,
        weight: &[f32],
        [xs, gradient]: [&[f32]; 2],
        of_xs: &mut [f32],
        [of_weight, of_bias]: [&mut [f32]; 2],
    ) {
        let (d, moments) = (xs.len() as f32, self.moments(xs));
        for ((sum, gradient), &x) in of_weight.iter_mut().zip(gradient).zip(xs) {
            *sum += gradient * moments.normed(x);
        }
        of_bias.iter_mut().zip(gradient).for_each(|(sum, gradient)| *sum += gradient);
        // Of the normed row, whose parts along ones and along itself do not reach the inputs.
        for ((of_x, gradient), weight) in of_xs.iter_mut().zip(gradient).zip(weight) {
            *of_x = gradient * weight;
        }
        let mean = if self.subtracts_mean { sum(of_xs, of_xs, |of_x, _| of_x) / d } else { 0.0 };
        let along = sum(of_xs, xs, |of_x, x| of_x * moments.normed(x)) / d;
        for (of_x, &x) in of_xs.iter_mut().zip(xs) {
            *of_x = (*of_x - mean - moments.normed(x) * along) * moments.factor;
        }
    }

    #[inline]
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

/// The sum over two rows of one length.
#[inline]
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
