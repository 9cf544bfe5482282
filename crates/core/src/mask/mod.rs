//! The keys that each query may attend to.
//!
//! An [`AttentionMask`] is a list of constraints, combined with AND. [`AttentionMask::resolve`] checks them against a
//! shape and returns one range of keys for each query, so that a kernel only reads keys that are attended to. Only
//! boolean masks and biases are tensors in memory.

mod bounds;
mod call_ranges;
mod chunks;
mod constraint;
mod key_lists;
mod lens;
mod new_tokens;
mod origin;
mod packed_lists;
mod padding;
mod parts;
mod placement;
mod ranges;
mod tensors;
mod tokenizer;
mod tree;
mod windows;

pub use key_lists::KeyLists;
pub use lens::ValidLens;
pub use ranges::KeyRanges;
pub use tokenizer::rows_of_ones;
pub use tree::{TokenTree, check_trees, tree_of};
pub use windows::Windows;

pub(crate) use bounds::KeyBounds;
pub(crate) use call_ranges::CallRanges;
pub(crate) use chunks::KeyPositions;
pub(crate) use key_lists::{ListPlace, ListedKeys, ListedSequence, sequences_of_batch, with_listed_keys};
pub(crate) use new_tokens::{NewTokenCall, NewTokenMask};
pub(crate) use packed_lists::SequenceLists;
pub(crate) use padding::OtherOffset;
pub(crate) use placement::{PackedRows, Placement};
pub(crate) use ranges::{RowRanges, union_of};

use std::ops::Range;
use std::sync::Arc;

use candle_core::{Result, Tensor};
use constraint::{Constraint, QueryAlignment, Reach};
use placement::Placements;
use tokenizer::Tokenized;

use candle_attention_modules::base::{Dim, Expect, OptionalRef};

const OP: &str = "attention_mask";

/// The name of a boolean mask in errors.
const BOOL_MASK: &str = "bool_mask";

/// The weights of a fully masked row: of a query that may not attend to any key.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FullyMaskedRows {
    /// All weights are zero, and so is the attention output.
    #[default]
    Zero,
    /// Every key has the weight 1/T_kv, masked or not: the numbers of d2l's `masked_softmax`, which fills scores with
    /// -1e6 instead of masking them. See <https://d2l.ai>, "Attention Scoring Functions". JAX, flax and Keras fill
    /// scores in the same way. A sink has no part in such a row.
    Uniform,
}

/// A mask: which keys each query may attend to, and biases of the scores.
///
/// A mask is a set of constraints, combined with AND. All but boolean masks, biases and key lists reduce to one range
/// of keys for each query, and fused kernels skip blocks of keys outside of the ranges. [`resolve`](Self::resolve)
/// shows these ranges:
///
/// ```
/// use candle_attention::AttentionMask;
/// # fn main() -> candle_core::Result<()> {
/// let mask = AttentionMask::causal().with_window(3);
/// let ranges = mask.resolve(1, 4, 5)?;
/// assert_eq!(ranges.to_string(), "\
/// 1 1 . . .
/// 1 1 1 . .
/// . 1 1 1 .
/// . . 1 1 1
/// ");
/// assert_eq!(ranges.kv_range(0, 2), 1..4);
/// # Ok(()) }
/// ```
///
/// # Positions
///
/// Query i is at the key position `i + T_kv - T_q`, so that the last query is at the last key, unless
/// [`causal_upper_left`](Self::causal_upper_left), [`causal_with_offset`](Self::causal_with_offset) or
/// [`causal_with_offsets`](Self::causal_with_offsets) says otherwise. Windows and ALiBi count from this position, and a
/// query's chunk is the one with this position.
///
/// # Errors
///
/// Builders do not fail. A mask is checked where it is used, or by [`resolve`](Self::resolve), since only there B, T_q
/// and T_kv are known.
#[derive(Debug, Clone, Default)]
pub struct AttentionMask {
    constraints: Vec<Constraint>,
    /// u8; a query may attend to a key if no entry is 0.
    bool_masks: Vec<Tensor>,
    /// Added to the scores.
    biases: Vec<Tensor>,
    /// A query may attend to a key if all of them name it.
    key_lists: Vec<KeyLists>,
    /// The locations of the queries and keys of a call in their sequences, unless they are whole sequences.
    placements: Option<Placements>,
    fully_masked_rows: FullyMaskedRows,
}

/// Masks that other constraints can be added to.
impl AttentionMask {
    /// Returns a mask that masks nothing: every query attends to every key.
    pub fn none() -> Self {
        Self::default()
    }

    /// Returns a causal mask that is aligned to the end: a query does not attend to keys after its own, and the last
    /// query is at the last key. This is right for new queries with a longer cache. If T_q > T_kv, the first queries
    /// attend to nothing.
    #[doc(alias("is_causal", "tril", "triu"))]
    pub fn causal() -> Self {
        Self::aligned(QueryAlignment::End)
    }

    /// Returns a causal mask that is aligned to the beginning: query i attends to keys `0..=i`, for any T_kv. This
    /// is `is_causal` of PyTorch's `scaled_dot_product_attention`.
    ///
    /// In a call that continues a cache, query 0 would attend to the first key only. Such a call is an error: it needs
    /// [`causal`](Self::causal).
    #[doc(alias = "is_causal")]
    pub fn causal_upper_left() -> Self {
        Self::aligned(QueryAlignment::Offset(0))
    }

    /// Returns a causal mask with an offset: query i attends to keys `0..=i + n`.
    pub fn causal_with_offset(n: usize) -> Self {
        Self::aligned(QueryAlignment::Offset(n))
    }

    /// Returns a causal mask with an offset for each of B sequences: query i of sequence b attends to keys
    /// `0..=i + offsets[b]`, and to none if that is below 0.
    ///
    /// This is for sequences of different lengths in one buffer of keys. If the last query of each is at its last key,
    /// the offsets are the lengths less T_q. Offsets for another B are an error where the mask is used.
    ///
    /// ```
    /// use candle_attention::AttentionMask;
    /// # fn main() -> candle_core::Result<()> {
    /// let lens = [4, 1];
    /// let offsets = lens.map(|len| len - 2);
    /// let ranges = AttentionMask::causal_with_offsets(offsets).resolve(2, 2, 5)?;
    /// assert_eq!(ranges.to_string(), "1 1 1 . .\n1 1 1 1 .\n\n. . . . .\n1 . . . .\n");
    /// # Ok(()) }
    /// ```
    pub fn causal_with_offsets(offsets: impl Into<Arc<[i64]>>) -> Self {
        Self::aligned(QueryAlignment::Offsets(offsets.into()))
    }

    /// Returns the mask of a tokenizer's attention mask (B, T_kv), which has ones for tokens and zeros for padding, in
    /// any dtype: `attention_mask` of transformers, and the inverse of PyTorch's `key_padding_mask`.
    ///
    /// If the ones of every row are consecutive, the mask becomes starts and lengths, so that padding is not computed;
    /// otherwise it becomes a boolean mask. A row of zeros masks every key, and a warning is logged once: a mask with 1
    /// for padding has such rows.
    ///
    /// With a cache, T_kv is the length of the longest sequence with the call. Padding that
    /// [`AttentionInput::with_starts`](crate::AttentionInput::with_starts) or `with_valid_lens` named is not in the
    /// cache and has no column. A mask with columns for it, as transformers passes it in every step, is an error.
    ///
    /// # Errors
    /// For another rank, and for a value other than 0 and 1. Another T_kv is an error where the mask is used.
    #[doc(alias("key_padding_mask", "padding_mask"))]
    pub fn from_attention_mask(mask: &Tensor) -> Result<Self> {
        Expect::one("from_attention_mask", "the mask", mask).shape(&["B", "T_kv"].map(Dim::Any))?;
        let mask = &tensors::readable(mask)?;
        let rows = rows_of_ones("from_attention_mask", mask)?;
        let columns = mask.dim(1)?;
        if rows.iter().all(|row| !row.has_gaps) {
            return Ok(Self::of_runs(rows.iter().map(|row| row.start..row.end), columns));
        }
        let allowed = mask.ne(&mask.zeros_like()?)?.unsqueeze(1)?.unsqueeze(1)?;
        let ends = rows.iter().map(|row| row.end).collect();
        let bool_mask = Self { bool_masks: vec![allowed], ..Self::none() };
        Ok(bool_mask.with(Constraint::Tokenized(Tokenized { columns, ends, has_gaps: true })))
    }

    /// Returns the mask of sequences whose tokens begin and end at these columns.
    #[doc(hidden)]
    pub fn of_runs(runs: impl Iterator<Item = Range<usize>>, columns: usize) -> Self {
        let mut starts = Vec::new();
        let mut ends = Vec::new();
        for run in runs {
            starts.push(run.start);
            ends.push(run.end);
        }
        let tokenized = Tokenized { columns, ends: ends.as_slice().into(), has_gaps: false };
        let mask = Self::none().with_valid_lens(ends).with(Constraint::Tokenized(tokenized));
        if starts.iter().any(|&start| start > 0) { mask.with_starts(starts) } else { mask }
    }

    fn aligned(alignment: QueryAlignment) -> Self {
        Self::none().with(Constraint::Aligned(alignment, Reach::Causal { prefix: Vec::new() }))
    }
}

/// Builders: each adds a constraint.
impl AttentionMask {
    /// Masks the keys at and past a length, which is given for each sequence (B,) or for each query (B, T_q): d2l's
    /// `valid_lens`, and padding on the right. A length above T_kv masks nothing; in a call of a layer without a cache,
    /// where it is usually a mistake, a warning is logged once.
    ///
    /// With a cache, lengths count the positions of earlier calls too. The cache stores keys that a mask masks, as
    /// [`with_starts`](Self::with_starts) says;
    /// [`AttentionInput::with_valid_lens`](crate::AttentionInput::with_valid_lens) does not store padding.
    #[doc(alias("key_padding_mask", "padding"))]
    #[must_use]
    pub fn with_valid_lens(self, lens: impl Into<ValidLens>) -> Self {
        self.with(Constraint::ValidLens(lens.into()))
    }

    /// Masks the keys before a start, which is given for each sequence (B,) or for each query (B, T_q): padding on the
    /// left, documents that were packed in one sequence. [Chunks](Self::with_chunk) count from the start.
    ///
    /// With a cache, starts count the positions of earlier calls too. The cache stores keys that a mask masks, so the
    /// mask of every later call has to mask them again. A later mask without starts, lengths and tensors is logged as a
    /// warning, once. [`AttentionInput::with_starts`](crate::AttentionInput::with_starts) does not store padding, and
    /// starts of masks do not count it.
    #[doc(alias = "left_padding")]
    #[must_use]
    pub fn with_starts(self, starts: impl Into<ValidLens>) -> Self {
        self.with(Constraint::Starts(starts.into()))
    }

    /// Masks the keys more than `w - 1` positions before the query's own: a sliding window of `w` keys with the query's
    /// own, `sliding_window` of transformers. Later keys are not masked.
    ///
    /// Errors where the mask is used: a window of 0, and a window that was set on joined masks (see [`and`](Self::and))
    /// whose queries are at different positions.
    #[doc(alias = "sliding_window")]
    #[must_use]
    pub fn with_window(self, w: usize) -> Self {
        match w.checked_sub(1) {
            Some(left) => self.with_aligned("with_window", Reach::Window { left, right: usize::MAX }),
            None => self.with(Constraint::empty("window")),
        }
    }

    /// Masks the keys more than `left` positions before the query's own and more than `right` positions after it: local
    /// attention of encoders.
    ///
    /// Setting it on joined masks whose queries are at different positions is an error where the mask is used.
    #[must_use]
    pub fn with_local_window(self, left: usize, right: usize) -> Self {
        self.with_aligned("with_local_window", Reach::Window { left, right })
    }

    /// Masks the keys outside of the query's chunk: positions 0 to `size - 1` are the first chunk, `size` to
    /// `2 · size - 1` the second, and so on. This is `attention_chunk_size` of Llama 4.
    ///
    /// Positions count from the first key of the query's sequence, so that a padded row, and each of several documents
    /// in one row, has the chunks that it has alone. The first key is the last one by [starts](Self::with_starts), and
    /// by padding on the left that tensors name: the first columns of a boolean mask or a bias that no query attends
    /// to. In a bias, -inf and the smallest number of its dtype mask a key. The tensors are copied to the CPU for this.
    /// In a layer, [`AttentionInput::with_positions`](crate::AttentionInput::with_positions) sets other positions.
    ///
    /// ```
    /// use candle_attention::AttentionMask;
    /// # fn main() -> candle_core::Result<()> {
    /// let ranges = AttentionMask::causal().with_chunk(2).resolve(1, 4, 4)?;
    /// assert_eq!(ranges.to_string(), "1 . . .\n1 1 . .\n. . 1 .\n. . 1 1\n");
    /// # Ok(()) }
    /// ```
    ///
    /// Errors where the mask is used: chunks of 0, and chunks that were set on joined masks whose queries are at
    /// different positions.
    #[doc(alias = "attention_chunk_size")]
    #[must_use]
    pub fn with_chunk(self, size: usize) -> Self {
        match size {
            0 => self.with(Constraint::empty("chunk")),
            _ => self.with_aligned("with_chunk", Reach::Chunk(size)),
        }
    }

    /// Allows every query to attend to the first keys, up to the prefix length of its sequence: prefix LM. It relaxes
    /// the causal constraint of this mask, and that of a layer that the mask is passed to. Windows, lengths and starts
    /// still mask these keys, and without a causal constraint a prefix changes nothing.
    ///
    /// A prefix that was set on joined masks with different causal constraints is an error where the mask is used.
    #[must_use]
    pub fn with_prefix(mut self, prefix: impl Into<ValidLens>) -> Self {
        let prefix = prefix.into();
        let mut causal_constraints = self.constraints.iter().filter_map(|constraint| match constraint {
            Constraint::Aligned(alignment, Reach::Causal { prefix: prefixes }) => Some((alignment, prefixes)),
            _ => None,
        });
        let first = causal_constraints.next();
        if causal_constraints.any(|other| Some(other) != first) {
            return self.with(Constraint::ambiguous("with_prefix"));
        }
        self.relax(&prefix);
        self.with(Constraint::Prefix(prefix))
    }

    /// Masks every key whose entry is 0. The mask has u8 entries of 1 (attend) and 0, and broadcasts to (B, H, T_q,
    /// T_kv) from the right: a boolean `attn_mask` of PyTorch's `scaled_dot_product_attention`. `None` masks nothing.
    ///
    /// Two dimensions are (T_q, T_kv). A padding mask (B, T_kv) is for
    /// [`from_attention_mask`](Self::from_attention_mask), or has to be (B, 1, 1, T_kv): if B equals T_q, (B, T_kv)
    /// would mask other keys without an error. A mask (B, T_q, T_kv) has to be (B, 1, T_q, T_kv).
    ///
    /// Other entries than 0 and 1 are an error where the mask is used. Entries on a CPU are checked now; on another
    /// device, where the check would have to wait for them, every entry but 0 counts as 1.
    #[doc(alias("attn_mask", "attention_mask", "key_padding_mask"))]
    #[must_use]
    pub fn with_bool_mask<'a>(mut self, mask: impl OptionalRef<'a, Tensor>) -> Self {
        let Some(mask) = mask.into_option() else { return self };
        self.bool_masks.push(mask.clone());
        match tensors::largest_entry(mask) {
            Some(entry) if entry > 1 => {
                let wrong = format!("{BOOL_MASK} has an entry {entry}, expected 1 (attend) or 0");
                self.with(Constraint::Wrong(wrong))
            }
            _ => self,
        }
    }

    /// Adds a float tensor to the scores: a float `attn_mask` of PyTorch's `scaled_dot_product_attention`. It
    /// broadcasts to (B, H, T_q, T_kv) like a [boolean mask](Self::with_bool_mask), and gradients flow into it. `None`
    /// adds nothing.
    ///
    /// It is added after the softcap, so it is not bounded by it, and before keys are masked.
    #[doc(alias("attn_mask", "attention_mask"))]
    #[must_use]
    pub fn with_bias<'a>(mut self, bias: impl OptionalRef<'a, Tensor>) -> Self {
        self.biases.extend(bias.into_option().cloned());
        self
    }

    /// Sets the weights of queries that may not attend to any key. The default is [`FullyMaskedRows::Zero`].
    #[must_use]
    pub fn with_fully_masked_rows(self, fully_masked_rows: FullyMaskedRows) -> Self {
        Self { fully_masked_rows, ..self }
    }

    /// Returns the mask without boolean masks, biases and lists of keys.
    fn without_tensors(&self) -> Self {
        Self {
            constraints: self.constraints.clone(),
            placements: self.placements.clone(),
            fully_masked_rows: self.fully_masked_rows,
            ..Self::none()
        }
    }

    /// Returns both masks combined: a query attends to the keys that both allow, and biases add up. Windows and
    /// prefixes of each mask count by that mask's own causal constraint. Fully masked rows are uniform if either mask
    /// says so.
    ///
    /// If the two place a query at different positions, ALiBi cannot count from one, which is an error. So are a window
    /// and a chunk that are set afterwards.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let mut both = self.clone();
        both.constraints.extend_from_slice(&other.constraints);
        both.bool_masks.extend_from_slice(&other.bool_masks);
        both.biases.extend_from_slice(&other.biases);
        both.key_lists.extend_from_slice(&other.key_lists);
        match (&self.placements, &other.placements) {
            (_, None) => {}
            (None, Some(placements)) => both.placements = Some(placements.clone()),
            (Some(placements), Some(others)) if placements == others => {}
            (Some(_), Some(_)) => return both.with(Constraint::different_parts()),
        }
        if other.fully_masked_rows == FullyMaskedRows::Uniform {
            both.fully_masked_rows = FullyMaskedRows::Uniform;
        }
        both
    }

    /// Returns this mask with its causal constraints relaxed by the prefixes of another, as a layer's own mask is by
    /// the prefixes of the caller's.
    pub(crate) fn with_prefixes_of(&self, other: &Self) -> Self {
        let mut relaxed = self.clone();
        for constraint in &other.constraints {
            if let Constraint::Prefix(prefix) = constraint {
                relaxed.relax(prefix);
            }
        }
        relaxed
    }

    fn with(mut self, constraint: Constraint) -> Self {
        self.constraints.push(constraint);
        self
    }

    /// Adds a constraint that counts from the query's position by the mask's other constraints, or from the end if
    /// these have none.
    fn with_aligned(self, builder: &str, reach: Reach) -> Self {
        let mut alignments = self.constraints.iter().filter_map(Constraint::alignment);
        let alignment = alignments.next().unwrap_or(&QueryAlignment::End).clone();
        let is_clear = alignments.all(|other| *other == alignment);
        self.with(if is_clear { Constraint::Aligned(alignment, reach) } else { Constraint::ambiguous(builder) })
    }

    /// Relaxes the causal constraints for the keys before a prefix.
    fn relax(&mut self, prefix: &ValidLens) {
        for constraint in &mut self.constraints {
            if let Constraint::Aligned(_, Reach::Causal { prefix: prefixes }) = constraint {
                prefixes.push(prefix.clone());
            }
        }
    }
}

/// Getters.
impl AttentionMask {
    /// Returns whether nothing is masked and no bias is added, for every shape.
    pub fn is_none(&self) -> bool {
        self.constraints.is_empty()
            && self.tensor_kind().is_none()
            && self.key_lists.is_empty()
            && self.placements.is_none()
    }

    /// Returns the weights of queries that may not attend to any key.
    pub fn fully_masked_rows(&self) -> FullyMaskedRows {
        self.fully_masked_rows
    }

    /// Returns the kind of tensor that the mask has, if it has one. A mask without tensors is structural.
    pub(crate) fn tensor_kind(&self) -> Option<&'static str> {
        if !self.bool_masks.is_empty() {
            Some("boolean")
        } else if !self.biases.is_empty() {
            Some("bias")
        } else {
            None
        }
    }
}
