//! Memory for what is written once as a whole: outputs and packed weights.

/// Room for `count` elements, or `None` where there is none. It holds nothing yet, and the first thread to write a page of it
/// gets it from the system, so that threads share this work as they share the rest.
///
/// Much memory is asked for in large pages. The first touch of 32 MB takes 8,192 interruptions in pages of 4 KB and 16 in
/// pages of 2 MB, and a weight that is read from its beginning to its end stops at each page's end for its next address.
pub fn reserve<T>(count: usize) -> Option<Vec<T>> {
    let mut room: Vec<T> = Vec::new();
    room.try_reserve_exact(count).ok()?;
    ask_for_large_pages(room.as_mut_ptr().cast(), room.capacity() * size_of::<T>());
    Some(room)
}

/// The bytes of a large page, which begins at a multiple of them.
#[cfg(target_os = "linux")]
const LARGE_PAGE: usize = 2 << 20;

#[cfg(target_os = "linux")]
fn ask_for_large_pages(start: *mut u8, bytes: usize) {
    // Less than two of them may hold none that is whole.
    if cfg!(miri) || bytes < 2 * LARGE_PAGE {
        return;
    }
    let before = start.align_offset(LARGE_PAGE);
    let bytes = (bytes - before) / LARGE_PAGE * LARGE_PAGE;
    // SAFETY: whole pages within the allocation. The advice changes no content, and a system that cannot follow it says so and
    // goes on with small pages.
    unsafe { libc::madvise(start.wrapping_add(before).cast(), bytes, libc::MADV_HUGEPAGE) };
}

/// Other systems choose by themselves.
#[cfg(not(target_os = "linux"))]
fn ask_for_large_pages(_: *mut u8, _: usize) {}

/// Elements that are all `value`; `None` where there is no memory for them.
pub(crate) fn filled<T: Clone>(count: usize, value: T) -> Option<Vec<T>> {
    let mut values = Vec::new();
    values.try_reserve_exact(count).ok()?;
    values.resize(count, value);
    Some(values)
}
