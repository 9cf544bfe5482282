//! The gated delta rule.

use candle_attention::{Backend, DeltaOptions, gated_delta_rule};
use candle_core::{DType, Result, Tensor, Var};

use super::cell::{DeltaSizes, Pass};
use super::clock::Clock;
use super::outcome::Outcome;

pub fn time(sizes: &DeltaSizes, clock: &Clock) -> Result<Outcome> {
    let device = &clock.device;
    let DeltaSizes { h, t, d, pass, reference } = *sizes;
    let input = |drawn: Tensor| -> Result<Tensor> {
        if pass == Pass::Training { Ok(Var::from_tensor(&drawn)?.into_inner()) } else { Ok(drawn) }
    };
    // (B, T, H, D) in memory, as in a layer.
    let rows = || Tensor::randn(0f32, 1., (1, t, h, d), device)?.to_dtype(DType::BF16);
    let q = input(rows()?)?;
    let k = input(rows()?)?;
    let v = input(rows()?)?;
    let decay = input(Tensor::rand(-0.1f32, 0., (1, h, t), device)?)?;
    let beta = input(Tensor::rand(0f32, 1., (1, h, t), device)?)?;
    let state = Tensor::zeros((1, h, d, d), DType::F32, device)?;
    let backend = if reference { Backend::Reference } else { Backend::Auto };
    let options = DeltaOptions::default().with_qk_norm(1e-6).with_backend(backend);
    let call = |_: usize| -> Result<Option<Tensor>> {
        let (q, k, v) = (q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?);
        let (y, _) = gated_delta_rule(&q, &k, &v, Some(&decay), Some(&beta), Some(&state), &options)?;
        match pass {
            Pass::Forward => Ok(Some(y)),
            // The gradient of the output is ones, so that no loss is timed.
            Pass::Training => Ok(y.backward()?.get(&decay).cloned()),
        }
    };
    let ms = clock.milliseconds(call)?;
    let path = if reference { "reference" } else { "chosen" };
    Ok(Outcome::Milliseconds { ms, path: path.into() })
}
