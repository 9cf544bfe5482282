//! The call of one sequence: the keys that its queries attend to, and the state after it.

use candle_core::{Device, Result, Tensor};

use super::cache::{CompressedRows, SequenceState};
use super::compressor::{Compressed, CompressedTokens, Compressor};
use super::forward::{ProjectedIndex, ProjectedTokens};
use super::{CompressedKeyAttention, LayerCompression, OP};
use crate::mask::{AttentionMask, KeyLists};
use crate::sdpa::{OwnKeys, SdpaOptions};
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::{check_memory, part};

/// The compressed keys of a sequence, and the choice of some of them for each query.
struct AttendedCompressedKeys {
    /// (count, D).
    keys: Tensor,
    /// (n, most keys): numbers of compressed keys, -1 for none.
    chosen: Vec<i64>,
    most: usize,
}

impl CompressedKeyAttention {
    /// Attends from the n tokens of a call in one sequence, at least one, whose projections are (1, n, ..): (1, n, H,
    /// D). It changes the state to that after them, and writes keys to buffers if the state is `stored`.
    pub(super) fn attend(
        &self,
        call: &ProjectedTokens,
        state: &mut SequenceState,
        stored: bool,
        options: &SdpaOptions,
    ) -> Result<Tensor> {
        let n = call.keys.dim(1)?;
        let window = self.config.window;
        let tokens = CompressedTokens { before: state.len, after: state.len + n };
        let mut keys = call.keys.squeeze(0)?;
        if let Some(recent) = &state.recent {
            keys = Tensor::cat(&[recent, &keys], 0)?;
        }
        let count = keys.dim(0)?;
        let kept = count.min(window - 1);
        let compressed = self.choose(call, state, tokens, stored)?;
        if stored && kept > 0 {
            state.recent = Some(part(&keys, 0, count - kept..count)?.force_contiguous()?);
        }
        state.len = tokens.after;
        let q = call.q.transpose(1, 2)?;
        let Some(AttendedCompressedKeys { keys: all, chosen, most }) = compressed else {
            return attend_to(&q, &keys, &AttentionMask::causal().with_window(window), options);
        };
        if n == 1 {
            // The rows that one query attends to are fewer than all, which a call would copy.
            let rows: Vec<u32> = chosen.iter().filter_map(|&key| u32::try_from(key).ok()).collect();
            let own = all.index_select(&Tensor::new(rows, all.device())?, 0)?;
            let nearest = part(&keys, 0, count - count.min(window)..count)?;
            return attend_to(&q, &Tensor::cat(&[nearest, own], 0)?, &AttentionMask::none(), options);
        }
        let width = window.min(count) + most;
        check_memory(OP, format_args!("lists of {width} keys for {n} queries"), &[n, width, size_of::<i64>()])?;
        let mut lists = Vec::with_capacity(n * width);
        for (query, own) in chosen.chunks_exact(most).enumerate() {
            let end = count - n + query + 1;
            let nearest = end.saturating_sub(window)..end;
            lists.extend(nearest.map(|key| key as i64));
            lists.extend(own.iter().map(|&key| if key < 0 { -1 } else { key + count as i64 }));
            lists.resize((query + 1) * width, -1);
        }
        let lists = KeyLists::new(&Tensor::from_vec(lists, (n, width), &Device::Cpu)?)?;
        let mask = AttentionMask::none().with_key_lists(&lists);
        attend_to(&q, &Tensor::cat(&[keys, all], 0)?, &mask, options)
    }

    /// Compresses the tokens of a call, and returns the compressed keys that its queries attend to; `None` if there are
    /// none.
    fn choose(
        &self,
        call: &ProjectedTokens,
        state: &mut SequenceState,
        tokens: CompressedTokens,
        stored: bool,
    ) -> Result<Option<AttendedCompressedKeys>> {
        let (Some(own), Some(projected)) = (&self.compression, &call.compressed) else { return Ok(None) };
        let LayerCompression { config, compressor, indexer } = own;
        let keys = self.compress(compressor, projected, &mut state.keys, tokens, stored)?;
        let visible: Vec<_> = (tokens.before..tokens.after).map(|token| (token + 1) / config.rate).collect();
        let mut best = None;
        if let (Some(indexer), Some(ProjectedIndex { queries, compressed })) = (indexer, &call.index) {
            let index_keys = self.compress(&indexer.compressor, compressed, &mut state.index_keys, tokens, stored)?;
            if let Some(index_keys) = index_keys {
                best = indexer.choose(queries, &index_keys, &visible)?;
            }
        }
        let Some(keys) = keys else { return Ok(None) };
        if let Some(chosen) = best {
            let most = chosen.len() / visible.len();
            return Ok(Some(AttendedCompressedKeys { keys, chosen, most }));
        }
        let count = keys.dim(0)?;
        check_memory(OP, format_args!("lists of {count} keys"), &[visible.len(), count, size_of::<i64>()])?;
        let mut chosen = Vec::with_capacity(visible.len() * count);
        for (query, &end) in visible.iter().enumerate() {
            chosen.extend((0..end).map(|key| key as i64));
            chosen.resize((query + 1) * count, -1);
        }
        Ok(Some(AttendedCompressedKeys { keys, chosen, most: count }))
    }

    /// Compresses the tokens of a call, whose projections are (1, n, ..), by one compressor. Returns all of its keys,
    /// (count, width); `None` if there are none.
    fn compress(
        &self,
        compressor: &Compressor,
        projected: &Tensor,
        rows: &mut CompressedRows,
        tokens: CompressedTokens,
        stored: bool,
    ) -> Result<Option<Tensor>> {
        let Compressed { keys, pending } =
            compressor.compress(rows.pending.as_ref(), &projected.squeeze(0)?, tokens, &self.rotary)?;
        if !stored {
            return Ok(keys);
        }
        rows.pending = pending.map(|own| own.force_contiguous()).transpose()?;
        if let Some(keys) = keys {
            rows.keys = rows.keys.followed_by(&keys)?;
        }
        rows.keys.rows()
    }
}

/// Attends from queries (1, H, n, D) to keys (count, D), which are values too: (1, n, H, D).
fn attend_to(q: &Tensor, keys: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Tensor> {
    let k = keys.unsqueeze(0)?.unsqueeze(0)?;
    let own = OwnKeys { v: k.clone(), k, sequences: None };
    own.attend(q, mask, options, RequestedResults::default())?.output.transpose(1, 2)
}
