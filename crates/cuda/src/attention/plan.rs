//! The choice of the kernels of a call.

use std::fmt;

use candle_attention_call::RequestedGradients;
use candle_core::Device;

use super::checked::CudaAttention;
use super::checks::CallSizes;
use crate::capability::Limits;
use crate::device::KernelDevice;
use crate::specialization::{Alignment, ModifierGradients, Specialization};
use crate::tiles::{BackwardTile, DecodeTile, ForwardLength, ForwardTile};
use crate::unsupported::Unsupported;

/// The kernel of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ForwardKernel {
    /// Blocks of queries, each of which reads the keys of its head.
    Forward,
    /// Few queries to many keys, which are split over blocks.
    Decode {
        /// The number of parts that the keys are divided into, each with separate blocks.
        splits: usize,
    },
}

impl fmt::Display for ForwardKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forward => f.write_str("the CUDA forward kernel"),
            Self::Decode { splits: 1 } => f.write_str("the CUDA decode kernel"),
            Self::Decode { splits } => write!(f, "the CUDA decode kernel with the keys in {splits} parts"),
        }
    }
}

/// The kernels of a backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackwardKernel {
    /// One kernel for the gradients of queries, keys and values.
    Fused,
    /// A kernel for the gradients of queries, and another for the gradients of keys and values.
    Separate,
}

impl fmt::Display for BackwardKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fused => "the fused CUDA backward kernel",
            Self::Separate => "two CUDA backward kernels",
        })
    }
}

/// The kernel of a forward pass with the tile that it is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ForwardChoice {
    Forward(ForwardTile),
    Decode { tile: DecodeTile, splits: usize },
}

/// The most pairs of a query and a head that share a key head for which keys are split. With more, the forward kernel
/// reads keys less often.
const MOST_DECODE_ROWS: usize = 128;

/// The most parts of the keys.
const MOST_SPLITS: usize = 128;

/// The least number of tiles that a warp of the decode kernel works on, where there are that many.
const LEAST_TILES: usize = 2;

/// The number of tiles that is enough for a block of the decode kernel with many warps. With more, a short cache has
/// too few blocks for all multiprocessors.
const ENOUGH_TILES: usize = 8;

/// Checks that a device runs kernels: its kind, its compute capability, and that NVRTC and the driver work together.
///
/// # Errors
/// If it does not: the sentence says why.
pub fn is_available(device: &Device) -> Result<(), Unsupported> {
    KernelDevice::of(device).map(|_| ())
}

impl CudaAttention {
    /// Returns the kernel of the forward pass. Nothing is compiled, and no tensor is read.
    ///
    /// # Errors
    /// If no kernel runs the call, or it could not be compiled in an earlier call: the sentence says why.
    pub fn plan(&self) -> Result<ForwardKernel, Unsupported> {
        let device = KernelDevice::of(self.call.q.device())?;
        let sizes = self.sizes;
        let choice = self.forward_choice(&sizes, &device.limits())?;
        device.check_known_failure(|| self.forward_program(&device, &sizes, &choice).ok())?;
        Ok(match choice {
            ForwardChoice::Forward(_) => ForwardKernel::Forward,
            ForwardChoice::Decode { splits, .. } => ForwardKernel::Decode { splits },
        })
    }

    /// Returns the kernels of the backward pass.
    ///
    /// # Errors
    /// As [`plan`](Self::plan), and for keys and values of codes or in pages, which have no gradients.
    pub fn plan_backward(&self, wanted: RequestedGradients) -> Result<BackwardKernel, Unsupported> {
        let device = KernelDevice::of(self.call.q.device())?;
        let plan = self.backward_plan(self.sizes, wanted, &device.limits())?;
        device.check_known_failure(|| self.backward_program(&device, &plan).ok())?;
        Ok(if plan.is_fused() { BackwardKernel::Fused } else { BackwardKernel::Separate })
    }

    /// Returns the kernel of the forward pass with its tile, which does not depend on the alignment of tensors.
    ///
    /// # Errors
    /// If no tile fits the device, or a kernel has more blocks than CUDA launches.
    pub(super) fn forward_choice(&self, sizes: &CallSizes, limits: &Limits) -> Result<ForwardChoice, Unsupported> {
        let choice = self.fastest_forward_choice(sizes, limits)?;
        choice.check_blocks(sizes)?;
        Ok(choice)
    }

    fn fastest_forward_choice(&self, sizes: &CallSizes, limits: &Limits) -> Result<ForwardChoice, Unsupported> {
        let specialization = self.specialization(sizes, ModifierGradients::default(), Alignment::FULL);
        let length = ForwardLength::of(sizes.longest_keys, self.call.keys.causal);
        let forward = ForwardTile::choose(&specialization, length, limits.shared_bytes);
        if self.splits_keys(sizes, limits, &forward) {
            let tile = DecodeTile::choose(&specialization, limits.shared_bytes)?;
            let splits = splits(sizes, &tile, limits.multiprocessors);
            return Ok(ForwardChoice::Decode { tile, splits });
        }
        Ok(ForwardChoice::Forward(forward?))
    }

    /// Returns whether the decode kernel is faster than the forward kernel.
    fn splits_keys(&self, sizes: &CallSizes, limits: &Limits, forward: &Result<ForwardTile, Unsupported>) -> bool {
        if self.call.scores.dropout.is_some() {
            return false;
        }
        let rows = sizes.longest_queries * sizes.group();
        let row_blocks = DecodeTile::row_blocks(rows);
        let forward_blocks = match forward {
            Ok(tile) => sizes.longest_queries.div_ceil(tile.queries()) * sizes.heads * sizes.sequences,
            Err(_) => 0,
        };
        row_blocks == 1 || (rows <= MOST_DECODE_ROWS && forward_blocks < limits.multiprocessors)
    }

    /// Returns the specialisation of the backward pass for aligned tensors, and its tile.
    pub(super) fn backward_choice(
        &self,
        sizes: &CallSizes,
        wanted: RequestedGradients,
        limits: &Limits,
    ) -> Result<(Specialization, BackwardTile), Unsupported> {
        if let Some(scales) = &self.call.kv_scales {
            return Err(Unsupported::new(format!("keys and values of {} have no gradients", scales.format)));
        }
        if self.call.pages.is_some() {
            return Err(Unsupported::new("keys and values in pages have no gradients"));
        }
        let specialization = self.specialization(sizes, self.modifier_gradients(wanted), Alignment::FULL);
        let tile = BackwardTile::choose(&specialization, limits.shared_bytes)?;
        Ok((specialization, tile))
    }

    /// Returns the gradients of score modifiers that are requested and that the call has.
    #[doc(hidden)]
    pub fn modifier_gradients(&self, wanted: RequestedGradients) -> ModifierGradients {
        let scores = &self.call.scores;
        ModifierGradients {
            bias: wanted.of.bias && scores.bias.is_some(),
            slopes: wanted.of.alibi_slopes && scores.alibi_slopes.is_some(),
            relative_bias: wanted.of.relative_bias && scores.relative_bias.is_some(),
        }
    }
}

/// Returns the number of parts of the keys: the fewest for which the multiprocessors are nearly as busy as with any.
fn splits(sizes: &CallSizes, tile: &DecodeTile, multiprocessors: usize) -> usize {
    let rows = sizes.longest_queries * sizes.group();
    let blocks = DecodeTile::row_blocks(rows) * sizes.key_heads * sizes.sequences;
    let least_tiles = (LEAST_TILES * tile.warps).min(ENOUGH_TILES);
    let most = (sizes.longest_keys / (least_tiles * tile.keys)).clamp(1, MOST_SPLITS);
    // The part of the time for which a multiprocessor works on a block, if each works on one at a time.
    let use_of_device = |parts: usize| {
        let rounds = (blocks * parts) as f64 / multiprocessors as f64;
        rounds / rounds.ceil()
    };
    let best = (1..=most).map(use_of_device).fold(0.0, f64::max);
    (1..=most).find(|&parts| use_of_device(parts) >= 0.95 * best).unwrap_or(1)
}
