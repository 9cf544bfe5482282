//! The pages of the sequences of a call, checked.

use std::ops::Range;

use super::memory::zeros;
use super::problem::CpuCall;
use super::view::View;
use crate::error::Error;
use candle_attention_call::{AttentionCall, KvHead, KvPages, KvScales};

/// The pages of each sequence, or of each of its key heads, every one of which is in the pools: entries that no query
/// needs, which may be any number, are replaced by a page that some query needs, of the same list if there is one.
pub(super) struct PageList {
    /// (B, heads, pages of a sequence).
    pages: Vec<u32>,
    /// The number of heads with separate pages: 1, or H_kv.
    heads: usize,
    /// The number of pages of a sequence.
    of_sequence: usize,
    page_size: usize,
}

/// The pages of each sequence, as kernels read them.
#[derive(Clone, Copy)]
pub(super) struct Pages<'a> {
    pages: &'a [u32],
    heads: usize,
    of_sequence: usize,
    page_size: usize,
    /// The binary logarithm of the page size, if that is a power of two.
    shift: Option<u32>,
}

/// The place of a key in the pools.
pub(super) struct KeyPlace {
    pub page: usize,
    pub position: usize,
    /// The number of keys from this one to the end of the page.
    pub left: usize,
}

impl PageList {
    /// Returns the pages of a call whose ranges of keys are checked; `None` if keys and values are not in pages.
    pub fn new(call: &CpuCall) -> Result<Option<Self>, Error> {
        let AttentionCall { dims, pages, keys, .. } = call;
        let Some(KvPages { table, page_size }) = pages else { return Ok(None) };
        let page_size = *page_size;
        if page_size == 0 {
            return Err(Error::Shape("expected pages of at least one key, found pages of 0".into()));
        }
        let of_sequence = dims.t_kv.div_ceil(page_size);
        let name = "the table of pages";
        let table = table.page_table(name)?;
        let heads = if table.strides[1] == 0 { 1 } else { dims.h_kv };
        table.check(name, [dims.b, heads, of_sequence], 1)?;
        let pool = pool_pages(call, page_size);
        let mut list = Self::unset([dims.b, heads, of_sequence], page_size)?;
        let mut any_page = 0;
        for b in 0..dims.b {
            let Some(needed) = needed_pages(&keys.ranges[b * dims.t_q..(b + 1) * dims.t_q], page_size) else {
                continue;
            };
            for head in 0..heads {
                let first = (b * heads + head) * of_sequence;
                let own = &mut list.pages[first..first + of_sequence];
                for n in needed.clone() {
                    // SAFETY: the table was checked for every page of T_kv keys, past which no range ends.
                    let page = unsafe { *table.at([b, head, n]) };
                    if page as usize >= pool {
                        return Err(Error::Shape(format!(
                            "expected pages below {pool}, the number of pages in the pools, found page {page} as entry \
                             {n} of sequence {b}"
                        )));
                    }
                    own[n] = page;
                }
                // A page of the same head: the rows of other heads in its pages may be any numbers.
                any_page = own[needed.start];
                set_unset(own, any_page);
            }
        }
        set_unset(&mut list.pages, any_page);
        Ok(Some(list))
    }

    /// Returns a list (B, heads, pages of a sequence) without a page yet.
    fn unset(dims: [usize; 3], page_size: usize) -> Result<Self, Error> {
        let mut pages = zeros("a table of pages", &dims)?;
        pages.fill(UNSET);
        let [_, heads, of_sequence] = dims;
        Ok(Self { pages, heads, of_sequence, page_size })
    }

    /// Returns the pages as kernels read them.
    pub fn pages(&self) -> Pages<'_> {
        let &Self { ref pages, heads, of_sequence, page_size } = self;
        let shift = page_size.is_power_of_two().then(|| page_size.trailing_zeros());
        Pages { pages, heads, of_sequence, page_size, shift }
    }
}

/// The entry of a page that is not set. As the number of a page it is in no pool, since pools count fewer pages.
const UNSET: u32 = u32::MAX;

/// Replaces the entries of pages that are not set.
fn set_unset(pages: &mut [u32], replacement: u32) {
    for page in pages.iter_mut().filter(|page| **page == UNSET) {
        *page = replacement;
    }
}

/// Returns the pages that contain a key of some ranges; `None` if there is no such key.
fn needed_pages(ranges: &[Range<usize>], page_size: usize) -> Option<Range<usize>> {
    let ranges = ranges.iter().filter(|range| !range.is_empty());
    let first = ranges.clone().map(|range| range.start).min()?;
    let end = ranges.map(|range| range.end).max()?;
    Some(first / page_size..end.div_ceil(page_size))
}

/// Returns the number of pages that every pool of a call has, at most [`UNSET`].
fn pool_pages(call: &CpuCall, page_size: usize) -> usize {
    let AttentionCall { dims, k, v, kv_scales, .. } = call;
    let count = |pool: &View, width: usize| pages_in(pool, [dims.h_kv, page_size], width);
    let least = match kv_scales {
        None => count(k, dims.d).min(count(v, dims.d_v)),
        Some(KvScales { format, k: of_keys, v: of_values }) => {
            let codes = count(k, format.bytes(dims.d)).min(count(v, format.bytes(dims.d_v)));
            codes.min(count(of_keys, format.scales(dims.d))).min(count(of_values, format.scales(dims.d_v)))
        }
    };
    least.min(UNSET as usize)
}

/// Returns the number of pages of (heads, page size) rows that a slice has.
fn pages_in(pool: &View, rows: [usize; 2], width: usize) -> usize {
    let [of_page, of_head, of_position, _] = pool.strides;
    if width == 0 {
        // Rows without numbers may have any place.
        return usize::MAX;
    }
    let last_row = (rows[0] - 1)
        .checked_mul(of_head)
        .and_then(|head| head.checked_add((rows[1] - 1).checked_mul(of_position)?))
        .and_then(|row| row.checked_add(width));
    match last_row {
        Some(end) if end <= pool.numbers.len() => match of_page {
            0 => usize::MAX,
            _ => (pool.numbers.len() - end) / of_page + 1,
        },
        _ => 0,
    }
}

impl Pages<'_> {
    /// Returns whether each page has one key: a table of pages is then a list of keys.
    #[inline(always)]
    pub fn have_one_key(&self) -> bool {
        self.page_size == 1
    }

    /// Returns the place of a key of a head; `None` if the key is past the pages.
    #[inline(always)]
    pub fn place(&self, kv: KvHead, key: usize) -> Option<KeyPlace> {
        // A division takes dozens of cycles.
        let n = match self.shift {
            Some(shift) => key >> shift,
            None => key / self.page_size,
        };
        let position = key - n * self.page_size;
        if n >= self.of_sequence {
            return None;
        }
        let list = if self.heads == 1 { kv.b } else { kv.b * self.heads + kv.head };
        let page = self.pages[list * self.of_sequence + n] as usize;
        Some(KeyPlace { page, position, left: self.page_size - position })
    }
}
