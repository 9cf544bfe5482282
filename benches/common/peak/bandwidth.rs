//! The speed at which all threads together read memory.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Words that one pass of the loop adds up: a cache line of eight from each of four places.
const LINE: usize = 8;
/// The places that a thread reads from at once, as a kernel does that reads keys and values of some heads.
const STREAMS: usize = 4;

/// Returns the GB/s (10⁹ bytes) of reading `bytes` once on all threads: the best of some runs with default pages and
/// with large pages.
pub fn read_bandwidth(bytes: usize) -> f64 {
    [false, true].into_iter().map(|large| read_pages(bytes, large)).fold(0.0, f64::max)
}

fn read_pages(bytes: usize, large: bool) -> f64 {
    let threads = super::threads();
    let words = (bytes / 8 / threads).max(STREAMS * LINE);
    // Each thread writes its part first, so that the part is in the memory closest to the thread.
    let together = Barrier::new(threads);
    let part = || {
        let in_large_pages = if large { candle_attention_kernels::large_page_vec(words) } else { None };
        let mut part = in_large_pages.unwrap_or_default();
        part.resize(words, black_box(1u64));
        let once = || {
            together.wait();
            let start = Instant::now();
            black_box(sum(black_box(&part)));
            start.elapsed().as_secs_f64()
        };
        (0..7).map(|_| once()).collect::<Vec<_>>()
    };
    let times: Vec<Vec<f64>> = std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads).map(|_| scope.spawn(part)).collect();
        handles.into_iter().filter_map(|handle| handle.join().ok()).collect()
    });
    let slowest = |run: usize| times.iter().filter_map(|times| times.get(run).copied()).fold(0.0, f64::max);
    let best = (0..7).map(slowest).fold(f64::INFINITY, f64::min);
    (8 * words * threads) as f64 / best / 1e9
}

fn sum(words: &[u64]) -> u64 {
    let len = words.len() / STREAMS;
    let mut sums = [[0u64; LINE]; STREAMS];
    let streams: [_; STREAMS] = std::array::from_fn(|at| words[at * len..(at + 1) * len].as_chunks::<LINE>().0);
    for line in 0..len / LINE {
        for (of_stream, stream) in sums.iter_mut().zip(&streams) {
            for (sum, word) in of_stream.iter_mut().zip(&stream[line]) {
                *sum = sum.wrapping_add(*word);
            }
        }
    }
    sums.iter().flatten().fold(0, |all, sum| all.wrapping_add(*sum))
}
