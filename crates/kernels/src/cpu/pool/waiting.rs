//! How a thread waits: it spins for a few microseconds, then lets other threads run, then sleeps.

use std::hint::spin_loop;
use std::thread::yield_now;
use std::time::{Duration, Instant};

/// The time for which a thread spins: less than a wake takes.
const SPIN: Duration = Duration::from_micros(5);

/// The time for which a helper waits for the next call before it sleeps. Calls of a model follow each other within tens
/// of microseconds, and a wake takes as long as some calls.
const WAIT_FOR_WORK: Duration = Duration::from_micros(400);

/// The time for which the calling thread waits for pieces before it sleeps.
const WAIT_FOR_PIECES: Duration = Duration::from_micros(50);

/// A yield that takes longer gave the core to another program.
const LONG_YIELD: Duration = Duration::from_micros(50);

/// The checks of the clock are this many turns of the loop apart while a thread spins.
const TURNS: u32 = 16;

/// The wait of one thread.
pub(super) struct Waiting {
    start: Instant,
    most: Duration,
    turns: u32,
}

impl Waiting {
    /// Begins to wait for the next call.
    pub fn for_work() -> Self {
        Self { start: Instant::now(), most: WAIT_FOR_WORK, turns: 0 }
    }

    /// Begins to wait for pieces that other threads run.
    pub fn for_pieces() -> Self {
        Self { start: Instant::now(), most: WAIT_FOR_PIECES, turns: 0 }
    }

    /// Waits for a moment. Returns `false` if the thread should sleep instead.
    pub fn pause(&mut self) -> bool {
        self.turns = self.turns.wrapping_add(1);
        if !self.turns.is_multiple_of(TURNS) {
            spin_loop();
            return true;
        }
        let before = Instant::now();
        let waited = before - self.start;
        if waited < SPIN {
            spin_loop();
            return true;
        }
        if waited > self.most {
            return false;
        }
        yield_now();
        // A thread that sleeps gets its core back sooner than one that yields.
        before.elapsed() < LONG_YIELD
    }
}
