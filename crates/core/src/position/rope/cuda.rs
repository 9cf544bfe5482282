//! The rotation of heads by its CUDA kernel, which reads heads of any strides in their own dtype.

use candle_attention_cuda::{AngleRows, RotationCall};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::{RopeConfig, RopeStyle, RotaryEmbedding, Rotation};
use crate::position::Positions;
use candle_attention_modules::base::first_use::{ComparedResult, FirstUseCase, case_numbers};
use candle_attention_modules::base::rowwise::with_contiguous_rows;
use candle_attention_modules::base::{record, uploaded};

/// The case of the rotation of heads.
pub const ROTATION_CASE: FirstUseCase =
    FirstUseCase { operation: "rotary positions", is_new: false, run: rotation_case };

impl Rotation {
    /// Rotates heads (B, T, H, D) as [`apply`](Self::apply) does; `None` if the kernel does not support the call.
    pub(super) fn by_kernel(&self, xs: &Tensor) -> Result<Option<Tensor>> {
        let xs = with_contiguous_rows(xs)?;
        let Some(kernel) = self.kernel(&xs)? else { return Ok(None) };
        if kernel.plan().is_err() || ROTATION_CASE.check(xs.device(), xs.dtype()).is_err() {
            return Ok(None);
        }
        let inverse = self.inverse();
        let backward = move |_: &Tensor, gradient: &Tensor| Ok(vec![Some(inverse.apply(gradient)?)]);
        record("rotary-embedding", &[Some(&xs)], kernel.forward()?, xs.shape(), backward).map(Some)
    }

    /// Returns the call of a GPU's kernel for heads (B, T, H, D) with contiguous rows; `None` if entries are paired
    /// half of a part apart, which no kernel does.
    pub(super) fn kernel(&self, xs: &Tensor) -> Result<Option<RotationCall>> {
        if self.parts > 1 && self.style == RopeStyle::RotateHalf {
            return Ok(None);
        }
        let device = xs.device();
        let tables = self.angles.on(device)?;
        let in_a_row = self.index.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let angle_rows = match self.index.first() {
            Some(&first) if in_a_row && self.index.len() == xs.dim(1)? => AngleRows::From(first as usize),
            _ => {
                let rows: Vec<_> = self.index.iter().map(|&row| row as i32).collect();
                AngleRows::Each(uploaded(rows, &[self.index.len()], device)?)
            }
        };
        Ok(Some(RotationCall {
            xs: xs.detach(),
            cosines: tables.cos,
            sines: tables.sin,
            angle_rows,
            interleaved: self.style == RopeStyle::Interleaved,
            inverse: self.inverse,
        }))
    }
}

/// Rotates heads in both directions by the kernel and by the CPU.
fn rotation_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let (t, d) = (7, 64);
    let xs = case_numbers(&[2, t, 3, d], 1, dtype)?;
    let wide = xs.to_dtype(DType::F32)?;
    let own = xs.to_device(device)?;
    let rotary = RotaryEmbedding::new(&RopeConfig::new(10_000.0), d)?;
    let there = rotary.at(&Positions::starting_at(&[5], t)?)?;
    let back = Rotation { inverse: true, ..there.clone() };
    let mut compared = Vec::new();
    for (name, rotation) in [("the rotated heads", there), ("the heads that are rotated back", back)] {
        let Some(kernel) = rotation.kernel(&own)? else { bail!("[rope] no kernel rotates whole heads") };
        kernel.plan()?;
        let found = record("rotary-embedding", &[], kernel.forward()?, own.shape(), |_, _| Ok(Vec::new()))?;
        compared.push(ComparedResult { name, found, expected: rotation.apply(&wide)? });
    }
    Ok(compared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_attention_modules::base::rowwise::to_vec;
    use candle_core::Var;

    /// Runs the kernel on the emulator.
    #[test]
    fn rope_cuda_kernel_matches_cpu_kernel() -> Result<()> {
        if let Err(reason) = candle_attention_cuda::is_available(&Device::Cpu) {
            println!("skipped: {reason}");
            return Ok(());
        }
        let (b, t, h, d) = (2, 5, 3, 12);
        let given = Tensor::new(&[[5u32, 6, 7, 9, 9], [0, 0, 1, 2, 3]], &Device::Cpu)?;
        let ragged = Positions::from_tensor("positions", &given, b, t)?;
        for (dtype, style, r) in [
            (DType::F32, RopeStyle::RotateHalf, 12),
            (DType::F32, RopeStyle::Interleaved, 8),
            (DType::BF16, RopeStyle::RotateHalf, 4),
            (DType::BF16, RopeStyle::Interleaved, 12),
        ] {
            let rotary = RotaryEmbedding::new(&RopeConfig::new(100.0).with_style(style).with_rotary_dim(r), d)?;
            for positions in [Positions::starting_at(&[4], t)?, ragged.clone()] {
                let rotation = rotary.at(&positions)?;
                // As (B, H, T, D) in memory.
                let var = Var::from_tensor(&Tensor::randn(0f32, 1.0, (b, h, t, d), &Device::Cpu)?.to_dtype(dtype)?)?;
                let heads = var.transpose(1, 2)?;
                let found = rotation.by_kernel(&heads)?.expect("the kernel runs on the emulator");
                let expected = rotation.apply(&heads)?;
                assert!(found.is_contiguous());
                let tolerance = if dtype == DType::F32 { 1e-6 } else { 2e-2 };
                let close = |one: &Tensor, other: &Tensor| -> Result<bool> {
                    let pairs = to_vec::<f32>(one)?.into_iter().zip(to_vec::<f32>(other)?);
                    Ok(pairs.into_iter().all(|(x, y)| (x - y).abs() <= tolerance))
                };
                assert!(close(&found, &expected)?, "{dtype:?}, {style:?}, r = {r}");

                let opposite = Rotation { inverse: true, ..rotation.clone() };
                let back = opposite.by_kernel(&found.detach())?.expect("the kernel runs on the emulator");
                assert!(close(&back, &heads)?, "{dtype:?}, {style:?}, r = {r}");
                let weigh = Tensor::randn(0f32, 1.0, (b, t, h, d), &Device::Cpu)?.to_dtype(dtype)?;
                let gradient = |ys: &Tensor| -> Result<Tensor> {
                    let store = ys.mul(&weigh)?.sum_all()?.backward()?;
                    Ok(store.get(&var).expect("the heads are tracked").clone())
                };
                assert!(close(&gradient(&found)?, &gradient(&expected)?)?, "{dtype:?}, {style:?}, r = {r}");
            }
        }
        Ok(())
    }
}
