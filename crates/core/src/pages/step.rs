//! One pass through a model: new tokens of some sequences, and the pages that they are written to.

use std::ops::Deref;

use candle_core::{Result, bail};

use super::states::{OP, StateAfter, StepStates, forget_prefix};
use super::table::{PageTable, StepTokens, StoredSequence};
use crate::sdpa::{PackedSequences, PagedSequences};
use candle_attention_modules::base::check_memory;

/// The new tokens of a step: which sequences they are of, their positions, and the rows of a pool that store them.
#[derive(Debug)]
pub struct PagedTokens {
    pub(super) table: u64,
    /// The number of the step.
    pub(super) number: u64,
    /// The number of the last step before that was committed.
    pub(super) committed: u64,
    /// The number of times that rows were moved before.
    pub(super) moved: u64,
    pub(super) pages: usize,
    pub(super) page_size: usize,
    sequences: PagedSequences,
    /// The length of each sequence before the step.
    before: Vec<usize>,
    copies: Vec<PageCopy>,
    runs: Vec<RowRun>,
    /// The states of each sequence; empty in a table without states.
    states: Vec<StepStates>,
}

/// A page to copy in every pool before the tokens of a step are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The index of the page that is read.
    pub from: u32,
    /// The index of the page that is written.
    pub to: u32,
}

/// Tokens whose rows in a pool are next to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowRun {
    /// The first of the tokens among all of the step.
    pub token: usize,
    /// The row of the first token: its page times the page size, and its position in the page.
    pub row: usize,
    pub len: usize,
}

impl PagedTokens {
    /// Returns the queries and the pages of each sequence with the new tokens, for
    /// [`scaled_dot_product_attention_paged`](crate::scaled_dot_product_attention_paged).
    pub fn sequences(&self) -> &PagedSequences {
        &self.sequences
    }

    /// Returns the number of tokens of all sequences.
    pub fn total_tokens(&self) -> usize {
        self.sequences.total_queries()
    }

    /// Returns the position of each token in its sequence.
    pub fn positions(&self) -> Vec<u32> {
        let mut positions = Vec::with_capacity(self.total_tokens());
        for (s, &before) in self.before.iter().enumerate() {
            positions.extend((before..self.sequences.keys(s).end).map(|position| position as u32));
        }
        positions
    }

    /// Returns the index of the last token of each sequence that brings tokens: the rows with the logits of the next
    /// tokens.
    pub fn last_tokens(&self) -> Vec<u32> {
        let queries = (0..self.sequences.len()).map(|s| self.sequences.queries(s));
        queries.filter(|tokens| !tokens.is_empty()).map(|tokens| (tokens.end - 1) as u32).collect()
    }

    /// Returns the pages to copy, before the tokens are written. A [`KvPool`](crate::KvPool) copies them itself.
    pub fn copies(&self) -> &[PageCopy] {
        &self.copies
    }

    /// Returns the row of each token in a pool (pages · page size, ..). A [`KvPool`](crate::KvPool) writes to them
    /// itself.
    #[doc(alias = "slot_mapping")]
    pub fn rows(&self) -> Vec<u32> {
        self.runs.iter().flat_map(|run| run.row as u32..(run.row + run.len) as u32).collect()
    }

    /// Returns the states of each sequence, for recurrent layers; none in a table without
    /// [states](PageTable::with_states). A layer begins with the state before the new tokens, or with zeros, and writes
    /// the states after them. A `DeltaPool` does both itself.
    pub fn states(&self) -> &[StepStates] {
        &self.states
    }

    /// Returns the length of each sequence before the step.
    pub(crate) fn before(&self) -> &[usize] {
        &self.before
    }

    /// Returns the queries of each sequence, and its keys as if they were packed.
    pub(crate) fn packed(&self) -> &PackedSequences {
        self.sequences.packed()
    }

    pub(super) fn runs(&self) -> &[RowRun] {
        &self.runs
    }
}

/// A step of a [`PageTable`]: pages are taken for new [tokens](PagedTokens), which every layer stores. The sequences
/// grow when it is [committed](Self::commit). If it is dropped, because a layer failed, the pages are free again, and
/// no sequence has changed.
#[derive(Debug)]
#[must_use]
pub struct PagedStep<'t> {
    table: &'t mut PageTable,
    tokens: PagedTokens,
    planned: Vec<PlannedSequence>,
    is_committed: bool,
}

/// A sequence after a step.
#[derive(Debug)]
struct PlannedSequence {
    slot: usize,
    len: usize,
    pages: Vec<u32>,
    /// The pages that were taken for it.
    taken: Vec<u32>,
    /// The page in whose place it has a copy.
    copied: Option<u32>,
    /// The states that were taken for it.
    new_states: Vec<StateAfter>,
}

impl Deref for PagedStep<'_> {
    type Target = PagedTokens;

    fn deref(&self) -> &PagedTokens {
        &self.tokens
    }
}

impl PageTable {
    /// Begins a step, a pass through the model with new tokens of some sequences: takes pages for them. The caller
    /// calls every layer with the step, and then [commits](PagedStep::commit) it. A step that is dropped without that
    /// changes no sequence.
    ///
    /// The packed tokens of the step are the tokens of the first entry, then the tokens of the second, and so on.
    ///
    /// # Errors
    /// For a sequence that was freed, is of another table or is listed twice, and for more pages than are free: the
    /// error says how many are.
    pub fn step(&mut self, entries: &[StepTokens]) -> Result<PagedStep<'_>> {
        PagedStep::begin(self, entries)
    }
}

impl<'t> PagedStep<'t> {
    fn begin(table: &'t mut PageTable, entries: &[StepTokens]) -> Result<Self> {
        check_entries(table, entries)?;
        table.begun += 1;
        let page_size = table.page_size;
        let mut planned = Vec::with_capacity(entries.len());
        let mut copies = Vec::new();
        let mut runs = Vec::new();
        let mut before = Vec::with_capacity(entries.len());
        let mut first_positions = Vec::with_capacity(entries.len());
        let mut cu_seqlens_q = vec![0];
        let mut states = Vec::new();
        let mut token = 0;
        for entry in entries {
            let stored = table.sequence(entry.sequence)?.clone();
            let copied = table.copied_page(&stored, entry.tokens);
            let len = stored.len + entry.tokens;
            let new_states = take_states(table, &stored, entry.tokens, &mut states)?;
            let mut pages = stored.pages;
            let mut taken = Vec::new();
            if let Some(from) = copied {
                let to = take(table)?;
                copies.push(PageCopy { from, to });
                taken.push(to);
                pages.pop();
                pages.push(to);
            }
            while pages.len() < len.div_ceil(page_size) {
                let page = take(table)?;
                taken.push(page);
                pages.push(page);
            }
            for position in stored.len..len {
                let row = pages[position / page_size] as usize * page_size + position % page_size;
                add_row(&mut runs, token, row);
                token += 1;
            }
            before.push(stored.len);
            first_positions.push(stored.released * page_size);
            cu_seqlens_q.push(token);
            let slot = entry.sequence.slot();
            planned.push(PlannedSequence { slot, len, pages, taken, copied, new_states });
        }
        let lens = planned.iter().map(|sequence| sequence.len).collect();
        let pages = planned.iter().map(|sequence| sequence.pages.clone()).collect();
        let sequences = PagedSequences::new(cu_seqlens_q, lens, pages)?.with_first_positions(first_positions)?;
        let tokens = PagedTokens {
            table: table.id,
            number: table.begun,
            committed: table.committed,
            moved: table.moved,
            pages: table.pages(),
            page_size,
            sequences,
            before,
            copies,
            runs,
            states,
        };
        Ok(Self { table, tokens, planned, is_committed: false })
    }

    /// Makes the new tokens part of their sequences, once every layer has stored them.
    pub fn commit(mut self) {
        let mut copied = Vec::new();
        for sequence in &mut self.planned {
            if let Some(stored) = &mut self.table.slots[sequence.slot].sequence {
                if let Some(states) = &mut self.table.states {
                    let grown = states.grown(&stored.states, stored.len, &sequence.new_states);
                    states.release_dropped(&stored.states, &grown);
                    stored.states = grown;
                }
                stored.len = sequence.len;
                stored.pages = std::mem::take(&mut sequence.pages);
            }
            copied.extend(sequence.copied);
        }
        for page in copied {
            self.table.allocator.release(page, self.table.prefixes.has(page));
        }
        self.table.committed = self.tokens.number;
        self.is_committed = true;
    }

    /// Returns the table, with the sequences as they were before the step.
    pub fn table(&self) -> &PageTable {
        self.table
    }
}

impl Drop for PagedStep<'_> {
    fn drop(&mut self) {
        if self.is_committed {
            return;
        }
        for sequence in self.planned.iter().rev() {
            for &page in sequence.taken.iter().rev() {
                // Its rows may have been written, so that no tokens are found in it.
                self.table.allocator.release(page, false);
            }
            if let Some(states) = &mut self.table.states {
                for after in sequence.new_states.iter().rev() {
                    states.allocator.release(after.state, false);
                }
            }
        }
    }
}

/// Takes a free page, in which no tokens are found any more.
fn take(table: &mut PageTable) -> Result<u32> {
    let Some(taken) = table.allocator.take() else { bail!("[{OP}] no page is free") };
    if taken.had_prefix {
        forget_prefix(&mut table.prefixes, table.states.as_mut(), taken.page);
    }
    Ok(taken.page)
}

/// Takes states for the new tokens of a sequence, and adds its states to the states of the step.
fn take_states(
    table: &mut PageTable,
    stored: &StoredSequence,
    tokens: usize,
    of_step: &mut Vec<StepStates>,
) -> Result<Vec<StateAfter>> {
    let Some(states) = &mut table.states else { return Ok(Vec::new()) };
    let mut after = Vec::new();
    for end in states.stored_after(tokens) {
        after.push(StateAfter { tokens: end, state: states.take()? });
    }
    let before = stored.states.last().map(|present| present.state);
    of_step.push(StepStates { before, after: after.clone() });
    Ok(after)
}

/// Checks that a step can begin.
fn check_entries(table: &PageTable, entries: &[StepTokens]) -> Result<()> {
    let mut seen = vec![false; table.slots.len()];
    let mut needed = 0usize;
    let mut needed_states = 0usize;
    for (n, entry) in entries.iter().enumerate() {
        needed = needed.saturating_add(table.pages_needed(entry.sequence, entry.tokens)?);
        needed_states = needed_states.saturating_add(table.states_needed(entry.sequence, entry.tokens)?);
        if std::mem::replace(&mut seen[entry.sequence.slot()], true) {
            bail!("[{OP}] entry {n} of the step is of a sequence that is listed before, expected each once")
        }
    }
    let free = table.free_pages();
    if needed > free {
        bail!("[{OP}] the step needs {needed} pages, but {free} of {} are free", table.pages())
    }
    let free_states = table.free_states();
    if needed_states > free_states {
        bail!("[{OP}] the step needs {needed_states} states, but {free_states} of {} are free", table.states())
    }
    let tokens = entries.iter().map(|entry| entry.tokens).fold(0usize, usize::saturating_add);
    check_memory(OP, format_args!("the rows of {tokens} tokens"), &[tokens, size_of::<RowRun>()])
}

/// Adds the row of the next token.
fn add_row(runs: &mut Vec<RowRun>, token: usize, row: usize) {
    match runs.last_mut() {
        Some(run) if run.row + run.len == row => run.len += 1,
        _ => runs.push(RowRun { token, row, len: 1 }),
    }
}
