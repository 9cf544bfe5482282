//! The pages that are free, and the numbers of sequences that have each of the others; the states likewise.

use std::collections::BTreeMap;

/// The pages of a table, or its states.
#[derive(Debug)]
pub(super) struct Allocator {
    /// The number of sequences that have each page.
    references: Vec<u32>,
    /// Free pages without a prefix, the next one last.
    blank: Vec<u32>,
    /// Free pages that are still found by their tokens, in the order in which they were freed.
    found: BTreeMap<u64, u32>,
    /// The key of each page in `found`.
    freed_at: Vec<Option<u64>>,
    /// The next key.
    next: u64,
}

/// A page that was taken.
pub(super) struct TakenPage {
    pub page: u32,
    /// Whether the page was found by its tokens until now.
    pub had_prefix: bool,
}

impl Allocator {
    pub fn new(pages: usize) -> Self {
        Self {
            references: vec![0; pages],
            blank: (0..pages as u32).rev().collect(),
            found: BTreeMap::new(),
            freed_at: vec![None; pages],
            next: 0,
        }
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.references.len()
    }

    /// Returns the number of free pages.
    pub fn free(&self) -> usize {
        self.blank.len() + self.found.len()
    }

    /// Returns the number of free pages whose keys are kept, and can be found by their tokens.
    pub fn found(&self) -> usize {
        self.found.len()
    }

    /// Returns the number of sequences that have a page.
    pub fn references(&self, page: u32) -> u32 {
        self.references[page as usize]
    }

    /// Takes a free page for one sequence: one without a prefix if there is one, otherwise the one that was freed
    /// first.
    pub fn take(&mut self) -> Option<TakenPage> {
        let taken = match self.blank.pop() {
            Some(page) => TakenPage { page, had_prefix: false },
            None => TakenPage { page: self.found.pop_first()?.1, had_prefix: true },
        };
        self.freed_at[taken.page as usize] = None;
        self.references[taken.page as usize] = 1;
        Some(taken)
    }

    /// Makes a page no longer found by its tokens.
    pub fn forget(&mut self, page: u32) {
        if let Some(freed_at) = self.freed_at[page as usize].take() {
            self.found.remove(&freed_at);
            self.blank.push(page);
        }
    }

    /// Adds a sequence to those that have a page, which may be a free page that is found by its tokens.
    pub fn share(&mut self, page: u32) {
        if let Some(freed_at) = self.freed_at[page as usize].take() {
            self.found.remove(&freed_at);
        }
        self.references[page as usize] += 1;
    }

    /// Removes a sequence from those that have a page. A page that none has any more is free; `has_prefix` tells
    /// whether it is found by its tokens.
    pub fn release(&mut self, page: u32, has_prefix: bool) {
        let references = &mut self.references[page as usize];
        *references -= 1;
        if *references > 0 {
            return;
        }
        if has_prefix {
            self.freed_at[page as usize] = Some(self.next);
            self.found.insert(self.next, page);
            self.next += 1;
        } else {
            self.blank.push(page);
        }
    }
}
