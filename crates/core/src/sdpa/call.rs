//! The arguments of attention after every check of shapes, dtypes and devices.

use candle_core::{DType, Result, Tensor, bail};

pub(crate) use super::call_sizes::Qkv;
use super::call_sizes::{check_sequences, check_sizes, check_stored, dims};
use super::codes::decoded;
use super::dropout::DropoutDraw;
use super::options::{Backend, OutputLayout, SdpaOptions};
use super::packed::PackedSequences;
use super::paged::PagedSequences;
use crate::mask::{
    AttentionMask, CallRanges, FullyMaskedRows, ListedKeys, ListedSequence, RowRanges, sequences_of_batch,
};
use candle_attention_call::{AttentionCall, AttentionDims as Dims, KvScales, ScoreFormat};
use candle_attention_kernels::InstructionSet;
use candle_attention_modules::base::{Dim, Expect, accumulation_dtype, transpose_linked};

/// Checked arguments of one attention call.
#[derive(Clone)]
pub(crate) struct Call {
    /// The name of the public function, for errors.
    pub op: &'static str,
    /// The tensors and score modifiers. Keys and values with a batch of one are expanded to B, which copies nothing.
    /// Keys and values in pages are pools (pages, H_kv, page size, ..), views of (pages, page size, ..). A boolean mask
    /// is u8, a bias has the dtype of the scores, or on CUDA that of the queries; both broadcast to (B, H, T_q, T_kv).
    /// Dropout is not drawn yet.
    pub attention: AttentionCall<Tensor, MaskedKeys>,
    pub fully_masked_rows: FullyMaskedRows,
    /// The weights to drop, if some are.
    pub dropout: Option<DropoutDraw>,
    pub backend: Backend,
    pub instruction_set: Option<InstructionSet>,
    /// The reason why no path reads the listed keys alone, if the call had lists of keys and there is one.
    pub lists_obstacle: Option<String>,
}

/// The keys that each query of a call attends to, apart from a boolean mask.
#[derive(Clone)]
pub(crate) struct MaskedKeys {
    /// The range of keys that each query attends to, for a batch or for packed sequences.
    pub ranges: CallRanges,
    /// The sequences of a packed call, whose q, k and v are (1, H, total, D).
    pub sequences: Option<PackedSequences>,
    /// The pages of the sequences, if k and v are pools. `sequences` and `ranges` count keys as if they were packed,
    /// each sequence from position 0 on.
    pub pages: Option<PagedSequences>,
    /// The keys that each query may attend to by lists: those that all of these name.
    pub lists: Vec<ListedKeys>,
}

/// The sizes of a call and its keys, after their checks.
struct CheckedKeys<'a> {
    dims: Dims,
    scales: Option<&'a KvScales<Tensor>>,
    keys: MaskedKeys,
}

impl Call {
    /// Checks the arguments of a public function: tensors of a batch, all of which may lack B, or B and H; or of packed
    /// sequences, q (total_q, H, D), k (total_kv, H_kv, D) and v (total_kv, H_kv, D_v).
    pub fn new(
        op: &'static str,
        qkv: Qkv,
        sequences: Option<&PackedSequences>,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Self> {
        let Qkv { q, k, v } = qkv;
        let rank = if sequences.is_some() { 3 } else { q.rank() };
        if !(2..=4).contains(&rank) {
            bail!("[{op}] q has shape {:?}, expected (B, H, T_q, D), (H, T_q, D) or (T_q, D)", q.dims())
        }
        let expected = match sequences {
            None => [
                ("q", q, ["B", "H", "T_q", "D"]),
                ("k", k, ["B", "H_kv", "T_kv", "D"]),
                ("v", v, ["B", "H_kv", "T_kv", "D_v"]),
            ],
            Some(_) => [
                ("q", q, ["", "total_q", "H", "D"]),
                ("k", k, ["", "total_kv", "H_kv", "D"]),
                ("v", v, ["", "total_kv", "H_kv", "D_v"]),
            ],
        };
        for (name, tensor, dims) in expected {
            Expect::one(op, name, tensor).shape(&dims.map(Dim::Any)[4 - rank..])?;
        }
        let is_packed = sequences.is_some();
        let q = in_four_dims(q, is_packed)?;
        let k = in_four_dims(k, is_packed)?;
        let v = in_four_dims(v, is_packed)?;
        Self::with_all_dims(op, Qkv { q: &q, k: &k, v: &v }, None, sequences, mask, options)
    }

    /// Checks the arguments of a call whose tensors have all four dimensions: a batch; or packed sequences with q (1,
    /// H, total_q, D), k (1, H_kv, total_kv, D) and v (1, H_kv, total_kv, D_v), whose output (1, H, total_q, D_v) is a
    /// view of (1, total_q, H, D_v).
    pub fn with_all_dims(
        op: &'static str,
        qkv: Qkv,
        scales: Option<&KvScales<Tensor>>,
        sequences: Option<&PackedSequences>,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Self> {
        let dims = dims(op, qkv, scales.map(|scales| scales.format))?;
        let Dims { b, h, t_q, t_kv, .. } = dims;
        let scores = if sequences.is_some() { [1; 4] } else { [b, h, t_q, t_kv] };
        check_sizes(op, qkv, dims, scores)?;
        let ranges = match sequences {
            None => mask.ranges_of_batch(b, t_q, t_kv)?,
            Some(sequences) => {
                check_sequences(op, dims, sequences, mask)?;
                mask.ranges_of_packed(op, sequences.rows().collect())?
            }
        };
        let k = expanded(qkv.k, b)?;
        let v = expanded(qkv.v, b)?;
        let lists = listed(mask, dims, sequences)?;
        let keys = MaskedKeys { ranges, sequences: sequences.cloned(), pages: None, lists };
        Self::checked(op, Qkv { q: qkv.q, k: &k, v: &v }, CheckedKeys { dims, scales, keys }, mask, options)
    }

    /// Checks the arguments of a call over pages: packed queries (total_q, H, D), pools of keys (pages, page size,
    /// H_kv, D) and of values (pages, page size, H_kv, D_v), or codes with the scales of their rows (.., 1). The output
    /// is that of packed sequences.
    pub fn over_pages(
        op: &'static str,
        qkv: Qkv,
        scales: Option<&KvScales<Tensor>>,
        sequences: &PagedSequences,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Self> {
        let Qkv { q, k, v } = qkv;
        Expect::one(op, "q", q).shape(&["total_q", "H", "D"].map(Dim::Any))?;
        Expect::one(op, "k_pool", k).shape(&["pages", "page size", "H_kv", "D"].map(Dim::Any))?;
        let [pages, page_size, ..] = *k.dims() else { bail!("[{op}] k_pool has no pages") };
        let pages_dim = Dim::Named("k_pool's pages", pages);
        let size_dim = Dim::Named("k_pool's page size", page_size);
        Expect::one(op, "v_pool", v).shape(&[pages_dim, size_dim, Dim::Any("H_kv"), Dim::Any("D_v")])?;
        let rows = pages.saturating_mul(page_size);
        if !(1..=u32::MAX as usize).contains(&rows) {
            bail!("[{op}] the pools have {pages} pages of {page_size} positions, expected 1 to {} in all", u32::MAX)
        }
        sequences.check_pages(op, pages, page_size)?;
        let k = k.transpose(1, 2)?;
        let v = v.transpose(1, 2)?;
        let q = in_four_dims(q, true)?;
        // The sizes besides the number of keys are the sizes of one page.
        let of_page = Qkv { q: &q, k: &k.narrow(0, 0, 1)?, v: &v.narrow(0, 0, 1)? };
        let packed = sequences.packed();
        let dims = Dims { t_kv: packed.total_keys(), ..dims(op, of_page, scales.map(|scales| scales.format))? };
        check_sizes(op, Qkv { q: &q, k: &k, v: &v }, dims, [1; 4])?;
        check_sequences(op, dims, packed, mask)?;
        let ranges = mask.ranges_of_packed(op, packed.rows().collect())?;
        check_stored(op, ranges.rows(op)?, sequences, mask.fully_masked_rows())?;
        let scales = scales.map(|scales| scales.try_map(|pool| pool.transpose(1, 2))).transpose()?;
        let lists = listed(mask, dims, Some(packed))?;
        let keys = MaskedKeys { ranges, sequences: Some(packed.clone()), pages: Some(sequences.clone()), lists };
        let checked = CheckedKeys { dims, scales: scales.as_ref(), keys };
        Self::checked(op, Qkv { q: &q, k: &k, v: &v }, checked, mask, options)
    }

    /// Checks the dtypes, the devices, the tensors of the mask and the options of a call whose sizes are checked.
    fn checked(
        op: &'static str,
        qkv: Qkv,
        checked: CheckedKeys,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Self> {
        let CheckedKeys { dims, scales, keys } = checked;
        let Qkv { q, k, v } = qkv;
        let is_packed = keys.sequences.is_some();
        let scores = if is_packed { [1; 4] } else { [dims.b, dims.h, dims.t_q, dims.t_kv] };
        for (name, tensor) in [("k", k), ("v", v)] {
            let found = Expect::one(op, name, tensor).same_device("q", q.device())?;
            if scales.is_none() {
                found.dtype(q.dtype(), "q's")?;
            }
        }
        Expect::one(op, "q", q).float("")?;
        let dtype = accumulation_dtype(q.dtype());
        let bool_mask = mask.bool_mask_of_tensors(scores, q.device())?;
        let bias = mask.bias_tensor(scores, bias_dtype(mask, q, dtype), q.device())?;
        let call = Self {
            op,
            attention: AttentionCall {
                dims,
                q: q.clone(),
                k: k.clone(),
                v: v.clone(),
                kv_scales: scales.cloned(),
                pages: None,
                keys,
                scores: options.modifiers(dims.d, bias, bool_mask),
                output_layout: if is_packed { OutputLayout::Bthd } else { options.output_layout },
            },
            fully_masked_rows: mask.fully_masked_rows(),
            dropout: DropoutDraw::new(options),
            backend: options.backend,
            instruction_set: options.instruction_set,
            lists_obstacle: None,
        };
        let distances = (call.most_queries() + call.most_keys()).saturating_sub(1);
        let format = if dtype == DType::F64 { ScoreFormat::F64 } else { ScoreFormat::F32 };
        if let Err(reason) = call.attention.scores.check_numbers(format) {
            bail!("[{op}] {reason}")
        }
        options.check(op, &call.attention.q, distances)?;
        Ok(call)
    }

    /// Returns the range of keys of each query.
    ///
    /// # Errors
    /// If they do not fit in memory.
    pub fn rows(&self) -> Result<&RowRanges> {
        self.attention.keys.ranges.rows(self.op)
    }

    /// Returns T_q, or the most queries of a packed sequence.
    pub fn most_queries(&self) -> usize {
        self.sequences().map_or(self.attention.dims.t_q, PackedSequences::most_queries)
    }

    /// Returns T_kv, or the most keys of a packed sequence.
    pub fn most_keys(&self) -> usize {
        self.sequences().map_or(self.attention.dims.t_kv, PackedSequences::most_keys)
    }

    /// Returns the sequences of a packed call.
    pub fn sequences(&self) -> Option<&PackedSequences> {
        self.attention.keys.sequences.as_ref()
    }

    /// Returns an output (B, H, T_q, D_v) that is contiguous in the call's layout.
    pub fn in_output_layout(&self, output: Tensor) -> Result<Tensor> {
        let layout = self.attention.output_layout;
        swapped_for(layout, swapped_for(layout, output)?.contiguous()?)
    }

    /// Returns keys and values as floats of a dtype.
    pub fn float_keys_and_values(&self, dtype: DType) -> Result<[Tensor; 2]> {
        let AttentionCall { k, v, kv_scales, .. } = &self.attention;
        match kv_scales {
            None => Ok([k.to_dtype(dtype)?, v.to_dtype(dtype)?]),
            Some(KvScales { format, k: of_keys, v: of_values }) => {
                Ok([decoded(k, of_keys, *format, dtype)?, decoded(v, of_values, *format, dtype)?])
            }
        }
    }

    /// Returns (B, H, T_q, T_kv).
    pub fn score_dims(&self) -> [usize; 4] {
        let Dims { b, h, t_q, t_kv, .. } = self.attention.dims;
        [b, h, t_q, t_kv]
    }

    /// Returns whether an input is tracked for gradients.
    pub fn tracks_gradients(&self) -> bool {
        self.attention.differentiable().in_order().into_iter().any(is_tracked)
    }
}

/// Returns whether an input exists and is tracked for gradients.
pub(super) fn is_tracked(input: Option<&Tensor>) -> bool {
    input.is_some_and(Tensor::track_op)
}

/// Returns the dtype of a call's bias, for scores in `scores`. The CUDA kernels read a bias in the dtype of the queries
/// as it is.
fn bias_dtype(mask: &AttentionMask, q: &Tensor, scores: DType) -> DType {
    if q.device().is_cuda() && mask.only_bias_dtype() == Some(q.dtype()) { q.dtype() } else { scores }
}

/// Returns a tensor of a batch as (B, H, T, D), and one of packed sequences (total, H, D) as (1, H, total, D).
fn in_four_dims(tensor: &Tensor, is_packed: bool) -> Result<Tensor> {
    let mut whole = tensor.clone();
    for _ in tensor.rank()..4 {
        whole = whole.unsqueeze(0)?;
    }
    if is_packed { whole.transpose(1, 2) } else { Ok(whole) }
}

/// Returns keys or values with a batch of `b`, as a view.
fn expanded(tensor: &Tensor, b: usize) -> Result<Tensor> {
    let (tensor_b, h_kv, t, d) = tensor.dims4()?;
    if tensor_b == b { Ok(tensor.clone()) } else { tensor.broadcast_as((b, h_kv, t, d)) }
}

/// Returns a view of a tensor (B, H, T, ..) with its dimensions in the order of a layout, or a view (B, H, T, ..) of a
/// tensor in that order.
pub(super) fn swapped_for(layout: OutputLayout, xs: Tensor) -> Result<Tensor> {
    match layout {
        OutputLayout::Bhtd => Ok(xs),
        OutputLayout::Bthd => transpose_linked(&xs, 1, 2),
    }
}

/// Returns the lists of keys of a mask, which have to fit a batch or packed sequences.
fn listed(mask: &AttentionMask, dims: Dims, sequences: Option<&PackedSequences>) -> Result<Vec<ListedKeys>> {
    if !mask.has_key_lists() {
        return Ok(Vec::new());
    }
    mask.listed_keys(dims.b, dims.h_kv, dims.t_q, &listed_sequences(dims, sequences)?)
}

/// Returns the sequences of a call: the entries of its batch, or packed ones.
pub(super) fn listed_sequences(dims: Dims, sequences: Option<&PackedSequences>) -> Result<Vec<ListedSequence>> {
    let Some(packed) = sequences else { return sequences_of_batch(dims.b, dims.t_q, dims.t_kv) };
    let rows = packed.rows().map(|rows| ListedSequence { b: 0, queries: rows.queries, t_kv: rows.keys.len() });
    Ok(rows.collect())
}
