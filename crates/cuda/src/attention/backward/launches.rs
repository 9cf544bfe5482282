//! The launches of a backward pass.

use candle_core::Result;

use super::BackwardPlan;
use crate::arguments::{AttentionArguments, SMALL_BLOCK_THREADS};
use crate::attention::checks::CallSizes;
use crate::device::{Grid, Launch, LoadedProgram, Operands};
use crate::program::KernelShape;
use crate::tiles::{BackwardKernels, QueryGradient, SMALL_BLOCK_WARPS};

/// A launch of a backward pass.
pub(super) struct BackwardLaunch {
    pub launch: Launch,
    /// The blocks of a kernel of the gradients of queries or keys; `None` for other kernels.
    places: Option<BlockPlaces>,
    /// The pairs that a launch of the kernel of the gradients of keys works on, or a launch of the kernel that sums
    /// the gradients of a relative bias.
    pairs: Option<Pairs>,
}

/// Successive pairs of a sequence and a key head.
#[derive(Clone, Copy)]
struct Pairs {
    first: usize,
    count: usize,
}

/// The blocks of a kernel of the gradients of queries or keys. A block computes from its index and these numbers which
/// head and tile it works on.
#[derive(Clone, Copy)]
struct BlockPlaces {
    /// The number of blocks of a head of a sequence.
    blocks: usize,
    /// The number of heads of all sequences together.
    heads: usize,
}

impl BackwardPlan {
    /// Returns the launches of all kernels, in the order in which they use each other's results.
    pub(super) fn launches(&self) -> Vec<BackwardLaunch> {
        let kernels = self.tile.kernels(&self.specialization);
        let mut launches = self.preparing_launches(&kernels);
        match self.tile.queries {
            QueryGradient::Separate(tile) => {
                launches.push(self.query_gradients(kernels.query_gradients, tile.block()));
                launches.extend(self.key_gradients(&kernels));
            }
            QueryGradient::Fused { .. } => {
                let CallSizes { sequences, heads, .. } = self.sizes;
                launches.extend(self.key_gradients(&kernels));
                // The sums of the fused kernel become the gradient of queries.
                let grid = Grid { x: self.query_tiles(), y: heads, z: sequences };
                launches.push(BackwardLaunch::new(kernels.query_gradients, grid));
            }
        }
        launches.extend(self.modifier_sums(&kernels));
        launches
    }

    /// Returns the launches of the kernels of delta, of the gradient of sinks, and of the intervals of tiles.
    fn preparing_launches(&self, kernels: &BackwardKernels) -> Vec<BackwardLaunch> {
        let CallSizes { batch, sequences, heads, queries, .. } = self.sizes;
        let rows = Grid { x: queries.div_ceil(SMALL_BLOCK_WARPS), y: heads, z: batch };
        let mut launches = vec![BackwardLaunch::new(kernels.delta, rows)];
        if self.has_sink_gradient {
            launches.push(BackwardLaunch::new(kernels.sinks, Grid::linear(heads)));
        }
        launches.push(BackwardLaunch::new(kernels.tiles, Grid { x: self.query_tiles(), y: sequences, z: 1 }));
        launches
    }

    /// Returns the launch of the kernel of the gradient of queries, for blocks of `block` queries.
    fn query_gradients(&self, kernel: KernelShape, block: usize) -> BackwardLaunch {
        let CallSizes { sequences, heads, longest_queries, .. } = self.sizes;
        BackwardLaunch::with_places(kernel, longest_queries.div_ceil(block), heads * sequences)
    }

    /// Returns the launches of the kernel of the gradients of keys and values, each with that of the kernel that sums
    /// the gradients of a relative bias.
    fn key_gradients(&self, kernels: &BackwardKernels) -> Vec<BackwardLaunch> {
        let blocks = self.key_blocks();
        let all_pairs = self.sizes.pairs();
        let pairs_of_launch = self.pairs_of_launch();
        let mut launches = Vec::new();
        for first in (0..all_pairs).step_by(pairs_of_launch) {
            let pairs = Pairs { first, count: pairs_of_launch.min(all_pairs - first) };
            let mut of_keys = BackwardLaunch::with_places(kernels.key_gradients, blocks, pairs.count);
            of_keys.pairs = Some(pairs);
            launches.push(of_keys);
            if self.specialization.gradients.relative_bias {
                let x = self.sizes.distances().div_ceil(SMALL_BLOCK_THREADS);
                let grid = Grid { x, y: self.sizes.heads, z: self.relative_bias_sequences() };
                let mut of_sums = BackwardLaunch::new(kernels.relative_bias, grid);
                of_sums.pairs = Some(pairs);
                launches.push(of_sums);
            }
        }
        launches
    }

    /// Returns the launches of the kernels that sum the gradients of the bias and of slopes.
    fn modifier_sums(&self, kernels: &BackwardKernels) -> Vec<BackwardLaunch> {
        let CallSizes { heads, .. } = self.sizes;
        let gradients = self.specialization.gradients;
        let mut launches = Vec::new();
        if let Some(bias) = self.bias
            && bias.is_broadcast
        {
            let blocks = bias.keys.div_ceil(SMALL_BLOCK_THREADS);
            let grid = Grid { x: blocks, y: bias.queries, z: bias.batch * bias.heads };
            launches.push(BackwardLaunch::new(kernels.bias, grid));
        }
        if gradients.slopes {
            launches.push(BackwardLaunch::new(kernels.slopes, Grid::linear(heads)));
        }
        launches
    }
}

impl BackwardLaunch {
    fn new(kernel: KernelShape, grid: Grid) -> Self {
        Self { launch: Launch::new(kernel, grid), places: None, pairs: None }
    }

    fn with_places(kernel: KernelShape, blocks: usize, heads: usize) -> Self {
        let grid = Grid { x: blocks, y: heads, z: 1 };
        Self { launch: Launch::new(kernel, grid), places: Some(BlockPlaces { blocks, heads }), pairs: None }
    }

    /// Queues the kernel with the arguments of the pass.
    pub fn queue(&self, operands: &Operands, program: &LoadedProgram, arguments: &AttentionArguments) -> Result<()> {
        let mut own = *arguments;
        if let Some(BlockPlaces { blocks, heads }) = self.places {
            own.blocks = blocks as i32;
            own.section_heads = own.section_heads.min(i32::try_from(heads).unwrap_or(i32::MAX));
        }
        if let Some(Pairs { first, count }) = self.pairs {
            own.first_pair = first as i32;
            own.pairs = count as i32;
        }
        operands.launch(program, &self.launch, &own)
    }
}
