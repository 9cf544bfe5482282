//! Copies of rows of keys and values, and sums of their gradients.

use candle_core::{DType, Result, Tensor, WithDType};

use candle_attention_kernels::{Workers, for_each_chunk};
use candle_attention_modules::base::rowwise::{TASK_ELEMENTS, read, to_vec, with_contiguous_rows, with_float};

/// A row of keys (B, H_kv, T_kv, D) of any head, or of a pool (pages, H_kv, page size, D).
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StoredRow {
    /// The index in the batch, or of the page.
    pub entry: usize,
    /// The index of the row in its head of the entry.
    pub row: usize,
}

/// The rows to copy for blocks of queries.
pub(super) struct SelectedRows {
    /// (blocks, heads with lists, n): rows past the end of a list are `None`.
    pub rows: Vec<Option<StoredRow>>,
    pub blocks: usize,
    /// The number of heads that have separate rows: 1, or H_kv.
    pub heads: usize,
    pub n: usize,
}

impl SelectedRows {
    /// Returns the row that the copy with an index in (blocks, H_kv, n) is from.
    fn source(&self, h_kv: usize, index: usize) -> Option<StoredRow> {
        let head = if self.heads == 1 { 0 } else { index / self.n % h_kv };
        self.rows[(index / self.n / h_kv * self.heads + head) * self.n + index % self.n]
    }

    /// Returns the selected rows of keys (B, H_kv, T_kv, D) as (blocks, H_kv, n, D). Rows past the end of a list are
    /// zeros.
    pub fn copied(&self, op: &'static str, keys: &Tensor) -> Result<Tensor> {
        match keys.dtype() {
            DType::U8 => self.copied_as::<u8>(keys),
            dtype => with_float!(op, dtype, |E| self.copied_as::<E>(keys)),
        }
    }

    fn copied_as<E: WithDType + Default>(&self, keys: &Tensor) -> Result<Tensor> {
        let keys = with_contiguous_rows(&keys.detach())?;
        let (_, h_kv, _, width) = keys.dims4()?;
        let locked = read(&keys);
        let stored = locked.strided::<E, 3>()?;
        let [of_entry, of_head, of_row] = stored.strides;
        let count = self.blocks * h_kv * self.n;
        let mut copies = vec![E::default(); count * width];
        let rows_of_task = (TASK_ELEMENTS / width.max(1)).max(1);
        let copy = |task: usize, rows: &mut [E]| {
            for (index, copied) in (task * rows_of_task..).zip(rows.chunks_exact_mut(width)) {
                if let Some(StoredRow { entry, row }) = self.source(h_kv, index) {
                    let start = entry * of_entry + index / self.n % h_kv * of_head + row * of_row;
                    copied.copy_from_slice(&stored.data[start..start + width]);
                }
            }
        };
        for_each_chunk(&mut copies, rows_of_task * width, Workers::for_tasks(count.div_ceil(rows_of_task)), &copy);
        drop(locked);
        Tensor::from_vec(copies, (self.blocks, h_kv, self.n, width), keys.device())
    }

    /// Adds the gradient (blocks, H_kv, n, D) of copies to the gradient of their rows.
    pub fn add_to(&self, sums: &mut RowSums, gradient: &Tensor) -> Result<()> {
        let gradients = to_vec::<f32>(gradient)?;
        let [_, h_kv, rows, width] = sums.dims;
        for (index, own) in gradients.chunks_exact(width).enumerate() {
            let Some(StoredRow { entry, row }) = self.source(h_kv, index) else { continue };
            let start = ((entry * h_kv + index / self.n % h_kv) * rows + row) * width;
            for (sum, term) in sums.numbers[start..start + width].iter_mut().zip(own) {
                *sum += term;
            }
        }
        Ok(())
    }
}

/// The gradient of keys or values, as it is summed up.
pub(super) struct RowSums {
    numbers: Vec<f32>,
    dims: [usize; 4],
}

impl RowSums {
    /// Returns zeros for keys (B, H_kv, T_kv, D).
    pub fn of(keys: &Tensor) -> Result<Self> {
        let dims = keys.dims4()?.into();
        Ok(Self { numbers: vec![0.0; keys.elem_count()], dims })
    }

    /// Returns the sums in the dtype of the keys.
    pub fn into_tensor(self, keys: &Tensor) -> Result<Tensor> {
        Tensor::from_vec(self.numbers, &self.dims, keys.device())?.to_dtype(keys.dtype())
    }
}
