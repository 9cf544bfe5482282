//! The CUDA kernels, by the emulator on tensors of the CPU, against the reference path.

use candle_attention_cuda::{NewDevice, SourceFault, on_new_device, without_programs};
use candle_core::{DType, Device, Result, Tensor, Var};

use super::call::{CheckedDelta, DeltaTensors};
use super::cuda::{CudaDeltaPath, DELTA_BACKWARD_CASE, DELTA_CASE};
use super::{DeltaOptions, reference};
use crate::net::{CONVOLUTION_CASE, GATES_CASE};
use candle_attention_core::PackedSequences;
use candle_attention_modules::base::first_use::{CaseError, allowed_error};

/// The inputs of a test.
struct Inputs {
    q: Var,
    k: Var,
    v: Var,
    decay: Option<Var>,
    beta: Option<Var>,
    state: Option<Var>,
    sequences: Option<PackedSequences>,
    options: DeltaOptions,
}

/// The shape of the inputs of a test: two entries, four heads of queries, two of values and one of keys.
#[derive(Clone, Copy)]
struct Sizes {
    t: usize,
    d_k: usize,
    d_v: usize,
}

const SIZES: Sizes = Sizes { t: 37, d_k: 20, d_v: 12 };

fn random(shape: &[usize], dtype: DType) -> Result<Var> {
    Var::from_tensor(&Tensor::randn(0f32, 1.0, shape, &Device::Cpu)?.to_dtype(dtype)?)
}

fn uniform(least: f32, most: f32, shape: &[usize]) -> Result<Var> {
    Var::from_tensor(&Tensor::rand(least, most, shape, &Device::Cpu)?)
}

impl Inputs {
    /// Returns inputs with decays of heads, betas, states and a norm.
    fn new(Sizes { t, d_k, d_v }: Sizes, dtype: DType) -> Result<Self> {
        Ok(Self {
            q: random(&[2, 4, t, d_k], dtype)?,
            k: random(&[2, 1, t, d_k], dtype)?,
            v: random(&[2, 2, t, d_v], dtype)?,
            decay: Some(uniform(-1.0, 0.0, &[2, 2, t])?),
            beta: Some(uniform(0.0, 1.0, &[2, 2, t])?),
            state: Some(random(&[2, 2, d_k, d_v], DType::F32)?),
            sequences: None,
            options: DeltaOptions::default().with_qk_norm(1e-6),
        })
    }

    fn call(&self) -> Result<CheckedDelta> {
        let optional = |var: &Option<Var>| var.as_ref().map(|var| var.as_tensor().clone());
        let (decay, beta, state) = (optional(&self.decay), optional(&self.beta), optional(&self.state));
        let tensors = DeltaTensors {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            decay: decay.as_ref(),
            beta: beta.as_ref(),
            state: state.as_ref(),
        };
        CheckedDelta::new("test", tensors, self.sequences.as_ref(), &self.options)
    }

    /// Returns the outputs and the states of one path, and the gradients of all inputs of a loss that depends on both.
    fn results(&self, (ys, states): (Tensor, Tensor)) -> Result<Vec<Tensor>> {
        // Weights that differ from number to number, and are the same for both paths.
        let weights = |like: &Tensor| {
            let numbers = (0..like.elem_count()).map(|n| (n as f32 * 0.7).sin());
            Tensor::from_iter(numbers, &Device::Cpu)?.reshape(like.shape())?.to_dtype(like.dtype())
        };
        let of_ys = (&ys * weights(&ys)?)?.to_dtype(DType::F32)?.sum_all()?;
        let loss = (of_ys + (&states * weights(&states)?)?.sum_all()?)?;
        let gradients = loss.backward()?;
        let mut results = vec![ys, states];
        let optional = [&self.decay, &self.beta, &self.state];
        for var in [&self.q, &self.k, &self.v].into_iter().chain(optional.into_iter().flatten()) {
            results.push(gradients.get(var).cloned().expect("every input has a gradient"));
        }
        Ok(results)
    }

    /// Compares the kernels with the reference path, relative to the largest number of each result.
    fn check(&self, tolerance: f64) -> Result<()> {
        let call = self.call()?;
        let found = self.results(CudaDeltaPath::plan(&call).expect("the kernels run the call").run()?)?;
        let expected = self.results(reference::run(&call)?)?;
        for (n, (own, other)) in found.iter().zip(&expected).enumerate() {
            assert_eq!((own.dims(), own.dtype()), (other.dims(), other.dtype()), "result {n}");
            let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.flatten_all();
            let largest = |tensor: &Tensor| tensor.abs()?.max(0)?.to_scalar::<f64>();
            let error = largest(&(wide(own)? - wide(other)?)?)? / largest(&wide(other)?)?;
            assert!(error <= tolerance, "result {n} is off by {error:e}");
        }
        Ok(())
    }
}

#[test]
fn cuda_kernels_with_decays_of_heads_match_reference() -> Result<()> {
    Inputs::new(SIZES, DType::F32)?.check(1e-5)
}

#[test]
fn cuda_kernels_in_half_precision_match_reference() -> Result<()> {
    Inputs::new(SIZES, DType::F16)?.check(4e-3)?;
    Inputs::new(SIZES, DType::BF16)?.check(2e-2)
}

#[test]
fn cuda_kernels_with_decays_of_channels_match_reference() -> Result<()> {
    let mut inputs = Inputs::new(SIZES, DType::F32)?;
    inputs.decay = Some(uniform(-1.0, 0.0, &[2, 1, SIZES.t, SIZES.d_k])?);
    inputs.check(1e-5)
}

#[test]
fn cuda_kernels_of_few_tokens_match_reference() -> Result<()> {
    Inputs::new(Sizes { t: 1, ..SIZES }, DType::F32)?.check(1e-5)?;
    Inputs::new(Sizes { t: 7, ..SIZES }, DType::F32)?.check(1e-5)
}

#[test]
fn cuda_kernels_without_decays_betas_states_and_norm_match_reference() -> Result<()> {
    let inputs = Inputs::new(SIZES, DType::F32)?;
    Inputs { beta: None, ..inputs }.check(1e-5)?;
    let plain = Inputs::new(SIZES, DType::F32)?;
    let options = DeltaOptions::default().with_scale(0.1);
    Inputs { decay: None, beta: None, state: None, options, ..plain }.check(1e-5)
}

/// Products of factors as large as e^60 in a chunk overflow on the path of the chunks.
#[test]
fn cuda_kernels_with_large_decays_match_reference() -> Result<()> {
    let mut inputs = Inputs::new(Sizes { t: 20, ..SIZES }, DType::F32)?;
    inputs.decay = Some(uniform(2.6, 2.9, &[2, 2, 20])?);
    inputs.check(1e-4)
}

#[test]
fn cuda_kernels_with_packed_sequences_match_reference() -> Result<()> {
    let (total, d_k, d_v) = (45, SIZES.d_k, SIZES.d_v);
    let inputs = Inputs {
        q: random(&[total, 2, d_k], DType::F32)?,
        k: random(&[total, 2, d_k], DType::F32)?,
        v: random(&[total, 2, d_v], DType::F32)?,
        decay: Some(uniform(-1.0, 0.0, &[total, 2])?),
        beta: Some(uniform(0.0, 1.0, &[total, 2])?),
        state: Some(random(&[3, 2, d_k, d_v], DType::F32)?),
        sequences: Some(PackedSequences::self_attention(vec![0, 35, 36, 45])?),
        options: DeltaOptions::default().with_qk_norm(1e-6),
    };
    inputs.check(1e-5)
}

#[test]
fn cuda_kernels_refuse_widths_above_256() -> Result<()> {
    let inputs = Inputs::new(Sizes { d_v: 257, ..SIZES }, DType::F32)?;
    let reason = CudaDeltaPath::plan(&inputs.call()?).err().expect("a reason");
    assert_eq!(reason, "the head dimension of values is 257, expected 1 to 256");
    Ok(())
}

#[test]
fn cuda_kernels_that_do_not_compile_are_a_reason() -> Result<()> {
    let inputs = Inputs::new(SIZES, DType::F32)?;
    let reason = without_programs("no memory", || -> Result<_> { Ok(CudaDeltaPath::plan(&inputs.call()?).err()) })?;
    assert_eq!(reason.as_deref(), Some("no memory"));
    Ok(())
}

/// Decays of half the logarithm.
const WRONG_DECAYS: SourceFault = SourceFault {
    file: "delta_rows.cuh",
    text: "return exponential(load_global(",
    replacement: "return exponential(0.5f * load_global(",
};

#[test]
fn first_use_cases_of_linear_attention_pass_on_the_emulator() -> Result<()> {
    for case in [DELTA_CASE, DELTA_BACKWARD_CASE, CONVOLUTION_CASE, GATES_CASE] {
        let CaseError { name, error } = case.largest_error(&Device::Cpu, DType::BF16)?;
        let allowed = allowed_error(DType::BF16);
        assert!(error <= allowed / 2.0, "{}: {name} is off by {error:e}, of {allowed:e}", case.operation);
    }
    Ok(())
}

#[test]
fn wrong_cuda_kernel_at_first_use_is_a_reason() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let inputs = Inputs::new(SIZES, DType::BF16)?;
    let wrong = NewDevice::new("a device with wrong decays", folder.path()).with_fault(WRONG_DECAYS);
    let reason = on_new_device(&wrong, || -> Result<_> { Ok(CudaDeltaPath::plan(&inputs.call()?).err()) })?;
    let reason = reason.expect("a reason");
    let start = "the kernels of gated delta rule, forward in bf16 failed their check on a device with wrong decays: ";
    assert!(reason.starts_with(start) && reason.contains(" is off by "), "{reason}");
    Ok(())
}
