//! The states of one layer for the sequences of a table of pages.

use std::collections::BTreeMap;

use candle_core::{DType, Result, Tensor, bail};

use super::GatedDeltaNet;
use super::recurrence::{Recurred, Recurrence, RecurrentInputs};
use super::state::CachedState;
use super::tree::is_row;
use candle_attention_core::internal::{NewTokens, Padding, StoredSteps, tree_of};
use candle_attention_core::{PageTable, PagedTokens, TokenTree};
use candle_attention_modules::base::{accumulation_dtype, check_memory, joined_in_order};

/// The name of the operation in errors.
const OP: &str = "delta_pool";

/// The states of one [`GatedDeltaNet`] for the sequences of a [`PageTable`]: in each of the table's slots for states,
/// the state of every head, and the last K - 1 inputs of the convolutions. The table says which slots a sequence has.
///
/// All memory is allocated at once. The layer reads and writes states in a call
/// [`with_pages`](crate::DeltaInput::with_pages).
///
/// ```
/// use candle_attention::{DeltaInput, DeltaPool, GatedDeltaNet, GatedDeltaNetConfig, PageTable};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let net = GatedDeltaNet::new(&GatedDeltaNetConfig::new(64, 4), VarBuilder::zeros(DType::F32, &Device::Cpu))?;
/// let mut table = PageTable::new(100, 16)?.with_states(4)?;
/// let pool = DeltaPool::new(&net, &table)?;
/// let (one, other) = (table.add(), table.add());
/// for requests in [vec![one.tokens(40)], vec![one.tokens(1), other.tokens(25)]] {
///     let step = table.step(&requests)?;
///     let xs = Tensor::randn(0f32, 1., (step.total_tokens(), 64), &Device::Cpu)?; // (total, E)
///     let ys = net.forward_with(DeltaInput::new(&xs).with_pages(&pool, &step))?;
///     assert_eq!(ys.dims(), xs.dims());
///     step.commit();
/// }
/// # Ok(()) }
/// ```
#[doc(alias("mamba_cache", "state_cache"))]
#[derive(Debug)]
pub struct DeltaPool {
    /// The last inputs of the convolutions, (states + 1, K - 1, C). The last entry is that of a sequence that begins.
    conv_inputs: Tensor,
    /// The states of the heads, (states + 1, H, D_k, D_v).
    head_states: Tensor,
    stored: StoredSteps,
}

impl DeltaPool {
    /// Returns a pool of zeros for a layer, with the slots of a table.
    ///
    /// # Errors
    /// For a table without [states](PageTable::with_states), and for a pool that does not fit in memory.
    pub fn new(net: &GatedDeltaNet, table: &PageTable) -> Result<Self> {
        if table.states() == 0 {
            bail!("[{OP}] the table has no states, expected one made `with_states`")
        }
        let cfg = net.config();
        let states = table.states().saturating_add(1);
        let zeros = |dims: &[usize], dtype: DType| {
            let bytes = [dims, &[dtype.size_in_bytes()]].concat();
            check_memory(OP, format_args!("a pool of {dims:?}"), &bytes)?;
            Tensor::zeros(dims, dtype, net.out.device())
        };
        let conv_dims = [states, cfg.conv_kernel_dim() - 1, cfg.conv_channels().count()];
        let head_dims = [states, cfg.num_value_heads(), cfg.key_head_dim(), cfg.value_head_dim()];
        Ok(Self {
            conv_inputs: zeros(&conv_dims, net.dtype)?,
            head_states: zeros(&head_dims, accumulation_dtype(net.dtype))?,
            stored: StoredSteps::new(table),
        })
    }

    /// Returns the number of bytes of all states.
    pub fn memory(&self) -> usize {
        let tensors = [&self.conv_inputs, &self.head_states];
        tensors.iter().map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// Checks that a step is of the pool's table, and that the pool has the shapes of states after a call.
    pub(super) fn check(&self, step: &PagedTokens, conv_shape: &[usize], head_shape: &[usize]) -> Result<()> {
        self.stored.check(OP, step)?;
        let found = [&self.conv_inputs.dims()[1..], &self.head_states.dims()[1..]];
        let expected = [&conv_shape[1..], &head_shape[1..]];
        if found != expected {
            bail!(
                "[{OP}] the pool stores inputs {:?} and states {:?}, expected the layer's {:?} and {:?}",
                found[0],
                found[1],
                expected[0],
                expected[1]
            )
        }
        Ok(())
    }

    /// Returns the states in some slots, in this order; zeros where there is no slot.
    fn states_in(&self, slots: impl Iterator<Item = Option<u32>>) -> Result<CachedState> {
        let zeros = self.head_states.dim(0)? as u32 - 1;
        let slots: Vec<_> = slots.map(|slot| slot.unwrap_or(zeros)).collect();
        let count = slots.len();
        let slots = Tensor::new(slots, self.head_states.device())?;
        Ok(CachedState {
            lens: vec![0; count],
            is_tree: vec![false; count],
            conv_inputs: self.conv_inputs.index_select(&slots, 0)?,
            head_states: self.head_states.index_select(&slots, 0)?,
        })
    }

    /// Stores the states of sequences in these slots.
    fn store(&self, state: &CachedState, slots: impl Iterator<Item = u32>) -> Result<()> {
        for (pool, states) in [(&self.conv_inputs, &state.conv_inputs), (&self.head_states, &state.head_states)] {
            if states.track_op() {
                bail!(
                    "[{OP}] the layer's states are tracked for gradients, which a pool would lose; expected a layer \
                     after `freeze()` and an input `xs.detach()`"
                )
            }
            if states.dtype() != pool.dtype() {
                bail!("[{OP}] the layer's states are {:?}, expected the pool's {:?}", states.dtype(), pool.dtype())
            }
        }
        for (n, slot) in slots.enumerate() {
            for (pool, states) in [(&self.conv_inputs, &state.conv_inputs), (&self.head_states, &state.head_states)] {
                pool.slice_set(&states.narrow(0, n, 1)?.contiguous()?, 0, slot as usize)?;
            }
        }
        Ok(())
    }
}

/// Sequences of a step that store states after the same numbers of tokens, or the nodes of trees that have a depth,
/// each a sequence of one token. They are computed as a batch.
#[derive(Default)]
struct PoolBatch {
    /// The state before each sequence; `None` for zeros.
    before: Vec<Option<u32>>,
    /// The slots of the states of each sequence, in the order of its tokens after which they are stored.
    after: Vec<Vec<u32>>,
    /// The indices of the tokens of the sequences in the step.
    rows: Vec<u32>,
}

impl Recurrence {
    /// Computes the recurrence over the tokens (1, total, ..) of a step, and stores the states after them. The tokens
    /// may be the nodes of a tree for all sequences, or for each.
    pub fn run_paged(
        &self,
        inputs: &RecurrentInputs,
        pool: &DeltaPool,
        step: &PagedTokens,
        trees: Option<&[TokenTree]>,
    ) -> Result<Recurred> {
        let ys = self.outputs_of_step(inputs, pool, step, trees)?;
        pool.stored.add(step);
        Ok(Recurred { ys, conv_inputs: None, head_states: pool.head_states.clone() })
    }

    /// Returns the outputs of the rule, (1, total, H, D_v), and stores the states.
    fn outputs_of_step(
        &self,
        inputs: &RecurrentInputs,
        pool: &DeltaPool,
        step: &PagedTokens,
        trees: Option<&[TokenTree]>,
    ) -> Result<Tensor> {
        let mut levels: BTreeMap<usize, PoolBatch> = BTreeMap::new();
        let mut batches: BTreeMap<Vec<usize>, PoolBatch> = BTreeMap::new();
        for (s, states) in step.states().iter().enumerate() {
            if let Some(tree) = trees.map(|all| tree_of(all, s)).filter(|tree| !is_row(tree)) {
                let first = step.sequences().queries(s).start;
                for (node, (&parent, &depth)) in tree.parents().iter().zip(tree.depths()).enumerate() {
                    let level = levels.entry(depth).or_default();
                    let before = parent.map(|parent| states.after[parent].state);
                    level.before.push(before.or(states.before));
                    level.after.push(vec![states.after[node].state]);
                    level.rows.push((first + node) as u32);
                }
                continue;
            }
            let ends: Vec<_> = states.after.iter().map(|after| after.tokens).collect();
            if !ends.is_empty() {
                let batch = batches.entry(ends).or_default();
                batch.before.push(states.before);
                batch.after.push(states.after.iter().map(|after| after.state).collect());
                batch.rows.extend(step.sequences().queries(s).map(|row| row as u32));
            }
        }
        // Parents come before their children.
        let nodes = levels.into_values().map(|level| (vec![1], level));
        let mut rows = Vec::new();
        let mut outputs = Vec::new();
        for (ends, batch) in batches.into_iter().chain(nodes) {
            let ys = self.run_batch(inputs, pool, &batch, &ends)?;
            outputs.push(ys.reshape((1, batch.rows.len(), self.value_heads, self.value_head_dim))?);
            rows.extend(batch.rows);
        }
        if outputs.is_empty() {
            let shape = (1, 0, self.value_heads, self.value_head_dim);
            return Tensor::zeros(shape, inputs.q.dtype(), inputs.q.device());
        }
        joined_in_order(&outputs, 1, &rows)
    }

    /// Computes the recurrence over the tokens of a batch, stores the states after its tokens `ends`, and returns (b,
    /// t, H, D_v).
    fn run_batch(
        &self,
        inputs: &RecurrentInputs,
        pool: &DeltaPool,
        batch: &PoolBatch,
        ends: &[usize],
    ) -> Result<Tensor> {
        let b = batch.before.len();
        let own = rows_in_batch(inputs, &batch.rows, b)?;
        let mut state = pool.states_in(batch.before.iter().copied())?;
        let mut outputs = Vec::new();
        let mut start = 0;
        for (n, &end) in ends.iter().enumerate() {
            let len = end - start;
            let tokens = NewTokens::new(OP, vec![start; b], (b, len), Padding::default(), |_| String::new())?;
            let piece = own.map(|xs| xs.narrow(1, start, len)?.contiguous())?;
            let Recurred { ys, conv_inputs, head_states } = self.run(&piece, Some(&state), Some(&tokens))?;
            let Some(conv_inputs) = conv_inputs else { bail!("[{OP}] the last inputs are missing") };
            state = CachedState { conv_inputs, head_states, ..state };
            pool.store(&state, batch.after.iter().map(|slots| slots[n]))?;
            outputs.push(ys);
            start = end;
        }
        Tensor::cat(&outputs, 1)?.contiguous()
    }
}

/// Returns some tokens of (1, total, ..) as a batch of `b` sequences, (b, t, ..).
fn rows_in_batch(inputs: &RecurrentInputs, rows: &[u32], b: usize) -> Result<RecurrentInputs> {
    let index = Tensor::new(rows, inputs.q.device())?;
    inputs.map(|xs| {
        let dims = [&[b, rows.len() / b], &xs.dims()[2..]].concat();
        xs.contiguous()?.index_select(&index, 1)?.reshape(dims)
    })
}
