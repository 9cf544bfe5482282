//! Which keys each query sees.
//!
//! An [`AttentionMask`] is pure description: constraints that hold together. [`AttentionMask::resolve`] checks it
//! against a shape and gives, for every query, the one interval of keys that the structural constraints leave it, so
//! that a kernel can loop over what is seen. Only `keep` and `bias` tensors are read from memory.

mod constraint;
mod ranges;
mod tensors;
mod windows;

pub use constraint::ValidLens;
pub use ranges::KeyRanges;
pub use windows::Windows;

pub(crate) use constraint::Placement;
pub(crate) use ranges::RowRanges;

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use constraint::{Alignment, Constraint, Placements, Reach, Tokenized};

use candle_attention_modules::base::{Dim, Expect, check_memory};

const OP: &str = "attention_mask";

/// What a query that sees no key receives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FullyMaskedRows {
    /// Zero weights, and so a context of zeros.
    #[default]
    Zero,
    /// The same weight, 1/T_kv, for every key, hidden or not: what d2l's `masked_softmax` gives, which fills with -1e6
    /// instead of leaving keys out. For parity with it; see <https://d2l.ai>, "Attention Scoring Functions".
    Uniform,
}

/// Constraints on which keys a query sees; all of them hold together.
///
/// Position: query i stands at key position `i + T_kv - T_q`, so the last query stands at the last key, unless
/// [`causal_upper_left`](Self::causal_upper_left), [`causal_with_offset`](Self::causal_with_offset) or
/// [`causal_with_offsets`](Self::causal_with_offsets) says otherwise. Windows, bands and chunks count from that
/// position.
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
/// Shapes are checked where the mask is used (or by [`resolve`](Self::resolve)), since only there B, T_q and T_kv are
/// known.
#[derive(Debug, Clone, Default)]
pub struct AttentionMask {
    constraints: Vec<Constraint>,
    /// u8, 0 hides.
    keeps: Vec<Tensor>,
    /// Added to the scores.
    biases: Vec<Tensor>,
    /// Where the sequences stand, unless each is a whole of T_q queries and T_kv keys.
    placements: Option<Placements>,
    fully_masked_rows: FullyMaskedRows,
}

impl AttentionMask {
    /// Every query sees every key.
    pub fn none() -> Self {
        Self::default()
    }

    /// No query sees a key after its own, aligned to the end: the last query sees the last key, which is right for new
    /// queries against a longer cache. With T_q > T_kv the first queries see nothing.
    pub fn causal() -> Self {
        Self::aligned(Alignment::End)
    }

    /// Query i sees keys `0..=i` whatever T_kv is: `is_causal` of PyTorch's `scaled_dot_product_attention`.
    ///
    /// With a cache, T_kv counts the positions of earlier calls, so that the next query would see the first key alone:
    /// an error, as such a mask is meant to be [`causal`](Self::causal).
    pub fn causal_upper_left() -> Self {
        Self::aligned(Alignment::Offset(0))
    }

    /// Query i sees keys `0..=i + n`.
    pub fn causal_with_offset(n: usize) -> Self {
        Self::aligned(Alignment::Offset(n))
    }

    /// Query i of sequence b sees keys `0..=i + offsets[b]`, and none where that is below 0: an offset for each of B
    /// sequences.
    ///
    /// For sequences of different lengths in one buffer of keys, where the last query of each stands at its last key,
    /// the offsets are the lengths less T_q. An error where the mask is used: offsets for another B.
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
        Self::aligned(Alignment::Offsets(offsets.into()))
    }

    fn aligned(alignment: Alignment) -> Self {
        Self::none().with(Constraint::Aligned(alignment, Reach::Causal { prefix: Vec::new() }))
    }

    /// A tokenizer's attention mask `(B, T_kv)` of ones (a token) and zeros (padding), in any dtype.
    ///
    /// With a cache, T_kv is the length of the longest sequence with the call. Padding that
    /// [`AttentionInput::with_starts`](crate::AttentionInput::with_starts) or `with_valid_lens` left out of the cache
    /// has no column: a mask with columns for it, as transformers passes it in every step, is an error.
    ///
    /// Rows that are one run of ones become starts and lengths, which leave intervals; otherwise the mask becomes a
    /// `keep` tensor. A row without a one hides every key.
    ///
    /// # Errors
    /// For another rank, and for a value other than 0 and 1; where the mask is used, for another T_kv.
    pub fn from_attention_mask(mask: &Tensor) -> Result<Self> {
        Expect::one("from_attention_mask", "the mask", mask).shape(&["B", "T_kv"].map(Dim::Any))?;
        let mask = &tensors::readable(mask)?;
        let runs = runs_of_ones("from_attention_mask", mask)?;
        if runs.iter().any(Option::is_none) {
            let keep = mask.ne(&mask.zeros_like()?)?.unsqueeze(1)?.unsqueeze(1)?;
            let (columns, rows) = (mask.dim(1)?, mask.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec2::<f32>()?);
            let end = |row: &Vec<f32>| row.iter().rposition(|&value| value == 1.0).map_or(0, |last| last + 1);
            let ends = rows.iter().map(end).collect();
            let mask = Self { keeps: vec![keep], ..Self::none() };
            return Ok(mask.with(Constraint::Tokenized(Tokenized { columns, ends, has_gaps: true })));
        }
        Ok(Self::of_runs(runs.into_iter().flatten(), mask.dim(1)?))
    }

    /// Of each sequence, the start and the end of its tokens among `columns`.
    #[doc(hidden)]
    pub fn of_runs(runs: impl Iterator<Item = (usize, usize)>, columns: usize) -> Self {
        let (starts, ends): (Vec<_>, Vec<_>) = runs.unzip();
        let tokenized = Tokenized { columns, ends: ends.as_slice().into(), has_gaps: false };
        let this = Self::none().with_valid_lens(ends).with(Constraint::Tokenized(tokenized));
        if starts.iter().any(|&start| start > 0) { this.with_starts(starts) } else { this }
    }

    /// Hides the keys at and past a length: `(B,)`, or `(B, T_q)` for each query. d2l's `valid_lens`.
    ///
    /// With a cache, lengths count the positions of earlier calls too. The cache stores keys that a mask hides, as
    /// [`with_starts`](Self::with_starts) says; [`AttentionInput::with_valid_lens`](crate::AttentionInput::with_valid_lens)
    /// leaves padding out of the cache instead.
    #[must_use]
    pub fn with_valid_lens(self, lens: impl Into<ValidLens>) -> Self {
        self.with(Constraint::ValidLens(lens.into()))
    }

    /// Hides the keys before a start: left padding, packed documents.
    ///
    /// With a cache, starts count the positions of earlier calls too. The cache stores keys that a mask hides, so that
    /// the mask of every later call has to hide them again; a later mask without starts, lengths and tensors is logged
    /// as a warning, once. [`AttentionInput::with_starts`](crate::AttentionInput::with_starts) leaves padding out of
    /// the cache instead, and starts do not count it then.
    #[must_use]
    pub fn with_starts(self, starts: impl Into<ValidLens>) -> Self {
        self.with(Constraint::Starts(starts.into()))
    }

    /// Hides the keys further back than `w - 1`: `w` keys with the query's own, Hugging Face's `sliding_window`. Keys
    /// after the query's own stay as they are. An error where the mask is used: a window of 0, and a window on joined
    /// masks (see [`and`](Self::and)) in which queries stand at different positions.
    #[must_use]
    pub fn with_window(self, w: usize) -> Self {
        match w.checked_sub(1) {
            Some(left) => self.with_aligned("with_window", Reach::Band { left, right: usize::MAX }),
            None => self.with(Constraint::empty("window")),
        }
    }

    /// Leaves a query the keys from `left` before its position to `right` after it: local attention in encoders. An
    /// error where the mask is used: a band on joined masks in which queries stand at different positions.
    #[must_use]
    pub fn with_local_window(self, left: usize, right: usize) -> Self {
        self.with_aligned("with_local_window", Reach::Band { left, right })
    }

    /// Divides positions into chunks of `size`, from 0 on, and leaves a query the keys of its own chunk: Llama 4's
    /// `attention_chunk_size`. An error where the mask is used: chunks of 0, and chunks on joined masks in which
    /// queries stand at different positions.
    #[must_use]
    pub fn with_chunk(self, size: usize) -> Self {
        match size {
            0 => self.with(Constraint::empty("chunk")),
            _ => self.with_aligned("with_chunk", Reach::Chunk(size)),
        }
    }

    /// Lifts the causal constraint for the keys before the prefix length, which all queries see then (prefix LM).
    /// Windows, bands, lengths and starts still hold; without a causal constraint there is nothing to lift but that of
    /// a layer to which the mask is given. An error where the mask is used: a prefix on joined masks whose causal
    /// constraints differ.
    #[must_use]
    pub fn with_prefix(mut self, prefix: impl Into<ValidLens>) -> Self {
        let mut causals = self.constraints.iter().filter_map(|constraint| match constraint {
            Constraint::Aligned(alignment, Reach::Causal { prefix }) => Some((alignment, prefix)),
            _ => None,
        });
        let (first, prefix) = (causals.next(), prefix.into());
        if causals.any(|other| Some(other) != first) {
            return self.with(Constraint::ambiguous("with_prefix"));
        }
        self.lift(&prefix);
        self.with(Constraint::Prefix(prefix))
    }

    /// Hides every key whose entry is 0, of ones and zeros as u8, broadcastable to (B, H, T_q, T_kv) from the right, as
    /// everywhere: two dimensions are (T_q, T_kv). A padding mask (B, T_kv) is for
    /// [`from_attention_mask`](Self::from_attention_mask); here it has to be (B, 1, 1, T_kv), and where B is T_q, (B,
    /// T_kv) would hide other keys without an error. A mask (B, T_q, T_kv) has to be (B, 1, T_q, T_kv) likewise.
    ///
    /// Other entries than 0 and 1 are an error where the mask is used. A tensor on a CPU is read for them now; one on
    /// another device, for which the program would wait, counts every entry but 0 as 1.
    #[must_use]
    pub fn with_bool_mask(mut self, keep: &Tensor) -> Self {
        self.keeps.push(keep.clone());
        let Some(entry) = tensors::largest_entry(keep).filter(|&entry| entry > 1) else { return self };
        let wrong = format!("keep has an entry {entry}, expected ones (the key is seen) and zeros");
        self.with(Constraint::Wrong(wrong))
    }

    /// Adds a float tensor to the scores, broadcastable to (B, H, T_q, T_kv) as [`with_bool_mask`](Self::with_bool_mask) has it:
    /// two dimensions are (T_q, T_kv). Gradients flow into it.
    #[must_use]
    pub fn with_bias(mut self, bias: &Tensor) -> Self {
        self.biases.push(bias.clone());
        self
    }

    /// What a query that sees no key receives; zeros unless said otherwise.
    #[must_use]
    pub fn with_fully_masked_rows(self, fully_masked_rows: FullyMaskedRows) -> Self {
        Self { fully_masked_rows, ..self }
    }

    /// Both masks at once: a key is seen where both leave it, biases add up, and each mask's windows and prefix stay
    /// with that mask's own causal constraint. Empty rows are uniform if either asks for it.
    ///
    /// Where the two let a query stand at different positions, ALiBi has none to count from and is an error, as are a
    /// window, a band and a chunk that are given afterwards.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        let mut both = self.clone();
        both.constraints.extend_from_slice(&other.constraints);
        both.keeps.extend_from_slice(&other.keeps);
        both.biases.extend_from_slice(&other.biases);
        if let Some(of_other) = &other.placements {
            let own = both.placements.get_or_insert_with(|| of_other.clone());
            if own != of_other {
                return both.with(Constraint::different_parts());
            }
        }
        if other.fully_masked_rows == FullyMaskedRows::Uniform {
            both.fully_masked_rows = FullyMaskedRows::Uniform;
        }
        both
    }

    /// This mask with its causal constraints lifted for the prefixes of another: what a layer does with its own causal
    /// constraint when the caller's mask has a prefix.
    pub(crate) fn with_prefixes_of(&self, other: &Self) -> Self {
        let mut lifted = self.clone();
        for constraint in &other.constraints {
            if let Constraint::Prefix(prefix) = constraint {
                lifted.lift(prefix);
            }
        }
        lifted
    }

    /// Whether nothing is hidden and nothing added, whatever the shape.
    pub fn is_none(&self) -> bool {
        self.constraints.is_empty() && self.tensor_kind().is_none() && self.placements.is_none()
    }

    /// What a query that sees no key receives.
    pub fn fully_masked_rows(&self) -> FullyMaskedRows {
        self.fully_masked_rows
    }

    /// Whether a query may see keys after its own: nothing hides these, and no tensor is there that could.
    pub(crate) fn shows_later_keys(&self) -> bool {
        let may_hide = |constraint: &Constraint| {
            matches!(constraint, Constraint::Aligned(_, Reach::Causal { .. } | Reach::Band { right: 0, .. }))
        };
        self.tensor_kind().is_none() && !self.constraints.iter().any(may_hide)
    }

    /// Returns whether the mask hides some of these new tokens from all queries: their positions in each sequence.
    pub(crate) fn hides_tokens(&self, tokens: &[Range<usize>]) -> bool {
        let some = |is_hidden: &dyn Fn(usize, &Range<usize>) -> bool| {
            tokens.iter().enumerate().any(|(b, tokens)| !tokens.is_empty() && is_hidden(b, tokens))
        };
        self.constraints.iter().any(|constraint| match constraint {
            Constraint::Starts(starts) => some(&|b, new| starts.of_sequence(b).is_some_and(|start| start > new.start)),
            Constraint::ValidLens(lens) => some(&|b, new| lens.of_sequence(b).is_some_and(|len| len < new.end)),
            Constraint::Tokenized(tokenized) => tokenized.has_gaps,
            _ => false,
        })
    }

    /// Returns whether the mask has anything that can say which keys are padding: starts, lengths or a tensor.
    pub(crate) fn can_name_padding(&self) -> bool {
        let is_length =
            |constraint: &Constraint| matches!(constraint, Constraint::Starts(_) | Constraint::ValidLens(_));
        self.tensor_kind().is_some() || self.constraints.iter().any(is_length)
    }

    /// Returns whether the mask seems to count padding on the left: starts above 0, or a tensor with a row for each
    /// sequence.
    pub(crate) fn counts_left_padding(&self) -> bool {
        let is_start = |constraint: &Constraint| matches!(constraint, Constraint::Starts(own) if own.is_above_zero());
        let is_by_sequence = |tensor: &Tensor| matches!(*tensor.dims(), [b, _, _, _] if b > 1);
        self.constraints.iter().any(is_start) || self.keeps.iter().chain(&self.biases).any(is_by_sequence)
    }

    /// Returns whether a constraint counts from the positions of the queries: a causal mask, a window, chunks.
    pub(crate) fn counts_from_queries(&self) -> bool {
        self.constraints.iter().any(|constraint| constraint.alignment().is_some())
    }

    /// Returns a sequence whose first query has another position by an offset of the mask than among the keys of the
    /// call, `first_queries`, and the position by the offset.
    pub(crate) fn other_offset(&self, first_queries: &[i128]) -> Option<(usize, i128)> {
        let offset = |alignment: &Alignment, b: usize| match alignment {
            Alignment::End => None,
            Alignment::Offset(n) => Some(*n as i128),
            Alignment::Offsets(offsets) => offsets.get(b).map(|&n| n.into()),
        };
        let of_sequences = first_queries.iter().enumerate();
        let mut alignments = self.constraints.iter().filter_map(Constraint::alignment);
        alignments.find_map(|alignment| {
            let others = of_sequences.clone().filter_map(|(b, &query)| Some((b, offset(alignment, b)?, query)));
            others.into_iter().find(|&(_, offset, query)| offset != query).map(|(b, offset, _)| (b, offset))
        })
    }

    /// What kind of tensor hides or adds, if any does: a mask without one is structural.
    pub(crate) fn tensor_kind(&self) -> Option<&'static str> {
        match (self.keeps.is_empty(), self.biases.is_empty()) {
            (false, _) => Some("keep"),
            (true, false) => Some("bias"),
            (true, true) => None,
        }
    }

    fn with(mut self, constraint: Constraint) -> Self {
        self.constraints.push(constraint);
        self
    }

    /// A constraint that counts from the positions of the mask's others, which count from the end where there is none.
    fn with_aligned(self, builder: &str, reach: Reach) -> Self {
        let mut alignments = self.constraints.iter().filter_map(Constraint::alignment);
        let alignment = alignments.next().unwrap_or(&Alignment::End).clone();
        let clear = alignments.all(|other| *other == alignment);
        self.with(if clear { Constraint::Aligned(alignment, reach) } else { Constraint::ambiguous(builder) })
    }

    fn lift(&mut self, lifted: &ValidLens) {
        for constraint in &mut self.constraints {
            if let Constraint::Aligned(_, Reach::Causal { prefix }) = constraint {
                prefix.push(lifted.clone());
            }
        }
    }
}

/// The start and end of the one run of ones in each row of a tokenizer's mask (B, T), (0, 0) for a row of zeros, `None`
/// for several runs.
///
/// # Errors
/// For a value other than 0 and 1.
pub fn runs_of_ones(op: &str, mask: &Tensor) -> Result<Vec<Option<(usize, usize)>>> {
    let bytes = [mask.dims(), &[size_of::<f32>()]].concat();
    check_memory(op, format_args!("the attention mask of shape {:?}", mask.dims()), &bytes)?;
    let rows = mask.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    if let Some(other) = rows.iter().flatten().find(|&&value| value != 0.0 && value != 1.0) {
        bail!("[{op}] the attention mask has {other}, expected ones and zeros")
    }
    Ok(rows.iter().map(|row| single_run(row)).collect())
}

fn single_run(row: &[f32]) -> Option<(usize, usize)> {
    let Some(start) = row.iter().position(|&value| value == 1.0) else { return Some((0, 0)) };
    let end = row.iter().rposition(|&value| value == 1.0)? + 1;
    row[start..end].iter().all(|&value| value == 1.0).then_some((start, end))
}
