//! The load of the processor by this process and by others during a measurement: a time that was taken during a build
//! means little.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

/// Linux counts processor time in hundredths of a second for programs.
const TICKS: f64 = 100.0;

/// A moment from which the use of the processor is counted.
pub struct Load {
    start: Instant,
    all: f64,
    own: f64,
}

impl Load {
    /// Starts to count; returns `None` if the system has no such numbers.
    pub fn start() -> Option<Self> {
        Some(Self { start: Instant::now(), all: all()?, own: own_seconds()? })
    }

    /// Returns the share of the whole processor that other processes used since the start, 0 to 1.
    pub fn others(&self) -> Option<f64> {
        let cores = std::thread::available_parallelism().ok()?.get() as f64;
        let others = (all()? - self.all) - (own_seconds()? - self.own);
        Some((others / (cores * self.start.elapsed().as_secs_f64())).clamp(0.0, 1.0))
    }
}

/// Returns the seconds that the processor was busy, over all cores: all but idle time and waiting for disks. Guests'
/// time is part of user time already.
fn all() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let fields = stat.lines().next()?.split_whitespace().skip(1).take(8);
    let fields: Vec<f64> = fields.map(str::parse).collect::<Result<_, _>>().ok()?;
    let idle = fields.get(3)? + fields.get(4)?;
    Some((fields.iter().sum::<f64>() - idle) / TICKS)
}

/// A child process whose time counts as this process's time; 0 for none.
static CHILD: AtomicU32 = AtomicU32::new(0);

/// Counts the time of this process as the caller's time from now on.
pub fn count_process(id: u32) {
    CHILD.store(id, Ordering::Relaxed);
}

/// Returns the seconds of user and system time of a running process, or 0 if the system has no such numbers.
fn child_seconds() -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", CHILD.load(Ordering::Relaxed))).unwrap_or_default();
    // The fields follow the name, which is in parentheses: the state is the first field, user time the twelfth, system
    // time the next.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace().skip(11).take(2);
    fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / TICKS
}

/// Returns the seconds of user and system time of all threads of this process, and of the process that
/// [`count_process`] names.
#[cfg(unix)]
pub fn own_seconds() -> Option<f64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call writes one `rusage`, for which any bytes, zeros too, are valid.
    let usage = unsafe {
        if libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) != 0 {
            return None;
        }
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    Some(seconds(usage.ru_utime) + seconds(usage.ru_stime) + child_seconds())
}

/// Returns `None` on other systems, which are not supported.
#[cfg(not(unix))]
pub fn own_seconds() -> Option<f64> {
    None
}
