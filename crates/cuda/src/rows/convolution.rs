//! The short causal convolution with SiLU.

use candle_core::{DType, Result, Storage, Tensor, bail};

use super::check_tensor;
use crate::arguments::Address;
use crate::catalogue::CatalogueEntry;
use crate::device::{Grid, KernelArguments, KernelDevice, Launch, LoadedProgram, Operands, Reading};
use crate::element::Element;
use crate::program::{Define, KernelShape, Program};
use crate::unsupported::Unsupported;

const OP: &str = "short_convolution";

/// The numbers of taps for which kernels are made: their registers have the inputs of all taps.
const WIDTHS: std::ops::RangeInclusive<usize> = 2..=16;

/// The tokens and the channels of a block: CONVOLUTION_TOKENS and CONVOLUTION_THREADS in the source.
const TOKENS: usize = 32;
const THREADS: usize = 128;

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
struct Sizes {
    b: usize,
    t: usize,
    c: usize,
    k: usize,
}

/// The argument of the kernels. The source documents the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct ConvolutionArguments {
    inputs: Address,
    taps: Address,
    state: Address,
    output: Address,
    next_state: Address,

    cumulative_tokens: Address,

    output_gradient: Address,
    input_gradient: Address,
    tap_gradient_parts: Address,
    tap_gradient: Address,

    input_entry_stride: i64,
    input_token_stride: i64,
    tap_stride: i64,
    state_entry_stride: i64,
    state_token_stride: i64,
    next_state_entry_stride: i64,
    next_state_token_stride: i64,
    output_gradient_entry_stride: i64,
    output_gradient_token_stride: i64,

    entries: i32,
    tokens: i32,
    channels: i32,
    sequences: i32,
}

// SAFETY: the struct has the fields of the source in the same order, and no padding; the calls of this module check
// shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for ConvolutionArguments {}

impl ConvolutionCall {
    /// Checks that kernels run the call, and loads the program, which is compiled in the first call. No tensor is read.
    ///
    /// # Errors
    /// If they do not: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        self.check()?;
        KernelDevice::of(self.xs.device())?.prepare(&program(Element::of(self.xs.dtype())?, self.taps.dims()[0]))
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        KernelDevice::of(self.xs.device())?;
        Element::of(self.xs.dtype())?;
        let width = self.taps.dims().first().copied().unwrap_or(0);
        if !WIDTHS.contains(&width) {
            return Err(Unsupported::new(format!(
                "the convolution has {width} taps, expected {} to {}",
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
        block_launch("convolution_forward", Sizes { b, t, c, k: width }).check()
    }

    fn sizes(&self) -> Result<Sizes> {
        self.check()?;
        let (b, t, c) = self.xs.dims3()?;
        let (k, _) = self.taps.dims2()?;
        check_tensor(OP, "the input", &self.xs, &[b, t, c], self.xs.dtype())?;
        check_tensor(OP, "taps", &self.taps, &[k, c], DType::F32)?;
        if let Some(state) = &self.state {
            check_tensor(OP, "state", state, &[b, k - 1, c], self.xs.dtype())?;
        }
        if let Some(cumulative) = &self.cumulative_tokens {
            let is_ordered = cumulative.windows(2).all(|ends| ends[0] <= ends[1]);
            if b != 1 || !is_ordered || cumulative.first() != Some(&0) || cumulative.last() != Some(&t) {
                bail!("[{OP}] sequences are at {cumulative:?} of {b} entries of {t} tokens, expected all of one entry")
            }
        }
        Ok(Sizes { b, t, c, k })
    }

    fn load(&self, device: &KernelDevice, sizes: Sizes) -> Result<LoadedProgram> {
        Ok(device.load(&program(Element::of(self.xs.dtype())?, sizes.k))?)
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
        let sizes = self.sizes()?;
        let Sizes { b, t, c, k } = sizes;
        if with_state && self.cumulative_tokens.is_some() {
            bail!("[{OP}] the last inputs of packed sequences are wanted, expected entries of a batch")
        }
        let device = KernelDevice::of(self.xs.device())?;
        let program = self.load(&device, sizes)?;
        let mut output = device.uninitialized(self.xs.dtype(), b * t * c)?;
        let mut next = if with_state { Some(device.uninitialized(self.xs.dtype(), b * (k - 1) * c)?) } else { None };
        let cumulative = self.cumulative()?;
        {
            let readings = Readings::new(self, cumulative.as_ref());
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(sizes, &readings, &mut operands)?;
            arguments.output = operands.write("output", &mut output)?;
            if let Some(next) = &mut next {
                arguments.next_state = operands.write("next_state", next)?;
            }
            operands.launch(&program, &block_launch("convolution_forward", sizes), &arguments)?;
        }
        let next_state = next.map(|next| next.into_tensor((b, k - 1, c))).transpose()?;
        Ok(ConvolutionResults { output: output.into_storage(), next_state })
    }

    /// Computes the gradients of the inputs and of the taps from the gradient of the output, (B, T, C). The state has
    /// no gradient.
    ///
    /// # Errors
    /// As [`forward`](Self::forward).
    pub fn backward(&self, gradient: &Tensor) -> Result<ConvolutionGradients> {
        let sizes = self.sizes()?;
        let Sizes { b, t, c, k } = sizes;
        check_tensor(OP, "the output's gradient", gradient, &[b, t, c], self.xs.dtype())?;
        let device = KernelDevice::of(self.xs.device())?;
        let program = self.load(&device, sizes)?;
        let mut of_xs = device.uninitialized(self.xs.dtype(), b * t * c)?;
        let mut parts = device.uninitialized(DType::F32, b * t.div_ceil(TOKENS) * k * c)?;
        let mut of_taps = device.uninitialized(DType::F32, k * c)?;
        let cumulative = self.cumulative()?;
        {
            let readings = Readings::new(self, cumulative.as_ref());
            let gradient_reading = Reading::new(gradient);
            let mut operands = Operands::new(&device);
            let mut arguments = self.arguments(sizes, &readings, &mut operands)?;
            arguments.output_gradient = operands.read("output_gradient", &gradient_reading)?;
            arguments.output_gradient_entry_stride = gradient_reading.strides()[0] as i64;
            arguments.output_gradient_token_stride = gradient_reading.strides()[1] as i64;
            arguments.input_gradient = operands.write("input_gradient", &mut of_xs)?;
            arguments.tap_gradient_parts = operands.write("tap_gradient_parts", &mut parts)?;
            arguments.tap_gradient = operands.write("tap_gradient", &mut of_taps)?;
            operands.launch(&program, &block_launch("convolution_backward", sizes), &arguments)?;
            operands.launch(&program, &sum_launch(sizes), &arguments)?;
        }
        Ok(ConvolutionGradients { xs: of_xs.into_tensor((b, t, c))?, taps: of_taps.into_tensor((k, c))? })
    }

    fn arguments<'a>(
        &self,
        sizes: Sizes,
        readings: &'a Readings,
        operands: &mut Operands<'a>,
    ) -> Result<ConvolutionArguments> {
        let Sizes { b, t, c, k } = sizes;
        let sequences = self.cumulative_tokens.as_ref().map_or(b, |cumulative| cumulative.len() - 1);
        let xs_strides = readings.xs.strides();
        let mut arguments = ConvolutionArguments {
            inputs: operands.read("inputs", &readings.xs)?,
            taps: operands.read("taps", &readings.taps)?,
            input_entry_stride: xs_strides[0] as i64,
            input_token_stride: xs_strides[1] as i64,
            tap_stride: readings.taps.strides()[0] as i64,
            next_state_entry_stride: ((k - 1) * c) as i64,
            next_state_token_stride: c as i64,
            entries: b as i32,
            tokens: t as i32,
            channels: c as i32,
            sequences: sequences as i32,
            ..ConvolutionArguments::default()
        };
        if let Some(state) = &readings.state {
            arguments.state = operands.read("state", state)?;
            arguments.state_entry_stride = state.strides()[0] as i64;
            arguments.state_token_stride = state.strides()[1] as i64;
        }
        if let Some(cumulative) = &readings.cumulative {
            arguments.cumulative_tokens = operands.read("cumulative_tokens", cumulative)?;
        }
        Ok(arguments)
    }
}

/// The tensors of a call while launches read them.
struct Readings<'t> {
    xs: Reading<'t>,
    taps: Reading<'t>,
    state: Option<Reading<'t>>,
    cumulative: Option<Reading<'t>>,
}

impl<'t> Readings<'t> {
    fn new(call: &'t ConvolutionCall, cumulative: Option<&'t Tensor>) -> Self {
        Self {
            xs: Reading::new(&call.xs),
            taps: Reading::new(&call.taps),
            state: call.state.as_ref().map(Reading::new),
            cumulative: cumulative.map(Reading::new),
        }
    }
}

/// Returns the program of an element type and a number of taps.
fn program(element: Element, width: usize) -> Program {
    let defines = vec![element.define(), Define { name: "CONVOLUTION_WIDTH", value: width as i64 }];
    Program { root: "convolution.cu", defines }
}

/// Returns the programs of the usual number of taps.
pub(super) fn entries() -> Vec<CatalogueEntry> {
    let kernel = |name| KernelShape { name, threads: THREADS, shared_bytes: 0 };
    let names = ["convolution_forward", "convolution_backward", "convolution_sum_taps"];
    let mut entries = Vec::new();
    for element in Element::ALL {
        let name = format!("convolution {} k4", element.name());
        entries.push(CatalogueEntry::new(&program(element, 4), name, true, names.map(kernel).into()));
    }
    entries
}

/// Returns the launch of a kernel over blocks of tokens and channels.
fn block_launch(kernel: &'static str, Sizes { b, t, c, .. }: Sizes) -> Launch {
    let grid = Grid { x: c.div_ceil(THREADS), y: t.div_ceil(TOKENS), z: b };
    Launch { kernel, grid, threads: THREADS, shared_bytes: 0 }
}

/// Returns the launch of the sum of the gradients of taps.
fn sum_launch(Sizes { c, k, .. }: Sizes) -> Launch {
    let grid = Grid::linear((k * c).div_ceil(THREADS));
    Launch { kernel: "convolution_sum_taps", grid, threads: THREADS, shared_bytes: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_sizes::{assert_same_layout, source_sizes};

    #[test]
    fn convolution_arguments_match_the_source() {
        let sizes = source_sizes(&program(Element::F32, 4));
        assert_same_layout!(
            sizes,
            ConvolutionArguments,
            [
                inputs,
                taps,
                state,
                output,
                next_state,
                cumulative_tokens,
                output_gradient,
                input_gradient,
                tap_gradient_parts,
                tap_gradient,
                input_entry_stride,
                input_token_stride,
                tap_stride,
                state_entry_stride,
                state_token_stride,
                next_state_entry_stride,
                next_state_token_stride,
                output_gradient_entry_stride,
                output_gradient_token_stride,
                entries,
                tokens,
                channels,
                sequences
            ]
        );
        assert_eq!((sizes["CONVOLUTION_TOKENS"], sizes["CONVOLUTION_THREADS"]), (TOKENS, THREADS));
    }
}
