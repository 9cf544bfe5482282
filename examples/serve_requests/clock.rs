//! The time since the start of the service.

use std::time::{Duration, Instant};

/// The clock of the service.
pub enum Clock {
    /// Real time.
    Measured(Instant),
    /// A number of seconds for each step.
    Counted { step: f64, now: f64 },
}

impl Clock {
    /// Starts a clock that counts `step` seconds for each step, or measures the time if there is no number.
    pub fn start(step: Option<f64>) -> Self {
        match step {
            Some(step) => Self::Counted { step, now: 0.0 },
            None => Self::Measured(Instant::now()),
        }
    }

    /// Returns the seconds since the start.
    pub fn now(&self) -> f64 {
        match self {
            Self::Measured(start) => start.elapsed().as_secs_f64(),
            Self::Counted { now, .. } => *now,
        }
    }

    /// Notes that a step has ended.
    pub fn end_step(&mut self) {
        if let Self::Counted { step, now } = self {
            *now += *step;
        }
    }

    /// Waits until a time in seconds since the start.
    pub fn wait_until(&mut self, time: f64) {
        let seconds = (time - self.now()).max(0.0);
        match self {
            Self::Measured(_) => std::thread::sleep(Duration::from_secs_f64(seconds)),
            Self::Counted { now, .. } => *now = now.max(time),
        }
    }
}
