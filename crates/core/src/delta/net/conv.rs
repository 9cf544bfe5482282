//! The short causal convolution, depthwise, and SiLU.

use std::ops::Range;

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Storage, Tensor, WithDType, bail};
use half::{bf16, f16};
use rayon::prelude::*;

use super::{GatedDeltaNetConfig, OP};
use crate::base::rowwise::{Element, Rows, map_heads, with_contiguous_rows};
use crate::base::{accumulation_dtype, part};
use crate::cache::NewTokens;
use crate::gate::GateActivation;
use crate::linear::ProjectionRows;
use crate::sdpa::PackedSequences;

/// `y[t] = silu(Σ taps[i] x[t - K + 1 + i])` of each channel. The K - 1 inputs before a call are its state, or zeros.
#[derive(Debug, Clone)]
pub(super) struct ShortConvolution {
    /// (C, 1, K).
    weight: ProjectionRows,
    /// (K, C) in the accumulation dtype, unless the weight is a variable.
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
    fn weight(&self) -> Result<Tensor> {
        Ok(ProjectionRows::to_linear(&[&self.weight])?.weight().clone())
    }

    /// Those of queries, keys and values.
    pub fn weights(&self, cfg: &GatedDeltaNetConfig) -> Result<Vec<Tensor>> {
        let weight = self.weight()?;
        cfg.rows()[..3].iter().map(|rows| part(&weight, 0, rows.clone())).collect()
    }

    /// (K, C) in the accumulation dtype, what variables hold now.
    pub fn taps(&self) -> Result<Tensor> {
        if let Some(taps) = &self.taps {
            return Ok(taps.clone());
        }
        let weight = self.weight()?;
        weight.to_dtype(accumulation_dtype(weight.dtype()))?.squeeze(1)?.t()?.contiguous()
    }
}

/// (B, T, C) by taps (K, C), after a state (B, K - 1, C), or packed sequences (1, total, C), each after zeros.
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
    let is_tracked = xs.track_op() || taps.track_op();
    if xs.device().is_cpu() && (xs.dtype() == DType::F32 || !is_tracked) {
        let starts: Vec<_> = match sequences {
            Some(sequences) => (0..sequences.len()).map(|s| sequences.queries(s).start).collect(),
            None => (0..b).map(|b| b * t).collect(),
        };
        let (xs, state) = (with_contiguous_rows(xs)?, state.detach().flatten_all()?);
        match xs.dtype() {
            DType::F32 => {
                return xs.apply_op2(&taps.contiguous()?, Convolve { state: state.to_vec1::<f32>()?, starts });
            }
            DType::BF16 => return Convolve { state: state.to_vec1::<bf16>()?, starts }.of(&xs, taps),
            DType::F16 => return Convolve { state: state.to_vec1::<f16>()?, starts }.of(&xs, taps),
            _ => {}
        }
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
    (1..k).try_fold(tap(0)?, |sum, i| sum + tap(i)?)?.silu()?.to_dtype(xs.dtype())
}

/// The same in one pass on a CPU.
struct Convolve<E> {
    /// (B, K - 1, C). Packed sequences after the first have none, which is as good as zeros.
    state: Vec<E>,
    /// The first token of each sequence, counted through the batch.
    starts: Vec<usize>,
}

/// The tokens whose gradients of taps are added up before those of others.
const TOKENS: usize = 64;

/// Inputs (B, T, C) in memory, and taps (K, C).
struct Operands<'a, E> {
    elements: &'a [E],
    rows: Rows,
    taps: &'a [f32],
}

impl<E: Element<Wide = f32>> Convolve<E> {
    fn new_rows(&self, operands: &Operands<E>, layout: &Layout) -> Result<Vec<E>> {
        map_heads(operands.elements, layout, |token| {
            move |_, _: &[f32], ys: &mut [f32]| {
                self.sum(operands, token, ys, &mut Vec::new());
                ys.iter_mut().for_each(|y| *y = GateActivation::Silu.with_slope(*y).0);
            }
        })
    }

    /// The input so many tokens before a token.
    fn row<'a>(&'a self, operands: &Operands<'a, E>, token: usize, back: usize) -> Option<&'a [E]> {
        let (c, sequence) = (operands.rows.d, self.starts.partition_point(|&start| start <= token) - 1);
        let (at, before) = (token - self.starts[sequence], operands.taps.len() / c - 1);
        match at {
            _ if at >= back => operands.rows.heads(token - back).next().map(|row| &operands.elements[row]),
            _ => self.state.chunks_exact(c).nth(sequence * before + before + at - back),
        }
    }

    /// What SiLU takes of a token.
    fn sum(&self, operands: &Operands<E>, token: usize, ys: &mut [f32], scratch: &mut Vec<f32>) {
        ys.fill(0.0);
        for (back, taps) in operands.taps.chunks_exact(ys.len()).rev().enumerate().rev() {
            let row = self.row(operands, token, back).map(|row| E::widen(row, scratch));
            ys.iter_mut().zip(row.into_iter().flatten()).zip(taps).for_each(|((y, x), tap)| *y += x * tap);
        }
    }
}

impl<E: Element<Wide = f32> + WithDType> Convolve<E> {
    fn of(&self, xs: &Tensor, taps: &Tensor) -> Result<Tensor> {
        let (storage, layout) = xs.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("[{OP}] inputs are not on the CPU") };
        let taps = taps.flatten_all()?.to_vec1::<f32>()?;
        let operands = Operands { elements: storage.as_slice::<E>()?, rows: Rows::new(layout)?, taps: &taps };
        Tensor::from_vec(self.new_rows(&operands, layout)?, xs.shape(), xs.device())
    }
}

impl Convolve<f32> {
    /// The gradients of the inputs, by rows, and of the taps.
    fn gradients(&self, operands: &Operands<f32>, gradient: &[f32]) -> (Vec<f32>, Vec<f32>) {
        let (c, tokens) = (operands.rows.d, operands.rows.tokens);
        let mut of_sums = gradient.to_vec();
        let of_chunk = |(chunk, gradients): (usize, &mut [f32])| {
            let (mut of_taps, mut sum, mut scratch) = (vec![0f32; operands.taps.len()], vec![0f32; c], Vec::new());
            for (token, gradient) in (chunk * TOKENS..).zip(gradients.chunks_exact_mut(c)) {
                self.sum(operands, token, &mut sum, &mut scratch);
                for (gradient, &x) in gradient.iter_mut().zip(&sum) {
                    *gradient *= GateActivation::Silu.with_slope(x).1;
                }
                for (back, of_taps) in of_taps.chunks_exact_mut(c).rev().enumerate() {
                    let row = self.row(operands, token, back).into_iter().flatten();
                    of_taps.iter_mut().zip(row).zip(&*gradient).for_each(|((sum, x), gradient)| *sum += x * gradient);
                }
            }
            of_taps
        };
        let of_chunks: Vec<_> = of_sums.par_chunks_mut(c * TOKENS).enumerate().map(of_chunk).collect();
        let mut of_taps = vec![0f32; operands.taps.len()];
        for (sum, own) in of_chunks.iter().flat_map(|own| own.iter().enumerate()) {
            of_taps[sum] += own;
        }
        let mut of_xs = vec![0f32; tokens * c];
        of_xs.par_chunks_mut(c).enumerate().for_each(|(token, of_x)| {
            let next = self.starts.partition_point(|&start| start <= token);
            let end = self.starts.get(next).copied().unwrap_or(tokens);
            for (taps, of_sum) in operands.taps.chunks_exact(c).rev().zip(of_sums[token * c..end * c].chunks_exact(c)) {
                of_x.iter_mut().zip(taps).zip(of_sum).for_each(|((x, tap), gradient)| *x += tap * gradient);
            }
        });
        (of_xs, of_taps)
    }
}

impl CustomOp2 for Convolve<f32> {
    fn name(&self) -> &'static str {
        "short-convolution"
    }

    fn cpu_fwd(
        &self,
        xs: &CpuStorage,
        layout: &Layout,
        taps: &CpuStorage,
        of_taps: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let taps = &taps.as_slice::<f32>()?[of_taps.start_offset()..][..of_taps.shape().elem_count()];
        let operands = Operands { elements: xs.as_slice::<f32>()?, rows: Rows::new(layout)?, taps };
        Ok((CpuStorage::F32(self.new_rows(&operands, layout)?), layout.shape().clone()))
    }

    fn bwd(
        &self,
        xs: &Tensor,
        taps: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let numbers = |tensor: &Tensor| tensor.flatten_all()?.to_vec1::<f32>();
        let (of_ys, own_taps) = (numbers(gradient)?, numbers(taps)?);
        let (storage, layout) = xs.storage_and_layout();
        let Storage::Cpu(storage) = &*storage else { bail!("[{OP}] inputs are not on the CPU") };
        let operands = Operands { elements: storage.as_slice::<f32>()?, rows: Rows::new(layout)?, taps: &own_taps };
        let (of_xs, of_taps) = self.gradients(&operands, &of_ys);
        let tensor = |numbers, like: &Tensor| Tensor::from_vec(numbers, like.shape(), like.device());
        Ok((Some(tensor(of_xs, xs)?), Some(tensor(of_taps, taps)?)))
    }
}
