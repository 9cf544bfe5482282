//! Keys and values that cannot be projected once, and calls that do not fit what was.

use candle_attention::init::TorchSeed;
use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, KvSource, MultiHeadAttention,
    MultiHeadAttentionConfig as Config, ProjectedMemory, RopeConfig,
};
use candle_core::{DType, Result, Tensor};

use crate::{CPU, Case, of, zeros};

fn layer(cfg: &Config, dtype: DType) -> Result<MultiHeadAttention> {
    MultiHeadAttention::new(cfg, TorchSeed::new(3).var_builder(dtype, &CPU))
}

fn base() -> Config {
    Config::new(8, 4).with_num_kv_heads(2)
}

fn own() -> Result<MultiHeadAttention> {
    layer(&base().with_context_length(9), DType::F32)
}

fn project(keys: &[usize], values: &[usize]) -> Result<()> {
    own()?.project_memory(&zeros(keys), &zeros(values)).map(drop)
}

/// What a layer projects of seven positions of two sequences.
fn memory(cfg: &Config, dtype: DType) -> Result<ProjectedMemory> {
    let encoded = of(dtype, (2, 7, 8));
    layer(cfg, dtype)?.project_memory(&encoded, &encoded)
}

/// Queries of this shape through `own`, over the memory of another layer.
fn call(queries: &[usize], cfg: &Config, dtype: DType) -> Result<()> {
    own()?.forward_with(AttentionInput::new(&zeros(queries)).with_memory(&memory(cfg, dtype)?)).map(drop)
}

/// The call of a layer without keys of its own: five tokens of two sequences after `tokens` of the layer of `cfg`.
fn shared(cfg: &Config, tokens: usize, dtype: DType) -> Result<()> {
    let mut cache = AttentionCache::default();
    if tokens > 0 {
        layer(cfg, dtype)?.forward_with(AttentionInput::new(&of(dtype, (2, tokens, 8))).with_cache(&mut cache))?;
    }
    of_earlier()?.forward_with(AttentionInput::new(&zeros((2, 5, 8))).with_shared_cache(&cache)).map(drop)
}

fn of_earlier() -> Result<MultiHeadAttention> {
    layer(&base().with_causal(true).with_kv_source(KvSource::EarlierLayer), DType::F32)
}

pub const SHARED: &[Case] = cases! {
    "an empty cache" => shared(&base(), 0, DType::F32),
    "fewer tokens than the call" => shared(&base(), 4, DType::F32),
    "more key heads" => shared(&base().with_num_kv_heads(4), 5, DType::F32),
    "wider values" => shared(&base().with_value_head_dim(3), 5, DType::F32),
    "another dtype" => shared(&base(), 5, DType::F64),
    "no cache" => of_earlier()?.forward(&zeros((2, 5, 8))),
    "a cache of its own" => {
        let mut cache = AttentionCache::default();
        of_earlier()?.forward_with(AttentionInput::new(&zeros((2, 5, 8))).with_cache(&mut cache))
    },
    "a memory of its own" => of_earlier()?.project_memory(&zeros((2, 5, 8)), &zeros((2, 5, 8))),
    "projections" => of_earlier()?.projections(),
    "a layer with keys of its own" => {
        let cache = AttentionCache::default();
        own()?.forward_with(AttentionInput::new(&zeros((2, 5, 8))).with_shared_cache(&cache))
    },
    "two caches" => {
        let (mut cache, shared) = (AttentionCache::default(), AttentionCache::default());
        let xs = zeros((2, 5, 8));
        of_earlier()?.forward_with(AttentionInput::new(&xs).with_cache(&mut cache).with_shared_cache(&shared))
    },
    "a long call of a sliding cache" => {
        let cfg = base().with_causal(true).with_window(2);
        let mut cache = AttentionCache::new(&AttentionCacheConfig::for_layer(&cfg))?;
        let xs = zeros((2, 9, 8));
        layer(&cfg, DType::F32)?.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
        let later = layer(&cfg.with_kv_source(KvSource::EarlierLayer), DType::F32)?;
        later.forward_with(AttentionInput::new(&xs).with_shared_cache(&cache))
    },
    "other values than keys" => {
        let layer = layer(&base().with_kv_source(KvSource::KeysAsValues), DType::F32)?;
        layer.project_memory(&zeros((2, 5, 8)), &zeros((2, 5, 8)))
    },
};

pub const PROJECTIONS: &[Case] = cases! {
    "keys of another width" => project(&[2, 7, 7], &[2, 7, 8]),
    "keys of one dimension" => project(&[8], &[8]),
    "values without a batch" => project(&[2, 7, 8], &[7, 8]),
    "fewer values than keys" => project(&[2, 7, 8], &[2, 6, 8]),
    "a larger batch of values" => project(&[1, 7, 8], &[2, 7, 8]),
    "more than the context length" => project(&[2, 10, 8], &[2, 10, 8]),
    "keys in double precision" => own()?.project_memory(&of(DType::F64, (2, 7, 8)), &zeros((2, 7, 8))),
};

pub const CALLS: &[Case] = cases! {
    "more key heads" => call(&[2, 3, 8], &base().with_num_kv_heads(4), DType::F32),
    "wider values" => call(&[2, 3, 8], &base().with_value_head_dim(3), DType::F32),
    "a learned key" => call(&[2, 3, 8], &base().with_bias_kv(true), DType::F32),
    "queries of another batch" => call(&[3, 3, 8], &base(), DType::F32),
    "queries without a batch" => call(&[3, 8], &base(), DType::F32),
    "another dtype" => call(&[2, 3, 8], &base(), DType::F64),
    "keys and values too" => {
        let (queries, encoded, memory) = (zeros((2, 3, 8)), zeros((2, 7, 8)), memory(&base(), DType::F32)?);
        let input = AttentionInput::new(&queries).with_memory(&memory).with_key_value(&encoded, &encoded);
        own()?.forward_with(input)
    },
    "a cache too" => {
        let (queries, memory, mut cache) = (zeros((2, 3, 8)), memory(&base(), DType::F32)?, AttentionCache::default());
        own()?.forward_with(AttentionInput::new(&queries).with_memory(&memory).with_cache(&mut cache))
    },
    "key positions too" => {
        let cfg = Config::new(8, 2).with_rope(RopeConfig::new(100.0));
        let (queries, memory) = (zeros((2, 3, 8)), memory(&cfg, DType::F32)?);
        let positions = Tensor::arange(0u32, 7, &CPU)?;
        let input = AttentionInput::new(&queries).with_memory(&memory).with_key_positions(&positions);
        layer(&cfg, DType::F32)?.forward_with(input)
    },
};
