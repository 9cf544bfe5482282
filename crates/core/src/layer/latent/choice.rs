//! The choice of the keys that queries attend to: by the indexer of the layer, or of an earlier one.

use std::ops::Range;

use candle_core::{Result, Tensor};

use super::{LayerIndexer, MultiHeadLatentAttention, OP};
use crate::layer::indexer::{ChoiceRecord, IndexQueries, OutputWithChoice};
use crate::layer::input::AttentionInput;
use crate::mask::{AttentionMask, KeyLists};
use crate::sdpa::{Attended, AttentionStatistics, StatisticsOptions};
use candle_attention_call::RequestedResults;
use candle_attention_modules::base::rows_of;

/// The source of the keys that the queries of a call attend to.
pub(super) enum ChoiceOf {
    /// The layer's indexer, by these queries.
    Indexer(IndexQueries),
    /// The indexer of an earlier layer, which chose these.
    EarlierLayer(KeyLists),
}

/// The source of the keys that the queries of sequences in pages attend to.
pub(in crate::layer) enum PagedChoice {
    /// The layer's indexer, by these queries.
    Indexer(IndexQueries),
    /// The indexer of an earlier layer, which chose these for each sequence.
    EarlierLayer(Vec<Option<KeyLists>>),
}

impl PagedChoice {
    /// Returns the choice for the queries of one sequence, which have these indices in the step; `None` if they attend
    /// to all keys.
    pub(super) fn of_sequence(&self, sequence: usize, queries: &[u32]) -> Result<Option<ChoiceOf>> {
        Ok(match self {
            Self::Indexer(of_step) => Some(ChoiceOf::Indexer(of_step.select(|xs| rows_of(xs, 1, queries))?)),
            Self::EarlierLayer(all) => all[sequence].clone().map(ChoiceOf::EarlierLayer),
        })
    }
}

/// A choice of the keys of a call, which reads some columns of the stored rows.
pub(super) struct CallChoice {
    pub of: ChoiceOf,
    pub columns: Range<usize>,
}

impl MultiHeadLatentAttention {
    /// Computes [`forward_with`](Self::forward_with), and returns the keys that the layer's indexer chose for the
    /// queries, or those that the call was given, for later layers.
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward_with_choice<'a>(&'a self, input: impl Into<AttentionInput<'a>>) -> Result<OutputWithChoice> {
        let record = ChoiceRecord::default();
        let output = self.run_recording(input.into(), RequestedResults::default(), &record)?.output;
        Ok(OutputWithChoice { output, chosen: record.get() })
    }

    /// Computes [`forward_with_choice`](Self::forward_with_choice) and the
    /// [statistics](Self::forward_with_statistics) of the weights.
    ///
    /// # Errors
    /// As [`forward_with_statistics`](Self::forward_with_statistics).
    pub fn forward_with_choice_and_statistics<'a>(
        &'a self,
        input: impl Into<AttentionInput<'a>>,
        wanted: &StatisticsOptions,
    ) -> Result<(OutputWithChoice, AttentionStatistics)> {
        let results = RequestedResults { statistics: Some(wanted.requested()), ..RequestedResults::default() };
        let record = ChoiceRecord::default();
        let (output, statistics) = self.run_recording(input.into(), results, &record)?.output_and_statistics()?;
        Ok((OutputWithChoice { output, chosen: record.get() }, statistics))
    }

    /// Computes some results, and records the keys that are chosen for the queries.
    fn run_recording<'a>(
        &'a self,
        input: AttentionInput<'a>,
        wanted: RequestedResults,
        record: &ChoiceRecord,
    ) -> Result<Attended> {
        if input.pages.is_some() && input.has_pages_of_batch() {
            let batch = self.paged_batch(&input)?;
            let run = |own: AttentionInput| Ok(self.run_recording(own, RequestedResults::default(), record)?.output);
            return Ok(batch.run(OP, &input, wanted, run)?.into());
        }
        self.prepare_recording(&input, None, record)?.finish(input.cache, wanted)
    }

    /// Returns a mask with the keys that are chosen for each query, by the keys (B, 1, T_kv, width) of the layer's
    /// indexer if it has one, and writes them into a record.
    pub(super) fn with_chosen_keys(
        &self,
        mask: AttentionMask,
        choice: &ChoiceOf,
        keys: &Tensor,
        record: &ChoiceRecord,
    ) -> Result<AttentionMask> {
        let lists = match (choice, &self.indexer) {
            (ChoiceOf::EarlierLayer(lists), _) => Some(lists.clone()),
            (ChoiceOf::Indexer(queries), Some(LayerIndexer { module, .. })) => {
                module.choose(queries, &keys.detach().squeeze(1)?, &mask)?
            }
            (ChoiceOf::Indexer(_), None) => None,
        };
        record.set(lists.as_ref());
        Ok(match lists {
            Some(lists) => mask.with_key_lists(&lists),
            None => mask,
        })
    }
}
