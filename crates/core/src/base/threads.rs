//! The threads of brief calls.

use std::sync::Mutex;

use candle_attention_kernels::Executor;
use candle_core::utils::barrier_pool;

/// Candle's barrier pool, which runs Candle's own brief operations: its threads wait for the next call for a while
/// before they sleep. `None` on a thread of a rayon pool, which the caller chose or is one of many that call.
pub(crate) fn executor() -> Option<Executor> {
    if rayon::current_thread_index().is_some() {
        return None;
    }
    Some(Executor { threads: || barrier_pool().n_workers() + 1, run })
}

fn run(work: &(dyn Fn() + Sync)) {
    static IN_USE: Mutex<()> = Mutex::new(());
    // The pool takes one call at a time. Another thread's is left to that thread: several keep the cores busy by
    // themselves.
    if let Ok(_alone) = IN_USE.try_lock() {
        // An item for each thread; one that gets two finds the work done. On a thread of the pool they run there, in
        // turn.
        barrier_pool().execute_chunked(barrier_pool().n_workers() + 1, |_| work());
    }
}
