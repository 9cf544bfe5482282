//! Keys and values of pages in one piece: a copy, for paths that do not read pages in place.

use candle_attention_call::KvScales;
use candle_core::{Result, Tensor};

use super::call::Call;
use super::codes::{decoded, kernels_read};
use super::paged::PagedSequences;

/// Returns a call over packed sequences in place of one over pages, with a copy of their keys and values.
pub(super) fn with_keys_in_one_piece(mut call: Call) -> Result<Call> {
    let Some(sequences) = call.attention.keys.pages.take() else { return Ok(call) };
    let attention = &mut call.attention;
    let rows = PageRows::new(&sequences, &attention.k)?;
    attention.k = rows.gather(&attention.k)?;
    attention.v = rows.gather(&attention.v)?;
    let Some(scales) = &mut attention.kv_scales else { return Ok(call) };
    let format = scales.format;
    *scales = KvScales { format, k: rows.gather(&scales.k)?, v: rows.gather(&scales.v)? };
    if !kernels_read(format, attention.q.device()) {
        attention.k = decoded(&attention.k, &scales.k, format, attention.q.dtype())?;
        attention.v = decoded(&attention.v, &scales.v, format, attention.q.dtype())?;
        attention.kv_scales = None;
    }
    Ok(call)
}

/// Returns a call over packed sequences in place of one over pages, for its plan: keys and values have the sizes of a
/// copy, without one, since all their rows are one row.
pub(super) fn for_plan(mut call: Call) -> Result<Call> {
    let Some(sequences) = call.attention.keys.pages.take() else { return Ok(call) };
    let count = sequences.packed().total_keys();
    let repeated = |pool: &Tensor| {
        let (_, h_kv, _, width) = pool.dims4()?;
        if count == 0 {
            return Tensor::zeros((1, h_kv, 0, width), pool.dtype(), pool.device());
        }
        pool.narrow(0, 0, 1)?.narrow(2, 0, 1)?.broadcast_as((1, h_kv, count, width))
    };
    let attention = &mut call.attention;
    attention.k = repeated(&attention.k)?;
    attention.v = repeated(&attention.v)?;
    let Some(scales) = &mut attention.kv_scales else { return Ok(call) };
    let format = scales.format;
    if kernels_read(format, attention.q.device()) {
        *scales = KvScales { format, k: repeated(&scales.k)?, v: repeated(&scales.v)? };
        return Ok(call);
    }
    attention.k = decoded(&attention.k, &repeated(&scales.k)?, format, attention.q.dtype())?;
    attention.v = decoded(&attention.v, &repeated(&scales.v)?, format, attention.q.dtype())?;
    attention.kv_scales = None;
    Ok(call)
}

/// The rows of pools that sequences have, one sequence after the other.
struct PageRows {
    count: usize,
    /// The index of each row in a pool, (total_kv,); `None` without rows, since Metal has no empty buffers.
    indices: Option<Tensor>,
}

impl PageRows {
    /// Returns the rows of sequences in pools like this one, (pages, H_kv, page size, width).
    fn new(sequences: &PagedSequences, pool: &Tensor) -> Result<Self> {
        let count = sequences.packed().total_keys();
        if count == 0 {
            return Ok(Self { count, indices: None });
        }
        let indices: Vec<u32> = sequences.rows(pool.dim(2)?).collect();
        Ok(Self { count, indices: Some(Tensor::from_vec(indices, count, pool.device())?) })
    }

    /// Returns the rows of a pool (pages, H_kv, page size, width) as (1, H_kv, total_kv, width).
    fn gather(&self, pool: &Tensor) -> Result<Tensor> {
        let (pages, h_kv, page_size, width) = pool.dims4()?;
        let Some(indices) = self.indices.as_ref().filter(|_| width > 0) else {
            return Tensor::zeros((1, h_kv, self.count, width), pool.dtype(), pool.device());
        };
        let rows = pool.transpose(1, 2)?.reshape((pages * page_size, h_kv * width))?;
        rows.index_select(indices, 0)?.reshape((1, self.count, h_kv, width))?.transpose(1, 2)
    }
}
