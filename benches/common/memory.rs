//! The memory that this process holds, where the system says.

/// Bytes held now.
pub fn resident() -> Option<u64> {
    status("VmRSS:")
}

/// The most bytes held since [`forget_peak`].
pub fn peak_resident() -> Option<u64> {
    status("VmHWM:")
}

/// Starts the peak anew at what is held now, without what the allocator keeps for later. Where that fails, the peak is
/// one of the whole process so far.
pub fn forget_peak() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: gives unused memory back to the system and touches nothing else.
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
