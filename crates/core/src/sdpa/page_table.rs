//! The pages of sequences as a table on the device, for the kernels of GPUs.

use candle_attention_call::KvPages;
use candle_core::{Result, Tensor, bail};

use super::paged::PagedSequences;
use candle_attention_modules::base::{filled, uploaded};

/// Returns the table of the pages of sequences in a pool (pages, H_kv, page size, D): a row for each sequence, with
/// zeros for pages that were released and past its last page.
pub(super) fn page_table(sequences: &PagedSequences, pool: &Tensor) -> Result<KvPages<Tensor>> {
    let page_size = pool.dim(2)?;
    let last = |s: usize| sequences.keys(s).end.div_ceil(page_size);
    let columns = (0..sequences.len()).map(last).max().unwrap_or(0);
    let Some(mut table) = filled(&[sequences.len(), columns], 0) else {
        bail!("a table of {columns} pages for each of {} sequences does not fit in memory", sequences.len())
    };
    for s in 0..sequences.len() {
        for n in sequences.keys(s).start / page_size..last(s) {
            let page = sequences.pages(s)[n];
            let Ok(page) = i32::try_from(page) else {
                bail!("kernels count pages in 32 bits, and sequence {s} has page {page}")
            };
            table[s * columns + n] = page;
        }
    }
    Ok(KvPages { table: uploaded(table, &[sequences.len(), columns], pool.device())?, page_size })
}
