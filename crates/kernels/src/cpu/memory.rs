//! Memory for outputs, packed weights and the intermediate results of tasks, and the size of the cache that tasks fit.

use std::mem::MaybeUninit;
use std::sync::OnceLock;

/// An empty vector with capacity for `count` elements, or `None` where there is no memory for them.
///
/// The memory is not touched: the first thread to write a page gets it from the system, so threads share this work like
/// any other. From 4 MB on, Linux is asked for large pages. The first touch of 32 MB takes 8,192 page faults in pages
/// of 4 KB and 16 in pages of 2 MB, and reading a weight from its beginning to its end waits for an address translation
/// at each page's end.
pub fn large_page_vec<T>(count: usize) -> Option<Vec<T>> {
    let mut vec: Vec<T> = Vec::new();
    vec.try_reserve_exact(count).ok()?;
    advise_large_pages(vec.as_mut_ptr().cast(), vec.capacity() * size_of::<T>());
    Some(vec)
}

/// The bytes of a large page, which begins at a multiple of them.
#[cfg(target_os = "linux")]
const LARGE_PAGE: usize = 2 << 20;

#[cfg(target_os = "linux")]
fn advise_large_pages(start: *mut u8, bytes: usize) {
    // A smaller allocation may hold no whole page.
    if cfg!(miri) || bytes < 2 * LARGE_PAGE {
        return;
    }
    let before = start.align_offset(LARGE_PAGE);
    let bytes = (bytes - before) / LARGE_PAGE * LARGE_PAGE;
    // SAFETY: the range is whole pages within one live allocation. The advice changes no content, and a system that
    // cannot follow it returns an error and goes on with small pages.
    unsafe { libc::madvise(start.wrapping_add(before).cast(), bytes, libc::MADV_HUGEPAGE) };
}

/// Other systems choose by themselves.
#[cfg(not(target_os = "linux"))]
fn advise_large_pages(_: *mut u8, _: usize) {}

/// Memory for the elements of a result, which nobody has touched yet: see [`large_page_vec`].
pub(crate) struct Unwritten<T> {
    vec: Vec<T>,
    count: usize,
}

impl<T> Unwritten<T> {
    /// For as many elements as the product of `dims`, or `None` where there is no memory for them.
    pub fn new(dims: &[usize]) -> Option<Self> {
        let count = dims.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim))?;
        Some(Self { vec: large_page_vec(count)?, count })
    }

    pub fn elements(&mut self) -> &mut [MaybeUninit<T>] {
        &mut self.vec.spare_capacity_mut()[..self.count]
    }

    pub fn as_mut_ptr(&mut self) -> *mut T {
        self.vec.as_mut_ptr()
    }

    /// Writes zeros.
    pub fn clear(&mut self)
    where
        T: Copy + Default,
    {
        self.vec.resize(self.count, T::default());
    }

    /// # Safety
    /// Every element was written.
    pub unsafe fn written(mut self) -> Vec<T> {
        // SAFETY: the vector has the capacity, by `new`, and the elements, by this function's contract.
        unsafe { self.vec.set_len(self.count) };
        self.vec
    }
}

/// 32-bit words that begin at a cache line.
pub(crate) struct Scratch {
    lines: Vec<Line>,
}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; WORDS]);

const WORDS: usize = 16;

impl Scratch {
    /// At least `words` zeros.
    pub fn zeros(words: usize) -> Self {
        Self { lines: vec![Line([0.0; WORDS]); words.div_ceil(WORDS)] }
    }

    /// Zeros for as many words as the product of `counts`, or `None` where there is no memory for them.
    pub fn try_zeros(counts: &[usize]) -> Option<Self> {
        let words = counts.iter().try_fold(1usize, |words, &count| words.checked_mul(count))?;
        let mut lines = Vec::new();
        lines.try_reserve_exact(words.div_ceil(WORDS)).ok()?;
        lines.resize(words.div_ceil(WORDS), Line([0.0; WORDS]));
        Some(Self { lines })
    }

    /// Words that `write` fills, without zeroing them before; `None` where there is no memory for them.
    ///
    /// # Safety
    /// `write` writes each of the `words` words.
    pub unsafe fn written(words: usize, write: &dyn Fn(*mut f32)) -> Option<Self> {
        let count = words.div_ceil(WORDS);
        let mut lines: Vec<Line> = large_page_vec(count)?;
        // The last line may be longer than what is written.
        if let Some(last) = count.checked_sub(1) {
            lines.spare_capacity_mut()[last].write(Line([0.0; WORDS]));
        }
        write(lines.as_mut_ptr().cast());
        // SAFETY: `write` wrote every word, and the end of the last line holds zeros.
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
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.lines.len() * WORDS) }
    }

    pub fn words_mut(&mut self) -> &mut [f32] {
        // SAFETY: a line is 16 f32 without padding.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.lines.len() * WORDS) }
    }
}

/// A pointer into memory that outlives a parallel loop, each task of which writes elements of its own.
pub(crate) struct SharedPtr<T>(pub *mut T);

impl<T> Clone for SharedPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for SharedPtr<T> {}

// SAFETY: the pointer is only used through `unsafe` code, which writes disjoint elements from different threads.
unsafe impl<T: Send> Sync for SharedPtr<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for SharedPtr<T> {}

impl<T> SharedPtr<T> {
    /// # Safety
    /// As [`pointer::add`].
    #[inline(always)]
    pub unsafe fn add(self, count: usize) -> *mut T {
        // SAFETY: as this function's contract.
        unsafe { self.0.add(count) }
    }

    /// The slice of `len` elements from `start` on.
    ///
    /// # Safety
    /// The elements exist, are initialised, and nobody else uses them meanwhile.
    pub unsafe fn slice<'a>(self, start: usize, len: usize) -> &'a mut [T] {
        // SAFETY: as this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

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
    use super::{bytes, large_page_vec, second_cache};

    #[test]
    fn vectors_of_any_size_hold_what_is_written() {
        // Miri takes minutes for megabytes.
        let large = if cfg!(miri) { 0 } else { 4 << 20 };
        for bytes in [0, 1, 4097, large + 4095, large, large + 4097, 2 * large] {
            let mut vec: Vec<u8> = large_page_vec(bytes).expect("a few MB");
            assert!(vec.is_empty() && vec.capacity() >= bytes);
            let byte = |at: usize| (at / 7) as u8;
            vec.extend((0..bytes).map(byte));
            assert!(vec.iter().enumerate().all(|(at, &held)| held == byte(at)), "{bytes}");
        }
    }

    #[test]
    fn there_is_none_for_more_than_memory() {
        assert!(large_page_vec::<u64>(usize::MAX / 8).is_none());
        assert!(large_page_vec::<u64>(usize::MAX).is_none());
    }

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
