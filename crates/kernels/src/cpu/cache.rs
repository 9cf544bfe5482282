//! The size of the cache that tasks fit.

use std::sync::OnceLock;

/// The size of the second cache where the system reports none.
const USUAL: usize = 1 << 20;

/// Returns the number of bytes of a core's second cache (L2), which tasks are split to fit: on Linux the size that the
/// system reports for the first core, and 1 MB elsewhere. It is at least 256 KB and at most 2 MB, also where several
/// cores share a larger cache (4 MB of four small cores, 16 MB of a cluster of Apple's).
pub fn second_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| reported(2).unwrap_or(USUAL).clamp(256 << 10, 2 << 20))
}

/// Returns the number of bytes that Linux reports of the data cache of a level.
fn reported(level: u32) -> Option<usize> {
    if cfg!(miri) {
        return None;
    }
    (0..8).find_map(|index| {
        let read = |file: &str| {
            std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}")).ok()
        };
        if read("level")?.trim() != level.to_string() || read("type")?.trim() == "Instruction" {
            return None;
        }
        parse_bytes(&read("size")?)
    })
}

/// Parses a size as Linux writes it, such as `512K`.
fn parse_bytes(text: &str) -> Option<usize> {
    let size = text.trim();
    if let Some(kilobytes) = size.strip_suffix('K') {
        return kilobytes.parse::<usize>().ok()?.checked_mul(1 << 10);
    }
    if let Some(megabytes) = size.strip_suffix('M') {
        return megabytes.parse::<usize>().ok()?.checked_mul(1 << 20);
    }
    size.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{parse_bytes, second_cache};

    #[test]
    fn cache_sizes_are_parsed_as_linux_writes_them() {
        let cases =
            [("512K\n", Some(512 << 10)), ("2M", Some(2 << 20)), ("49152", Some(49152)), ("", None), ("K", None)];
        for (text, expected) in cases {
            assert_eq!(parse_bytes(text), expected, "{text:?}");
        }
        // Any size that is reported here, or the usual one.
        assert!((256 << 10..=2 << 20).contains(&second_cache()));
    }
}
