//! An attention call whose tensors fit together, and its forward pass.

use std::fmt;

use candle_attention_call::{AttentionCall, AttentionDims, BoundedKeys, RequestedResults};
use candle_attention_cuda::shared::{AttentionArguments, CallSizes, Define, SMALL_BLOCK_THREADS, layout_strides};
use candle_attention_cuda::{CudaAttention, Unsupported};
use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::backward_tile::MetalBackwardTile;
use crate::launch::{MetalLaunch, check_groups};
use crate::operands::MetalOperands;
use crate::run::{check_known_failure, is_available, run};
use crate::tile::{DECODE_ROWS, MetalTile, TileColumns};

/// The kernel of a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetalKernel {
    /// Threadgroups of 32 queries, each of which reads the keys of its head.
    Forward,
    /// Few queries, whose keys are divided over threadgroups.
    Decode {
        /// The number of parts of the keys.
        splits: usize,
    },
}

impl fmt::Display for MetalKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Forward => f.write_str("the Metal forward kernel"),
            Self::Decode { splits: 1 } => f.write_str("the Metal decode kernel"),
            Self::Decode { splits } => write!(f, "the Metal decode kernel with the keys in {splits} parts"),
        }
    }
}

/// The most pairs of a query and a head that share a key head for which the decode kernel runs. With more, the forward
/// kernel reads keys less often.
const MOST_DECODE_ROWS: usize = 16;

/// The threadgroups that the keys are divided for, if there are enough keys: devices have 8 to 80 cores.
const ENOUGH_GROUPS: usize = 128;

/// The least number of tiles of keys of a part.
const LEAST_TILES: usize = 4;

/// An attention call whose tensors fit together, on one Metal device. With the feature `emulator`, on any device.
///
/// It has the dtypes and the strides of [`CudaAttention`], and reads codes of every format.
#[derive(Debug, Clone)]
pub struct MetalAttention {
    checked: CudaAttention,
}

/// The results of a forward pass.
#[derive(Debug, Clone)]
pub struct MetalOutput {
    /// The attention output as it is stored: (B, H, T_q, D_v) or (B, T_q, H, D_v), in the dtype of the queries.
    pub output: Tensor,
    /// The log-sum-exp of the scores in f32 (B, H, T_q), if it was requested; -inf for a fully masked query.
    pub log_sum_exp: Option<Tensor>,
    /// The statistics of the softmax, from which a backward pass computes the weights, in f32 (2, B, H, T_q), if they
    /// were requested.
    pub softmax_stats: Option<Tensor>,
}

impl MetalAttention {
    /// Checks a call.
    ///
    /// # Errors
    /// If its tensors do not fit together, or the kernels do not read them: the sentence says why.
    pub fn new(call: AttentionCall<Tensor, BoundedKeys<Tensor>>) -> std::result::Result<Self, Unsupported> {
        Ok(Self { checked: CudaAttention::new(call)? })
    }

    /// Returns the call.
    pub fn call(&self) -> &AttentionCall<Tensor, BoundedKeys<Tensor>> {
        self.checked.call()
    }

    /// Sets the seed of dropout, u32 (2,) on the device, if weights are dropped.
    pub fn set_dropout_seed(&mut self, seed: Tensor) {
        self.checked.set_dropout_seed(seed);
    }

    /// Returns the call as the kernels read it.
    pub(crate) fn checked(&self) -> &CudaAttention {
        &self.checked
    }

    /// Returns the sizes of the call.
    pub(crate) fn sizes(&self) -> &CallSizes {
        self.checked.sizes()
    }

    /// Returns the columns of tiles.
    pub(crate) fn columns(&self) -> TileColumns {
        let AttentionDims { d, d_v, .. } = self.call().dims;
        TileColumns { of_keys: d.next_multiple_of(16), of_values: d_v.next_multiple_of(16) }
    }

    /// Returns the macros of the tiles of all kernels.
    pub(crate) fn tile_defines(&self) -> Vec<Define> {
        let backward = MetalBackwardTile::of(self.columns(), self.call().q.dtype().size_in_bytes());
        [self.tile().defines(), backward.defines()].concat()
    }

    /// Returns the kernel of the forward pass. Nothing is compiled, and no tensor is read.
    ///
    /// # Errors
    /// If no kernel runs the call, or it could not be compiled in an earlier call: the sentence says why.
    pub fn plan(&self) -> std::result::Result<MetalKernel, Unsupported> {
        let device = self.call().q.device();
        is_available(device)?;
        let tile = self.tile();
        let kernel = self.kernel(&tile);
        check_groups("the call", self.groups(&tile, kernel))?;
        check_known_failure(device, || self.prepare(RequestedResults::default()).ok()?.launches.into_iter().next())?;
        Ok(kernel)
    }

    /// Computes the attention output, and the log-sum-exp and the statistics of the softmax if they are requested.
    ///
    /// # Errors
    /// If other results are requested, no kernel runs the call, or it does not compile.
    pub fn forward(&self, wanted: RequestedResults) -> Result<MetalOutput> {
        if wanted.weights || wanted.statistics.is_some() {
            bail!("the Metal kernels store no attention weights, expected a call for other results")
        }
        let device = self.call().q.device();
        is_available(device)?;
        let PreparedLaunch { launches, arguments, operands } = self.prepare(wanted)?;
        let mut results = run(&launches, &arguments, operands, device)?.into_iter();
        let Some(output) = results.next() else { bail!("the Metal kernels returned no output") };
        let log_sum_exp = if wanted.log_sum_exp { results.next() } else { None };
        let softmax_stats = if wanted.softmax_stats { results.next() } else { None };
        Ok(MetalOutput { output, log_sum_exp, softmax_stats })
    }
}

/// Launches with their operands, of which the results are the first that they write.
struct PreparedLaunch<'t> {
    launches: Vec<MetalLaunch>,
    arguments: AttentionArguments,
    operands: MetalOperands<'t>,
}

impl MetalAttention {
    fn tile(&self) -> MetalTile {
        MetalTile::of(self.columns(), self.call().q.dtype().size_in_bytes())
    }

    /// Returns the number of pairs of a query and a head that share a key head.
    fn decode_rows(&self) -> usize {
        self.sizes().longest_queries * self.sizes().group()
    }

    /// Returns the number of threadgroups of the decode kernel for each part of the keys.
    fn decode_groups(&self) -> usize {
        self.decode_rows().div_ceil(DECODE_ROWS) * self.sizes().pairs()
    }

    /// Returns the kernel that reads the keys less often, or that has enough threadgroups. The decode kernel drops no
    /// weights.
    fn kernel(&self, tile: &MetalTile) -> MetalKernel {
        if self.decode_rows() > MOST_DECODE_ROWS || self.call().scores.dropout.is_some() {
            return MetalKernel::Forward;
        }
        let most = (self.sizes().longest_keys / (LEAST_TILES * tile.keys())).max(1);
        MetalKernel::Decode { splits: ENOUGH_GROUPS.div_ceil(self.decode_groups()).min(most) }
    }

    /// Returns the number of threadgroups of the first launch.
    fn groups(&self, tile: &MetalTile, kernel: MetalKernel) -> usize {
        let &CallSizes { sequences, heads, longest_queries, .. } = self.sizes();
        match kernel {
            MetalKernel::Forward => longest_queries.div_ceil(tile.queries()) * heads * sequences,
            MetalKernel::Decode { splits } => splits * self.decode_groups(),
        }
    }

    /// Returns the launch of the forward pass.
    fn prepare(&self, wanted: RequestedResults) -> Result<PreparedLaunch<'_>> {
        let AttentionDims { b, h, t_q, d_v, .. } = self.call().dims;
        let mut operands = MetalOperands::default();
        let mut arguments = self.checked.arguments(&mut operands)?;
        let layout = self.call().output_layout;
        let shape = Shape::from(&layout.dims(b, h, t_q, d_v));
        arguments.output = operands.output("the output", self.call().q.dtype(), shape)?;
        arguments.output_strides = layout_strides(layout, h, t_q, d_v);
        if wanted.log_sum_exp {
            arguments.log_sum_exp = operands.output("the log-sum-exp", DType::F32, (b, h, t_q))?;
        }
        if wanted.softmax_stats {
            let name = "the statistics of the softmax";
            arguments.row_statistics = operands.output(name, DType::F32, (2, b, h, t_q))?;
        }
        let tile = self.tile();
        let kernel = self.kernel(&tile);
        let mut defines = self.checked.forward_defines(&arguments);
        defines.push(Define { name: "KERNEL_SET", value: 3 });
        defines.extend(self.tile_defines());
        let first = MetalLaunch {
            kernel: "attention_forward",
            defines,
            groups: self.groups(&tile, kernel),
            threads: tile.threads(),
            shared_bytes: tile.shared_bytes(),
            pairs: None,
        };
        let MetalKernel::Decode { splits } = kernel else {
            arguments.blocks = self.sizes().longest_queries.div_ceil(tile.queries()) as i32;
            return Ok(PreparedLaunch { launches: vec![first], arguments, operands });
        };
        arguments.blocks = self.decode_rows().div_ceil(DECODE_ROWS) as i32;
        arguments.splits = splits as i32;
        let rows = b * h * t_q;
        let shared_bytes = tile.decode_shared_bytes();
        let mut launches = vec![MetalLaunch { kernel: "attention_decode", shared_bytes, ..first.clone() }];
        if splits > 1 {
            arguments.partial_outputs = operands.output("the parts of the output", DType::F32, (splits, rows, d_v))?;
            arguments.partial_statistics = operands.output("the statistics of parts", DType::F32, (splits, rows, 2))?;
            launches.push(MetalLaunch {
                kernel: "attention_combine",
                groups: rows.div_ceil(SMALL_BLOCK_THREADS / 32),
                threads: SMALL_BLOCK_THREADS,
                shared_bytes: 0,
                ..first
            });
        }
        Ok(PreparedLaunch { launches, arguments, operands })
    }
}
