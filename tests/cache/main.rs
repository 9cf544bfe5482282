//! A layer with a cache returns the numbers of the layer without one, for any split of its positions into calls and any
//! edits between them. A cache reads its keys in place, and does not change if a call fails.
//!
//! Random programs come from fixed seeds; `CACHE_CASES` sets another number of programs for every test.

#[path = "../attention/by_hand.rs"]
#[allow(dead_code, reason = "only its parameters are needed")]
mod by_hand;
#[path = "../attention/call.rs"]
#[allow(dead_code, reason = "only its masks are needed")]
mod call;
#[path = "../common/mod.rs"]
mod common;
#[path = "../attention/layer_kind.rs"]
#[allow(dead_code, reason = "not all properties of layers are needed")]
mod layer_kind;
#[path = "../attention/recipe.rs"]
#[allow(dead_code, unused_imports, reason = "only its masks are needed")]
mod recipe;
#[path = "../attention/registry.rs"]
#[allow(dead_code, reason = "only its layers are needed")]
mod registry;
mod seeded;
use attention_oracle::{array, attention as oracle};

// The property: a program of random calls and edits, under random masks.
mod masks;
mod program;

mod batches;
mod block_rules;
mod buffers;
mod delta;
mod drafts;
mod generation;
mod gradients;
mod hybrid;
mod layers;
mod padding;
mod page_contents;
mod page_tables;
mod paged_model;
mod paged_trees;
mod pages;
mod rotary;
mod shared;
mod short_calls;
mod sink_tokens;
mod warnings;

// What each module begins with.
use array::{Array, Random};
use candle_attention::{MultiHeadAttentionConfig as Config, MultiHeadLatentAttentionConfig as LatentConfig, *};
use candle_core::{DType, Device, IndexOp, Result, Tensor, Var};
use candle_nn::{Linear, VarBuilder, VarMap};
use common::*;
use layer_kind::{Layer, LayerKind};
use oracle::{Alignment, Dims, Lens, Mask, Part};
use registry::latent_of;

/// Builds a layer of random weights that are plain tensors, with a relative bias if the config has one.
fn layer(cfg: &Config) -> Result<MultiHeadAttention> {
    layer_on(cfg, DType::F32, &DEVICE)
}

fn latents(cfg: LatentConfig, dtype: DType, device: &Device) -> Result<Box<dyn Layer>> {
    let kind = LayerKind::Latent(cfg);
    kind.of_parameters(&kind.parameters(12), dtype, device)
}

fn layer_on(cfg: &Config, dtype: DType, device: &Device) -> Result<MultiHeadAttention> {
    with_bias(seeded::layer(cfg, dtype, device)?, dtype, device)
}

/// Adds the relative bias of a stack, if the config has one.
fn with_bias(layer: MultiHeadAttention, dtype: DType, device: &Device) -> Result<MultiHeadAttention> {
    let Some(buckets) = layer.config().relative_bias() else { return Ok(layer) };
    let vb = TorchSeed::new(5).var_builder(dtype, device);
    let bias = RelativeBias::new(buckets, layer.config().num_heads(), vb)?;
    layer.with_relative_bias(bias)
}

/// Returns numbers (B, T, E) in [-1, 1], different ones for each `first`.
fn wave(b: usize, t: usize, width: usize, first: f32) -> Result<Tensor> {
    let data: Vec<f32> = (0..b * t * width).map(|n| (n as f32 * 0.7 + first).sin()).collect();
    copied_to(&DEVICE, data, (b, t, width))
}

/// Returns some positions of (B, T, E).
fn part(xs: &Tensor, start: usize, t: usize) -> Result<Tensor> {
    xs.narrow(1, start, t)?.force_contiguous()
}

/// Returns the output of a layer in calls of these numbers of positions.
fn in_calls(layer: &dyn Layer, cache: &mut AttentionCache, xs: &Tensor, pieces: &[usize]) -> Result<Tensor> {
    let mut start = 0;
    let outputs = pieces.iter().map(|&t| {
        let piece = part(xs, start, t)?;
        start += t;
        layer.run(AttentionInput::new(&piece).with_cache(cache))
    });
    Tensor::cat(&outputs.collect::<Result<Vec<_>>>()?, 1)
}
