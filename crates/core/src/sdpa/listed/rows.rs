//! Keys and values as rows that lists of keys name, and sums of the gradients of these rows.

use candle_attention_call::{AttentionCall, KvScales};
use candle_core::{Result, Tensor};

use super::super::call::Call;
use candle_attention_kernels::{Workers, for_each_chunk};
use candle_attention_modules::base::rowwise::{TensorElement, with_contiguous_rows};

/// The keys, values and scales of a call without gradients, (entries, H_kv, rows, ..): the entries of a batch, or one
/// entry with the rows of all packed sequences, or of all pages of a pool.
pub(super) struct ListableRows {
    k: Tensor,
    v: Tensor,
    kv_scales: Option<KvScales<Tensor>>,
}

/// Keys, values and scales in pages of one key, (rows, H_kv, 1, ..), as the kernel reads pages: a table of pages is
/// then a list of keys, whose rows are read where they are stored.
pub(super) struct OneKeyPages {
    pub k: Tensor,
    pub v: Tensor,
    pub kv_scales: Option<KvScales<Tensor>>,
}

impl ListableRows {
    /// Returns the rows of a call: views, unless the rows of a head are not contiguous, or pages of a pool do not
    /// follow each other in memory.
    pub fn new(call: &Call) -> Result<Self> {
        let AttentionCall { k, v, kv_scales, keys, .. } = &call.attention;
        let rows = |stored: &Tensor| -> Result<Tensor> {
            let stored = with_contiguous_rows(&stored.detach())?;
            if keys.pages.is_none() {
                return Ok(stored);
            }
            let (pages, h_kv, page_size, width) = stored.dims4()?;
            stored.transpose(1, 2)?.reshape((1, pages * page_size, h_kv, width))?.transpose(1, 2)
        };
        Ok(Self {
            k: rows(k)?,
            v: rows(v)?,
            kv_scales: kv_scales.as_ref().map(|scales| scales.try_map(rows)).transpose()?,
        })
    }

    /// Returns the rows of an entry as pages.
    pub fn pages(&self, entry: usize) -> Result<OneKeyPages> {
        let pages = |rows: &Tensor| rows.narrow(0, entry, 1)?.transpose(0, 2);
        Ok(OneKeyPages {
            k: pages(&self.k)?,
            v: pages(&self.v)?,
            kv_scales: self.kv_scales.as_ref().map(|scales| scales.try_map(pages)).transpose()?,
        })
    }
}

/// The rows of listed keys for blocks of queries.
pub(super) struct SelectedRows {
    /// (blocks, heads with lists, n). Past the end of a list, a row that some list of the block names; row 0 if none
    /// does.
    pub rows: Vec<u32>,
    /// The number of keys of each list, (blocks, heads with lists).
    pub lens: Vec<usize>,
    pub blocks: usize,
    /// The number of heads that have separate lists: 1, or H_kv.
    pub heads: usize,
    pub n: usize,
}

/// The gradient of keys or values, as it is summed up.
pub(super) struct RowSums {
    /// (entries, H_kv, rows, width), as [`ListableRows`] has them.
    numbers: Vec<f32>,
    h_kv: usize,
    /// The number of rows of a head.
    rows: usize,
    width: usize,
}

impl RowSums {
    /// Returns zeros for the keys or the values of a call.
    pub fn of(call: &Call, stored: &Tensor) -> Result<Self> {
        let (entries, h_kv, of_entry, width) = stored.dims4()?;
        let rows = if call.attention.keys.pages.is_some() { entries * of_entry } else { of_entry };
        Ok(Self { numbers: vec![0.0; stored.elem_count()], h_kv, rows, width })
    }

    /// Adds the gradients (blocks, H_kv, n, width) of selected rows of an entry. The sum of a row has the same order
    /// for any number of threads.
    pub fn add<E: TensorElement>(&mut self, entry: usize, selected: &SelectedRows, gradients: &[E]) {
        let &mut Self { ref mut numbers, h_kv, rows, width } = self;
        let SelectedRows { rows: selected_rows, lens, blocks, heads, n } = selected;
        let of_entry = h_kv * rows * width;
        let sums_of_entry = &mut numbers[entry * of_entry..(entry + 1) * of_entry];
        for_each_chunk(sums_of_entry, rows * width, Workers::for_tasks(h_kv), &|head, sums| {
            let mut scratch = Vec::new();
            for block in 0..*blocks {
                let list = block * heads + head % heads;
                let of_head = &gradients[(block * h_kv + head) * n * width..][..n * width];
                let own_rows = &selected_rows[list * n..][..lens[list]];
                for (&row, gradient) in own_rows.iter().zip(of_head.chunks_exact(width)) {
                    let start = row as usize * width;
                    for (sum, term) in sums[start..start + width].iter_mut().zip(E::widen(gradient, &mut scratch)) {
                        *sum += term;
                    }
                }
            }
        });
    }

    /// Returns the sums in the shape and the dtype of the keys or values.
    pub fn into_tensor(self, call: &Call, stored: &Tensor) -> Result<Tensor> {
        let (entries, h_kv, of_entry, width) = stored.dims4()?;
        let sums = if call.attention.keys.pages.is_some() {
            let of_heads = Tensor::from_vec(self.numbers, (h_kv, entries, of_entry, width), stored.device())?;
            of_heads.transpose(0, 1)?.contiguous()?
        } else {
            Tensor::from_vec(self.numbers, stored.shape(), stored.device())?
        };
        sums.to_dtype(stored.dtype())
    }
}
