//! The order in which tasks add to shared sums.

use std::sync::atomic::{AtomicUsize, Ordering};

/// The progress of each task through the tiles of its rows. A task adds to sums that tiles share with other tasks after
/// all tasks before it in its chain have passed the last of these tiles, so that a sum has the same order for any
/// number of threads.
///
/// Tasks are started in their order and a task waits for earlier ones only, so the first of the running tasks never
/// waits.
pub(super) struct Chain {
    passed: Vec<AtomicUsize>,
    /// The distance from a task to the one before it in its chain.
    step: usize,
}

/// The progress of a task that is done.
const DONE: usize = usize::MAX - 1;
/// The progress of a task that is done, like all tasks before it in its chain.
const ALL_DONE: usize = usize::MAX;
/// The number of rounds that a waiting thread spins before it yields.
const SPINS: usize = 1 << 10;

impl Chain {
    /// Creates the chain of some tasks; `None` if there is no memory for them.
    pub fn new(tasks: usize, step: usize) -> Option<Self> {
        let mut passed = Vec::new();
        passed.try_reserve_exact(tasks).ok()?;
        passed.resize_with(tasks, AtomicUsize::default);
        Some(Self { passed, step })
    }

    /// Records that a task has passed the tiles before this one.
    pub fn pass(&self, task: usize, tile: usize) {
        self.passed[task].store(tile, Ordering::Release);
    }

    /// Records that a task is done.
    pub fn finish(&self, task: usize) {
        let before = match task.checked_sub(self.step) {
            Some(before) => self.passed[before].load(Ordering::Acquire),
            None => ALL_DONE,
        };
        self.passed[task].store(if before == ALL_DONE { ALL_DONE } else { DONE }, Ordering::Release);
    }

    /// Waits until every earlier task of the chain has passed a tile.
    pub fn wait(&self, task: usize, tile: usize) {
        let mut next = task.checked_sub(self.step);
        let mut spins = 0;
        while let Some(before) = next {
            match self.passed[before].load(Ordering::Acquire) {
                ALL_DONE => return,
                passed if passed > tile => next = before.checked_sub(self.step),
                _ if spins < SPINS => {
                    spins += 1;
                    std::hint::spin_loop();
                }
                _ => std::thread::yield_now(),
            }
        }
    }

    /// Waits until every earlier task of the chain is done.
    pub fn wait_for_all(&self, task: usize) {
        self.wait(task, DONE - 1);
    }
}
