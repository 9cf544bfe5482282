//! The rotation of one call's queries or keys: in one pass over a view of them on the CPU, in Candle's operations elsewhere.

use std::ops::{Add, Mul, Sub};

use candle_core::{CpuStorage, CustomOp1, D, Device, DeviceLocation, Layout, Result, Shape, Tensor, bail};
use candle_nn::rotary_emb;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use super::RopeStyle;
use super::angles::{Angles, Rows};
use crate::sdpa::accumulation_dtype;

/// The fewest elements that are worth a task of their own.
const TASK_ELEMENTS: usize = 1 << 14;

/// Which angles each token of a call is rotated by.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    rows: Rows,
    /// T.
    t: usize,
    style: RopeStyle,
    /// By the opposite angles: the backward pass.
    inverse: bool,
}

impl Rotation {
    pub(super) fn new(rows: Rows, t: usize, style: RopeStyle) -> Self {
        Self { rows, t, style, inverse: false }
    }

    /// A view (B, T, H, D) of queries or keys to a contiguous tensor of the same shape and dtype. Differentiable.
    pub(crate) fn apply(&self, xs: &Tensor) -> Result<Tensor> {
        if !xs.device().is_cpu() {
            return self.on_device(xs);
        }
        let dense = xs.dim(3)? <= 1 || xs.stride()[3] == 1;
        let xs = if dense { xs.clone() } else { xs.contiguous()? };
        if xs.track_op() { xs.apply_op1(self.clone()) } else { xs.apply_op1_no_bwd(self) }
    }

    /// The row of angles of token `t` of sequence `b`.
    fn row(&self, b: usize, t: usize) -> (&[f32], &[f32]) {
        let n = if self.rows.index.len() == self.t { t } else { b * self.t + t };
        self.rows.angles.row(self.rows.index[n] as usize)
    }

    fn run<E: Rotate>(&self, xs: &[E], layout: &Layout) -> Result<Vec<E>> {
        let (b, t, h, d) = layout.shape().dims4()?;
        let count = b * t * h * d;
        let mut ys = vec![E::default(); count];
        if count == 0 {
            return Ok(ys);
        }
        if t != self.t || ![t, b * t].contains(&self.rows.index.len()) {
            bail!("[rope] there are {} positions, expected {t}, or {b} times {t}", self.rows.index.len())
        }
        let stride = layout.stride();
        let rotate = |scratch: &mut Vec<E::Wide>, (token, ys): (usize, &mut [E])| {
            let angles = self.row(token / t, token % t);
            let start = layout.start_offset() + token / t * stride[0] + token % t * stride[1];
            for (head, ys) in ys.chunks_exact_mut(d).enumerate() {
                let start = start + head * stride[2];
                E::rotate(&xs[start..start + d], ys, |pairs| self.rotate_pairs(pairs, angles), scratch);
            }
        };
        if count <= TASK_ELEMENTS {
            let mut scratch = Vec::new();
            ys.chunks_mut(h * d).enumerate().for_each(|token| rotate(&mut scratch, token));
        } else {
            let least = TASK_ELEMENTS.div_ceil(h * d);
            ys.par_chunks_mut(h * d).enumerate().with_min_len(least).for_each_init(Vec::new, rotate);
        }
        Ok(ys)
    }

    /// `angles` are cosines and sines.
    fn rotate_pairs<F: Number>(&self, head: &mut [F], angles: (&[f32], &[f32])) {
        let (cos, sin) = angles;
        let sign = F::from(if self.inverse { -1.0 } else { 1.0 });
        let rotated = |x: F, y: F, cos: &f32, sin: &f32| {
            let (cos, sin) = (F::from(*cos), sign * F::from(*sin));
            (x * cos - y * sin, y * cos + x * sin)
        };
        let half = cos.len();
        match self.style {
            RopeStyle::Halves => {
                let (first, second) = head[..2 * half].split_at_mut(half);
                for (((x, y), cos), sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                    (*x, *y) = rotated(*x, *y, cos, sin);
                }
            }
            RopeStyle::Interleaved => {
                for ((pair, cos), sin) in head.chunks_exact_mut(2).zip(cos).zip(sin) {
                    (pair[0], pair[1]) = rotated(pair[0], pair[1], cos, sin);
                }
            }
        }
    }
}

impl CustomOp1 for Rotation {
    fn name(&self) -> &'static str {
        "rotary-embedding"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let ys = match storage {
            CpuStorage::F32(xs) => CpuStorage::F32(self.run(xs, layout)?),
            CpuStorage::F64(xs) => CpuStorage::F64(self.run(xs, layout)?),
            CpuStorage::BF16(xs) => CpuStorage::BF16(self.run(xs, layout)?),
            CpuStorage::F16(xs) => CpuStorage::F16(self.run(xs, layout)?),
            _ => bail!("[rope] queries or keys are no floats"),
        };
        Ok((ys, layout.shape().clone()))
    }

    fn bwd(&self, _arg: &Tensor, _res: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(Self { inverse: !self.inverse, ..self.clone() }.apply(gradient)?))
    }
}

/// f32 or f64: what a rotation is computed in.
trait Number: Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + From<f32> {}

impl Number for f32 {}
impl Number for f64 {}

/// The types that tensors hold.
trait Rotate: Copy + Default + Send + Sync {
    type Wide: Number;

    /// One head, rotated in the wide type. `scratch` belongs to the task.
    fn rotate(xs: &[Self], ys: &mut [Self], rotate: impl Fn(&mut [Self::Wide]), scratch: &mut Vec<Self::Wide>);
}

macro_rules! rotate_in_own_type {
    ($($float:ty),+) => {$(
        impl Rotate for $float {
            type Wide = Self;

            fn rotate(xs: &[Self], ys: &mut [Self], rotate: impl Fn(&mut [Self]), _: &mut Vec<Self>) {
                ys.copy_from_slice(xs);
                rotate(ys);
            }
        }
    )+};
}

macro_rules! rotate_in_f32 {
    ($($float:ty),+) => {$(
        impl Rotate for $float {
            type Wide = f32;

            fn rotate(xs: &[Self], ys: &mut [Self], rotate: impl Fn(&mut [f32]), scratch: &mut Vec<f32>) {
                scratch.resize(xs.len(), 0.0);
                xs.convert_to_f32_slice(scratch);
                rotate(scratch);
                ys.convert_from_f32_slice(scratch);
            }
        }
    )+};
}

rotate_in_own_type!(f32, f64);
rotate_in_f32!(bf16, f16);

/// A copy of some angles on a device: cosines and sines, (rows, r/2) each in f32.
#[derive(Debug, Clone)]
pub(super) struct DeviceAngles {
    location: DeviceLocation,
    cos: Tensor,
    sin: Tensor,
}

impl Angles {
    /// Copied once for each device.
    fn on(&self, device: &Device) -> Result<DeviceAngles> {
        let location = device.location();
        if let Some(copy) = self.copies().iter().find(|copy| copy.location == location) {
            return Ok(copy.clone());
        }
        let shape = (self.rows(), self.half);
        let [cos, sin] = [&self.cos, &self.sin].map(|entries| Tensor::from_slice(entries, shape, device));
        let copy = DeviceAngles { location, cos: cos?, sin: sin? };
        self.copies().push(copy.clone());
        Ok(copy)
    }
}

impl Rotation {
    /// As [`apply`](Self::apply), on any device. Candle's fused operations have no backward pass, so they serve where
    /// nothing is tracked.
    fn on_device(&self, xs: &Tensor) -> Result<Tensor> {
        let (b, t, h, d) = xs.dims4()?;
        if xs.elem_count() == 0 {
            return Tensor::zeros((b, t, h, d), xs.dtype(), xs.device());
        }
        let (cos, sin) = self.tensors(xs)?;
        let r = 2 * cos.dim(D::Minus1)?;
        let inputs = xs.narrow(3, 0, r)?.transpose(1, 2)?.to_dtype(cos.dtype())?.contiguous()?;
        let rotated = match self.style {
            _ if xs.track_op() => self.composed(&inputs, &cos, &sin)?,
            RopeStyle::Halves => rotary_emb::rope(&inputs, &cos, &sin)?,
            RopeStyle::Interleaved => rotary_emb::rope_i(&inputs, &cos, &sin)?,
        };
        let rotated = rotated.to_dtype(xs.dtype())?.transpose(1, 2)?;
        if r == d { rotated.contiguous() } else { Tensor::cat(&[&rotated, &xs.narrow(3, r, d - r)?], 3)?.contiguous() }
    }

    /// Cosines and sines for `xs`, (T, r/2) or (B, T, r/2), in the dtype of the computation.
    fn tensors(&self, xs: &Tensor) -> Result<(Tensor, Tensor)> {
        let (index, device) = (&self.rows.index, xs.device());
        let copy = self.rows.angles.on(device)?;
        let in_a_row = index.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let chosen = |table: &Tensor| {
            let rows = match index.first() {
                Some(&first) if in_a_row => table.narrow(0, first as usize, index.len())?,
                _ => table.index_select(&Tensor::from_slice(index, index.len(), device)?, 0)?,
            };
            let rows = rows.to_dtype(accumulation_dtype(xs.dtype()))?;
            let sequences = index.len() / self.t;
            if sequences == 1 { Ok(rows) } else { rows.reshape((sequences, self.t, ())) }
        };
        let (cos, sin) = (chosen(&copy.cos)?, chosen(&copy.sin)?);
        Ok((cos, if self.inverse { sin.neg()? } else { sin }))
    }

    /// (B, H, T, r), in differentiable operations.
    fn composed(&self, xs: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
        let (b, h, t, r) = xs.dims4()?;
        let heads = cos.rank() - 2;
        let (cos, sin) = (cos.unsqueeze(heads)?, sin.unsqueeze(heads)?);
        let rotated = |x: &Tensor, y: &Tensor| -> Result<[Tensor; 2]> {
            let first = (x.broadcast_mul(&cos)? - y.broadcast_mul(&sin)?)?;
            Ok([first, (y.broadcast_mul(&cos)? + x.broadcast_mul(&sin)?)?])
        };
        match self.style {
            RopeStyle::Halves => {
                let half = r / 2;
                Tensor::cat(&rotated(&xs.narrow(3, 0, half)?, &xs.narrow(3, half, half)?)?, 3)
            }
            RopeStyle::Interleaved => {
                let pairs = xs.reshape((b, h, t, r / 2, 2))?;
                let of = |which| pairs.narrow(4, which, 1)?.squeeze(4);
                Tensor::stack(&rotated(&of(0)?, &of(1)?)?, 4)?.reshape((b, h, t, r))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::Positions;
    use crate::{RopeConfig, RotaryEmbedding};
    use candle_core::{DType, Var};

    /// Candle's operations run on the CPU too: all three ways give the same numbers and gradients.
    #[test]
    fn every_way_to_rotate_gives_the_same() -> Result<()> {
        let (b, t, h, d) = (2, 3, 2, 8);
        let ragged =
            Positions::from_tensor("positions", &Tensor::new(&[[5u32, 6, 7], [0, 0, 1]], &Device::Cpu)?, b, t)?;
        for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
            for r in [4, 8] {
                let config = RopeConfig::new(100.0).with_style(style).with_rotary_dim(r);
                let rotary = RotaryEmbedding::new(&config, d)?;
                for positions in [Positions::starting_at(&[4], t)?, ragged.clone()] {
                    let rotation = rotary.at(&positions);
                    let xs = Var::from_tensor(&Tensor::randn(0f64, 1.0, (b, t, h, d), &Device::Cpu)?)?;
                    let weigh = Tensor::randn(0f64, 1.0, (b, t, h, d), &Device::Cpu)?;
                    let plain = xs.as_detached_tensor();
                    let (own, composed) = (rotation.apply(&xs)?, rotation.on_device(&xs)?);
                    let fused = rotation.on_device(&plain)?;
                    let gradient = |ys: &Tensor| -> Result<Tensor> {
                        let store = ys.mul(&weigh)?.sum_all()?.backward()?;
                        Ok(store.get(&xs).expect("xs are tracked").clone())
                    };
                    let pairs = [
                        (rotation.apply(&plain)?, own.clone()),
                        (composed.clone(), own.clone()),
                        (fused, own.clone()),
                        (gradient(&composed)?, gradient(&own)?),
                    ];
                    for (n, (found, expected)) in pairs.into_iter().enumerate() {
                        let off = (found - expected)?.abs()?.max_all()?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
                        assert!(off < 1e-14, "{style:?}, r = {r}, pair {n}: off by {off}");
                    }
                }
            }
        }
        Ok(())
    }
}
