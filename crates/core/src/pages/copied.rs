//! The sequences of a step as a cache: a copy of their keys and values, for calls that no kernel computes from pages.

use std::ops::Range;

use candle_core::{D, DType, Result, Tensor, bail};

use super::config::OP;
use super::pool::{KvPool, PagedKeys, write_buffer};
use crate::cache::{AttentionCache, AttentionCacheConfig, Buffer, GatheredRows};

impl PagedKeys<'_> {
    /// Returns a cache with the stored positions of the step's sequences, for a layer whose keys have `key_dtype`:
    /// before the step, or with its tokens too.
    pub fn copied(&self, key_dtype: DType, with_new: bool) -> Result<AttentionCache> {
        self.pool.check_step(self.step)?;
        let config = self.pool.cache_config();
        let sequences = self.step.sequences();
        let mut stored = Vec::with_capacity(sequences.len());
        for (s, &before) in self.step.before().iter().enumerate() {
            let keys = sequences.keys(s);
            stored.push(keys.start..if with_new { keys.end } else { before });
        }
        if stored.iter().all(|positions| positions.is_empty()) {
            return AttentionCache::new(&config);
        }
        // The new tokens are written behind the stored ones.
        let capacity = (0..sequences.len()).map(|s| sequences.keys(s).len()).max().unwrap_or(0);
        let mut keys = Vec::with_capacity(stored.len());
        let mut values = Vec::with_capacity(stored.len());
        for (s, positions) in stored.iter().enumerate() {
            keys.push(self.rows_of(self.pool.keys(), s, positions.len(), capacity)?);
            values.push(self.rows_of(self.pool.values(), s, positions.len(), capacity)?);
        }
        let keys = joined(&keys)?;
        let values = if self.pool.is_latent() { None } else { Some(joined(&values)?) };
        let rows = GatheredRows { keys, values, d_v: self.pool.sizes().d_v, stored };
        AttentionCache::of_rows(&config, rows, key_dtype)
    }

    /// Returns the stored keys of sequence `s` of the step as floats, in the order of their positions: (1, H_kv, T_kv,
    /// D) in the pool's dtype, of codes in `dtype`. It copies them.
    ///
    /// # Errors
    /// If pages of the sequence were released.
    pub fn keys_of(&self, s: usize, dtype: DType) -> Result<Tensor> {
        let Range { start: first, end: len } = self.step.sequences().keys(s);
        if first > 0 {
            bail!("[{OP}] the pages before position {first} of a sequence were released, expected all of its pages")
        }
        self.rows_of(self.pool.keys(), s, len, len)?.floats(dtype)
    }

    /// Returns the columns of the stored keys of sequence `s` from column `first` on, as [`keys_of`](Self::keys_of)
    /// returns all of them; of codes in f32.
    ///
    /// # Errors
    /// As [`keys_of`](Self::keys_of).
    pub fn columns_of(&self, s: usize, first: usize) -> Result<Tensor> {
        let width = self.pool.sizes().d - first;
        let buffer = self.pool.keys();
        let sequences = self.step.sequences();
        let len = sequences.keys(s).end;
        if buffer.codes.is_some() || sequences.keys(s).start > 0 || len == 0 {
            return self.keys_of(s, DType::F32)?.narrow(3, first, width);
        }
        let columns = buffer.entries.narrow(3, first, width)?;
        let mut pages = Vec::with_capacity(len.div_ceil(self.step.page_size));
        for &page in &sequences.pages(s)[..len.div_ceil(self.step.page_size)] {
            pages.push(columns.narrow(0, page as usize, 1)?);
        }
        Tensor::cat(&pages, 0)?.flatten(0, 1)?.narrow(0, 0, len)?.transpose(0, 1)?.unsqueeze(0)
    }

    /// Returns the first `len` stored rows of sequence `s` as (1, H_kv, capacity, ..), with zeros after them.
    fn rows_of(&self, buffer: &Buffer, s: usize, len: usize, capacity: usize) -> Result<Buffer> {
        let page_size = self.step.page_size;
        let sequences = self.step.sequences();
        let first = sequences.keys(s).start / page_size;
        let own = &sequences.pages(s)[first..first + len.div_ceil(page_size)];
        buffer.try_map(|pool| {
            let (_, _, h_kv, width) = pool.dims4()?;
            if len == 0 || width == 0 {
                return Tensor::zeros((1, h_kv, capacity, width), pool.dtype(), pool.device());
            }
            let pages = Tensor::from_slice(own, own.len(), pool.device())?;
            let rows = pool.contiguous()?.index_select(&pages, 0)?.flatten(0, 1)?.narrow(0, 0, len)?;
            rows.transpose(0, 1)?.pad_with_zeros(1, 0, capacity - len)?.contiguous()?.unsqueeze(0)
        })
    }

    /// Stores the tokens of the step, which a cache has that continued [`copied`](Self::copied).
    pub fn write_from(&self, cache: &AttentionCache) -> Result<()> {
        let sequences = self.step.sequences();
        let mut keys = Vec::new();
        let mut values = Vec::new();
        for (s, &before) in self.step.before().iter().enumerate() {
            let new = before..sequences.keys(s).end;
            if let Some(rows) = cache.rows_of(s, &new)?.filter(|_| !new.is_empty()) {
                keys.push(rows.keys);
                values.extend(rows.values);
            }
        }
        if !keys.is_empty() {
            write_buffer(self.pool.keys(), &by_token(&keys)?, self.step)?;
        }
        if !values.is_empty() {
            write_buffer(self.pool.values(), &by_token(&values)?, self.step)?;
        }
        self.pool.stored_steps().add(self.step);
        Ok(())
    }
}

impl KvPool {
    /// Returns the config of a cache that stores keys and values as the pool does.
    fn cache_config(&self) -> AttentionCacheConfig {
        let config = AttentionCacheConfig::new().with_detached(self.config().detached);
        match &self.keys().codes {
            Some(codes) => config.with_codes(codes.format),
            None => config.with_dtype(self.keys().entries.dtype()),
        }
    }
}

/// Returns the rows (n, H_kv, ..) of several sequences (1, H_kv, ..).
fn joined(all: &[Buffer]) -> Result<Buffer> {
    Buffer::combined(all, |tensors| Tensor::cat(tensors, 0)?.contiguous())
}

/// Returns the rows (1, H_kv, n, width) of several sequences as the rows of all tokens, (total, H_kv, width).
fn by_token(all: &[Buffer]) -> Result<Buffer> {
    Buffer::combined(all, |tensors| Tensor::cat(tensors, D::Minus2)?.squeeze(0)?.transpose(0, 1)?.contiguous())
}
