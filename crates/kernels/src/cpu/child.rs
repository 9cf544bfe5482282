//! Child processes made by `fork`, in which no thread but the calling one exists.

use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

/// The process of the first call that used threads; 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Returns whether the threads that calls share belong to another process: this one is a child of it, made by `fork`.
///
/// The child has none of the helper threads, and a lock that a thread held at the fork stays locked in it.
pub(super) fn is_child() -> bool {
    // Other systems have no `fork`, and WebAssembly has no numbers of processes.
    if !cfg!(unix) {
        return false;
    }
    let own = process::id();
    match OWNER.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => false,
        Err(owner) => owner != own,
    }
}
