//! The machine's measured limits: multiply-adds on registers, and reads of a buffer that is larger than the processor's
//! cache.

mod bandwidth;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod tile;
#[cfg(target_arch = "x86_64")]
mod vector;

use std::sync::Barrier;
use std::time::Instant;

use candle_attention::cpu::InstructionSet;
use candle_core::{DType, Result};

pub use bandwidth::read_bandwidth;

/// A loop of independent multiply-adds on registers.
struct Loop {
    name: &'static str,
    instruction_set: InstructionSet,
    /// Whether the loop multiplies bf16. The other loops multiply f32, and serve every dtype.
    bf16: bool,
    available: fn() -> bool,
    flops_per_step: f64,
    run: fn(u64),
}

/// The best of the loops that serve a dtype.
#[derive(Debug, Clone, Copy)]
pub struct Peak {
    pub name: &'static str,
    pub gflops: f64,
}

/// Returns the number of threads that a call of Candle uses.
pub fn threads() -> usize {
    candle_core::utils::get_num_threads()
}

/// Measures the peak for a dtype on all threads, with the instruction set that `CANDLE_ATTENTION_CPU` names and those
/// below it.
///
/// f16 is compared with f32: processors multiply f16 faster, but then also sum in f16, which is too inexact for
/// attention.
///
/// # Errors
/// If the variable names no instruction set.
pub fn measure(dtype: DType) -> Result<Peak> {
    let limit = match std::env::var("CANDLE_ATTENTION_CPU") {
        Ok(name) if !name.is_empty() => name.parse().map_err(candle_core::Error::wrap)?,
        _ => InstructionSet::Amx,
    };
    let mut best = Peak { name: "", gflops: 0.0 };
    for candidate in loops() {
        let serves = candidate.instruction_set <= limit && (dtype == DType::BF16 || !candidate.bf16);
        if serves && (candidate.available)() {
            let gflops = candidate.gflops();
            if gflops > best.gflops {
                best = Peak { name: candidate.name, gflops };
            }
        }
    }
    Ok(best)
}

fn loops() -> Vec<Loop> {
    let mut loops = vec![scalar::MULTIPLY_ADD];
    #[cfg(target_arch = "aarch64")]
    loops.push(neon::FMA);
    #[cfg(target_arch = "x86_64")]
    loops.extend([vector::AVX2_FMA, vector::AVX512_FMA, vector::AVX512_BF16, tile::AMX_BF16]);
    loops
}

impl Loop {
    /// Measures the best of some runs of about 10 ms on all threads: short runs, so that one of them is likely to be
    /// undisturbed.
    fn gflops(&self) -> f64 {
        let mut steps = 1 << 12;
        while self.seconds(1, steps) < 0.01 {
            steps *= 2;
        }
        let threads = threads();
        let best = (0..20).map(|_| self.seconds(threads, steps)).fold(f64::INFINITY, f64::min);
        threads as f64 * steps as f64 * self.flops_per_step / best / 1e9
    }

    /// Returns the seconds of the slowest of `threads` threads that run `steps` steps each at once.
    fn seconds(&self, threads: usize, steps: u64) -> f64 {
        let together = Barrier::new(threads);
        let timed = || {
            together.wait();
            let start = Instant::now();
            (self.run)(steps);
            start.elapsed().as_secs_f64()
        };
        std::thread::scope(|scope| {
            let handles: Vec<_> = (0..threads).map(|_| scope.spawn(timed)).collect();
            handles.into_iter().filter_map(|handle| handle.join().ok()).fold(0.0, f64::max)
        })
    }
}
