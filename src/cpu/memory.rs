//! Memory for what is written once as a whole: outputs and packed weights.

/// Room for `count` elements, or `None` where there is none. It holds nothing yet, and the first thread to write a page of it
/// gets it from the system, so that threads share this work as they share the rest.
///
/// Much memory is asked for in large pages. The first touch of 32 MB takes 8,192 interruptions in pages of 4 KB and 16 in
/// pages of 2 MB, and a weight that is read from its beginning to its end stops at each page's end for its next address.
pub(crate) fn reserve<T>(count: usize) -> Option<Vec<T>> {
    let mut room: Vec<T> = Vec::new();
    room.try_reserve_exact(count).ok()?;
    ask_for_large_pages(room.as_mut_ptr().cast(), room.capacity() * size_of::<T>());
    Some(room)
}

/// Less than two of them may hold no whole page that begins where a large one has to.
#[cfg(target_os = "linux")]
const WORTH_ASKING: usize = 4 << 20;

#[cfg(target_os = "linux")]
fn ask_for_large_pages(start: *mut u8, bytes: usize) {
    if cfg!(miri) || bytes < WORTH_ASKING {
        return;
    }
    // SAFETY: it asks for a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    let Some(page) = usize::try_from(page).ok().filter(|page| page.is_power_of_two()) else { return };
    // The pages that nobody else has a part of.
    let before = start.align_offset(page);
    let bytes = bytes.saturating_sub(before) / page * page;
    // SAFETY: the range is within the allocation. The advice changes no content, and a system that cannot follow it says so
    // and goes on with small pages.
    unsafe { libc::madvise(start.wrapping_add(before).cast(), bytes, libc::MADV_HUGEPAGE) };
}

/// Other systems choose by themselves.
#[cfg(not(target_os = "linux"))]
fn ask_for_large_pages(_: *mut u8, _: usize) {}
