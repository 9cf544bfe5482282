//! Room that is asked for in large pages is room like any other.

use crate::cpu::reserve;

#[test]
fn room_of_any_size_holds_what_is_written() {
    // Miri takes minutes for megabytes.
    let large = if cfg!(miri) { 0 } else { 4 << 20 };
    for bytes in [0, 1, 4097, large + 4095, large, large + 4097, 2 * large] {
        let mut room: Vec<u8> = reserve(bytes).expect("a few MB");
        assert!(room.is_empty() && room.capacity() >= bytes);
        let byte = |at: usize| (at / 7) as u8;
        room.extend((0..bytes).map(byte));
        assert!(room.iter().enumerate().all(|(at, &held)| held == byte(at)), "{bytes}");
    }
}

#[test]
fn there_is_none_for_more_than_memory() {
    assert!(reserve::<u64>(usize::MAX / 8).is_none());
    assert!(reserve::<u64>(usize::MAX).is_none());
}
