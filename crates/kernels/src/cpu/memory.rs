//! Memory for results and scratch buffers.

use std::mem::MaybeUninit;

/// Returns an empty vector with capacity for `count` elements, or `None` if there is no memory for them.
///
/// The memory is not touched: the first thread that writes a page gets it from the system, so that threads share this
/// work like any other. From 4 MB on, the function requests large pages from Linux. The first touch of 32 MB takes
/// 8,192 page faults in pages of 4 KB and 16 in pages of 2 MB, and reading a weight from its beginning to its end waits
/// for an address translation at each page's end.
pub fn large_page_vec<T>(count: usize) -> Option<Vec<T>> {
    let mut vec: Vec<T> = Vec::new();
    vec.try_reserve_exact(count).ok()?;
    // Other systems choose by themselves.
    #[cfg(target_os = "linux")]
    advise_large_pages(vec.as_mut_ptr().cast(), vec.capacity() * size_of::<T>());
    Some(vec)
}

/// Requests large pages for an allocation.
#[cfg(target_os = "linux")]
fn advise_large_pages(start: *mut u8, bytes: usize) {
    // A large page begins at a multiple of its bytes.
    const LARGE_PAGE: usize = 2 << 20;
    // A smaller allocation may contain no whole page.
    if cfg!(miri) || bytes < 2 * LARGE_PAGE {
        return;
    }
    let before = start.align_offset(LARGE_PAGE);
    let page_bytes = (bytes - before) / LARGE_PAGE * LARGE_PAGE;
    // SAFETY: the range is whole pages within one live allocation. The advice changes no content, and a system that
    // cannot follow it returns an error and keeps small pages.
    unsafe { libc::madvise(start.wrapping_add(before).cast(), page_bytes, libc::MADV_HUGEPAGE) };
}

/// Memory for the elements of a result, which no thread has touched yet, from [`large_page_vec`].
pub(crate) struct Unwritten<T> {
    vec: Vec<T>,
    count: usize,
}

impl<T> Unwritten<T> {
    /// Allocates the elements of a tensor of shape `dims`, or returns `None` if there is no memory for them.
    pub fn new(dims: &[usize]) -> Option<Self> {
        let count = dims.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim))?;
        Some(Self { vec: large_page_vec(count)?, count })
    }

    /// Returns the elements, which are not initialised.
    pub fn elements(&mut self) -> &mut [MaybeUninit<T>] {
        &mut self.vec.spare_capacity_mut()[..self.count]
    }

    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.vec.as_mut_ptr()
    }

    /// Writes zeros to all elements.
    pub fn clear(&mut self)
    where
        T: Copy + Default,
    {
        self.vec.resize(self.count, T::default());
    }

    /// Returns the vector of all elements.
    ///
    /// # Safety
    /// Every element was written.
    pub unsafe fn into_vec(mut self) -> Vec<T> {
        // SAFETY: the vector has the capacity, by `new`, and the elements, by this function's contract.
        unsafe { self.vec.set_len(self.count) };
        self.vec
    }
}

/// A scratch buffer of 32-bit words that begins at a cache line.
pub(crate) struct Scratch {
    lines: Vec<CacheLine>,
}

/// The 32-bit words of a cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct CacheLine([f32; Self::WORDS]);

impl CacheLine {
    pub const WORDS: usize = 16;
    const ZEROS: Self = Self([0.0; Self::WORDS]);
}

impl Scratch {
    /// Allocates at least `words` zeros.
    pub fn zeros(words: usize) -> Self {
        Self { lines: vec![CacheLine::ZEROS; words.div_ceil(CacheLine::WORDS)] }
    }

    /// Allocates zeros for a buffer of shape `counts`, or returns `None` if there is no memory for them.
    pub fn try_zeros(counts: &[usize]) -> Option<Self> {
        let words = counts.iter().try_fold(1usize, |words, &count| words.checked_mul(count))?;
        // SAFETY: zeros are written to all of them.
        unsafe { Self::filled_by(words, &|to| to.write_bytes(0, words)) }
    }

    /// Allocates words that `write` fills, without clearing them before, or returns `None` if there is no memory for
    /// them.
    ///
    /// # Safety
    /// `write` writes each of the `words` words.
    pub unsafe fn filled_by(words: usize, write: &dyn Fn(*mut f32)) -> Option<Self> {
        let count = words.div_ceil(CacheLine::WORDS);
        let mut lines: Vec<CacheLine> = large_page_vec(count)?;
        // The last line may be longer than what is written.
        if let Some(last) = count.checked_sub(1) {
            lines.spare_capacity_mut()[last].write(CacheLine::ZEROS);
        }
        write(lines.as_mut_ptr().cast());
        // SAFETY: `write` wrote every word, and the end of the last line is zeros.
        unsafe { lines.set_len(count) };
        Some(Self { lines })
    }

    pub fn as_ptr(&self) -> *const f32 {
        self.lines.as_ptr().cast()
    }

    pub fn as_mut_ptr(&mut self) -> *mut f32 {
        self.lines.as_mut_ptr().cast()
    }

    pub fn words(&self) -> &[f32] {
        // SAFETY: a line is 16 f32 without padding.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.lines.len() * CacheLine::WORDS) }
    }

    pub fn words_mut(&mut self) -> &mut [f32] {
        // SAFETY: a line is 16 f32 without padding.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.lines.len() * CacheLine::WORDS) }
    }
}

/// A pointer into memory that outlives a parallel loop, of which no two tasks write the same element.
#[derive(Clone, Copy)]
pub(crate) struct SharedPtr<T>(pub *mut T);

// SAFETY: the pointer is only used through `unsafe` code, which writes disjoint elements from different threads.
unsafe impl<T: Send> Sync for SharedPtr<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedPtr<T> {}

impl<T> SharedPtr<T> {
    /// Returns the pointer to the element `count` further.
    ///
    /// # Safety
    /// As the method `add` of pointers.
    #[inline(always)]
    pub unsafe fn add(self, count: usize) -> *mut T {
        // SAFETY: as this function's contract.
        unsafe { self.0.add(count) }
    }

    /// Returns the slice of `len` elements from `start` on.
    ///
    /// # Safety
    /// The elements exist and are initialised, and no other code uses them while the slice exists.
    pub unsafe fn slice<'a>(self, start: usize, len: usize) -> &'a mut [T] {
        // SAFETY: as this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::large_page_vec;

    #[test]
    fn large_page_vec_of_any_size_stores_its_bytes() {
        // Miri takes minutes for megabytes.
        let large = if cfg!(miri) { 0 } else { 4 << 20 };
        for bytes in [0, 1, 4097, large + 4095, large, large + 4097, 2 * large] {
            let mut vec: Vec<u8> = large_page_vec(bytes).expect("a few MB");
            assert!(vec.is_empty() && vec.capacity() >= bytes);
            let byte = |at: usize| (at / 7) as u8;
            vec.extend((0..bytes).map(byte));
            assert!(vec.iter().enumerate().all(|(at, &stored)| stored == byte(at)), "{bytes}");
        }
    }

    #[test]
    fn large_page_vec_beyond_memory_is_none() {
        assert!(large_page_vec::<u64>(usize::MAX / 8).is_none());
        assert!(large_page_vec::<u64>(usize::MAX).is_none());
    }
}
