//! The decays and betas of a gated delta net.

use candle_core::{DType, Result, Tensor, bail};

use super::outline::{self, RowsCall, Run};
use crate::ci_programs::CiProgram;
use crate::device::{Grid, KernelArguments, Launch, TensorLocks};
use crate::kernel_pointers::{Elements, InputPointer, OutputPointer};
use crate::kernel_struct::kernel_struct;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

const KERNEL: KernelShape = KernelShape { name: "delta_gates", threads: GATES_THREADS, shared_bytes: 0 };

/// The projections of a layer's inputs from which its decays and betas are computed, without gradients. W is 1, or D_k
/// for a decay of each channel. The last dimension of all tensors is contiguous.
#[derive(Debug, Clone)]
pub struct DeltaGatesCall {
    /// (B, T, H), f32, bf16 or f16.
    pub beta: Tensor,
    /// (B, T, H · W), in the dtype of `beta`.
    pub decay: Tensor,
    /// The numbers that are added to `decay`, (H · W,), f32, contiguous.
    pub biases: Tensor,
    /// The logarithms of the rates, (H,), f32, contiguous.
    pub log_rates: Tensor,
    /// Decays are `bound sigmoid(rate x)` with a bound, and `-rate softplus(x)` without.
    pub decay_lower_bound: Option<f64>,
    /// Betas are `beta_factor sigmoid(x)`.
    pub beta_factor: f64,
}

/// The results of a [`DeltaGatesCall`].
#[derive(Debug, Clone)]
pub struct DeltaGates {
    /// (B, T, H), f32.
    pub beta: Tensor,
    /// The logarithms of the factors of the state, (B, T, H, W), f32.
    pub decay: Tensor,
}

/// The dimensions of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct GatesShape {
    b: usize,
    t: usize,
    h: usize,
    /// H · W.
    decays: usize,
}

kernel_struct! {
    /// The only argument of the kernel of the decays and betas of a gated delta net.
    ///
    /// B is `entries`, T is `tokens`, H is `heads` and W is `decay_width`: 1, or D_k for a decay of each channel.
    pub(super) struct DeltaGatesArguments {
        // ---- tensors ----
        /// (B, T, H), elements: projected inputs.
        beta_inputs: InputPointer<Elements>,
        /// (B, T, H * W), elements: projected inputs.
        decay_inputs: InputPointer<Elements>,
        /// (H * W), which are added to decay_inputs.
        biases: InputPointer<f32>,
        /// (H): `A_log`.
        log_rates: InputPointer<f32>,
        /// (B, T, H), contiguous.
        betas: OutputPointer<f32>,
        /// (B, T, H, W), contiguous: logarithms of the factors of a state.
        decays: OutputPointer<f32>,
        // ---- strides, in elements; the last dimension of all tensors is contiguous ----
        /// From an entry of `beta_inputs` to the next one.
        beta_entry_stride: i64,
        /// From a token of `beta_inputs` to the next one.
        beta_token_stride: i64,
        /// From an entry of `decay_inputs` to the next one.
        decay_entry_stride: i64,
        /// From a token of `decay_inputs` to the next one.
        decay_token_stride: i64,
        // ---- sizes ----
        /// B, the entries of the batch.
        entries: i32,
        /// T, the tokens of an entry.
        tokens: i32,
        /// H, the heads.
        heads: i32,
        /// W, the decays of a head.
        decay_width: i32,
        // ---- options and numbers ----
        /// 1: decays are lower_bound * sigmoid(rate * x), 0: -rate * softplus(x).
        has_lower_bound: i32,
        /// 0 without a bound.
        lower_bound: f32,
        /// Betas are beta_factor * sigmoid(x).
        beta_factor: f32,
        /// 0: makes the size a multiple of 8 bytes.
        reserved: i32,
    }

    /// The threads of a block.
    const GATES_THREADS: usize = 128;
}

// SAFETY: the calls of this module check shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for DeltaGatesArguments {}

impl RowsCall for DeltaGatesCall {
    type Arguments = DeltaGatesArguments;
    type Shape = GatesShape;

    const OPERATION: &'static str = "gated_delta_net";
    const SOURCE: &'static str = "delta_gates.cu";

    fn elements(&self) -> &Tensor {
        &self.beta
    }

    fn shape(&self) -> std::result::Result<GatesShape, Unsupported> {
        let count = self.decay.elem_count();
        match (self.beta.dims(), self.decay.dims()) {
            (&[b, t, h], &[_, _, decays]) if (1..=i32::MAX as usize).contains(&count) && self.beta.elem_count() > 0 => {
                Ok(GatesShape { b, t, h, decays })
            }
            (beta, decay) => Err(Unsupported::new(format!(
                "the inputs have the shapes {beta:?} and {decay:?}, which no kernel takes"
            ))),
        }
    }

    fn check(&self, shape: GatesShape) -> Result<()> {
        let GatesShape { b, t, h, decays } = shape;
        self.check_tensor("the input of betas", &self.beta, &[b, t, h], self.beta.dtype())?;
        self.check_tensor("the input of decays", &self.decay, &[b, t, decays], self.beta.dtype())?;
        self.check_tensor("biases", &self.biases, &[decays], DType::F32)?;
        self.check_tensor("log_rates", &self.log_rates, &[h], DType::F32)?;
        if !decays.is_multiple_of(h) {
            bail!("[{}] there are {decays} decays, expected a multiple of the {h} heads", Self::OPERATION)
        }
        Ok(())
    }
}

impl DeltaGatesCall {
    /// Checks that a kernel runs the call, and loads the program, which is compiled in the first call. No tensor is
    /// read.
    ///
    /// # Errors
    /// If none does: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        outline::plan(self)
    }

    /// Computes the decays and betas.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or it does not compile or launch.
    pub fn forward(&self) -> Result<DeltaGates> {
        let run = Run::start(self)?;
        let GatesShape { b, t, h, decays } = run.shape;
        let width = decays / h;
        let mut beta = run.allocate(DType::F32, b * t * h)?;
        let mut decay = run.allocate(DType::F32, b * t * decays)?;

        let locks = TensorLocks::default();
        let mut operands = run.operands(&locks);
        let arguments = DeltaGatesArguments {
            beta_inputs: operands.input("beta_inputs", &self.beta)?,
            decay_inputs: operands.input("decay_inputs", &self.decay)?,
            biases: operands.input("biases", &self.biases)?,
            log_rates: operands.input("log_rates", &self.log_rates)?,
            betas: operands.output("betas", &mut beta)?,
            decays: operands.output("decays", &mut decay)?,
            beta_entry_stride: self.beta.stride()[0] as i64,
            beta_token_stride: self.beta.stride()[1] as i64,
            decay_entry_stride: self.decay.stride()[0] as i64,
            decay_token_stride: self.decay.stride()[1] as i64,
            entries: b as i32,
            tokens: t as i32,
            heads: h as i32,
            decay_width: width as i32,
            has_lower_bound: self.decay_lower_bound.is_some().into(),
            lower_bound: self.decay_lower_bound.unwrap_or(0.0) as f32,
            beta_factor: self.beta_factor as f32,
            reserved: 0,
        };
        let grid = Grid::linear((b * t * decays).div_ceil(GATES_THREADS));
        run.launch(&operands, &Launch::new(KERNEL, grid), &arguments)?;
        operands.finish();
        Ok(DeltaGates { beta: beta.into_tensor((b, t, h))?, decay: decay.into_tensor((b, t, h, width))? })
    }
}

/// Returns the programs of all element types.
pub(super) fn entries() -> Vec<CiProgram> {
    outline::entries_of::<DeltaGatesCall>("delta gates", &[KERNEL])
}
