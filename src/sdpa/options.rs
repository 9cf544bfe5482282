//! How scores become weights, apart from the mask.

use candle_core::Tensor;

use crate::cpu::Tier;
use crate::init::TorchSeed;

/// Which implementation runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Backend {
    /// The fastest that gives the right numbers for the call; never fails for want of a feature.
    #[default]
    Auto,
    /// Candle's own differentiable operations: the specification, on every device.
    Reference,
    /// A fused kernel, or an error that says why none can run the call.
    Fused,
}

pub use candle_attention_kernels::flash::OutputOrder;

/// Options of [`scaled_dot_product_attention`](crate::scaled_dot_product_attention), built with `with_*`.
#[derive(Debug, Clone, Default)]
#[must_use]
pub struct SdpaOptions {
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) alibi_slopes: Option<Tensor>,
    pub(crate) sinks: Option<Tensor>,
    pub(crate) dropout: f64,
    pub(crate) train: bool,
    pub(crate) dropout_seed: Option<TorchSeed>,
    pub(crate) backend: Backend,
    pub(crate) output_order: OutputOrder,
    pub(crate) cpu_tier: Option<Tier>,
}

impl SdpaOptions {
    /// The factor on q kᵀ; 1/sqrt(D) unless given.
    pub fn with_scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Bounds the scores to ±`softcap` by `softcap · tanh(score / softcap)`, as Gemma 2 does.
    pub fn with_softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// ALiBi: adds `-slope · |query position - key position|` to the scores, a slope for each query head (H,).
    /// See Press et al., <https://arxiv.org/abs/2108.12409>.
    pub fn with_alibi_slopes(mut self, slopes: &Tensor) -> Self {
        self.alibi_slopes = Some(slopes.clone());
        self
    }

    /// Attention sinks: a logit for each query head (H,) that joins the softmax and takes weight, but has no value
    /// (gpt-oss; Xiao et al., <https://arxiv.org/abs/2309.17453>). The weights of a query then sum to less than one.
    pub fn with_sinks(mut self, sinks: &Tensor) -> Self {
        self.sinks = Some(sinks.clone());
        self
    }

    /// Drops weights with probability `p` and divides the others by `1 - p`, if `train` is set.
    pub fn with_dropout(mut self, p: f64, train: bool) -> Self {
        self.dropout = p;
        self.train = train;
        self
    }

    /// Draws the dropout mask from PyTorch's generator instead of the device's, for the same numbers as a PyTorch run.
    pub fn with_dropout_seed(mut self, seed: &TorchSeed) -> Self {
        self.dropout_seed = Some(seed.clone());
        self
    }

    /// Which implementation runs; [`Backend::Auto`] unless given.
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// In which order the context lies in memory; [`OutputOrder::Bhtd`] unless given.
    pub fn with_output_order(mut self, order: OutputOrder) -> Self {
        self.output_order = order;
        self
    }

    /// The instruction set of the fused CPU kernel, for tests and comparisons; the fastest unless given. A call fails if
    /// the processor lacks it.
    pub fn with_cpu_tier(mut self, tier: Tier) -> Self {
        self.cpu_tier = Some(tier);
        self
    }
}
