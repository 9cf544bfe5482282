//! The number of helpers that a call asks for, by what helpers brought to the calls before.
//!
//! A helper whose core runs another program as well takes pieces and then does not run for some milliseconds, for which
//! the calling thread waits. If the calling threads wait for longer than half of the time that the helpers save, later
//! calls ask for one helper less. Another one is tried again after a while, and after a longer while each time that the
//! trial fails.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

/// The time, saved and waited for, over which helpers are judged: several times as long as the system keeps a thread
/// from running now and then on an idle machine.
const JUDGED: Duration = Duration::from_millis(16);

/// The time after which another helper is tried for the first time.
const FIRST_PAUSE: Duration = Duration::from_millis(25);

/// The longest time after which another helper is tried.
const LONGEST_PAUSE: Duration = Duration::from_millis(1600);

/// A helper that was useful for so long is not a failed trial.
const TRIAL: Duration = Duration::from_millis(200);

/// One call with helpers, as it went.
pub(super) struct Outcome {
    pub pieces: usize,
    /// The number of pieces that the calling thread ran.
    pub own_pieces: usize,
    /// The time that the calling thread took for its pieces.
    pub own_time: Duration,
    /// The time that the calling thread then waited.
    pub waited: Duration,
}

/// The helpers that calls may ask for.
pub(super) struct Balance {
    most: usize,
    allowed: AtomicUsize,
    start: Instant,
    /// The time, in nanoseconds since `start`, from which on another helper may be tried.
    retry_at: AtomicU64,
    account: Mutex<Account>,
}

/// The time that helpers saved and cost since they were last judged.
struct Account {
    saved: Duration,
    waited: Duration,
    pause: Duration,
    /// The time since `start` at which the number of helpers was last raised.
    raised_at: Option<Duration>,
}

impl Balance {
    pub fn new(most: usize) -> Self {
        let account = Account { saved: Duration::ZERO, waited: Duration::ZERO, pause: FIRST_PAUSE, raised_at: None };
        Self {
            most,
            allowed: AtomicUsize::new(most),
            start: Instant::now(),
            retry_at: AtomicU64::new(0),
            account: Mutex::new(account),
        }
    }

    /// Returns the number of helpers that a call may ask for.
    pub fn allowed(&self) -> usize {
        let allowed = self.allowed.load(Ordering::Relaxed);
        if allowed == self.most {
            return allowed;
        }
        let now = self.start.elapsed();
        if nanoseconds(now) < self.retry_at.load(Ordering::Relaxed) {
            return allowed;
        }
        let Ok(mut account) = self.account.try_lock() else { return allowed };
        account.raised_at = Some(now);
        account.saved = Duration::ZERO;
        account.waited = Duration::ZERO;
        self.retry_at.store(nanoseconds(now + account.pause), Ordering::Relaxed);
        self.allowed.store(allowed + 1, Ordering::Relaxed);
        allowed + 1
    }

    /// Takes a call into account.
    pub fn record(&self, outcome: &Outcome) {
        // A calling thread that took no piece says nothing about the length of a piece.
        if outcome.own_pieces == 0 {
            return;
        }
        let piece = outcome.own_time.div_f64(outcome.own_pieces as f64);
        let Ok(mut account) = self.account.try_lock() else { return };
        account.saved += piece.mul_f64((outcome.pieces - outcome.own_pieces) as f64);
        // The last piece of a helper may well have begun a moment before.
        account.waited += outcome.waited.saturating_sub(piece);
        if account.saved + account.waited < JUDGED {
            return;
        }
        let is_useful = account.waited * 2 < account.saved;
        account.saved = Duration::ZERO;
        account.waited = Duration::ZERO;
        let allowed = self.allowed.load(Ordering::Relaxed);
        if is_useful || allowed == 0 {
            return;
        }
        let now = self.start.elapsed();
        let is_failed_trial = account.raised_at.is_some_and(|raised_at| now.saturating_sub(raised_at) < TRIAL);
        account.pause = if is_failed_trial { (account.pause * 2).min(LONGEST_PAUSE) } else { FIRST_PAUSE };
        self.retry_at.store(nanoseconds(now + account.pause), Ordering::Relaxed);
        self.allowed.store(allowed - 1, Ordering::Relaxed);
        static LOGGED: Once = Once::new();
        LOGGED.call_once(|| {
            log::info!(
                "other programs use the cores of this one: calls run on {allowed} of {} threads, and try more from \
                 time to time",
                self.most + 1
            );
        });
    }
}

/// Returns a duration in nanoseconds; 500 years fit.
fn nanoseconds(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}
