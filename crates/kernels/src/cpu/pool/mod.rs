//! Helper threads that share the work of a call with the thread that makes it.
//!
//! The work of a call is a number of pieces. The calling thread publishes them as a [`Job`] and takes one piece after
//! the other from the job's counter, from the first piece on, without waiting for anyone. A helper that is running
//! takes pieces from the same counter. A helper that is not running, because the system gave its core to another
//! program, holds at most the piece that it took; the calling thread computes all the others. The call returns when
//! every piece is finished.
//!
//! The pieces are the same for any number of threads, and so are the bits of the results.

mod balance;
mod job;
mod waiting;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

use balance::{Balance, Outcome};
pub(super) use job::Claims;
use job::{Job, Work};
use waiting::Waiting;

/// The helper threads of the process.
pub(super) struct Pool {
    /// The number of helpers.
    helpers: usize,
    /// The jobs that may have pieces left.
    jobs: Mutex<Vec<Arc<Job>>>,
    /// The number of jobs published so far, which changes while `jobs` is locked. Helpers that do not sleep watch it.
    published: AtomicUsize,
    /// The number of helpers that sleep, which changes while `jobs` is locked.
    sleeping: AtomicUsize,
    wake: Condvar,
    /// The number of calls in progress. Each has a calling thread.
    calls: AtomicUsize,
    balance: Balance,
}

impl Pool {
    /// Returns the pool of the process. The first call starts its threads: with the calling thread, the number of
    /// threads of rayon's global pool, which respects `RAYON_NUM_THREADS` and the quota of a container.
    pub fn global() -> &'static Self {
        static POOL: OnceLock<&'static Pool> = OnceLock::new();
        POOL.get_or_init(|| Self::start(rayon::current_num_threads() - 1))
    }

    /// Starts a pool whose threads live as long as the process.
    fn start(helpers: usize) -> &'static Self {
        let pool: &'static Self = Box::leak(Box::new(Self {
            helpers,
            jobs: Mutex::default(),
            published: AtomicUsize::new(0),
            sleeping: AtomicUsize::new(0),
            wake: Condvar::new(),
            calls: AtomicUsize::new(0),
            balance: Balance::new(helpers),
        }));
        for helper in 0..helpers {
            let name = format!("candle-attention-{helper}");
            // The calling thread does the work of a helper that the system refuses to start.
            drop(thread::Builder::new().name(name).spawn(|| pool.help()));
        }
        pool
    }

    /// Runs `work` on the calling thread and on at most `helpers` helpers at the same time. `work` takes the pieces
    /// from 0 to `pieces` that it runs from [`Claims`]. Returns when all pieces are finished.
    ///
    /// # Panics
    /// If `work` panics, with its panic.
    pub fn run(&self, pieces: usize, helpers: usize, work: &(dyn Fn(&Claims) + Sync)) {
        let other_calls = self.calls.fetch_add(1, Ordering::Relaxed);
        // Other calls have a thread each, which is one helper less.
        let free = self.helpers.saturating_sub(other_calls).min(self.balance.allowed());
        let helpers = helpers.min(free).min(pieces.saturating_sub(1));
        // SAFETY: all pieces are finished before this function returns, also if `work` panics on this thread: `job.run`
        // returns after the pieces of this thread, `job.wait` after the pieces of the helpers.
        let job = Arc::new(Job::new(pieces, helpers, unsafe { Work::new(work) }));
        if helpers > 0 {
            self.publish(&job, helpers);
        }
        let start = Instant::now();
        let own_pieces = job.run();
        let own_time = start.elapsed();
        if helpers > 0 {
            self.withdraw(&job);
            job.wait();
            let waited = start.elapsed() - own_time;
            self.balance.record(&Outcome { pieces, own_pieces, own_time, waited });
        }
        self.calls.fetch_sub(1, Ordering::Relaxed);
        job.finish();
    }

    /// Makes a job available to helpers, and wakes those that sleep and are needed.
    fn publish(&self, job: &Arc<Job>, helpers: usize) {
        let sleeping = {
            let mut jobs = self.jobs();
            jobs.push(job.clone());
            self.published.fetch_add(1, Ordering::Release);
            self.sleeping.load(Ordering::Relaxed)
        };
        for _ in 0..helpers.min(sleeping) {
            self.wake.notify_one();
        }
    }

    /// Removes a job whose pieces are all taken.
    fn withdraw(&self, job: &Arc<Job>) {
        self.jobs().retain(|other| !Arc::ptr_eq(other, job));
    }

    /// Runs a function while the list of jobs is locked.
    #[cfg(all(test, unix, not(miri)))]
    pub fn while_locked<T>(&self, run: impl FnOnce() -> T) -> T {
        let _jobs = self.jobs();
        run()
    }

    fn jobs(&self) -> MutexGuard<'_, Vec<Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs pieces of published jobs, for ever.
    fn help(&self) {
        let mut seen = 0;
        loop {
            seen = self.next_publication(seen);
            while let Some(job) = self.join() {
                job.run_as_helper();
            }
        }
    }

    /// Joins a job that still admits helpers and has pieces left.
    fn join(&self) -> Option<Arc<Job>> {
        self.jobs().iter().find(|job| job.admit()).cloned()
    }

    /// Waits until a job is published after the first `seen`, and returns the number of jobs published by then.
    fn next_publication(&self, seen: usize) -> usize {
        let mut waiting = Waiting::for_work();
        loop {
            let published = self.published.load(Ordering::Acquire);
            if published != seen {
                return published;
            }
            if waiting.pause() {
                continue;
            }
            let mut jobs = self.jobs();
            self.sleeping.fetch_add(1, Ordering::Relaxed);
            while self.published.load(Ordering::Relaxed) == seen {
                jobs = self.wake.wait(jobs).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleeping.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Runs `work` as [`Pool::run`] does, on threads of the rayon pool that the calling thread belongs to.
///
/// # Panics
/// If `work` panics, with its panic.
pub(super) fn run_on_rayon(pieces: usize, helpers: usize, work: &(dyn Fn(&Claims) + Sync)) {
    // SAFETY: the scope ends after the last use of `work`.
    let job = Job::new(pieces, 0, unsafe { Work::new(work) });
    rayon::in_place_scope(|scope| {
        for _ in 0..helpers {
            scope.spawn(|_| {
                job.run();
            });
        }
        job.run();
    });
    job.finish();
}

#[cfg(test)]
mod tests;
