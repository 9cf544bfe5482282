use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use super::balance::{Balance, Outcome};
use super::{Claims, Pool, run_on_rayon};

/// The rounds of a test that repeats calls.
const ROUNDS: usize = if cfg!(miri) { 3 } else { 2000 };

/// Runs calls of every small size, and checks that each piece ran once.
fn check_every_piece_once(pool: &Pool, helpers: usize) {
    for round in 0..ROUNDS {
        let pieces = round % 13;
        let runs: Vec<_> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
        let work = |claims: &Claims| {
            while let Some(piece) = claims.next() {
                runs[piece].fetch_add(1, Ordering::Relaxed);
            }
        };
        pool.run(pieces, helpers, &work);
        for (piece, count) in runs.iter().enumerate() {
            assert_eq!(count.load(Ordering::Relaxed), 1, "piece {piece} of {pieces}");
        }
    }
}

#[test]
fn pool_with_any_number_of_helpers_runs_every_piece_once() {
    for helpers in [0, 1, 3, 7] {
        check_every_piece_once(Pool::start(helpers), helpers);
    }
}

#[test]
fn pool_with_several_callers_runs_every_piece_once() {
    let pool = Pool::start(2);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| check_every_piece_once(pool, 2));
        }
    });
}

#[test]
fn pool_with_call_in_a_piece_runs_both() {
    let pool = Pool::start(2);
    let sum = AtomicUsize::new(0);
    let inner = |claims: &Claims| {
        while let Some(piece) = claims.next() {
            sum.fetch_add(piece, Ordering::Relaxed);
        }
    };
    let outer = |claims: &Claims| {
        while claims.next().is_some() {
            pool.run(10, 2, &inner);
        }
    };
    pool.run(5, 2, &outer);
    assert_eq!(sum.into_inner(), 5 * 45);
}

/// Checks a call whose helper keeps its first piece until the calling thread has run all the others.
#[test]
fn pool_with_late_helper_runs_other_pieces_on_calling_thread() {
    const PIECES: usize = 10;
    let pool = Pool::start(1);
    let caller = thread::current().id();
    let both_have_a_piece = Barrier::new(2);
    let ran = AtomicUsize::new(0);
    let work = |claims: &Claims| {
        let mut is_first = true;
        while claims.next().is_some() {
            if is_first {
                both_have_a_piece.wait();
                is_first = false;
            }
            if thread::current().id() != caller {
                while ran.load(Ordering::Relaxed) < PIECES - 1 {
                    thread::yield_now();
                }
            }
            ran.fetch_add(1, Ordering::Relaxed);
        }
    };
    pool.run(PIECES, 1, &work);
    assert_eq!(ran.into_inner(), PIECES);
}

#[test]
fn pool_with_panic_in_a_piece_panics_and_works_on() {
    let pool = Pool::start(2);
    for round in 0..ROUNDS.min(50) {
        let work = |claims: &Claims| {
            while let Some(piece) = claims.next() {
                assert_ne!(piece, round % 8, "piece {piece}");
            }
        };
        let panic = catch_unwind(AssertUnwindSafe(|| pool.run(8, 2, &work))).expect_err("a piece panics");
        let text = panic.downcast_ref::<String>().expect("a text");
        assert!(text.contains(&format!("piece {}", round % 8)), "{text}");
    }
    check_every_piece_once(pool, 2);
}

#[test]
#[cfg_attr(miri, ignore = "Miri reports the pool of crossbeam's queues, which rayon uses")]
fn pool_of_rayon_runs_every_piece_once() {
    let rayon_pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("three threads");
    let sum = AtomicUsize::new(0);
    let work = |claims: &Claims| {
        while let Some(piece) = claims.next() {
            sum.fetch_add(piece + 1, Ordering::Relaxed);
        }
    };
    rayon_pool.install(|| run_on_rayon(100, 2, &work));
    assert_eq!(sum.into_inner(), 5050);
}

/// Returns the outcome of a call of 20 pieces of 10 µs, half of which helpers ran, that then waited.
fn outcome(waited: Duration) -> Outcome {
    Outcome { pieces: 20, own_pieces: 10, own_time: Duration::from_micros(100), waited }
}

#[test]
fn balance_with_late_helpers_allows_fewer_and_tries_again() {
    let balance = Balance::new(2);
    for _ in 0..100 {
        balance.record(&outcome(Duration::from_micros(5)));
    }
    assert_eq!(balance.allowed(), 2, "helpers that are in time");
    balance.record(&outcome(Duration::from_millis(4)));
    assert_eq!(balance.allowed(), 2, "helpers that were late once");
    let mut least = 2;
    for _ in 0..20 {
        balance.record(&outcome(Duration::from_millis(4)));
        least = least.min(balance.allowed());
    }
    assert_eq!(least, 0, "helpers that are late");
    // The longest pause is a fixed time, so the loop ends.
    while balance.allowed() < 2 {
        thread::sleep(Duration::from_millis(10));
    }
}
