//! A checked call, with queries, keys and values as they are stored.

use std::ops::Range;

use super::options::{TileAlibi, TileModifiers};
use super::problem::{CpuCall, KeysOfQueries};
use super::relative_bias::RelativeBiasTable;
use super::view::View;
use crate::error::{Error, check_len};
use crate::number::{Number, Stored, Strided};
use candle_attention_call::{AttentionCall, AttentionDims, KvHead, LayoutStrides, QueryRow};

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

/// The keys or the values of a call, as they are stored.
#[derive(Clone, Copy)]
pub struct KvMatrix<'a, S> {
    pub(super) rows: Strided<'a, S, 3>,
    /// The scale of each row, where numbers are scaled.
    pub(super) scales: Option<Strided<'a, f32, 3>>,
    /// D or D_v.
    pub(super) width: usize,
}

/// The keys and the values of a call.
#[derive(Clone, Copy)]
pub struct KeysValues<'a, S> {
    pub(super) k: KvMatrix<'a, S>,
    pub(super) v: KvMatrix<'a, S>,
}

impl<'a, S: Stored> KeysValues<'a, S> {
    /// Returns the checked keys and values of a call.
    pub(super) fn new(call: &CpuCall<'a>) -> Result<Self, Error> {
        let AttentionCall { dims, k, v, kv_scales, .. } = call;
        let scales = kv_scales.as_ref();
        Ok(Self {
            k: KvMatrix::new("k", k, scales.map(|scales| &scales.k), dims, dims.d)?,
            v: KvMatrix::new("v", v, scales.map(|scales| &scales.v), dims, dims.d_v)?,
        })
    }
}

impl<'a, S: Stored> KvMatrix<'a, S> {
    /// Returns the keys or the values of a call after checking that their slices have every row of (B, H_kv, T_kv).
    pub(super) fn new(
        name: &str,
        rows: &View<'a>,
        scales: Option<&View<'a>>,
        dims: &AttentionDims,
        width: usize,
    ) -> Result<Self, Error> {
        let shape = [dims.b, dims.h_kv, dims.t_kv];
        let rows = rows.rows::<S>(name, width)?;
        rows.check(name, shape, width)?;
        let scales = match scales {
            Some(scales) => {
                let name_of_scales = format!("the scales of {name}");
                let scales = scales.rows(&name_of_scales, 1)?;
                scales.check(&name_of_scales, shape, 1)?;
                Some(scales)
            }
            None => None,
        };
        Ok(Self { rows, scales, width })
    }
}

impl<S: Stored> KvMatrix<'_, S> {
    /// Returns a pointer to the numbers of a key.
    #[inline(always)]
    pub(super) fn row(&self, kv: KvHead, key: usize) -> *const S {
        self.rows.at([kv.b, kv.head, key])
    }

    /// Returns the numbers from one row to the next.
    pub(super) fn stride(&self) -> usize {
        self.rows.strides[2]
    }

    /// Returns the factor of the numbers of a key.
    #[inline(always)]
    pub(super) fn scale(&self, kv: KvHead, key: usize) -> f32 {
        match &self.scales {
            // SAFETY: the view was checked for every key of the call.
            Some(scales) if S::IS_SCALED => unsafe { *scales.at([kv.b, kv.head, key]) },
            _ => 1.0,
        }
    }
}
