//! The decays and betas of a gated delta net.

use candle_core::{DType, Result, Tensor, bail};

use super::{check_tensor, entries_of, program_of};
use crate::arguments::Address;
use crate::catalogue::CatalogueEntry;
use crate::device::{Grid, KernelArguments, KernelDevice, Launch, Operands, Reading};
use crate::element::Element;
use crate::program::KernelShape;
use crate::unsupported::Unsupported;

const OP: &str = "gated_delta_net";

/// The file of the kernels.
const ROOT: &str = "delta_gates.cu";

/// The threads of a block: GATES_THREADS in the source.
const THREADS: usize = 128;

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

/// The argument of the kernel. The source documents the fields.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
struct DeltaGatesArguments {
    beta_inputs: Address,
    decay_inputs: Address,
    biases: Address,
    log_rates: Address,
    betas: Address,
    decays: Address,

    beta_entry_stride: i64,
    beta_token_stride: i64,
    decay_entry_stride: i64,
    decay_token_stride: i64,

    entries: i32,
    tokens: i32,
    heads: i32,
    decay_width: i32,

    has_lower_bound: i32,
    lower_bound: f32,
    beta_factor: f32,
    reserved: i32,
}

// SAFETY: the struct has the fields of the source in the same order, and no padding; the calls of this module check
// shapes, and take addresses from the operands of the launch.
unsafe impl KernelArguments for DeltaGatesArguments {}

impl DeltaGatesCall {
    /// Checks that a kernel runs the call, and loads the program, which is compiled in the first call. No tensor is
    /// read.
    ///
    /// # Errors
    /// If none does: the sentence says why.
    pub fn plan(&self) -> std::result::Result<(), Unsupported> {
        self.check()?;
        KernelDevice::of(self.beta.device())?.prepare(&program_of(ROOT, Element::of(self.beta.dtype())?))
    }

    fn check(&self) -> std::result::Result<(), Unsupported> {
        KernelDevice::of(self.beta.device())?;
        Element::of(self.beta.dtype())?;
        let count = self.decay.elem_count();
        if count == 0 || count > i32::MAX as usize || self.beta.rank() != 3 || self.beta.elem_count() == 0 {
            let shapes = format!("{:?} and {:?}", self.beta.dims(), self.decay.dims());
            return Err(Unsupported::new(format!("the inputs have the shapes {shapes}, which no kernel takes")));
        }
        Ok(())
    }

    /// Computes the decays and betas.
    ///
    /// # Errors
    /// If the call does not fit together, no kernel runs it, or it does not compile or launch.
    pub fn forward(&self) -> Result<DeltaGates> {
        self.check()?;
        let (b, t, h) = self.beta.dims3()?;
        let (_, _, decays) = self.decay.dims3()?;
        check_tensor(OP, "the input of betas", &self.beta, &[b, t, h], self.beta.dtype())?;
        check_tensor(OP, "the input of decays", &self.decay, &[b, t, decays], self.beta.dtype())?;
        check_tensor(OP, "biases", &self.biases, &[decays], DType::F32)?;
        check_tensor(OP, "log_rates", &self.log_rates, &[h], DType::F32)?;
        if !decays.is_multiple_of(h) {
            bail!("[{OP}] there are {decays} decays, expected a multiple of the {h} heads")
        }
        let width = decays / h;
        let device = KernelDevice::of(self.beta.device())?;
        let program = device.load(&program_of(ROOT, Element::of(self.beta.dtype())?))?;
        let mut beta = device.uninitialized(DType::F32, b * t * h)?;
        let mut decay = device.uninitialized(DType::F32, b * t * decays)?;
        {
            let beta_reading = Reading::new(&self.beta);
            let decay_reading = Reading::new(&self.decay);
            let (biases, log_rates) = (Reading::new(&self.biases), Reading::new(&self.log_rates));
            let mut operands = Operands::new(&device);
            let arguments = DeltaGatesArguments {
                beta_inputs: operands.read("beta_inputs", &beta_reading)?,
                decay_inputs: operands.read("decay_inputs", &decay_reading)?,
                biases: operands.read("biases", &biases)?,
                log_rates: operands.read("log_rates", &log_rates)?,
                betas: operands.write("betas", &mut beta)?,
                decays: operands.write("decays", &mut decay)?,
                beta_entry_stride: beta_reading.strides()[0] as i64,
                beta_token_stride: beta_reading.strides()[1] as i64,
                decay_entry_stride: decay_reading.strides()[0] as i64,
                decay_token_stride: decay_reading.strides()[1] as i64,
                entries: b as i32,
                tokens: t as i32,
                heads: h as i32,
                decay_width: width as i32,
                has_lower_bound: self.decay_lower_bound.is_some().into(),
                lower_bound: self.decay_lower_bound.unwrap_or(0.0) as f32,
                beta_factor: self.beta_factor as f32,
                reserved: 0,
            };
            let grid = Grid::linear((b * t * decays).div_ceil(THREADS));
            operands.launch(&program, &Launch::new(KERNEL, grid), &arguments)?;
        }
        Ok(DeltaGates { beta: beta.into_tensor((b, t, h))?, decay: decay.into_tensor((b, t, h, width))? })
    }
}

const KERNEL: KernelShape = KernelShape { name: "delta_gates", threads: THREADS, shared_bytes: 0 };

/// Returns the programs of all element types.
pub(super) fn entries() -> Vec<CatalogueEntry> {
    entries_of(ROOT, "delta gates", &[KERNEL])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source_sizes::{assert_same_layout, source_sizes};

    #[test]
    fn delta_gates_arguments_match_the_source() {
        let sizes = source_sizes(&program_of(ROOT, Element::F32));
        assert_same_layout!(
            sizes,
            DeltaGatesArguments,
            [
                beta_inputs,
                decay_inputs,
                biases,
                log_rates,
                betas,
                decays,
                beta_entry_stride,
                beta_token_stride,
                decay_entry_stride,
                decay_token_stride,
                entries,
                tokens,
                heads,
                decay_width,
                has_lower_bound,
                lower_bound,
                beta_factor,
                reserved
            ]
        );
        assert_eq!(sizes["GATES_THREADS"], THREADS);
    }
}
