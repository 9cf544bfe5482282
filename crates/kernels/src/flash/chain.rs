//! Sums over tasks in a fixed order.

use std::sync::atomic::{AtomicUsize, Ordering};

/// How far each task has come through the tiles of its rows. A task adds to what tiles share with other tasks after all
/// tasks before it in its chain have passed the last of these tiles, so that a sum has the same order for any number of
/// threads.
///
/// Tasks are started in their order and a task waits for earlier ones only, so the first of those that run never waits.
pub(super) struct Chain {
    passed: Vec<AtomicUsize>,
    /// How many tasks before a task the one before it in its chain is.
    step: usize,
}

/// The task is done.
const DONE: usize = usize::MAX - 1;
/// The task and all before it in its chain are done.
const ALL_DONE: usize = usize::MAX;
/// A thread that waits for longer lets others run.
const SPINS: usize = 1 << 10;

impl Chain {
    /// `None` where there is no memory for so many tasks.
    pub fn new(tasks: usize, step: usize) -> Option<Self> {
        let mut passed = Vec::new();
        passed.try_reserve_exact(tasks).ok()?;
        passed.resize_with(tasks, AtomicUsize::default);
        Some(Self { passed, step })
    }

    /// That the task has passed the tiles before this one.
    pub fn pass(&self, task: usize, tile: usize) {
        self.passed[task].store(tile, Ordering::Release);
    }

    pub fn finish(&self, task: usize) {
        let before = task.checked_sub(self.step).map_or(ALL_DONE, |before| self.passed[before].load(Ordering::Acquire));
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
