//! One call with a cache. Its keys and values are staged behind the stored ones and attended to; the cache changes only
//! if the call succeeds. A later layer's call attends to what an earlier layer's call stored.

use std::ops::Range;

use candle_core::{DType, Result, Tensor, bail};

use super::rotation::{rotated, rotated_back};
use super::sink_window::SinkWindow;
use super::storage::{KvBuffers, KvCodes, KvFloats, KvRotations, KvShapes, KvSizes, Room, StoredRows};
use super::tokens::NewTokens;
use super::{AttentionCache, EarlierPadding, OP};
use crate::mask::{AttentionMask, Placement};
use crate::sdpa::{
    Attended, Call, Plan, Qkv, SdpaOptions, attend, choose, kernels_read_codes, operation, plan_of_call,
};
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::{accumulation_dtype, floats_on, floats_text};

/// Computes keys (B, H, T, D) and values (B, H, T, D_v) from the stored rows of a cache, in their dtype.
type Expansion<'e> = Box<dyn Fn(&KvFloats) -> Result<KvFloats> + 'e>;

/// A choice of the keys that each query attends to, by some columns of the stored rows.
pub(crate) struct KeyChoice<'e> {
    pub columns: Range<usize>,
    pub choose: ChooseKeys<'e>,
}

/// Returns a mask for stored rows with the chosen keys of each query, from the columns (B, H_kv, T, width).
type ChooseKeys<'e> = Box<dyn Fn(&Tensor, AttentionMask) -> Result<AttentionMask> + 'e>;

/// The stored keys and values that one call attends to, with the call's own if it has some.
pub(crate) struct CachedCall<'e> {
    pub(super) buffers: KvBuffers,
    /// The placement of each sequence: the positions of its queries, and the keys that the buffers store. The first of
    /// them is in row 0, unless there are sink tokens before them.
    pub(super) placements: Vec<Placement>,
    /// The dtype in which attention to floats is computed.
    pub(super) dtype: DType,
    /// Whether gradients end at the cache.
    pub(super) detached: bool,
    pub(super) is_of_earlier_layer: bool,
    /// Computes the keys and values that are attended to from the stored ones, if these are latents or have more
    /// columns.
    pub expansion: Option<Expansion<'e>>,
    /// Chooses the keys that each query attends to.
    pub choice: Option<KeyChoice<'e>>,
    /// The keys (1, H_kv, n, D) and values (1, H_kv, n, D_v) that follow the stored ones of each sequence, for every
    /// query to attend to.
    pub appended: Option<KvFloats>,
    /// The sink tokens and the window of the cache, if some queries do not attend to all tokens before them.
    pub sink_window: Option<SinkWindow>,
}

/// A call whose keys and values are staged.
pub(crate) struct StagedCall<'e> {
    pub call: CachedCall<'e>,
    /// The cache after the call.
    pub cache: AttentionCache,
}

/// The rows of the buffers that a call attends to, and the mask and the options for these rows.
pub(super) struct ReadRows {
    pub buffers: KvBuffers,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
}

/// A call of a kernel that reads codes.
struct CallOfCodes {
    call: Call,
    /// The rotations of the stored keys, which the queries have too, and of the values, which the output has.
    rotations: KvRotations,
}

impl AttentionCache {
    /// Stages the keys (B, H_kv, T, D) and values (B, H_kv, T, D_v) of a call behind the stored ones. Without `v`,
    /// values are the first `d_v` columns of the keys.
    ///
    /// # Errors
    /// For keys and values that do not fit each other or the stored ones, for keys that are tracked for gradients, and
    /// for more positions than the cache may store.
    pub(crate) fn stage<'e>(
        &self,
        new: &NewTokens,
        k: &Tensor,
        v: Option<&Tensor>,
        d_v: usize,
    ) -> Result<StagedCall<'e>> {
        let kv = self.encode(k, v, d_v)?;
        let stored = if self.stored.is_empty() { vec![0..0; new.tokens.len()] } else { self.stored.clone() };
        let sequences = new.tokens.len();
        let has_room = |buffers: &&KvBuffers| buffers.accepts(&kv) && sequences <= buffers.room().sequences;
        let buffers = self.buffers.as_ref().filter(has_room);
        let kept = self.evict_for(new, &stored, buffers.map_or(0, KvBuffers::capacity))?;
        let attended = new.appended_to(&kept);
        let order = self.row_order();
        let needed = Room { sequences, positions: order.longest(&attended) };
        let reserved = self.reserve(buffers, &kv, &order.rows_of(&stored, &kept), needed)?;
        let staged = reserved.first_sequences(sequences)?;
        let counts: Vec<_> = kept.iter().map(|positions| order.count(positions)).collect();
        staged.append(&kv, &counts, new)?;
        let sink_window = self.sinks_of_call(&attended);
        let call = CachedCall {
            dtype: staged.float_dtype(k.dtype()),
            detached: self.config.detached(),
            placements: new.placements(&attended),
            is_of_earlier_layer: false,
            expansion: None,
            choice: None,
            appended: None,
            sink_window,
            buffers: staged,
        };
        let cache = self.commit(new, &reserved, attended, k.dtype())?;
        Ok(StagedCall { call, cache })
    }

    /// Returns which of the stored positions a call attends to: all of them, if they and the new ones fit; else those
    /// within the window of a sliding cache.
    ///
    /// # Errors
    /// For more positions than a cache without a window may store.
    fn evict_for(&self, new: &NewTokens, stored: &[Range<usize>], capacity: usize) -> Result<Vec<Range<usize>>> {
        let limit = self.config.most_held().unwrap_or(usize::MAX);
        let with_new = new.appended_to(stored);
        let order = self.row_order();
        if order.longest(&with_new) <= limit.max(capacity) {
            return Ok(stored.to_vec());
        }
        let Some(window) = self.config.window() else {
            let full = with_new.iter().position(|positions| positions.len() > limit).unwrap_or(0);
            bail!(
                "[{OP}] sequence {full} holds {} positions, and {} more exceed the capacity of {limit}",
                stored[full].len(),
                new.tokens[full].len()
            )
        };
        // The first new token attends to `window - 1` positions before it, sink tokens among them.
        let before = window - order.sink_tokens - 1;
        Ok(stored.iter().map(|positions| order.last(positions, before)).collect())
    }

    /// Returns buffers with memory for `needed`, of which the first ones store `rows` of the present buffers: these
    /// buffers, if all of their rows are kept and there is memory; else new ones, so that an error leaves the cache as
    /// it was. A sliding cache needs new ones once in every `capacity - window` positions. `kv` has the format of new
    /// buffers if there are none.
    pub(super) fn reserve(
        &self,
        present: Option<&KvBuffers>,
        kv: &KvBuffers,
        rows: &[StoredRows],
        needed: Room,
    ) -> Result<KvBuffers> {
        let Some(present) = present else {
            return kv.zeros(Room { positions: self.larger_capacity(0, needed.positions), ..needed });
        };
        let room = present.room();
        let is_whole = |(sequence, positions)| rows.get(sequence) == Some(&self.row_order().all(sequence, positions));
        let keeps_all = self.stored.iter().enumerate().all(is_whole);
        let has_positions = keeps_all && needed.positions <= room.positions;
        if has_positions && needed.sequences <= room.sequences {
            return Ok(present.clone());
        }
        let positions =
            if has_positions { room.positions } else { self.larger_capacity(room.positions, needed.positions) };
        present.gather(rows, Room { sequences: needed.sequences.max(room.sequences), positions })
    }

    /// Returns the capacity of new buffers, which is larger than the present one and at least `needed`.
    fn larger_capacity(&self, present: usize, needed: usize) -> usize {
        let doubled = present.saturating_mul(2).max(self.config.first_capacity());
        needed.max(doubled.min(self.config.most_held().unwrap_or(usize::MAX)))
    }

    /// Returns the positions of each sequence that the cache stores: the last ones, unless an earlier layer's cache is
    /// shared.
    pub(super) fn last_stored(&self, positions: &[Range<usize>]) -> Vec<Range<usize>> {
        let order = self.row_order();
        let limit = self.config.most_held().filter(|_| !self.config.shared()).unwrap_or(usize::MAX);
        let newest = |own: &Range<usize>| {
            if order.count(own) <= limit { own.clone() } else { order.last(own, limit - order.sink_tokens) }
        };
        positions.iter().map(newest).collect()
    }

    /// Returns the cache after a call that attended to the positions `attended` in `buffers`.
    fn commit(&self, new: &NewTokens, buffers: &KvBuffers, attended: Vec<Range<usize>>, dtype: DType) -> Result<Self> {
        let positions = self.positions_with(new)?;
        let padding = EarlierPadding {
            is_stored: self.padding.is_stored || new.some_are_masked,
            is_left_out: self.padding.is_left_out || new.tokens.iter().any(|tokens| tokens.start > 0),
        };
        let config = self.config.clone();
        let kept = self.last_stored(&attended);
        if kept == attended {
            let buffers = Some(buffers.clone());
            return Ok(Self { config, buffers, stored: attended, positions, dtype: Some(dtype), padding });
        }
        // The call attended to more positions than a sliding cache stores.
        let limit = self.config.most_held().unwrap_or(usize::MAX);
        let room = Room { positions: limit, ..buffers.room() };
        let buffers = Some(buffers.gather(&self.row_order().rows_of(&attended, &kept), room)?);
        Ok(Self { config, buffers, stored: kept, positions, dtype: Some(dtype), padding })
    }

    /// Returns the keys and values of a call in the format of the cache.
    fn encode(&self, k: &Tensor, v: Option<&Tensor>, d_v: usize) -> Result<KvBuffers> {
        if let Some(dtype) = self.dtype.filter(|&dtype| dtype != k.dtype()) {
            bail!("[{OP}] keys have dtype {:?}, expected {dtype:?} as in the calls before", k.dtype())
        }
        if (k.track_op() || v.is_some_and(Tensor::track_op)) && !self.config.detached() {
            bail!(
                "[{OP}] keys or values are tracked for gradients, which a cache would lose; expected a layer after \
                 `freeze()` and an input `xs.detach()`, or a cache made `with_detached(true)`"
            )
        }
        if let Some(dtype) = self.config.dtype().filter(|dtype| !floats_on(k.device()).contains(dtype)) {
            bail!("[{OP}] dtype is {dtype:?}, expected {}", floats_text(k.device()))
        }
        let kv = KvBuffers::encode(k, v, d_v, self.format(k.dtype()))?;
        if let Some(buffers) = &self.buffers
            && !self.stored.is_empty()
            && !buffers.accepts(&kv)
        {
            let found = kv.shapes();
            let stored = buffers.first_sequences(self.stored.len())?.shapes();
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
        let buffers = buffers.first_sequences(self.stored.len())?;
        if buffers.sizes() != Some(sizes) {
            let KvShapes { keys, values } = buffers.shapes();
            let KvSizes { h_kv, d, d_v } = sizes;
            bail!(
                "[{OP}] the earlier layer's keys {keys} and values {values} do not fit, expected H_kv = {h_kv}, D = \
                 {d} and D_v = {d_v}"
            )
        }
        if dtype != q.dtype() {
            bail!("[{OP}] the earlier layer's keys have dtype {dtype:?}, expected the queries' {:?}", q.dtype())
        }
        Ok(CachedCall {
            placements: new.placements(&self.stored),
            dtype: buffers.float_dtype(dtype),
            detached: self.config.detached(),
            is_of_earlier_layer: true,
            expansion: None,
            choice: None,
            appended: None,
            sink_window: self.sinks_of_call(&self.stored),
            buffers,
        })
    }
}

impl CachedCall<'_> {
    /// Returns the keys (B, H_kv, rows, D) and values (B, H_kv, rows, D_v) of rows of the buffers: views, or floats if
    /// the buffers have codes. A call with an expansion computes keys and values from what is stored.
    pub(super) fn read(&self, rows: &KvBuffers) -> Result<KvFloats> {
        let floats = rows.floats(self.dtype)?;
        let Some(expand) = &self.expansion else { return Ok(floats) };
        let KvFloats { k, v } = expand(&floats)?;
        if self.detached {
            return Ok(KvFloats { k: k.detach(), v: v.detach() });
        }
        Ok(KvFloats { k, v })
    }

    /// Returns stored keys and values followed by the appended ones: a copy, if there are some.
    fn with_appended(&self, stored: KvFloats) -> Result<KvFloats> {
        let Some(appended) = &self.appended else { return Ok(stored) };
        let converted = |rows: &Tensor| {
            let own = if self.detached { rows.detach() } else { rows.clone() };
            own.to_dtype(self.dtype)
        };
        stored.followed_by(&KvFloats { k: converted(&appended.k)?, v: converted(&appended.v)? })
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
        let dims = [b, h, t_q, rows];
        let mut mask = mask.rebase(OP, &self.placements, dims, q.device())?;
        if let Some(appended) = &self.appended {
            mask = mask.with_appended_keys(appended.k.dim(2)?, dims, accumulation_dtype(q.dtype()), q.device())?;
        }
        let buffers = self.buffers.rows(&(0..rows))?;
        if let Some(KeyChoice { columns, choose }) = &self.choice {
            mask = choose(&buffers.key_columns(columns, self.dtype)?, mask)?;
        }
        let options = options.for_keys_from(&starts, t_q, rows)?;
        Ok(ReadRows { buffers, mask, options })
    }
}

impl CachedCall<'_> {
    /// Attends from queries (B, H, T_q, D): to codes of keys and values if a kernel reads them and nothing else is
    /// computed from them, and to floats otherwise. Weights are over the keys that the cache stores.
    pub(crate) fn attend(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: RequestedResults,
    ) -> Result<Attended> {
        if let Some(sink_window) = &self.sink_window {
            return self.attend_in_parts(sink_window, q, options, wanted);
        }
        let rows = self.all_rows(q, mask, options)?;
        let q = if self.detached { &q.detach() } else { q };
        let op = operation(wanted, false);
        if let Some(CallOfCodes { call, rotations }) = self.call_of_codes(op, q, &rows)? {
            let chosen = choose(call, wanted)?;
            if chosen.choice.reads_codes() {
                return rotated_back(chosen.attend(wanted)?, rotations.v);
            }
        }
        attend(self.call_of_floats(op, q, &rows)?, wanted)?.into_dtype(q.dtype())
    }

    /// Returns the path of attention for its output.
    pub(crate) fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        if let Some(sink_window) = &self.sink_window {
            let last_keys = self.last_keys(sink_window)?;
            return last_keys.plan(q, &sink_window.mask_of_last_keys(q.dim(0)?), options);
        }
        let rows = self.all_rows(q, mask, options)?;
        let q = if self.detached { &q.detach() } else { q };
        if let Some(CallOfCodes { call, .. }) = self.call_of_codes("plan", q, &rows)? {
            let chosen = choose(call, RequestedResults::default())?;
            if chosen.choice.reads_codes() {
                return Ok(chosen.plan());
            }
        }
        plan_of_call(self.call_of_floats("plan", q, &rows)?)
    }

    /// Returns the call of a kernel that reads codes, if the rows have them as they are attended to and the kernels of
    /// the device read them.
    fn call_of_codes(&self, op: &'static str, q: &Tensor, rows: &ReadRows) -> Result<Option<CallOfCodes>> {
        if self.expansion.is_some() || self.appended.is_some() {
            return Ok(None);
        }
        let Some(KvCodes { k, v, scales, rotations }) = rows.buffers.codes()? else { return Ok(None) };
        if !kernels_read_codes(q.device()) {
            return Ok(None);
        }
        let qkv = Qkv { q: &rotated(q, rotations.k)?, k: &k, v: &v };
        let call = Call::with_all_dims(op, qkv, Some(&scales), None, &rows.mask, &rows.options)?;
        Ok(Some(CallOfCodes { call, rotations }))
    }

    /// Returns the call with keys and values as floats.
    fn call_of_floats(&self, op: &'static str, q: &Tensor, rows: &ReadRows) -> Result<Call> {
        let q = q.to_dtype(self.dtype)?;
        let call = |buffers: &KvBuffers| {
            let KvFloats { k, v } = self.with_appended(self.read(buffers)?)?;
            Call::with_all_dims(op, Qkv { q: &q, k: &k, v: &v }, None, None, &rows.mask, &rows.options)
        };
        let in_place = call(&rows.buffers)?;
        // A copy for the graph, since later calls of the earlier layer write to its buffers in place.
        if self.is_of_earlier_layer && in_place.tracks_gradients() { call(&rows.buffers.copy()?) } else { Ok(in_place) }
    }
}
