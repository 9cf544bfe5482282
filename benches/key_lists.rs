//! Attention to lists of keys, as a model chooses them, compared with attention to all keys: `cargo bench --bench
//! key_lists`, and `-- --help`.
//!
//! - A token against a long cache: the function alone, and a layer of latent attention whose indexer chooses the keys.
//! - A prompt, whose queries choose among the keys before them: the lists, and the same keys as a boolean mask.

#[expect(dead_code, reason = "each bench uses its own part of what they share")]
#[path = "common/mod.rs"]
mod common;

use std::cell::RefCell;

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, IndexerConfig, KeyLists,
    MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, SdpaOptions, plan, scaled_dot_product_attention,
};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use clap::{Parser, ValueEnum};

use common::turns;

#[derive(Parser)]
struct Args {
    /// Only one of the comparisons.
    #[arg(long)]
    only: Option<Comparison>,
    /// The keys of a token.
    #[arg(long, default_value_t = 131_072)]
    keys: usize,
    /// The tokens of a prompt.
    #[arg(long, default_value_t = 8192)]
    prompt: usize,
    /// The keys that each query chooses.
    #[arg(long, default_value_t = 2048)]
    chosen: usize,
    #[arg(long, default_value_t = 32)]
    heads: usize,
    #[arg(long, default_value_t = 8)]
    kv_heads: usize,
    /// The head dimension.
    #[arg(long, default_value_t = 128)]
    width: usize,
    /// The heads of the layer of latent attention.
    #[arg(long, default_value_t = 128)]
    latent_heads: usize,
    /// The heads of the indexer.
    #[arg(long, default_value_t = 64)]
    index_heads: usize,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// bf16 instead of f32, in the function.
    #[arg(long)]
    bf16: bool,
    /// Passed by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Comparison {
    Token,
    Layer,
    Prompt,
}

fn main() -> Result<()> {
    let args = Args::parse();
    turns::print_header("T", "attention");
    for comparison in [Comparison::Token, Comparison::Layer, Comparison::Prompt] {
        if args.only.is_none_or(|only| only == comparison) {
            match comparison {
                Comparison::Token => token(&args)?,
                Comparison::Layer => layer(&args)?,
                Comparison::Prompt => prompt(&args)?,
            }
        }
    }
    Ok(())
}

impl Args {
    fn heads(&self, heads: usize, t: usize) -> Result<Tensor> {
        let dtype = if self.bf16 { DType::BF16 } else { DType::F32 };
        Tensor::randn(0f32, 1., (1, heads, t, self.width), &Device::Cpu)?.to_dtype(dtype)
    }
}

/// Returns `n` of the first `t_kv` keys in ascending order, at random distances; all of them if they are fewer.
fn some_of(t_kv: usize, n: usize, seed: &mut u64) -> Vec<i64> {
    if t_kv <= n {
        return (0..n).map(|key| if key < t_kv { key as i64 } else { -1 }).collect();
    }
    let mut keys = Vec::with_capacity(n);
    for entry in 0..n {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let (first, end) = (entry * t_kv / n, (entry + 1) * t_kv / n);
        keys.push((first + (*seed >> 33) as usize % (end - first)) as i64);
    }
    keys
}

fn token(args: &Args) -> Result<()> {
    let (q, k, v) =
        (args.heads(args.heads, 1)?, args.heads(args.kv_heads, args.keys)?, args.heads(args.kv_heads, args.keys)?);
    let chosen = some_of(args.keys, args.chosen, &mut 1);
    let lists = KeyLists::new(&Tensor::from_vec(chosen, (1, args.chosen), &Device::Cpu)?)?;
    let listed = AttentionMask::causal().with_key_lists(&lists);
    let options = SdpaOptions::default();
    eprintln!("a token: {}", plan(&q, &k, &v, &listed, &options)?);
    let ways: Vec<turns::Way> = vec![
        ("all keys", Box::new(|| scaled_dot_product_attention(&q, &k, &v, &AttentionMask::causal(), &options))),
        ("listed keys", Box::new(|| scaled_dot_product_attention(&q, &k, &v, &listed, &options))),
    ];
    turns::print(&args.keys.to_string(), &turns::take(&ways, args.rounds)?);
    Ok(())
}

/// Returns a layer with DeepSeek's widths of heads and narrow projections, which are no part of the comparison.
fn latent_layer(heads: usize, indexer: IndexerConfig, variables: &VarMap) -> Result<MultiHeadLatentAttention> {
    let cfg = MultiHeadLatentAttentionConfig::new(256, heads)
        .with_nope_head_dim(128)
        .with_value_head_dim(128)
        .with_q_lora_rank(128)
        .with_kv_lora_rank(512)
        .with_rope_head_dim(64)
        .with_indexer(indexer);
    let layer = MultiHeadLatentAttention::new(&cfg, VarBuilder::from_varmap(variables, DType::F32, &Device::Cpu))?;
    layer.freeze()
}

fn layer(args: &Args) -> Result<()> {
    let own = IndexerConfig::new(args.index_heads, 128, args.chosen);
    let variables = VarMap::new();
    let indexed = latent_layer(args.latent_heads, own, &variables)?;
    // An indexer that chooses all keys computes no scores.
    let dense = latent_layer(args.latent_heads, IndexerConfig { top_k: args.keys + 1, ..own }, &variables)?;
    let every = IndexerConfig { num_heads: 1, top_k: args.keys + 1, ..own };
    let filler = latent_layer(1, every, &VarMap::new())?;
    let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_capacity(args.keys))?;
    let only_self = AttentionMask::causal().with_window(1);
    let before = args.keys - 1;
    for start in (0..before).step_by(128) {
        let xs = Tensor::randn(0f32, 1., (1, 128.min(before - start), 256), &Device::Cpu)?;
        filler.forward_with(AttentionInput::new(&xs).with_mask(&only_self).with_cache(&mut cache))?;
    }
    let xs = Tensor::randn(0f32, 1., (1, 1, 256), &Device::Cpu)?;
    eprintln!("a layer: {}", indexed.plan(&AttentionInput::new(&xs).with_cache(&mut cache))?);
    let cache = RefCell::new(cache);
    let step = |layer: &MultiHeadLatentAttention| {
        let ys = layer.forward_with(AttentionInput::new(&xs).with_cache(&mut cache.borrow_mut()))?;
        cache.borrow_mut().truncate(before)?;
        Ok(ys)
    };
    let ways: Vec<turns::Way> = vec![
        ("a latent layer, all keys", Box::new(|| step(&dense))),
        ("a latent layer with its indexer", Box::new(|| step(&indexed))),
    ];
    turns::print(&args.keys.to_string(), &turns::take(&ways, args.rounds)?);
    Ok(())
}

fn prompt(args: &Args) -> Result<()> {
    let (t, n) = (args.prompt, args.chosen);
    let (q, k, v) = (args.heads(args.heads, t)?, args.heads(args.kv_heads, t)?, args.heads(args.kv_heads, t)?);
    let mut seed = 1;
    let mut entries = Vec::with_capacity(t * n);
    let mut allowed = vec![0u8; t * t];
    for query in 0..t {
        let keys = some_of(query + 1, n, &mut seed);
        for &key in keys.iter().filter(|key| **key >= 0) {
            allowed[query * t + key as usize] = 1;
        }
        entries.extend(keys);
    }
    let lists = KeyLists::new(&Tensor::from_vec(entries, (t, n), &Device::Cpu)?)?;
    let listed = AttentionMask::causal().with_key_lists(&lists);
    let masked = AttentionMask::causal().with_bool_mask(&Tensor::from_vec(allowed, (t, t), &Device::Cpu)?);
    let options = SdpaOptions::default();
    eprintln!("a prompt: {}", plan(&q, &k, &v, &listed, &options)?);
    let ways: Vec<turns::Way> = vec![
        ("all keys", Box::new(|| scaled_dot_product_attention(&q, &k, &v, &AttentionMask::causal(), &options))),
        ("all keys under a mask", Box::new(|| scaled_dot_product_attention(&q, &k, &v, &masked, &options))),
        ("listed keys", Box::new(|| scaled_dot_product_attention(&q, &k, &v, &listed, &options))),
    ];
    turns::print(&t.to_string(), &turns::take(&ways, args.rounds)?);
    Ok(())
}
