//! The split of a product into tasks.

use std::ops::Range;

use super::operands::{BLOCK_ROW, LEAST_MAX_ROWS};
use crate::cpu::{Kernel, second_cache};

/// The sums of a task take at most the second cache divided by this. Its inputs and a block of the weight take the
/// rest.
const SUMS_DIVISOR: usize = 4;
/// The copied words of a block of the rows of a task take at most the second cache divided by this. A task may have
/// [`LEAST_MAX_ROWS`] in any case.
const LEFT_DIVISOR: usize = 8;
/// The number of tasks for each thread, so that the last one is short.
const TASKS_PER_THREAD: usize = 8;

/// The split of rows and panels into tasks.
#[derive(Clone, Copy)]
pub(super) struct TaskSplit {
    /// The number of rows of all tasks.
    all_rows: usize,
    /// The number of rows of a task.
    pub rows: usize,
    pub row_chunks: usize,
    /// The number of panels of all tasks.
    all_panels: usize,
    pub panel_chunks: usize,
}

impl TaskSplit {
    /// Splits a product with `weights` right operands. Rows are split no more than their copies need, since a block of
    /// a panel is copied or widened for each chunk of them.
    pub fn new<K: Kernel>(rows: usize, panels: usize, weights: usize, workers: usize) -> Self {
        let most_rows = (second_cache() / LEFT_DIVISOR / (4 * BLOCK_ROW)).max(LEAST_MAX_ROWS);
        let groups = rows.div_ceil(K::ROWS);
        // Chunks of one length.
        let groups_each = groups.div_ceil(groups.div_ceil(most_rows / K::ROWS));
        let rows_each = groups_each * K::ROWS;
        let row_chunks = groups.div_ceil(groups_each);
        let fit = second_cache() / SUMS_DIVISOR / (4 * K::PANEL * rows_each * weights);
        let even = (panels * row_chunks).div_ceil(TASKS_PER_THREAD * workers);
        let least_chunks = panels.div_ceil(fit.min(even).max(1));
        // Threads of one speed get the same number of tasks.
        let step = workers / greatest_common_divisor(row_chunks, workers);
        let panel_chunks = least_chunks.next_multiple_of(step).min(panels);
        Self { all_rows: rows, rows: rows_each, row_chunks, all_panels: panels, panel_chunks }
    }

    /// Returns the rows of a chunk.
    pub fn rows_of(&self, chunk: usize) -> Range<usize> {
        chunk * self.rows..self.all_rows.min((chunk + 1) * self.rows)
    }

    /// Returns the panels of a chunk. Chunks differ by one panel at most.
    pub fn panels_of(&self, chunk: usize) -> Range<usize> {
        let start = |of: usize| of * self.all_panels / self.panel_chunks;
        start(chunk)..start(chunk + 1)
    }

    /// Returns the number of panels of the largest chunk.
    pub fn most_panels(&self) -> usize {
        self.all_panels.div_ceil(self.panel_chunks)
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::TaskSplit;
    use crate::cpu::{Kernel, SimdTask, tests::on_every_instruction_set};

    struct Splits;

    impl SimdTask for Splits {
        type Output = ();

        unsafe fn run<K: Kernel>(self) {
            for rows in [1, 7, 8, 191, 192, 193, 512, 1000] {
                for panels in [1, 2, 11, 43, 118] {
                    for workers in [1, 2, 3, 8, 64] {
                        let split = TaskSplit::new::<K>(rows, panels, 1, workers);
                        let case = format!("{rows} rows, {panels} panels, {workers} threads");
                        let chunks = (0..split.row_chunks).map(|chunk| split.rows_of(chunk));
                        assert!(chunks.flatten().eq(0..rows), "{case}");
                        let all: Vec<_> = (0..split.panel_chunks).map(|chunk| split.panels_of(chunk)).collect();
                        assert!(all.iter().cloned().flatten().eq(0..panels), "{case}");
                        let largest = all.iter().map(|chunk| chunk.len()).max();
                        let smallest = all.iter().map(|chunk| chunk.len()).min();
                        assert_eq!(largest, Some(split.most_panels()), "{case}");
                        assert!(smallest >= Some(split.most_panels() - 1) && smallest >= Some(1), "{case}");
                        let tasks = split.row_chunks * split.panel_chunks;
                        assert!(tasks.is_multiple_of(workers) || split.panel_chunks == panels, "{case}");
                    }
                }
            }
        }
    }

    #[test]
    fn tasks_of_any_product_cover_it_once_and_divide_among_threads() {
        on_every_instruction_set(|| Splits);
    }
}
