//! An allocator that counts what each thread asks for.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// For `#[global_allocator]`. It refuses what no test needs: who cannot take that ends the process.
pub struct Counting;

/// The bytes from which a request is refused.
const REFUSED: usize = 1 << 30;

/// The requests of this thread since [`reset`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Asked {
    pub bytes: usize,
    pub times: usize,
    /// Bytes of the largest request.
    pub largest: usize,
}

thread_local! {
    static ASKED: Cell<Asked> = const { Cell::new(Asked { bytes: 0, times: 0, largest: 0 }) };
}

pub fn reset() {
    ASKED.set(Asked::default());
}

pub fn asked() -> Asked {
    ASKED.get()
}

fn is_granted(size: usize) -> bool {
    if size >= REFUSED {
        return false;
    }
    let Asked { bytes, times, largest } = ASKED.get();
    ASKED.set(Asked { bytes: bytes + size, times: times + 1, largest: largest.max(size) });
    true
}

// SAFETY: everything that is not refused is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if !is_granted(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: `System` asks what this function's caller grants: a layout whose size is not zero.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !is_granted(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` by one of the functions above, with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}
