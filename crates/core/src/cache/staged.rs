//! One call with a cache: its tokens are checked, its keys and values are staged, attended to, and committed if all
//! went well; or those of an earlier layer's call are attended to.

use std::cell::Cell;
use std::fmt;
use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};

use super::storage::KvBuffers;
use super::{AttentionCache, OP};
use crate::mask::{AttentionMask, Placement};
use crate::position::Positions;
use crate::sdpa::{Attended, Call, Choice, Keys, Outputs, SdpaOptions, run};
use candle_attention_modules::base::check_entries;

/// The padding of a batch (B, T): sequence b has its tokens at `starts[b]..valid_lens[b]`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Padding<'a> {
    /// The ends of the tokens; T where there are none.
    pub valid_lens: Option<&'a [usize]>,
    /// Their starts; 0 where there are none.
    pub starts: Option<&'a [usize]>,
}

/// The tokens of a call (B, T), checked against what the cache holds.
#[derive(Debug, Clone)]
pub struct NewTokens {
    /// T.
    pub t: usize,
    /// Of each sequence, its length before the call: the position of its first new token.
    pub before: Vec<usize>,
    /// Of each sequence, which of the T are tokens; the others are padding.
    pub tokens: Vec<Range<usize>>,
    /// The positions that the call was given.
    pub(crate) given: Option<Positions>,
}

impl NewTokens {
    /// `before` are the lengths of the sequences of the cache, empty before the first call; `dims` are (B, T).
    pub fn new(op: &str, before: Vec<usize>, dims: (usize, usize), padding: Padding) -> Result<Self> {
        let (b, t) = dims;
        if !before.is_empty() && before.len() != b {
            bail!("[{op}] the call has {b} sequences, expected the {} that the cache holds", before.len())
        }
        let entries = |name, given: Option<&[usize]>, default| {
            let Some(entries) = given else { return Ok(vec![default; b]) };
            check_entries(op, name, entries.len(), b, "sequences")?;
            if let Some((sequence, entry)) = entries.iter().enumerate().find(|&(_, &entry)| entry > t) {
                let mask = "; what counts the positions of earlier calls too is `AttentionMask::with_";
                let hint = if op == OP { format!("{mask}{name}`") } else { String::new() };
                bail!("[{op}] {name} has {entry} for sequence {sequence}, expected at most the call's {t}{hint}")
            }
            Ok(entries.to_vec())
        };
        let ends = entries("valid_lens", padding.valid_lens, t)?;
        let starts = entries("starts", padding.starts, 0)?;
        let tokens: Vec<_> = starts.into_iter().zip(ends).map(|(start, end)| start..end).collect();
        if let Some(sequence) = tokens.iter().position(|tokens| tokens.start > tokens.end) {
            let Range { start, end } = tokens[sequence];
            bail!("[{op}] the tokens of sequence {sequence} start at {start}, after their end at {end}")
        }
        Ok(Self { t, before: if before.is_empty() { vec![0; b] } else { before }, tokens, given: None })
    }

    /// The length of each sequence with this call.
    pub fn ends(&self) -> impl Iterator<Item = usize> {
        self.before.iter().zip(&self.tokens).map(|(before, tokens)| before + tokens.len())
    }

    /// The length of the longest sequence with this call.
    pub fn longest(&self) -> usize {
        self.ends().max().unwrap_or(0)
    }

    /// Whether nothing is padding.
    pub fn all_valid(&self) -> bool {
        self.tokens.iter().all(|tokens| *tokens == (0..self.t))
    }

    /// Something of tokens (B, T, ..), with zeros in the place of padding, which may hold anything.
    pub fn without_padding(&self, xs: Tensor) -> Result<Tensor> {
        if self.all_valid() {
            return Ok(xs);
        }
        let is_token = self.tokens.iter().flat_map(|tokens| (0..self.t).map(|i| u8::from(tokens.contains(&i))));
        let dims = [&[self.tokens.len(), self.t][..], &vec![1; xs.rank() - 2]].concat();
        let is_token = Tensor::from_vec(is_token.collect(), dims, xs.device())?;
        is_token.broadcast_as(xs.shape())?.where_cond(&xs, &xs.zeros_like()?)
    }

    /// The positions that were given, or the place of each of the T in its sequence. Padding gets that of the nearest
    /// token, so that it makes no sequence longer.
    pub(crate) fn positions(&self) -> Result<Positions> {
        if let Some(given) = &self.given {
            return Ok(given.clone());
        }
        let first = self.before.first().copied().unwrap_or(0);
        if self.all_valid() && self.before.iter().all(|&before| before == first) {
            return Positions::starting_at(&[first], self.t);
        }
        let of_sequence = |(&before, tokens): (&usize, &Range<usize>)| {
            let (start, last) = (tokens.start, (before + tokens.len()).saturating_sub(1));
            (0..self.t).map(move |i| (before + i.saturating_sub(start)).min(last))
        };
        Positions::of_each(self.before.iter().zip(&self.tokens).flat_map(of_sequence).collect(), self.t)
    }
}

/// Computes keys and values from the rows of a cache.
pub(crate) trait Expand: fmt::Debug {
    /// Keys (B, H, T, D) and values (B, H, T, D_v) from rows (B, H_kv, T, width), in the dtype of the rows.
    fn expand(&self, rows: &Tensor) -> Result<(Tensor, Tensor)>;
}

/// Buffers, and of each sequence the positions that they hold: the first of them is in row 0.
#[derive(Debug, Clone)]
struct HeldKv {
    buffers: KvBuffers,
    held: Vec<Range<usize>>,
}

impl HeldKv {
    /// Some of the positions of each sequence, in new buffers that hold `capacity` of them.
    fn part(&self, part: Vec<Range<usize>>, capacity: usize) -> Result<Self> {
        let buffers = self.buffers.empty_like(part.len(), capacity)?;
        for (sequence, (held, part)) in self.held.iter().zip(&part).enumerate() {
            let rows = part.start - held.start..part.end - held.start;
            buffers.write_sequence(sequence, 0, &self.buffers.rows(sequence, rows)?)?;
        }
        Ok(Self { buffers, held: part })
    }

    /// Writes the tokens of a call behind what is held.
    fn append(mut self, kv: &KvBuffers, new: &NewTokens) -> Result<Self> {
        let at = self.held.first().map_or(0, Range::len);
        if new.all_valid() && self.held.iter().all(|held| held.len() == at) {
            self.buffers.write(at, kv)?;
        } else {
            for (sequence, (held, tokens)) in self.held.iter().zip(&new.tokens).enumerate() {
                self.buffers.write_sequence(sequence, held.len(), &kv.rows(sequence, tokens.clone())?)?;
            }
        }
        self.held.iter_mut().zip(&new.tokens).for_each(|(held, tokens)| held.end += tokens.len());
        Ok(self)
    }
}

/// The keys and values of a call behind those of the calls before. The cache changes only in [`commit`](Self::commit).
#[derive(Debug)]
pub(crate) struct CachedCall<'c> {
    new: NewTokens,
    /// The dtype of the call's keys.
    dtype: DType,
    /// Whether gradients end at the cache.
    detached: bool,
    /// What attention reads.
    read: HeldKv,
    /// What the cache becomes, which may be less than is read: where a call brings more than a sliding cache holds.
    /// Nothing for a call that only reads.
    append: Option<(&'c mut AttentionCache, HeldKv)>,
    /// What computes the keys and values that are attended to from those that the cache holds.
    pub expansion: Option<&'c dyn Expand>,
    /// Whether a graph refers to the buffers that are read.
    in_graph: Cell<bool>,
}

impl<'c> CachedCall<'c> {
    /// The call of a later layer, with the queries `q`, that reads what an earlier layer's call of the same tokens left
    /// in its cache: keys (B, H_kv, T, D) and values (B, H_kv, T, D_v) of the `sizes` [H_kv, D, D_v].
    ///
    /// # Errors
    /// For other sizes, for queries of another dtype than the keys, and for a copy that does not fit in memory.
    pub fn reading(cache: &AttentionCache, new: NewTokens, q: &Tensor, sizes: [usize; 3]) -> Result<Self> {
        let (Some(buffers), Some(dtype)) = (&cache.buffers, cache.dtype) else {
            bail!("[{OP}] the cache of the earlier layer is empty, expected its call with the same tokens first")
        };
        if buffers.sizes() != Some(sizes) {
            let ((keys, values), [h, d, d_v]) = (buffers.shapes(), sizes);
            bail!(
                "[{OP}] the earlier layer's keys {keys} and values {values} do not fit, expected {h} heads, {d} and \
                 {d_v} wide"
            )
        }
        if dtype != q.dtype() {
            bail!("[{OP}] the earlier layer's keys have dtype {dtype:?}, expected the queries' {:?}", q.dtype())
        }
        let detached = cache.config.detached();
        // Later calls of the earlier layer write to its buffers in place.
        let buffers = if q.track_op() && !detached { buffers.copy()? } else { buffers.clone() };
        let read = HeldKv { buffers, held: cache.held.clone() };
        Ok(Self { new, dtype, detached, read, append: None, expansion: None, in_graph: Cell::new(false) })
    }

    /// `kv` are the call's keys and values in the format of the cache, `dtype` that in which they came.
    pub(super) fn new(cache: &'c mut AttentionCache, new: NewTokens, kv: &KvBuffers, dtype: DType) -> Result<Self> {
        let held = if cache.held.is_empty() { vec![0..0; new.tokens.len()] } else { cache.held.clone() };
        let buffers = cache.buffers.as_ref().filter(|buffers| buffers.accepts(kv));
        let with_new = |(held, tokens): (&Range<usize>, &Range<usize>)| held.len() + tokens.len();
        let most_with_new = |held: &[Range<usize>]| held.iter().zip(&new.tokens).map(with_new).max().unwrap_or(0);
        let needed = most_with_new(&held);
        let most = cache.config.most_held().unwrap_or(usize::MAX);
        let capacity = buffers.map_or(0, KvBuffers::capacity);

        let (read, kept) = if needed <= most.max(capacity) {
            let buffers = match buffers {
                Some(buffers) if needed <= capacity => buffers.clone(),
                _ => {
                    let least = capacity.saturating_mul(2).max(cache.config.first_capacity());
                    let larger = kv.empty_like(held.len(), least.max(needed).min(most))?;
                    buffers.map_or(Ok(()), |buffers| larger.write(0, buffers))?;
                    larger
                }
            };
            let all = HeldKv { buffers, held }.append(kv, &new)?;
            (all.clone(), all)
        } else if let Some(window) = cache.config.window() {
            // New buffers, so that a call that fails leaves the cache as it was. They are made once in every
            // `capacity - window` positions. Before the first new token, a window reaches back by one key less than its
            // length.
            let before: Vec<_> = held.iter().map(|held| last(held, window - 1)).collect();
            let capacity = most_with_new(&before).max(most);
            // Where there are no buffers nothing is held, and nothing is read of what stands for them.
            let all = HeldKv { buffers: buffers.unwrap_or(kv).clone(), held };
            let read = all.part(before, capacity)?.append(kv, &new)?;
            let kept: Vec<_> = read.held.iter().map(|held| last(held, most)).collect();
            let is_whole = kept == read.held || cache.config.shared();
            let kept = if is_whole { read.clone() } else { read.part(kept, most)? };
            (read, kept)
        } else {
            let full = held.iter().zip(&new.tokens).map(with_new).position(|len| len > most).unwrap_or(0);
            bail!(
                "[{OP}] sequence {full} holds {} positions, and {} more exceed the capacity of {most}",
                held[full].len(),
                new.tokens[full].len()
            )
        };
        let (detached, append) = (cache.config.detached(), Some((cache, kept)));
        Ok(Self { new, dtype, detached, read, append, expansion: None, in_graph: Cell::new(false) })
    }

    /// Keys (B, H_kv, rows, D) and values (B, H_kv, rows, D_v): views, or of 8 bits as floats, or computed from these.
    pub(super) fn read(&self, rows: &KvBuffers) -> Result<(Tensor, Tensor)> {
        let (keys, values) = rows.floats(self.float_dtype())?;
        let Some(expansion) = self.expansion else { return Ok((keys, values)) };
        let (keys, values) = expansion.expand(&keys)?;
        Ok(if self.detached { (keys.detach(), values.detach()) } else { (keys, values) })
    }

    /// What attention to floats is computed in.
    fn float_dtype(&self) -> DType {
        self.read.buffers.float_dtype(self.dtype)
    }

    /// Attention to keys and values of 8 bits where a kernel reads them and nothing else is computed from them, and to
    /// floats otherwise.
    fn attended(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended> {
        let (rows, mask, options) = &self.all_rows(q, mask, options)?;
        let (op, q) = (outputs.op(false), if self.detached { &q.detach() } else { q });
        if let (None, Some(scales), true) = (self.expansion, rows.scales(), q.device().is_cpu()) {
            let [k, v] = &rows.stored()?;
            let call = Call::of(op, [q, k, v], Some(&scales), None, mask, options)?;
            let choice = Choice::of(&call, outputs)?;
            if let Choice::Cpu(_) = choice {
                return choice.run(&call, outputs);
            }
        }
        let (k, v) = self.read(rows)?;
        run(&Call::of(op, [&q.to_dtype(self.float_dtype())?, &k, &v], None, None, mask, options)?, outputs)
    }

    /// The rows of the buffers that hold a key of some sequence, and the mask and the options of attention to them, of
    /// those that count positions in the sequence.
    ///
    /// # Errors
    /// If a query sees a key that a sliding cache no longer holds, and for a mask that does not fit.
    pub(super) fn all_rows(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<(KvBuffers, AttentionMask, SdpaOptions)> {
        let held = &self.read.held;
        let rows = longest(held);
        let (b, h, t_q, _) = q.dims4()?;
        let mask = mask.rebase(OP, &self.placements(), [b, h, t_q, rows], q.device())?;
        let starts: Vec<_> = held.iter().map(|held| held.start).collect();
        let options = options.of_keys(&starts, t_q, rows)?;
        Ok((self.read.buffers.positions(&(0..rows))?, mask, options))
    }

    fn placements(&self) -> Vec<Placement> {
        let of_sequence = |(sequence, held): (usize, &Range<usize>)| {
            let (before, tokens) = (self.new.before[sequence], self.new.tokens[sequence].clone());
            Placement {
                query: before as i128 - tokens.start as i128,
                first: 0,
                keys: held.clone(),
                end: before + tokens.len(),
                tokens,
            }
        };
        self.read.held.iter().enumerate().map(of_sequence).collect()
    }
}

impl Keys for CachedCall<'_> {
    /// Weights are of floats, over the keys that the cache holds.
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended> {
        let attended = self.attended(q, mask, options, outputs)?;
        self.in_graph.set(attended.context.track_op());
        let weights = attended.weights.map(|weights| weights.to_dtype(q.dtype())).transpose()?;
        Ok(Attended { context: attended.context.to_dtype(q.dtype())?, weights, ..attended })
    }

    /// Makes the call's keys and values part of the cache, if it has any.
    ///
    /// Later calls write to the buffers of a cache in place. A graph that refers to them keeps them for its `backward`,
    /// and the cache goes on with a copy.
    ///
    /// # Errors
    /// For a copy that does not fit in memory.
    fn commit(self: Box<Self>) -> Result<()> {
        let Self { append, new, in_graph, dtype, .. } = *self;
        let Some((cache, HeldKv { buffers, held })) = append else { return Ok(()) };
        let positions = cache.positions_with(Some(&new))?;
        cache.buffers = Some(if in_graph.get() { buffers.copy()? } else { buffers });
        cache.positions = positions;
        cache.held = held;
        cache.dtype = Some(dtype);
        Ok(())
    }
}

/// The most positions that are held of a sequence.
fn longest(held: &[Range<usize>]) -> usize {
    held.iter().map(Range::len).max().unwrap_or(0)
}

/// The last n positions, or all.
fn last(held: &Range<usize>, n: usize) -> Range<usize> {
    held.end - held.len().min(n)..held.end
}
