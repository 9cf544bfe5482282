//! Timing in turn: every round gives each engine one turn, so that a disturbance of the machine affects all of them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use candle_core::Result;

use super::engine::{Call, Engine};
use super::load::own_seconds;

/// A turn takes at least this long, by repeating a short call.
const TURN: Duration = Duration::from_millis(20);
/// The time that an engine may use in a cell before it stops early, after at least three turns.
const BUDGET: Duration = Duration::from_secs(12);
/// Worker threads spin for a while after a call. They stop within this time, so that they do not disturb the next
/// engine.
const PAUSE: Duration = Duration::from_millis(5);

/// Milliseconds per call.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    pub median: f64,
    pub min: f64,
    /// The cores that were busy, on average: processor time over time. `NaN` where the system does not say.
    pub cores: f64,
}

/// Returns the times of each engine, in the order of `calls`.
pub fn in_turn(calls: &mut [(Engine, Call<'_>)], rounds: u64) -> Result<Vec<(Engine, Times)>> {
    let mut turns = Vec::new();
    for (_, call) in calls.iter_mut() {
        let once = seconds(call, 1)?;
        turns.push(Turns {
            repeat: (TURN.as_secs_f64() / once).ceil().clamp(1.0, 1e6) as u32,
            taken: Vec::new(),
            busy: 0.0,
        });
    }
    for _ in 0..rounds {
        for ((_, call), own) in calls.iter_mut().zip(&mut turns) {
            if own.taken.len() >= 3 && own.total() > BUDGET.as_secs_f64() {
                continue;
            }
            std::thread::sleep(PAUSE);
            if own.repeat > 1 {
                call()?;
            }
            let start = own_seconds();
            own.taken.push(seconds(call, own.repeat)?);
            own.busy += match (start, own_seconds()) {
                (Some(start), Some(end)) => end - start,
                _ => f64::NAN,
            };
        }
    }
    Ok(calls.iter().zip(turns).map(|((engine, _), own)| (*engine, own.times())).collect())
}

struct Turns {
    /// The number of calls in each turn.
    repeat: u32,
    /// The seconds per call, one entry for each turn.
    taken: Vec<f64>,
    /// The processor seconds of all turns together.
    busy: f64,
}

impl Turns {
    fn total(&self) -> f64 {
        self.taken.iter().sum::<f64>() * f64::from(self.repeat)
    }

    fn times(mut self) -> Times {
        let cores = self.busy / self.total();
        self.taken.sort_by(f64::total_cmp);
        let at = |index: usize| self.taken.get(index).map_or(f64::NAN, |seconds| seconds * 1e3);
        Times { median: at(self.taken.len() / 2), min: at(0), cores }
    }
}

fn seconds(call: &mut Call<'_>, repeat: u32) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..repeat {
        black_box(call()?);
    }
    Ok(start.elapsed().as_secs_f64() / f64::from(repeat))
}
