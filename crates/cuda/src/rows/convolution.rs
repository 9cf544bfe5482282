//! The short causal convolution with SiLU.

use candle_core::{DType, Result, Storage, Tensor, bail};

use super::outline::{self, RowsCall, Run};
use crate::ci_programs::CiProgram;
use crate::device::{Grid, KernelArguments, Launch, Operands, TensorLocks};
use crate::element::ElementType;
use crate::kernel_pointers::{Elements, InputPointer, OutputPointer};
use crate::kernel_struct::kernel_struct;
use crate::program::{Define, KernelShape};
use crate::unsupported::Unsupported;

/// The numbers of taps for which kernels are made: their registers have the inputs of all taps.
const WIDTHS: std::ops::RangeInclusive<usize> = 2..=16;

const FORWARD: KernelShape = kernel("convolution_forward");
const BACKWARD: KernelShape = kernel("convolution_backward");
const SUM: KernelShape = kernel("convolution_sum_taps");

const fn kernel(name: &'static str) -> KernelShape {
    KernelShape { name, threads: CONVOLUTION_THREADS, shared_bytes: 0 }
}

/// A convolution of each channel with its own taps: `y[t] = silu(Σ taps[i] x[t - K + 1 + i])`. The last dimension of
/// all tensors is contiguous.
#[derive(Debug, Clone)]
pub struct ConvolutionCall {
    /// (B, T, C), f32, bf16 or f16.
    pub xs: Tensor,
    /// (K, C), f32: the last one is of a token's own input.
    pub taps: Tensor,
    /// The inputs before the first token, (B, K - 1, C), in the dtype of `xs`; zeros if `None`, and for packed
    /// sequences.
    pub state: Option<Tensor>,
    /// The first token of each of N packed sequences, and last the number of all tokens, T. B is 1 then.
    pub cumulative_tokens: Option<Vec<usize>>,
}

/// The results of [`ConvolutionCall::forward`].
pub struct ConvolutionResults {
    /// (B, T, C), contiguous, in the dtype of the inputs.
    pub output: Storage,
    /// The last K - 1 inputs of each entry, (B, K - 1, C), if the call has `with_state`.
    pub next_state: Option<Tensor>,
}

/// The gradients of a convolution.
#[derive(Debug, Clone)]
pub struct ConvolutionGradients {
    /// (B, T, C), in the dtype of the inputs.
    pub xs: Tensor,
    /// (K, C), f32.
    pub taps: Tensor,
}

/// The dimensions of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct ConvolutionShape {
    b: usize,
    t: usize,
    c: usize,
    k: usize,
}

kernel_struct! {
    /// The only argument of the kernels of the short causal convolution.
    ///
    /// B is `entries`, T is `tokens`, C is `channels` and K is CONVOLUTION_WIDTH. Packed sequences are successive rows
    /// of one entry. A pointer that a call does not need is null.
    pub(super) struct ConvolutionArguments {
        // ---- tensors ----
        /// (B, T, C), elements.
        inputs: InputPointer<Elements>,
        /// (K, C): the last one is of a token's own input.
        taps: InputPointer<f32>,
        /// (B, K - 1, C), elements: the inputs before the first token; null: zeros.
        state: InputPointer<Elements>,
        /// (B, T, C), elements, contiguous.
        output: OutputPointer<Elements>,
        /// (B, K - 1, C), elements: the last inputs; null: not stored.
        next_state: OutputPointer<Elements>,
        // ---- sequences ----
        /// (sequences + 1): the first token of each packed sequence, and T. May be null.
        cumulative_tokens: InputPointer<i32>,
        // ---- tensors of the backward pass ----
        /// (B, T, C), elements.
        output_gradient: InputPointer<Elements>,
        /// (B, T, C), elements, contiguous.
        input_gradient: OutputPointer<Elements>,
        /// (B * ceil(T / CONVOLUTION_TOKENS), K, C).
        tap_gradient_parts: OutputPointer<f32>,
        /// (K, C), contiguous.
        tap_gradient: OutputPointer<f32>,
        // ---- strides, in elements; the last dimension of all tensors is contiguous ----
        /// From an entry of `inputs` to the next one.
        input_entry_stride: i64,
        /// From a token of `inputs` to the next one.
        input_token_stride: i64,
        /// From one tap of a channel to the next.
        tap_stride: i64,
        /// From an entry of `state` to the next one.
        state_entry_stride: i64,
        /// From a token of `state` to the next one.
        state_token_stride: i64,
        /// From an entry of `next_state` to the next one.
        next_state_entry_stride: i64,
        /// From a token of `next_state` to the next one.
        next_state_token_stride: i64,
        /// From an entry of `output_gradient` to the next one.
        output_gradient_entry_stride: i64,
        /// From a token of `output_gradient` to the next one.
        output_gradient_token_stride: i64,
        // ---- sizes ----
        /// B, the entries of the batch.
        entries: i32,
        /// T, the tokens of an entry.
        tokens: i32,
        /// C, the channels.
        channels: i32,
        /// Packed sequences, or B.
        sequences: i32,
    }

    /// The tokens of a block.
    const CONVOLUTION_TOKENS: usize = 32;
    /// The threads of a block, each of which has a channel.
    const CONVOLUTION_THREADS: usize = 128;
}

// SAFETY: the calls of this module check shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for ConvolutionArguments {}

impl RowsCall for ConvolutionCall {
    type Arguments = ConvolutionArguments;
    type Shape = ConvolutionShape;

    const OPERATION: &'static str = "short_convolution";
    const SOURCE: &'static str = "convolution.cu";

    fn elements(&self) -> &Tensor {
        &self.xs
    }

    fn shape(&self) -> std::result::Result<ConvolutionShape, Unsupported> {
        let k = self.taps.dims().first().copied().unwrap_or(0);
        if !WIDTHS.contains(&k) {
            return Err(Unsupported::new(format!(
                "the convolution has {k} taps, expected {} to {}",
                WIDTHS.start(),
                WIDTHS.end()
            )));
        }
        let &[b, t, c] = self.xs.dims() else {
            return Err(Unsupported::new(format!(
                "the inputs have the shape {:?}, expected (B, T, C)",
                self.xs.dims()
            )));
        };
        // Indices of tokens behind the last one and of taps of channels are an i32.
        let most = i32::MAX as usize / WIDTHS.end();
        if [b, t, c].contains(&0) || t.max(c) > most {
            return Err(Unsupported::new(format!("the inputs have the shape {:?}, which no kernel takes", [b, t, c])));
        }
        let shape = ConvolutionShape { b, t, c, k };
        block_launch(FORWARD, shape).check()?;
        Ok(shape)
    }

    fn check(&self, shape: ConvolutionShape) -> Result<()> {
        let ConvolutionShape { b, t, c, k } = shape;
        self.check_tensor("the input", &self.xs, &[b, t, c], self.xs.dtype())?;
        self.check_tensor("taps", &self.taps, &[k, c], DType::F32)?;
        if let Some(state) = &self.state {
            self.check_tensor("state", state, &[b, k - 1, c], self.xs.dtype())?;
        }
        if let Some(cumulative) = &self.cumulative_tokens {
            let is_ordered = cumulative.windows(2).all(|ends| ends[0] <= ends[1]);
            if b != 1 || !is_ordered || cumulative.first() != Some(&0) || cumulative.last() != Some(&t) {
                let operation = Self::OPERATION;
                bail!(
                    "[{operation}] sequences are at {cumulative:?} of {b} entries of {t} tokens, expected all of one \
                     entry"
                )
            }
        }
        Ok(())
    }

    fn constants(shape: ConvolutionShape) -> Vec<Define> {
        constants(shape.k)
    }
}

impl ConvolutionCall {
    /// Checks that kernels run the call, and loads the program, which is compiled in the first call. No tensor is read.
    ///
    /// # Errors
    /// If they do not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        outline::plan(self)
    }

    /// Returns the first tokens of packed sequences on the device.
    fn cumulative(&self) -> Result<Option<Tensor>> {
        let Some(cumulative) = &self.cumulative_tokens else { return Ok(None) };
        let tokens: Vec<_> = cumulative.iter().map(|&token| token as i32).collect();
        Tensor::from_vec(tokens, cumulative.len(), self.xs.device()).map(Some)
    }

    /// Computes the outputs, and the last K - 1 inputs of each entry if `with_state`.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or one does not compile or launch; with packed sequences
    /// for `with_state`.
    pub fn forward(&self, with_state: bool) -> Result<ConvolutionResults> {
        let run = Run::start(self)?;
        let ConvolutionShape { b, t, c, k } = run.shape;
        if with_state && self.cumulative_tokens.is_some() {
            let operation = Self::OPERATION;
            bail!("[{operation}] the last inputs of packed sequences are wanted, expected entries of a batch")
        }
        let mut output = run.elements(b * t * c)?;
        let mut next = if with_state { Some(run.elements(b * (k - 1) * c)?) } else { None };
        let cumulative = self.cumulative()?;

        let locks = TensorLocks::default();
        let mut operands = run.operands(&locks);
        let mut arguments = self.arguments(run.shape, cumulative.as_ref(), &mut operands)?;
        arguments.output = operands.output("output", &mut output)?;
        arguments.next_state = operands.optional_output("next_state", next.as_mut())?;
        run.launch(&operands, &block_launch(FORWARD, run.shape), &arguments)?;
        operands.finish();
        let next_state = next.map(|next| next.into_tensor((b, k - 1, c))).transpose()?;
        Ok(ConvolutionResults { output: output.into_storage(), next_state })
    }

    /// Computes the gradients of the inputs and of the taps from the gradient of the output, (B, T, C). The state has
    /// no gradient.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(&self, gradient: &Tensor) -> Result<ConvolutionGradients> {
        let run = Run::start(self)?;
        let ConvolutionShape { b, t, c, k } = run.shape;
        self.check_tensor("the output's gradient", gradient, &[b, t, c], self.xs.dtype())?;
        let mut of_xs = run.elements(b * t * c)?;
        let mut parts = run.allocate(DType::F32, b * t.div_ceil(CONVOLUTION_TOKENS) * k * c)?;
        let mut of_taps = run.allocate(DType::F32, k * c)?;
        let cumulative = self.cumulative()?;

        let locks = TensorLocks::default();
        let mut operands = run.operands(&locks);
        let mut arguments = self.arguments(run.shape, cumulative.as_ref(), &mut operands)?;
        arguments.output_gradient = operands.input("output_gradient", gradient)?;
        arguments.output_gradient_entry_stride = gradient.stride()[0] as i64;
        arguments.output_gradient_token_stride = gradient.stride()[1] as i64;
        arguments.input_gradient = operands.output("input_gradient", &mut of_xs)?;
        arguments.tap_gradient_parts = operands.output("tap_gradient_parts", &mut parts)?;
        arguments.tap_gradient = operands.output("tap_gradient", &mut of_taps)?;
        run.launch(&operands, &block_launch(BACKWARD, run.shape), &arguments)?;
        run.launch(&operands, &sum_launch(run.shape), &arguments)?;
        operands.finish();
        Ok(ConvolutionGradients { xs: of_xs.into_tensor((b, t, c))?, taps: of_taps.into_tensor((k, c))? })
    }

    fn arguments<'t>(
        &'t self,
        shape: ConvolutionShape,
        cumulative: Option<&'t Tensor>,
        operands: &mut Operands<'_, 't>,
    ) -> Result<ConvolutionArguments> {
        let ConvolutionShape { b, t, c, k } = shape;
        let sequences = self.cumulative_tokens.as_ref().map_or(b, |tokens| tokens.len() - 1);
        let mut arguments = ConvolutionArguments {
            inputs: operands.input("inputs", &self.xs)?,
            taps: operands.input("taps", &self.taps)?,
            state: operands.optional_input("state", self.state.as_ref())?,
            cumulative_tokens: operands.optional_input("cumulative_tokens", cumulative)?,
            input_entry_stride: self.xs.stride()[0] as i64,
            input_token_stride: self.xs.stride()[1] as i64,
            tap_stride: self.taps.stride()[0] as i64,
            next_state_entry_stride: ((k - 1) * c) as i64,
            next_state_token_stride: c as i64,
            entries: b as i32,
            tokens: t as i32,
            channels: c as i32,
            sequences: sequences as i32,
            ..ConvolutionArguments::default()
        };
        if let Some(state) = &self.state {
            arguments.state_entry_stride = state.stride()[0] as i64;
            arguments.state_token_stride = state.stride()[1] as i64;
        }
        Ok(arguments)
    }
}

/// Returns the constants of the program for a number of taps.
fn constants(width: usize) -> Vec<Define> {
    vec![Define { name: "CONVOLUTION_WIDTH", value: width as i64 }]
}

/// Returns the programs of the usual number of taps.
pub(super) fn entries() -> Vec<CiProgram> {
    let mut entries = Vec::new();
    for element in ElementType::ALL {
        let name = format!("convolution {} k4", element.name());
        let program = outline::program::<ConvolutionCall>(element, constants(4));
        entries.push(CiProgram::new(&program, name, true, vec![FORWARD, BACKWARD, SUM]));
    }
    entries
}

/// Returns the launch of a kernel over blocks of tokens and channels.
fn block_launch(kernel: KernelShape, ConvolutionShape { b, t, c, .. }: ConvolutionShape) -> Launch {
    let grid = Grid { x: c.div_ceil(CONVOLUTION_THREADS), y: t.div_ceil(CONVOLUTION_TOKENS), z: b };
    Launch::new(kernel, grid)
}

/// Returns the launch of the sum of the gradients of taps.
fn sum_launch(ConvolutionShape { c, k, .. }: ConvolutionShape) -> Launch {
    Launch::new(SUM, Grid::linear((k * c).div_ceil(CONVOLUTION_THREADS)))
}
