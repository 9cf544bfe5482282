//! Which case a process was in when a guard ended it.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

static CASE: AtomicPtr<String> = AtomicPtr::new(ptr::null_mut());

/// Says the case if the process ends within it, and leaves the end to the system.
extern "C" fn say(signal: c_int) {
    let case = CASE.load(Ordering::Acquire);
    // SAFETY: `write` and `signal` may be called in a handler, and a string in `CASE` is never freed.
    unsafe {
        if let Some(case) = case.as_ref() {
            libc::write(2, case.as_ptr().cast(), case.len());
        }
        libc::signal(signal, libc::SIG_DFL);
    }
}

/// Names the case that is to be named if the process ends, until the next one. Of several tests at once it may be
/// another's.
pub fn name(case: String) {
    let handler: extern "C" fn(c_int) = say;
    // SAFETY: the handler does nothing that a handler may not.
    unsafe { libc::signal(libc::SIGSEGV, handler as libc::sighandler_t) };
    // Leaked: the handler may look at any time.
    CASE.store(Box::leak(Box::new(case)), Ordering::Release);
}
