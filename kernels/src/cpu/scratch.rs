//! Memory that a task works in.

use super::memory::reserve;

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
    pub(crate) fn zeros(words: usize) -> Self {
        Self { lines: vec![Line([0.0; WORDS]); words.div_ceil(WORDS)] }
    }

    /// Words that `write` fills, without zeros before; `None` where there is no memory for them.
    ///
    /// # Safety
    /// `write` writes every word.
    pub(crate) unsafe fn written(words: usize, write: impl FnOnce(*mut f32)) -> Option<Self> {
        let count = words.div_ceil(WORDS);
        let mut lines: Vec<Line> = reserve(count)?;
        // It may be longer than what is written.
        if let Some(last) = count.checked_sub(1) {
            lines.spare_capacity_mut()[last].write(Line([0.0; WORDS]));
        }
        write(lines.as_mut_ptr().cast());
        // SAFETY: the caller's promise, and zeros up to the end of the last line.
        unsafe { lines.set_len(count) };
        Some(Self { lines })
    }

    pub(crate) fn as_ptr(&self) -> *const f32 {
        self.lines.as_ptr().cast()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.lines.as_mut_ptr().cast()
    }

    pub(crate) fn words(&self) -> &[f32] {
        // SAFETY: a line is 16 f32 without padding.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * WORDS) }
    }

    pub(crate) fn words_mut(&mut self) -> &mut [f32] {
        // SAFETY: a line is 16 f32 without padding.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * WORDS) }
    }
}
