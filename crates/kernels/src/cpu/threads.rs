//! How work is split over threads.

use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that a caller brings for brief calls, in the place of rayon's, which take longer to wake.
#[derive(Debug, Clone, Copy)]
pub struct Executor {
    /// How many threads `run` has, the calling one included.
    pub threads: fn() -> usize,
    /// Runs the work on the calling thread and on the others, at the same time, and returns when all are done. The work
    /// calls nothing of the executor's. Threads that leave it out cost time and nothing else.
    pub run: fn(&(dyn Fn() + Sync)),
}

/// How many threads a call is worth, and how they come together.
#[derive(Debug, Clone, Copy)]
pub struct Workers {
    pub(crate) count: usize,
    /// The call is over in about the time in which a thread wakes: the caller works too, instead of waiting for the
    /// pool.
    is_brief: bool,
    executor: Option<Executor>,
}

/// Multiply-adds that are worth a second thread: some tens of microseconds, a few times what waking it takes.
const MULTIPLY_ADDS_OF_A_THREAD: usize = 1 << 20;

/// Bytes whose reading is worth one: one core takes 10 to 20 µs for them from memory.
const BYTES_OF_A_THREAD: usize = 1 << 18;

/// The most multiply-adds, as a multiple of a thread's, of a call that is brief. In longer ones the pool's threads do
/// better by themselves: the system tends to wake a thread beside the one that wakes it, and takes a while to part the
/// two.
const BRIEF: usize = 96;

/// An executor wakes all of its threads. For a call that is worth fewer than one in so many of them rayon wakes those
/// alone.
const THREADS_FOR_ONE: usize = 4;

impl Workers {
    /// For a call of so many multiply-adds that reads so many bytes once; a brief one runs on the executor, if there is
    /// one.
    pub fn of(multiply_adds: usize, bytes: usize, executor: Option<Executor>) -> Self {
        let worth = (multiply_adds / MULTIPLY_ADDS_OF_A_THREAD).max(bytes / BYTES_OF_A_THREAD).saturating_add(1);
        let is_brief = multiply_adds / MULTIPLY_ADDS_OF_A_THREAD <= BRIEF;
        // A call that is worth one does not start a pool.
        if worth == 1 {
            return Self { count: 1, is_brief, executor: None };
        }
        let fits = |executor: &Executor| is_brief && (executor.threads)() <= THREADS_FOR_ONE * worth;
        let executor = executor.filter(fits);
        let threads = executor.map_or_else(rayon::current_num_threads, |executor| (executor.threads)());
        Self { count: threads.clamp(1, worth), is_brief, executor }
    }
}

/// Runs `task` for every index below `tasks`, the first ones first, on the workers' executor, or on the threads of the
/// rayon pool that the caller is in: the global one, as Candle's own operations, which honours `RAYON_NUM_THREADS`, or
/// any other that the caller entered. Each thread that takes part makes itself one `state`.
///
/// A thread takes the next index when it is done with its last, so that tasks of unequal size even out. What an index
/// computes may not depend on the thread; then the result does not depend on their number.
pub fn for_each_task<S>(
    tasks: usize,
    workers: Workers,
    state: impl Fn() -> S + Sync,
    task: impl Fn(&mut S, usize) + Sync,
) {
    run_tasks(tasks, workers, &state, &task);
}

/// [`for_each_task`] for tasks without a state.
pub fn for_each_index(tasks: usize, workers: Workers, task: &(dyn Fn(usize) + Sync)) {
    run_tasks(tasks, workers, &|| (), &|(), index| task(index));
}

/// [`for_each_task`] of no closure's own type, so that it is compiled once for each type of state.
fn run_tasks<S>(tasks: usize, workers: Workers, state: &(dyn Fn() -> S + Sync), task: &(dyn Fn(&mut S, usize) + Sync)) {
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

/// Runs `work` on the calling thread and on so many others.
fn on_threads(workers: Workers, others: usize, work: &(dyn Fn() + Sync)) {
    match (workers.executor, workers.is_brief) {
        (Some(executor), _) => {
            (executor.run)(work);
            // What an executor that ran nothing has left.
            work();
        }
        (None, true) => rayon::in_place_scope(|scope| share(scope, others, work)),
        (None, false) => rayon::scope(|scope| share(scope, others, work)),
    }
}

fn share<'s>(scope: &rayon::Scope<'s>, others: usize, work: &'s (dyn Fn() + Sync)) {
    for _ in 0..others {
        scope.spawn(|_| work());
    }
    work();
}
