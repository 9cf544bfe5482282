//! The pages that are found by the tokens of a prefix: whole pages, by a hash and then by the token ids themselves.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

/// The token ids of a page and of all pages before it.
#[derive(Debug)]
pub(super) struct Prefix {
    /// The hash of all ids.
    hash: u64,
    /// The ids of the page.
    ids: Box<[u32]>,
    before: Option<Arc<Prefix>>,
}

impl Prefix {
    fn new(ids: &[u32], before: Option<&Arc<Self>>) -> Self {
        Self { hash: hash(ids, before), ids: ids.into(), before: before.cloned() }
    }

    /// Returns whether all ids belong to a page and the pages before it.
    fn is(&self, ids: &[u32], before: Option<&Arc<Self>>) -> bool {
        if *self.ids != *ids {
            return false;
        }
        let mut own = self.before.as_ref();
        let mut other = before;
        loop {
            match (own, other) {
                (None, None) => return true,
                (Some(one), Some(two)) if Arc::ptr_eq(one, two) => return true,
                (Some(one), Some(two)) if one.ids == two.ids => {
                    own = one.before.as_ref();
                    other = two.before.as_ref();
                }
                _ => return false,
            }
        }
    }
}

impl Drop for Prefix {
    /// Drops the prefixes before in a loop, since a long text would overflow the stack otherwise.
    fn drop(&mut self) {
        let mut before = self.before.take();
        while let Some(mut prefix) = before.and_then(Arc::into_inner) {
            before = prefix.before.take();
        }
    }
}

fn hash(ids: &[u32], before: Option<&Arc<Prefix>>) -> u64 {
    let mut hasher = DefaultHasher::new();
    before.map(|prefix| prefix.hash).hash(&mut hasher);
    ids.hash(&mut hasher);
    hasher.finish()
}

/// The full pages of a pool with the tokens that they store, so that a sequence that begins with the same tokens can
/// share them.
#[derive(Debug)]
pub(super) struct Prefixes {
    by_hash: HashMap<u64, Vec<u32>>,
    /// The prefix of each page that has one.
    of_page: Vec<Option<Arc<Prefix>>>,
}

impl Prefixes {
    pub fn new(pages: usize) -> Self {
        Self { by_hash: HashMap::new(), of_page: vec![None; pages] }
    }

    /// Returns the prefix that ends with a page, if the page can be found by its tokens.
    pub fn of_page(&self, page: u32) -> Option<&Arc<Prefix>> {
        self.of_page[page as usize].as_ref()
    }

    /// Returns whether a page can be found by its tokens.
    pub fn has(&self, page: u32) -> bool {
        self.of_page(page).is_some()
    }

    /// Returns the page of the token ids of one page after a prefix.
    fn find_after(&self, ids: &[u32], before: Option<&Arc<Prefix>>) -> Option<u32> {
        let candidates = self.by_hash.get(&hash(ids, before))?;
        candidates.iter().copied().find(|&page| self.of_page(page).is_some_and(|prefix| prefix.is(ids, before)))
    }

    /// Returns the pages of the longest prefix of `ids` whose whole pages of `page_size` tokens are found.
    pub fn find(&self, ids: &[u32], page_size: usize) -> Vec<u32> {
        let mut pages = Vec::new();
        let mut before = None;
        for of_page in ids.chunks_exact(page_size) {
            let Some(page) = self.find_after(of_page, before) else { break };
            before = self.of_page(page);
            pages.push(page);
        }
        pages
    }

    /// Returns the prefix of each whole page of `ids`: the one of a page that is found, or a new one.
    pub fn chain(&self, ids: &[u32], page_size: usize) -> Vec<Arc<Prefix>> {
        let mut chain: Vec<Arc<Prefix>> = Vec::new();
        for of_page in ids.chunks_exact(page_size) {
            let before = chain.last();
            let known = self.find_after(of_page, before).and_then(|page| self.of_page(page)).cloned();
            let prefix = known.unwrap_or_else(|| Arc::new(Prefix::new(of_page, before)));
            chain.push(prefix);
        }
        chain
    }

    /// Returns the page that is found by a prefix.
    pub fn page_of(&self, prefix: &Prefix) -> Option<u32> {
        self.find_after(&prefix.ids, prefix.before.as_ref())
    }

    /// Returns whether two prefixes have the same ids.
    pub fn are_equal(one: &Arc<Prefix>, other: &Arc<Prefix>) -> bool {
        Arc::ptr_eq(one, other) || one.is(&other.ids, other.before.as_ref())
    }

    /// Makes a page found by a prefix, unless another page is.
    pub fn add(&mut self, page: u32, prefix: &Arc<Prefix>) {
        if self.has(page) || self.find_after(&prefix.ids, prefix.before.as_ref()).is_some() {
            return;
        }
        self.by_hash.entry(prefix.hash).or_default().push(page);
        self.of_page[page as usize] = Some(Arc::clone(prefix));
    }

    /// Makes a page no longer found.
    pub fn remove(&mut self, page: u32) {
        let Some(prefix) = self.of_page[page as usize].take() else { return };
        if let Some(pages) = self.by_hash.get_mut(&prefix.hash) {
            pages.retain(|&other| other != page);
            if pages.is_empty() {
                self.by_hash.remove(&prefix.hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_with_equal_hashes_are_told_apart_by_their_ids() {
        let mut prefixes = Prefixes::new(2);
        let mut forged = Prefix::new(&[1, 2], None);
        forged.hash = hash(&[3, 4], None);
        prefixes.add(0, &Arc::new(forged));
        assert_eq!(prefixes.find(&[3, 4], 2), Vec::<u32>::new());
        prefixes.add(1, &Arc::new(Prefix::new(&[3, 4], None)));
        assert_eq!(prefixes.find(&[3, 4], 2), [1]);
    }

    #[test]
    fn prefix_after_a_page_that_was_replaced_is_found_by_all_of_its_ids() {
        let mut prefixes = Prefixes::new(4);
        let chain = prefixes.chain(&[1, 1, 2, 2], 2);
        prefixes.add(0, &chain[0]);
        prefixes.add(1, &chain[1]);
        prefixes.remove(0);
        assert_eq!(prefixes.find(&[1, 1, 2, 2], 2), Vec::<u32>::new());
        let again = prefixes.chain(&[1, 1], 2);
        prefixes.add(3, &again[0]);
        assert_eq!(prefixes.find(&[1, 1, 2, 2, 5], 2), [3, 1]);
        assert_eq!(prefixes.find(&[1, 0, 2, 2], 2), Vec::<u32>::new());
    }

    #[test]
    fn prefix_of_a_long_text_drops_without_overflowing_the_stack() {
        let prefixes = Prefixes::new(0);
        drop(prefixes.chain(&vec![0; 1_000_000], 1));
    }
}
