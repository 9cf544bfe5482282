//! Which key head a query head reads where the groups of query heads are not all as large.

use std::array::from_fn;
use std::ops::Range;

use candle_core::{Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::validate::{Call, Dims};
use super::{OutputOrder, SdpaOptions};
use crate::base::fits_in_memory;
use crate::mask::readable;

/// Query head h reads key head `(h + skipped) / size`: some successive heads of a layer, of whose first and last group
/// other processes have heads too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HeadGroups {
    /// Query heads of a whole group.
    pub size: usize,
    /// Query heads that are missing from the front of the first group.
    pub skipped: usize,
}

impl HeadGroups {
    /// # Errors
    /// If `h` query heads do not read `h_kv` key heads.
    pub fn check(self, op: &str, h: usize, h_kv: usize) -> Result<()> {
        let Self { size, skipped } = self;
        if size == 0 || h == 0 || skipped >= size || h.checked_add(skipped).is_none_or(|h| h.div_ceil(size) != h_kv) {
            bail!("[{op}] {h} query heads in groups of {size}, less the first {skipped}, do not read {h_kv} key heads")
        }
        Ok(())
    }

    /// The query heads and key heads of calls whose groups are alike: what there is of the first group, whole ones,
    /// what there is of the last.
    fn parts(self, h: usize) -> impl Iterator<Item = [Range<usize>; 2]> {
        let Self { size, skipped } = self;
        let mut next = 0;
        std::iter::from_fn(move || {
            let (start, at) = (next, (next + skipped) % size);
            let whole = (h - start) / size * size;
            let len = if at == 0 && whole > 0 { whole } else { (size - at).min(h - start) };
            next += len;
            let keys = (start + skipped) / size..(next + skipped).div_ceil(size);
            (len > 0).then_some([start..next, keys])
        })
    }

    /// Keys or values (B, H_kv, ..) as (B, H, ..): a copy of its key head for each of `h` query heads.
    fn of_queries(self, xs: &Tensor, h: usize) -> Result<Tensor> {
        let (b, _, t, width) = xs.dims4()?;
        if !fits_in_memory(&[b, h, t, width].map(|size| size.max(1))) {
            bail!("[scaled_dot_product_attention] keys or values of {:?} do not fit in memory", [b, h, t, width])
        }
        let heads = Tensor::from_iter((0..h).map(|head| ((head + self.skipped) / self.size) as u32), xs.device())?;
        readable(xs)?.contiguous()?.index_select(&heads, 1)
    }
}

/// Gives each part of a call whose groups are alike to `run`, and joins the results (B, H, ..) along the heads. Where a
/// seed drops weights, it is one call.
pub(super) fn in_parts<const N: usize>(call: &Call, run: impl Fn(&Call) -> Result<[Tensor; N]>) -> Result<[Tensor; N]> {
    let Some(groups) = call.options.groups else { return run(call) };
    if call.options.drops_by_seed() {
        let of_queries = |xs: &Tensor| groups.of_queries(xs, call.dims.h);
        let scales = match call.scales {
            Some([k, v]) => Some([of_queries(k)?, of_queries(v)?]),
            None => None,
        };
        let options = SdpaOptions { groups: None, ..call.options.clone() };
        let (k, v) = (of_queries(&call.k)?, of_queries(&call.v)?);
        return run(&Call { k, v, scales: scales.as_ref(), options: &options, ..call.clone() });
    }
    let mut results: [Vec<Tensor>; N] = from_fn(|_| Vec::new());
    for [queries, keys] in groups.parts(call.dims.h) {
        let of_keys = |xs: &Tensor| readable(&xs.narrow(1, keys.start, keys.len())?);
        let scales = match call.scales {
            Some([k, v]) => Some([of_keys(k)?, of_keys(v)?]),
            None => None,
        };
        let options = SdpaOptions { groups: None, ..call.options.of_heads(&queries)? };
        let mask = call.mask.of_heads(queries.clone(), call.dims.h)?;
        let part = Call {
            q: readable(&call.q.narrow(1, queries.start, queries.len())?)?,
            k: of_keys(&call.k)?,
            v: of_keys(&call.v)?,
            scales: scales.as_ref(),
            mask: &mask,
            options: &options,
            dims: Dims { h: queries.len(), ..call.dims },
            ..call.clone()
        };
        for (all, own) in results.iter_mut().zip(run(&part)?) {
            all.push(own);
        }
    }
    let mut joined = Vec::with_capacity(N);
    for parts in results {
        joined.push(match call.output_order {
            // Contexts that are views of (B, T, H, D_v) become one.
            OutputOrder::Bthd if parts[0].rank() == 4 => {
                let parts = parts.iter().map(|part| part.transpose(1, 2)).collect::<Result<Vec<_>>>()?;
                Tensor::cat(&parts, 2)?.transpose(1, 2)?
            }
            _ => Tensor::cat(&parts, 1)?,
        });
    }
    joined
        .try_into()
        .map_err(|_| candle_core::Error::msg("[scaled_dot_product_attention] expected a result of each kind"))
}
