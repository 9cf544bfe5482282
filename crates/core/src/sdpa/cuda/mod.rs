//! The fused CUDA kernels: the conversion of a call to the kernels' description, and of their results to tensors.
//!
//! Nothing here waits for the device or reads from it. Tests run the kernels on tensors of the CPU, by the emulator of
//! the package `candle-attention-cuda`.

mod graph;
mod key_ranges;
#[cfg(test)]
mod tests;

use std::fmt;

use candle_attention_cuda::{AttentionCall, Dropout, DropoutSeed, Kernel, ScoreModifiers};
use candle_core::{DType, Device, Result, Tensor};

use super::call::{Call, Dims, KvScales, swapped_for};
use super::first_line;
use super::options::OutputLayout;
use super::result::ResultKind;
use super::score_tensors::ScoreTensors;
use candle_attention_modules::base::rowwise::with_contiguous_rows;
#[cfg(test)]
pub use tests::emulator_runs;

/// A value for a call that the kernels support, or the reason why they do not.
type Supported<T> = std::result::Result<T, String>;

/// A call that the CUDA kernels support, in the form that they read.
pub(crate) struct CudaCall {
    attention: AttentionCall,
    kernel: Kernel,
    score_tensors: ScoreTensors,
    output_layout: OutputLayout,
    /// Whether a seed of dropout is still to be drawn.
    draws_seed: bool,
}

impl fmt::Display for CudaCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.kernel)
    }
}

impl CudaCall {
    /// Returns the call for the kernels, or the reason why they do not support it.
    pub fn plan(call: &Call, kind: ResultKind) -> Supported<Self> {
        match kind {
            ResultKind::Output | ResultKind::LogSumExp => {}
            ResultKind::Weights => return Err("the CUDA kernels do not return attention weights".into()),
            ResultKind::Statistics => return Err("the CUDA kernels do not compute statistics of weights".into()),
        }
        if call.options.drops() && call.options.dropout_seed.is_some() {
            return Err("PyTorch's generator draws the dropout mask on the CPU".into());
        }
        let Dims { b, t_q, t_kv, d_v, .. } = call.dims;
        if [b, t_q, t_kv, d_v].contains(&0) {
            return Err("there are no scores, for which the CUDA kernels do not run".into());
        }
        let score_tensors = ScoreTensors::new(call).map_err(|error| first_line(&error))?;
        let attention = attention_call(call, &score_tensors).map_err(|error| first_line(&error))?;
        let kernel = attention.plan().map_err(|reason| reason.to_string())?;
        let cuda_call = Self {
            attention,
            kernel,
            score_tensors,
            output_layout: call.output_layout(),
            draws_seed: call.options.drops() && call.options.dropout_philox_seed.is_none(),
        };
        if cuda_call.tracks_gradients() {
            let wanted = cuda_call.requested_gradients();
            cuda_call.attention.plan_backward(wanted).map_err(|reason| reason.to_string())?;
        }
        Ok(cuda_call)
    }

    /// Returns the attention output.
    pub fn output(mut self) -> Result<Tensor> {
        self.draw_missing_seed()?;
        let layout = self.output_layout;
        swapped_for(layout, graph::output(self)?)
    }

    /// Returns the attention output and the log-sum-exp of the scores.
    pub fn output_and_lse(mut self) -> Result<(Tensor, Tensor)> {
        self.draw_missing_seed()?;
        let layout = self.output_layout;
        let (output, lse) = graph::output_and_lse(self)?;
        Ok((swapped_for(layout, output)?, lse))
    }

    /// Draws a seed of dropout, if none was given.
    fn draw_missing_seed(&mut self) -> Result<()> {
        if !self.draws_seed {
            return Ok(());
        }
        if let Some(dropout) = &mut self.attention.scores.dropout {
            dropout.seed = draw_seed(self.attention.q.device())?;
        }
        self.draws_seed = false;
        Ok(())
    }
}

/// Returns the call as the kernels read it. A seed of dropout that is not given is 0.
fn attention_call(call: &Call, score_tensors: &ScoreTensors) -> Result<AttentionCall> {
    let packed = match &call.sequences {
        Some(sequences) => Some(key_ranges::packed_sequences(sequences, call.q.device())?),
        None => None,
    };
    let kv_scales = call.scales.clone().map(|KvScales { k, v }| candle_attention_cuda::KvScales { k, v });
    let dropout = match call.options.drops() {
        true => {
            let seed = DropoutSeed::Number(call.options.dropout_philox_seed.unwrap_or(0));
            Some(Dropout { p: call.options.dropout, seed })
        }
        false => None,
    };
    let ScoreTensors { bias, relative_bias, slopes, sinks } = score_tensors.clone();
    Ok(AttentionCall {
        q: with_contiguous_rows(&call.q)?,
        k: with_contiguous_rows(&call.k)?,
        v: with_contiguous_rows(&call.v)?,
        kv_scales,
        keys: key_ranges::key_ranges(call)?,
        packed,
        scores: ScoreModifiers {
            scale: call.scale(),
            softcap: call.options.softcap,
            alibi_slopes: slopes,
            relative_bias,
            bias,
            boolean_mask: call.bool_mask.clone(),
            sinks,
            dropout,
        },
        output_layout: match call.output_layout() {
            OutputLayout::Bhtd => candle_attention_cuda::OutputLayout::Bhtd,
            OutputLayout::Bthd => candle_attention_cuda::OutputLayout::Bthd,
        },
    })
}

/// Draws a seed from the generator of a device, which stays there: 24 bits of each of two numbers.
fn draw_seed(device: &Device) -> Result<DropoutSeed> {
    let numbers = Tensor::rand(0f32, 1f32, 2, device)?;
    Ok(DropoutSeed::OnDevice(numbers.affine(f64::from(1 << 24), 0.0)?.to_dtype(DType::U32)?))
}
