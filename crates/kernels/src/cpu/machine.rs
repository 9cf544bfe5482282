//! What a call takes of the machine: threads, over which its work is split, memory for its result and for what its
//! tasks keep meanwhile, and the size of the cache that tasks fit.

use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that a caller brings for brief calls, in the place of rayon's, which take longer to wake.
#[derive(Debug, Clone, Copy)]
pub struct Executor {
    /// How many threads `run` has, the calling one included.
    pub threads: fn() -> usize,
    /// Runs the work on the calling thread and on the others, at the same time, and returns when all are done. The work
    /// calls nothing of the executor's. Threads that leave it out cost time and nothing else.
    pub run: fn(&(dyn Fn() + Sync)),
}

/// How many threads a call is worth, and how they come together.
#[derive(Debug, Clone, Copy)]
pub struct Workers {
    pub(crate) count: usize,
    /// The call is over in about the time in which a thread wakes: the caller works too, instead of waiting for the
    /// pool.
    is_brief: bool,
    executor: Option<Executor>,
}

/// Multiply-adds that are worth a second thread: some tens of microseconds, a few times what waking it takes.
const MULTIPLY_ADDS_OF_A_THREAD: usize = 1 << 20;

/// Bytes whose reading is worth one: one core takes 10 to 20 µs for them from memory.
const BYTES_OF_A_THREAD: usize = 1 << 18;

/// The most multiply-adds, as a multiple of a thread's, of a call that is brief. In longer ones the pool's threads do
/// better by themselves: the system tends to wake a thread beside the one that wakes it, and takes a while to part the
/// two.
const BRIEF: usize = 96;

/// An executor wakes all of its threads. For a call that is worth fewer than one in so many of them rayon wakes those
/// alone.
const THREADS_FOR_ONE: usize = 4;

impl Workers {
    /// For a call of so many multiply-adds that reads so many bytes once; a brief one runs on the executor, if there is
    /// one.
    pub fn of(multiply_adds: usize, bytes: usize, executor: Option<Executor>) -> Self {
        let worth = (multiply_adds / MULTIPLY_ADDS_OF_A_THREAD).max(bytes / BYTES_OF_A_THREAD).saturating_add(1);
        let is_brief = multiply_adds / MULTIPLY_ADDS_OF_A_THREAD <= BRIEF;
        // A call that is worth one does not start a pool.
        if worth == 1 {
            return Self { count: 1, is_brief, executor: None };
        }
        let fits = |executor: &Executor| is_brief && (executor.threads)() <= THREADS_FOR_ONE * worth;
        let executor = executor.filter(fits);
        let threads = executor.map_or_else(rayon::current_num_threads, |executor| (executor.threads)());
        Self { count: threads.clamp(1, worth), is_brief, executor }
    }
}

/// Runs `task` for every index below `tasks`, the first ones first, on the workers' executor, or on the threads of the
/// rayon pool that the caller is in: the global one, as Candle's own operations, which honours `RAYON_NUM_THREADS`, or
/// any other that the caller entered. Each thread that takes part makes itself one `state`.
///
/// A thread takes the next index when it is done with its last, so that tasks of unequal size even out. What an index
/// computes may not depend on the thread; then the result does not depend on their number.
pub fn for_each_task<S>(
    tasks: usize,
    workers: Workers,
    state: &(dyn Fn() -> S + Sync),
    task: &(dyn Fn(&mut S, usize) + Sync),
) {
    let count = workers.count.min(tasks);
    let next = AtomicUsize::new(0);
    let work = || {
        let mut index = next.fetch_add(1, Ordering::Relaxed);
        if index >= tasks {
            return;
        }
        let mut state = state();
        while index < tasks {
            task(&mut state, index);
            index = next.fetch_add(1, Ordering::Relaxed);
        }
    };
    if count <= 1 {
        return work();
    }
    on_threads(workers, count - 1, &work);
}

/// [`for_each_task`] for tasks without a state.
pub fn for_each_index(tasks: usize, workers: Workers, task: &(dyn Fn(usize) + Sync)) {
    for_each_task(tasks, workers, &|| (), &|(), index| task(index));
}

/// Runs `work` on the calling thread and on so many others.
fn on_threads(workers: Workers, others: usize, work: &(dyn Fn() + Sync)) {
    match (workers.executor, workers.is_brief) {
        (Some(executor), _) => {
            (executor.run)(work);
            // What an executor that ran nothing has left.
            work();
        }
        (None, true) => rayon::in_place_scope(|scope| share(scope, others, work)),
        (None, false) => rayon::scope(|scope| share(scope, others, work)),
    }
}

fn share<'s>(scope: &rayon::Scope<'s>, others: usize, work: &'s (dyn Fn() + Sync)) {
    for _ in 0..others {
        scope.spawn(|_| work());
    }
    work();
}

/// An empty vector with capacity for `count` elements, or `None` where there is no memory for them.
///
/// The memory is not touched: the first thread to write a page gets it from the system, so threads share this work like
/// any other. From 4 MB on, Linux is asked for large pages. The first touch of 32 MB takes 8,192 page faults in pages
/// of 4 KB and 16 in pages of 2 MB, and reading a weight from its beginning to its end waits for an address translation
/// at each page's end.
pub fn large_page_vec<T>(count: usize) -> Option<Vec<T>> {
    let mut vec: Vec<T> = Vec::new();
    vec.try_reserve_exact(count).ok()?;
    // Other systems choose by themselves.
    #[cfg(target_os = "linux")]
    advise_large_pages(vec.as_mut_ptr().cast(), vec.capacity() * size_of::<T>());
    Some(vec)
}

#[cfg(target_os = "linux")]
fn advise_large_pages(start: *mut u8, bytes: usize) {
    // A large page begins at a multiple of its bytes.
    const LARGE_PAGE: usize = 2 << 20;
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
        // SAFETY: zeros are written to all of them.
        unsafe { Self::written(words, &|to| to.write_bytes(0, words)) }
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
#[derive(Clone, Copy)]
pub(crate) struct SharedPtr<T>(pub *mut T);

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
