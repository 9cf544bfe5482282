//! Linear attention by the gated delta rule: one function for every device and dtype.
//!
//! Instead of keys and values, a head has a state (D_k, D_v), which each token updates and each query reads. The
//! recurrence in `reference` is the specification; the kernels are tested against it.

mod call;
mod cpu;
mod cuda;
mod options;
mod reference;
#[cfg(test)]
mod tests;

pub use cuda::{DELTA_BACKWARD_CASE, DELTA_CASE};
pub use options::DeltaOptions;

use candle_core::{DType, Device, Result, Tensor, bail};

use call::{CheckedDelta, DeltaTensors};
use candle_attention_core::{Backend, PackedSequences};
use candle_attention_kernels::InstructionSet;
use candle_attention_kernels::delta::DeltaDims;
use cuda::CudaDeltaPath;

/// Computes linear attention by the gated delta rule: each token updates the state S (D_k, D_v) of its head, and its
/// query then reads the state. For one token after the other
///
/// ```text
/// S = exp(decay) S                   with decay
/// S = S + k vᵀ                       without beta
/// S = S + beta k (v - Sᵀ k)ᵀ         with beta
/// o = scale Sᵀ q
/// ```
///
/// The rule depends on which of `decay` and `beta` are `Some`: neither is linear attention (Katharopoulos et al.,
/// <https://arxiv.org/abs/2006.16236>), decay alone gated linear attention (Yang et al.,
/// <https://arxiv.org/abs/2312.06635>), beta alone the delta rule (Yang et al., <https://arxiv.org/abs/2406.06484>),
/// and both the gated delta rule (Yang et al., <https://arxiv.org/abs/2412.06464>).
///
/// | input | shape | |
/// | --- | --- | --- |
/// | `q` | (B, H_q, T, D_k) | f32, bf16, f16 or f64 |
/// | `k` | (B, H_k, T, D_k) | in q's dtype |
/// | `v` | (B, H_v, T, D_v) | in q's dtype |
/// | `decay` | (B, H_s, T), or (B, H_s, T, D_k) for a factor of each row of S | the logarithm of the factor, `g` in flash-linear-attention: 0 keeps the state, -inf clears it |
/// | `beta` | (B, H_s, T) | usually from 0 to 1, or to 2 |
/// | `state` | (B, H_s, D_k, D_v) | before the first token; zeros unless given |
///
/// H_s, the number of states, is the larger of H_k and H_v. The heads of q, k, v, decay and beta may be fewer: any
/// number that divides H_s. H_q may also be a multiple of H_s. With H the larger of H_q and H_s, head h of H reads head
/// `h / (H / n)` of an input with n heads. Decay, beta and state may have any float dtype, and all inputs any strides.
/// Decays above 0 and any beta are computed as the formula says, though a state may then grow beyond its dtype. On the
/// CPU, decays above 2.5, and with a norm a scale that is not 0 whose magnitude is below 1e-15 or above 1e15, take the
/// reference path: the products that the fused kernel computes would overflow. On CUDA, such a scale takes it if there
/// are gradients, and heads with such decays are computed token by token.
///
/// Returns the outputs o, (B, H, T, D_v) in q's dtype, and the state after the last token, (B, H_s, D_k, D_v), in f32,
/// or f64 where q is; everything is computed in that dtype. Gradients reach all inputs. For f32, bf16 and f16, fused
/// kernels run on the CPU and, for D_k and D_v up to 256, on CUDA. Their output is a view of a contiguous (B, T, H,
/// D_v). On CUDA, backward passes in bf16 and f16, and calls of more than 8 tokens, multiply in TF32 and sum in f32: a
/// state is off by up to 7e-4 of its largest number, and a gradient by 1.4e-3. Calls in f32 are as accurate as on the
/// CPU.
///
/// ```
/// use candle_attention::{DeltaOptions, gated_delta_rule};
/// use candle_core::{D, DType, Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let q = Tensor::randn(0f32, 1., (2, 4, 5, 16), &Device::Cpu)?;
/// let v = Tensor::randn(0f32, 1., (2, 8, 5, 32), &Device::Cpu)?;
/// let decay = Tensor::rand(-1f32, 0., (2, 8, 5), &Device::Cpu)?;
/// let beta = Tensor::rand(0f32, 1., (2, 8, 5), &Device::Cpu)?;
/// let options = DeltaOptions::default().with_qk_norm(1e-6);
/// let (y, state) = gated_delta_rule(&q, &q, &v, Some(&decay), Some(&beta), None, &options)?;
/// assert_eq!((y.dims(), state.dims()), ([2, 8, 5, 32].as_slice(), [2, 8, 16, 32].as_slice()));
/// # Ok(()) }
/// ```
///
/// # Errors
/// For shapes, numbers of heads, dtypes or devices that do not fit together, for a scale that is not finite or an eps
/// that is negative or not finite, and for [`Backend::Fused`] where no fused kernel can run the call.
pub fn gated_delta_rule(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    decay: Option<&Tensor>,
    beta: Option<&Tensor>,
    state: Option<&Tensor>,
    options: &DeltaOptions,
) -> Result<(Tensor, Tensor)> {
    let tensors = DeltaTensors { q, k, v, decay, beta, state };
    run(&CheckedDelta::new("gated_delta_rule", tensors, None, options)?)
}

/// Computes [`gated_delta_rule`] over n sequences of different lengths, packed one after the other. Each has its own
/// state.
///
/// q is (total, H_q, D_k), k (total, H_k, D_k), v (total, H_v, D_v), decay (total, H_s) or (total, H_s, D_k), beta
/// (total, H_s) and state (n, H_s, D_k, D_v). Returns the outputs (total, H, D_v) and the states after the last token
/// of each sequence, (n, H_s, D_k, D_v). The queries and the keys of a sequence are the same tokens:
/// [`PackedSequences::self_attention`].
///
/// ```
/// use candle_attention::{DeltaOptions, PackedSequences, gated_delta_rule_varlen};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let sequences = PackedSequences::self_attention(vec![0, 5, 8])?;
/// let q = Tensor::randn(0f32, 1., (8, 4, 16), &Device::Cpu)?;
/// let options = DeltaOptions::default();
/// let (y, states) = gated_delta_rule_varlen(&q, &q, &q, None, None, None, &sequences, &options)?;
/// assert_eq!((y.dims(), states.dims()), ([8, 4, 16].as_slice(), [2, 4, 16, 16].as_slice()));
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`gated_delta_rule`], and for sequences whose keys are not their queries' tokens, or whose total is not that of
/// the tensors.
#[expect(clippy::too_many_arguments, reason = "six tensors of the rule, as in every other library")]
pub fn gated_delta_rule_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    decay: Option<&Tensor>,
    beta: Option<&Tensor>,
    state: Option<&Tensor>,
    sequences: &PackedSequences,
    options: &DeltaOptions,
) -> Result<(Tensor, Tensor)> {
    let tensors = DeltaTensors { q, k, v, decay, beta, state };
    let (y, states) = run(&CheckedDelta::new("gated_delta_rule_varlen", tensors, Some(sequences), options)?)?;
    Ok((y.transpose(1, 2)?.squeeze(0)?.contiguous()?, states))
}

/// Runs a call, and returns the attention output (B, H, T, D_v) and the states (n, H_s, D_k, D_v).
fn run(call: &CheckedDelta) -> Result<(Tensor, Tensor)> {
    let (ys, states) = run_by_head(call)?;
    let DeltaDims { h, h_k, h_v, d_k, d_v, .. } = call.dims;
    let ([n, ..], h_s) = (call.state_dims(), h_k.max(h_v));
    if h == h_s {
        return Ok((ys, states));
    }
    // Several heads of queries read one state, of which each computed its own copy.
    Ok((ys, states.reshape((n, h_s, h / h_s, d_k, d_v))?.narrow(2, 0, 1)?.squeeze(2)?.contiguous()?))
}

/// Runs a call with one state for each of the H heads: by the fused kernel if it can compute the call, and on the
/// reference path otherwise.
fn run_by_head(call: &CheckedDelta) -> Result<(Tensor, Tensor)> {
    let path = path(call)?;
    let DeltaDims { b, t, h, d_v, .. } = call.dims;
    if [b, t, d_v].contains(&0) {
        return Ok((Tensor::zeros((b, h, t, d_v), call.dtype(), call.q.device())?, call.initial_states()?));
    }
    match path {
        Path::Cpu(instruction_set) => match cpu::run(call, instruction_set)? {
            cpu::CpuOutcome::Computed(ys, states) => Ok((ys, states)),
            cpu::CpuOutcome::OutOfRange(reason) if call.options.backend == Backend::Fused => {
                bail!("[{}] no fused path: {reason}", call.op)
            }
            cpu::CpuOutcome::OutOfRange(_) => reference::run(call),
        },
        Path::Cuda(kernels) => kernels.run(),
        Path::Reference => reference::run(call),
    }
}

/// The implementation of a call.
enum Path {
    /// The fused CPU kernel.
    Cpu(InstructionSet),
    /// The CUDA kernels.
    Cuda(Box<CudaDeltaPath>),
    /// Candle's own operations.
    Reference,
}

/// Returns the implementation that a call takes. The CPU kernel may find numbers that it does not take.
fn path(call: &CheckedDelta) -> Result<Path> {
    let options = &call.options;
    if options.backend == Backend::Reference {
        return Ok(Path::Reference);
    }
    let reason = match (call.q.device(), call.dtype()) {
        (Device::Cpu, DType::F64) => "the CPU kernel computes in f32, and the inputs are F64".into(),
        (Device::Cpu, dtype) => match InstructionSet::choose(options.instruction_set, dtype == DType::BF16) {
            Ok(instruction_set) => return Ok(Path::Cpu(instruction_set)),
            Err(error) => bail!("[{}] {error}", call.op),
        },
        // There are no tokens to compute.
        (Device::Cuda(_), _) if call.q.elem_count() == 0 || call.v.elem_count() == 0 => return Ok(Path::Reference),
        (Device::Cuda(_), _) => match CudaDeltaPath::plan(call) {
            Ok(kernels) => return Ok(Path::Cuda(Box::new(kernels))),
            Err(reason) => reason,
        },
        (Device::Metal(_), _) => "there are kernels for the CPU and for CUDA, and the inputs are on Metal".into(),
    };
    if options.backend == Backend::Fused {
        bail!("[{}] no fused path: {reason}", call.op)
    }
    Ok(Path::Reference)
}
