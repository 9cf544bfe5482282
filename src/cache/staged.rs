//! One call with a cache: its keys and values are staged, attended to, and committed if all went well.

use std::cell::Cell;
use std::fmt;
use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};

use super::buffers::{KvBuffers, KvFormat};
use super::{AttentionCache, NewTokens};
use crate::mask::{Placement, RebaseDims};
use crate::sdpa::accumulation_dtype;
use crate::{
    AttentionMask, AttentionOutput, EmptyRows, Plan, SdpaOptions, merge_attention, plan, scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse, scaled_dot_product_attention_with_weights,
};

/// How many positions of 8 bits are floats at a time: enough that the cost of a call is small against their work.
const Q8_POSITIONS: usize = 2048;

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

/// The keys and values of a call behind those of the calls before. The cache changes only in [`commit`](Self::commit).
#[derive(Debug)]
pub(crate) struct StagedAppend<'c> {
    cache: &'c mut AttentionCache,
    new: NewTokens,
    /// The dtype of the call's keys.
    dtype: DType,
    /// What attention reads.
    read: HeldKv,
    /// What the cache keeps: less, where a call brings more than a sliding cache holds.
    kept: HeldKv,
    pub(super) expansion: Option<&'c dyn Expand>,
    /// Whether a graph refers to the buffers that are read.
    in_graph: Cell<bool>,
}

impl<'c> StagedAppend<'c> {
    /// `kv` are the call's keys and values in the format of the cache, `dtype` that in which they came.
    pub(super) fn new(cache: &'c mut AttentionCache, new: NewTokens, kv: &KvBuffers, dtype: DType) -> Result<Self> {
        let held = if cache.held.is_empty() { vec![0..0; new.tokens.len()] } else { cache.held.clone() };
        let buffers = cache.buffers.as_ref().filter(|buffers| buffers.accepts(kv));
        let grown: Vec<_> = held.iter().zip(new.ends()).map(|(held, end)| held.start..end).collect();
        let needed = longest(&grown);
        let most = cache.config.most_held().unwrap_or(usize::MAX);
        let capacity = buffers.map_or(0, KvBuffers::capacity);

        let (read, kept) = if let Some(buffers) = buffers.filter(|_| needed <= capacity) {
            append(buffers, &held, kv, &new)?;
            let all = HeldKv { buffers: buffers.clone(), held: grown };
            (all.clone(), all)
        } else if needed <= most {
            let first = cache.config.first_capacity();
            let larger = kv.empty_like(held.len(), capacity.saturating_mul(2).max(first).max(needed).min(most))?;
            if let Some(buffers) = buffers {
                larger.write(0, buffers)?;
            }
            append(&larger, &held, kv, &new)?;
            let all = HeldKv { buffers: larger, held: grown };
            (all.clone(), all)
        } else if let Some(window) = cache.config.window() {
            // New buffers, so that a call that fails leaves the cache as it was. They are made once in every
            // `capacity - window` positions. Before the first new token, a window reaches back by one key less than its
            // length.
            let before: Vec<_> = held.iter().map(|held| last(held, window - 1)).collect();
            let after: Vec<_> = before.iter().zip(new.ends()).map(|(before, end)| before.start..end).collect();
            let slid = kv.empty_like(held.len(), longest(&after).max(most))?;
            if let Some(buffers) = buffers {
                copy_positions(buffers, &held, &before, &slid)?;
            }
            append(&slid, &before, kv, &new)?;
            let read = HeldKv { buffers: slid, held: after };
            let kept: Vec<_> = read.held.iter().map(|held| last(held, most)).collect();
            let kept = if kept == read.held {
                read.clone()
            } else {
                let buffers = read.buffers.empty_like(kept.len(), most)?;
                copy_positions(&read.buffers, &read.held, &kept, &buffers)?;
                HeldKv { buffers, held: kept }
            };
            (read, kept)
        } else {
            let full = grown.iter().position(|held| held.len() > most).unwrap_or(0);
            bail!(
                "[attention_cache] sequence {full} holds {} positions, and {} more exceed the capacity of {most}",
                held[full].len(),
                new.tokens[full].len()
            )
        };
        Ok(Self { cache, new, dtype, read, kept, expansion: None, in_graph: Cell::new(false) })
    }

    /// Attention from the call's queries (B, H, T_q, D) to all keys; the mask counts positions in the sequence.
    pub fn attend(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
        let query = self.query(q)?;
        let context = match self.read.buffers.format() {
            KvFormat::Q8 => self.attend_in_parts(&query, mask, options, Q8_POSITIONS)?,
            KvFormat::Float(_) => {
                let (rows, mask) = self.whole(q, mask)?;
                let (k, v) = self.read(&rows)?;
                let context = scaled_dot_product_attention(&query, &k, &v, &mask, options)?;
                self.in_graph.set(context.track_op());
                context
            }
        };
        context.to_dtype(q.dtype())
    }

    /// [`attend`](Self::attend) that also returns the weights (B, H, T_q, T_kv) over the keys that the cache holds, in
    /// one call over all of them.
    pub fn attend_with_weights(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<AttentionOutput> {
        if self.read.buffers.format() == KvFormat::Q8 {
            check_parts(mask, options)?;
        }
        let (rows, mask) = self.whole(q, mask)?;
        let (k, v) = self.read(&rows)?;
        let AttentionOutput { context, weights } =
            scaled_dot_product_attention_with_weights(&self.query(q)?, &k, &v, &mask, options)?;
        self.in_graph.set(context.track_op());
        Ok(AttentionOutput { context: context.to_dtype(q.dtype())?, weights: weights.to_dtype(q.dtype())? })
    }

    /// The path that [`attend`](Self::attend) takes, and why; of 8 bits, that of the first part of the keys.
    pub fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        let query = self.query(q)?;
        let (mut rows, _) = self.whole(q, mask)?;
        if self.read.buffers.format() == KvFormat::Q8 {
            check_parts(mask, options)?;
            rows.end = rows.end.min(Q8_POSITIONS);
        }
        let (k, v) = self.read(&rows)?;
        plan(&query, &k, &v, &self.mask_of_rows(q, mask, &rows)?, options)
    }

    /// Makes the call's keys and values part of the cache.
    ///
    /// Later calls write to the buffers of a cache in place. A graph that refers to them keeps them for its `backward`, and
    /// the cache goes on with a copy.
    ///
    /// # Errors
    /// For a copy that does not fit in memory.
    pub fn commit(self) -> Result<()> {
        let HeldKv { buffers, held } = self.kept;
        self.cache.buffers = Some(if self.in_graph.get() { buffers.copy()? } else { buffers });
        self.cache.held = held;
        self.cache.dtype = Some(self.dtype);
        Ok(())
    }

    /// Keys (B, H_kv, rows, D) and values (B, H_kv, rows, D_v): views, or of 8 bits as floats, or computed from these.
    pub(super) fn read(&self, rows: &Range<usize>) -> Result<(Tensor, Tensor)> {
        let (keys, values) = self.read.buffers.read(rows, self.float_dtype())?;
        let Some(expansion) = self.expansion else { return Ok((keys, values)) };
        let (keys, values) = expansion.expand(&keys)?;
        Ok(if self.cache.config.detached() { (keys.detach(), values.detach()) } else { (keys, values) })
    }

    /// What attention is computed in.
    fn float_dtype(&self) -> DType {
        match self.read.buffers.format() {
            KvFormat::Float(dtype) => dtype,
            KvFormat::Q8 => accumulation_dtype(self.dtype),
        }
    }

    fn query(&self, q: &Tensor) -> Result<Tensor> {
        let q = if self.cache.config.detached() { q.detach() } else { q.clone() };
        q.to_dtype(self.float_dtype())
    }

    /// The rows of the buffers that hold a key of some sequence, and the mask for them.
    ///
    /// # Errors
    /// If a query sees a key that a sliding cache no longer holds, and for a mask that does not fit.
    pub(super) fn whole(&self, q: &Tensor, mask: &AttentionMask) -> Result<(Range<usize>, AttentionMask)> {
        let held = &self.read.held;
        let rows = 0..longest(held);
        if held.iter().any(|held| held.start > 0)
            && let Some((sequence, position)) = mask.missing_key(&self.placements(&rows), q.dim(2)?)?
        {
            bail!(
                "[attention_cache] a query of sequence {sequence} sees the key at position {position}, but the cache \
                 holds those from {} on; expected a shorter window in the mask, or a longer one in the cache",
                held[sequence].start
            )
        }
        let mask = self.mask_of_rows(q, mask, &rows)?;
        Ok((rows, mask))
    }

    fn mask_of_rows(&self, q: &Tensor, mask: &AttentionMask, rows: &Range<usize>) -> Result<AttentionMask> {
        mask.rebase(&self.placements(rows), dims_of(q, rows)?, q.device())
    }

    fn placements(&self, rows: &Range<usize>) -> Vec<Placement> {
        let of_sequence = |(sequence, held): (usize, &Range<usize>)| {
            let (before, tokens) = (self.new.before[sequence], self.new.tokens[sequence].clone());
            Placement {
                query: before as i128 - tokens.start as i128,
                keys: held.start + rows.start.min(held.len())..held.start + rows.end.min(held.len()),
                end: before + tokens.len(),
                tokens,
            }
        };
        self.read.held.iter().enumerate().map(of_sequence).collect()
    }
}

/// Attention over keys that become floats some positions at a time. A sink is one more score of the whole, which the first
/// part counts.
impl StagedAppend<'_> {
    /// Attention over at most `most` positions at a time, of those from the first to the last that a query sees.
    pub(super) fn attend_in_parts(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        most: usize,
    ) -> Result<Tensor> {
        check_parts(mask, options)?;
        let (rows, whole) = self.whole(q, mask)?;
        let (b, _, t_q, _) = q.dims4()?;
        let ranges = whole.resolve(b, t_q, rows.end)?;
        let seen = (0..b * t_q).map(|row| ranges.kv_range(row / t_q, row % t_q)).filter(|seen| !seen.is_empty());
        let seen = seen.reduce(|all, seen| all.start.min(seen.start)..all.end.max(seen.end)).unwrap_or(0..0);

        let mut parts = split(seen, most).into_iter();
        let first = parts.next().unwrap_or(0..0);
        let (k, v) = self.read(&first)?;
        let of_first = self.mask_of_rows(q, mask, &first)?;
        if parts.len() == 0 {
            return scaled_dot_product_attention(q, &k, &v, &of_first, options);
        }
        let mut merged = scaled_dot_product_attention_with_lse(q, &k, &v, &of_first, options)?;
        let without_sinks = SdpaOptions { sinks: None, ..options.clone() };
        for rows in parts {
            let (k, v) = self.read(&rows)?;
            let mask = self.mask_of_rows(q, mask, &rows)?;
            let part = scaled_dot_product_attention_with_lse(q, &k, &v, &mask, &without_sinks)?;
            // One at a time, since a context is as large as the queries.
            merged = merge_attention(&[merged, part])?;
        }
        Ok(merged.0)
    }
}

/// Refuses what has no meaning for a part of the keys.
fn check_parts(mask: &AttentionMask, options: &SdpaOptions) -> Result<()> {
    if mask.empty_rows() == EmptyRows::Uniform {
        bail!(
            "[attention_cache] uniform empty rows weigh all keys at once, which a cache of 8 bits does not; expected \
             empty rows of zeros"
        )
    }
    if options.train && options.dropout > 0.0 && options.dropout_seed.is_some() {
        bail!(
            "[attention_cache] a dropout seed draws for all keys at once, which a cache of 8 bits does not; expected \
             dropout without a seed"
        )
    }
    Ok(())
}

fn dims_of(q: &Tensor, rows: &Range<usize>) -> Result<RebaseDims> {
    let (_, h, t_q, _) = q.dims4()?;
    Ok(RebaseDims { h, t_q, rows: rows.len() })
}

/// A range in pieces of at most `most`; one that is empty is one piece.
fn split(rows: Range<usize>, most: usize) -> Vec<Range<usize>> {
    if rows.is_empty() {
        return vec![rows];
    }
    rows.clone().step_by(most).map(|start| start..rows.end.min(start.saturating_add(most))).collect()
}

/// The most positions that are held of a sequence.
fn longest(held: &[Range<usize>]) -> usize {
    held.iter().map(Range::len).max().unwrap_or(0)
}

/// The last n positions, or all.
fn last(held: &Range<usize>, n: usize) -> Range<usize> {
    held.end - held.len().min(n)..held.end
}

/// Copies some of the held positions of each sequence to the front of other buffers.
fn copy_positions(from: &KvBuffers, held: &[Range<usize>], copied: &[Range<usize>], to: &KvBuffers) -> Result<()> {
    for (sequence, (held, copied)) in held.iter().zip(copied).enumerate() {
        to.write_sequence(sequence, 0, &from.rows(sequence, copied.start - held.start..copied.end - held.start)?)?;
    }
    Ok(())
}

/// Writes the tokens of a call behind what is held.
fn append(to: &KvBuffers, held: &[Range<usize>], kv: &KvBuffers, new: &NewTokens) -> Result<()> {
    let at = held.first().map_or(0, Range::len);
    if new.all_valid() && held.iter().all(|held| held.len() == at) {
        return to.write(at, kv);
    }
    for (sequence, (held, tokens)) in held.iter().zip(&new.tokens).enumerate() {
        to.write_sequence(sequence, held.len(), &kv.rows(sequence, tokens.clone())?)?;
    }
    Ok(())
}
