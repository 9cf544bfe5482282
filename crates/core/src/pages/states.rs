//! The states of sequences in recurrent layers: which of the slots for states have the states of a sequence after some
//! of its positions, and which have the state after a prefix that is found by its tokens.

use std::ops::RangeInclusive;

use candle_core::{Result, bail};

use super::allocator::Allocator;
use super::prefixes::Prefixes;

/// The name of the operations of a table in errors.
pub(super) const OP: &str = "page_table";

/// The slots for states of a table. A slot is written once, by the step that takes it: sequences that share a state,
/// and steps that fail, do not change it.
#[derive(Debug)]
pub(super) struct States {
    pub allocator: Allocator,
    /// The number of last tokens of a sequence that can be taken back.
    pub drafts: usize,
    /// For each page, the state after the prefix that it is found by, if that is stored.
    after_page: Vec<Option<u32>>,
    /// For each state, the page at whose end it is, if it is found by the tokens of that page.
    page_before: Vec<Option<u32>>,
}

/// The state of a sequence after some of its positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StoredState {
    /// The number of positions before it.
    pub positions: usize,
    pub state: u32,
}

/// The states of one sequence in a step, for a recurrent layer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepStates {
    /// The slot of the state before the new tokens; `None` for a sequence that begins.
    pub before: Option<u32>,
    /// The states to store, the one after all new tokens last; none for a sequence without new tokens.
    pub after: Vec<StateAfter>,
}

/// A state to store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateAfter {
    /// The number of the step's tokens of the sequence after which it is the state.
    pub tokens: usize,
    /// The number of the slot that the state is written to.
    pub state: u32,
}

impl States {
    /// Returns slots of which none is used, for a table of `pages` pages.
    pub fn new(states: usize, pages: usize) -> Self {
        Self {
            allocator: Allocator::new(states),
            drafts: 0,
            after_page: vec![None; pages],
            page_before: vec![None; states],
        }
    }

    /// Returns the numbers of new tokens after which a step stores the state of a sequence.
    pub fn stored_after(&self, tokens: usize) -> RangeInclusive<usize> {
        let first = if tokens <= self.drafts { 1 } else { tokens };
        first.max(1)..=tokens
    }

    /// Returns the states of a sequence that grows by a step: its present ones and the new ones.
    pub fn grown(&self, present: &[StoredState], len: usize, after: &[StateAfter]) -> Vec<StoredState> {
        let new = after.iter().map(|&StateAfter { tokens, state }| StoredState { positions: len + tokens, state });
        let mut all: Vec<_> = present.iter().copied().chain(new).collect();
        if let Some(last) = all.last().copied() {
            all.retain(|stored| stored.positions + self.drafts >= last.positions);
        }
        all
    }

    /// Takes a free slot, whose state is found by no tokens any more.
    pub fn take(&mut self) -> Result<u32> {
        let Some(taken) = self.allocator.take() else { bail!("[{OP}] no state is free") };
        if let Some(page) = self.page_before[taken.page as usize].take() {
            self.after_page[page as usize] = None;
        }
        Ok(taken.page)
    }

    /// Removes a sequence from those that have these states.
    pub fn release(&mut self, states: &[StoredState]) {
        for stored in states {
            self.allocator.release(stored.state, self.page_before[stored.state as usize].is_some());
        }
    }

    /// Removes a sequence from those that have the states that it does not keep.
    pub fn release_dropped(&mut self, before: &[StoredState], kept: &[StoredState]) {
        for old in before {
            if kept.iter().all(|stored| stored.state != old.state) {
                self.release(&[*old]);
            }
        }
    }

    /// Adds a sequence to those that have these states.
    pub fn share(&mut self, states: &[StoredState]) {
        for stored in states {
            self.allocator.share(stored.state);
        }
    }

    /// Makes the states of a sequence found at the ends of pages that are found by their tokens. `found` has the page
    /// of each prefix of the sequence.
    pub fn add_found(&mut self, states: &[StoredState], found: &[u32], page_size: usize) {
        for stored in states {
            let StoredState { positions, state } = *stored;
            if !positions.is_multiple_of(page_size) || self.page_before[state as usize].is_some() {
                continue;
            }
            let Some(&page) = found.get((positions / page_size).wrapping_sub(1)) else { continue };
            if self.after_page[page as usize].is_none() {
                self.after_page[page as usize] = Some(state);
                self.page_before[state as usize] = Some(page);
            }
        }
    }

    /// Returns the state after the longest prefix that has one, of the prefixes that end with these pages.
    pub fn longest_found(&self, pages: &[u32], page_size: usize) -> Option<StoredState> {
        let (n, state) =
            pages.iter().enumerate().rev().find_map(|(n, &page)| Some((n, self.after_page[page as usize]?)))?;
        Some(StoredState { positions: (n + 1) * page_size, state })
    }

    /// Forgets the state after a page that is not found by its tokens any more.
    pub fn forget_page(&mut self, page: u32) {
        if let Some(state) = self.after_page[page as usize].take() {
            self.page_before[state as usize] = None;
            self.allocator.forget(state);
        }
    }
}

/// Removes the prefix of a page, and the state after it.
pub(super) fn forget_prefix(prefixes: &mut Prefixes, states: Option<&mut States>, page: u32) {
    prefixes.remove(page);
    if let Some(states) = states {
        states.forget_page(page);
    }
}
