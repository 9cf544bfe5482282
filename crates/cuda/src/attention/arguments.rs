//! The tensors of a call as kernels read them: addresses, strides, and the alignment of both.

use candle_core::{DType, Result, Tensor};

use super::call::{AttentionCall, DropoutSeed, FirstPosition, OutputLayout};
use super::checks::{Sizes, distance_bound};
use crate::arguments::AttentionArguments;
use crate::device::Operands;
use crate::kernel_pointers::{RowStrides, ScoreStrides};
use crate::specialization::{Alignment, BiasElement, ModifierGradients, Specialization};

/// The bytes that a thread copies at once, at multiples of which rows have to begin.
const COPY_BYTES: i64 = 16;

impl AttentionCall {
    /// Returns arguments with everything that does not depend on the pass.
    ///
    /// # Errors
    /// If a tensor is on another device than the queries.
    pub(super) fn arguments<'t>(
        &'t self,
        sizes: &Sizes,
        operands: &mut Operands<'_, 't>,
    ) -> Result<AttentionArguments> {
        let Self { q, k, v, kv_scales, keys, packed, scores, .. } = self;
        let scales = kv_scales.as_ref();
        let packed = packed.as_ref();
        let intervals = keys.intervals.as_ref();
        let first_positions = match &keys.first_position {
            FirstPosition::Each(positions) => Some(positions),
            FirstPosition::AtEnd | FirstPosition::Same(_) => None,
        };
        let seed = match scores.dropout.as_ref().map(|dropout| &dropout.seed) {
            Some(DropoutSeed::OnDevice(seed)) => Some(seed),
            Some(DropoutSeed::Number(_)) | None => None,
        };
        let mut arguments = AttentionArguments {
            queries: operands.input("q", q)?,
            keys: operands.input("k", k)?,
            values: operands.input("v", v)?,
            key_scales: operands.optional_input("the scales of k", scales.map(|scales| &scales.k))?,
            value_scales: operands.optional_input("the scales of v", scales.map(|scales| &scales.v))?,
            bias: operands.optional_input("the bias", scores.bias.as_ref())?,
            boolean_mask: operands.optional_input("the boolean mask", scores.boolean_mask.as_ref())?,
            alibi_slopes: operands.optional_input("alibi_slopes", scores.alibi_slopes.as_ref())?,
            relative_bias: operands.optional_input("the relative bias", scores.relative_bias.as_ref())?,
            sinks: operands.optional_input("sinks", scores.sinks.as_ref())?,
            dropout_seed: operands.optional_input("the seed of dropout", seed)?,
            cumulative_queries: operands.optional_input("cu_seqlens_q", packed.map(|packed| &packed.cu_seqlens_q))?,
            cumulative_keys: operands.optional_input("cu_seqlens_kv", packed.map(|packed| &packed.cu_seqlens_kv))?,
            first_positions: operands.optional_input("the positions of query 0", first_positions)?,
            key_lengths: operands.optional_input("lengths", keys.lengths.as_ref())?,
            key_starts: operands.optional_input("starts", keys.starts.as_ref())?,
            prefix_lengths: operands.optional_input("prefixes", keys.prefixes.as_ref())?,
            first_keys: operands
                .optional_input("the starts of intervals", intervals.map(|interval| &interval.starts))?,
            end_keys: operands.optional_input("the ends of intervals", intervals.map(|interval| &interval.ends))?,
            query_strides: row_strides(q),
            key_strides: row_strides(k),
            value_strides: row_strides(v),
            ..AttentionArguments::default()
        };
        if let Some(scales) = scales {
            arguments.key_scale_strides = row_strides(&scales.k);
            arguments.value_scale_strides = row_strides(&scales.v);
        }
        if let Some(bias) = &scores.bias {
            arguments.bias_strides = score_strides(bias);
        }
        if let Some(mask) = &scores.boolean_mask {
            arguments.boolean_mask_strides = score_strides(mask);
        }
        if let Some(biases) = &scores.relative_bias {
            let strides = strides_of_used_dims(biases);
            arguments.relative_bias_sequence_stride = strides[0];
            arguments.relative_bias_head_stride = strides[1];
            arguments.relative_bias_length = sizes.distances() as i32;
            arguments.relative_bias_origin = sizes.longest_queries as i32 - 1;
        }
        self.set_numbers(&mut arguments, sizes);
        Ok(arguments)
    }

    /// Sets the sizes, the bounds of keys and the numbers of the score modifiers.
    fn set_numbers(&self, arguments: &mut AttentionArguments, sizes: &Sizes) {
        arguments.sequences = sizes.sequences as i32;
        arguments.heads = sizes.heads as i32;
        arguments.key_heads = sizes.key_heads as i32;
        arguments.query_count = sizes.queries as i32;
        arguments.key_count = sizes.keys as i32;

        let Self { keys, scores, .. } = self;
        if let FirstPosition::Same(position) = keys.first_position {
            arguments.has_first_position = 1;
            arguments.first_position = position;
        }
        arguments.causal = keys.causal.into();
        arguments.window_left = distance_bound(keys.left);
        arguments.window_right = distance_bound(keys.right);
        // A chunk of more positions than there are is the chunk of all that are not negative.
        arguments.chunk = keys.chunk.map_or(0, |chunk| chunk.min(i32::MAX as usize) as i32);

        arguments.splits = 1;
        // Blocks of different lengths, as a causal mask makes them, were faster with a few heads side by side on an
        // H100; blocks of equal length were faster one head after the other.
        let section_heads = if keys.causal { 4 } else { 1 };
        arguments.section_heads = section_heads.min(sizes.heads * sizes.sequences) as i32;

        arguments.scale = scores.scale as f32;
        arguments.softcap = scores.softcap.map_or(0.0, |softcap| softcap as f32);
        if let Some(dropout) = &scores.dropout {
            let kept = 1.0 - dropout.p;
            arguments.kept_weight_factor = if kept > 0.0 { (1.0 / kept) as f32 } else { 0.0 };
            arguments.dropout_threshold = (dropout.p * 2f64.powi(32)).round() as u32;
            if let DropoutSeed::Number(seed) = dropout.seed {
                arguments.dropout_seed_low = seed as u32;
                arguments.dropout_seed_high = (seed >> 32) as u32;
            }
        }
    }
}

impl AttentionCall {
    /// Returns the specialisation of the call for tensors with some alignment.
    pub(super) fn specialization(
        &self,
        sizes: &Sizes,
        gradients: ModifierGradients,
        alignment: Alignment,
    ) -> Specialization {
        let scores = &self.scores;
        let bias = scores.bias.as_ref().map(|bias| match bias.dtype() {
            DType::F32 => BiasElement::F32,
            _ => BiasElement::Element,
        });
        Specialization {
            key_codes: self.kv_scales.is_some(),
            softcap: scores.softcap.is_some(),
            alibi: scores.alibi_slopes.is_some(),
            relative_bias: scores.relative_bias.is_some(),
            bias,
            boolean_mask: scores.boolean_mask.is_some(),
            dropout: scores.dropout.is_some(),
            positive_scale: scores.scale as f32 > 0.0,
            gradients,
            alignment,
            ..Specialization::plain(sizes.element, sizes.head_dim, sizes.value_dim)
        }
    }
}

/// Returns the alignment of the tensors of arguments.
pub(super) fn alignment(arguments: &AttentionArguments, call: &AttentionCall, sizes: &Sizes) -> Alignment {
    let bytes = sizes.element.bytes() as i64;
    let key_bytes = call.k.dtype().size_in_bytes() as i64;
    let rows = [
        aligned_rows(arguments.queries.address(), arguments.query_strides, bytes),
        aligned_rows(arguments.keys.address(), arguments.key_strides, key_bytes),
        aligned_rows(arguments.values.address(), arguments.value_strides, key_bytes),
        aligned_rows(arguments.output.address(), arguments.output_strides, bytes),
        aligned_rows(arguments.output_gradient.address(), arguments.output_gradient_strides, bytes),
        aligned_rows(arguments.query_gradient.address(), arguments.query_gradient_strides, bytes),
        aligned_rows(arguments.key_gradient.address(), arguments.key_gradient_strides, bytes),
        aligned_rows(arguments.value_gradient.address(), arguments.value_gradient_strides, bytes),
    ];
    let bias_bytes = call.scores.bias.as_ref().map_or(0, |bias| bias.dtype().size_in_bytes() as i64);
    Alignment {
        rows: rows.iter().all(|&is_aligned| is_aligned),
        bias: aligned_scores(arguments.bias.address(), arguments.bias_strides, bias_bytes),
        boolean_mask: aligned_scores(arguments.boolean_mask.address(), arguments.boolean_mask_strides, 1),
    }
}

/// Returns whether all rows of a tensor begin at multiples of 16 bytes.
fn aligned_rows(address: u64, strides: RowStrides, bytes: i64) -> bool {
    let RowStrides { sequence, head, row } = strides;
    address.is_multiple_of(COPY_BYTES as u64)
        && [sequence, head, row].iter().all(|stride| stride * bytes % COPY_BYTES == 0)
}

/// Returns whether all rows of a tensor that is broadcast to the scores begin at multiples of 16 bytes, with successive
/// keys side by side.
fn aligned_scores(address: u64, strides: ScoreStrides, bytes: i64) -> bool {
    let ScoreStrides { sequence, head, query, key } = strides;
    key == 1 && aligned_rows(address, RowStrides { sequence, head, row: query }, bytes)
}

/// Returns the strides of a tensor, with 0 for a dimension of one entry, which is broadcast.
fn strides_of_used_dims(tensor: &Tensor) -> Vec<i64> {
    let dims = tensor.dims().iter().zip(tensor.stride());
    dims.map(|(&size, &stride)| if size == 1 { 0 } else { stride as i64 }).collect()
}

/// Returns the strides of a tensor (B, H, T, D).
pub(super) fn row_strides(tensor: &Tensor) -> RowStrides {
    let strides = strides_of_used_dims(tensor);
    RowStrides { sequence: strides[0], head: strides[1], row: strides[2] }
}

/// Returns the strides of a tensor that is broadcast to the scores.
fn score_strides(tensor: &Tensor) -> ScoreStrides {
    let strides = strides_of_used_dims(tensor);
    ScoreStrides { sequence: strides[0], head: strides[1], query: strides[2], key: strides[3] }
}

/// Returns the strides of a tensor (B, H, T, D) whose numbers are in the order of a layout.
pub(super) fn layout_strides(layout: OutputLayout, heads: usize, rows: usize, columns: usize) -> RowStrides {
    let sequence = (heads * rows * columns) as i64;
    match layout {
        OutputLayout::Bhtd => RowStrides { sequence, head: (rows * columns) as i64, row: columns as i64 },
        OutputLayout::Bthd => RowStrides { sequence, head: columns as i64, row: (heads * columns) as i64 },
    }
}
