//! The short causal convolution by its CUDA kernels.

use candle_attention_cuda::{ConvolutionCall, ConvolutionGradients, ConvolutionResults};
use candle_core::{Result, Shape, Storage, Tensor};

use candle_attention_core::PackedSequences;
use candle_attention_modules::base::record;
use candle_attention_modules::base::rowwise::with_contiguous_rows;

/// The results of a convolution.
pub(super) struct Convolved {
    /// (B, T, C).
    pub ys: Tensor,
    /// The last K - 1 inputs of each sequence, (B, K - 1, C), with which the next call begins, if there is a cache.
    pub next_state: Option<Tensor>,
}

/// A convolution that the kernels support, in the form that they read.
pub(super) struct CudaConvolution {
    /// (B, T, C), with contiguous rows.
    xs: Tensor,
    /// (K, C), with contiguous rows.
    taps: Tensor,
    kernels: ConvolutionCall,
}

impl CudaConvolution {
    /// Returns a convolution of inputs (B, T, C) by taps (K, C) after the last inputs of earlier calls (B, K - 1, C),
    /// or of packed sequences (1, total, C); `None` if the kernels do not support it.
    pub fn plan(
        taps: &Tensor,
        xs: &Tensor,
        state: Option<&Tensor>,
        sequences: Option<&PackedSequences>,
    ) -> Option<Self> {
        let xs = with_contiguous_rows(xs).ok()?;
        let taps = with_contiguous_rows(taps).ok()?;
        let state = match state {
            Some(state) if sequences.is_none() => Some(with_contiguous_rows(&state.detach()).ok()?),
            _ => None,
        };
        let cumulative_tokens = sequences.map(|sequences| {
            let ends = (0..sequences.len()).map(|s| sequences.queries(s).end);
            std::iter::once(0).chain(ends).collect()
        });
        let kernels = ConvolutionCall { xs: xs.detach(), taps: taps.detach(), state, cumulative_tokens };
        kernels.plan().ok()?;
        Some(Self { xs, taps, kernels })
    }

    /// Returns the output, (B, T, C).
    pub fn run(self) -> Result<Tensor> {
        let ConvolutionResults { output, .. } = self.kernels.forward(false)?;
        self.record(output)
    }

    /// Returns the output and the last inputs.
    pub fn run_with_state(self) -> Result<Convolved> {
        let ConvolutionResults { output, next_state } = self.kernels.forward(true)?;
        Ok(Convolved { ys: self.record(output)?, next_state })
    }

    /// Records the output in Candle's graph.
    fn record(self, output: Storage) -> Result<Tensor> {
        let Self { xs, taps, kernels } = self;
        let taps_dtype = taps.dtype();
        let shape: Shape = xs.shape().clone();
        record("short-convolution", &[Some(&xs), Some(&taps)], output, shape, move |_, gradient| {
            let gradients: ConvolutionGradients = kernels.backward(&with_contiguous_rows(gradient)?)?;
            Ok(vec![Some(gradients.xs), Some(gradients.taps.to_dtype(taps_dtype)?)])
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::super::conv::convolve;
    use super::*;

    /// Returns the output of a convolution, and the gradients of a loss.
    fn results(xs: &Var, taps: &Var, ys: Tensor) -> Result<[Tensor; 3]> {
        let weights = Tensor::from_iter((0..ys.elem_count()).map(|n| (n as f32 * 0.7).sin()), &Device::Cpu)?;
        let loss = (ys.to_dtype(DType::F32)?.flatten_all()? * weights)?.sum_all()?;
        let gradients = loss.backward()?;
        let of = |var: &Var| gradients.get(var).cloned().expect("a gradient");
        Ok([ys, of(xs), of(taps)])
    }

    /// Compares the kernels, by the emulator, with the CPU's own convolution: inputs and taps that are views.
    fn check(sequences: Option<&PackedSequences>, dtype: DType, tolerance: f64) -> Result<()> {
        let b = if sequences.is_some() { 1 } else { 2 };
        let random = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu);
        let (xs, taps) =
            (Var::from_tensor(&random(&[b, 40, 9])?.to_dtype(dtype)?)?, Var::from_tensor(&random(&[4, 8])?)?);
        let state = if sequences.is_some() {
            Tensor::zeros((b, 3, 6), dtype, &Device::Cpu)?
        } else {
            random(&[b, 3, 6])?.to_dtype(dtype)?
        };
        let (own_xs, own_taps) = (xs.narrow(2, 1, 6)?, taps.narrow(1, 2, 6)?);
        let call =
            CudaConvolution::plan(&own_taps, &own_xs, Some(&state), sequences).expect("the kernels run the call");
        let found = results(&xs, &taps, call.run()?)?;
        let expected = results(&xs, &taps, convolve(&own_taps, &own_xs, &state, sequences)?)?;
        for (n, (own, other)) in found.iter().zip(&expected).enumerate() {
            let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.flatten_all();
            let largest = |tensor: &Tensor| tensor.abs()?.max(0)?.to_scalar::<f64>();
            let error = largest(&(wide(own)? - wide(other)?)?)? / largest(&wide(other)?)?;
            assert!(error <= tolerance, "{dtype:?}: result {n} is off by {error:e}");
        }
        Ok(())
    }

    #[test]
    fn cuda_convolution_matches_cpu() -> Result<()> {
        check(None, DType::F32, 1e-6)?;
        check(None, DType::BF16, 1e-2)
    }

    #[test]
    fn cuda_convolution_of_packed_sequences_matches_cpu() -> Result<()> {
        check(Some(&PackedSequences::self_attention(vec![0, 2, 2, 37, 40])?), DType::F32, 1e-6)
    }

    /// Runs a sequence in one call and in pieces, the second after the last inputs of the first.
    #[test]
    fn cuda_convolution_after_last_inputs_matches_one_call() -> Result<()> {
        let xs = Tensor::randn(0f32, 1.0, (2, 7, 6), &Device::Cpu)?;
        let taps = Tensor::randn(0f32, 1.0, (4, 6), &Device::Cpu)?;
        let plan =
            |own: &Tensor, state: Option<&Tensor>| CudaConvolution::plan(&taps, own, state, None).expect("a plan");
        let whole = plan(&xs, None).run()?;
        let mut state = Tensor::zeros((2, 3, 6), DType::F32, &Device::Cpu)?;
        for (first, len) in [(0, 1), (1, 1), (2, 5)] {
            let convolved = plan(&xs.narrow(1, first, len)?, Some(&state)).run_with_state()?;
            let error = (convolved.ys - whole.narrow(1, first, len)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
            assert!(error <= 1e-6, "tokens from {first} on are off by {error:e}");
            state = convolved.next_state.expect("the last inputs");
        }
        Ok(())
    }
}
