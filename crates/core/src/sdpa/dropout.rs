//! The choice of the weights that a call drops.

use candle_attention_modules::init::TorchSeed;

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
