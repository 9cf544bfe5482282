//! The short causal convolution of each channel by itself, and SiLU.

use std::ops::Range;

use candle_core::{DType, Result, Storage, Tensor, WithDType, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::OP;
use crate::base::rowwise::{Element, Rows, TASK_ELEMENTS, with_contiguous_rows};
use crate::base::{accumulation_dtype, part};
use crate::linear::ProjectionRows;
use crate::sdpa::PackedSequences;

/// `y[t] = silu(Σ taps[i] · x[t - K + 1 + i])` of each channel, where what came before a sequence is its state, or
/// zeros.
#[derive(Debug, Clone)]
pub(super) struct ShortConvolution {
    /// (C, 1, K).
    weight: ProjectionRows,
    /// (K, C) in the dtype that is computed in, where it is no variable.
    taps: Option<Tensor>,
}

impl ShortConvolution {
    pub fn new(weight: ProjectionRows) -> Result<Self> {
        let mut own = Self { weight, taps: None };
        if !own.weight.is_tracked() {
            own.taps = Some(own.taps()?);
        }
        Ok(own)
    }

    /// With what variables hold now.
    pub fn freeze(&self) -> Result<Self> {
        Self::new(self.weight.freeze()?)
    }

    /// The weight (C, 1, K) that variables hold now.
    pub fn weight(&self) -> Result<Tensor> {
        Ok(ProjectionRows::to_linear(&[&self.weight])?.weight().clone())
    }

    fn taps(&self) -> Result<Tensor> {
        if let Some(taps) = &self.taps {
            return Ok(taps.clone());
        }
        let weight = self.weight()?;
        weight.to_dtype(accumulation_dtype(weight.dtype()))?.squeeze(1)?.t()?.contiguous()
    }

    /// (B, T, C) to the same, after a state (B, K - 1, C), or of packed sequences (1, total, C).
    pub fn forward(&self, xs: &Tensor, state: Option<&Tensor>, sequences: Option<&PackedSequences>) -> Result<Tensor> {
        let (taps, (b, t, c)) = (self.taps()?, xs.dims3()?);
        if xs.elem_count() == 0 {
            return Tensor::zeros((b, t, c), xs.dtype(), xs.device());
        }
        if xs.device().is_cpu() && !xs.track_op() && !taps.track_op() {
            let starts: Vec<_> = match sequences {
                Some(sequences) => (0..sequences.len()).map(|s| sequences.queries(s).start).collect(),
                None => (0..b).map(|b| b * t).collect(),
            };
            match xs.dtype() {
                DType::F32 => return convolved::<f32>(xs, state, &taps, &starts),
                DType::BF16 => return convolved::<bf16>(xs, state, &taps, &starts),
                DType::F16 => return convolved::<f16>(xs, state, &taps, &starts),
                _ => {}
            }
        }
        let Some(sequences) = sequences else { return shifted(xs, state, &taps) };
        let one = |s| shifted(&part(xs, 1, sequences.queries(s))?, None, &taps);
        let filled = (0..sequences.len()).filter(|&s| !sequences.queries(s).is_empty());
        Tensor::cat(&filled.map(one).collect::<Result<Vec<_>>>()?, 1)
    }

    /// The last K - 1 of inputs (B, T, C) after a state, before the end of each sequence's tokens: the state that the
    /// next call begins with.
    pub fn tail(&self, xs: &Tensor, state: Option<&Tensor>, tokens: Option<&[Range<usize>]>) -> Result<Tensor> {
        let k = self.taps()?.dim(0)?;
        if let Some(tokens) = tokens {
            let all = padded(xs, state, k)?;
            let last = |(b, own): (usize, &Range<usize>)| part(&part(&all, 0, b..b + 1)?, 1, own.end..own.end + k - 1);
            return Tensor::cat(&tokens.iter().enumerate().map(last).collect::<Result<Vec<_>>>()?, 0);
        }
        let all = if xs.dim(1)? < k { padded(xs, state, k)? } else { xs.clone() };
        let end = all.dim(1)?;
        part(&all, 1, end + 1 - k..end)?.force_contiguous()
    }
}

/// (B, K - 1 + T, C).
fn padded(xs: &Tensor, state: Option<&Tensor>, k: usize) -> Result<Tensor> {
    let (b, _, c) = xs.dims3()?;
    let state = match state {
        Some(state) => state.clone(),
        None => Tensor::zeros((b, k - 1, c), xs.dtype(), xs.device())?,
    };
    if xs.elem_count() == 0 { Ok(state) } else { Tensor::cat(&[&state, &xs.contiguous()?], 1) }
}

/// In Candle's own operations, which have gradients.
fn shifted(xs: &Tensor, state: Option<&Tensor>, taps: &Tensor) -> Result<Tensor> {
    let (k, t) = (taps.dim(0)?, xs.dim(1)?);
    let all = padded(xs, state, k)?.to_dtype(taps.dtype())?;
    let tap = |i: usize| all.narrow(1, i, t)?.broadcast_mul(&taps.get(i)?);
    (1..k).try_fold(tap(0)?, |sum, i| sum + tap(i)?)?.silu()?.to_dtype(xs.dtype())
}

/// The same in one pass on a CPU, of sequences with these first tokens, counted through the batch.
fn convolved<E: Element<Wide = f32> + WithDType>(
    xs: &Tensor,
    state: Option<&Tensor>,
    taps: &Tensor,
    starts: &[usize],
) -> Result<Tensor> {
    let xs = with_contiguous_rows(xs)?;
    let (storage, layout) = xs.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("[{OP}] inputs are not on the CPU") };
    let (elements, rows) = (storage.as_slice::<E>()?, Rows::new(layout)?);
    let (c, before, taps) = (rows.d, taps.dim(0)? - 1, taps.flatten_all()?.to_vec1::<f32>()?);
    let state = state.map_or_else(|| Ok(Vec::new()), |state| state.flatten_all()?.to_vec1::<E>())?;
    let mut ys = vec![E::default(); rows.tokens * c];
    let one_token = |[of_rows, of_ys]: &mut [[Vec<f32>; 2]; 2], (token, ys): (usize, &mut [E])| {
        let sequence = starts.partition_point(|&start| start <= token) - 1;
        let at = token - starts[sequence];
        let row = |back: usize| match at {
            _ if at >= back => rows.heads(token - back).next().map(|row| &elements[row]),
            _ => state.chunks_exact(c).nth(sequence * before + before + at - back),
        };
        let sum = |_: &[f32], ys: &mut [f32]| {
            ys.fill(0.0);
            for (back, taps) in (0..=before).rev().zip(taps.chunks_exact(c)) {
                let row = row(back).map(|row| E::widen(row, &mut of_rows[0]));
                ys.iter_mut().zip(row.into_iter().flatten()).zip(taps).for_each(|((y, x), tap)| *y += x * tap);
            }
            ys.iter_mut().for_each(|y| *y /= 1.0 + (-*y).exp());
        };
        E::map(&[], ys, sum, of_ys);
    };
    let least = TASK_ELEMENTS.div_ceil(c);
    ys.par_chunks_mut(c).enumerate().with_min_len(least).for_each_init(Default::default, one_token);
    Tensor::from_vec(ys, xs.shape(), xs.device())
}
