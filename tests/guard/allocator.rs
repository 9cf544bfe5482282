//! An allocator that puts every allocation of some size next to a page without access.
//!
//! By default the page is after the allocation, so that a read or write past its end ends the process. With
//! `FLASH_GUARD=before` in the environment it is before the allocation. The unused bytes on the other side, up to the
//! end of a page, are filled with a canary, which is checked when the allocation is freed. Freed memory is
//! returned to the system, so a use after free ends the process as well.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::CStr;
use std::ptr;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

/// Smaller allocations are nobody's buffers of numbers, and there are many of them.
const SMALLEST: usize = 64;

/// The bytes of a page, on every Linux that this crate is tested on; the guard is a whole number of pages anyway.
const PAGE: usize = 4096;

const CANARY: u8 = 0xa5;

pub struct GuardedAllocator;

/// How many allocations were guarded so far.
pub static GUARDED: AtomicUsize = AtomicUsize::new(0);

/// 0 before it is known, then 1 for a guard behind and 2 for one before.
static SIDE: AtomicU8 = AtomicU8::new(0);

pub fn guard_is_before() -> bool {
    let known = SIDE.load(Ordering::Relaxed);
    if known != 0 {
        return known == 2;
    }
    const NAME: &CStr = c"FLASH_GUARD";
    const BEFORE: &CStr = c"before";
    // SAFETY: both are C strings; no thread of the test changes the environment. `std::env` would allocate.
    let before = unsafe {
        let value = libc::getenv(NAME.as_ptr());
        !value.is_null() && CStr::from_ptr(value) == BEFORE
    };
    SIDE.store(1 + u8::from(before), Ordering::Relaxed);
    before
}

/// The position of an allocation in its mapping.
struct Place {
    /// Bytes of the pages that may be touched.
    usable: usize,
    /// From the start of the mapping, guard included, to the usable pages and to the allocation.
    pages: usize,
    start: usize,
}

impl Place {
    fn of(layout: Layout) -> Self {
        let usable = layout.size().next_multiple_of(PAGE);
        if guard_is_before() {
            return Self { usable, pages: PAGE, start: PAGE };
        }
        let start = (usable - layout.size()) / layout.align() * layout.align();
        Self { usable, pages: 0, start }
    }

    /// Returns the free bytes before the allocation and after it, as offsets and lengths.
    fn gaps(&self, layout: Layout) -> [(usize, usize); 2] {
        let end = self.start + layout.size();
        [(self.pages, self.start - self.pages), (end, self.pages + self.usable - end)]
    }
}

fn is_guarded(layout: Layout) -> bool {
    layout.size() >= SMALLEST && layout.align() <= PAGE
}

/// Ends the process without an allocation, which a panic's message would need.
fn die(message: &str) -> ! {
    // SAFETY: pointer and length come from one string; `abort` has no requirements.
    unsafe {
        libc::write(2, message.as_ptr().cast(), message.len());
        libc::abort()
    }
}

// SAFETY: `alloc` returns memory of a separate mapping, of the layout's size and alignment (the start of a page, or a
// multiple of the alignment from it), which stays until `dealloc` of the same layout. Allocations without a guard are
// passed to the system's allocator, by the same rule in both functions.
unsafe impl GlobalAlloc for GuardedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !is_guarded(layout) {
            // SAFETY: the caller's promises are the same.
            return unsafe { System.alloc(layout) };
        }
        let place = Place::of(layout);
        // SAFETY: a new anonymous mapping of whole pages touches no other memory; all writes lie within its usable
        // pages.
        unsafe {
            let nothing = libc::PROT_NONE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let mapping = libc::mmap(ptr::null_mut(), place.usable + PAGE, nothing, flags, -1, 0);
            if mapping == libc::MAP_FAILED {
                return ptr::null_mut();
            }
            let mapping: *mut u8 = mapping.cast();
            if libc::mprotect(mapping.add(place.pages).cast(), place.usable, libc::PROT_READ | libc::PROT_WRITE) != 0 {
                return ptr::null_mut();
            }
            for (from, count) in place.gaps(layout) {
                mapping.add(from).write_bytes(CANARY, count);
            }
            GUARDED.fetch_add(1, Ordering::Relaxed);
            mapping.add(place.start)
        }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if !is_guarded(layout) {
            // SAFETY: it came from the system's allocator.
            return unsafe { System.dealloc(pointer, layout) };
        }
        let place = Place::of(layout);
        // SAFETY: `alloc` mapped it, by the same layout; the gaps lie in its usable pages, and nobody uses it any more.
        unsafe {
            let mapping = pointer.sub(place.start);
            for (from, count) in place.gaps(layout) {
                if std::slice::from_raw_parts(mapping.add(from), count).iter().any(|&byte| byte != CANARY) {
                    die("a write beside an allocation\n");
                }
            }
            libc::munmap(mapping.cast(), place.usable + PAGE);
        }
    }
}
