//! The attention of a block, of any kind, with its inputs and caches.

use std::cell::RefCell;
use std::rc::Rc;

use candle_attention::{
    AllReduce, AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, AttentionStatistics, ChosenKeys,
    CompressedKeyAttention, CompressedKeyCache, CompressedKeyInput, DeltaCache, DeltaInput, DeltaPool, GatedDeltaNet,
    KvPool, KvPoolConfig, MultiHeadAttention, MultiHeadLatentAttention, OutputWithChoice, PageTable, PagedTokens,
    RopeConfig, RotaryEmbedding, StatisticsOptions,
};
use candle_core::{Device, Error, Result, Tensor, bail};

#[allow(clippy::large_enum_variant, reason = "a model has one for each block")]
pub enum Attention {
    MultiHead(MultiHeadAttention),
    /// Latent attention, and the keys that layers share, if some layers attend to the keys that others chose.
    Latent(MultiHeadLatentAttention, Option<LastChoice>),
    /// Attention to compressed keys.
    Compressed(CompressedKeyAttention),
    Linear(GatedDeltaNet),
}

/// The keys that the last layer with an indexer chose in a call, which the layers of a model share.
pub type LastChoice = Rc<RefCell<ChosenKeys>>;

/// The cache of a block's attention.
pub enum Cache {
    Softmax(AttentionCache),
    Compressed(CompressedKeyCache),
    Linear(DeltaCache),
}

impl Cache {
    /// Returns the number of tokens of each sequence; empty before the first call.
    pub fn lens(&self) -> Vec<usize> {
        match self {
            Self::Softmax(cache) => cache.lens(),
            Self::Compressed(cache) => cache.lens(),
            Self::Linear(cache) => cache.lens(),
        }
    }

    /// Drops all tokens.
    pub fn reset(&mut self) {
        match self {
            Self::Softmax(cache) => cache.reset(),
            Self::Compressed(cache) => cache.reset(),
            Self::Linear(cache) => cache.reset(),
        }
    }

    /// Returns the size in bytes.
    pub fn memory(&self) -> usize {
        match self {
            Self::Softmax(cache) => cache.memory(),
            Self::Compressed(cache) => cache.memory(),
            Self::Linear(cache) => cache.memory(),
        }
    }
}

/// The pool of a block's attention, for sequences in pages.
pub enum Pool {
    Softmax(KvPool),
    Linear(DeltaPool),
}

impl Pool {
    /// Returns the size in bytes.
    pub fn memory(&self) -> usize {
        match self {
            Self::Softmax(pool) => pool.memory(),
            Self::Linear(pool) => pool.memory(),
        }
    }
}

/// The input of a block's attention.
pub enum Input<'a> {
    Softmax(AttentionInput<'a>),
    Compressed(CompressedKeyInput<'a>),
    Linear(DeltaInput<'a>),
}

impl<'a> Input<'a> {
    /// Sets the mask of a call without a cache. It describes padding on the right, which linear attention and attention
    /// to compressed keys can ignore.
    pub fn with_mask(self, mask: &'a AttentionMask) -> Self {
        match self {
            Self::Softmax(input) => Self::Softmax(input.with_mask(mask)),
            own @ (Self::Compressed(_) | Self::Linear(_)) => own,
        }
    }

    /// Sets the valid lengths of a call with a cache, for padding on the right.
    pub fn with_valid_lens(self, valid_lens: &'a [usize]) -> Self {
        match self {
            Self::Softmax(input) => Self::Softmax(input.with_valid_lens(valid_lens)),
            Self::Compressed(input) => Self::Compressed(input.with_valid_lens(valid_lens)),
            Self::Linear(input) => Self::Linear(input.with_valid_lens(valid_lens)),
        }
    }

    pub fn with_cache(self, cache: &'a mut Cache) -> Result<Self> {
        match (self, cache) {
            (Self::Softmax(input), Cache::Softmax(cache)) => Ok(Self::Softmax(input.with_cache(cache))),
            (Self::Compressed(input), Cache::Compressed(cache)) => Ok(Self::Compressed(input.with_cache(cache))),
            (Self::Linear(input), Cache::Linear(cache)) => Ok(Self::Linear(input.with_cache(cache))),
            (input, _) => Err(input.error_about("cache")),
        }
    }

    /// Sets the pages of a call, whose input is (total, E).
    pub fn with_pages(self, pool: &'a Pool, step: &'a PagedTokens) -> Result<Self> {
        match (self, pool) {
            (Self::Softmax(input), Pool::Softmax(pool)) => Ok(Self::Softmax(input.with_pages(pool, step))),
            (Self::Linear(input), Pool::Linear(pool)) => Ok(Self::Linear(input.with_pages(pool, step))),
            (input, _) => Err(input.error_about("pool")),
        }
    }

    /// Returns the error of a layer that got the cache or the pool of another kind of attention.
    fn error_about(&self, what: &str) -> Error {
        let name = self.name();
        Error::msg(format!("[causal_lm] a layer of {name} got the {what} of another kind of attention")).bt()
    }

    /// Returns the kind of attention of a layer with such an input.
    fn name(&self) -> &'static str {
        match self {
            Self::Softmax(_) => "softmax attention",
            Self::Compressed(_) => "attention to compressed keys",
            Self::Linear(_) => "linear attention",
        }
    }

    /// Returns the input of softmax attention.
    pub fn softmax(self) -> Result<AttentionInput<'a>> {
        match self {
            Self::Softmax(input) => Ok(input),
            other => bail!("[causal_lm] a layer has {}, expected softmax attention in all", other.name()),
        }
    }
}

impl Attention {
    /// Makes the input of a call; `sum` is the sum over ranks. Models with attention to compressed keys have streams
    /// instead of a residual, and run on one rank.
    pub fn input<'a>(&self, xs: &'a Tensor, residual: Option<&'a Tensor>, sum: &'a AllReduce<'a>) -> Input<'a> {
        if let Self::Compressed(_) = self {
            return Input::Compressed(CompressedKeyInput::new(xs));
        }
        match (self.is_linear(), residual) {
            (true, Some(residual)) => Input::Linear(DeltaInput::new(xs).with_residual(residual)),
            (true, None) => Input::Linear(DeltaInput::new(xs)),
            (false, Some(residual)) => {
                Input::Softmax(AttentionInput::new(xs).with_all_reduce(sum).with_residual(residual))
            }
            (false, None) => Input::Softmax(AttentionInput::new(xs).with_all_reduce(sum)),
        }
    }

    /// Shares the rotary tables of an earlier layer with the same config, or adds this layer's to `tables`.
    pub fn sharing(self, tables: &mut Vec<RotaryEmbedding>) -> Result<Self> {
        let Some((rope, width)) = self.rope() else { return Ok(self) };
        let known = tables.iter().find(|table| table.config() == rope && table.head_dim() == width).cloned();
        let table = known.map_or_else(|| RotaryEmbedding::new(rope, width), Ok)?;
        tables.push(table.clone());
        Ok(match self {
            Self::MultiHead(attention) => Self::MultiHead(attention.with_rotary(table)?),
            Self::Latent(attention, choice) => Self::Latent(attention.with_rotary(table)?, choice),
            Self::Compressed(attention) => Self::Compressed(attention.with_rotary(table)?),
            Self::Linear(_) => self,
        })
    }

    /// Returns the rotary config, and the head dimension that it rotates.
    pub fn rope(&self) -> Option<(&RopeConfig, usize)> {
        match self {
            Self::MultiHead(attention) => attention.config().rope().map(|rope| (rope, attention.config().head_dim())),
            Self::Latent(attention, _) if attention.config().rotates() => {
                Some((attention.config().rope(), attention.config().rope_head_dim()))
            }
            Self::Compressed(attention) => Some((&attention.config().rope, attention.config().rope_head_dim)),
            Self::Latent(..) | Self::Linear(_) => None,
        }
    }

    /// Returns the kind of attention.
    fn name(&self) -> &'static str {
        match self {
            Self::MultiHead(_) | Self::Latent(..) => "softmax attention",
            Self::Compressed(_) => "attention to compressed keys",
            Self::Linear(_) => "linear attention",
        }
    }

    pub fn is_linear(&self) -> bool {
        matches!(self, Self::Linear(_))
    }

    /// Makes an empty cache. `config` can change the config of a cache of keys and values.
    pub fn cache(&self, config: impl Fn(AttentionCacheConfig) -> AttentionCacheConfig) -> Result<Cache> {
        let own = match self {
            Self::MultiHead(attention) => AttentionCacheConfig::for_layer(attention.config()),
            Self::Latent(..) => AttentionCacheConfig::new(),
            Self::Compressed(_) => {
                let wanted = config(AttentionCacheConfig::new());
                let is_changed = wanted.dtype().is_some() || wanted.codes().is_some() || wanted.window().is_some();
                if is_changed || wanted.sink_tokens() > 0 {
                    bail!(
                        "[causal_lm] a layer attends to compressed keys, expected a cache with the dtype and the window \
                         of the layer, found other options"
                    )
                }
                return Ok(Cache::Compressed(CompressedKeyCache::default()));
            }
            Self::Linear(_) => return Ok(Cache::Linear(DeltaCache::default())),
        };
        AttentionCache::new(&config(own)).map(Cache::Softmax)
    }

    /// Makes the pool of this layer for the pages and states of a table; the layer has the number `layer` in errors.
    /// `config` can change the config of a pool of keys and values.
    ///
    /// # Errors
    /// For attention that does not read keys and values in pages, with the reason, and if the pool does not fit in
    /// memory.
    pub fn pool(
        &self,
        layer: usize,
        table: &PageTable,
        device: &Device,
        config: impl Fn(KvPoolConfig) -> KvPoolConfig,
    ) -> Result<Pool> {
        let own = match self {
            Self::Linear(net) => return DeltaPool::new(net, table).map(Pool::Linear),
            Self::Compressed(_) => {
                bail!("[pages] layer {layer} of the model attends to compressed keys, which have no pages")
            }
            Self::Latent(attention, _) => KvPoolConfig::for_latent_layer(attention.config(), table),
            Self::MultiHead(attention) => {
                let cfg = attention.config();
                if cfg.content_positions().is_some() {
                    bail!(
                        "[pages] layer {layer} of the model has content-based relative positions, which are not \
                         supported with pages"
                    )
                }
                KvPoolConfig::for_layer(cfg, table)
            }
        };
        KvPool::new(&config(own), device).map(Pool::Softmax)
    }

    /// Returns the number of keys that a query attends to at most: of softmax attention with a window, and 0 of linear
    /// attention, which reads a state; `None` for all keys.
    pub fn window(&self) -> Option<usize> {
        match self {
            Self::MultiHead(attention) => attention.config().window(),
            Self::Latent(attention, _) => attention.config().window(),
            Self::Compressed(attention) => {
                let cfg = attention.config();
                if cfg.compression.is_none() { Some(cfg.window) } else { None }
            }
            Self::Linear(_) => Some(0),
        }
    }

    pub fn forward(&self, input: Input) -> Result<Tensor> {
        match (self, input) {
            (Self::MultiHead(attention), input) => attention.forward_with(input.softmax()?),
            (Self::Latent(attention, None), input) => attention.forward_with(input.softmax()?),
            (Self::Latent(attention, Some(choice)), input) => {
                let before = choice.take();
                let own = with_choice(attention, input.softmax()?, &before);
                let OutputWithChoice { output, chosen } = attention.forward_with_choice(own)?;
                choice.replace(chosen);
                Ok(output)
            }
            (Self::Compressed(attention), Input::Compressed(input)) => attention.forward_with(input),
            (Self::Linear(net), Input::Linear(input)) => net.forward_with(input),
            (Self::Compressed(_) | Self::Linear(_), input) => {
                bail!("[causal_lm] a layer has {}, expected {} in all", self.name(), input.name())
            }
        }
    }

    /// Computes the output and the statistics of the attention weights of softmax attention.
    pub fn forward_with_statistics(
        &self,
        input: Input,
        wanted: &StatisticsOptions,
    ) -> Result<(Tensor, AttentionStatistics)> {
        match self {
            Self::MultiHead(attention) => attention.forward_with_statistics(input.softmax()?, wanted),
            Self::Latent(attention, None) => attention.forward_with_statistics(input.softmax()?, wanted),
            Self::Latent(attention, Some(choice)) => {
                let before = choice.take();
                let own = with_choice(attention, input.softmax()?, &before);
                let (found, statistics) = attention.forward_with_choice_and_statistics(own, wanted)?;
                choice.replace(found.chosen);
                Ok((found.output, statistics))
            }
            Self::Compressed(_) => bail!(
                "[causal_lm] attention to compressed keys returns no weights, expected attention to keys of tokens"
            ),
            Self::Linear(_) => bail!("[causal_lm] linear attention has no weights, expected softmax attention"),
        }
    }

    pub fn num_heads(&self) -> usize {
        match self {
            Self::MultiHead(attention) => attention.config().num_heads(),
            Self::Latent(attention, _) => attention.config().num_heads(),
            Self::Compressed(attention) => attention.config().num_heads,
            Self::Linear(net) => net.config().num_value_heads(),
        }
    }
}

/// Returns the input of a layer, with the keys that the layer before it chose if the layer attends to these.
fn with_choice<'a>(
    attention: &MultiHeadLatentAttention,
    input: AttentionInput<'a>,
    before: &'a ChosenKeys,
) -> AttentionInput<'a> {
    if attention.config().shared_choice() { input.with_chosen_keys(before) } else { input }
}
