//! A call of the gated delta rule, and the choice of its kernels.

use std::fmt;

use candle_core::{D, DType, Result, Storage, Tensor, bail};

use super::arguments::DeltaArguments;
use super::specialization::{DeltaGrid, DeltaSpecialization};
use crate::device::{KernelDevice, Operands};
use crate::kernel_pointers::RowStrides;
use crate::unsupported::Unsupported;

/// The most tokens of a sequence that are computed token by token.
const MAX_STEPS: usize = 8;

/// The magnitudes of a scale that the backward pass takes with a norm, since it divides by the square of the scale.
const SCALES_WITH_NORM: std::ops::RangeInclusive<f64> = 1e-15..=1e15;

/// A call of the gated delta rule. With S the state of a head, for one token after the other
///
/// ```text
/// S = exp(decay) S                with a decay, for the head or for each row of S
/// e = v - Sᵀ k                    with a beta, else v
/// S = S + k (beta e)ᵀ
/// output = Sᵀ (scale q)
/// ```
///
/// States and sums are f32, with the same bits in each run. The kernels over chunks multiply elements of f32 as three
/// products of TF32, up to 2^-22 of them, and with elements of 16 bits all numbers as one, which rounds states to
/// 2^-11. H is the number of states. Heads of q, k and v may be fewer: any numbers that divide H. Head h of H reads
/// head `h / (H / n)` of an input with n heads. Any decay is allowed. The last dimension of all tensors is contiguous.
#[derive(Debug, Clone)]
pub struct CudaDeltaCall {
    /// (B, H_q, T, D_k), f32, bf16 or f16.
    pub q: Tensor,
    /// (B, H_k, T, D_k), in q's dtype.
    pub k: Tensor,
    /// (B, H_v, T, D_v), in q's dtype.
    pub v: Tensor,
    /// The logarithms of the factors of the state before each token, (B, H, T, 1), or (B, H, T, D_k) for a factor of
    /// each row of the state; f32.
    pub decay: Option<Tensor>,
    /// (B, H, T, 1), f32.
    pub beta: Option<Tensor>,
    /// The states before the first tokens, (N, H, D_k, D_v), contiguous, f32; zeros if `None`.
    pub states: Option<Tensor>,
    /// H.
    pub heads: usize,
    /// The first token of each of N packed sequences, and last the number of all tokens, T. B is 1 then. If `None`,
    /// each entry of the batch is a sequence.
    pub cumulative_tokens: Option<Vec<usize>>,
    /// The factor of queries.
    pub scale: f64,
    /// The epsilon of an L2 norm: each row of queries and keys is divided by `sqrt(sum of its squares + eps)`.
    pub qk_norm: Option<f64>,
}

/// The kernels of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaKernel {
    /// One kernel, token by token.
    Steps,
    /// Chunks of tokens side by side, and a scan over them.
    Chunks,
}

impl fmt::Display for DeltaKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Steps => "the CUDA kernel of the gated delta rule, token by token",
            Self::Chunks => "the CUDA kernels of the gated delta rule over chunks of tokens",
        })
    }
}

/// The results of a forward pass.
pub struct DeltaResults {
    /// The attention output, (B, T, H, D_v), contiguous, in q's dtype.
    pub output: Storage,
    /// The states after the last token of each sequence, (N, H, D_k, D_v), contiguous, f32.
    pub states: Storage,
}

/// The gradients of the inputs, in f32, contiguous. The gradients of q, k and v have all H heads: where several heads
/// read one head of an input, the caller sums over them.
#[derive(Debug, Clone)]
pub struct CudaDeltaGradients {
    /// (B, H, T, D_k).
    pub q: Tensor,
    /// (B, H, T, D_k).
    pub k: Tensor,
    /// (B, H, T, D_v).
    pub v: Tensor,
    /// In the decay's shape. It is 0 where the logarithm is -inf.
    pub decay: Option<Tensor>,
    /// (B, H, T, 1).
    pub beta: Option<Tensor>,
    /// The gradient of the states before the first tokens, (N, H, D_k, D_v).
    pub states: Tensor,
}

/// The dimensions of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct DeltaSizes {
    pub b: usize,
    pub t: usize,
    pub n: usize,
    pub d_k: usize,
    pub d_v: usize,
    /// The most tokens of a sequence.
    pub longest: usize,
}

/// The chunks of the sequences of a call, on its device if the sequences are packed.
pub(super) struct DeltaChunks {
    /// The number of chunks of all sequences.
    pub count: usize,
    /// The first token of each packed sequence, and the number of all; (N + 1,) i32.
    pub cumulative_tokens: Option<Tensor>,
    /// The first chunk of each packed sequence, and the number of all; (N + 1,) i32.
    pub cumulative_chunks: Option<Tensor>,
}

impl CudaDeltaCall {
    /// Returns the kernels of the forward pass. Nothing is compiled, and no tensor is read.
    ///
    /// # Errors
    /// If no kernel runs the call, or it could not be compiled in an earlier call: the sentence says why.
    pub fn plan(&self) -> std::result::Result<DeltaKernel, Unsupported> {
        let sizes = self.sizes().map_err(|error| Unsupported::new(error.to_string()))?;
        let device = KernelDevice::of(self.q.device())?;
        let specialization = self.specialization(&device, false)?;
        device.check_known_failure(|| Some(specialization.program()))?;
        Ok(if sizes.longest <= MAX_STEPS { DeltaKernel::Steps } else { DeltaKernel::Chunks })
    }

    /// Checks that the kernels run the backward pass.
    ///
    /// # Errors
    /// If they do not: the sentence says why.
    pub fn plan_backward(&self) -> std::result::Result<(), Unsupported> {
        let device = KernelDevice::of(self.q.device())?;
        let specialization = self.specialization(&device, true)?;
        device.check_known_failure(|| Some(specialization.program()))?;
        if self.qk_norm.is_some() && self.scale != 0.0 && !SCALES_WITH_NORM.contains(&self.scale.abs()) {
            let (least, most) = (SCALES_WITH_NORM.start(), SCALES_WITH_NORM.end());
            return Err(Unsupported::new(format!(
                "scale is {:e}, expected 0 or a magnitude from {least:e} to {most:e} with qk_norm",
                self.scale
            )));
        }
        Ok(())
    }

    /// Loads the programs of the passes, so that the caller can take another path if one fails, which is logged once.
    ///
    /// # Errors
    /// If no kernel runs a pass, or one does not compile.
    pub fn prepare(&self, with_backward: bool) -> std::result::Result<(), Unsupported> {
        let device = KernelDevice::of(self.q.device())?;
        device.prepare(&self.specialization(&device, false)?.program())?;
        if with_backward {
            device.prepare(&self.specialization(&device, true)?.program())?;
        }
        Ok(())
    }

    /// Returns the constants of the kernels of a pass on a device.
    pub(super) fn specialization(
        &self,
        device: &KernelDevice,
        is_backward: bool,
    ) -> std::result::Result<DeltaSpecialization, Unsupported> {
        let sizes = self.sizes().map_err(|error| Unsupported::new(error.to_string()))?;
        let rows = sizes.b.saturating_mul(sizes.t).max(sizes.t.saturating_add(sizes.n));
        if rows > i32::MAX as usize / 2 {
            return Err(Unsupported::new(format!("there are {rows} tokens, expected at most {}", i32::MAX / 2)));
        }
        let chosen = DeltaSpecialization::choose(&device.limits(), self.q.dtype(), sizes.d_k, sizes.d_v, is_backward)?;
        let chunks = match self.cumulative_tokens {
            None => sizes.b * sizes.t.div_ceil(chosen.chunk),
            // The last chunk of each packed sequence may be shorter.
            Some(_) => sizes.t.div_ceil(chosen.chunk) + sizes.n,
        };
        for launch in chosen.launches(self.grid(&sizes, chunks)) {
            launch.check()?;
        }
        Ok(chosen)
    }

    /// Checks the shapes and dtypes of a call.
    pub(super) fn sizes(&self) -> Result<DeltaSizes> {
        let (b, h_q, t, d_k) = self.q.dims4()?;
        let (_, h_k, ..) = self.k.dims4()?;
        let (_, h_v, _, d_v) = self.v.dims4()?;
        let h = self.heads;
        let (n, longest) = match &self.cumulative_tokens {
            None => (b, t),
            Some(cumulative) => packed_sizes(cumulative, b, t)?,
        };
        let dtype = self.q.dtype();
        check_tensor("q", &self.q, &[b, h_q, t, d_k], dtype)?;
        check_tensor("k", &self.k, &[b, h_k, t, d_k], dtype)?;
        check_tensor("v", &self.v, &[b, h_v, t, d_v], dtype)?;
        for (name, heads) in [("q", h_q), ("k", h_k), ("v", h_v)] {
            if heads == 0 || !h.is_multiple_of(heads) {
                bail!("[gated_delta_rule] {name} has {heads} heads, expected a divisor of {h}")
            }
        }
        if let Some(decay) = &self.decay {
            let width = if decay.dim(D::Minus1)? == 1 { 1 } else { d_k };
            check_tensor("decay", decay, &[b, h, t, width], DType::F32)?;
        }
        if let Some(beta) = &self.beta {
            check_tensor("beta", beta, &[b, h, t, 1], DType::F32)?;
        }
        if let Some(states) = &self.states {
            check_tensor("states", states, &[n, h, d_k, d_v], DType::F32)?;
            if !states.is_contiguous() {
                bail!("[gated_delta_rule] states have the strides {:?}, expected contiguous ones", states.stride())
            }
        }
        Ok(DeltaSizes { b, t, n, d_k, d_v, longest })
    }

    /// Returns the chunks of a number of tokens.
    pub(super) fn chunks(&self, sizes: &DeltaSizes, chunk: usize) -> Result<DeltaChunks> {
        let Some(cumulative) = &self.cumulative_tokens else {
            let count = sizes.b * sizes.t.div_ceil(chunk);
            return Ok(DeltaChunks { count, cumulative_tokens: None, cumulative_chunks: None });
        };
        let mut count = 0;
        let mut chunks = vec![0i32];
        for ends in cumulative.windows(2) {
            count += (ends[1] - ends[0]).div_ceil(chunk);
            chunks.push(count as i32);
        }
        let tokens: Vec<_> = cumulative.iter().map(|&token| token as i32).collect();
        let device = self.q.device();
        let on_device = |numbers: Vec<i32>| Tensor::from_vec(numbers, sizes.n + 1, device).map(Some);
        Ok(DeltaChunks { count, cumulative_tokens: on_device(tokens)?, cumulative_chunks: on_device(chunks)? })
    }

    /// Returns the kernels' argument with the inputs, the sizes and the options of the call.
    pub(super) fn arguments<'t>(
        &'t self,
        sizes: &DeltaSizes,
        chunks: &'t DeltaChunks,
        operands: &mut Operands<'_, 't>,
    ) -> Result<DeltaArguments> {
        let strides = |tensor: &Option<Tensor>| tensor.as_ref().map(row_strides).unwrap_or_default();
        let is_per_channel = self.decay.as_ref().is_some_and(|decay| decay.dims()[3] > 1);
        Ok(DeltaArguments {
            queries: operands.input("queries", &self.q)?,
            keys: operands.input("keys", &self.k)?,
            values: operands.input("values", &self.v)?,
            decays: operands.optional_input("decays", self.decay.as_ref())?,
            betas: operands.optional_input("betas", self.beta.as_ref())?,
            initial_states: operands.optional_input("initial_states", self.states.as_ref())?,
            cumulative_tokens: operands.optional_input("cumulative_tokens", chunks.cumulative_tokens.as_ref())?,
            cumulative_chunks: operands.optional_input("cumulative_chunks", chunks.cumulative_chunks.as_ref())?,
            query_strides: row_strides(&self.q),
            key_strides: row_strides(&self.k),
            value_strides: row_strides(&self.v),
            decay_strides: strides(&self.decay),
            beta_strides: strides(&self.beta),
            output_strides: self.output_strides(sizes),
            sequences: sizes.n as i32,
            heads: self.heads as i32,
            query_heads: self.q.dims()[1] as i32,
            key_heads: self.k.dims()[1] as i32,
            value_heads: self.v.dims()[1] as i32,
            tokens: sizes.t as i32,
            chunks: chunks.count as i32,
            decay_per_channel: is_per_channel.into(),
            has_norm: self.qk_norm.is_some().into(),
            scale: self.scale as f32,
            norm_epsilon: self.qk_norm.unwrap_or(0.0) as f32,
            ..DeltaArguments::default()
        })
    }

    /// Returns the strides of a contiguous (B, T, H, D_v).
    fn output_strides(&self, sizes: &DeltaSizes) -> RowStrides {
        let head = sizes.d_v as i64;
        let row = head * self.heads as i64;
        RowStrides { sequence: row * sizes.t as i64, head, row }
    }

    /// Returns the grid of the launches.
    pub(super) fn grid(&self, sizes: &DeltaSizes, chunks: usize) -> DeltaGrid {
        DeltaGrid { sequences: sizes.n, heads: self.heads, chunks }
    }
}

/// Returns the number of packed sequences and the most tokens of one.
fn packed_sizes(cumulative: &[usize], b: usize, t: usize) -> Result<(usize, usize)> {
    let is_ordered = cumulative.windows(2).all(|ends| ends[0] <= ends[1]);
    if b != 1 || !is_ordered || cumulative.first() != Some(&0) || cumulative.last() != Some(&t) {
        bail!(
            "[gated_delta_rule] sequences are at {cumulative:?} of {b} entries of {t} tokens, expected all of one entry"
        )
    }
    let longest = cumulative.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0);
    Ok((cumulative.len() - 1, longest))
}

/// Checks the shape, the dtype and the last stride of a tensor.
pub(super) fn check_tensor(name: &str, tensor: &Tensor, dims: &[usize], dtype: DType) -> Result<()> {
    let has_rows = dims.last() == Some(&1) || tensor.stride().last() == Some(&1);
    if tensor.dims() == dims && tensor.dtype() == dtype && has_rows {
        return Ok(());
    }
    bail!(
        "[gated_delta_rule] {name} has the shape {:?}, the strides {:?} and the dtype {:?}, expected {dims:?} of {dtype:?} \
         with contiguous rows",
        tensor.dims(),
        tensor.stride(),
        tensor.dtype()
    )
}

/// Returns the strides of a tensor (B, H, T, D).
pub(super) fn row_strides(tensor: &Tensor) -> RowStrides {
    let strides = tensor.stride();
    RowStrides { sequence: strides[0] as i64, head: strides[1] as i64, row: strides[2] as i64 }
}
