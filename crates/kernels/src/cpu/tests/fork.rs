//! Calls in child processes made by `fork`.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use crate::cpu::pool::Pool;
use crate::cpu::threads::{Workers, for_each_task};

const TASKS: usize = 64;

/// Makes a call of some tasks, and returns whether each ran once.
fn call_is_complete() -> bool {
    let runs: [AtomicUsize; TASKS] = [const { AtomicUsize::new(0) }; TASKS];
    for_each_task(TASKS, Workers::for_tasks(TASKS), &|| (), &|(), index| {
        runs[index].fetch_add(1, Ordering::Relaxed);
    });
    runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1)
}

/// Makes a call in a child process, and returns whether it was complete. A child that hangs ends by a signal.
fn child_call_is_complete() -> bool {
    // SAFETY: the child makes a call, which takes no lock that another thread may have taken, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: these functions have no conditions.
        unsafe {
            libc::alarm(60);
            libc::_exit(if call_is_complete() { 0 } else { 1 })
        }
    }
    assert!(child > 0, "no child process");
    let mut status = 0;
    // SAFETY: a valid pointer.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
}

#[test]
fn forked_child_while_a_thread_holds_the_pools_lock_completes_its_call() {
    assert!(call_is_complete());
    let is_complete = Pool::global().while_locked(child_call_is_complete);
    assert!(is_complete, "the call in the child process");
}

#[test]
fn forked_children_while_threads_call_complete_their_calls() {
    let ends = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    assert!(call_is_complete());
                }
            });
        }
        let incomplete = (0..50).filter(|_| !child_call_is_complete()).count();
        ends.store(true, Ordering::Relaxed);
        assert_eq!(incomplete, 0, "of 50 children");
    });
}
