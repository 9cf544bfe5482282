//! A model of layers with residuals, in pages and with caches.

use crate::program::EMBED_DIM;
use crate::*;

/// The number of token ids, which is small so that prompts begin alike.
pub const VOCAB: usize = 3;

/// The number of last tokens that a model with states can take back.
pub const DRAFTS: usize = 4;

pub fn base() -> Config {
    Config::new(EMBED_DIM, 4).with_num_kv_heads(2).with_head_dim(8).with_causal(true)
}

pub fn latent() -> LatentConfig {
    let cfg = LatentConfig::new(EMBED_DIM, 3).with_kv_lora_rank(48).with_nope_head_dim(16).with_rope_head_dim(4);
    cfg.with_value_head_dim(8).with_rope(RopeConfig::new(100.0)).with_q_lora_rank(8)
}

/// Returns a pool of a layer for the pages of a table.
pub fn pool_of(cfg: &Config, table: &PageTable) -> Result<KvPool> {
    KvPool::new(&KvPoolConfig::for_layer(cfg, table), &DEVICE)
}

/// The config of a layer.
#[allow(clippy::large_enum_variant, reason = "there are few of them")]
pub enum Kind {
    MultiHead(Config),
    Latent(LatentConfig),
    Linear(GatedDeltaNetConfig),
}

impl From<Config> for Kind {
    fn from(cfg: Config) -> Self {
        Self::MultiHead(cfg)
    }
}

#[allow(clippy::large_enum_variant, reason = "there are few of them")]
enum Mixer {
    MultiHead(MultiHeadAttention),
    Latent(MultiHeadLatentAttention),
    Linear(GatedDeltaNet),
}

impl Mixer {
    /// Returns whether the layer reads the keys and values of the layer before.
    fn shares(&self) -> bool {
        matches!(self, Self::MultiHead(layer) if layer.config().kv_sharing() == KvSharing::EarlierLayer)
    }
}

pub enum Pool {
    Softmax(KvPool),
    Linear(DeltaPool),
}

pub enum Cache {
    Softmax(AttentionCache),
    Linear(DeltaCache),
}

/// The tokens of a step or of a call, which may be the nodes of a tree.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    pub ids: &'a [u32],
    pub tree: Option<&'a TokenTree>,
}

impl Cache {
    /// Keeps some of the tokens that the only sequence has from position `len` on.
    pub fn keep(&mut self, len: usize, kept: &[usize]) -> Result<()> {
        match self {
            // A layer that reads an earlier layer's keys has an empty cache.
            Self::Softmax(cache) if cache.is_empty() => Ok(()),
            Self::Softmax(cache) => cache.keep(&[len], &[kept]),
            Self::Linear(cache) => cache.keep(&[len], &[kept]),
        }
    }

    pub fn fork(&self) -> Result<Self> {
        Ok(match self {
            Self::Softmax(cache) => Self::Softmax(cache.fork()?),
            Self::Linear(cache) => Self::Linear(cache.fork()?),
        })
    }
}

/// Layers with residuals, each of which has a pool or reads the pool of the layer before.
pub struct Model {
    layers: Vec<Mixer>,
    /// (VOCAB, E).
    embedding: Vec<Vec<f32>>,
    cache: AttentionCacheConfig,
    /// The mask of all calls of softmax attention.
    pub mask: AttentionMask,
}

impl Model {
    pub fn new(kinds: &[Kind], cache: AttentionCacheConfig) -> Result<Self> {
        let mut layers = Vec::new();
        for (seed, kind) in kinds.iter().enumerate() {
            let vb = TorchSeed::new(seed as u64).var_builder(DType::F32, &DEVICE);
            layers.push(match kind {
                Kind::MultiHead(cfg) => {
                    Mixer::MultiHead(with_bias(MultiHeadAttention::new(cfg, vb)?, DType::F32, &DEVICE)?.freeze()?)
                }
                Kind::Latent(cfg) => Mixer::Latent(MultiHeadLatentAttention::new(cfg, vb)?.freeze()?),
                Kind::Linear(cfg) => Mixer::Linear(GatedDeltaNet::new(cfg, vb)?.freeze()?),
            });
        }
        let random = &mut Random::new(5);
        let mut row = || (0..EMBED_DIM).map(|_| random.between(-1.0, 1.0) as f32).collect();
        let embedding = (0..VOCAB).map(|_| row()).collect();
        Ok(Self { layers, embedding, cache, mask: AttentionMask::none() })
    }

    /// Returns whether a layer has states.
    pub fn has_states(&self) -> bool {
        self.layers.iter().any(|layer| matches!(layer, Mixer::Linear(_)))
    }

    /// Returns a pool for each layer, empty for layers that share an earlier one's.
    pub fn pools(&self, table: &PageTable) -> Result<Vec<Pool>> {
        let dtype = self.cache.dtype().unwrap_or(DType::F32);
        let of_keys = |config: KvPoolConfig| {
            KvPool::new(&config.with_dtype(dtype).with_codes(self.cache.codes()), &DEVICE).map(Pool::Softmax)
        };
        let pool = |layer: &Mixer| match layer {
            Mixer::MultiHead(layer) => of_keys(KvPoolConfig::for_layer(layer.config(), table)),
            Mixer::Latent(layer) => of_keys(KvPoolConfig::for_latent_layer(layer.config(), table)),
            Mixer::Linear(layer) => DeltaPool::new(layer, table).map(Pool::Linear),
        };
        self.layers.iter().map(pool).collect()
    }

    pub fn caches(&self) -> Result<Vec<Cache>> {
        let cache = |layer: &Mixer| match layer {
            Mixer::MultiHead(_) | Mixer::Latent(_) => AttentionCache::new(&self.cache).map(Cache::Softmax),
            Mixer::Linear(_) => Ok(Cache::Linear(DeltaCache::with_drafts(DRAFTS))),
        };
        self.layers.iter().map(cache).collect()
    }

    /// Cuts the caches of a sequence to its first tokens, which are `ids`.
    pub fn truncate(&self, caches: &mut Vec<Cache>, ids: &[u32]) -> Result<()> {
        if self.has_states() {
            *caches = self.caches()?;
            if !ids.is_empty() {
                self.alone(caches, ids)?;
            }
            return Ok(());
        }
        for cache in caches {
            if let Cache::Softmax(cache) = cache {
                cache.truncate(if cache.is_empty() { 0 } else { ids.len() })?;
            }
        }
        Ok(())
    }

    pub fn embed(&self, ids: &[u32]) -> Result<Tensor> {
        let rows: Vec<f32> = ids.iter().flat_map(|&id| self.embedding[id as usize].clone()).collect();
        Tensor::from_vec(rows, (ids.len(), EMBED_DIM), &DEVICE)
    }

    /// Returns the outputs (total, E) of the first layers, `count` of them, for the tokens of a step.
    /// They may be the nodes of a tree.
    pub fn paged(&self, pools: &[Pool], step: &PagedTokens, tokens: Tokens, count: usize) -> Result<Tensor> {
        let Tokens { ids, tree } = tokens;
        let mut xs = self.embed(ids)?;
        for (n, layer) in self.layers.iter().enumerate().take(count) {
            let pool = if layer.shares() { &pools[n - 1] } else { &pools[n] };
            xs = match (layer, pool) {
                (Mixer::Linear(net), Pool::Linear(pool)) => {
                    let input = DeltaInput::new(&xs).with_residual(&xs).with_tree(tree);
                    net.forward_with(input.with_pages(pool, step))?
                }
                (_, Pool::Softmax(pool)) => {
                    let input = AttentionInput::new(&xs).with_residual(&xs).with_mask(&self.mask).with_tree(tree);
                    match layer {
                        Mixer::MultiHead(own) if layer.shares() => {
                            own.forward_with(input.with_shared_pages(pool, step))?
                        }
                        Mixer::MultiHead(own) => own.forward_with(input.with_pages(pool, step))?,
                        Mixer::Latent(own) => own.forward_with(input.with_pages(pool, step))?,
                        Mixer::Linear(_) => unreachable!("a pool is made for its layer"),
                    }
                }
                _ => unreachable!("a pool is made for its layer"),
            };
        }
        Ok(xs)
    }

    /// Returns the number of layers.
    pub fn depth(&self) -> usize {
        self.layers.len()
    }

    /// Returns the outputs (T, E) of the next tokens of one sequence in caches.
    pub fn alone(&self, caches: &mut [Cache], ids: &[u32]) -> Result<Tensor> {
        self.alone_with_tree(caches, Tokens { ids, tree: None })
    }

    /// Returns the outputs (T, E) of the next tokens of one sequence in caches, which may be the nodes of a tree.
    pub fn alone_with_tree(&self, caches: &mut [Cache], tokens: Tokens) -> Result<Tensor> {
        let Tokens { ids, tree } = tokens;
        let mut xs = self.embed(ids)?;
        for (n, layer) in self.layers.iter().enumerate() {
            let from = if layer.shares() { n - 1 } else { n };
            xs = match (layer, &mut caches[from]) {
                (Mixer::Linear(net), Cache::Linear(cache)) => {
                    let input = DeltaInput::new(&xs).with_residual(&xs).with_tree(tree);
                    net.forward_with(input.with_cache(cache))?
                }
                (_, Cache::Softmax(cache)) => {
                    let input = AttentionInput::new(&xs).with_residual(&xs).with_mask(&self.mask).with_tree(tree);
                    match layer {
                        Mixer::MultiHead(own) if layer.shares() => own.forward_with(input.with_shared_cache(cache))?,
                        Mixer::MultiHead(own) => own.forward_with(input.with_cache(cache))?,
                        Mixer::Latent(own) => own.forward_with(input.with_cache(cache))?,
                        Mixer::Linear(_) => unreachable!("a cache is made for its layer"),
                    }
                }
                _ => unreachable!("a cache is made for its layer"),
            };
        }
        Ok(xs)
    }
}
