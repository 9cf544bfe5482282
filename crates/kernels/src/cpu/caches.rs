//! The sizes of the processor's caches.

use std::sync::OnceLock;

/// Of a core whose system reports none.
const USUAL: usize = 1 << 20;

/// The bytes of a core's second cache (L2), which tasks are cut to fit: as Linux reports them for the first core, 1 MB
/// elsewhere. Caches that several cores share (4 MB of four small cores, 16 MB of a cluster of Apple's) count for 2 MB.
pub fn second_cache() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(|| reported(2).unwrap_or(USUAL).clamp(256 << 10, 2 << 20))
}

/// What Linux says of the data cache of a level.
fn reported(level: u32) -> Option<usize> {
    if cfg!(miri) {
        return None;
    }
    (0..8).find_map(|index| {
        let read = |file: &str| {
            std::fs::read_to_string(format!("/sys/devices/system/cpu/cpu0/cache/index{index}/{file}")).ok()
        };
        let is_it = read("level")?.trim() == level.to_string() && read("type")?.trim() != "Instruction";
        is_it.then(|| bytes(&read("size")?)).flatten()
    })
}

/// Of a size as Linux writes it: `512K`.
fn bytes(size: &str) -> Option<usize> {
    let size = size.trim();
    let (digits, unit) = match size.char_indices().last()? {
        (at, 'K') => (&size[..at], 1 << 10),
        (at, 'M') => (&size[..at], 1 << 20),
        _ => (size, 1),
    };
    digits.parse::<usize>().ok()?.checked_mul(unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_linux_writes_them() {
        let cases =
            [("512K\n", Some(512 << 10)), ("2M", Some(2 << 20)), ("49152", Some(49152)), ("", None), ("K", None)];
        for (text, expected) in cases {
            assert_eq!(bytes(text), expected, "{text:?}");
        }
        // Whatever is reported here, or nothing.
        assert!((256 << 10..=2 << 20).contains(&second_cache()));
    }
}
