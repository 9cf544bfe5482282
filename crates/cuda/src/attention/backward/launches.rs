//! The launches of a backward pass.

use candle_core::Result;

use super::BackwardPlan;
use crate::arguments::AttentionArguments;
use crate::attention::sizes::Sizes;
use crate::device::{Grid, Launch, LoadedProgram, Operands};
use crate::program::KernelShape;
use crate::tiles::{BackwardKernels, QueryGradient, SMALL_BLOCK_THREADS, SMALL_BLOCK_WARPS};

/// The launches of a backward pass.
pub(super) struct BackwardLaunches<'a> {
    pub operands: &'a Operands<'a>,
    pub program: &'a LoadedProgram,
    pub plan: BackwardPlan,
    pub arguments: AttentionArguments,
}

impl BackwardLaunches<'_> {
    /// Queues all kernels in the order in which they use each other's results.
    pub fn run(&self) -> Result<()> {
        let kernels = self.plan.tile.kernels(&self.plan.specialization);
        self.prepare(&kernels)?;
        match self.plan.tile.queries {
            QueryGradient::Separate(tile) => {
                self.separate_query_gradients(kernels.query_gradients, tile.block())?;
                self.key_gradients(kernels.key_gradients)?;
            }
            QueryGradient::Fused { .. } => {
                self.key_gradients(kernels.key_gradients)?;
                self.finish_query_gradients(kernels.query_gradients)?;
            }
        }
        self.sum_modifier_gradients(&kernels)
    }

    /// Queues a kernel with the arguments of the pass.
    fn launch(&self, kernel: KernelShape, grid: Grid) -> Result<()> {
        self.operands.launch(self.program, &Launch::new(kernel, grid), &self.arguments)
    }

    /// Queues the kernels of delta, of the gradient of sinks, and of the intervals of tiles.
    fn prepare(&self, kernels: &BackwardKernels) -> Result<()> {
        let Sizes { batch, sequences, heads, queries, .. } = self.plan.sizes;
        self.launch(kernels.delta, Grid { x: queries.div_ceil(SMALL_BLOCK_WARPS), y: heads, z: batch })?;
        if self.plan.has_sink_gradient {
            self.launch(kernels.sinks, Grid::linear(heads))?;
        }
        self.launch(kernels.tiles, Grid { x: self.plan.query_tiles(), y: sequences, z: 1 })
    }

    /// Queues the kernel of the gradient of queries, for blocks of `block` queries.
    fn separate_query_gradients(&self, kernel: KernelShape, block: usize) -> Result<()> {
        let Sizes { sequences, heads, longest_queries, .. } = self.plan.sizes;
        let blocks = longest_queries.div_ceil(block);
        let arguments = AttentionArguments { blocks: blocks as i32, ..self.arguments };
        let launch = Launch::new(kernel, Grid::linear(blocks * heads * sequences));
        self.operands.launch(self.program, &launch, &arguments)
    }

    /// Queues the kernel of the gradients of keys and values.
    fn key_gradients(&self, kernel: KernelShape) -> Result<()> {
        let Sizes { sequences, key_heads, .. } = self.plan.sizes;
        let blocks = self.plan.key_blocks();
        let section_heads = self.arguments.section_heads.min((key_heads * sequences) as i32);
        let arguments = AttentionArguments { blocks: blocks as i32, section_heads, ..self.arguments };
        let launch = Launch::new(kernel, Grid::linear(blocks * key_heads * sequences));
        self.operands.launch(self.program, &launch, &arguments)
    }

    /// Queues the kernel that converts the sums of the fused kernel to the gradient of queries.
    fn finish_query_gradients(&self, kernel: KernelShape) -> Result<()> {
        let Sizes { sequences, heads, .. } = self.plan.sizes;
        self.launch(kernel, Grid { x: self.plan.query_tiles(), y: heads, z: sequences })
    }

    /// Queues the kernels that sum the gradients of score modifiers.
    fn sum_modifier_gradients(&self, kernels: &BackwardKernels) -> Result<()> {
        let Sizes { heads, .. } = self.plan.sizes;
        let gradients = self.plan.specialization.gradients;
        if let Some(bias) = self.plan.bias
            && bias.is_broadcast
        {
            let blocks = bias.keys.div_ceil(SMALL_BLOCK_THREADS);
            self.launch(kernels.bias, Grid { x: blocks, y: bias.queries, z: bias.batch * bias.heads })?;
        }
        if gradients.slopes {
            self.launch(kernels.slopes, Grid::linear(heads))?;
        }
        if gradients.relative_bias {
            let blocks = self.plan.sizes.distances().div_ceil(SMALL_BLOCK_THREADS);
            let sequences = self.plan.relative_bias_sequences();
            self.launch(kernels.relative_bias, Grid { x: blocks, y: heads, z: sequences })?;
        }
        Ok(())
    }
}
