//! Keys and values of pages in one piece: a copy, for paths that do not read pages in place.

use candle_attention_call::KvScales;
use candle_core::{Result, Tensor};

use super::call::Call;
use super::codes::{decoded, kernels_read_codes};
use super::paged::PagedSequences;

/// Returns a call over packed sequences in place of one over pages, with a copy of their keys and values.
pub(super) fn with_keys_in_one_piece(mut call: Call) -> Result<Call> {
    let Some(sequences) = call.attention.keys.pages.take() else { return Ok(call) };
    let rows = PageRows::new(&sequences, &call.attention.k)?;
    with_readable_codes(with_keys_and_values(call, |pool| rows.gather(pool))?)
}

/// Returns a call with floats in place of codes that no kernel of the device reads.
fn with_readable_codes(mut call: Call) -> Result<Call> {
    let attention = &mut call.attention;
    let Some(KvScales { format, k, v }) = &attention.kv_scales else { return Ok(call) };
    if !kernels_read_codes(attention.q.device()) {
        attention.k = decoded(&attention.k, k, *format, attention.q.dtype())?;
        attention.v = decoded(&attention.v, v, *format, attention.q.dtype())?;
        attention.kv_scales = None;
    }
    Ok(call)
}

/// Returns a call over packed sequences in place of one over pages, for its plan: keys and values have the sizes of a
/// copy, without one, since all their rows are one row.
pub(super) fn for_plan(mut call: Call) -> Result<Call> {
    let Some(sequences) = call.attention.keys.pages.take() else { return Ok(call) };
    let count = sequences.packed().total_keys();
    let one_row = |pool: &Tensor| {
        let (_, h_kv, _, width) = pool.dims4()?;
        match count {
            0 => Tensor::zeros((1, h_kv, 0, width), pool.dtype(), pool.device()),
            _ => pool.narrow(0, 0, 1)?.narrow(2, 0, 1),
        }
    };
    let repeated = |row: &Tensor| {
        let (_, h_kv, _, width) = row.dims4()?;
        row.broadcast_as((1, h_kv, count, width))
    };
    let short = with_readable_codes(with_keys_and_values(call, one_row)?)?;
    with_keys_and_values(short, repeated)
}

/// Returns a call with a function applied to its keys and values and to their scales.
fn with_keys_and_values(mut call: Call, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Call> {
    let attention = &mut call.attention;
    attention.k = change(&attention.k)?;
    attention.v = change(&attention.v)?;
    if let Some(scales) = &mut attention.kv_scales {
        *scales = scales.try_map(change)?;
    }
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
