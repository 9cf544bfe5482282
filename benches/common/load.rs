//! How much of the processor this process and others use while something is timed: a time that was taken beside a build
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
    /// `None` where the system does not say.
    pub fn start() -> Option<Self> {
        Some(Self { start: Instant::now(), all: all()?, own: own_seconds()? })
    }

    /// The share of the whole processor that other processes used since the start, 0 to 1.
    pub fn others(&self) -> Option<f64> {
        let cores = std::thread::available_parallelism().ok()?.get() as f64;
        let others = (all()? - self.all) - (own_seconds()? - self.own);
        Some((others / (cores * self.start.elapsed().as_secs_f64())).clamp(0.0, 1.0))
    }
}

/// Seconds that the processor was busy, all cores together: all but idle and waiting for disks. Guests' time is in user
/// time already.
fn all() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/stat").ok()?;
    let fields = stat.lines().next()?.split_whitespace().skip(1).take(8);
    let fields: Vec<f64> = fields.map(str::parse).collect::<Result<_, _>>().ok()?;
    let idle = fields.get(3)? + fields.get(4)?;
    Some((fields.iter().sum::<f64>() - idle) / TICKS)
}

/// A process of this one's, whose time counts as its own; 0 for none.
static CHILD: AtomicU32 = AtomicU32::new(0);

/// From now on the time of this process counts as the caller's own.
pub fn count_process(id: u32) {
    CHILD.store(id, Ordering::Relaxed);
}

/// Seconds of user and system time of a process that still runs, in hundredths, where the system says.
fn child_seconds() -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", CHILD.load(Ordering::Relaxed))).unwrap_or_default();
    // Behind the name, which is in parentheses: the state is the first field, user time the twelfth, system time the
    // next.
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields).split_whitespace().skip(11).take(2);
    fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / TICKS
}

/// Seconds of user and system time of this process, all its threads together, and of the one that
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

/// Other systems are not asked.
#[cfg(not(unix))]
pub fn own_seconds() -> Option<f64> {
    None
}
