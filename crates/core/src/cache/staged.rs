//! One call with a cache. Its keys and values are staged behind the stored ones and attended to; the cache changes only
//! if the call succeeds. A later layer's call attends to what an earlier layer's call stored.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};

use super::storage::{KvBuffers, KvCodes, KvShapes, KvSizes, StoredRows};
use super::tokens::NewTokens;
use super::{AttentionCache, EarlierPadding, OP};
use crate::mask::{AttentionMask, Placement};
use crate::sdpa::{
    AttentionResult, Call, OutputOnly, Plan, Qkv, Request, SdpaOptions, choose, plan_of_call, run_on, run_request,
};

/// Computes keys (B, H, T, D) and values (B, H, T, D_v) from the rows (B, H_kv, T, width) of a cache, in their dtype.
type Expansion<'e> = Box<dyn Fn(&Tensor) -> Result<[Tensor; 2]> + 'e>;

/// The stored keys and values that one call attends to, with the call's own if it has some.
pub(crate) struct CachedCall<'e> {
    buffers: KvBuffers,
    /// For each sequence, where its queries are located and which keys the buffers store: the first of them is in row
    /// 0.
    placements: Vec<Placement>,
    /// The dtype in which attention to floats is computed.
    dtype: DType,
    /// Whether gradients end at the cache.
    detached: bool,
    is_of_earlier_layer: bool,
    /// Computes the keys and values that are attended to from the stored ones, if these are latents.
    pub expansion: Option<Expansion<'e>>,
}

/// The rows of the buffers that a call attends to, and the mask and the options for these rows.
pub(super) struct ReadRows {
    pub buffers: KvBuffers,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
}

impl AttentionCache {
    /// Stages the keys (B, H_kv, T, D) and values (B, H_kv, T, D_v) of a call behind the stored ones. Returns what the
    /// call attends to, and the cache after the call. Without `own_v`, values are the first `d_v` columns of the keys.
    ///
    /// # Errors
    /// For keys and values that do not fit each other or the stored ones, for keys that are tracked for gradients, and
    /// for more positions than the cache may store.
    pub(crate) fn stage<'e>(
        &self,
        new: &NewTokens,
        k: &Tensor,
        own_v: Option<&Tensor>,
        d_v: usize,
    ) -> Result<(CachedCall<'e>, Self)> {
        let kv = self.encode(k, own_v, d_v)?;
        let held = if self.held.is_empty() { vec![0..0; new.tokens.len()] } else { self.held.clone() };
        let own = self.buffers.as_ref().filter(|own| own.accepts(&kv));
        let kept = self.evict_for(new, &held, own.map_or(0, KvBuffers::capacity))?;
        let read = new.appended_to(&kept);
        let buffers = self.reserve(own, &kv, &rows_of(&held, &kept), longest(&read))?;
        buffers.append(&kv, &kept, new)?;
        let cached = CachedCall {
            dtype: buffers.float_dtype(k.dtype()),
            detached: self.config.detached(),
            placements: new.placements(&read),
            is_of_earlier_layer: false,
            expansion: None,
            buffers,
        };
        let after = self.commit(new, &cached.buffers, read, k.dtype())?;
        Ok((cached, after))
    }

    /// Returns which of the stored positions `held` a call attends to: all of them, if they and the new ones fit; else
    /// those within the window of a sliding cache.
    ///
    /// # Errors
    /// For more positions than a cache without a window may store.
    fn evict_for(&self, new: &NewTokens, held: &[Range<usize>], capacity: usize) -> Result<Vec<Range<usize>>> {
        let most = self.config.most_held().unwrap_or(usize::MAX);
        let with_new = new.appended_to(held);
        if longest(&with_new) <= most.max(capacity) {
            return Ok(held.to_vec());
        }
        let Some(window) = self.config.window() else {
            let full = with_new.iter().position(|range| range.len() > most).unwrap_or(0);
            bail!(
                "[{OP}] sequence {full} holds {} positions, and {} more exceed the capacity of {most}",
                held[full].len(),
                new.tokens[full].len()
            )
        };
        // The first new token attends to `window - 1` positions before it.
        Ok(held.iter().map(|held| last(held, window - 1)).collect())
    }

    /// Returns buffers with memory for `needed` positions, of which the first ones store `rows` of the own buffers: the
    /// own buffers, if all of their rows are kept and there is memory; else new ones, so that a call that fails leaves
    /// the cache as it was. A sliding cache needs new ones once in every `capacity - window` positions.
    fn reserve(
        &self,
        own: Option<&KvBuffers>,
        kv: &KvBuffers,
        rows: &[StoredRows],
        needed: usize,
    ) -> Result<KvBuffers> {
        let capacity = own.map_or(0, KvBuffers::capacity);
        let keeps_all = |held: &Range<usize>, kept: &StoredRows| kept.rows == (0..held.len());
        let is_whole = self.held.is_empty() || self.held.iter().zip(rows).all(|(held, rows)| keeps_all(held, rows));
        let doubled = capacity.saturating_mul(2).max(self.config.first_capacity());
        let larger = needed.max(doubled.min(self.config.most_held().unwrap_or(usize::MAX)));
        match own {
            Some(own) if is_whole && needed <= capacity => Ok(own.clone()),
            Some(own) => own.gather(rows, larger),
            None => kv.zeros(rows.len(), larger),
        }
    }

    /// Returns the cache after a call that attended to the positions `read` in `buffers`.
    fn commit(&self, new: &NewTokens, buffers: &KvBuffers, read: Vec<Range<usize>>, dtype: DType) -> Result<Self> {
        let most = self.config.most_held().unwrap_or(usize::MAX);
        let kept: Vec<_> = read.iter().map(|held| last(held, most)).collect();
        let (buffers, held) = if kept == read || self.config.shared() {
            (buffers.clone(), read)
        } else {
            // A call that attends to more positions than a sliding cache stores.
            (buffers.gather(&rows_of(&read, &kept), most)?, kept)
        };
        Ok(Self {
            config: self.config.clone(),
            buffers: Some(buffers),
            held,
            positions: self.positions_with(new)?,
            dtype: Some(dtype),
            padding: EarlierPadding {
                is_stored: self.padding.is_stored || new.are_hidden,
                is_left_out: self.padding.is_left_out || new.tokens.iter().any(|tokens| tokens.start > 0),
            },
        })
    }

    /// Returns the keys and values of a call in the format of the cache.
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
            let found = kv.shapes();
            let stored = buffers.shapes();
            bail!(
                "[{OP}] keys {} and values {} do not fit those of the calls before, {} and {}",
                found.keys,
                found.values,
                stored.keys,
                stored.values
            )
        }
        Ok(kv)
    }

    /// Returns what the call of a later layer with the queries `q` attends to: the keys (B, H_kv, T, D) and values
    /// (B, H_kv, T, D_v) that an earlier layer's call of the same tokens stored, of these sizes.
    ///
    /// # Errors
    /// For other sizes, for queries of another dtype than the keys, and for a copy that does not fit in memory.
    pub(crate) fn reading<'e>(&self, new: &NewTokens, q: &Tensor, sizes: KvSizes) -> Result<CachedCall<'e>> {
        let (Some(buffers), Some(dtype)) = (&self.buffers, self.dtype) else {
            bail!("[{OP}] the cache of the earlier layer is empty, expected its call with the same tokens first")
        };
        if buffers.sizes() != Some(sizes) {
            let KvShapes { keys, values } = buffers.shapes();
            let KvSizes { h_kv, d, d_v } = sizes;
            bail!(
                "[{OP}] the earlier layer's keys {keys} and values {values} do not fit, expected H_kv = {h_kv}, D = {d} \
                 and D_v = {d_v}"
            )
        }
        if dtype != q.dtype() {
            bail!("[{OP}] the earlier layer's keys have dtype {dtype:?}, expected the queries' {:?}", q.dtype())
        }
        Ok(CachedCall {
            buffers: buffers.clone(),
            placements: new.placements(&self.held),
            dtype: buffers.float_dtype(dtype),
            detached: self.config.detached(),
            is_of_earlier_layer: true,
            expansion: None,
        })
    }
}

impl CachedCall<'_> {
    /// Returns the keys (B, H_kv, rows, D) and values (B, H_kv, rows, D_v) of rows of the buffers: views, or floats for
    /// 8 bits, or what is computed from these.
    pub(super) fn read(&self, rows: &KvBuffers) -> Result<[Tensor; 2]> {
        let floats = rows.floats(self.dtype)?;
        let Some(expand) = &self.expansion else { return Ok(floats) };
        let expanded = expand(&floats[0])?;
        Ok(if self.detached { expanded.map(|tensor| tensor.detach()) } else { expanded })
    }

    /// Returns the rows of the buffers that store a key of some sequence, with the mask and the options for these rows
    /// instead of for positions in the sequence.
    ///
    /// # Errors
    /// If the mask allows a query to attend to a key that a sliding cache has dropped, and for a mask that does not
    /// fit.
    pub(super) fn all_rows(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<ReadRows> {
        let starts: Vec<_> = self.placements.iter().map(|placement| placement.keys.start).collect();
        let rows = self.placements.iter().map(|placement| placement.keys.len()).max().unwrap_or(0);
        let (b, h, t_q, _) = q.dims4()?;
        let mask = mask.rebase(OP, &self.placements, [b, h, t_q, rows], q.device())?;
        let options = options.for_keys_from(&starts, t_q, rows)?;
        Ok(ReadRows { buffers: self.buffers.positions(&(0..rows))?, mask, options })
    }
}

impl CachedCall<'_> {
    /// Attends from queries (B, H, T_q, D): to keys and values of 8 bits if a kernel reads them and nothing else is
    /// computed from them, and to floats otherwise. Weights are over the keys that the cache stores.
    pub(crate) fn attend<R: Request>(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        request: R,
    ) -> Result<R::Result> {
        let rows = self.all_rows(q, mask, options)?;
        let q = if self.detached { &q.detach() } else { q };
        let op = request.operation(false);
        if let Some(call) = self.call_of_codes(op, q, &rows)? {
            let choice = choose(&call, request)?;
            if choice.reads_codes() {
                return run_on(choice, call, request);
            }
        }
        run_request(self.call_of_floats(op, q, &rows)?, request)?.to_dtype(q.dtype())
    }

    /// Returns the path of attention for its output.
    pub(crate) fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        let rows = self.all_rows(q, mask, options)?;
        let q = if self.detached { &q.detach() } else { q };
        if let Some(call) = self.call_of_codes("plan", q, &rows)?
            && choose(&call, OutputOnly)?.reads_codes()
        {
            return plan_of_call(&call);
        }
        plan_of_call(&self.call_of_floats("plan", q, &rows)?)
    }

    /// Returns the call of a kernel that reads keys and values of 8 bits, if the rows have them as they are attended
    /// to.
    fn call_of_codes(&self, op: &'static str, q: &Tensor, rows: &ReadRows) -> Result<Option<Call>> {
        if self.expansion.is_some() || q.device().is_metal() {
            return Ok(None);
        }
        let Some(KvCodes { k, v, scales }) = &rows.buffers.codes()? else { return Ok(None) };
        Call::with_all_dims(op, Qkv { q, k, v }, Some(scales), None, &rows.mask, &rows.options).map(Some)
    }

    /// Returns the call with keys and values as floats.
    fn call_of_floats(&self, op: &'static str, q: &Tensor, rows: &ReadRows) -> Result<Call> {
        let q = q.to_dtype(self.dtype)?;
        let call = |buffers: &KvBuffers| {
            let [k, v] = &self.read(buffers)?;
            Call::with_all_dims(op, Qkv { q: &q, k, v }, None, None, &rows.mask, &rows.options)
        };
        let in_place = call(&rows.buffers)?;
        // A copy for the graph, since later calls of the earlier layer write to its buffers in place.
        if self.is_of_earlier_layer && in_place.tracks_gradients() { call(&rows.buffers.copy()?) } else { Ok(in_place) }
    }
}

/// Returns the rows of the buffers that store a part of the stored positions, for each sequence.
fn rows_of(held: &[Range<usize>], part: &[Range<usize>]) -> Vec<StoredRows> {
    let of_sequence = |(sequence, (stored, kept)): (usize, (&Range<usize>, &Range<usize>))| StoredRows {
        sequence,
        rows: kept.start - stored.start..kept.end - stored.start,
    };
    held.iter().zip(part).enumerate().map(of_sequence).collect()
}

/// Returns the most positions that are stored for a sequence.
fn longest(held: &[Range<usize>]) -> usize {
    held.iter().map(Range::len).max().unwrap_or(0)
}

/// Returns the last n positions, or all.
fn last(held: &Range<usize>, n: usize) -> Range<usize> {
    held.end - held.len().min(n)..held.end
}
