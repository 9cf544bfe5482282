//! Threads, over which the work of a call is split.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads of the caller for brief calls. Rayon's threads take longer to wake.
#[derive(Debug, Clone, Copy)]
pub struct Executor {
    /// Returns the number of threads of `run`, the calling one included.
    pub threads: fn() -> usize,
    /// Runs the work on the calling thread and on the other threads at the same time, and returns when all have
    /// finished. The work does not call the executor. Results do not depend on how many threads run the work.
    pub run: fn(&(dyn Fn() + Sync)),
}

/// The threads of a call.
#[derive(Debug, Clone, Copy)]
pub struct Workers {
    pub(crate) count: usize,
    /// Whether the call takes about as long as a thread takes to wake. The calling thread then works too, instead of
    /// waiting for the pool.
    is_brief: bool,
    executor: Option<Executor>,
}

/// The multiply-adds that are worth a second thread: some tens of microseconds, a few times as long as a thread takes
/// to wake.
const MULTIPLY_ADDS_OF_A_THREAD: usize = 1 << 20;

/// The bytes whose reading is worth a second thread: one core reads them from memory in 10 to 20 µs.
const BYTES_OF_A_THREAD: usize = 1 << 18;

/// The most multiply-adds of a brief call, as a multiple of a thread's. Longer calls are faster on the pool's threads
/// alone: the system tends to wake a thread on the core of the thread that wakes it, and takes a while to move one of
/// the two.
const BRIEF: usize = 96;

/// The most threads of an executor for each thread that a call is worth. An executor wakes all of its threads, and
/// rayon wakes only the threads that a call needs.
const THREADS_FOR_ONE: usize = 4;

impl Workers {
    /// Chooses the threads of a call from its multiply-adds and the bytes that it reads once. A brief call runs on the
    /// executor, if one is given.
    pub fn of(multiply_adds: usize, bytes: usize, executor: Option<Executor>) -> Self {
        let worth = (multiply_adds / MULTIPLY_ADDS_OF_A_THREAD).max(bytes / BYTES_OF_A_THREAD).saturating_add(1);
        let is_brief = multiply_adds / MULTIPLY_ADDS_OF_A_THREAD <= BRIEF;
        // A call that is worth one thread does not start a pool.
        if worth == 1 {
            return Self { count: 1, is_brief, executor: None };
        }
        let most = worth.saturating_mul(THREADS_FOR_ONE);
        let suitable = executor.filter(|executor| is_brief && (executor.threads)() <= most);
        let threads = match suitable {
            Some(Executor { threads, .. }) => threads(),
            None => rayon::current_num_threads(),
        };
        Self { count: threads.clamp(1, worth), is_brief, executor: suitable }
    }
}

/// Runs `task` for every index below `tasks`, the first ones first, on the workers' executor or on the threads of the
/// caller's rayon pool. This is the global pool, whose size `RAYON_NUM_THREADS` sets and which Candle's operations use
/// too, or a pool that the caller has installed. Each thread that takes part makes one `state`.
///
/// A thread takes the next index when it has finished one, so that tasks of unequal size even out. A task must not
/// depend on the thread that runs it. The result then does not depend on the number of threads.
pub fn for_each_task<S>(
    tasks: usize,
    workers: Workers,
    state: &(dyn Fn() -> S + Sync),
    task: &(dyn Fn(&mut S, usize) + Sync),
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
    on_threads(workers, count - 1, &work);
}

/// Runs `task` for every index below `tasks`, as [`for_each_task`] does, without a state.
pub fn for_each_index(tasks: usize, workers: Workers, task: &(dyn Fn(usize) + Sync)) {
    for_each_task(tasks, workers, &|| (), &|(), index| task(index));
}

/// Runs `work` on the calling thread and on `others` other threads.
fn on_threads(workers: Workers, others: usize, work: &(dyn Fn() + Sync)) {
    match (workers.executor, workers.is_brief) {
        (Some(executor), _) => {
            (executor.run)(work);
            // An executor may have run nothing.
            work();
        }
        (None, true) => rayon::in_place_scope(|scope| share(scope, others, work)),
        (None, false) => rayon::scope(|scope| share(scope, others, work)),
    }
}

/// Starts `work` on other threads of the scope, and runs it on this one.
fn share<'s>(scope: &rayon::Scope<'s>, others: usize, work: &'s (dyn Fn() + Sync)) {
    for _ in 0..others {
        scope.spawn(|_| work());
    }
    work();
}
