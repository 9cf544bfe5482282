//! Trees of drafted tokens.

use candle_core::{DType, Result, Tensor, bail};

use super::tensors::readable;
use candle_attention_modules::base::{Dim, Expect};

const OP: &str = "token_tree";

/// A tree of drafted tokens, of which a model accepts one path (SpecInfer, Medusa, EAGLE): each token follows its
/// parent, and attends to the tokens of the cache, to its ancestors and to itself.
///
/// The tokens of a call with a tree ([`AttentionInput::with_tree`](crate::AttentionInput::with_tree)) are its nodes.
/// Afterwards [`AttentionCache::keep`](crate::AttentionCache::keep) keeps the accepted path.
///
/// ```
/// use candle_attention::{AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, TokenTree};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true);
/// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let mut cache = AttentionCache::default();
/// let prompt = Tensor::randn(0f32, 1., (1, 9, 64), &Device::Cpu)?;
/// mha.forward_with(AttentionInput::new(&prompt).with_cache(&mut cache))?;
///
/// // Token 0 follows the prompt, 1 and 2 are two guesses after it, 3 follows 2.
/// let tree = TokenTree::new(&[None, Some(0), Some(0), Some(2)])?;
/// let before = cache.lens();
/// let drafts = Tensor::randn(0f32, 1., (1, 4, 64), &Device::Cpu)?;
/// mha.forward_with(AttentionInput::new(&drafts).with_cache(&mut cache).with_tree(&tree))?;
/// cache.keep(&before, &[tree.path(3)?])?; // 0, 2 and 3
/// assert_eq!(cache.lens(), [12]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[doc(alias("tree_attention", "speculative_decoding", "medusa"))]
pub struct TokenTree {
    /// The parent of each node; `None` if the node follows the tokens before the call.
    parents: Vec<Option<usize>>,
    /// The number of ancestors of each node.
    depths: Vec<usize>,
}

impl TokenTree {
    /// Makes a tree of the parent of each node. A node without a parent follows the tokens in the cache; there may be
    /// several of these.
    ///
    /// # Errors
    /// For a parent that does not come before its child.
    pub fn new(parents: &[Option<usize>]) -> Result<Self> {
        let mut depths: Vec<usize> = Vec::with_capacity(parents.len());
        for (node, &parent) in parents.iter().enumerate() {
            let depth = match parent {
                None => 0,
                Some(parent) => match depths.get(parent) {
                    Some(depth) => depth + 1,
                    None => bail!("[{OP}] the parent of node {node} is {parent}, expected a node before it"),
                },
            };
            depths.push(depth);
        }
        Ok(Self { parents: parents.to_vec(), depths })
    }

    /// Makes a tree of a boolean mask (T, T) with u8 entries of 1 (attend) and 0, as Medusa and EAGLE have it: row i
    /// has ones for node i and its ancestors. The entries are copied to the CPU.
    ///
    /// # Errors
    /// For another shape or dtype, and for a mask that is not of a tree whose parents come before their children.
    pub fn from_mask(mask: &Tensor) -> Result<Self> {
        let found = Expect::one(OP, "the mask", mask).shape(&["T", "T"].map(Dim::Any))?;
        found.dtype_of(&[DType::U8], " with 1 = attend")?;
        let (t, columns) = mask.dims2()?;
        if columns != t {
            bail!("[{OP}] the mask has shape {:?}, expected (T, T)", mask.dims())
        }
        let rows = readable(mask)?.to_vec2::<u8>()?;
        let mut parents = Vec::with_capacity(t);
        for (node, row) in rows.iter().enumerate() {
            let parent = row[..node].iter().rposition(|&entry| entry != 0);
            let mut expected = parent.map_or(vec![0; t], |parent| rows[parent].clone());
            expected[node] = 1;
            if *row != expected {
                bail!(
                    "[{OP}] row {node} of the mask is {row:?}, expected ones for the node and for the row of its \
                     parent, which comes before it; `AttentionInput::with_new_token_mask` takes any mask"
                )
            }
            parents.push(parent);
        }
        Self::new(&parents)
    }

    /// Returns the number of nodes.
    pub fn len(&self) -> usize {
        self.parents.len()
    }

    /// Returns whether the tree has no nodes.
    pub fn is_empty(&self) -> bool {
        self.parents.is_empty()
    }

    /// Returns the parent of each node.
    pub fn parents(&self) -> &[Option<usize>] {
        &self.parents
    }

    /// Returns the number of ancestors of each node in the tree: its position after the tokens in the cache.
    pub fn depths(&self) -> &[usize] {
        &self.depths
    }

    /// Returns the nodes from a root to `node`, in increasing order.
    ///
    /// # Errors
    /// For a node that the tree does not have.
    pub fn path(&self, node: usize) -> Result<Vec<usize>> {
        if node >= self.len() {
            bail!("[{OP}] the node is {node}, expected one of {} nodes", self.len())
        }
        let mut path = vec![node];
        let mut last = node;
        while let Some(parent) = self.parents[last] {
            path.push(parent);
            last = parent;
        }
        path.reverse();
        Ok(path)
    }
}

/// Checks that there is one tree for all sequences, or one for each, with a node for each token. `token_counts` has the
/// number of tokens of each sequence.
pub fn check_trees(op: &str, trees: &[TokenTree], token_counts: impl ExactSizeIterator<Item = usize>) -> Result<()> {
    let b = token_counts.len();
    if trees.len() != 1 && trees.len() != b {
        bail!("[{op}] there are {} trees, expected one for each of {b} sequences", trees.len())
    }
    for (sequence, tokens) in token_counts.enumerate() {
        let nodes = tree_of(trees, sequence).len();
        if nodes != tokens {
            bail!("[{op}] the tree of sequence {sequence} has {nodes} nodes, expected one for each of {tokens} tokens")
        }
    }
    Ok(())
}

/// Returns the tree of a sequence, of one tree for all sequences or one for each.
pub fn tree_of(trees: &[TokenTree], sequence: usize) -> &TokenTree {
    &trees[if trees.len() == 1 { 0 } else { sequence }]
}
