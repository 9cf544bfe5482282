//! The config of a [`KvPool`](crate::KvPool): its sizes, and the format of keys and values.

use candle_attention_call::KvCodeFormat;
use candle_core::{DType, Result, bail};

use super::table::PageTable;
use crate::cache::{KvSizes, StorageFormat};
use crate::config::MultiHeadAttentionConfig;
use candle_attention_modules::base::{FLOATS, number};

pub(super) const OP: &str = "kv_pool";

/// The config of a [`KvPool`](crate::KvPool): the sizes of a layer's keys and values, the pages of a table, and the
/// format in which they are stored. Every `with_*` method changes one option and returns the config.
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub struct KvPoolConfig {
    pub(super) sizes: KvSizes,
    pub(super) table: u64,
    pub(super) pages: usize,
    pub(super) page_size: usize,
    dtype: DType,
    codes: Option<KvCodeFormat>,
    pub(super) detached: bool,
    /// Whether the values are the first columns of the keys, which are then latents.
    pub(super) is_latent: bool,
}

impl KvPoolConfig {
    /// Returns the config of a pool of the pages of a table, for keys and values of `num_kv_heads` heads of `head_dim`
    /// numbers in F32.
    pub fn new(num_kv_heads: usize, head_dim: usize, table: &PageTable) -> Self {
        Self {
            sizes: KvSizes { h_kv: num_kv_heads, d: head_dim, d_v: head_dim },
            table: table.id,
            pages: table.pages(),
            page_size: table.page_size(),
            dtype: DType::F32,
            codes: None,
            detached: false,
            is_latent: false,
        }
    }

    /// Returns the config of the pool of a layer of multi-head attention.
    /// [`for_latent_layer`](Self::for_latent_layer) is for latent attention.
    /// After each key it has an equal part of the key of an indexer, if the layer has one, as an
    /// [`AttentionCache`](crate::AttentionCache) of the layer does.
    pub fn for_layer(cfg: &MultiHeadAttentionConfig, table: &PageTable) -> Self {
        let key_width = cfg.head_dim().saturating_add(cfg.index_columns());
        Self::new(cfg.num_kv_heads(), key_width, table).with_value_head_dim(cfg.value_head_dim())
    }

    /// Returns the config of a pool of latents of `width` numbers, whose first `value_width` numbers are the values
    /// too.
    pub(crate) fn for_latents(width: usize, value_width: usize, table: &PageTable) -> Self {
        Self { is_latent: true, ..Self::new(1, width, table).with_value_head_dim(value_width) }
    }

    /// Sets the head dimension of values, which is that of keys by default.
    pub fn with_value_head_dim(mut self, value_head_dim: usize) -> Self {
        self.sizes.d_v = value_head_dim;
        self
    }

    /// Sets the dtype in which keys and values are stored: F32, BF16, F16 or F64. Attention is computed in it, and its
    /// output is converted to the dtype of the queries. The default is F32.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }

    /// Sets the format of keys and values that are stored as codes: what [`with_q8`](Self::with_q8),
    /// [`with_e4m3`](Self::with_e4m3) and [`with_q4`](Self::with_q4) set. By default they are stored as floats.
    pub fn with_codes(mut self, codes: impl Into<Option<KvCodeFormat>>) -> Self {
        self.codes = codes.into();
        self
    }

    /// Sets that keys and values are stored in 8 bits a number and an f32 scale for each row of a head, as
    /// [`AttentionCacheConfig::with_q8`](crate::AttentionCacheConfig::with_q8) describes. The dtype has no effect then.
    #[doc(alias("quantize", "int8"))]
    pub fn with_q8(self) -> Self {
        self.with_codes(KvCodeFormat::Q8)
    }

    /// Sets that keys and values are stored as floats of 8 bits and an f32 scale for each row of a head, as
    /// [`AttentionCacheConfig::with_e4m3`](crate::AttentionCacheConfig::with_e4m3) describes.
    #[doc(alias("fp8", "float8"))]
    pub fn with_e4m3(self) -> Self {
        self.with_codes(KvCodeFormat::E4M3)
    }

    /// Sets that keys and values are stored in 4 bits a number and an f32 scale for each group, as
    /// [`AttentionCacheConfig::with_q4`](crate::AttentionCacheConfig::with_q4) describes.
    #[doc(alias("quantize", "int4"))]
    pub fn with_q4(self) -> Self {
        self.with_codes(KvCodeFormat::Q4)
    }

    /// Sets whether gradients end at the pool: queries, keys and values are detached, for generation with a layer whose
    /// weights are variables. The default is no: a key that is tracked for gradients is an error, since a pool would
    /// lose its gradient.
    pub fn with_detached(mut self, detached: bool) -> Self {
        self.detached = detached;
        self
    }

    /// Returns the format in which keys and values are stored.
    pub(super) fn format(&self) -> StorageFormat {
        match self.codes {
            Some(codes) => StorageFormat::Codes(codes),
            None => StorageFormat::Floats(self.dtype),
        }
    }

    /// Checks that every option is in its range.
    pub(super) fn validate(&self) -> Result<()> {
        let KvSizes { h_kv, d, d_v } = self.sizes;
        number::size(OP, "num_kv_heads", h_kv)?;
        number::size(OP, "head_dim", d)?;
        number::size(OP, "value_head_dim", d_v)?;
        self.format().check_widths(OP, d, d_v)?;
        if self.is_latent {
            if d_v > d {
                bail!("[{OP}] value_head_dim is {d_v}, expected at most the {d} numbers of the latents")
            }
            self.format().check_latents(OP, d, d_v)?;
        }
        if self.codes.is_none() && !FLOATS.contains(&self.dtype) {
            bail!("[{OP}] dtype is {:?}, expected F32, F16, BF16 or F64", self.dtype)
        }
        Ok(())
    }
}
