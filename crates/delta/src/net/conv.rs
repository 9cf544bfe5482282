//! The short causal convolution, depthwise, and SiLU.

use std::ops::Range;

use candle_core::{DType, Result, Tensor};

use super::OP;
use candle_attention_core::PackedSequences;
use candle_attention_core::internal::NewTokens;
use candle_attention_modules::base::rowwise::{
    Element, HeadRows, Row, RowPass, Sums, map_rows, read, with_contiguous_rows, with_float,
};
use candle_attention_modules::base::{Parameter, accumulation_dtype, gradient_of, part, record, sum_of_terms};
use candle_attention_modules::gate::GateActivation;

/// Weights (C, 1, K) as taps (K, C) in the accumulation dtype, with what variables hold now.
pub(super) fn taps_of(weight: &Parameter) -> Result<Tensor> {
    let weight = weight.tensor()?;
    weight.to_dtype(accumulation_dtype(weight.dtype()))?.squeeze(1)?.t()?.contiguous()
}

/// `y[t] = silu(Σ taps[i] x[t - K + 1 + i])` of each channel: (B, T, C) by taps (K, C), after a state (B, K - 1, C), or
/// packed sequences (1, total, C), each after zeros.
pub(super) fn convolve(
    taps: &Tensor,
    xs: &Tensor,
    state: &Tensor,
    sequences: Option<&PackedSequences>,
) -> Result<Tensor> {
    let (b, t, _) = xs.dims3()?;
    if xs.elem_count() == 0 {
        return Tensor::zeros(xs.shape(), xs.dtype(), xs.device());
    }
    if xs.device().is_cpu() && xs.dtype() != DType::F64 {
        let starts: Vec<_> = match sequences {
            Some(sequences) => (0..sequences.len()).map(|s| sequences.queries(s).start).collect(),
            None => (0..b).map(|b| b * t).collect(),
        };
        let (xs, taps, state) = (with_contiguous_rows(xs)?, taps.contiguous()?, state.detach().contiguous()?);
        return with_float!(OP, xs.dtype(), |E| {
            let ys = with_operands([&xs, &taps, &state], &starts, |own: &Operands<E>| Ok(own.outputs()))?;
            let own = [xs.clone(), taps.clone(), state];
            record("short-convolution", &[Some(&xs), Some(&taps)], ys, xs.shape(), move |_, gradient| {
                let gradient = with_contiguous_rows(gradient)?;
                let gradients = |own: &Operands<E>| Ok(own.gradients(&read(&gradient).rows()?));
                let (of_xs, of_taps) = with_operands(own.each_ref(), &starts, gradients)?;
                Ok(vec![gradient_of(Some(&own[0]), Some(of_xs))?, gradient_of(Some(&own[1]), Some(of_taps))?])
            })
        });
    }
    let Some(sequences) = sequences else { return shifted(xs, state, taps) };
    let one = |s| shifted(&part(xs, 1, sequences.queries(s))?, state, taps);
    let filled = (0..sequences.len()).filter(|&s| !sequences.queries(s).is_empty());
    Tensor::cat(&filled.map(one).collect::<Result<Vec<_>>>()?, 1)
}

/// The last of a state (B, K - 1, C) and inputs (B, T, C), as many as the state has, before the end of each sequence's
/// tokens: the state that the next call begins with.
pub(super) fn tail(xs: &Tensor, state: &Tensor, tokens: &NewTokens) -> Result<Tensor> {
    let before = state.dim(1)?;
    let last = |xs: &Tensor, state: &Tensor, end: usize| {
        let own = part(xs, 1, end.saturating_sub(before)..end)?.force_contiguous()?;
        if end >= before { Ok(own) } else { Tensor::cat(&[part(state, 1, end..before)?, own], 1) }
    };
    if tokens.all_valid() {
        return last(xs, state, tokens.t);
    }
    let of_one = |(b, own): (usize, &Range<usize>)| last(&part(xs, 0, b..b + 1)?, &part(state, 0, b..b + 1)?, own.end);
    Tensor::cat(&tokens.tokens.iter().enumerate().map(of_one).collect::<Result<Vec<_>>>()?, 0)
}

/// In Candle's own operations, which have gradients.
fn shifted(xs: &Tensor, state: &Tensor, taps: &Tensor) -> Result<Tensor> {
    let (k, t) = (taps.dim(0)?, xs.dim(1)?);
    let all = Tensor::cat(&[state, &xs.contiguous()?], 1)?.to_dtype(taps.dtype())?;
    let tap = |i: usize| all.narrow(1, i, t)?.broadcast_mul(&taps.get(i)?);
    sum_of_terms(0..k, &tap)?.silu()?.to_dtype(xs.dtype())
}

/// The tokens whose gradients of taps are added up before those of others.
const TOKENS: usize = 64;

/// What is convolved in one pass on a CPU: inputs (B, T, C) in memory, taps (K, C), and what comes before the inputs,
/// which gets no gradient.
struct Operands<'a, E> {
    rows: HeadRows<'a, E>,
    taps: &'a [f32],
    /// (B, K - 1, C). Packed sequences after the first have none, which is as good as zeros.
    state: &'a [E],
    /// The first token of each sequence, counted through the batch.
    starts: &'a [usize],
}

/// Of inputs, taps and a state.
fn with_operands<E: Element, R>(
    tensors: [&Tensor; 3],
    starts: &[usize],
    run: impl FnOnce(&Operands<E>) -> Result<R>,
) -> Result<R> {
    let [xs, taps, state] = tensors.map(read);
    run(&Operands { rows: xs.rows()?, taps: taps.contiguous()?, state: state.contiguous()?, starts })
}

impl<E: Element> Operands<'_, E> {
    fn outputs(&self) -> Vec<E> {
        map_rows(&self.rows, [], None, &Outputs { operands: self }).rows
    }

    /// The input so many tokens before a token.
    fn row<'s>(&'s self, token: usize, back: usize, scratch: &'s mut Vec<f32>) -> impl Iterator<Item = &'s f32> {
        let (c, sequence) = (self.rows.d, self.starts.partition_point(|&start| start <= token) - 1);
        let (at, before) = (token - self.starts[sequence], self.taps.len() / c - 1);
        let row = match at {
            _ if at >= back => Some(self.rows.of_token(token - back).head(0)),
            _ => self.state.chunks_exact(c).nth(sequence * before + before + at - back),
        };
        row.map(|row| E::widen(row, scratch)).into_iter().flatten()
    }

    /// What SiLU takes of a token.
    fn sum(&self, token: usize, ys: &mut [f32], scratch: &mut Vec<f32>) {
        ys.fill(0.0);
        for (back, taps) in self.taps.chunks_exact(ys.len()).rev().enumerate().rev() {
            let row = self.row(token, back, scratch);
            ys.iter_mut().zip(row).zip(taps).for_each(|((y, x), tap)| *y += x * tap);
        }
    }

    /// The gradients of the inputs and of the taps from those of the outputs.
    fn gradients(&self, gradients: &HeadRows<E>) -> (Vec<E>, Vec<f32>) {
        let sums = Sums { count: self.taps.len(), tokens_of_task: TOKENS };
        let of_sums = map_rows::<E, f32, _, 1>(&self.rows, [gradients], Some(sums), &SumGradients { operands: self });
        let of_inputs = InputGradients { operands: self, of_sums: &of_sums.rows };
        (map_rows(&self.rows, [], None, &of_inputs).rows, of_sums.sums)
    }
}

/// The outputs of a convolution.
struct Outputs<'a, E> {
    operands: &'a Operands<'a, E>,
}

impl<E: Element> RowPass<E, 0> for Outputs<'_, E> {
    type Scratch = Vec<f32>;

    fn compute(&self, row: Row<0>, scratch: &mut Vec<f32>) {
        self.operands.sum(row.token, row.output, scratch);
        for y in row.output {
            *y = GateActivation::Silu.value_and_slope(*y).value;
        }
    }
}

/// The gradients of the sums before SiLU from those of the outputs, and the gradients of the taps as sums over tokens.
struct SumGradients<'a, E> {
    operands: &'a Operands<'a, E>,
}

impl<E: Element> RowPass<E, 1> for SumGradients<'_, E> {
    type Scratch = Vec<f32>;

    fn compute(&self, row: Row<1>, scratch: &mut Vec<f32>) {
        let [gradient] = row.inputs;
        self.operands.sum(row.token, row.output, scratch);
        for (of_sum, gradient) in row.output.iter_mut().zip(gradient) {
            *of_sum = gradient * GateActivation::Silu.value_and_slope(*of_sum).slope;
        }
        for (back, of_taps) in row.sums.chunks_exact_mut(row.output.len()).rev().enumerate() {
            let xs = self.operands.row(row.token, back, scratch);
            for ((of_tap, x), of_sum) in of_taps.iter_mut().zip(xs).zip(&*row.output) {
                *of_tap += x * of_sum;
            }
        }
    }
}

/// The gradients of the inputs from those of the sums.
struct InputGradients<'a, E> {
    operands: &'a Operands<'a, E>,
    /// (B, T, C).
    of_sums: &'a [f32],
}

impl<E: Element> RowPass<E, 0> for InputGradients<'_, E> {
    type Scratch = ();

    fn compute(&self, row: Row<0>, (): &mut ()) {
        let Operands { starts, rows, taps, .. } = self.operands;
        let c = rows.d;
        let next_sequence = starts.partition_point(|&start| start <= row.token);
        let end = starts.get(next_sequence).copied().unwrap_or(rows.tokens);
        let of_later_sums = &self.of_sums[row.token * c..end * c];
        row.output.fill(0.0);
        for (taps, of_sum) in taps.chunks_exact(c).rev().zip(of_later_sums.chunks_exact(c)) {
            for ((of_x, tap), gradient) in row.output.iter_mut().zip(taps).zip(of_sum) {
                *of_x += tap * gradient;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// One pass has the outputs and the gradients of Candle's own operations over f64, in every dtype, of a view.
    #[test]
    fn one_pass_is_what_shifted_inputs_give() -> Result<()> {
        let random = |shape: &[usize]| Tensor::randn(0f64, 1., shape, &Device::Cpu);
        let all = [random(&[2, 90, 7])?, random(&[3, 5])?, random(&[2, 2, 5])?, random(&[2, 90, 5])?];
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2), (DType::F16, 2e-3)] {
            let [xs, taps, state, upstream] = all.each_ref().map(|tensor| tensor.to_dtype(dtype));
            let (xs, taps, state, upstream) = (xs?, taps?, state?, upstream?);
            let run = |wide: DType, of_xs: DType| {
                let var = |tensor: &Tensor, dtype| Var::from_tensor(&tensor.to_dtype(dtype)?);
                let (xs, taps) = (var(&xs, of_xs)?, var(&taps, wide)?);
                let ys = convolve(&taps, &xs.narrow(2, 1, 5)?, &state.to_dtype(of_xs)?, None)?;
                let gradients = (ys.to_dtype(wide)? * upstream.to_dtype(wide)?)?.sum_all()?.backward()?;
                let found = [&xs, &taps].map(|var| gradients.get(var).cloned().expect("a gradient"));
                [ys].into_iter().chain(found).map(|tensor| tensor.to_dtype(DType::F64)).collect::<Result<Vec<_>>>()
            };
            let (own, expected) = (run(DType::F32, dtype)?, run(DType::F64, DType::F64)?);
            for (n, (own, expected)) in own.iter().zip(&expected).enumerate() {
                let largest = |xs: &Tensor| xs.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>();
                let error = largest(&(own - expected)?)? / largest(expected)?;
                assert!(error <= tolerance, "{dtype:?}: result {n} is off by {error:e}");
            }
        }
        Ok(())
    }
}
