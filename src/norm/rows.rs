//! A norm on a CPU, in one pass over queries or keys of any strides.
//!
//! Candle's own norms want contiguous inputs and a weight (D,), and its layer norm finds the variance as a difference of
//! squares, which loses the digits of numbers that are far from zero.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Result, Shape, Tensor, bail};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use super::Norm;

/// The fewest elements that are worth a task of their own.
const TASK_ELEMENTS: usize = 1 << 14;

/// Sums are kept in this many lanes, so that the compiler vectorises them.
const LANES: usize = 16;

/// A norm whose parameters are plain numbers.
#[derive(Debug, Clone)]
pub(super) struct RowNorm {
    subtracts_mean: bool,
    eps: f32,
    /// One row, or one for each head, as is the bias.
    factors: Arc<[f32]>,
    bias: Option<Arc<[f32]>>,
}

impl RowNorm {
    /// `None` on other devices and in f64.
    pub fn new(norm: &Norm) -> Result<Option<Self>> {
        let weight = norm.weight.tensor()?;
        if !weight.device().is_cpu() || weight.dtype() == DType::F64 {
            return Ok(None);
        }
        let numbers =
            |tensor: Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>().map(Arc::<[f32]>::from);
        let bias = norm.bias.as_ref().map(|bias| numbers(bias.tensor()?)).transpose()?;
        let subtracts_mean = norm.subtracts_mean();
        Ok(Some(Self { subtracts_mean, eps: norm.eps as f32, factors: numbers(norm.factors(DType::F32)?)?, bias }))
    }

    /// A view (B, T, size) or (B, T, H, D) to a contiguous tensor of the same shape and dtype.
    pub fn apply(&self, xs: &Tensor) -> Result<Tensor> {
        let split = if xs.rank() == 3 { xs.unsqueeze(2)? } else { xs.clone() };
        let dense = split.dim(3)? <= 1 || split.stride()[3] == 1;
        let split = if dense { split } else { split.contiguous()? };
        let normed = split.apply_op1_no_bwd(self)?;
        if xs.rank() == 3 { normed.squeeze(2) } else { Ok(normed) }
    }

    fn run<E: Number>(&self, xs: &[E], layout: &Layout) -> Result<Vec<E>> {
        let (b, t, h, d) = layout.shape().dims4()?;
        let count = b * t * h * d;
        let mut ys = vec![E::default(); count];
        if count == 0 {
            return Ok(ys);
        }
        if self.factors.len() != d && self.factors.len() != h * d {
            bail!("[qk_norm] there are {} weights, expected {d}, or {h} times {d}", self.factors.len())
        }
        let stride = layout.stride();
        let normalise = |row: &mut Vec<f32>, (token, ys): (usize, &mut [E])| {
            row.resize(d, 0.0);
            let start = layout.start_offset() + token / t * stride[0] + token % t * stride[1];
            for (head, ys) in ys.chunks_exact_mut(d).enumerate() {
                let start = start + head * stride[2];
                E::widen(&xs[start..start + d], row);
                self.normalise(row, head);
                E::narrow(row, ys);
            }
        };
        if count <= TASK_ELEMENTS {
            let mut row = Vec::new();
            ys.chunks_exact_mut(h * d).enumerate().for_each(|token| normalise(&mut row, token));
        } else {
            let least = TASK_ELEMENTS.div_ceil(h * d);
            ys.par_chunks_exact_mut(h * d).enumerate().with_min_len(least).for_each_init(Vec::new, normalise);
        }
        Ok(ys)
    }

    fn normalise(&self, row: &mut [f32], head: usize) {
        let d = row.len();
        if self.subtracts_mean {
            let mean = sum(row, |x| x) / d as f32;
            row.iter_mut().for_each(|x| *x -= mean);
        }
        let factor = (sum(row, |x| x * x) / d as f32 + self.eps).sqrt().recip();
        let own = |parameters: &[f32]| if parameters.len() == d { 0..d } else { head * d..(head + 1) * d };
        for (x, weight) in row.iter_mut().zip(&self.factors[own(&self.factors)]) {
            *x = *x * factor * weight;
        }
        if let Some(bias) = &self.bias {
            row.iter_mut().zip(&bias[own(bias)]).for_each(|(x, bias)| *x += bias);
        }
    }
}

fn sum(row: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = row.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += of(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += of(x);
    }
    lanes.iter().sum()
}

impl CustomOp1 for RowNorm {
    fn name(&self) -> &'static str {
        "qk-norm"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let ys = match storage {
            CpuStorage::F32(xs) => CpuStorage::F32(self.run(xs, layout)?),
            CpuStorage::BF16(xs) => CpuStorage::BF16(self.run(xs, layout)?),
            CpuStorage::F16(xs) => CpuStorage::F16(self.run(xs, layout)?),
            _ => bail!("[qk_norm] the fused norm takes F32, BF16 or F16"),
        };
        Ok((ys, layout.shape().clone()))
    }
}

/// The types that tensors hold, computed with in f32.
trait Number: Copy + Default + Send + Sync {
    fn widen(from: &[Self], to: &mut [f32]);
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl Number for f32 {
    fn widen(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }

    fn narrow(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

impl Number for bf16 {
    fn widen(from: &[bf16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow(from: &[f32], to: &mut [bf16]) {
        to.convert_from_f32_slice(from);
    }
}

impl Number for f16 {
    fn widen(from: &[f16], to: &mut [f32]) {
        from.convert_to_f32_slice(to);
    }

    fn narrow(from: &[f32], to: &mut [f16]) {
        to.convert_from_f32_slice(from);
    }
}
