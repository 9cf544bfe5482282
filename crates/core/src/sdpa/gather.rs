//! Keys and values of pages in one piece: a copy, for paths that do not read pages in place.

use candle_attention_call::KvScales;
use candle_core::{Result, Tensor};

use super::call::{Call, decoded};
use super::paged::PagedSequences;

/// Returns a call over packed sequences in place of one over pages, with a copy of their keys and values. Other calls
/// are returned as they are.
pub(super) fn with_keys_in_one_piece(mut call: Call) -> Result<Call> {
    let Some(pages) = call.attention.keys.pages.take() else { return Ok(call) };
    let attention = &mut call.attention;
    attention.k = gathered(&attention.k, &pages)?;
    attention.v = gathered(&attention.v, &pages)?;
    let Some(scales) = &mut attention.kv_scales else { return Ok(call) };
    *scales = KvScales { k: gathered(&scales.k, &pages)?, v: gathered(&scales.v, &pages)? };
    if attention.q.device().is_metal() {
        // Candle's operation reads no codes.
        attention.k = decoded(&attention.k, &scales.k, attention.q.dtype())?;
        attention.v = decoded(&attention.v, &scales.v, attention.q.dtype())?;
        attention.kv_scales = None;
    }
    Ok(call)
}

/// Returns the rows of a pool (pages, H_kv, page size, width) that sequences have, one sequence after the other: (1,
/// H_kv, total_kv, width).
fn gathered(pool: &Tensor, sequences: &PagedSequences) -> Result<Tensor> {
    let (pages, h_kv, page_size, width) = pool.dims4()?;
    let total = sequences.packed().total_keys();
    if total == 0 || width == 0 {
        return Tensor::zeros((1, h_kv, total, width), pool.dtype(), pool.device());
    }
    let rows = pool.transpose(1, 2)?.reshape((pages * page_size, h_kv * width))?;
    let indices: Vec<u32> = sequences.rows(page_size).collect();
    let indices = Tensor::from_vec(indices, total, pool.device())?;
    rows.index_select(&indices, 0)?.reshape((1, total, h_kv, width))?.transpose(1, 2)
}
