//! The short causal convolution, depthwise, and SiLU.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::config::OP;
use super::conv_cuda::{Convolved, CudaConvolution};
use candle_attention_core::PackedSequences;
use candle_attention_core::internal::NewTokens;
use candle_attention_modules::base::first_use::{
    ComparedResult, FirstUseCase, ResultWithGradients, case_numbers, variables_in, variables_on,
};
use candle_attention_modules::base::rowwise::{
    HeadRows, Row, RowPass, Sums, TensorElement, map_rows, read, with_contiguous_rows, with_float,
};
use candle_attention_modules::base::{Parameter, accumulation_dtype, gradient_of, part, record, sum_of_terms};
use candle_attention_modules::gate::GateActivation;

/// The case of the short convolution.
pub const CONVOLUTION_CASE: FirstUseCase =
    FirstUseCase { operation: "short convolution", is_new: false, run: convolution_case };

/// Returns weights (C, 1, K) as taps (K, C) in the accumulation dtype, with the present values of variables.
pub(super) fn taps_of(weight: &Parameter) -> Result<Tensor> {
    let weight = weight.tensor()?;
    weight.to_dtype(accumulation_dtype(weight.dtype()))?.squeeze(1)?.t()?.contiguous()
}

/// Computes [`convolve`] of entries of a batch, and returns the last inputs of their `tokens` too.
pub(super) fn convolve_with_state(taps: &Tensor, xs: &Tensor, state: &Tensor, tokens: &NewTokens) -> Result<Convolved> {
    if xs.device().is_cuda()
        && tokens.all_valid()
        && let Some(call) = checked_on_cuda(taps, xs, state, None)
    {
        return call.run_with_state();
    }
    Ok(Convolved { ys: convolve(taps, xs, state, None)?, next_state: Some(tail(xs, state, tokens)?) })
}

/// Returns the convolution for the CUDA kernels; `None` if they do not support it, or failed their check.
fn checked_on_cuda(
    taps: &Tensor,
    xs: &Tensor,
    state: &Tensor,
    sequences: Option<&PackedSequences>,
) -> Option<CudaConvolution> {
    let call = CudaConvolution::plan(taps, xs, Some(state), sequences)?;
    CONVOLUTION_CASE.check(xs.device(), xs.dtype()).ok()?;
    Some(call)
}

/// Computes a convolution with its gradients by the kernels and by the CPU.
fn convolution_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let (b, t, c, k) = (2, 40, 36, 4);
    let inputs = [case_numbers(&[b, t, c], 1, dtype)?, case_numbers(&[k, c], 2, DType::F32)?];
    let state = case_numbers(&[b, k - 1, c], 3, dtype)?;
    let own = variables_on(device, &inputs)?;
    let other = variables_in(DType::F32, &inputs)?;
    let Some(call) = CudaConvolution::plan(&own[1], &own[0], Some(&state.to_device(device)?), None) else {
        bail!("no kernel convolves {:?} by {:?}", own[0], own[1])
    };
    let found = call.run()?;
    let expected = convolve(&other[1], &other[0], &state.to_dtype(DType::F32)?, None)?;
    let names = ["the gradient of the inputs", "the gradient of the taps"];
    ResultWithGradients { names: &names, found: &own, expected: &other }.compare(&found, &expected)
}

/// Computes `y[t] = silu(Σ taps[i] x[t - K + 1 + i])` of each channel: inputs (B, T, C) by taps (K, C), after the last
/// inputs of earlier calls (B, K - 1, C). Packed sequences (1, total, C) begin after zeros each.
pub(super) fn convolve(
    taps: &Tensor,
    xs: &Tensor,
    state: &Tensor,
    sequences: Option<&PackedSequences>,
) -> Result<Tensor> {
    if xs.elem_count() == 0 {
        return Tensor::zeros(xs.shape(), xs.dtype(), xs.device());
    }
    if xs.device().is_cpu() && xs.dtype() != DType::F64 {
        return with_float!(OP, xs.dtype(), |E| convolve_in_one_pass::<E>(taps, xs, state, sequences));
    }
    if xs.device().is_cuda()
        && let Some(call) = checked_on_cuda(taps, xs, state, sequences)
    {
        return call.run();
    }
    let Some(sequences) = sequences else { return shifted(xs, state, taps) };
    let mut outputs = Vec::new();
    for s in 0..sequences.len() {
        let tokens = sequences.queries(s);
        if !tokens.is_empty() {
            outputs.push(shifted(&part(xs, 1, tokens)?, state, taps)?);
        }
    }
    Tensor::cat(&outputs, 1)
}

/// Computes [`convolve`] on a CPU in one pass over the inputs.
fn convolve_in_one_pass<E: TensorElement>(
    taps: &Tensor,
    xs: &Tensor,
    state: &Tensor,
    sequences: Option<&PackedSequences>,
) -> Result<Tensor> {
    let (b, t, _) = xs.dims3()?;
    let starts: Vec<_> = match sequences {
        Some(sequences) => (0..sequences.len()).map(|s| sequences.queries(s).start).collect(),
        None => (0..b).map(|entry| entry * t).collect(),
    };
    let saved = ConvTensors {
        xs: with_contiguous_rows(xs)?,
        taps: taps.contiguous()?,
        state: state.detach().contiguous()?,
        starts,
    };
    let ys = saved.with_operands(|operands: &ConvOperands<E>| Ok(operands.outputs()))?;
    let own_xs = saved.xs.clone();
    let own_taps = saved.taps.clone();
    record("short-convolution", &[Some(&own_xs), Some(&own_taps)], ys, xs.shape(), move |_, gradient| {
        let gradient = with_contiguous_rows(gradient)?;
        let gradients: ConvGradients<E> =
            saved.with_operands(|operands: &ConvOperands<E>| Ok(operands.gradients(&read(&gradient).rows()?)))?;
        let xs_gradient = gradient_of(Some(&saved.xs), Some(gradients.xs))?;
        Ok(vec![xs_gradient, gradient_of(Some(&saved.taps), Some(gradients.taps))?])
    })
}

/// Returns the last K - 1 inputs before the end of each sequence's tokens, (B, K - 1, C): the state that the next call
/// begins with. They come from the inputs (B, T, C) and from the state (B, K - 1, C) before them.
fn tail(xs: &Tensor, state: &Tensor, tokens: &NewTokens) -> Result<Tensor> {
    if tokens.all_valid() {
        return last_inputs(xs, state, tokens.t);
    }
    let mut tails = Vec::new();
    for (b, own) in tokens.tokens.iter().enumerate() {
        tails.push(last_inputs(&part(xs, 0, b..b + 1)?, &part(state, 0, b..b + 1)?, own.end)?);
    }
    Tensor::cat(&tails, 0)
}

/// Returns the last K - 1 inputs before the token `end` of each sequence.
fn last_inputs(xs: &Tensor, state: &Tensor, end: usize) -> Result<Tensor> {
    let count = state.dim(1)?;
    let last = part(xs, 1, end.saturating_sub(count)..end)?.force_contiguous()?;
    if end >= count {
        return Ok(last);
    }
    Tensor::cat(&[part(state, 1, end..count)?, last], 1)
}

/// Computes the convolution of one or several sequences in Candle's own operations.
fn shifted(xs: &Tensor, state: &Tensor, taps: &Tensor) -> Result<Tensor> {
    let k = taps.dim(0)?;
    let t = xs.dim(1)?;
    let all = Tensor::cat(&[state, &xs.contiguous()?], 1)?.to_dtype(taps.dtype())?;
    let tap = |i: usize| all.narrow(1, i, t)?.broadcast_mul(&taps.get(i)?);
    sum_of_terms(0..k, &tap)?.silu()?.to_dtype(xs.dtype())
}

/// The number of tokens whose gradients of taps one task adds up.
const TOKENS: usize = 64;

/// The tensors of a convolution in one pass, with contiguous rows.
struct ConvTensors {
    xs: Tensor,
    taps: Tensor,
    state: Tensor,
    /// The first token of each sequence, counted through the batch.
    starts: Vec<usize>,
}

impl ConvTensors {
    /// Runs a function over the numbers in memory.
    fn with_operands<E: TensorElement, R>(&self, run: impl FnOnce(&ConvOperands<E>) -> Result<R>) -> Result<R> {
        let xs = read(&self.xs);
        let taps = read(&self.taps);
        let state = read(&self.state);
        run(&ConvOperands {
            rows: xs.rows()?,
            taps: taps.contiguous()?,
            state: state.contiguous()?,
            starts: &self.starts,
        })
    }
}

/// The numbers of a convolution in one pass on a CPU.
struct ConvOperands<'a, E> {
    /// The inputs (B, T, C).
    rows: HeadRows<'a, E>,
    /// (K, C).
    taps: &'a [f32],
    /// The inputs before the first token, (B, K - 1, C), which have no gradient. Packed sequences after the first read
    /// past its end, which counts as zeros.
    state: &'a [E],
    /// The first token of each sequence, counted through the batch.
    starts: &'a [usize],
}

/// The gradients of a convolution.
struct ConvGradients<E> {
    xs: Vec<E>,
    taps: Vec<f32>,
}

impl<E: TensorElement> ConvOperands<'_, E> {
    fn outputs(&self) -> Vec<E> {
        map_rows(&self.rows, [], None, &ConvOutputs { operands: self }).rows
    }

    /// Returns the input `back` tokens before a token; nothing for zeros before a packed sequence.
    fn row<'s>(&'s self, token: usize, back: usize, scratch: &'s mut Vec<f32>) -> impl Iterator<Item = &'s f32> {
        let c = self.rows.d;
        let sequence = self.starts.partition_point(|&start| start <= token) - 1;
        let position = token - self.starts[sequence];
        let row = if position >= back {
            Some(self.rows.of_token(token - back).head(0))
        } else {
            let state_rows = self.taps.len() / c - 1;
            self.state.chunks_exact(c).nth(sequence * state_rows + state_rows + position - back)
        };
        row.map(|row| E::widen(row, scratch)).into_iter().flatten()
    }

    /// Computes the output of a token before SiLU.
    fn sum(&self, token: usize, ys: &mut [f32], scratch: &mut Vec<f32>) {
        ys.fill(0.0);
        for (back, taps) in self.taps.chunks_exact(ys.len()).rev().enumerate().rev() {
            let row = self.row(token, back, scratch);
            for ((y, x), tap) in ys.iter_mut().zip(row).zip(taps) {
                *y += x * tap;
            }
        }
    }

    /// Computes the gradients of the inputs and of the taps from the gradients of the outputs.
    fn gradients(&self, gradients: &HeadRows<E>) -> ConvGradients<E> {
        let sums = Sums { count: self.taps.len(), tokens_of_task: TOKENS };
        let sum_gradients =
            map_rows::<E, f32, _, 1>(&self.rows, [gradients], Some(sums), &SumGradients { operands: self });
        let input_gradients = InputGradients { operands: self, sum_gradients: &sum_gradients.rows };
        ConvGradients { xs: map_rows(&self.rows, [], None, &input_gradients).rows, taps: sum_gradients.sums }
    }
}

/// The outputs of a convolution.
struct ConvOutputs<'a, E> {
    operands: &'a ConvOperands<'a, E>,
}

impl<E: TensorElement> RowPass<E, 0> for ConvOutputs<'_, E> {
    type Scratch = Vec<f32>;

    fn compute(&self, row: Row<0>, scratch: &mut Vec<f32>) {
        self.operands.sum(row.token, row.output, scratch);
        for y in row.output {
            *y = GateActivation::Silu.value_and_slope(*y).value;
        }
    }
}

/// The gradients of the sums before SiLU from the gradients of the outputs, and the gradients of the taps as sums over
/// tokens.
struct SumGradients<'a, E> {
    operands: &'a ConvOperands<'a, E>,
}

impl<E: TensorElement> RowPass<E, 1> for SumGradients<'_, E> {
    type Scratch = Vec<f32>;

    fn compute(&self, row: Row<1>, scratch: &mut Vec<f32>) {
        let [output_gradients] = row.inputs;
        self.operands.sum(row.token, row.output, scratch);
        for (sum_gradient, output_gradient) in row.output.iter_mut().zip(output_gradients) {
            *sum_gradient = output_gradient * GateActivation::Silu.value_and_slope(*sum_gradient).slope;
        }
        for (back, tap_gradients) in row.sums.chunks_exact_mut(row.output.len()).rev().enumerate() {
            let xs = self.operands.row(row.token, back, scratch);
            for ((tap_gradient, x), sum_gradient) in tap_gradients.iter_mut().zip(xs).zip(&*row.output) {
                *tap_gradient += x * sum_gradient;
            }
        }
    }
}

/// The gradients of the inputs from the gradients of the sums.
struct InputGradients<'a, E> {
    operands: &'a ConvOperands<'a, E>,
    /// (B, T, C).
    sum_gradients: &'a [f32],
}

impl<E: TensorElement> RowPass<E, 0> for InputGradients<'_, E> {
    type Scratch = ();

    fn compute(&self, row: Row<0>, (): &mut ()) {
        let ConvOperands { starts, rows, taps, .. } = self.operands;
        let c = rows.d;
        let next_sequence = starts.partition_point(|&start| start <= row.token);
        let end = starts.get(next_sequence).copied().unwrap_or(rows.tokens);
        let later_sum_gradients = &self.sum_gradients[row.token * c..end * c];
        row.output.fill(0.0);
        for (tap_row, sum_gradients) in taps.chunks_exact(c).rev().zip(later_sum_gradients.chunks_exact(c)) {
            for ((x_gradient, tap), sum_gradient) in row.output.iter_mut().zip(tap_row).zip(sum_gradients) {
                *x_gradient += tap * sum_gradient;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// Compares inputs that are a view, in every dtype, with Candle's own operations over f64.
    #[test]
    fn convolution_in_one_pass_matches_shifted_inputs() -> Result<()> {
        let random = |shape: &[usize]| Tensor::randn(0f64, 1., shape, &Device::Cpu);
        let all = [random(&[2, 90, 7])?, random(&[3, 5])?, random(&[2, 2, 5])?, random(&[2, 90, 5])?];
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 2e-2), (DType::F16, 2e-3)] {
            let [xs, taps, state, upstream] = all.each_ref().map(|tensor| tensor.to_dtype(dtype));
            let xs = xs?;
            let taps = taps?;
            let state = state?;
            let upstream = upstream?;
            let run = |wide: DType, xs_dtype: DType| {
                let xs_var = Var::from_tensor(&xs.to_dtype(xs_dtype)?)?;
                let taps_var = Var::from_tensor(&taps.to_dtype(wide)?)?;
                let ys = convolve(&taps_var, &xs_var.narrow(2, 1, 5)?, &state.to_dtype(xs_dtype)?, None)?;
                let gradients = (ys.to_dtype(wide)? * upstream.to_dtype(wide)?)?.sum_all()?.backward()?;
                let found = [&xs_var, &taps_var].map(|var| gradients.get(var).cloned().expect("a gradient"));
                [ys].into_iter().chain(found).map(|tensor| tensor.to_dtype(DType::F64)).collect::<Result<Vec<_>>>()
            };
            let found = run(DType::F32, dtype)?;
            let all_expected = run(DType::F64, DType::F64)?;
            for (n, (own, expected)) in found.iter().zip(&all_expected).enumerate() {
                let largest = |tensor: &Tensor| tensor.abs()?.flatten_all()?.max(0)?.to_scalar::<f64>();
                let error = largest(&(own - expected)?)? / largest(expected)?;
                assert!(error <= tolerance, "{dtype:?}: result {n} is off by {error:e}");
            }
        }
        Ok(())
    }
}
