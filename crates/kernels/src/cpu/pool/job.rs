//! The pieces of one call.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::{self, Thread};

use super::waiting::Waiting;

/// The function that runs the pieces of a call, without the lifetime of what it borrows.
pub(super) struct Work(*const (dyn Fn(&Claims) + Sync));

// SAFETY: the function may be called from several threads at the same time, since it is `Sync`.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

impl Work {
    /// Forgets the lifetime of a function.
    ///
    /// # Safety
    /// The function lives until all pieces of its job are finished.
    pub unsafe fn new<'a>(work: &'a (dyn Fn(&Claims) + Sync + 'a)) -> Self {
        let work: *const (dyn Fn(&Claims) + Sync + 'a) = work;
        // SAFETY: the types differ in a lifetime only, which the caller of this function keeps.
        Self(unsafe {
            std::mem::transmute::<*const (dyn Fn(&Claims) + Sync + 'a), *const (dyn Fn(&Claims) + Sync + 'static)>(work)
        })
    }
}

/// A call that helpers may join.
pub(super) struct Job {
    pieces: usize,
    /// The next piece that nobody has taken; at least `pieces` if all are taken.
    next: AtomicUsize,
    /// The number of pieces that are finished.
    finished: AtomicUsize,
    /// The number of helpers that may still join.
    wanted: AtomicUsize,
    work: Work,
    caller: Thread,
    /// Whether the calling thread sleeps until the last piece is finished.
    caller_sleeps: AtomicBool,
    /// The first panic of a piece.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job {
    pub fn new(pieces: usize, helpers: usize, work: Work) -> Self {
        Self {
            pieces,
            next: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
            wanted: AtomicUsize::new(helpers),
            work,
            caller: thread::current(),
            caller_sleeps: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    /// Returns whether a helper may join, and counts it if so.
    pub fn admit(&self) -> bool {
        let has_pieces = self.next.load(Ordering::Relaxed) < self.pieces;
        has_pieces
            && self.wanted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |wanted| wanted.checked_sub(1)).is_ok()
    }

    /// Runs pieces on a helper until all are taken, and wakes the calling thread if the last one is finished.
    pub fn run_as_helper(&self) {
        if self.run() == 0 {
            return;
        }
        let is_finished = self.finished.load(Ordering::SeqCst) == self.pieces;
        if is_finished && self.caller_sleeps.load(Ordering::SeqCst) {
            self.caller.unpark();
        }
    }

    /// Runs pieces until all are taken, and returns how many.
    pub fn run(&self) -> usize {
        let claims = Claims { job: self, first: Cell::new(None), count: Cell::new(0) };
        // Without a piece, the call may have returned already, and the function be gone.
        let Some(first) = claims.claim() else { return 0 };
        claims.first.set(Some(first));
        // SAFETY: the first piece is not finished before the end of this function.
        let work = unsafe { &*self.work.0 };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(&claims))) {
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
            self.abandon();
        }
        let count = claims.count.get();
        self.finished.fetch_add(count, Ordering::SeqCst);
        count
    }

    /// Counts the pieces that nobody has taken as finished.
    fn abandon(&self) {
        let next = self.next.swap(self.pieces, Ordering::Relaxed);
        self.finished.fetch_add(self.pieces.saturating_sub(next), Ordering::SeqCst);
    }

    /// Waits until every piece is finished. All are taken.
    pub fn wait(&self) {
        let mut waiting = Waiting::for_pieces();
        while self.finished.load(Ordering::SeqCst) < self.pieces {
            if waiting.pause() {
                continue;
            }
            self.caller_sleeps.store(true, Ordering::SeqCst);
            while self.finished.load(Ordering::SeqCst) < self.pieces {
                thread::park();
            }
        }
    }

    /// Panics if a piece did. Every piece is finished.
    pub fn finish(&self) {
        let panic = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

/// The pieces that one thread takes from a job.
pub(crate) struct Claims<'a> {
    job: &'a Job,
    /// A piece that was taken in advance.
    first: Cell<Option<usize>>,
    /// The number of pieces taken so far.
    count: Cell<usize>,
}

impl Claims<'_> {
    /// Takes the next piece; `None` if all are taken.
    pub fn next(&self) -> Option<usize> {
        self.first.take().or_else(|| self.claim())
    }

    fn claim(&self) -> Option<usize> {
        let piece = self.job.next.fetch_add(1, Ordering::Relaxed);
        if piece >= self.job.pieces {
            return None;
        }
        self.count.set(self.count.get() + 1);
        Some(piece)
    }
}
