//! The time of a call.

use std::time::{Duration, Instant};

use candle_core::{Device, Result};

/// Calls of a turn take this long together, so that the time to start them and to wait for them does not count.
const TURN: Duration = Duration::from_millis(40);

/// A call that takes longer is timed in one turn only.
const LONG: Duration = Duration::from_millis(500);

/// The device whose calls are timed, and the number of turns.
pub struct Clock {
    pub device: Device,
    pub turns: usize,
}

impl Clock {
    /// Returns the median of a call's time over the turns, in milliseconds. The call gets its number, so that calls may
    /// read other tensors in turn.
    pub fn milliseconds<T>(&self, mut call: impl FnMut(usize) -> Result<T>) -> Result<f64> {
        let mut turn = |calls: usize| -> Result<Duration> {
            self.device.synchronize()?;
            let start = Instant::now();
            for n in 0..calls {
                std::hint::black_box(call(n)?);
            }
            self.device.synchronize()?;
            Ok(start.elapsed() / calls as u32)
        };
        // The first calls compile kernels and fill the allocator.
        turn(1)?;
        let one_call = turn(1)?;
        if one_call > LONG {
            return Ok(1e3 * one_call.as_secs_f64());
        }
        let calls = (TURN.as_secs_f64() / one_call.as_secs_f64().max(1e-6)).ceil().clamp(1.0, 1e4) as usize;
        let mut times = Vec::with_capacity(self.turns);
        for _ in 0..self.turns {
            times.push(turn(calls)?);
        }
        times.sort();
        Ok(1e3 * times[self.turns / 2].as_secs_f64())
    }
}
