//! Trees of drafted tokens: each path from a root to a last node is a separate sequence after the state in the cache.

use candle_core::{Result, Tensor};

use super::config::OP;
use super::recurrence::{Recurred, Recurrence, RecurrentInputs};
use super::state::CachedState;
use candle_attention_core::TokenTree;
use candle_attention_core::internal::{NewTokens, Padding, check_trees, tree_of};
use candle_attention_modules::base::check_memory;

/// The trees of a call (B, T).
#[derive(Debug, Clone, Copy)]
pub(super) struct Trees<'a> {
    /// One tree for all sequences, or one for each.
    all: &'a [TokenTree],
}

impl<'a> Trees<'a> {
    /// Checks that there is one tree for all sequences, or one for each, with a node for each token.
    pub fn new(all: &'a [TokenTree], tokens: &NewTokens) -> Result<Self> {
        check_trees(OP, all, tokens.tokens.iter().map(|own| own.len()))?;
        Ok(Self { all })
    }

    /// Returns the tree of a sequence.
    pub fn of(&self, sequence: usize) -> &'a TokenTree {
        tree_of(self.all, sequence)
    }

    /// Returns whether no tree has a branch: each node follows the one before.
    pub fn are_rows(&self) -> bool {
        self.all.iter().all(is_row)
    }
}

/// Returns whether a tree has no branch: each node follows the one before.
pub(super) fn is_row(tree: &TokenTree) -> bool {
    tree.depths().iter().enumerate().all(|(node, &depth)| node == depth)
}

/// The paths of the trees of a call (B, T) from roots to nodes without children, as R rows of L entries. The nodes that
/// paths share are in each of them. A sequence without tokens has one row without tokens.
struct Paths {
    /// The sequence of each row.
    sequences: Vec<usize>,
    /// The number of tokens of each row.
    lens: Vec<usize>,
    /// The token of each entry, counted through the batch; token 0 after the end of a row.
    tokens: Vec<u32>,
    /// An entry of each token, counted through the rows; entry 0 for padding.
    entries: Vec<u32>,
    /// The first row of each sequence.
    first_rows: Vec<usize>,
    /// L.
    longest: usize,
}

impl Paths {
    fn new(trees: Trees, tokens: &NewTokens) -> Result<Self> {
        let b = tokens.tokens.len();
        let mut last_nodes = Vec::with_capacity(b);
        let mut longest = 0;
        for sequence in 0..b {
            let tree = trees.of(sequence);
            longest = longest.max(tree.depths().iter().map(|depth| depth + 1).max().unwrap_or(0));
            last_nodes.push(last_nodes_of(tree));
        }
        let rows = last_nodes.iter().map(|own| own.len().max(1)).sum();
        check_memory(OP, "the paths of trees", &[rows, longest, size_of::<usize>()])?;
        let mut paths = Self {
            sequences: Vec::with_capacity(rows),
            lens: Vec::with_capacity(rows),
            tokens: Vec::with_capacity(rows * longest),
            entries: vec![0; b * tokens.t],
            first_rows: Vec::with_capacity(b),
            longest,
        };
        for (sequence, own_nodes) in last_nodes.iter().enumerate() {
            paths.first_rows.push(paths.sequences.len());
            let first_token = sequence * tokens.t + tokens.tokens[sequence].start;
            for &node in own_nodes {
                paths.add(sequence, first_token, &trees.of(sequence).path(node)?);
            }
            if own_nodes.is_empty() {
                paths.add(sequence, first_token, &[]);
            }
        }
        Ok(paths)
    }

    /// Adds a row of some nodes of a sequence, whose node 0 is the token `first_token` of the batch.
    fn add(&mut self, sequence: usize, first_token: usize, path: &[usize]) {
        for node in path {
            let token = first_token + node;
            self.entries[token] = self.tokens.len() as u32;
            self.tokens.push(token as u32);
        }
        let end = (self.sequences.len() + 1) * self.longest;
        self.tokens.resize(end, 0);
        self.sequences.push(sequence);
        self.lens.push(path.len());
    }

    /// Returns a tensor (B, T, ..) of tokens as (R, L, ..) of entries. `tokens` are the tokens of the entries.
    fn entries_of(&self, xs: &Tensor, tokens: &Tensor) -> Result<Tensor> {
        let rows = xs.flatten(0, 1)?.contiguous()?.index_select(tokens, 0)?;
        rows.reshape([&[self.sequences.len(), self.longest], &xs.dims()[2..]].concat())
    }

    /// Returns a tensor (R, L, ..) of entries as (B, T, ..) of tokens.
    fn tokens_of(&self, xs: &Tensor, b: usize) -> Result<Tensor> {
        let index = Tensor::new(self.entries.as_slice(), xs.device())?;
        let rows = xs.contiguous()?.flatten(0, 1)?.index_select(&index, 0)?;
        rows.reshape([&[b, self.entries.len() / b], &xs.dims()[2..]].concat())
    }
}

/// Returns the nodes without children.
fn last_nodes_of(tree: &TokenTree) -> Vec<usize> {
    let mut is_last = vec![true; tree.len()];
    for &parent in tree.parents().iter().flatten() {
        is_last[parent] = false;
    }
    (0..tree.len()).filter(|&node| is_last[node]).collect()
}

impl Recurrence {
    /// Computes the recurrence over the nodes of trees (B, T, ..), each after its ancestors. The states are the states
    /// after the first path of each sequence, which has all tokens if its tree has no branch.
    pub fn run_trees(
        &self,
        inputs: &RecurrentInputs,
        before: Option<&CachedState>,
        trees: Trees,
        tokens: &NewTokens,
    ) -> Result<Recurred> {
        let b = tokens.tokens.len();
        let paths = Paths::new(trees, tokens)?;
        if paths.longest == 0 {
            return self.run(inputs, before, Some(tokens));
        }
        let state = before.map(|state| state.reordered(&paths.sequences)).transpose()?;
        let dims = (paths.sequences.len(), paths.longest);
        let padding = Padding { starts: None, valid_lens: Some(&paths.lens) };
        let path_tokens = NewTokens::new(OP, Vec::new(), dims, padding, |_| String::new())?;
        let device = inputs.q.device();
        let entries = Tensor::new(paths.tokens.as_slice(), device)?;
        let of_paths = inputs.map(|xs| path_tokens.without_padding(paths.entries_of(xs, &entries)?))?;
        let Recurred { ys, conv_inputs, head_states } = self.run(&of_paths, state.as_ref(), Some(&path_tokens))?;
        let first_rows: Vec<_> = paths.first_rows.iter().map(|&row| row as u32).collect();
        let first_rows = Tensor::new(first_rows, device)?;
        let of_sequences = |xs: &Tensor| xs.contiguous()?.index_select(&first_rows, 0);
        Ok(Recurred {
            ys: paths.tokens_of(&ys, b)?,
            conv_inputs: conv_inputs.as_ref().map(of_sequences).transpose()?,
            head_states: of_sequences(&head_states)?,
        })
    }
}
