//! The number of threads of a call, and the split of its work over them.

use super::child;
use super::memory::SharedPtr;
use super::pool::{self, Claims, Pool};

/// The size of the work of a call.
#[derive(Debug, Clone, Copy)]
pub struct WorkSize {
    /// The number of multiply-adds.
    pub multiply_adds: usize,
    /// The bytes that the call reads once.
    pub bytes: usize,
}

/// The threads of a call.
#[derive(Debug, Clone, Copy)]
pub struct Workers {
    /// The calling thread and its helpers.
    pub(crate) count: usize,
}

/// The multiply-adds that are worth a second thread: some tens of microseconds, a few times as long as a thread takes
/// to wake.
const MULTIPLY_ADDS_OF_A_THREAD: usize = 1 << 20;

/// The bytes whose reading is worth a second thread: one core reads them from memory in 10 to 20 µs.
const BYTES_OF_A_THREAD: usize = 1 << 18;

impl Workers {
    /// Chooses the threads for the work of a call.
    pub fn for_call(work: WorkSize) -> Self {
        let WorkSize { multiply_adds, bytes } = work;
        let useful_threads =
            (multiply_adds / MULTIPLY_ADDS_OF_A_THREAD).max(bytes / BYTES_OF_A_THREAD).saturating_add(1);
        // A call for one thread does not start a pool.
        if useful_threads == 1 {
            return Self { count: 1 };
        }
        Self { count: available_threads().clamp(1, useful_threads) }
    }

    /// Chooses the threads of a call whose tasks are worth a thread each.
    pub fn for_tasks(tasks: usize) -> Self {
        if tasks <= 1 {
            return Self { count: 1 };
        }
        Self { count: available_threads().min(tasks) }
    }
}

/// Returns the number of threads that a call may use: that of the calling thread's rayon pool, or of the global one. In
/// a child process made by `fork`, only a pool that the child has installed has threads.
fn available_threads() -> usize {
    let is_on_rayon = rayon::current_thread_index().is_some();
    if !is_on_rayon && child::is_child() { 1 } else { rayon::current_num_threads() }
}

/// Runs `task` for every index below `tasks`, the first ones first, on the calling thread and on helper threads. On a
/// thread of a rayon pool, the helpers are the threads of that pool: its owner chose them. Each thread that takes part
/// makes one `state`.
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
    if tasks == 0 {
        return;
    }
    if count <= 1 {
        let mut only_state = state();
        for index in 0..tasks {
            task(&mut only_state, index);
        }
        return;
    }
    let work = |claims: &Claims| {
        let mut own_state = state();
        while let Some(index) = claims.next() {
            task(&mut own_state, index);
        }
    };
    if rayon::current_thread_index().is_some() {
        pool::run_on_rayon(tasks, count - 1, &work);
    } else {
        Pool::global().run(tasks, count - 1, &work);
    }
}

/// Runs `task` for every index below `tasks`, as [`for_each_task`] does, without a state.
pub fn for_each_index(tasks: usize, workers: Workers, task: &(dyn Fn(usize) + Sync)) {
    for_each_task(tasks, workers, &|| (), &|(), index| task(index));
}

/// Runs `task` for every chunk of `chunk_len` elements of `elements`, as [`for_each_task`] does. The last chunk may be
/// shorter.
///
/// # Panics
/// If `chunk_len` is 0.
pub fn for_each_chunk<T: Copy + Send>(
    elements: &mut [T],
    chunk_len: usize,
    workers: Workers,
    task: &(dyn Fn(usize, &mut [T]) + Sync),
) {
    let len = elements.len();
    let shared = SharedPtr(elements.as_mut_ptr());
    for_each_index(len.div_ceil(chunk_len), workers, &|index| {
        let start = index * chunk_len;
        // SAFETY: the chunks are within the elements and do not overlap, and each index is run once.
        task(index, unsafe { shared.slice(start, chunk_len.min(len - start)) });
    });
}
