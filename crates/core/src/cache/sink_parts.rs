//! A call past the window of a cache that keeps sink tokens. Its queries attend to the sink tokens and to the last
//! tokens in two parts, which are merged exactly: a query has another position for the former than for the latter.

use std::ops::Range;

use candle_core::{Result, Tensor, bail};

use super::OP;
use super::sink_window::SinkWindow;
use super::staged::CachedCall;
use crate::mask::AttentionMask;
use crate::sdpa::{Attended, AttentionStatistics, SdpaOptions, merge_attention, operation};
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::accumulation_dtype;

impl CachedCall<'_> {
    /// Sets the queries (B, H, T_q, D) that attend to the sink tokens past the window, if they differ from the queries
    /// of the call.
    pub(crate) fn attend_to_sinks_from(&mut self, queries: Option<Tensor>) {
        if let Some(sink_window) = &mut self.sink_window {
            sink_window.queries = queries;
        }
    }

    /// Attends from queries (B, H, T_q, D) to the sink tokens and to the last keys. The columns of weights are the rows
    /// of the cache.
    pub(super) fn attend_in_parts(
        &self,
        sinks: &SinkWindow,
        q: &Tensor,
        options: &SdpaOptions,
        wanted: RequestedResults,
    ) -> Result<Attended> {
        if wanted.statistics.is_some() && options.dropout > 0.0 {
            bail!("[{OP}] statistics were requested past the window of a cache with sink tokens, expected no dropout")
        }
        let b = q.dim(0)?;
        let of_part = RequestedResults {
            weights: wanted.weights || wanted.statistics.is_some(),
            log_sum_exp: true,
            ..RequestedResults::default()
        };
        let last = self.last_keys(sinks)?.attend(q, &sinks.mask_of_last_keys(b), options, of_part)?;
        // A learned logit belongs to one of the two sums.
        let of_sinks = SdpaOptions { sinks: None, ..options.clone() };
        let sink_queries = sinks.queries.as_ref().unwrap_or(q);
        let first = self.sink_keys(sinks)?.attend(sink_queries, &AttentionMask::causal(), &of_sinks, of_part)?;
        merged([first, last], wanted)
    }

    /// Returns the call with the keys of the sink tokens alone.
    fn sink_keys(&self, sinks: &SinkWindow) -> Result<CachedCall<'static>> {
        let rows = sinks.sink_tokens.min(self.buffers.capacity());
        self.part(0..rows, |keys| 0..keys.end.min(sinks.sink_tokens))
    }

    /// Returns the call without the keys of the sink tokens.
    pub(super) fn last_keys(&self, sinks: &SinkWindow) -> Result<CachedCall<'static>> {
        let count = sinks.sink_tokens;
        let capacity = self.buffers.capacity();
        self.part(count.min(capacity)..capacity, |keys| keys.start.max(count)..keys.end.max(count))
    }

    /// Returns the call with some rows of the buffers, which store the positions `keys(stored)` of each sequence.
    fn part(&self, rows: Range<usize>, keys: impl Fn(&Range<usize>) -> Range<usize>) -> Result<CachedCall<'static>> {
        let mut placements = self.placements.clone();
        for placement in &mut placements {
            placement.keys = keys(&placement.keys);
        }
        Ok(CachedCall {
            buffers: self.buffers.rows(&rows)?,
            placements,
            dtype: self.dtype,
            detached: self.detached,
            is_of_earlier_layer: self.is_of_earlier_layer,
            expansion: None,
            choice: None,
            appended: None,
            sink_window: None,
        })
    }
}

/// Merges attention to two parts of the keys, each with its log-sum-exp and its weights if these are needed.
fn merged(parts: [Attended; 2], wanted: RequestedResults) -> Result<Attended> {
    let mut pairs = Vec::new();
    let mut weights = Vec::new();
    for part in parts {
        weights.push(part.weights.clone());
        pairs.push(part.output_and_log_sum_exp()?);
    }
    let (output, log_sum_exp) = merge_attention(&pairs)?;
    let mut attended = Attended::from(output);
    let mut columns = Vec::new();
    for ((_, part_log_sum_exp), part_weights) in pairs.iter().zip(weights) {
        if let Some(part_weights) = part_weights {
            columns.push(share_of_part(&part_weights, part_log_sum_exp, &log_sum_exp)?);
        }
    }
    if !columns.is_empty() {
        let all = Tensor::cat(&columns, 3)?;
        if let Some(requested) = wanted.statistics {
            attended.statistics = Some(AttentionStatistics::of_weights(operation(wanted, false), &all, requested)?);
        }
        if wanted.weights {
            attended.weights = Some(all);
        }
    }
    if wanted.log_sum_exp {
        attended.log_sum_exp = Some(log_sum_exp);
    }
    Ok(attended)
}

/// Returns the weights of a part (B, H, T_q, keys) as weights of all keys: times the share of the part's sum of
/// exponentials. A part in which a query attends to no key has no share.
fn share_of_part(weights: &Tensor, part: &Tensor, all: &Tensor) -> Result<Tensor> {
    let is_empty = part.eq(f64::NEG_INFINITY)?;
    let difference = is_empty.where_cond(&part.zeros_like()?, &(part - all)?)?;
    let share = is_empty.where_cond(&part.zeros_like()?, &difference.exp()?)?.unsqueeze(3)?;
    let dtype = accumulation_dtype(weights.dtype());
    weights.to_dtype(dtype)?.broadcast_mul(&share.to_dtype(dtype)?)?.to_dtype(weights.dtype())
}
