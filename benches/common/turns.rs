//! Several ways to compute the same result, timed in turn: the time of a way is the least of its rounds, its memory the
//! most that a call adds to the process.

use std::time::{Duration, Instant};

use candle_core::{Result, Tensor};

use super::memory;

/// A name, and a call that allocates its own inputs.
pub type Way<'a> = (&'static str, Box<dyn Fn() -> Result<Tensor> + 'a>);

/// The measurements of a way.
pub struct Taken {
    name: &'static str,
    time: Duration,
    bytes: u64,
}

impl Taken {
    pub fn seconds(&self) -> f64 {
        self.time.as_secs_f64()
    }
}

/// Times all ways in turn.
pub fn take(ways: &[Way], rounds: usize) -> Result<Vec<Taken>> {
    let mut taken: Vec<_> = ways.iter().map(|(name, _)| Taken { name, time: Duration::MAX, bytes: 0 }).collect();
    for _ in 0..rounds {
        for ((_, call), way) in ways.iter().zip(&mut taken) {
            memory::forget_peak();
            let before = memory::peak_resident();
            let start = Instant::now();
            let result = call()?;
            way.time = way.time.min(start.elapsed());
            drop(result);
            way.bytes = way.bytes.max(memory::peak_resident().unwrap_or(0).saturating_sub(before.unwrap_or(0)));
        }
    }
    Ok(taken)
}

pub fn print_header(size: &str, way: &str) {
    println!("{size:<8} {way:<32} {:>10} {:>10} {:>10}", "ms", "of first", "MiB");
}

/// Prints a line for each way, with its time as a multiple of the first way's.
pub fn print(size: &str, taken: &[Taken]) {
    for way in taken {
        let (ms, mib) = (way.seconds() * 1e3, way.bytes as f64 / f64::from(1 << 20));
        let ratio = way.seconds() / taken[0].seconds();
        println!("{size:<8} {:<32} {ms:>10.2} {ratio:>10.2} {mib:>10.1}", way.name);
    }
}
