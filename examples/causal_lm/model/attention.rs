//! The attention of a block, of any kind, what it reads and what it keeps.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, AttentionStatistics, DeltaCache, DeltaInput,
    GatedDeltaNet, MultiHeadAttention, MultiHeadLatentAttention, RopeConfig, RotaryEmbedding, StatisticsOptions,
    SumFunction,
};
use candle_core::{Result, Tensor, bail};

#[allow(clippy::large_enum_variant, reason = "a model has one for each block")]
pub enum Attention {
    MultiHead(MultiHeadAttention),
    Latent(MultiHeadLatentAttention),
    Linear(GatedDeltaNet),
}

/// What a block's attention keeps of earlier tokens.
pub enum Cache {
    Softmax(AttentionCache),
    Linear(DeltaCache),
}

impl Cache {
    /// How many tokens each sequence has; none before the first call.
    pub fn lens(&self) -> Vec<usize> {
        match self {
            Self::Softmax(cache) => cache.lens(),
            Self::Linear(cache) => cache.lens(),
        }
    }

    /// In bytes.
    pub fn memory(&self) -> usize {
        match self {
            Self::Softmax(cache) => cache.memory(),
            Self::Linear(cache) => cache.memory(),
        }
    }
}

/// What a call of a block's attention reads.
pub struct Input<'a> {
    xs: &'a Tensor,
    residual: Option<&'a Tensor>,
    sum: &'a SumFunction<'a>,
    mask: Option<&'a AttentionMask>,
    valid_lens: Option<&'a [usize]>,
    cache: Option<&'a mut Cache>,
}

impl<'a> Input<'a> {
    /// `sum` is over processes.
    pub fn new(xs: &'a Tensor, residual: Option<&'a Tensor>, sum: &'a SumFunction<'a>) -> Self {
        Self { xs, residual, sum, mask: None, valid_lens: None, cache: None }
    }

    /// Of a call without a cache: padding, on the right, which linear attention needs not know of.
    pub fn with_mask(self, mask: &'a AttentionMask) -> Self {
        Self { mask: Some(mask), ..self }
    }

    /// Right padding of a call with a cache.
    pub fn with_valid_lens(self, valid_lens: &'a [usize]) -> Self {
        Self { valid_lens: Some(valid_lens), ..self }
    }

    pub fn with_cache(self, cache: &'a mut Cache) -> Self {
        Self { cache: Some(cache), ..self }
    }

    /// For softmax attention.
    pub fn softmax(self) -> Result<AttentionInput<'a>> {
        let mut input = AttentionInput::new(self.xs).with_sum(self.sum);
        if let Some(residual) = self.residual {
            input = input.with_residual(residual);
        }
        if let Some(mask) = self.mask {
            input = input.with_mask(mask);
        }
        if let Some(valid_lens) = self.valid_lens {
            input = input.with_valid_lens(valid_lens);
        }
        match self.cache {
            Some(Cache::Softmax(cache)) => Ok(input.with_cache(cache)),
            Some(Cache::Linear(_)) => {
                bail!("[causal_lm] a layer of softmax attention got the cache of linear attention")
            }
            None => Ok(input),
        }
    }

    fn linear(self) -> Result<DeltaInput<'a>> {
        let mut input = DeltaInput::new(self.xs);
        if let Some(residual) = self.residual {
            input = input.with_residual(residual);
        }
        if let Some(valid_lens) = self.valid_lens {
            input = input.with_valid_lens(valid_lens);
        }
        match self.cache {
            Some(Cache::Linear(cache)) => Ok(input.with_cache(cache)),
            Some(Cache::Softmax(_)) => {
                bail!("[causal_lm] a layer of linear attention got the cache of softmax attention")
            }
            None => Ok(input),
        }
    }
}

impl Attention {
    /// The layer with the rotary tables of an earlier one that has the same, or with its own, which are then among
    /// `tables`.
    pub fn sharing(self, tables: &mut Vec<RotaryEmbedding>) -> Result<Self> {
        let Some((rope, width)) = self.rope() else { return Ok(self) };
        let known = tables.iter().find(|table| table.config() == rope && table.head_dim() == width).cloned();
        let table = match known {
            Some(table) => table,
            None => {
                tables.push(RotaryEmbedding::new(rope, width)?);
                tables[tables.len() - 1].clone()
            }
        };
        Ok(match self {
            Self::MultiHead(attention) => Self::MultiHead(attention.with_rotary(table)?),
            Self::Latent(attention) => Self::Latent(attention.with_rotary(table)?),
            Self::Linear(_) => self,
        })
    }

    /// Rotary positions, and the width of the heads that they rotate.
    pub fn rope(&self) -> Option<(&RopeConfig, usize)> {
        match self {
            Self::MultiHead(attention) => attention.config().rope().map(|rope| (rope, attention.config().head_dim())),
            Self::Latent(attention) if attention.config().rotates() => {
                Some((attention.config().rope(), attention.config().rope_head_dim()))
            }
            Self::Latent(_) | Self::Linear(_) => None,
        }
    }

    pub fn is_linear(&self) -> bool {
        matches!(self, Self::Linear(_))
    }

    /// An empty cache; `config` is told the layer's own where it keeps keys and values.
    pub fn cache(&self, config: impl Fn(AttentionCacheConfig) -> AttentionCacheConfig) -> Result<Cache> {
        let own = match self {
            Self::MultiHead(attention) => AttentionCacheConfig::for_layer(attention.config()),
            Self::Latent(_) => AttentionCacheConfig::new(),
            Self::Linear(_) => return Ok(Cache::Linear(DeltaCache::default())),
        };
        AttentionCache::new(&config(own)).map(Cache::Softmax)
    }

    pub fn forward(&self, input: Input) -> Result<Tensor> {
        match self {
            Self::Linear(net) => net.forward_with(input.linear()?),
            _ => self.forward_softmax(input.softmax()?),
        }
    }

    /// [`forward`](Self::forward) of a layer that has softmax attention.
    pub fn forward_softmax(&self, input: AttentionInput) -> Result<Tensor> {
        match self {
            Self::MultiHead(attention) => attention.forward_with(input),
            Self::Latent(attention) => attention.forward_with(input),
            Self::Linear(_) => bail!("[causal_lm] a layer has linear attention, expected softmax attention in all"),
        }
    }

    /// Statistics of the weights too, where there are any: of softmax attention.
    pub fn forward_with_statistics(
        &self,
        input: Input,
        wanted: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)> {
        match self {
            Self::MultiHead(attention) => attention.forward_with_statistics(input.softmax()?, wanted),
            Self::Latent(attention) => attention.forward_with_statistics(input.softmax()?, wanted),
            Self::Linear(_) => bail!("[causal_lm] linear attention has no weights, expected softmax attention"),
        }
    }

    pub fn num_heads(&self) -> usize {
        match self {
            Self::MultiHead(attention) => attention.config().num_heads(),
            Self::Latent(attention) => attention.config().num_heads(),
            Self::Linear(net) => net.config().num_heads(),
        }
    }
}
