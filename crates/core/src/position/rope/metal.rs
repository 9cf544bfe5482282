//! The rotation of heads by its Metal kernel, which reads heads of any strides in their own dtype. Nothing is tracked
//! for gradients.

use candle_attention_metal::{MetalRows, is_available};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::{RopeConfig, RopeStyle, RotaryEmbedding, Rotation};
use crate::position::Positions;
use candle_attention_modules::base::first_use::{ComparedResult, FirstUseCase, case_numbers};
use candle_attention_modules::base::rowwise::with_contiguous_rows;
use candle_attention_modules::internal::run_checked;

/// The case of the rotation of heads on Metal.
pub const METAL_ROTATION_CASE: FirstUseCase =
    FirstUseCase { operation: "rotary positions on Metal", is_new: true, run: rotation_case };

impl Rotation {
    /// Rotates heads (B, T, H, D) as [`apply`](Self::apply) does; `None` if the kernel does not support the call.
    pub(super) fn on_metal(&self, xs: &Tensor) -> Result<Option<Tensor>> {
        if xs.track_op() || is_available(xs.device()).is_err() {
            return Ok(None);
        }
        let rows = with_contiguous_rows(xs)?;
        let Some(kernel) = self.kernel(&rows)? else { return Ok(None) };
        run_checked(&MetalRows::Rotation(kernel), &METAL_ROTATION_CASE, &rows).transpose()
    }
}

/// Rotates heads in both styles and both directions by the kernel and by the CPU. Some columns are not rotated, and the
/// sequences have different positions.
fn rotation_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let (b, t, d) = (2, 5, 64);
    let xs = case_numbers(&[b, t, 3, d], 1, dtype)?;
    let wide = xs.to_dtype(DType::F32)?;
    let own = xs.to_device(device)?;
    let given = Tensor::new(&[[5u32, 6, 7, 9, 9], [0, 0, 1, 2, 3]], &Device::Cpu)?;
    let ragged = Positions::from_tensor("positions", &given, b, t)?;
    let mut compared = Vec::new();
    for (style, width, positions) in
        [(RopeStyle::RotateHalf, 64, Positions::starting_at(&[5], t)?), (RopeStyle::Interleaved, 48, ragged)]
    {
        let config = RopeConfig::new(10_000.0).with_style(style).with_rotary_dim(width);
        let there = RotaryEmbedding::new(&config, d)?.at(&positions)?;
        let back = Rotation { inverse: true, ..there.clone() };
        for (name, rotation) in [("the rotated heads", there), ("the heads that are rotated back", back)] {
            let Some(kernel) = rotation.kernel(&own)? else { bail!("[rope] no kernel rotates whole heads") };
            let found = MetalRows::Rotation(kernel).forward()?;
            compared.push(ComparedResult { name, found, expected: rotation.apply(&wide)? });
        }
    }
    Ok(compared)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::{RopeAxes, RopeAxisLayout};
    use candle_attention_modules::base::first_use::{CaseError, allowed_error};

    #[test]
    fn rope_metal_kernel_matches_cpu_kernel() -> Result<()> {
        if let Err(reason) = is_available(&Device::Cpu) {
            println!("skipped: {reason}");
            return Ok(());
        }
        for dtype in [DType::F32, DType::BF16] {
            let CaseError { name, error } = METAL_ROTATION_CASE.largest_error(&Device::Cpu, dtype)?;
            assert!(error <= allowed_error(dtype), "{dtype:?}, {name}: {error:e}");
        }
        Ok(())
    }

    /// Checks that heads of several parts run without a kernel if the entries of a pair are half of a part apart.
    #[test]
    fn rope_metal_kernel_of_parts_runs_only_if_pairs_are_neighbours() -> Result<()> {
        if let Err(reason) = is_available(&Device::Cpu) {
            println!("skipped: {reason}");
            return Ok(());
        }
        let heads = case_numbers(&[1, 2, 3, 8], 1, DType::F32)?;
        for (style, is_by_kernel) in [(RopeStyle::RotateHalf, false), (RopeStyle::Interleaved, true)] {
            let axes = RopeAxes::new(vec![2, 2], RopeAxisLayout::AxialParts);
            let config = RopeConfig::new(100.0).with_style(style).with_axes(axes);
            let rotation = RotaryEmbedding::new(&config, 8)?.at(&Positions::starting_at(&[4], 2)?)?;
            let found = rotation.on_metal(&heads)?;
            assert_eq!(found.is_some(), is_by_kernel, "{style:?}");
            if let Some(found) = found {
                let off = (found - rotation.apply(&heads)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
                assert!(off < 1e-6, "{style:?}: off by {off}");
            }
        }
        Ok(())
    }
}
