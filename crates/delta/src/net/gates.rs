//! The decays and betas of a layer, from their projections.

use candle_attention_cuda::{DeltaGates, DeltaGatesCall};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::config::GatedDeltaNetConfig;
use candle_attention_modules::base::first_use::{ComparedResult, FirstUseCase, case_numbers};
use candle_attention_modules::base::rowwise::with_contiguous_rows;
use candle_attention_modules::base::{ParameterList, accumulation_dtype};
use candle_attention_modules::gate::GateActivation;

/// The case of decays and betas.
pub const GATES_CASE: FirstUseCase = FirstUseCase { operation: "decays and betas", is_new: false, run: gates_case };

/// The names of the parameters of decays.
pub(super) const A_LOG: &str = "A_log";
pub(super) const DT_BIAS: &str = "dt_bias";

/// The parameters of the decays, in the accumulation dtype.
#[derive(Debug, Clone)]
pub(super) struct DecayParameters {
    /// `dt_bias`, (decays,).
    biases: Tensor,
    /// `A_log`, (H,).
    log_rates: Tensor,
}

impl DecayParameters {
    /// Returns the present values of the parameters of a layer.
    pub fn new(parameters: &ParameterList) -> Result<Self> {
        let wide = |name| -> Result<Tensor> {
            let parameter = parameters.expect(name)?;
            parameter.to_dtype(accumulation_dtype(parameter.dtype()))?.flatten_all()?.contiguous()
        };
        Ok(Self { biases: wide(DT_BIAS)?, log_rates: wide(A_LOG)? })
    }

    /// Returns whether a parameter is a variable.
    pub fn is_tracked(&self) -> bool {
        self.biases.track_op() || self.log_rates.track_op()
    }
}

/// The decays and betas of the tokens of a call, in the accumulation dtype.
pub(super) struct Gates {
    /// (B, T, H).
    pub beta: Tensor,
    /// The logarithms of decays, (B, T, H), or (B, T, H, D_k) of channels.
    pub decay: Tensor,
}

impl Gates {
    /// Computes the gates from the projections (B, T, H) of betas and (B, T, decays) of decays.
    pub fn new(cfg: &GatedDeltaNetConfig, parameters: &DecayParameters, beta: &Tensor, decay: &Tensor) -> Result<Self> {
        let is_tracked = parameters.is_tracked() || beta.track_op() || decay.track_op();
        if beta.device().is_cuda()
            && !is_tracked
            && let Some(kernel) = plan_on_cuda(cfg, parameters, beta, decay)
            && GATES_CASE.check(beta.device(), beta.dtype()).is_ok()
        {
            return run_on_cuda(cfg, &kernel);
        }
        Ok(Self { beta: composed_beta(cfg, beta)?, decay: composed_decay(cfg, parameters, decay)? })
    }
}

/// Returns beta from its projection by Candle's own operations.
fn composed_beta(cfg: &GatedDeltaNetConfig, projected: &Tensor) -> Result<Tensor> {
    let beta = GateActivation::Sigmoid.apply(&projected.to_dtype(accumulation_dtype(projected.dtype()))?)?;
    if cfg.allow_neg_eigval() { beta * 2.0 } else { Ok(beta) }
}

/// Returns the logarithms of decays from their projection by Candle's own operations.
fn composed_decay(cfg: &GatedDeltaNetConfig, parameters: &DecayParameters, projected: &Tensor) -> Result<Tensor> {
    let dtype = accumulation_dtype(projected.dtype());
    let biased = projected.to_dtype(dtype)?.broadcast_add(&parameters.biases.to_dtype(dtype)?)?;
    let rate = parameters.log_rates.to_dtype(dtype)?.exp()?.unsqueeze(1)?;
    let (b, t, decays) = biased.dims3()?;
    let xs = biased.reshape((b, t, cfg.num_value_heads(), decays / cfg.num_value_heads()))?;
    let decay = match cfg.decay_lower_bound() {
        Some(bound) => (GateActivation::Sigmoid.apply(&xs.broadcast_mul(&rate)?)? * bound)?,
        None => GateActivation::Softplus.apply(&xs)?.broadcast_mul(&rate.neg()?)?,
    };
    if cfg.decay_per_channel() { Ok(decay) } else { decay.squeeze(3) }
}

/// Returns the call of the CUDA kernel; `None` if it does not support the tensors.
fn plan_on_cuda(
    cfg: &GatedDeltaNetConfig,
    parameters: &DecayParameters,
    beta: &Tensor,
    decay: &Tensor,
) -> Option<DeltaGatesCall> {
    let call = DeltaGatesCall {
        beta: with_contiguous_rows(beta).ok()?,
        decay: with_contiguous_rows(decay).ok()?,
        biases: parameters.biases.clone(),
        log_rates: parameters.log_rates.clone(),
        decay_lower_bound: cfg.decay_lower_bound(),
        beta_factor: if cfg.allow_neg_eigval() { 2.0 } else { 1.0 },
    };
    call.plan().ok()?;
    Some(call)
}

fn run_on_cuda(cfg: &GatedDeltaNetConfig, call: &DeltaGatesCall) -> Result<Gates> {
    let DeltaGates { beta, decay } = call.forward()?;
    Ok(Gates { beta, decay: if cfg.decay_per_channel() { decay } else { decay.squeeze(3)? } })
}

/// Computes decays and betas of heads by the kernel and by Candle's operations.
fn gates_case(device: &Device, dtype: DType) -> Result<Vec<ComparedResult>> {
    let (b, t, h) = (2, 7, 5);
    let cfg = GatedDeltaNetConfig::new(8, h);
    let parameters_on = |place: &Device| -> Result<DecayParameters> {
        let own = |seed: u64| case_numbers(&[h], seed, DType::F32)?.to_device(place);
        Ok(DecayParameters { biases: own(1)?, log_rates: own(2)? })
    };
    let (beta, decay) = (case_numbers(&[b, t, h], 3, dtype)?, case_numbers(&[b, t, h], 4, dtype)?);
    let Some(call) = plan_on_cuda(&cfg, &parameters_on(device)?, &beta.to_device(device)?, &decay.to_device(device)?)
    else {
        bail!("no kernel computes decays and betas of {dtype:?}")
    };
    let found = run_on_cuda(&cfg, &call)?;
    let of_cpu = parameters_on(&Device::Cpu)?;
    Ok(vec![
        ComparedResult { name: "the betas", found: found.beta, expected: composed_beta(&cfg, &beta)? },
        ComparedResult { name: "the decays", found: found.decay, expected: composed_decay(&cfg, &of_cpu, &decay)? },
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the kernel, by the emulator, with Candle's own operations.
    #[test]
    fn cuda_gates_match_composed_gates() -> Result<()> {
        let heads = GatedDeltaNetConfig::new(8, 3);
        let channels = GatedDeltaNetConfig::new(8, 3).with_key_head_dim(5).with_decay_per_channel(true);
        let bounded = channels.clone().with_decay_lower_bound(-5.0).with_allow_neg_eigval(true);
        let random = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu);
        for (cfg, decays) in [(heads, 3), (channels, 15), (bounded, 15)] {
            for dtype in [DType::F32, DType::BF16] {
                let parameters = DecayParameters { biases: random(&[decays])?, log_rates: random(&[3])? };
                let beta = random(&[2, 7, 5])?.to_dtype(dtype)?.narrow(2, 1, 3)?;
                let decay = random(&[2, 7, decays])?.to_dtype(dtype)?;
                let call = plan_on_cuda(&cfg, &parameters, &beta, &decay).expect("the kernel runs the call");
                let found = run_on_cuda(&cfg, &call)?;
                for (own, expected) in [
                    (found.beta, composed_beta(&cfg, &beta)?),
                    (found.decay, composed_decay(&cfg, &parameters, &decay)?),
                ] {
                    assert_eq!((own.dims(), own.dtype()), (expected.dims(), expected.dtype()));
                    let error = (own - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
                    assert!(error <= 1e-5, "{dtype:?}: off by {error:e}");
                }
            }
        }
        Ok(())
    }
}
