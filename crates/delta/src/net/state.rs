//! The states of a batch of sequences after some number of tokens.

use candle_core::{Result, Tensor};

use candle_attention_modules::base::{Expect, part};

/// The operation in the error texts of the cache.
pub(super) const OP: &str = "delta_cache";

/// The state after some number of tokens. Tensors are never written to, so that a clone copies no data.
#[derive(Debug, Clone)]
pub(super) struct CachedState {
    /// The number of tokens of each sequence.
    pub lens: Vec<usize>,
    /// Whether the last tokens of each sequence are a tree with branches. Such a sequence has no state.
    pub is_tree: Vec<bool>,
    /// The last inputs of the convolutions, (B, K - 1, C), contiguous.
    pub conv_inputs: Tensor,
    /// The states of the heads, (B, H, D_k, D_v), contiguous.
    pub head_states: Tensor,
}

impl CachedState {
    /// Returns the length of the longest sequence.
    pub fn len(&self) -> usize {
        self.lens.iter().copied().max().unwrap_or(0)
    }

    /// Returns the state of one sequence, as views.
    pub fn of_sequence(&self, sequence: usize) -> Result<Self> {
        Ok(Self {
            lens: vec![self.lens[sequence]],
            is_tree: vec![self.is_tree[sequence]],
            conv_inputs: part(&self.conv_inputs, 0, sequence..sequence + 1)?,
            head_states: part(&self.head_states, 0, sequence..sequence + 1)?,
        })
    }

    /// Returns the state with the sequences of several states, one after the other.
    pub fn concatenated(all: &[&Self]) -> Result<Self> {
        let conv_inputs: Vec<_> = all.iter().map(|state| &state.conv_inputs).collect();
        let head_states: Vec<_> = all.iter().map(|state| &state.head_states).collect();
        Ok(Self {
            lens: all.iter().flat_map(|state| state.lens.iter().copied()).collect(),
            is_tree: all.iter().flat_map(|state| state.is_tree.iter().copied()).collect(),
            conv_inputs: Tensor::cat(&conv_inputs, 0)?.contiguous()?,
            head_states: Tensor::cat(&head_states, 0)?.contiguous()?,
        })
    }

    /// Returns the state with sequence `sequences[n]` as sequence n.
    pub fn reordered(&self, sequences: &[usize]) -> Result<Self> {
        let rows: Vec<_> = sequences.iter().map(|&sequence| sequence as u32).collect();
        let rows = Tensor::new(rows.as_slice(), self.head_states.device())?;
        Ok(Self {
            lens: sequences.iter().map(|&sequence| self.lens[sequence]).collect(),
            is_tree: sequences.iter().map(|&sequence| self.is_tree[sequence]).collect(),
            conv_inputs: self.conv_inputs.index_select(&rows, 0)?,
            head_states: self.head_states.index_select(&rows, 0)?,
        })
    }

    /// Returns the state with the sequences of another after its own.
    ///
    /// # Errors
    /// For tensors of other shapes, another dtype or another device.
    pub fn joined(&self, other: &Self) -> Result<Self> {
        check_fits("last inputs", &self.conv_inputs, &other.conv_inputs)?;
        check_fits("states", &self.head_states, &other.head_states)?;
        Self::concatenated(&[self, other])
    }
}

/// Checks that a tensor (B, ..) can follow another; `kind` names them in errors.
fn check_fits(kind: &str, own: &Tensor, added: &Tensor) -> Result<()> {
    let dims = [&[added.dims()[0]], &own.dims()[1..]].concat();
    let name = format!("{kind} of the other cache");
    let found = Expect::many(OP, &name, added).sizes(&dims)?;
    found.dtype(own.dtype(), "this cache's")?.same_device("this cache", own.device())?;
    Ok(())
}
