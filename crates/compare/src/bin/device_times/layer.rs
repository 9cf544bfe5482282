//! Layers: a training step, and a token through a layer with a full cache.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig,
};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use super::cell::{CachedSizes, LayerSizes};
use super::clock::Clock;
use super::outcome::Outcome;

/// The width of the layer around a cache: narrow, so that the cache takes most of the time.
const NARROW: usize = 256;

/// The positions that fill a cache in one call.
const CHUNK: usize = 4096;

/// The tokens that are timed in turn before the cache is cut to its length again.
const TOKENS: usize = 16;

/// Times a forward and a backward pass of a causal layer, with the gradients of its input and of all weights.
pub fn time_training(sizes: &LayerSizes, clock: &Clock) -> Result<Outcome> {
    let device = &clock.device;
    let LayerSizes { b, t, embed_dim, h, dtype } = *sizes;
    let variables = VarMap::new();
    let cfg = MultiHeadAttentionConfig::new(embed_dim, h).with_causal(true);
    let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&variables, dtype, device))?;
    let drawn = Tensor::randn(0f32, 1., (b, t, embed_dim), device)?.to_dtype(dtype)?;
    let xs = Var::from_tensor(&drawn)?.into_inner();
    let path = layer.plan(&AttentionInput::new(&xs))?.to_string();
    // The gradient of the output is ones, so that no loss is timed.
    let call = |_: usize| -> Result<Option<Tensor>> { Ok(layer.forward(&xs)?.backward()?.get(&xs).cloned()) };
    Ok(Outcome::Milliseconds { ms: clock.milliseconds(call)?, path })
}

/// Times one token through a narrow layer whose cache has `t_kv` positions.
pub fn time_cached_token(sizes: &CachedSizes, clock: &Clock) -> Result<Outcome> {
    let device = &clock.device;
    let CachedSizes { h, h_kv, d, t_kv, q8 } = *sizes;
    let cfg = MultiHeadAttentionConfig::new(NARROW, h).with_num_kv_heads(h_kv).with_head_dim(d).with_causal(true);
    let variables = VarMap::new();
    let vb = VarBuilder::from_varmap(&variables, DType::BF16, device);
    let layer = MultiHeadAttention::new(&cfg, vb)?.freeze()?;
    let config = AttentionCacheConfig::new().with_capacity(t_kv + TOKENS);
    let mut cache = AttentionCache::new(&if q8 { config.with_q8() } else { config })?;
    let draw = |t: usize| Tensor::randn(0f32, 1., (1, t, NARROW), device)?.to_dtype(DType::BF16);
    let mut filled = 0;
    while filled < t_kv {
        let t = CHUNK.min(t_kv - filled);
        layer.forward_with(AttentionInput::new(&draw(t)?).with_cache(&mut cache))?;
        filled += t;
    }
    let token = draw(1)?;
    let call = |_: usize| -> Result<Tensor> {
        if cache.len() == t_kv + TOKENS {
            cache.truncate(t_kv)?;
        }
        layer.forward_with(AttentionInput::new(&token).with_cache(&mut cache))
    };
    Ok(Outcome::Milliseconds { ms: clock.milliseconds(call)?, path: "a layer".into() })
}
