//! The backward pass.

use candle_attention_call::{AttentionDims, OutputLayout, PerInput, RequestedGradients};
use candle_attention_cuda::shared::{
    AttentionArguments, CallSizes, Define, InputAddresses, ModifierGradients, OutputPointer, Pointee,
    SMALL_BLOCK_THREADS, layout_strides, row_strides,
};
use candle_attention_cuda::{BackwardInputs, Unsupported};
use candle_core::{DType, Result, Shape, Tensor};

use crate::backward_tile::MetalBackwardTile;
use crate::call::MetalAttention;
use crate::launch::{MetalLaunch, PairRange, check_groups};
use crate::operands::MetalOperands;
use crate::run::{check_known_failure, is_available, prepare, run};

/// The simdgroups of the kernels without products, each of which works on a row.
const SMALL_BLOCK_SIMDGROUPS: usize = SMALL_BLOCK_THREADS / 32;

/// The shared memory of a kernel that sums over the simdgroups of a threadgroup.
const SUM_BYTES: usize = 4 * SMALL_BLOCK_SIMDGROUPS;

/// The most bytes for the sums of threadgroups, of which the gradient of a relative bias is the sum, unless one
/// sequence and one key head need more. The tests on the emulator have few keys.
const MOST_PART_BYTES: usize = if cfg!(feature = "emulator") { 8 << 10 } else { 256 << 20 };

/// Launches with their operands.
struct PreparedBackward<'t> {
    launches: Vec<MetalLaunch>,
    arguments: AttentionArguments,
    operands: MetalOperands<'t>,
    /// The number of each gradient among the written buffers.
    gradients: PerInput<Option<usize>>,
}

/// The gradients and sums that a backward pass computes.
#[derive(Debug, Clone, Copy)]
struct BackwardNeeds {
    /// The gradient of queries, or of each score.
    queries: bool,
    /// The gradients of keys and values, or what the kernel of keys sums for slopes and relative biases.
    keys: bool,
    modifiers: ModifierGradients,
    sinks: bool,
}

impl MetalAttention {
    /// Checks that the kernels compute some gradients. Nothing is compiled, and no tensor is read.
    ///
    /// # Errors
    /// If they do not, or could not be compiled in an earlier call: the sentence says why.
    pub fn plan_backward(&self, wanted: RequestedGradients) -> std::result::Result<(), Unsupported> {
        let device = self.call().q.device();
        is_available(device)?;
        if self.call().kv_scales.is_some() {
            return Err(Unsupported::new("keys and values that are codes have no gradients"));
        }
        if self.call().pages.is_some() {
            return Err(Unsupported::new("keys and values in pages have no gradients"));
        }
        let tile = self.backward_tile();
        for launch in self.backward_launches(&tile, self.needs(wanted), &[]) {
            check_groups(&format!("the kernel {}", launch.kernel), launch.groups)?;
        }
        let first = || self.prepare_launches(None, wanted).ok()?.launches.into_iter().next();
        check_known_failure(device, first)
    }

    /// Compiles the kernels of the backward pass, for a gradient of the output with the strides of a new tensor.
    ///
    /// # Errors
    /// If no kernel computes it, or one does not compile.
    pub fn prepare_backward(&self, wanted: RequestedGradients) -> Result<()> {
        let device = self.call().q.device();
        is_available(device)?;
        prepare(&self.prepare_launches(None, wanted)?.launches, device)
    }

    /// Computes gradients, the same bits every time, each in the shape and the dtype of its input. Keys and values of a
    /// batch that was expanded have a gradient for each sequence.
    ///
    /// The gradient of a bias takes memory for all scores, (B, H, T_q, T_kv) in f32; no other gradient does.
    ///
    /// # Errors
    /// If the inputs do not fit the call, no kernel runs it, or one does not compile.
    pub fn backward(&self, inputs: &BackwardInputs, wanted: RequestedGradients) -> Result<PerInput<Option<Tensor>>> {
        let device = self.call().q.device();
        is_available(device)?;
        self.checked().check_backward_inputs(inputs)?;
        let PreparedBackward { launches, arguments, operands, gradients } =
            self.prepare_launches(Some(inputs), wanted)?;
        let found = run(&launches, &arguments, operands, device)?;
        let of = |place: Option<usize>| place.map(|number| found[number].clone());
        let PerInput { q, k, v, bias, relative_bias, alibi_slopes, sinks } = gradients.map(of);
        let call = self.call();
        let scores = &call.scores;
        Ok(PerInput {
            q: heads_gradient(q.filter(|_| wanted.of.q), wanted.layout)?,
            k: heads_gradient(k.filter(|_| wanted.of.k), wanted.layout)?,
            v: heads_gradient(v.filter(|_| wanted.of.v), wanted.layout)?,
            bias: modifier_gradient(scores.bias.as_ref(), bias)?,
            relative_bias: modifier_gradient(scores.relative_bias.as_ref(), relative_bias)?,
            alibi_slopes: modifier_gradient(scores.alibi_slopes.as_ref(), alibi_slopes)?,
            sinks: modifier_gradient(scores.sinks.as_ref(), sinks)?,
        })
    }

    fn backward_tile(&self) -> MetalBackwardTile {
        MetalBackwardTile::of(self.columns(), self.call().q.dtype().size_in_bytes())
    }

    /// Returns the gradients and sums that a pass computes for the requested gradients.
    fn needs(&self, wanted: RequestedGradients) -> BackwardNeeds {
        let modifiers = self.checked().modifier_gradients(wanted);
        BackwardNeeds {
            queries: wanted.of.q || modifiers.bias,
            keys: wanted.of.k || wanted.of.v || modifiers.slopes || modifiers.relative_bias,
            modifiers,
            sinks: wanted.of.sinks && self.call().scores.sinks.is_some(),
        }
    }

    /// Returns the threadgroups of keys of the longest sequence.
    fn key_blocks(&self, tile: &MetalBackwardTile) -> usize {
        self.sizes().longest_keys.div_ceil(tile.block())
    }

    /// Returns the number of pairs that one launch of the kernel of keys works on.
    fn pairs_of_launch(&self, tile: &MetalBackwardTile, needs: BackwardNeeds) -> usize {
        if !needs.modifiers.relative_bias {
            return self.sizes().pairs();
        }
        self.sizes().pairs_of_launch(self.key_blocks(tile), MOST_PART_BYTES)
    }

    /// Returns the sequences that have a relative bias.
    fn relative_bias_sequences(&self) -> usize {
        let biases = self.call().scores.relative_bias.as_ref();
        if biases.is_some_and(|own| own.dims()[0] == 1) { 1 } else { self.sizes().sequences }
    }

    /// Returns the launches of all kernels, in the order in which they use each other's results.
    fn backward_launches(
        &self,
        tile: &MetalBackwardTile,
        needs: BackwardNeeds,
        defines: &[Define],
    ) -> Vec<MetalLaunch> {
        let AttentionDims { b, h, t_q, .. } = self.call().dims;
        let &CallSizes { sequences, longest_queries, .. } = self.sizes();
        let small = |kernel, groups, shared_bytes| MetalLaunch {
            kernel,
            defines: defines.to_vec(),
            groups,
            threads: SMALL_BLOCK_THREADS,
            shared_bytes,
            pairs: None,
        };
        let wide = |kernel, groups, shared_bytes| MetalLaunch {
            threads: tile.threads(),
            ..small(kernel, groups, shared_bytes)
        };
        let mut launches = vec![small("attention_backward_delta", t_q.div_ceil(SMALL_BLOCK_SIMDGROUPS) * h * b, 0)];
        if needs.sinks {
            launches.push(small("attention_backward_sinks", h, SUM_BYTES));
        }
        if needs.queries {
            let groups = longest_queries.div_ceil(tile.block()) * h * sequences;
            launches.push(wide("attention_backward_queries", groups, tile.query_shared_bytes()));
        }
        let all_pairs = if needs.keys { self.sizes().pairs() } else { 0 };
        let pairs_of_launch = self.pairs_of_launch(tile, needs);
        for first in (0..all_pairs).step_by(pairs_of_launch) {
            let pairs = PairRange { first, count: pairs_of_launch.min(all_pairs - first) };
            let groups = self.key_blocks(tile) * pairs.count;
            let of_keys = wide("attention_backward_keys", groups, tile.key_shared_bytes());
            launches.push(MetalLaunch { pairs: Some(pairs), ..of_keys });
            if needs.modifiers.relative_bias {
                let of_head = self.sizes().distances().div_ceil(SMALL_BLOCK_THREADS);
                let sums = of_head * h * self.relative_bias_sequences();
                let of_sums = small("attention_backward_relative_bias", sums, 0);
                launches.push(MetalLaunch { pairs: Some(pairs), ..of_sums });
            }
        }
        if let Some(bias) = self.broadcast_bias(needs) {
            let dims = bias.dims();
            let groups = dims[3].div_ceil(SMALL_BLOCK_THREADS) * dims[2] * dims[1] * dims[0];
            launches.push(small("attention_backward_bias", groups, SUM_BYTES));
        }
        if needs.modifiers.slopes {
            launches.push(small("attention_backward_slopes", h, SUM_BYTES));
        }
        launches
    }

    /// Returns the bias, if its gradient is a sum of gradients of scores.
    fn broadcast_bias(&self, needs: BackwardNeeds) -> Option<&Tensor> {
        let AttentionDims { b, h, t_q, t_kv, .. } = self.call().dims;
        let bias = self.call().scores.bias.as_ref().filter(|_| needs.modifiers.bias)?;
        (bias.dims() != [b, h, t_q, t_kv]).then_some(bias)
    }

    /// Returns the launches of a backward pass. Without inputs, those for contiguous ones, for their constants alone.
    fn prepare_launches<'t>(
        &'t self,
        inputs: Option<&BackwardInputs<'t>>,
        wanted: RequestedGradients,
    ) -> Result<PreparedBackward<'t>> {
        let AttentionDims { h, t_q, d_v, .. } = self.call().dims;
        let mut operands = MetalOperands::default();
        let mut arguments = self.checked().arguments(&mut operands)?;
        arguments.output_strides = layout_strides(self.call().output_layout, h, t_q, d_v);
        arguments.output_gradient_strides = arguments.output_strides;
        if let Some(inputs) = inputs {
            arguments.output = operands.input("the output", inputs.output)?.into_output();
            let stats = operands.input("the statistics of the softmax", inputs.softmax_stats)?;
            arguments.row_statistics = stats.into_output();
            arguments.output_gradient = operands.input("the gradient of the output", inputs.output_gradient)?;
            arguments.output_gradient_strides = row_strides(inputs.output_gradient);
            arguments.log_sum_exp_gradient =
                operands.optional_input("the gradient of the log-sum-exp", inputs.log_sum_exp_gradient)?;
        }
        let tile = self.backward_tile();
        let needs = self.needs(wanted);
        let mut gradients = PerInput::default();
        self.set_gradients(&mut arguments, &mut operands, &mut gradients, needs, wanted.layout)?;
        self.set_scratch(&mut arguments, &mut operands, needs, &tile)?;
        let mut defines = self.checked().backward_defines(&arguments, wanted);
        defines.push(Define { name: "KERNEL_SET", value: 4 });
        defines.extend(self.tile_defines());
        let launches = self.backward_launches(&tile, needs, &defines);
        Ok(PreparedBackward { launches, arguments, operands, gradients })
    }

    /// Sets the memory of gradients and their strides.
    fn set_gradients(
        &self,
        arguments: &mut AttentionArguments,
        operands: &mut MetalOperands,
        places: &mut PerInput<Option<usize>>,
        needs: BackwardNeeds,
        layout: OutputLayout,
    ) -> Result<()> {
        let AttentionDims { b, h, h_kv, t_q, t_kv, d, d_v } = self.call().dims;
        let dtype = self.call().q.dtype();
        arguments.query_gradient_strides = layout_strides(layout, h, t_q, d);
        arguments.key_gradient_strides = layout_strides(layout, h_kv, t_kv, d);
        arguments.value_gradient_strides = layout_strides(layout, h_kv, t_kv, d_v);
        if needs.queries {
            let shape = Shape::from(&layout.dims(b, h, t_q, d));
            arguments.query_gradient = output_at(operands, &mut places.q, "the gradient of q", dtype, shape)?;
        }
        if needs.keys {
            let of_k = Shape::from(&layout.dims(b, h_kv, t_kv, d));
            let of_v = Shape::from(&layout.dims(b, h_kv, t_kv, d_v));
            arguments.key_gradient = output_at(operands, &mut places.k, "the gradient of k", dtype, of_k)?;
            arguments.value_gradient = output_at(operands, &mut places.v, "the gradient of v", dtype, of_v)?;
        }
        if needs.modifiers.bias {
            // The gradient of a bias that has all dimensions of the scores is the gradient of the scores.
            places.bias = Some(operands.outputs.len());
            arguments.score_gradient = operands.zeroed("the gradients of scores", DType::F32, (b, h, t_q, t_kv))?;
        }
        if let Some(bias) = self.broadcast_bias(needs) {
            let shape = bias.shape().clone();
            let name = "the gradient of the bias";
            arguments.bias_gradient = output_at(operands, &mut places.bias, name, DType::F32, shape)?;
        }
        if let Some(&[of_sequences, of_heads, of_queries, of_keys]) = self.call().scores.bias.as_ref().map(Tensor::dims)
        {
            arguments.bias_sequences = of_sequences as i32;
            arguments.bias_heads = of_heads as i32;
            arguments.bias_queries = of_queries as i32;
            arguments.bias_keys = of_keys as i32;
        }
        if needs.sinks {
            let name = "the gradient of sinks";
            arguments.sink_gradient = output_at(operands, &mut places.sinks, name, DType::F32, h.into())?;
        }
        if needs.modifiers.slopes {
            let name = "the gradient of slopes";
            arguments.slope_gradient = output_at(operands, &mut places.alibi_slopes, name, DType::F32, h.into())?;
        }
        if needs.modifiers.relative_bias {
            places.relative_bias = Some(operands.outputs.len());
            let shape = (self.relative_bias_sequences(), h, self.sizes().distances());
            arguments.relative_bias_gradient =
                operands.zeroed("the gradient of the relative bias", DType::F32, shape)?;
        }
        Ok(())
    }

    /// Sets the memory of intermediate numbers, and the sizes of a backward pass.
    fn set_scratch(
        &self,
        arguments: &mut AttentionArguments,
        operands: &mut MetalOperands,
        needs: BackwardNeeds,
        tile: &MetalBackwardTile,
    ) -> Result<()> {
        let AttentionDims { b, h, t_q, .. } = self.call().dims;
        let key_blocks = self.key_blocks(tile);
        arguments.delta = operands.output("delta", DType::F32, (b, h, t_q))?;
        if needs.modifiers.slopes {
            let shape = (self.sizes().sequences, h, key_blocks * tile.slope_parts());
            arguments.slope_gradient_parts =
                operands.zeroed("the parts of the gradient of slopes", DType::F32, shape)?;
        }
        if needs.modifiers.relative_bias {
            let shape = (self.pairs_of_launch(tile, needs), self.sizes().relative_bias_parts(key_blocks));
            arguments.relative_bias_parts =
                operands.zeroed("the parts of the gradient of the relative bias", DType::F32, shape)?;
        }
        arguments.key_blocks = key_blocks as i32;
        arguments.blocks = self.sizes().longest_queries.div_ceil(tile.block()) as i32;
        Ok(())
    }
}

/// Adds memory that kernels write, and stores its number.
fn output_at<T: Pointee>(
    operands: &mut MetalOperands,
    place: &mut Option<usize>,
    name: &'static str,
    dtype: DType,
    shape: Shape,
) -> Result<OutputPointer<T>> {
    *place = Some(operands.outputs.len());
    operands.output(name, dtype, shape)
}

/// Returns the gradient of queries, keys or values as (B, H, T, ..).
fn heads_gradient(stored: Option<Tensor>, layout: OutputLayout) -> Result<Option<Tensor>> {
    match (stored, layout) {
        (Some(stored), OutputLayout::Bthd) => Ok(Some(stored.transpose(1, 2)?)),
        (stored, _) => Ok(stored),
    }
}

/// Returns the gradient of a tensor of the score modifiers, if it was computed.
fn modifier_gradient(modifier: Option<&Tensor>, gradient: Option<Tensor>) -> Result<Option<Tensor>> {
    match (modifier, gradient) {
        (Some(modifier), Some(gradient)) => Ok(Some(gradient.reshape(modifier.shape())?.to_dtype(modifier.dtype())?)),
        _ => Ok(None),
    }
}
