//! Edits of the batch of a cache between calls: sequences that end, come, change places or continue twice.

use std::ops::Range;

use candle_core::{Result, bail};

use super::storage::{KvBuffers, Room, StoredRows};
use super::{AttentionCache, EarlierPadding, OP};

impl AttentionCache {
    /// Replaces sequence n of the batch by sequence `sequences[n]`, as beam search does between its steps. A sequence
    /// may occur several times or not at all, and the batch may grow or shrink. An empty list is a
    /// [`reset`](Self::reset).
    ///
    /// If the number of sequences stays the same, sequences with the same index as before are not copied, and the
    /// others are copied twice. With another number, all sequences are copied to new buffers.
    ///
    /// # Errors
    /// For a sequence that the cache does not have, and for buffers that do not fit in memory. An error does not change
    /// the cache.
    #[doc(alias = "reorder_cache")]
    pub fn reorder(&mut self, sequences: &[usize]) -> Result<()> {
        if let Some(sequence) = sequences.iter().find(|&&sequence| sequence >= self.stored.len()) {
            bail!(
                "[{OP}] an entry of the order is {sequence}, expected one of the cache's {} sequences",
                self.stored.len()
            )
        }
        if sequences.is_empty() {
            self.reset();
            return Ok(());
        }
        if sequences.len() == self.stored.len() {
            return self.select_in_place(sequences);
        }
        if let Some(buffers) = &self.buffers {
            let rows: Vec<_> = sequences.iter().map(|&from| self.rows_of_sequence(from)).collect();
            let room = Room { sequences: sequences.len(), ..buffers.room() };
            self.buffers = Some(buffers.gather(&rows, room)?);
        }
        self.select_lengths(sequences);
        Ok(())
    }

    /// Removes a sequence from the batch, such as one that has ended. Later sequences move one place down, as with
    /// [`Vec::remove`]. Removing the only sequence is a [`reset`](Self::reset).
    ///
    /// Copies the later sequences, twice. The memory of one sequence stays allocated for the next one to
    /// [`join`](Self::join); [`fork`](Self::fork) makes a cache without it.
    ///
    /// ```
    /// use candle_attention::{AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true);
    /// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let zeros = |b, t| Tensor::zeros((b, t, 64), DType::F32, &Device::Cpu);
    /// let mut cache = AttentionCache::default();
    /// mha.forward_with(AttentionInput::new(&zeros(3, 5)?).with_cache(&mut cache))?;
    /// cache.remove(1)?;
    /// assert_eq!(cache.lens(), [5, 5]);
    ///
    /// // The prompt of a new sequence runs in another cache.
    /// let mut prompt = AttentionCache::default();
    /// mha.forward_with(AttentionInput::new(&zeros(1, 9)?).with_cache(&mut prompt))?;
    /// cache.join(&prompt)?;
    /// mha.forward_with(AttentionInput::new(&zeros(3, 1)?).with_cache(&mut cache))?;
    /// assert_eq!(cache.lens(), [6, 6, 10]);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For a sequence that the cache does not have, and for copies that do not fit in memory. An error does not change
    /// the cache.
    pub fn remove(&mut self, sequence: usize) -> Result<()> {
        self.check_sequence(sequence)?;
        let others: Vec<_> = (0..self.stored.len()).filter(|&other| other != sequence).collect();
        self.select_in_place(&others)
    }

    /// Removes a sequence from the batch, and puts the last sequence into its place, as [`Vec::swap_remove`] does. It
    /// is [`remove`](Self::remove) with a copy of one sequence only.
    ///
    /// # Errors
    /// As [`remove`](Self::remove).
    pub fn swap_remove(&mut self, sequence: usize) -> Result<()> {
        self.check_sequence(sequence)?;
        let mut others: Vec<_> = (0..self.stored.len()).collect();
        others.swap_remove(sequence);
        self.select_in_place(&others)
    }

    /// Adds the sequences of another cache of the same layer after the present ones, with their lengths: the next call
    /// has them as the last sequences of its batch. The other cache does not change. [`remove`](Self::remove) has an
    /// example.
    ///
    /// If the memory of removed sequences is large enough, only the sequences of the other cache are copied. Otherwise
    /// all sequences of both caches are copied to new buffers. A sliding cache takes the last positions, up to the
    /// number that it stores.
    ///
    /// # Errors
    /// For a cache whose keys or values have other sizes, another dtype or another device, or are stored in another
    /// format, for more positions than a cache without growth may store, and for buffers that do not fit in memory. An
    /// error does not change the cache.
    pub fn join(&mut self, other: &Self) -> Result<()> {
        let Some(added) = other.buffers.as_ref().filter(|_| !other.stored.is_empty()) else { return Ok(()) };
        self.check_format(other, added)?;
        let kept = self.rows_to_join(other)?;
        let count = self.stored.len();
        let order = self.row_order();
        let longest = order.longest(&self.stored).max(order.longest(&kept));
        let needed = Room { sequences: count + kept.len(), positions: longest };
        let present = self.buffers.as_ref().filter(|buffers| buffers.accepts(added));
        let joined = self.reserve(present, added, &order.rows_of(&self.stored, &self.stored), needed)?;
        for (n, rows) in order.rows_of(&other.stored, &kept).iter().enumerate() {
            joined.write_stored(count + n, added, rows)?;
        }
        if self.positions.is_some() || other.positions.is_some() {
            let mut positions = self.positions_of(&self.lens());
            positions.extend(other.positions_of(&other.lens()));
            self.positions = Some(positions);
        }
        self.buffers = Some(joined);
        self.stored.extend(kept);
        self.dtype = other.dtype;
        self.padding = EarlierPadding {
            is_stored: self.padding.is_stored || other.padding.is_stored,
            is_left_out: self.padding.is_left_out || other.padding.is_left_out,
        };
        Ok(())
    }

    /// Returns a copy of the cache with the same sequences. Later calls with one of the two do not change the other.
    ///
    /// # Errors
    /// For buffers that do not fit in memory.
    pub fn fork(&self) -> Result<Self> {
        let buffers = match &self.buffers {
            Some(buffers) if !self.stored.is_empty() => Some(buffers.first_sequences(self.stored.len())?.copy()?),
            _ => None,
        };
        Ok(Self {
            config: self.config.clone(),
            buffers,
            stored: self.stored.clone(),
            positions: self.positions.clone(),
            dtype: self.dtype,
            padding: self.padding,
        })
    }

    /// Replaces sequence n by sequence `sequences[n]` in the present buffers, which have memory for all of them.
    fn select_in_place(&mut self, sequences: &[usize]) -> Result<()> {
        if sequences.is_empty() {
            self.reset();
            return Ok(());
        }
        if let Some(buffers) = &self.buffers {
            // All sequences are read before the first is overwritten.
            let mut copies = Vec::new();
            for (n, &from) in sequences.iter().enumerate() {
                let StoredRows { rows, .. } = self.rows_of_sequence(from);
                if n != from && !rows.is_empty() {
                    copies.push((n, buffers.rows_of_sequence(from, &rows)?.copy()?));
                }
            }
            for (n, copy) in copies {
                buffers.write_sequence(n, 0, &copy)?;
            }
        }
        self.select_lengths(sequences);
        Ok(())
    }

    /// Replaces the length and the positions of sequence n by the ones of sequence `sequences[n]`.
    fn select_lengths(&mut self, sequences: &[usize]) {
        self.stored = sequences.iter().map(|&sequence| self.stored[sequence].clone()).collect();
        if let Some(positions) = &mut self.positions {
            *positions = sequences.iter().map(|&sequence| positions[sequence].clone()).collect();
        }
    }

    /// Returns the rows of the buffers that store a sequence.
    fn rows_of_sequence(&self, sequence: usize) -> StoredRows {
        self.row_order().all(sequence, &self.stored[sequence])
    }

    fn check_sequence(&self, sequence: usize) -> Result<()> {
        let count = self.stored.len();
        if sequence >= count {
            bail!("[{OP}] the sequence is {sequence}, expected one of the cache's {count} sequences")
        }
        Ok(())
    }

    /// Checks that keys and values of another cache fit this one.
    fn check_format(&self, other: &Self, added: &KvBuffers) -> Result<()> {
        if let (Some(own), Some(found)) = (self.dtype, other.dtype)
            && own != found
        {
            bail!("[{OP}] the keys of the other cache have dtype {found:?}, expected {own:?} as in the calls before")
        }
        let (found_sinks, own_sinks) = (other.config.sink_tokens(), self.config.sink_tokens());
        if found_sinks != own_sinks {
            bail!("[{OP}] the other cache keeps {found_sinks} sink tokens, expected {own_sinks} as this one")
        }
        let format = added.format();
        if let Some(dtype) = other.dtype
            && format != self.format(dtype)
        {
            bail!("[{OP}] the other cache stores {format}, expected {} as this one", self.format(dtype))
        }
        if let Some(buffers) = &self.buffers
            && !self.stored.is_empty()
            && !buffers.accepts(added)
        {
            let found = added.first_sequences(other.stored.len())?.shapes();
            let own = buffers.first_sequences(self.stored.len())?.shapes();
            bail!(
                "[{OP}] keys {} and values {} of the other cache do not fit this one, which has {} and {}",
                found.keys,
                found.values,
                own.keys,
                own.values
            )
        }
        Ok(())
    }

    /// Returns the positions of each sequence of another cache that this one stores.
    fn rows_to_join(&self, other: &Self) -> Result<Vec<Range<usize>>> {
        let limit = self.config.most_held().unwrap_or(usize::MAX);
        let order = self.row_order();
        let too_long = other.stored.iter().position(|stored| order.count(stored) > limit);
        if let Some(sequence) = too_long
            && self.config.window().is_none()
        {
            bail!(
                "[{OP}] sequence {sequence} of the other cache has {} positions, expected at most the capacity of \
                 {limit}",
                order.count(&other.stored[sequence])
            )
        }
        Ok(self.last_stored(&other.stored))
    }
}
