//! One call with a cache: its tokens are checked, its keys and values are staged, attended to, and kept if all goes
//! well; or those of an earlier layer's call are attended to.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};

use super::storage::KvBuffers;
use super::{AttentionCache, EarlierPadding, OP};
use crate::mask::{AttentionMask, Placement};
use crate::position::Positions;
use crate::sdpa::{Attended, Call, Choice, Keys, Outputs, SdpaOptions, run};
use candle_attention_modules::base::{check_entries, check_memory};

/// The padding of a batch (B, T): sequence b has its tokens at `starts[b]..valid_lens[b]`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Padding<'a> {
    /// The starts of the tokens; 0 where there are none.
    pub starts: Option<&'a [usize]>,
    /// Their ends; T where there are none.
    pub valid_lens: Option<&'a [usize]>,
}

/// The tokens of a call (B, T), checked against what the cache holds. Of a call without a cache or padding the lists of
/// sequences are empty: all T of each are tokens, which begin at 0.
#[derive(Debug, Clone, Default)]
pub struct NewTokens {
    /// T.
    pub t: usize,
    /// Of each sequence, its length before the call: the position of its first new token.
    pub before: Vec<usize>,
    /// Of each sequence, which of the T are tokens; the others are padding.
    pub tokens: Vec<Range<usize>>,
    /// The positions that the call was given.
    pub(crate) given: Option<Positions>,
    /// Whether the mask of the call hides some of the tokens from all queries.
    pub(crate) are_hidden: bool,
}

impl NewTokens {
    /// `before` are the lengths of the sequences of the cache, empty before the first call; `dims` are (B, T).
    pub fn new(op: &str, before: Vec<usize>, dims: (usize, usize), padding: Padding) -> Result<Self> {
        let (b, t) = dims;
        if !before.is_empty() && before.len() != b {
            bail!("[{op}] the call has {b} sequences, expected the {} that the cache holds", before.len())
        }
        // Lengths, starts, ends and ranges of tokens, which a batch of empty sequences has too.
        let bytes = [b, 8 * size_of::<usize>()];
        check_memory(op, format_args!("the lengths of {b} sequences"), &bytes)?;
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
        let before = if before.is_empty() { vec![0; b] } else { before };
        Ok(Self { t, before, tokens, given: None, are_hidden: false })
    }

    /// The length of each sequence with this call.
    pub fn ends(&self) -> impl Iterator<Item = usize> {
        self.before.iter().zip(&self.tokens).map(|(before, tokens)| before + tokens.len())
    }

    /// Returns the positions of the new tokens in each sequence.
    pub(crate) fn places(&self) -> Vec<Range<usize>> {
        self.before.iter().zip(self.ends()).map(|(&before, end)| before..end).collect()
    }

    /// The length of the longest sequence with this call.
    pub fn longest(&self) -> usize {
        self.ends().max().unwrap_or(0)
    }

    /// Where the queries of each sequence stand, beside the keys that are held of it.
    fn placements(&self, held: &[Range<usize>]) -> Vec<Placement> {
        let of_sequence = |((&before, tokens), keys): ((&usize, &Range<usize>), &Range<usize>)| Placement {
            query: before as i128 - tokens.start as i128,
            first_query: 0,
            keys: keys.clone(),
            tokens: tokens.clone(),
        };
        self.before.iter().zip(&self.tokens).zip(held).map(of_sequence).collect()
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
        let (b, t) = (self.tokens.len(), self.t);
        check_memory(OP, format_args!("the positions of {b} sequences of {t} tokens"), &[b, t, size_of::<u32>()])?;
        let of_sequence = |(&before, tokens): (&usize, &Range<usize>)| {
            let (start, last) = (tokens.start, (before + tokens.len()).saturating_sub(1));
            (0..self.t).map(move |i| (before + i.saturating_sub(start)).min(last))
        };
        Positions::of_each(self.before.iter().zip(&self.tokens).flat_map(of_sequence), self.t)
    }
}

/// Computes keys (B, H, T, D) and values (B, H, T, D_v) from the rows (B, H_kv, T, width) of a cache, in their dtype.
type Expansion<'e> = Box<dyn Fn(&Tensor) -> Result<[Tensor; 2]> + 'e>;

/// What one call reads of a cache: with its own keys and values where it brings some.
pub(crate) struct CachedCall<'e> {
    buffers: KvBuffers,
    /// Of each sequence, where its queries stand, and the keys that the buffers hold: the first of them is in row 0.
    placements: Vec<Placement>,
    /// What attention to floats is computed in.
    dtype: DType,
    /// Whether gradients end at the cache.
    detached: bool,
    is_of_earlier_layer: bool,
    /// What computes the keys and values that are attended to from those that the cache holds.
    pub expansion: Option<Expansion<'e>>,
}

impl AttentionCache {
    /// Stages the keys (B, H_kv, T, D) and values (B, H_kv, T, D_v) of a call behind what is held: what the call reads,
    /// and what the cache becomes if all goes well. Without `own_v`, values are the first `d_v` columns of the keys.
    ///
    /// # Errors
    /// For keys and values that do not fit each other or those before, that are tracked for gradients, and for more
    /// positions than there may be.
    pub(crate) fn stage<'e>(
        &self,
        new: &NewTokens,
        k: &Tensor,
        own_v: Option<&Tensor>,
        d_v: usize,
    ) -> Result<(CachedCall<'e>, Self)> {
        let kv = self.encode(k, own_v, d_v)?;
        let own = self.buffers.as_ref().filter(|own| own.accepts(&kv));
        let held = if self.held.is_empty() { vec![0..0; new.tokens.len()] } else { self.held.clone() };
        let with_new = |held: &[Range<usize>]| -> Vec<_> {
            held.iter().zip(&new.tokens).map(|(held, tokens)| held.start..held.end + tokens.len()).collect()
        };
        let (capacity, most) = (own.map_or(0, KvBuffers::capacity), self.config.most_held().unwrap_or(usize::MAX));
        let before: Vec<_> = match self.config.window() {
            _ if longest(&with_new(&held)) <= most.max(capacity) => held.clone(),
            // Before the first new token, a window reaches back by one key less than its length.
            Some(window) => held.iter().map(|held| last(held, window - 1)).collect(),
            None => {
                let full = with_new(&held).iter().position(|held| held.len() > most).unwrap_or(0);
                bail!(
                    "[{OP}] sequence {full} holds {} positions, and {} more exceed the capacity of {most}",
                    held[full].len(),
                    new.tokens[full].len()
                )
            }
        };
        let held_now = with_new(&before);
        let needed = longest(&held_now);
        let buffers = match own {
            Some(own) if before == held && needed <= capacity => own.clone(),
            // New ones, so that a call that fails leaves the cache as it was: in a sliding cache, once in every
            // `capacity - window` positions. Nothing is read of what stands for buffers where there are none.
            own => {
                let larger = capacity.saturating_mul(2).max(self.config.first_capacity()).min(most);
                own.unwrap_or(&kv).gather(&rows_of(&held, &before), needed.max(larger))?
            }
        };
        buffers.append(&kv, &before, new)?;
        // Less than is read, where a call brings more than a sliding cache holds.
        let kept: Vec<_> = held_now.iter().map(|held| last(held, most)).collect();
        let is_whole = kept == held_now || self.config.shared();
        let cache = Self {
            config: self.config.clone(),
            buffers: Some(if is_whole { buffers.clone() } else { buffers.gather(&rows_of(&held_now, &kept), most)? }),
            held: if is_whole { held_now.clone() } else { kept },
            positions: self.positions_with(new)?,
            dtype: Some(k.dtype()),
            padding: EarlierPadding {
                is_stored: self.padding.is_stored || new.are_hidden,
                is_left_out: self.padding.is_left_out || new.tokens.iter().any(|tokens| tokens.start > 0),
            },
        };
        let (dtype, detached) = (buffers.float_dtype(k.dtype()), self.config.detached());
        let (placements, is_of_earlier_layer) = (new.placements(&held_now), false);
        Ok((CachedCall { buffers, placements, dtype, detached, is_of_earlier_layer, expansion: None }, cache))
    }

    /// The keys and values of a call in the format of the cache.
    fn encode(&self, k: &Tensor, own_v: Option<&Tensor>, d_v: usize) -> Result<KvBuffers> {
        if let Some(dtype) = self.dtype.filter(|&dtype| dtype != k.dtype()) {
            bail!("[{OP}] keys have dtype {:?}, expected {dtype:?} as in the calls before", k.dtype())
        }
        if (k.track_op() || own_v.is_some_and(Tensor::track_op)) && !self.config.detached() {
            bail!(
                "[{OP}] keys or values are tracked for gradients, which a cache would lose; expected a layer after \
                 `freeze()` and an input `xs.detach()`, or a cache made `with_detached(true)`"
            )
        }
        let floats = (!self.config.q8()).then(|| self.config.dtype().unwrap_or(k.dtype()));
        let kv = KvBuffers::encode(k, own_v, d_v, floats)?;
        if let Some(buffers) = self.buffers.as_ref().filter(|own| !self.held.is_empty() && !own.accepts(&kv)) {
            let [(k_is, v_is), (k_was, v_was)] = [&kv, buffers].map(KvBuffers::shapes);
            bail!("[{OP}] keys {k_is} and values {v_is} do not fit those of the calls before, {k_was} and {v_was}")
        }
        Ok(kv)
    }

    /// The call of a later layer, with the queries `q`, that reads what an earlier layer's call of the same tokens left
    /// in its cache: keys (B, H_kv, T, D) and values (B, H_kv, T, D_v) of the `sizes` [H_kv, D, D_v].
    ///
    /// # Errors
    /// For other sizes, for queries of another dtype than the keys, and for a copy that does not fit in memory.
    pub(crate) fn reading<'e>(&self, new: &NewTokens, q: &Tensor, sizes: [usize; 3]) -> Result<CachedCall<'e>> {
        let (Some(buffers), Some(dtype)) = (&self.buffers, self.dtype) else {
            bail!("[{OP}] the cache of the earlier layer is empty, expected its call with the same tokens first")
        };
        if buffers.sizes() != Some(sizes) {
            let ((keys, values), [h, d, d_v]) = (buffers.shapes(), sizes);
            bail!(
                "[{OP}] the earlier layer's keys {keys} and values {values} do not fit, expected H_kv = {h}, D = {d} \
                 and D_v = {d_v}"
            )
        }
        if dtype != q.dtype() {
            bail!("[{OP}] the earlier layer's keys have dtype {dtype:?}, expected the queries' {:?}", q.dtype())
        }
        let (dtype, placements) = (buffers.float_dtype(dtype), new.placements(&self.held));
        let (buffers, detached) = (buffers.clone(), self.config.detached());
        Ok(CachedCall { buffers, placements, dtype, detached, is_of_earlier_layer: true, expansion: None })
    }
}

impl CachedCall<'_> {
    /// Keys (B, H_kv, rows, D) and values (B, H_kv, rows, D_v): views, or of 8 bits as floats, or computed from these.
    pub(super) fn read(&self, rows: &KvBuffers) -> Result<[Tensor; 2]> {
        let floats = rows.floats(self.dtype)?;
        let Some(expand) = &self.expansion else { return Ok(floats) };
        let expanded = expand(&floats[0])?;
        Ok(if self.detached { expanded.map(|tensor| tensor.detach()) } else { expanded })
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
        let starts: Vec<_> = self.placements.iter().map(|placement| placement.keys.start).collect();
        let rows = self.placements.iter().map(|placement| placement.keys.len()).max().unwrap_or(0);
        let (b, h, t_q, _) = q.dims4()?;
        let mask = mask.rebase(OP, &self.placements, [b, h, t_q, rows], q.device())?;
        let options = options.of_keys(&starts, t_q, rows)?;
        Ok((self.buffers.positions(&(0..rows))?, mask, options))
    }
}

impl Keys for CachedCall<'_> {
    /// Attention to keys and values of 8 bits where a kernel reads them and nothing else is computed from them, and to
    /// floats otherwise. Weights are over the keys that the cache holds.
    fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions, outputs: Outputs) -> Result<Attended> {
        let (rows, mask, options) = &self.all_rows(q, mask, options)?;
        let (op, q) = (outputs.op(false), if self.detached { &q.detach() } else { q });
        if let (None, Some([[k, v], scales]), true) = (&self.expansion, &rows.codes()?, q.device().is_cpu()) {
            let call = Call::of(op, [q, k, v], Some(scales), None, mask, options)?;
            let choice = Choice::of(&call, outputs)?;
            if let Choice::Cpu(_) = choice {
                return choice.run(call, outputs);
            }
        }
        let reading = |rows| {
            let [k, v] = self.read(rows)?;
            Call::of(op, [&q.to_dtype(self.dtype)?, &k, &v], None, None, mask, options)
        };
        let mut call = reading(rows)?;
        // Later calls of the earlier layer write to its buffers in place, which a graph is not to see.
        if self.is_of_earlier_layer && call.tracks_gradients() {
            call = reading(&rows.copy()?)?;
        }
        let attended = run(call, outputs)?;
        let weights = attended.weights.map(|weights| weights.to_dtype(q.dtype())).transpose()?;
        Ok(Attended { context: attended.context.to_dtype(q.dtype())?, weights, ..attended })
    }
}

/// Of each sequence, the rows that hold a part of what is held.
fn rows_of(held: &[Range<usize>], part: &[Range<usize>]) -> Vec<(usize, Range<usize>)> {
    let rows = |(held, part): (&Range<usize>, &Range<usize>)| part.start - held.start..part.end - held.start;
    held.iter().zip(part).map(rows).enumerate().collect()
}

/// The most positions that are held of a sequence.
fn longest(held: &[Range<usize>]) -> usize {
    held.iter().map(Range::len).max().unwrap_or(0)
}

/// The last n positions, or all.
fn last(held: &Range<usize>, n: usize) -> Range<usize> {
    held.end - held.len().min(n)..held.end
}
