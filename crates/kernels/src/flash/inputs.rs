//! A checked call and its queries, apart from keys and values.

use std::ops::Range;

use super::options::{TileAlibi, TileModifiers};
use super::problem::{CpuCall, KeysOfQueries};
use super::relative_bias::RelativeBiasTable;
use crate::error::{Error, check_len};
use crate::number::{Number, Strided};
use candle_attention_call::{AttentionCall, AttentionDims, LayoutStrides, QueryRow};

/// Returns the number of elements of an attention output, B·H·T_q·D_v.
///
/// # Errors
/// If no memory is large enough for them.
pub(super) fn output_len(dims: &AttentionDims) -> Result<usize, Error> {
    let AttentionDims { b, h, t_q, d_v, .. } = *dims;
    // No partial product overflows either, and log-sum-exps, which are not empty where D_v = 0, are counted.
    let counts = [b, h, t_q, d_v, size_of::<f32>()];
    let bytes = counts.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim.max(1)));
    if bytes.is_none_or(|bytes| bytes > isize::MAX as usize) {
        return Err(Error::Memory(format!("an attention output of {:?}", [b, h, t_q, d_v])));
    }
    Ok(b * h * t_q * d_v)
}

/// A checked call without its queries, keys and values: what does not depend on the type of elements.
#[derive(Clone, Copy)]
pub(super) struct CheckedCall<'a> {
    pub dims: AttentionDims,
    pub ranges: &'a [Range<usize>],
    pub options: TileModifiers<'a>,
    /// The relative bias of the options, for tiles.
    pub relative_bias: Option<&'a RelativeBiasTable<'a>>,
    pub output_strides: LayoutStrides,
}

impl<'a> CheckedCall<'a> {
    /// Checks everything but the dimensions and the queries, which [`queries`] checks, and the keys and values.
    pub fn new(call: &CpuCall<'a>) -> Result<Self, Error> {
        let AttentionCall { dims, keys: KeysOfQueries { ranges, .. }, output_layout, .. } = *call;
        let AttentionDims { b, h, t_q, t_kv, d_v, .. } = dims;
        check_len("ranges", ranges.len(), b * t_q)?;
        // An empty range may begin anywhere.
        if let Some(range) = ranges.iter().find(|range| !range.is_empty() && range.end > t_kv) {
            return Err(Error::Shape(format!("expected ranges within {t_kv} keys, found {range:?}")));
        }
        let options = TileModifiers::new(call)?;
        Ok(Self { dims, ranges, options, relative_bias: None, output_strides: output_layout.strides(h, t_q, d_v) })
    }

    /// Returns the index of the first element of the output of a query.
    #[inline(always)]
    pub fn output_start(&self, row: QueryRow) -> usize {
        self.output_strides.start(row.b, row.head, row.query)
    }

    /// Returns the keys that a query attends to.
    pub fn range(&self, row: QueryRow) -> &Range<usize> {
        &self.ranges[row.b * self.dims.t_q + row.query]
    }

    /// Returns the position of a query, from which ALiBi counts.
    pub fn position(&self, alibi: &TileAlibi, row: QueryRow) -> f32 {
        alibi.positions[row.b * self.dims.t_q + row.query]
    }

    /// Returns whether the boolean mask, if there is one, lets a query attend to a key.
    pub fn is_allowed(&self, row: QueryRow, key: usize) -> bool {
        // SAFETY: the view was checked for every query and key of the call.
        self.options
            .boolean_mask
            .as_ref()
            .is_none_or(|mask| unsafe { *mask.at([row.b, row.head, row.query, key]) != 0 })
    }
}

/// Returns the queries of a call, after checking them and the dimensions.
pub(super) fn queries<'a, E: Number>(call: &CpuCall<'a>) -> Result<Strided<'a, E, 3>, Error> {
    output_len(&call.dims)?;
    let AttentionDims { b, h, h_kv, t_q, d, .. } = call.dims;
    if h_kv == 0 || !h.is_multiple_of(h_kv) {
        return Err(Error::Shape(format!("expected key heads that divide the {h} query heads, found {h_kv}")));
    }
    let q = call.q.rows("q", d)?;
    q.check("q", [b, h, t_q], d)?;
    Ok(q)
}

/// Returns a pointer to the row of a query in a matrix (B, H, T_q) of rows.
#[inline(always)]
pub(super) fn query_row<E>(matrix: &Strided<E, 3>, row: QueryRow) -> *const E {
    matrix.at([row.b, row.head, row.query])
}
