//! The memory of this process, where the system reports it.

/// Returns the bytes that are resident now.
pub fn resident() -> Option<u64> {
    status("VmRSS:")
}

/// Returns the most bytes that were resident since [`forget_peak`].
pub fn peak_resident() -> Option<u64> {
    status("VmHWM:")
}

/// Restarts the peak at the bytes that are resident now, without those that the allocator keeps for later. If that
/// fails, the peak is the peak of the whole process so far.
pub fn forget_peak() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: returns unused memory to the system and touches nothing else.
    unsafe {
        libc::malloc_trim(0);
    }
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}

fn status(field: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}
