//! How work is split over threads.

use std::sync::atomic::{AtomicUsize, Ordering};

/// How many threads a call is worth, and how they come together.
#[derive(Debug, Clone, Copy)]
pub struct Workers {
    pub(crate) count: usize,
    /// The call is over in about the time in which a thread wakes: the caller works too, instead of waiting for the pool.
    is_brief: bool,
}

/// Multiply-adds that are worth a second thread: some tens of microseconds, a few times what waking it takes.
const WORTH_A_THREAD: usize = 1 << 20;

/// The most multiply-adds, in the same unit, of a call that is brief. In longer ones the pool's threads do better by
/// themselves: the system tends to wake a thread beside the one that wakes it, and takes a while to part the two.
const BRIEF: usize = 96;

impl Workers {
    /// For so many multiply-adds.
    pub fn of(products: usize) -> Self {
        // A call that is worth one does not start a pool.
        match products / WORTH_A_THREAD {
            0 => Self { count: 1, is_brief: true },
            more => Self { count: rayon::current_num_threads().min(more + 1), is_brief: more <= BRIEF },
        }
    }
}

/// Runs `task` for every index below `tasks`, the first ones first, on the threads of the rayon pool that the caller is
/// in: the global one, as Candle's own operations, which honours `RAYON_NUM_THREADS`, or any other that the caller
/// entered. Each thread that takes part makes itself one `state`.
///
/// A thread takes the next index when it is done with its last, so that tasks of unequal size even out. What an index
/// computes may not depend on the thread; then the result does not depend on their number.
pub fn for_each_task<S>(
    tasks: usize,
    workers: Workers,
    state: impl Fn() -> S + Sync,
    task: impl Fn(&mut S, usize) + Sync,
) {
    let count = workers.count.min(tasks);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut index = next.fetch_add(1, Ordering::Relaxed);
        if index >= tasks {
            return;
        }
        let mut state = state();
        while index < tasks {
            task(&mut state, index);
            index = next.fetch_add(1, Ordering::Relaxed);
        }
    };
    if count <= 1 {
        return work();
    }
    let others = count - 1;
    match workers.is_brief {
        true => rayon::in_place_scope(|scope| share(scope, others, &work)),
        false => rayon::scope(|scope| share(scope, others, &work)),
    }
}

fn share<'s>(scope: &rayon::Scope<'s>, others: usize, work: &'s (impl Fn() + Sync)) {
    for _ in 0..others {
        scope.spawn(|_| work());
    }
    work();
}
