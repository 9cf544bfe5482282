//! The sizes of a call, and the checks that its tensors and sequences have them.

use candle_core::{Result, Tensor, bail};

use super::packed::PackedSequences;
use super::paged::PagedSequences;
use crate::mask::{AttentionMask, FullyMaskedRows, RowRanges};
use candle_attention_call::{AttentionDims as Dims, KvCodeFormat};
use candle_attention_modules::base::is_addressable;

/// Queries, keys and values.
#[derive(Clone, Copy)]
pub(crate) struct Qkv<'a> {
    pub q: &'a Tensor,
    pub k: &'a Tensor,
    pub v: &'a Tensor,
}

/// Checks that the tensors of a call can be addressed once k and v are expanded. The kernels store no scores of all
/// packed queries with all keys, so that `scores` is 1 for these.
pub(super) fn check_sizes(op: &str, qkv: Qkv, dims: Dims, scores: [usize; 4]) -> Result<()> {
    let Dims { b, h, t_q, t_kv, d, d_v, .. } = dims;
    let shapes = [[b, h, t_q, d], [b, h, t_kv, d], [b, h, t_q.max(t_kv), d_v], scores];
    if shapes.iter().any(|shape| !is_addressable(shape)) {
        let Qkv { q, k, v } = qkv;
        bail!("[{op}] q {:?}, k {:?} and v {:?} are too large to address", q.dims(), k.dims(), v.dims())
    }
    Ok(())
}

/// Checks that packed sequences end where q and k do, and that the mask has no tensor.
pub(super) fn check_sequences(op: &str, dims: Dims, sequences: &PackedSequences, mask: &AttentionMask) -> Result<()> {
    let totals = [
        ("q", dims.t_q, "cu_seqlens_q", sequences.total_queries()),
        ("k", dims.t_kv, "cu_seqlens_kv", sequences.total_keys()),
    ];
    for (name, found, lens, expected) in totals {
        if found != expected {
            bail!("[{op}] {name} has {found} positions, expected the {expected} that {lens} ends with")
        }
    }
    mask.check_without_tensors(op)
}

/// Checks that no query attends to a position whose page was released. `ranges` count keys through all sequences.
pub(super) fn check_stored(
    op: &str,
    ranges: &RowRanges,
    sequences: &PagedSequences,
    fully_masked_rows: FullyMaskedRows,
) -> Result<()> {
    for s in 0..sequences.len() {
        let first = sequences.keys(s).start;
        if first > 0 && fully_masked_rows == FullyMaskedRows::Uniform {
            bail!("[{op}] fully masked rows are uniform over all keys, expected sequences without released pages")
        }
        let first_key = sequences.packed().keys(s).start;
        for keys in &ranges.keys[sequences.queries(s)] {
            if !keys.is_empty() && keys.start < first_key + first {
                bail!(
                    "[{op}] a query of sequence {s} may attend to the key at position {}, but the pages before \
                     position {first} were released; expected a shorter window in the mask, or pages that were \
                     released later",
                    keys.start - first_key
                )
            }
        }
    }
    Ok(())
}

/// Returns the sizes of a call after checking that q, k and v agree in them. `codes` is the format of k and v.
pub(super) fn dims(op: &str, Qkv { q, k, v }: Qkv, codes: Option<KvCodeFormat>) -> Result<Dims> {
    let width = |stored: usize| codes.map_or(stored, |format| format.numbers(stored));
    let (b, h, t_q, d) = q.dims4()?;
    let (b_k, h_kv, t_kv, stored_k) = k.dims4()?;
    let (b_v, h_v, t_v, stored_v) = v.dims4()?;
    let d_k = width(stored_k);
    let d_v = width(stored_v);
    let fits = |size: usize| size == b || (size == 1 && b > 0);
    if !fits(b_k) || !fits(b_v) {
        bail!("[{op}] q, k and v have batch sizes {b}, {b_k} and {b_v}, expected the same, or 1 for k and v")
    }
    if h_v != h_kv {
        bail!("[{op}] v has {h_v} heads, expected k's {h_kv}")
    }
    if h == 0 || h_kv == 0 {
        bail!("[{op}] q has {h} heads and k has {h_kv}, expected at least one")
    }
    if !h.is_multiple_of(h_kv) {
        bail!("[{op}] k has {h_kv} heads, which does not divide q's {h}")
    }
    if t_v != t_kv {
        bail!("[{op}] v has {t_v} positions, expected k's {t_kv}")
    }
    if d_k != d {
        bail!("[{op}] k has head dimension {d_k}, expected q's {d}")
    }
    if d == 0 {
        bail!("[{op}] q's head dimension is 0, expected at least 1")
    }
    Ok(Dims { b, h, h_kv, t_q, t_kv, d, d_v })
}
