//! The choice of the weights that a call drops.

use candle_attention_call::{Dropout, DropoutMask};
use candle_attention_modules::init::TorchSeed;
use candle_core::{DType, Device, Result, Tensor};

use super::options::SdpaOptions;

/// Dropout of weights, which is still to be drawn.
#[derive(Debug, Clone)]
pub(crate) struct DropoutDraw {
    /// The probability with which a weight is dropped.
    pub p: f64,
    pub source: DropoutSource,
}

/// A source of the weights to drop.
#[derive(Debug, Clone)]
pub(crate) enum DropoutSource {
    /// PyTorch's generator.
    Torch(TorchSeed),
    /// A seed of Philox.
    Philox(u64),
    /// The generator of the device.
    Device,
}

impl DropoutDraw {
    /// Returns the dropout that options set; `None` if no weight is dropped.
    pub fn new(options: &SdpaOptions) -> Option<Self> {
        if !options.drops() {
            return None;
        }
        let source = match (&options.dropout_seed, options.dropout_philox_seed) {
            (Some(seed), _) => DropoutSource::Torch(seed.clone()),
            (None, Some(seed)) => DropoutSource::Philox(seed),
            (None, None) => DropoutSource::Device,
        };
        Some(Self { p: options.dropout, source })
    }

    /// Returns whether PyTorch's generator draws the weights.
    pub fn is_torch(&self) -> bool {
        matches!(self.source, DropoutSource::Torch(_))
    }
}

/// The dropout of a call for the kernels of a GPU.
pub(super) struct KernelDropout {
    pub dropout: Option<Dropout<Tensor>>,
    /// Whether a seed is still to be drawn, when the call runs.
    pub draws_seed: bool,
}

impl KernelDropout {
    /// Returns the dropout of a call.
    ///
    /// # Errors
    /// If the kernels do not draw its weights: the sentence says why.
    pub fn of(draw: Option<&DropoutDraw>) -> std::result::Result<Self, String> {
        let Some(DropoutDraw { p, source }) = draw else { return Ok(Self { dropout: None, draws_seed: false }) };
        let (seed, draws_seed) = match source {
            DropoutSource::Torch(_) => return Err("PyTorch's generator draws the dropout mask on the CPU".into()),
            DropoutSource::Philox(seed) => (*seed, false),
            DropoutSource::Device => (0, true),
        };
        Ok(Self { dropout: Some(Dropout { p: *p, mask: DropoutMask::Philox(seed) }), draws_seed })
    }
}

/// Draws a seed from the generator of a device, which stays there: 24 bits of each of two numbers.
pub(super) fn draw_seed(device: &Device) -> Result<Tensor> {
    let numbers = Tensor::rand(0f32, 1f32, 2, device)?;
    numbers.affine(f64::from(1 << 24), 0.0)?.to_dtype(DType::U32)
}
