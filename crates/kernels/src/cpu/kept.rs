//! Memory that stays allocated from one call to the next.

use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::memory::{CacheLine, large_page_vec};

/// The largest number of cache lines that stay allocated, 8 MB.
const MOST_LINES: usize = (8 << 20) / size_of::<CacheLine>();

static KEPT: Mutex<Vec<CacheLine>> = Mutex::new(Vec::new());

/// Cache lines for a call, which are not initialised. The memory of an earlier call serves again if it is free and
/// large enough, because the system clears each page of new memory, which takes longer than to copy numbers to it.
pub(crate) struct KeptLines {
    lines: Vec<CacheLine>,
}

impl KeptLines {
    /// Takes the kept memory, or allocates `count` lines. Returns `None` if there is no memory for them.
    pub fn new(count: usize) -> Option<Self> {
        let mut kept = kept();
        if kept.capacity() >= count {
            return Some(Self { lines: mem::take(&mut kept) });
        }
        // Other calls need not wait for the allocation.
        drop(kept);
        Some(Self { lines: large_page_vec(count)? })
    }

    pub fn as_mut_ptr(&mut self) -> *mut CacheLine {
        self.lines.as_mut_ptr()
    }
}

impl Drop for KeptLines {
    fn drop(&mut self) {
        let lines = mem::take(&mut self.lines);
        let mut kept = kept();
        if lines.capacity() > kept.capacity() && lines.capacity() <= MOST_LINES {
            *kept = lines;
        }
    }
}

/// Locks the kept memory. It has no values that a panic of another thread could make wrong.
fn kept() -> MutexGuard<'static, Vec<CacheLine>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::{CacheLine, KeptLines, MOST_LINES};

    #[test]
    fn kept_lines_of_two_calls_at_once_do_not_overlap() {
        let count = 1000;
        let mut first = KeptLines::new(count).expect("64 KB");
        let mut second = KeptLines::new(count).expect("64 KB");
        let bytes = count * size_of::<CacheLine>();
        let (one, two) = (first.as_mut_ptr().addr(), second.as_mut_ptr().addr());
        assert!(one + bytes <= two || two + bytes <= one);
    }

    #[test]
    fn kept_lines_beyond_the_limit_are_freed() {
        drop(KeptLines::new(MOST_LINES + 1).expect("8 MB"));
        assert!(super::kept().capacity() <= MOST_LINES);
    }

    #[test]
    fn kept_lines_beyond_memory_are_none() {
        assert!(KeptLines::new(usize::MAX / size_of::<CacheLine>()).is_none());
    }
}
