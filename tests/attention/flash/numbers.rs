//! Biases, slopes and sinks in other dtypes than the scores', and under strides.

use candle_attention::AttentionMask;
use candle_attention::cpu::Tier;
use candle_core::{DType, Result, Tensor};

use crate::common::max_error;
use crate::flash::fused::{CPU, Call, bits};
use crate::oracle::Dims;
use crate::recipe::{DTYPES, Recipe};

const DIMS: Dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 19, t_kv: 67, d: 16, d_v: 24 };

fn wave(shape: &[usize]) -> Result<Tensor> {
    let count = shape.iter().product::<usize>() as i64;
    ((Tensor::arange(0, count, &CPU)?.to_dtype(DType::F32)? * 0.37)?.sin()? * 3.0)?.reshape(shape)
}

/// f16, bf16 and f64 are read as the numbers that they hold.
#[test]
fn biases_slopes_and_sinks_come_in_any_float() -> Result<()> {
    for dtype in DTYPES {
        let plain = Call::fused(&Recipe::of_kernel(DIMS, vec![], dtype).case(), dtype)?;
        for given in [DType::F16, DType::BF16, DType::F64] {
            let call = |convert: &dyn Fn(Tensor) -> Result<Tensor>| -> Result<Call> {
                let bias = convert(wave(&[DIMS.h, DIMS.t_q, DIMS.t_kv])?.to_dtype(given)?)?;
                let heads = convert(wave(&[DIMS.h])?.to_dtype(given)?)?;
                let call = Call { mask: AttentionMask::causal().with_bias(&bias), ..plain.clone() };
                Ok(call.with(|options| options.with_alibi_slopes(&heads).with_sinks(&heads)))
            };
            let (as_given, in_f32) = (call(&Ok)?, call(&|tensor| tensor.to_dtype(DType::F32))?);
            for tier in Tier::available() {
                let (got, expected) = (as_given.on_tier(tier).with_lse()?, in_f32.on_tier(tier).with_lse()?);
                let same = bits(&got.0) == bits(&expected.0) && bits(&got.1) == bits(&expected.1);
                assert!(same, "{tier}: {given:?} beside {dtype:?}");
            }
        }
    }
    Ok(())
}

/// A bias and a keep that are views: transposed, narrowed out of something wider, and expanded.
#[test]
fn mask_tensors_lie_anyhow() -> Result<()> {
    let Dims { b, h, t_q, t_kv, .. } = DIMS;
    let views = [
        ("transposed", wave(&[b, h, t_kv, t_q])?.transpose(2, 3)?),
        ("narrowed keys", wave(&[b, h, t_q, t_kv + 3])?.narrow(3, 2, t_kv)?),
        ("narrowed queries", wave(&[b, h, t_q + 4, t_kv])?.narrow(2, 3, t_q)?),
        ("heads last", wave(&[b, t_q, t_kv, h])?.permute((0, 3, 1, 2))?),
        ("narrowed heads", wave(&[h + 2, t_q, t_kv])?.narrow(0, 1, h)?),
        ("expanded queries", wave(&[b, 1, 1, t_kv])?.broadcast_as((b, h, t_q, t_kv))?),
        ("expanded keys", wave(&[h, t_q, 1])?.broadcast_as((h, t_q, t_kv))?),
        ("one number", wave(&[1])?.broadcast_as((b, 1, t_q, t_kv))?),
    ];
    for dtype in DTYPES {
        let plain = Call::fused(&Recipe::of_kernel(DIMS, vec![], dtype).case(), dtype)?;
        for (what, view) in &views {
            let keep = view.gt(-1.5)?;
            let keep_view = match *what {
                // The same layout for the keep, whose comparison made it contiguous.
                "transposed" => keep.transpose(2, 3)?.contiguous()?.transpose(2, 3)?,
                _ => keep,
            };
            let mask = |bias: &Tensor, keep: &Tensor| AttentionMask::none().with_bias(bias).with_keep(keep);
            let viewed = Call { mask: mask(view, &keep_view), ..plain.clone() };
            let straight = mask(&view.force_contiguous()?, &keep_view.force_contiguous()?);
            let straight = Call { mask: straight, ..plain.clone() };
            let reference = straight.on_reference().with_lse()?;
            for tier in Tier::available() {
                let (got, expected) = (viewed.on_tier(tier).with_lse()?, straight.on_tier(tier).with_lse()?);
                let same = bits(&got.0) == bits(&expected.0) && bits(&got.1) == bits(&expected.1);
                assert!(same, "{tier}: {what} beside {dtype:?}");
                assert!(max_error(&got.1, &reference.1) < 1e-4, "{tier}: {what} against the reference path");
            }
        }
    }
    Ok(())
}
