//! The table of pages: the pages of each sequence, for all layers of a model.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use candle_core::{Result, bail};

use super::allocator::Allocator;
use super::prefixes::Prefixes;
use super::states::{OP, States, StoredState};
use candle_attention_modules::base::{check_memory, number};

/// The smallest page. The sizes of pages are multiples of it.
const LEAST_PAGE: usize = 16;

/// The number of the next table, by which handles and pools of different tables are told apart.
static NEXT_TABLE: AtomicU64 = AtomicU64::new(1);

/// Which pages each sequence of a model has, and how many of their positions are used: one table for all layers, whose
/// [pools](crate::KvPool) have the same pages.
///
/// Sequences come and go at any time. A pass through the model is a [`step`](Self::step): some sequences bring a chunk
/// of a prompt, others one token, and pages for them are taken. Nothing that is stored moves when a sequence grows.
/// Sequences share pages: [`fork`](Self::fork) continues a sequence in two ways, and
/// [`add_with_prefix`](Self::add_with_prefix) begins a sequence with the pages of tokens that another one had. A shared
/// page is copied when a sequence writes to it.
///
/// A function that returns an error does not change the table.
///
/// ```
/// use candle_attention::{AttentionInput, KvPool, KvPoolConfig, PageTable};
/// use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_num_kv_heads(2).with_causal(true);
/// let layers = [0, 1].map(|_| MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu)));
/// let mut table = PageTable::new(100, 16)?; // 100 pages of 16 positions
/// let pool = || KvPool::new(&KvPoolConfig::for_layer(&cfg, &table), &Device::Cpu);
/// let pools = [pool()?, pool()?];
///
/// // A prompt of 40 tokens; then its next token together with the prompt of another request.
/// let one = table.add();
/// let other = table.add();
/// for requests in [vec![one.tokens(40)], vec![one.tokens(1), other.tokens(25)]] {
///     let step = table.step(&requests)?;
///     let mut xs = Tensor::randn(0f32, 1., (step.total_tokens(), 64), &Device::Cpu)?; // (total, E)
///     for (layer, pool) in layers.iter().zip(&pools) {
///         let layer = layer.as_ref().expect("zeros for every name");
///         xs = layer.forward_with(AttentionInput::new(&xs).with_pages(pool, &step))?;
///     }
///     step.commit();
/// }
/// assert_eq!((table.len(one)?, table.len(other)?, table.used_pages()), (41, 25, 3 + 2));
/// table.free(one)?;
/// assert_eq!(table.free_pages(), 98);
/// # Ok(()) }
/// ```
#[doc(alias("block_table", "BlockManager", "paged_attention", "KvCacheManager"))]
#[derive(Debug)]
pub struct PageTable {
    pub(super) id: u64,
    pub(super) page_size: usize,
    pub(super) allocator: Allocator,
    pub(super) prefixes: Prefixes,
    /// The states of recurrent layers, if the table has some.
    pub(super) states: Option<States>,
    pub(super) slots: Vec<Slot>,
    vacant: Vec<usize>,
    /// The number of the last step that was begun.
    pub(super) begun: u64,
    /// The number of the last step that was committed.
    pub(super) committed: u64,
    /// The number of times that rows were moved.
    pub(super) moved: u64,
}

/// A slot, which several sequences use one after the other.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// The number of sequences that had the slot before.
    generation: u64,
    pub sequence: Option<StoredSequence>,
}

/// The pages of a sequence.
#[derive(Debug, Clone, Default)]
pub(super) struct StoredSequence {
    pub len: usize,
    /// A page for every `page_size` positions. The entries of released pages are 0.
    pub pages: Vec<u32>,
    /// The number of pages that were released, from the first one on.
    pub released: usize,
    /// The stored states in the order of their positions, that after all positions last; none in a table without
    /// states, and in an empty sequence.
    pub states: Vec<StoredState>,
}

/// A handle of a sequence in a [`PageTable`]. It is of no use after the sequence was freed: every call with it is then
/// an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SequenceId {
    table: u64,
    slot: usize,
    generation: u64,
}

/// The number of tokens that a sequence brings to a [step](PageTable::step).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepTokens {
    /// The sequence.
    pub sequence: SequenceId,
    /// The number of its new tokens.
    pub tokens: usize,
}

impl SequenceId {
    /// Returns that the sequence brings a number of tokens to a [step](PageTable::step).
    pub fn tokens(self, tokens: usize) -> StepTokens {
        StepTokens { sequence: self, tokens }
    }
}

/// A sequence that begins with the pages of a known prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedPrefix {
    /// The new sequence.
    pub sequence: SequenceId,
    /// The number of its tokens that are stored already, which is its length.
    pub tokens: usize,
}

impl PageTable {
    /// Returns a table of `pages` pages of `page_size` positions.
    ///
    /// # Errors
    /// For a page size that is not a multiple of 16, for no pages, and for more than 2^32 - 1 positions in all.
    pub fn new(pages: usize, page_size: usize) -> Result<Self> {
        if page_size == 0 || !page_size.is_multiple_of(LEAST_PAGE) {
            bail!("[{OP}] page_size is {page_size}, expected a multiple of {LEAST_PAGE}")
        }
        number::within(OP, "page_size", page_size, LEAST_PAGE..=u32::MAX as usize)?;
        number::within(OP, "pages", pages, 1..=u32::MAX as usize / page_size)?;
        check_memory(OP, format_args!("a table of {pages} pages"), &[pages, 40])?;
        Ok(Self {
            id: NEXT_TABLE.fetch_add(1, Ordering::Relaxed),
            page_size,
            allocator: Allocator::new(pages),
            prefixes: Prefixes::new(pages),
            states: None,
            slots: Vec::new(),
            vacant: Vec::new(),
            begun: 0,
            committed: 0,
            moved: 0,
        })
    }

    /// Adds slots for the states of recurrent layers to a table without sequences: each sequence that has tokens uses
    /// one for its present state, the same in the pools of all recurrent layers
    /// (`candle_attention::DeltaPool`).
    ///
    /// A step writes new states and does not change the ones before, so that a step that is dropped changes nothing,
    /// and a fork copies nothing. So n sequences that all bring tokens need 2 n states. A prefix is shared up to the
    /// last page at whose end a step of the earlier sequence ended, since its state is stored there.
    ///
    /// ```
    /// use candle_attention::PageTable;
    /// # fn main() -> candle_core::Result<()> {
    /// let mut table = PageTable::new(8, 16)?.with_states(4)?;
    /// let ids: Vec<u32> = (0..40).collect();
    /// let one = table.add();
    /// for tokens in [16, 24] {
    ///     table.step(&[one.tokens(tokens)])?.commit(); // after the model computed them
    ///     table.share_prefix(one, &ids[..table.len(one)?])?;
    /// }
    /// // The second page has no state at its end.
    /// assert_eq!(table.add_with_prefix(&ids).tokens, 16);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For no states, for more than fit in memory, and for a table that has sequences.
    #[doc(alias("mamba", "linear_attention", "recurrent"))]
    pub fn with_states(mut self, states: usize) -> Result<Self> {
        number::within(OP, "states", states, 1..=u32::MAX as usize)?;
        check_memory(OP, format_args!("a table of {states} states"), &[states, 40])?;
        self.check_unused("states")?;
        // Pools that were made before have other states.
        self.id = NEXT_TABLE.fetch_add(1, Ordering::Relaxed);
        self.states = Some(States::new(states, self.pages()));
        Ok(self)
    }

    /// Sets how many of the last tokens of a sequence can be taken back in a table with
    /// [states](Self::with_states): a step that brings at most this number of tokens to a sequence stores the state after
    /// each of them, so that [`truncate`](Self::truncate) can return to it. The default is 0. Such a sequence uses up to
    /// `tokens` more states.
    ///
    /// # Errors
    /// For a table without states, and for one that has sequences.
    #[doc(alias("speculative_decoding", "rollback"))]
    pub fn with_drafts(mut self, tokens: usize) -> Result<Self> {
        self.check_unused("drafts")?;
        let Some(states) = &mut self.states else {
            bail!("[{OP}] drafts were set for a table without states, which takes back any tokens; expected none")
        };
        states.drafts = tokens;
        Ok(self)
    }

    /// Checks that the table has no sequences yet, before `what` is set.
    fn check_unused(&self, what: &str) -> Result<()> {
        if self.num_sequences() > 0 {
            bail!("[{OP}] the table has {} sequences, expected none before its {what} are set", self.num_sequences())
        }
        Ok(())
    }

    /// Returns the number of slots for states, 0 for a table without.
    pub fn states(&self) -> usize {
        self.states.as_ref().map_or(0, |states| states.allocator.pages())
    }

    /// Returns the number of slots whose state no sequence has. Some of them may still have the state after a prefix,
    /// until they are needed.
    pub fn free_states(&self) -> usize {
        self.states.as_ref().map_or(0, |states| states.allocator.free())
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> usize {
        self.allocator.pages()
    }

    /// Returns the number of positions of a page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Returns the number of pages that no sequence has.
    pub fn free_pages(&self) -> usize {
        self.allocator.free()
    }

    /// Returns the number of pages that sequences have, each counted once.
    pub fn used_pages(&self) -> usize {
        self.pages() - self.free_pages()
    }

    /// Returns the number of free pages that a prefix is still found in, until they are needed.
    pub fn free_pages_with_prefix(&self) -> usize {
        self.allocator.found()
    }

    /// Returns the number of sequences.
    pub fn num_sequences(&self) -> usize {
        self.slots.len() - self.vacant.len()
    }

    /// Adds an empty sequence.
    pub fn add(&mut self) -> SequenceId {
        self.insert(StoredSequence::default())
    }

    /// Adds a sequence that will have the token ids `ids`, and that begins with the pages of the longest known prefix
    /// of them ([`share_prefix`](Self::share_prefix)). Its length is the number of tokens in these pages. The others
    /// are still to be computed, at least one of them, since a model needs it for the next token.
    ///
    /// Only whole pages are found: by a hash of all ids from the first one on, and then by comparing these ids. The
    /// pages of a freed sequence are found until they are needed for other tokens.
    ///
    /// ```
    /// use candle_attention::PageTable;
    /// # fn main() -> candle_core::Result<()> {
    /// let mut table = PageTable::new(8, 16)?;
    /// let ids: Vec<u32> = (0..40).collect();
    /// let one = table.add();
    /// table.step(&[one.tokens(40)])?.commit(); // after the model computed it
    /// table.share_prefix(one, &ids)?;
    ///
    /// let other = table.add_with_prefix(&[&ids[..35], &[7, 7]].concat());
    /// assert_eq!((other.tokens, table.len(other.sequence)?, table.used_pages()), (32, 32, 3));
    /// # Ok(()) }
    /// ```
    #[doc(alias("prefix_caching", "automatic_prefix_caching"))]
    pub fn add_with_prefix(&mut self, ids: &[u32]) -> SharedPrefix {
        let most = &ids[..ids.len().saturating_sub(1)];
        let mut pages = self.prefixes.find(most, self.page_size);
        let mut states = Vec::new();
        if let Some(own) = &mut self.states {
            states.extend(own.longest_found(&pages, self.page_size));
            pages.truncate(states.last().map_or(0, |state| state.positions / self.page_size));
            own.share(&states);
        }
        for &page in &pages {
            self.allocator.share(page);
        }
        let tokens = pages.len() * self.page_size;
        SharedPrefix { sequence: self.insert(StoredSequence { len: tokens, pages, released: 0, states }), tokens }
    }

    /// Makes the whole pages of a sequence found by its token ids, which are `ids` from the first one on, for
    /// [`add_with_prefix`](Self::add_with_prefix). Call it once all layers have stored the tokens, for example after a
    /// prompt and again when the sequence ends.
    ///
    /// Keys and values have to follow from the ids alone. Models with different adapters, or inputs besides token ids,
    /// need a table each.
    ///
    /// # Errors
    /// For a sequence that was freed or is of another table, for more ids than the sequence has tokens, and for other
    /// ids than one of its pages is found by.
    pub fn share_prefix(&mut self, sequence: SequenceId, ids: &[u32]) -> Result<()> {
        let stored = self.sequence(sequence)?;
        if ids.len() > stored.len {
            bail!("[{OP}] there are {} ids, expected at most the {} tokens of the sequence", ids.len(), stored.len)
        }
        let chain = self.prefixes.chain(ids, self.page_size);
        let own_states = stored.states.clone();
        let present: Vec<_> = stored.pages.iter().copied().zip(chain.iter()).skip(stored.released).collect();
        for (page, prefix) in &present {
            if let Some(known) = self.prefixes.of_page(*page)
                && !Prefixes::are_equal(known, prefix)
            {
                bail!("[{OP}] page {page} of the sequence is found by other ids, expected the ids of its tokens")
            }
        }
        for (page, prefix) in &present {
            self.prefixes.add(*page, prefix);
        }
        if let Some(states) = &mut self.states {
            let found: Vec<_> = chain.iter().map_while(|prefix| self.prefixes.page_of(prefix)).collect();
            states.add_found(&own_states, &found, self.page_size);
        }
        Ok(())
    }

    /// Adds a sequence with the tokens of another one, and shares its pages. A page is copied when one of the two
    /// writes to it.
    ///
    /// # Errors
    /// For a sequence that was freed or is of another table.
    pub fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        let forked = self.sequence(sequence)?.clone();
        for &page in &forked.pages[forked.released..] {
            self.allocator.share(page);
        }
        if let Some(states) = &mut self.states {
            states.share(&forked.states);
        }
        Ok(self.insert(forked))
    }

    /// Removes the positions of a sequence from `len` on, such as drafted tokens that a model did not accept. Pages
    /// without positions are freed.
    ///
    /// # Errors
    /// For a sequence that was freed or is of another table, for more positions than the sequence has, for a length
    /// above 0 that ends within released pages, and in a table with [states](Self::with_states) for a length above 0
    /// after which no state is stored.
    #[doc(alias = "crop")]
    pub fn truncate(&mut self, sequence: SequenceId, len: usize) -> Result<()> {
        let page_size = self.page_size;
        let stored = self.sequence(sequence)?;
        if len > stored.len {
            bail!("[{OP}] len is {len}, expected at most the sequence's {} positions", stored.len)
        }
        let first = stored.released * page_size;
        if len > 0 && len < first {
            bail!("[{OP}] len is {len}, expected 0 or at least {first}: the pages before were released")
        }
        let has_state = |state: &StoredState| state.positions == len;
        if self.states.is_some() && len > 0 && !stored.states.iter().any(has_state) {
            let lens: Vec<_> = stored.states.iter().map(|state| state.positions).collect();
            bail!(
                "[{OP}] len is {len}, expected 0 or one of {lens:?}, after which the sequence has a state: a table \
                 `with_drafts` stores those after its last tokens"
            )
        }
        let kept = len.div_ceil(page_size);
        let own = self.sequence_mut(sequence)?;
        let first_removed = own.states.partition_point(|state| state.positions <= len);
        let removed_states = own.states.split_off(first_removed);
        let from = kept.max(own.released);
        let removed = own.pages.split_off(from);
        own.len = len;
        if len == 0 {
            own.pages.clear();
            own.released = 0;
        }
        self.release(&removed);
        if let Some(states) = &mut self.states {
            states.release(&removed_states);
        }
        Ok(())
    }

    /// Releases the pages of a sequence whose positions are all before `position`, since no query attends to them any
    /// more: in a model whose layers all have a window, those before the next token's window. Returns the number of
    /// pages.
    ///
    /// A page that another sequence shares stays in use. A later call whose mask allows a query to attend to a released
    /// position is an error.
    ///
    /// # Errors
    /// For a sequence that was freed or is of another table.
    #[doc(alias = "sliding_window")]
    pub fn release_before(&mut self, sequence: SequenceId, position: usize) -> Result<usize> {
        let page_size = self.page_size;
        let own = self.sequence_mut(sequence)?;
        let end = position.min(own.len) / page_size;
        if end <= own.released {
            return Ok(0);
        }
        let released = own.pages[own.released..end].to_vec();
        own.pages[own.released..end].fill(0);
        own.released = end;
        self.release(&released);
        Ok(released.len())
    }

    /// Removes a sequence, and frees the pages that no other sequence has.
    ///
    /// # Errors
    /// For a sequence that was freed before or is of another table.
    pub fn free(&mut self, sequence: SequenceId) -> Result<()> {
        let stored = self.sequence(sequence)?.clone();
        let slot = &mut self.slots[sequence.slot];
        slot.sequence = None;
        slot.generation += 1;
        self.vacant.push(sequence.slot);
        self.release(&stored.pages[stored.released..]);
        if let Some(states) = &mut self.states {
            states.release(&stored.states);
        }
        Ok(())
    }

    /// Returns the number of positions of a sequence, of released ones too.
    ///
    /// # Errors
    /// For a sequence that was freed or is of another table.
    pub fn len(&self, sequence: SequenceId) -> Result<usize> {
        Ok(self.sequence(sequence)?.len)
    }

    /// Returns the positions of a sequence that are stored: all but the released ones.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn stored(&self, sequence: SequenceId) -> Result<Range<usize>> {
        let stored = self.sequence(sequence)?;
        Ok(stored.released * self.page_size..stored.len)
    }

    /// Returns the pages of a sequence that were not released, in the order of their positions.
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn pages_of(&self, sequence: SequenceId) -> Result<&[u32]> {
        let stored = self.sequence(sequence)?;
        Ok(&stored.pages[stored.released..])
    }

    /// Returns the number of free pages that a sequence needs for more tokens in a step: the new ones, and one for the
    /// copy of a last page that it shares.
    ///
    /// # Errors
    /// As [`len`](Self::len), and for more positions than can be counted.
    pub fn pages_needed(&self, sequence: SequenceId, tokens: usize) -> Result<usize> {
        let stored = self.sequence(sequence)?;
        let Some(len) = stored.len.checked_add(tokens) else {
            bail!("[{OP}] {} positions and {tokens} more are too many to count", stored.len)
        };
        let new = len.div_ceil(self.page_size) - stored.pages.len();
        Ok(new + usize::from(self.copied_page(stored, tokens).is_some()))
    }

    /// Returns the number of free states that a sequence needs for more tokens in a step: 0 in a table without
    /// [states](Self::with_states).
    ///
    /// # Errors
    /// As [`len`](Self::len).
    pub fn states_needed(&self, sequence: SequenceId, tokens: usize) -> Result<usize> {
        self.sequence(sequence)?;
        Ok(self.states.as_ref().map_or(0, |states| states.stored_after(tokens).count()))
    }

    /// Returns the page that a sequence has to copy before it writes more tokens: a page with free positions that is
    /// shared or found by its tokens.
    pub(super) fn copied_page(&self, stored: &StoredSequence, tokens: usize) -> Option<u32> {
        if tokens == 0 || stored.len.is_multiple_of(self.page_size) {
            return None;
        }
        let last = stored.pages.last().copied()?;
        (self.allocator.references(last) > 1 || self.prefixes.has(last)).then_some(last)
    }

    /// Returns the sequence of a handle.
    pub(super) fn sequence(&self, id: SequenceId) -> Result<&StoredSequence> {
        if id.table != self.id {
            bail!("[{OP}] the sequence is of another table")
        }
        let slot = self.slots.get(id.slot).filter(|slot| slot.generation == id.generation);
        match slot.and_then(|slot| slot.sequence.as_ref()) {
            Some(sequence) => Ok(sequence),
            None => bail!("[{OP}] the sequence was freed, expected one that the table has"),
        }
    }

    pub(super) fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut StoredSequence> {
        self.sequence(id)?;
        match self.slots.get_mut(id.slot).and_then(|slot| slot.sequence.as_mut()) {
            Some(sequence) => Ok(sequence),
            None => bail!("[{OP}] the sequence was freed, expected one that the table has"),
        }
    }

    fn insert(&mut self, sequence: StoredSequence) -> SequenceId {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        slot.sequence = Some(sequence);
        SequenceId { table: self.id, slot: index, generation: slot.generation }
    }

    /// Releases pages of a sequence, from the last page on, so that the first ones, which more sequences begin
    /// with, are found for longer.
    fn release(&mut self, pages: &[u32]) {
        for &page in pages.iter().rev() {
            self.allocator.release(page, self.prefixes.has(page));
        }
    }
}

impl SequenceId {
    /// Returns the index of the slot of the sequence.
    pub(super) fn slot(self) -> usize {
        self.slot
    }
}
