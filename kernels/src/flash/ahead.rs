//! Asking memory for rows that are read soon.

use crate::cpu::Vector;

/// Rows ahead that are asked for: enough to cover the way to memory at a row every few dozen cycles.
const AHEAD: usize = 16;

/// Asks for `width` elements of the row [`AHEAD`] rows after this one.
///
/// # Safety
/// As [`Vector`].
#[inline(always)]
pub(super) unsafe fn ask_ahead<V: Vector, E>(row: *const E, stride: usize, width: usize) {
    let ahead = row.wrapping_add(AHEAD * stride).cast::<u8>();
    for line in (0..width * size_of::<E>()).step_by(64) {
        // SAFETY: the caller's promise.
        unsafe { V::prefetch(ahead.wrapping_add(line)) };
    }
}
