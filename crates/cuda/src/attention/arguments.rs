//! The tensors of a call as kernels read them: addresses, strides, and the alignment of both.

use candle_attention_call::{
    AttentionCall, BoundedKeys, Dropout, DropoutMask, FirstPosition, Input, Intervals, KvPages, KvScales, OutputLayout,
    RequestedGradients, ScoreModifiers,
};
use candle_core::{DType, Result, Tensor, bail};

use super::call::CudaCall;
use super::checked::CudaAttention;
use super::checks::{CallSizes, distance_bound};
use crate::arguments::AttentionArguments;
use crate::device::Operands;
use crate::kernel_pointers::{InputPointer, Pointee, RowStrides, ScoreStrides};
use crate::program::Define;
use crate::specialization::{Alignment, BiasElement, ModifierGradients, Specialization};

/// The bytes that a thread copies at once, at multiples of which rows have to begin.
const COPY_BYTES: i64 = 16;

/// A list of tensors that launches read, and of their addresses.
pub trait InputAddresses<'t> {
    /// Adds a tensor, and returns the address of its first element.
    ///
    /// # Errors
    /// If kernels cannot read it.
    fn input<T: Pointee>(&mut self, name: &'static str, tensor: &'t Tensor) -> Result<InputPointer<T>>;

    /// Adds a tensor if there is one, and returns its address or null.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    fn optional_input<T: Pointee>(
        &mut self,
        name: &'static str,
        tensor: Option<&'t Tensor>,
    ) -> Result<InputPointer<T>> {
        match tensor {
            Some(tensor) => self.input(name, tensor),
            None => Ok(InputPointer::new(0)),
        }
    }
}

impl<'t> InputAddresses<'t> for Operands<'_, 't> {
    fn input<T: Pointee>(&mut self, name: &'static str, tensor: &'t Tensor) -> Result<InputPointer<T>> {
        Operands::input(self, name, tensor)
    }
}

impl CudaAttention {
    /// Returns the macros of a forward pass with some arguments, without the macros of a tile.
    #[doc(hidden)]
    pub fn forward_defines(&self, arguments: &AttentionArguments) -> Vec<Define> {
        let alignment = alignment(arguments, &self.call, &self.sizes);
        self.specialization(&self.sizes, ModifierGradients::default(), alignment).defines()
    }

    /// Returns the macros of a backward pass with some arguments, without the macros of a tile.
    #[doc(hidden)]
    pub fn backward_defines(&self, arguments: &AttentionArguments, wanted: RequestedGradients) -> Vec<Define> {
        let alignment = alignment(arguments, &self.call, &self.sizes);
        self.specialization(&self.sizes, self.modifier_gradients(wanted), alignment).defines()
    }

    /// Returns arguments with everything that does not depend on the pass.
    ///
    /// # Errors
    /// If a tensor is on another device than the queries.
    #[doc(hidden)]
    pub fn arguments<'t>(&'t self, operands: &mut impl InputAddresses<'t>) -> Result<AttentionArguments> {
        let AttentionCall { dims: _, q, k, v, kv_scales, pages, keys, scores, output_layout: _ } = &self.call;
        let sizes = &self.sizes;
        let mut arguments = AttentionArguments {
            queries: operands.input(Input::Q.name(), q)?,
            keys: operands.input(Input::K.name(), k)?,
            values: operands.input(Input::V.name(), v)?,
            query_strides: row_strides(q),
            key_strides: row_strides(k),
            value_strides: row_strides(v),
            ..AttentionArguments::default()
        };
        if let Some(KvScales { format: _, k: of_keys, v: of_values }) = kv_scales {
            arguments.key_scales = operands.input(Input::KeyScales.name(), of_keys)?;
            arguments.value_scales = operands.input(Input::ValueScales.name(), of_values)?;
            arguments.key_scale_strides = row_strides(of_keys);
            arguments.value_scale_strides = row_strides(of_values);
        }
        if let Some(KvPages { table, page_size }) = pages {
            arguments.page_table = operands.input(Input::PageTable.name(), table)?;
            arguments.page_table_width = table.dim(1)? as i32;
            arguments.page_shift = page_size.trailing_zeros() as i32;
        }
        set_sizes(&mut arguments, sizes);
        set_keys(&mut arguments, operands, keys)?;
        set_scores(&mut arguments, operands, scores, sizes)?;
        arguments.splits = 1;
        // Blocks of different lengths, as a causal mask makes them, were faster with a few heads side by side on an
        // H100; blocks of equal length were faster one head after the other.
        let section_heads = if keys.causal { 4 } else { 1 };
        arguments.section_heads = section_heads.min(sizes.heads * sizes.sequences) as i32;
        Ok(arguments)
    }
}

/// Sets the sizes.
fn set_sizes(arguments: &mut AttentionArguments, sizes: &CallSizes) {
    arguments.sequences = sizes.sequences as i32;
    arguments.heads = sizes.heads as i32;
    arguments.key_heads = sizes.key_heads as i32;
    arguments.query_count = sizes.queries as i32;
    arguments.key_count = sizes.keys as i32;
}

/// Sets the lists and the bounds of keys.
fn set_keys<'t>(
    arguments: &mut AttentionArguments,
    operands: &mut impl InputAddresses<'t>,
    bounded: &'t BoundedKeys<Tensor>,
) -> Result<()> {
    let BoundedKeys { packed, first_position, causal, left, right, chunk, starts, lengths, prefixes, intervals } =
        bounded;
    if let Some(packed) = packed {
        arguments.cumulative_queries = operands.input(Input::CumulativeQueries.name(), &packed.cu_seqlens_q)?;
        arguments.cumulative_keys = operands.input(Input::CumulativeKeys.name(), &packed.cu_seqlens_kv)?;
    }
    match first_position {
        FirstPosition::AtEnd => {}
        FirstPosition::Same(position) => {
            arguments.has_first_position = 1;
            arguments.first_position = *position;
        }
        FirstPosition::Each(positions) => {
            arguments.first_positions = operands.input(Input::FirstPositions.name(), positions)?;
        }
    }
    arguments.causal = (*causal).into();
    arguments.window_left = distance_bound(*left);
    arguments.window_right = distance_bound(*right);
    // A chunk of more positions than there are is the chunk of all that are not negative.
    arguments.chunk = chunk.map_or(0, |chunk| chunk.min(i32::MAX as usize) as i32);
    arguments.key_starts = operands.optional_input(Input::Starts.name(), starts.as_ref())?;
    arguments.key_lengths = operands.optional_input(Input::Lengths.name(), lengths.as_ref())?;
    arguments.prefix_lengths = operands.optional_input(Input::Prefixes.name(), prefixes.as_ref())?;
    if let Some(Intervals { starts: first_keys, ends: end_keys }) = intervals {
        arguments.first_keys = operands.input(Input::IntervalStarts.name(), first_keys)?;
        arguments.end_keys = operands.input(Input::IntervalEnds.name(), end_keys)?;
    }
    Ok(())
}

/// Sets the tensors and the numbers of the score modifiers.
fn set_scores<'t>(
    arguments: &mut AttentionArguments,
    operands: &mut impl InputAddresses<'t>,
    scores: &'t ScoreModifiers<Tensor>,
    sizes: &CallSizes,
) -> Result<()> {
    let ScoreModifiers { scale, softcap, alibi_slopes, relative_bias, bias, boolean_mask, sinks, dropout } = scores;
    arguments.scale = *scale as f32;
    arguments.softcap = softcap.map_or(0.0, |softcap| softcap as f32);
    arguments.alibi_slopes = operands.optional_input(Input::AlibiSlopes.name(), alibi_slopes.as_ref())?;
    arguments.sinks = operands.optional_input(Input::Sinks.name(), sinks.as_ref())?;
    if let Some(biases) = relative_bias {
        arguments.relative_bias = operands.input(Input::RelativeBias.name(), biases)?;
        let strides = strides_of_used_dims(biases);
        arguments.relative_bias_sequence_stride = strides[0];
        arguments.relative_bias_head_stride = strides[1];
        arguments.relative_bias_length = sizes.distances() as i32;
        arguments.relative_bias_origin = sizes.longest_queries as i32 - 1;
    }
    if let Some(bias) = bias {
        arguments.bias = operands.input(Input::Bias.name(), bias)?;
        arguments.bias_strides = score_strides(bias);
    }
    if let Some(mask) = boolean_mask {
        arguments.boolean_mask = operands.input(Input::BooleanMask.name(), mask)?;
        arguments.boolean_mask_strides = score_strides(mask);
    }
    if let Some(Dropout { p, mask }) = dropout {
        let kept = 1.0 - p;
        arguments.kept_weight_factor = if kept > 0.0 { (1.0 / kept) as f32 } else { 0.0 };
        arguments.dropout_threshold = (p * 2f64.powi(32)).round() as u32;
        match mask {
            DropoutMask::Philox(seed) => {
                arguments.dropout_seed_low = *seed as u32;
                arguments.dropout_seed_high = (seed >> 32) as u32;
            }
            DropoutMask::PhiloxOnDevice(seed) => {
                arguments.dropout_seed = operands.input(Input::Dropout.name(), seed)?;
            }
            DropoutMask::KeptBits(_) => bail!("a bit for each weight was given, expected a seed of dropout"),
        }
    }
    Ok(())
}

impl CudaAttention {
    /// Returns the specialisation of the call for tensors with some alignment.
    pub(super) fn specialization(
        &self,
        sizes: &CallSizes,
        gradients: ModifierGradients,
        alignment: Alignment,
    ) -> Specialization {
        let ScoreModifiers { scale, softcap, alibi_slopes, relative_bias, bias, boolean_mask, sinks: _, dropout } =
            &self.call.scores;
        let bias = bias.as_ref().map(|bias| match bias.dtype() {
            DType::F32 => BiasElement::F32,
            _ => BiasElement::Element,
        });
        Specialization {
            key_codes: self.call.kv_scales.as_ref().map(|scales| scales.format),
            key_pages: self.call.pages.is_some(),
            softcap: softcap.is_some(),
            alibi: alibi_slopes.is_some(),
            relative_bias: relative_bias.is_some(),
            bias,
            boolean_mask: boolean_mask.is_some(),
            dropout: dropout.is_some(),
            positive_scale: *scale as f32 > 0.0,
            gradients,
            alignment,
            ..Specialization::plain(sizes.element, sizes.head_dim, sizes.value_dim)
        }
    }
}

/// Returns the alignment of the tensors of arguments.
pub(super) fn alignment(arguments: &AttentionArguments, call: &CudaCall, sizes: &CallSizes) -> Alignment {
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
pub fn row_strides(tensor: &Tensor) -> RowStrides {
    let strides = strides_of_used_dims(tensor);
    RowStrides { sequence: strides[0], head: strides[1], row: strides[2] }
}

/// Returns the strides of a tensor that is broadcast to the scores.
fn score_strides(tensor: &Tensor) -> ScoreStrides {
    let strides = strides_of_used_dims(tensor);
    ScoreStrides { sequence: strides[0], head: strides[1], query: strides[2], key: strides[3] }
}

/// Returns the strides of a tensor (B, H, T, D) whose numbers are in the order of a layout.
pub fn layout_strides(layout: OutputLayout, heads: usize, rows: usize, columns: usize) -> RowStrides {
    let strides = layout.strides(heads, rows, columns);
    RowStrides { sequence: strides.sequence as i64, head: strides.head as i64, row: strides.position as i64 }
}
