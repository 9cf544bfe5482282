//! The last tokens of a cache, which can be taken back: the projections of each token, and the states before them.

use candle_core::{Error, Result, Tensor, bail};

use super::recurrence::{Recurrence, RecurrentInputs};
use super::state::{CachedState, OP};
use super::tree::{Trees, is_row};
use candle_attention_core::internal::{NewTokens, Padding};

/// The last tokens of each sequence.
#[derive(Debug, Clone, Default)]
pub(super) struct Drafts {
    /// The number of last tokens of a sequence that can be taken back.
    limit: usize,
    /// The parts of the layer that compute a state from its tokens; `None` before the first call.
    recurrence: Option<Recurrence>,
    /// The last calls of each sequence, the earliest first. Each begins where the one before it ends, and the last one
    /// ends with the last token of the sequence. A limit of 0 has no calls.
    sequences: Vec<Vec<DraftedCall>>,
}

/// The tokens of one sequence in one call.
#[derive(Debug, Clone)]
struct DraftedCall {
    /// The state of the sequence before the call.
    before: CachedState,
    /// (1, t, ..).
    inputs: RecurrentInputs,
    /// The number of tokens.
    count: usize,
    /// The parent of each token in the tree of the call; `None` if each token follows the one before.
    parents: Option<Vec<Option<usize>>>,
}

/// A call of a layer, for the cache.
pub(super) struct RecordedCall<'a> {
    pub recurrence: &'a Recurrence,
    /// The state of all sequences before the call; `None` if they begin.
    pub before: Option<CachedState>,
    pub inputs: &'a RecurrentInputs,
    pub tokens: &'a NewTokens,
    pub trees: Option<Trees<'a>>,
}

/// The state of one sequence after some of its last tokens.
#[derive(Debug)]
pub(super) struct ChosenTokens {
    /// The calls that remain.
    calls: Vec<DraftedCall>,
    /// The state before the tokens of the last of `calls`, or the state itself.
    base: CachedState,
    /// Whether the tokens of the last of `calls` come after `base`.
    is_computed: bool,
    /// The number of tokens that stay where they were.
    pub unchanged: usize,
}

/// The tokens that a sequence keeps: those up to a length, and some of the later ones.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeptTokens<'a> {
    pub sequence: usize,
    /// The number of first tokens that the sequence keeps.
    pub len: usize,
    /// The later tokens that the sequence keeps, in increasing order: n is the token at position `len + n`.
    pub later: &'a [usize],
}

impl Drafts {
    pub fn with_limit(limit: usize) -> Self {
        Self { limit, ..Self::default() }
    }

    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Removes all tokens.
    pub fn reset(&mut self) {
        *self = Self::with_limit(self.limit);
    }

    /// Returns the tensors that are stored.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.sequences.iter().flatten().flat_map(|call| {
            let states = [&call.before.conv_inputs, &call.before.head_states];
            states.into_iter().chain(call.inputs.all())
        })
    }

    /// Stores the tokens of a call, and drops tokens that came before the last ones.
    pub fn record(&mut self, call: &RecordedCall) -> Result<()> {
        if self.limit == 0 {
            return Ok(());
        }
        let batch = call.tokens.tokens.len();
        let initial;
        let before = match &call.before {
            Some(state) => state,
            None => {
                initial = call.recurrence.initial_state(batch, call.inputs)?;
                &initial
            }
        };
        // All copies are made before anything changes, so that an error changes nothing.
        let mut recorded = Vec::with_capacity(batch);
        for (sequence, own) in call.tokens.tokens.iter().enumerate() {
            if own.is_empty() || own.len() > self.limit {
                recorded.push(None);
                continue;
            }
            let of_sequence =
                |xs: &Tensor| xs.narrow(0, sequence, 1)?.narrow(1, own.start, own.len())?.force_contiguous();
            let tree = call.trees.map(|trees| trees.of(sequence)).filter(|tree| !is_row(tree));
            recorded.push(Some(DraftedCall {
                before: before.of_sequence(sequence)?,
                inputs: call.inputs.map(of_sequence)?,
                count: own.len(),
                parents: tree.map(|tree| tree.parents().to_vec()),
            }));
        }
        self.sequences.resize(batch, Vec::new());
        self.recurrence = Some(call.recurrence.clone());
        for ((calls, own), tokens) in self.sequences.iter_mut().zip(recorded).zip(&call.tokens.tokens) {
            if tokens.len() > self.limit {
                calls.clear();
            }
            calls.extend(own);
        }
        self.drop_early_calls();
        Ok(())
    }

    /// Drops calls before the last `limit` tokens of each sequence.
    fn drop_early_calls(&mut self) {
        for calls in &mut self.sequences {
            let mut count: usize = calls.iter().map(|call| call.count).sum();
            let mut dropped = 0;
            for call in calls.iter() {
                count -= call.count;
                if count < self.limit {
                    break;
                }
                dropped += 1;
            }
            calls.drain(..dropped);
        }
    }

    /// Replaces sequence n by sequence `sequences[n]`.
    pub fn reorder(&mut self, sequences: &[usize]) {
        if self.limit > 0 {
            self.sequences = sequences.iter().map(|&sequence| self.sequences[sequence].clone()).collect();
        }
    }

    /// Adds the sequences of another cache, which has `added` of them.
    pub fn join(&mut self, other: &Self, added: usize) {
        if self.limit == 0 {
            return;
        }
        let own = self.sequences.len();
        self.sequences.extend(other.sequences.iter().cloned());
        self.sequences.resize(own + added, Vec::new());
        if self.recurrence.is_none() {
            self.recurrence.clone_from(&other.recurrence);
        }
        self.drop_early_calls();
    }

    /// Returns the state of a sequence after the tokens that it keeps. `present` is the state of the sequence.
    ///
    /// # Errors
    /// For tokens that are not stored any more, and for tokens of a tree that are not one path.
    pub fn choose(&self, kept: KeptTokens, present: CachedState) -> Result<ChosenTokens> {
        let KeptTokens { sequence, len, .. } = kept;
        let end = present.lens[0];
        let calls = self.sequences.get(sequence).map(Vec::as_slice).unwrap_or_default();
        if len == end && kept.later.is_empty() {
            return Ok(ChosenTokens { calls: calls.to_vec(), base: present, is_computed: true, unchanged: end });
        }
        let Some(first) = calls.iter().rposition(|call| call.before.lens[0] <= len) else {
            let least = calls.first().map_or(end, |call| call.before.lens[0]);
            bail!(
                "[{OP}] sequence {sequence} has {end} tokens and keeps {len}, expected at least {least}: the cache was \
                 made `with_drafts({})`, and calls of more tokens cannot be taken back",
                self.limit
            )
        };
        let base = calls[first].before.clone();
        let mut selected = Vec::new();
        for call in &calls[first..] {
            let rows = kept.rows_of(call);
            if !call.is_path(&rows) {
                return Err(not_a_path(sequence, &rows));
            }
            if !rows.is_empty() {
                selected.push(call.selected(&rows)?);
            }
        }
        let mut remaining = calls[..first].to_vec();
        let is_computed = selected.is_empty();
        if !is_computed {
            let inputs = RecurrentInputs::one_after_the_other(&selected)?;
            let count = inputs.q.dim(1)?;
            remaining.push(DraftedCall { before: base.clone(), inputs, count, parents: None });
        }
        Ok(ChosenTokens { calls: remaining, base, is_computed, unchanged: len })
    }

    /// Returns the states after the tokens that were chosen for each sequence.
    pub fn state_after(&self, chosen: &[ChosenTokens]) -> Result<CachedState> {
        let mut states: Vec<_> = chosen.iter().map(|own| own.base.clone()).collect();
        let mut computed = Vec::new();
        let mut inputs = Vec::new();
        let mut counts = Vec::new();
        for (sequence, own) in chosen.iter().enumerate() {
            if let (false, Some(call)) = (own.is_computed, own.calls.last()) {
                computed.push(sequence);
                inputs.push(&call.inputs);
                counts.push(call.count);
            }
        }
        if let (Some(recurrence), Some(&longest)) = (&self.recurrence, counts.iter().max()) {
            let bases: Vec<_> = computed.iter().map(|&sequence| &states[sequence]).collect();
            let before = CachedState::concatenated(&bases)?;
            let padding = Padding { starts: None, valid_lens: Some(&counts) };
            let tokens = NewTokens::new(OP, before.lens.clone(), (counts.len(), longest), padding, |_| String::new())?;
            let after = recurrence.run(&RecurrentInputs::padded(&inputs)?, Some(&before), Some(&tokens))?;
            let Some(conv_inputs) = after.conv_inputs else { bail!("[{OP}] the last inputs are missing") };
            let after = CachedState {
                is_tree: vec![false; counts.len()],
                lens: tokens.ends().collect(),
                conv_inputs,
                head_states: after.head_states,
            };
            for (row, &sequence) in computed.iter().enumerate() {
                states[sequence] = after.of_sequence(row)?;
            }
        }
        CachedState::concatenated(&states.iter().collect::<Vec<_>>())
    }

    /// Replaces the stored tokens by those that were chosen for each sequence.
    pub fn set(&mut self, chosen: Vec<ChosenTokens>) {
        if self.limit > 0 {
            self.sequences = chosen.into_iter().map(|own| own.calls).collect();
        }
    }

    /// Removes the tokens after the lengths of an earlier state.
    pub fn truncate_to(&mut self, lens: &[usize]) -> Result<()> {
        for (calls, &len) in self.sequences.iter_mut().zip(lens) {
            calls.retain(|call| call.before.lens[0] < len);
            if let Some(last) = calls.last_mut() {
                let count = len - last.before.lens[0];
                if count < last.count {
                    last.inputs = last.inputs.map(|xs| xs.narrow(1, 0, count))?;
                    last.count = count;
                    last.parents = None;
                }
            }
        }
        Ok(())
    }
}

impl KeptTokens<'_> {
    /// Returns the tokens of a call that are kept.
    fn rows_of(&self, call: &DraftedCall) -> Vec<usize> {
        let first = call.before.lens[0];
        let later = self.later.iter().map(|token| self.len + token);
        let positions = (first..self.len).chain(later.filter(|&position| position >= first));
        positions.map(|position| position - first).filter(|&row| row < call.count).collect()
    }
}

impl DraftedCall {
    /// Returns whether tokens are the first ones of a row, or a path of the tree.
    fn is_path(&self, rows: &[usize]) -> bool {
        let Some(parents) = &self.parents else { return true };
        let mut previous = None;
        for &row in rows {
            if parents[row] != previous {
                return false;
            }
            previous = Some(row);
        }
        true
    }

    /// Returns the inputs of some tokens.
    fn selected(&self, rows: &[usize]) -> Result<RecurrentInputs> {
        if rows.iter().enumerate().all(|(n, &row)| n == row) {
            return self.inputs.map(|xs| xs.narrow(1, 0, rows.len()));
        }
        let index: Vec<_> = rows.iter().map(|&row| row as u32).collect();
        let index = Tensor::new(index, self.inputs.q.device())?;
        self.inputs.map(|xs| xs.index_select(&index, 1))
    }
}

/// Returns the error of tokens of a tree that are not one path.
pub(super) fn not_a_path(sequence: usize, rows: &[usize]) -> Error {
    Error::msg(format!(
        "[{OP}] sequence {sequence} keeps the tokens {rows:?} of a tree, expected a path: each token the child of the \
         one before, and the first one without a parent"
    ))
}
