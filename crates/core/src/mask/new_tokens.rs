//! Masks among the new tokens of a call. The tokens of earlier calls are not masked by them.

use std::ops::Range;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::constraint::{Constraint, QueryAlignment, Reach};
use super::tensors::{check_memory, readable};
use super::tree::{TokenTree, check_trees};
use super::{AttentionMask, OP};
use candle_attention_modules::base::{Dim, Expect, copied_to};

/// The name of a mask of new tokens in errors.
const MASK: &str = "the mask of the new tokens";

/// Which new tokens of a call each of them attends to, and the positions of the tokens.
#[derive(Debug, Clone)]
pub(crate) struct NewTokenMask {
    /// One mask for all sequences, or one for each.
    sequences: Vec<SequenceMask>,
}

/// The mask of the new tokens of one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SequenceMask {
    /// The number of tokens.
    t: usize,
    /// (T, T), row by row.
    allowed: Vec<bool>,
    /// The position of each token after the earlier ones.
    depths: Vec<usize>,
}

/// The sequences of a call with a mask of its new tokens.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewTokenCall<'a> {
    /// The number of earlier tokens of each sequence; none for calls without a cache.
    pub before: &'a [usize],
    /// Which of the T_q positions of each sequence are tokens; none if all are.
    pub tokens: &'a [Range<usize>],
    pub t_q: usize,
}

impl SequenceMask {
    fn of_tree(tree: &TokenTree) -> Self {
        let t = tree.len();
        let mut allowed = vec![false; t * t];
        for (node, &parent) in tree.parents().iter().enumerate() {
            if let Some(parent) = parent {
                allowed.copy_within(parent * t..(parent + 1) * t, node * t);
            }
            allowed[node * t + node] = true;
        }
        Self { t, allowed, depths: tree.depths().to_vec() }
    }

    /// Returns whether token `i` attends to token `j`.
    fn allows(&self, i: usize, j: usize) -> bool {
        self.allowed[i * self.t + j]
    }
}

impl NewTokenMask {
    /// Returns the mask of trees, one for all of `b` sequences or one for each, whose nodes are the tokens of the call.
    ///
    /// # Errors
    /// For another number of trees, and for trees of another size.
    pub fn of_trees(trees: &[TokenTree], b: usize, call: NewTokenCall) -> Result<Self> {
        check_trees(OP, trees, (0..b).map(|sequence| call.tokens_of(sequence).len()))?;
        Ok(Self { sequences: trees.iter().map(SequenceMask::of_tree).collect() })
    }

    /// Returns a boolean mask (T_q, T_q) for all of `b` sequences, or (B, T_q, T_q), whose entries are copied to the
    /// CPU. Rows and columns of padding are not read.
    ///
    /// # Errors
    /// For another shape or dtype, and for an entry other than 0 and 1.
    pub fn from_tensor(mask: &Tensor, b: usize, call: NewTokenCall) -> Result<Self> {
        let t_q = call.t_q;
        let own = [Dim::Named("T_q", t_q), Dim::Named("T_q", t_q)];
        let each = [Dim::Named("B", b), own[0], own[1]];
        let found = Expect::one(OP, MASK, mask).shape_of(&[&own, &each])?;
        found.dtype_of(&[DType::U8], " with 1 = attend")?;
        let entries = readable(mask)?.flatten_all()?.to_vec1::<u8>()?;
        if let Some(entry) = entries.iter().find(|&&entry| entry > 1) {
            bail!("[{OP}] {MASK} has an entry {entry}, expected 1 (attend) or 0")
        }
        let is_alike = mask.rank() == 2 && (0..b).all(|sequence| call.tokens_of(sequence) == call.tokens_of(0));
        let mut sequences = Vec::new();
        for sequence in 0..if is_alike { 1 } else { b } {
            let tokens = call.tokens_of(sequence);
            let matrix = if mask.rank() == 2 { 0 } else { sequence * t_q * t_q };
            let mut allowed = Vec::with_capacity(tokens.len() * tokens.len());
            for i in tokens.clone() {
                let row = matrix + i * t_q;
                allowed.extend(entries[row + tokens.start..row + tokens.end].iter().map(|&entry| entry == 1));
            }
            sequences.push(SequenceMask { t: tokens.len(), allowed, depths: (0..tokens.len()).collect() });
        }
        Ok(Self { sequences })
    }

    /// Returns the position of each of the T_q tokens of sequence `b` in the sequence. Padding has a position of the
    /// sequence too.
    pub fn positions(&self, b: usize, call: NewTokenCall) -> Vec<usize> {
        let own = self.of_sequence(b);
        let before = call.before_of(b);
        let tokens = call.tokens_of(b);
        let padding = (before + own.t).saturating_sub(1).min(before);
        (0..call.t_q)
            .map(|i| if tokens.contains(&i) { before + own.depths[i - tokens.start] } else { padding })
            .collect()
    }

    fn of_sequence(&self, b: usize) -> &SequenceMask {
        &self.sequences[if self.sequences.len() == 1 { 0 } else { b }]
    }
}

impl NewTokenCall<'_> {
    fn before_of(&self, b: usize) -> usize {
        self.before.get(b).copied().unwrap_or(0)
    }

    fn tokens_of(&self, b: usize) -> Range<usize> {
        self.tokens.get(b).cloned().unwrap_or(0..self.t_q)
    }

    /// Returns the length of the longest sequence after the call.
    fn t_kv(&self, b: usize) -> usize {
        (0..b).map(|sequence| self.before_of(sequence) + self.tokens_of(sequence).len()).max().unwrap_or(0)
    }
}

impl AttentionMask {
    /// Returns the mask of a call of `b` sequences whose new tokens attend to each other by `new`, as a mask that any
    /// path reads: a boolean mask over (T_q, T_kv), and starts for each query. A causal constraint that is aligned to
    /// the end masks nothing any more, because `new` replaces it. Windows and chunks count from the positions of
    /// `new`, and chunks from the first key of each sequence.
    ///
    /// # Errors
    /// For a mask of a part, and for a mask that does not fit in memory.
    pub(crate) fn with_new_tokens(
        &self,
        new: &NewTokenMask,
        b: usize,
        call: NewTokenCall,
        device: &Device,
    ) -> Result<Self> {
        self.check_whole(OP)?;
        let mut mask = self.clone();
        mask.constraints.clear();
        let mut reaches = Vec::new();
        for constraint in &self.constraints {
            match constraint {
                Constraint::Aligned(QueryAlignment::End, Reach::Causal { .. }) => {}
                Constraint::Aligned(QueryAlignment::End, reach) => reaches.push(reach),
                _ => mask.constraints.push(constraint.clone()),
            }
        }
        for reach in &reaches {
            let mut first_keys = Vec::with_capacity(b);
            for sequence in 0..b {
                let before = call.before_of(sequence) as i128;
                let mut of_queries = Vec::with_capacity(call.t_q);
                for (i, position) in new.positions(sequence, call).into_iter().enumerate() {
                    let first = self.first_key(sequence, i) as i128;
                    let reached = reach.keys(position as i128, sequence, i, first);
                    of_queries.push(reached.start.clamp(0, before) as usize);
                }
                first_keys.push(of_queries);
            }
            mask = mask.with(Constraint::FirstKeys(first_keys.into()));
        }
        let first_key = |sequence, i| self.first_key(sequence, i);
        mask.bool_masks.push(new.matrix(&reaches, first_key, b, call, device)?);
        Ok(mask)
    }
}

impl NewTokenMask {
    /// Returns the boolean mask (B, 1, T_q, T_kv), or (1, 1, T_q, T_kv) if all sequences are alike: ones for all
    /// earlier tokens, and for the new tokens that this mask and `reaches` allow. `first_key` returns the first key of
    /// the sequence of a query.
    fn matrix(
        &self,
        reaches: &[&Reach],
        first_key: impl Fn(usize, usize) -> usize,
        b: usize,
        call: NewTokenCall,
        device: &Device,
    ) -> Result<Tensor> {
        let t_q = call.t_q;
        let t_kv = call.t_kv(b);
        let begins_alike =
            |sequence: usize| reaches.is_empty() || (0..t_q).all(|i| first_key(sequence, i) == first_key(0, i));
        let is_alike = self.sequences.len() == 1
            && (0..b).all(begins_alike)
            && (0..b).all(|sequence| {
                call.before_of(sequence) == call.before_of(0) && call.tokens_of(sequence) == call.tokens_of(0)
            });
        let matrices = if is_alike { b.min(1) } else { b };
        check_memory(&[matrices, t_q, t_kv], DType::U8)?;
        let mut entries = vec![0u8; matrices * t_q * t_kv];
        for (sequence, matrix) in entries.chunks_mut((t_q * t_kv).max(1)).enumerate() {
            let own = self.of_sequence(sequence);
            let before = call.before_of(sequence);
            let tokens = call.tokens_of(sequence);
            for (i, row) in matrix.chunks_mut(t_kv.max(1)).enumerate() {
                row[..before].fill(1);
                if !tokens.contains(&i) {
                    continue;
                }
                let query = i - tokens.start;
                let position = (before + own.depths[query]) as i128;
                let first = first_key(sequence, i) as i128;
                let reached: Vec<_> = reaches.iter().map(|reach| reach.keys(position, sequence, i, first)).collect();
                for (key, entry) in row[before..before + own.t].iter_mut().enumerate() {
                    let key_position = (before + own.depths[key]) as i128;
                    let is_reached = reached.iter().all(|keys| keys.contains(&key_position));
                    *entry = u8::from(own.allows(query, key) && is_reached);
                }
            }
        }
        copied_to(device, entries, (matrices, 1, t_q, t_kv))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(mask: &AttentionMask, dims: (usize, usize, usize)) -> Result<Vec<String>> {
        let (b, t_q, t_kv) = dims;
        let allowed = mask.combined_bool_mask([b, 1, t_q, t_kv], &Device::Cpu)?.expect("a mask");
        let allowed = allowed.broadcast_as((b, 1, t_q, t_kv))?.reshape((b * t_q, t_kv))?.to_vec2::<u8>()?;
        Ok(allowed.iter().map(|row| row.iter().map(u8::to_string).collect()).collect())
    }

    #[test]
    fn tree_over_a_cache_masks_all_new_tokens_but_ancestors() -> Result<()> {
        let tree = TokenTree::new(&[None, Some(0), Some(0), Some(1)])?;
        let call = NewTokenCall { before: &[2], tokens: &[], t_q: 4 };
        let new = NewTokenMask::of_trees(std::slice::from_ref(&tree), 1, call)?;
        assert_eq!(new.positions(0, call), [2, 3, 3, 4]);
        let mask = AttentionMask::causal().with_new_tokens(&new, 1, call, &Device::Cpu)?;
        assert_eq!(rows(&mask, (1, 4, 6))?, ["111000", "111100", "111010", "111101"]);
        // A window of 3 keys by depth: token 3 is at position 4, and attends to the positions 2, 3 and 4.
        let windowed = AttentionMask::causal().with_window(3).with_new_tokens(&new, 1, call, &Device::Cpu)?;
        assert_eq!(rows(&windowed, (1, 4, 6))?, ["111000", "011100", "011010", "001101"]);
        let narrow = AttentionMask::causal().with_window(2).with_new_tokens(&new, 1, call, &Device::Cpu)?;
        assert_eq!(rows(&narrow, (1, 4, 6))?, ["011000", "001100", "001010", "000101"]);
        // Chunks of 3 positions: 0 to 2, and from 3 on.
        let chunked = AttentionMask::causal().with_chunk(3).with_new_tokens(&new, 1, call, &Device::Cpu)?;
        assert_eq!(rows(&chunked, (1, 4, 6))?, ["111000", "000100", "000010", "000101"]);
        Ok(())
    }

    #[test]
    fn new_token_mask_replaces_the_causal_mask_of_each_sequence() -> Result<()> {
        let all = Tensor::ones((2, 2), DType::U8, &Device::Cpu)?;
        let call = NewTokenCall { before: &[1, 3], tokens: &[0..2, 1..2], t_q: 2 };
        let new = NewTokenMask::from_tensor(&all, 2, call)?;
        assert_eq!([new.positions(0, call), new.positions(1, call)], [[1, 2], [3, 3]]);
        let mask = AttentionMask::causal().with_new_tokens(&new, 2, call, &Device::Cpu)?;
        // Row 0 of sequence 1 is padding, which the cache masks.
        assert_eq!(rows(&mask, (2, 2, 4))?, ["1110", "1110", "1110", "1111"]);
        Ok(())
    }

    #[test]
    fn tree_of_a_mask_has_its_parents() -> Result<()> {
        let rows = [[1u8, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]];
        let tree = TokenTree::from_mask(&Tensor::new(&rows, &Device::Cpu)?)?;
        assert_eq!(tree.parents(), [None, None, Some(0), Some(2)]);
        assert_eq!((tree.depths(), tree.path(3)?), ([0, 0, 1, 2].as_slice(), vec![0, 2, 3]));
        for wrong in [[[1u8, 1], [0, 1]], [[0, 0], [0, 1]], [[1, 0], [1, 0]], [[1, 0], [2, 1]]] {
            let error = TokenTree::from_mask(&Tensor::new(&wrong, &Device::Cpu)?).expect_err("no tree").to_string();
            assert!(error.contains("of the mask is"), "{error}");
        }
        Ok(())
    }
}
