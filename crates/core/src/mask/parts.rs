//! Masks of whole sequences for calls that have some of their queries and keys: the keys that a cache stores, and the
//! shard of one rank among several.

use std::ops::Range;

use candle_core::{Device, Result, Tensor, bail};

use super::constraint::Constraint;
use super::placement::{Placement, Placements, SequenceSize};
use super::tensors::{check_memory, fit, readable};
use super::tokenizer::Tokenized;
use super::{AttentionMask, BOOL_MASK, FullyMaskedRows, OP};

impl AttentionMask {
    /// Checks that the mask is for whole sequences: a cache or packed sequences say where theirs begin and end.
    pub(super) fn check_whole(&self, op: &str) -> Result<()> {
        if self.placements.is_some() {
            bail!("[{op}] the mask is `of_part`, expected one of whole sequences for a cache or packed sequences")
        }
        Ok(())
    }

    /// Checks that the mask has no tensor, which packed sequences have no shape for.
    pub(crate) fn check_without_tensors(&self, op: &str) -> Result<()> {
        if let Some(tensor) = self.tensor_kind() {
            bail!("[{op}] the mask has a {tensor} tensor, expected none: packed sequences have no (B, H, T_q, T_kv)")
        }
        Ok(())
    }

    /// Returns the mask for some of the packed sequences that it fits, in this order. It has no tensors.
    pub(crate) fn of_sequences(&self, chosen: &[usize]) -> Self {
        let constraints = self.constraints.iter().map(|constraint| constraint.of_sequences(chosen)).collect();
        Self { constraints, ..self.clone() }
    }

    /// Returns the mask for scores (B, H, T_q, rows), whose columns are the rows of a cache instead of positions in the
    /// sequence. T_kv of this mask is the length of the longest sequence, and a mask that is aligned to the end is
    /// aligned to the end of each sequence.
    ///
    /// # Errors
    /// As [`resolve`](Self::resolve), for boolean masks and biases that do not fit, and if a query may attend to a key
    /// that the cache of `op` has dropped.
    pub(crate) fn rebase(
        &self,
        op: &str,
        placements: &[Placement],
        [b, h, t_q, rows]: [usize; 4],
        device: &Device,
    ) -> Result<Self> {
        self.check_whole(op)?;
        let t_kv = longest(placements);
        self.check(b, &[SequenceSize { t_q, t_kv }])?;
        for constraint in &self.constraints {
            if let Constraint::Tokenized(tokenized) = constraint {
                tokenized.check_ends(placements)?;
            }
        }
        let counted = self.with_chunks_counted(b, t_q, t_kv)?;
        counted.check_dropped_keys(op, placements, t_q)?;
        let whole = Placement::whole(t_q, t_kv);
        if placements.iter().all(|placement| *placement == whole) {
            return Ok(counted);
        }
        if !self.key_lists.is_empty() && placements.iter().any(|placement| placement.keys.start > 0) {
            bail!("[{OP}] the mask has key lists, expected a cache that stores all of every sequence")
        }
        if self.fully_masked_rows == FullyMaskedRows::Uniform {
            bail!(
                "[{OP}] fully masked rows are uniform over all keys, expected a cache that stores all of every sequence"
            )
        }
        let columns_of = |name: &str, tensors: &[Tensor]| -> Result<Vec<Tensor>> {
            let fitted = tensors.iter().map(|tensor| fit(name, tensor, [b, h, t_q, t_kv], device));
            fitted.map(|tensor| columns(&tensor?, placements, rows)).collect()
        };
        let bool_masks = columns_of(BOOL_MASK, &self.bool_masks)?;
        let biases = columns_of("bias", &self.biases)?;
        let placements = Placements { b, t_q, t_kv: rows, each: placements.to_vec() };
        let key_lists = self.key_lists.clone();
        Ok(Self { bool_masks, biases, key_lists, ..counted.placed(placements) })
    }

    /// Checks that no query may attend to a key before those that a cache stores.
    fn check_dropped_keys(&self, op: &str, placements: &[Placement], t_q: usize) -> Result<()> {
        for (s, placement) in placements.iter().enumerate() {
            let first = placement.keys.start;
            if first == 0 {
                continue;
            }
            let whole = Placement { keys: 0..placement.keys.end, ..placement.clone() };
            for i in 0..t_q {
                let allowed = whole.allowed_keys(&self.constraints, s, i);
                if !allowed.is_empty() && allowed.start < first {
                    bail!(
                        "[{op}] a query of sequence {s} may attend to the key at position {}, but the cache stores \
                         those from {first} on; expected a shorter window in the mask, or a longer one in the cache",
                        allowed.start
                    )
                }
            }
        }
        Ok(())
    }

    /// Returns the mask for a part of the queries and keys of `b` sequences, as each of several ranks has them in ring
    /// attention. Keys are counted from the first key of the part. Positions are still those in the whole sequence, for
    /// windows, chunks, offsets, lengths and ALiBi of this mask and of masks that are joined with it later.
    ///
    /// ```
    /// use candle_attention::AttentionMask;
    /// # fn main() -> candle_core::Result<()> {
    /// let part = AttentionMask::causal().with_window(3).of_part(1, 4..6, 2..6)?;
    /// assert_eq!(part.resolve(1, 2, 4)?.to_string(), "1 1 1 .\n. 1 1 1\n");
    /// # Ok(()) }
    /// ```
    ///
    /// The mask is for calls with the queries and keys of the part, and joins with masks of the same part and of whole
    /// sequences. An error where it is used: another number of sequences, queries or keys, and masks of different parts
    /// that were joined.
    ///
    /// # Errors
    /// For boolean masks, biases and lists of keys, for uniform rows, for a part of a part, for a range that ends
    /// before its start, for keys past the end of a tokenizer's attention mask, and for lengths by query that end
    /// before the part.
    pub fn of_part(&self, b: usize, queries: Range<usize>, keys: Range<usize>) -> Result<Self> {
        let refuse = |obstacle: &str| -> Result<()> {
            bail!("[{OP}] the mask {obstacle}, expected one that allows ranges of keys of whole sequences")
        };
        if let Some(tensor) = self.tensor_kind() {
            refuse(&format!("has a {tensor} tensor"))?;
        }
        if !self.key_lists.is_empty() {
            refuse("has key lists")?;
        }
        if self.fully_masked_rows == FullyMaskedRows::Uniform {
            refuse("has fully masked rows that are uniform over all keys")?;
        }
        if self.placements.is_some() {
            refuse("is `of_part` already")?;
        }
        for (name, range) in [("queries", &queries), ("keys", &keys)] {
            if range.start > range.end {
                bail!("[{OP}] the {name} of the part are {range:?}, expected a range that ends at or after its start")
            }
        }
        let mut mask = self.clone();
        for constraint in &mut mask.constraints {
            if let Constraint::Tokenized(Tokenized { columns, .. }) = *constraint
                && keys.end > columns
            {
                bail!("[{OP}] the attention mask has {columns} columns, expected one for each key up to {}", keys.end)
            }
            *constraint = constraint.of_queries(&queries)?;
        }
        let t_q = queries.len();
        let t_kv = keys.len();
        let first = queries.start;
        let each = vec![Placement { first_position: first as i128, first_query: first, tokens: 0..t_q, keys }];
        Ok(mask.placed(Placements { b, t_q, t_kv, each }))
    }

    /// Returns the constraints for placements of the sequences, without boolean masks and biases. Columns of a
    /// tokenizer's attention mask are no rows of keys, so their number is not checked any more.
    fn placed(&self, placements: Placements) -> Self {
        let counts_rows = |constraint: &&Constraint| !matches!(constraint, Constraint::Tokenized(_));
        let constraints = self.constraints.iter().filter(counts_rows).cloned().collect();
        Self { constraints, fully_masked_rows: self.fully_masked_rows, placements: Some(placements), ..Self::none() }
    }
}

/// Returns the length of the longest sequence.
fn longest(placements: &[Placement]) -> usize {
    placements.iter().map(|placement| placement.keys.end).max().unwrap_or(0)
}

/// Returns the columns of a boolean mask or a bias (.., T_kv) for the rows of keys of each sequence.
fn columns(tensor: &Tensor, placements: &[Placement], rows: usize) -> Result<Tensor> {
    let t_kv = tensor.dim(3)?;
    if t_kv == 1 && longest(placements) != 1 {
        return Ok(tensor.clone());
    }
    // If the keys of all sequences begin alike, the rows of the longest one end with the columns.
    let start = placements.first().map_or(0, |placement| placement.keys.start);
    if placements.iter().all(|placement| placement.keys.start == start) {
        return readable(&tensor.narrow(3, start, rows)?);
    }
    let (_, h, t_q, _) = tensor.dims4()?;
    check_memory(&[placements.len(), h, t_q, rows], tensor.dtype())?;
    let whole = tensor.broadcast_as((placements.len(), h, t_q, t_kv))?;
    let mut parts = Vec::with_capacity(placements.len());
    for (b, placement) in placements.iter().enumerate() {
        let first = placement.keys.start;
        let count = rows.min(t_kv - first);
        // Rows past the end of a sequence are masked.
        parts.push(if count == 0 {
            Tensor::zeros((1, h, t_q, rows), tensor.dtype(), tensor.device())?
        } else {
            let columns = whole.narrow(0, b, 1)?.narrow(3, first, count)?;
            readable(&columns)?.contiguous()?.pad_with_zeros(3, 0, rows - count)?
        });
    }
    Tensor::cat(&parts, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mask_of_part_with_a_cache_is_an_error() -> Result<()> {
        let part = AttentionMask::causal().of_part(1, 0..1, 0..1)?;
        let text = part.rebase("test", &[Placement::whole(1, 3)], [1, 1, 1, 3], &Device::Cpu);
        let text = text.expect_err("a cache").to_string();
        assert!(text.contains("`of_part`, expected one of whole sequences"), "{text}");
        Ok(())
    }
}
