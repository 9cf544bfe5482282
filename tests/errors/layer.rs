//! Inputs that do not fit a layer.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, AttentionMask, Backend, ContentPositions, DisentangledConfig,
    MultiHeadAttention, MultiHeadAttentionConfig, PackedSequences, RelativeEmbeddings, RopeConfig, SdpaOptions,
    Windows,
};
use candle_core::{DType, ModuleT, Result, Tensor};
use candle_nn::VarBuilder;

use crate::{CPU, Case, of, zeros};

fn layer() -> Result<MultiHeadAttention> {
    load(MultiHeadAttentionConfig::new(8, 4).with_context_length(6))
}

fn load(cfg: MultiHeadAttentionConfig) -> Result<MultiHeadAttention> {
    MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &CPU))
}

/// With a grid of two rows and three columns.
fn in_grid(input: AttentionInput) -> Result<()> {
    load(MultiHeadAttentionConfig::new(8, 4).with_content_positions(grid(2)))?.forward_with(input).map(drop)
}

fn grid(height: usize) -> ContentPositions {
    ContentPositions::Grid { height, width: 3 }
}

fn in_window(positions: ContentPositions, tokens: usize) -> Result<Tensor> {
    load(MultiHeadAttentionConfig::new(8, 4).with_content_positions(positions))?.forward(&zeros((1, tokens, 8)))
}

fn cosines(trained: Option<[usize; 2]>) -> ContentPositions {
    ContentPositions::CosineWindow { height: 3, width: 2, trained }
}

fn disentangled() -> MultiHeadAttentionConfig {
    let positions = ContentPositions::Disentangled(DisentangledConfig::new(4));
    MultiHeadAttentionConfig::new(8, 4).with_content_positions(positions)
}

fn vectors(span: usize) -> Result<RelativeEmbeddings> {
    vectors_of(&DisentangledConfig::new(span))
}

fn vectors_of(config: &DisentangledConfig) -> Result<RelativeEmbeddings> {
    RelativeEmbeddings::new(config, 8, VarBuilder::zeros(DType::F32, &CPU))
}

/// Three tokens at these positions.
fn rotated(positions: &Tensor) -> Result<()> {
    let cfg = MultiHeadAttentionConfig::new(8, 4).with_context_length(6).with_rope(RopeConfig::new(10_000.0));
    load(cfg)?.forward_with(AttentionInput::new(&zeros((1, 3, 8))).with_positions(positions)).map(drop)
}

/// Queries of width 8, keys of width 5, values of width 7.
fn cross(queries: &Tensor, keys: &Tensor, values: &Tensor) -> Result<()> {
    let layer = load(MultiHeadAttentionConfig::new(8, 4).with_key_size(5).with_value_size(7))?;
    layer.forward_with(AttentionInput::new(queries).with_key_value(keys, values)).map(drop)
}

fn packed(xs: &Tensor, lens_q: &[usize], lens_kv: &[usize]) -> Result<()> {
    let sequences = PackedSequences::from_lens(lens_q, lens_kv)?;
    layer()?.forward_with(AttentionInput::new(xs).with_packed(&sequences)).map(drop)
}

fn with_residual(residual: &Tensor) -> Result<()> {
    layer()?.forward_with(AttentionInput::new(&zeros((2, 3, 8))).with_residual(residual)).map(drop)
}

/// The first query of each head in the place of attention.
fn first(q: &Tensor, _: &Tensor, _: &Tensor, _: &AttentionMask, _: &SdpaOptions) -> Result<Tensor> {
    q.narrow(2, 0, 1)
}

pub const CASES: &[Case] = cases! {
    "inputs of another width" => layer()?.forward(&zeros((1, 3, 12))),
    "another grid" => in_grid(AttentionInput::new(&zeros((1, 5, 8)))),
    "keys beside a grid" => in_grid(AttentionInput::new(&zeros((1, 6, 8))).with_key_value(&zeros((1, 6, 8)), &zeros((1, 6, 8)))),
    "positions beside a grid" => in_grid(AttentionInput::new(&zeros((1, 6, 8))).with_positions(&of(DType::U32, 6))),
    "a grid without rows" => load(MultiHeadAttentionConfig::new(8, 4).with_content_positions(grid(0))),
    "a grid and a softcap" => load(MultiHeadAttentionConfig::new(8, 4).with_content_positions(grid(2)).with_softcap(5.0)),
    "a grid and no scale" => load(MultiHeadAttentionConfig::new(8, 4).with_content_positions(grid(2)).with_scale(0.0)),
    "a window of no column" => in_window(ContentPositions::Window { height: 3, width: 0 }, 3),
    "tokens of another window" => in_window(ContentPositions::Window { height: 3, width: 2 }, 5),
    "cosine scores trained on windows of one token" => in_window(cosines(Some([4, 1])), 6),
    "cosine scores and a scale" =>
        load(MultiHeadAttentionConfig::new(8, 4).with_content_positions(cosines(None)).with_scale(0.5)),
    "an attention function beside terms by distance" => {
        let positions = ContentPositions::Clipped { left: 2, right: 2 };
        let layer = load(MultiHeadAttentionConfig::new(8, 4).with_content_positions(positions))?;
        layer.forward_with(AttentionInput::new(&zeros((1, 3, 8))).with_function(&first))
    },
    "disentangled positions without their vectors" => load(disentangled())?.forward(&zeros((1, 3, 8))),
    "vectors of disentangled positions of another span" => load(disentangled())?.with_relative_embeddings(vectors(5)?),
    "vectors of distances for a layer without" => layer()?.with_relative_embeddings(vectors(4)?),
    "disentangled positions and grouped heads" => load(disentangled().with_num_kv_heads(2)),
    "no buckets between near and far" => vectors_of(&DisentangledConfig::new(4).with_num_buckets(6)),
    "sines without cosines" =>
        load(MultiHeadAttentionConfig::new(9, 3).with_content_positions(ContentPositions::TransformerXl)),
    "windows of nothing" => Windows::new([4, 6], 0),
    "windows moved by more than a window" => Windows::new([4, 6], 2)?.with_shift(2),
    "an image of another size" => Windows::new([4, 6], 2)?.partition(&zeros((1, 23, 8))),
    "windows of another size" => Windows::new([4, 6], 2)?.join(&zeros((6, 5, 8))),
    "one sequence of another width" => layer()?.forward(&zeros((3, 12))),
    "inputs that have heads already" => layer()?.forward(&zeros((1, 4, 3, 8))),
    "one token" => layer()?.forward(&zeros(8)),
    "a scalar" => layer()?.forward(&zeros(())),
    "ids in place of vectors" => layer()?.forward(&of(DType::I64, (1, 3, 8))),
    "inputs in half precision" => layer()?.forward_t(&of(DType::BF16, (1, 3, 8)), true),
    "more positions than the context length" => layer()?.forward(&zeros((1, 7, 8))),
    "more keys than the context length" => {
        let (xs, keys) = (zeros((1, 2, 8)), zeros((1, 9, 8)));
        layer()?.forward_with(AttentionInput::new(&xs).with_key_value(&keys, &keys))
    },
    "self-attention of a layer whose keys are others" =>
        load(MultiHeadAttentionConfig::new(8, 4).with_key_size(5))?.forward(&zeros((1, 3, 8))),
    "keys and values in each other's place" => cross(&zeros((1, 3, 8)), &zeros((1, 4, 7)), &zeros((1, 4, 5))),
    "values of another width" => cross(&zeros((1, 3, 8)), &zeros((1, 4, 5)), &zeros((1, 4, 5))),
    "a batch of keys for queries without one" => cross(&zeros((3, 8)), &zeros((1, 4, 5)), &zeros((1, 4, 7))),
    "keys of another batch" => cross(&zeros((2, 3, 8)), &zeros((1, 4, 5)), &zeros((1, 4, 7))),
    "fewer values than keys" => cross(&zeros((1, 3, 8)), &zeros((1, 4, 5)), &zeros((1, 3, 7))),
    "values of another dtype" => cross(&zeros((1, 3, 8)), &zeros((1, 4, 5)), &of(DType::F64, (1, 4, 7))),
    "packed sequences of a batch" => packed(&zeros((2, 3, 8)), &[3], &[3]),
    "packed sequences of another total" => packed(&zeros((5, 8)), &[3, 3], &[3, 3]),
    "packed self-attention with other lengths of keys" => packed(&zeros((5, 8)), &[3, 2], &[2, 3]),
    "packed sequences with a cache" => {
        let (sequences, xs) = (PackedSequences::from_lens(&[3], &[3])?, zeros((3, 8)));
        let mut cache = AttentionCache::new(&AttentionCacheConfig::new())?;
        layer()?.forward_with(AttentionInput::new(&xs).with_packed(&sequences).with_cache(&mut cache))
    },
    "weights of packed sequences" => {
        let (sequences, xs) = (PackedSequences::from_lens(&[3], &[3])?, zeros((3, 8)));
        layer()?.forward_with_weights(AttentionInput::new(&xs).with_packed(&sequences))
    },
    "an attention function and a cache" => {
        let (xs, mut cache) = (zeros((1, 3, 8)), AttentionCache::new(&AttentionCacheConfig::new())?);
        layer()?.forward_with(AttentionInput::new(&xs).with_function(&first).with_cache(&mut cache))
    },
    "weights of an attention function" =>
        layer()?.forward_with_weights(AttentionInput::new(&zeros((1, 3, 8))).with_function(&first)),
    "the plan of an attention function" =>
        layer()?.plan(&AttentionInput::new(&zeros((1, 3, 8))).with_function(&first)),
    "a context of another shape" =>
        layer()?.forward_with(AttentionInput::new(&zeros((1, 3, 8))).with_function(&first)),
    "a bias for packed sequences" => {
        let (sequences, xs) = (PackedSequences::from_lens(&[3], &[3])?, zeros((3, 8)));
        let mask = AttentionMask::none().with_bias(&zeros((3, 3)));
        layer()?.forward_with(AttentionInput::new(&xs).with_packed(&sequences).with_mask(&mask))
    },
    "packed sequences and a memory of rotated keys" => {
        let (sequences, xs) = (PackedSequences::from_lens(&[2, 1], &[2, 1])?, zeros((3, 8)));
        let layer = load(MultiHeadAttentionConfig::new(8, 4).with_rope(RopeConfig::new(10_000.0)))?;
        let memory = layer.project_memory(&xs, &xs)?;
        layer.forward_with(AttentionInput::new(&xs).with_memory(&memory).with_packed(&sequences))
    },
    "packed sequences and a learned key" => {
        let (sequences, xs) = (PackedSequences::from_lens(&[3], &[3])?, zeros((3, 8)));
        let layer = load(MultiHeadAttentionConfig::new(8, 4).with_bias_kv(true))?;
        layer.forward_with(AttentionInput::new(&xs).with_packed(&sequences))
    },
    "lengths for another batch" => {
        let (xs, mask) = (zeros((2, 3, 8)), AttentionMask::none().with_valid_lens(vec![3]));
        layer()?.forward_with(AttentionInput::new(&xs).with_mask(&mask))
    },
    "a mask for the learned key as well" => {
        let (xs, mask) = (zeros((2, 3, 8)), AttentionMask::none().with_keep(&of(DType::U8, (3, 4))));
        let layer = load(MultiHeadAttentionConfig::new(8, 4).with_bias_kv(true))?;
        layer.forward_with(AttentionInput::new(&xs).with_mask(&mask))
    },
    "positions of another length" => rotated(&Tensor::zeros(2, DType::I64, &CPU)?),
    "positions that are no integers" => rotated(&zeros(3)),
    "a negative position" => rotated(&Tensor::new(&[[0i64, -7, 1]], &CPU)?),
    "a position past the context length" => rotated(&Tensor::new(&[0u32, 6, 1], &CPU)?),
    "positions of keys that are the queries" => {
        let (xs, positions) = (zeros((1, 3, 8)), Tensor::arange(0u32, 3, &CPU)?);
        layer()?.forward_with(AttentionInput::new(&xs).with_key_positions(&positions))
    },
    "a residual that is too wide" => with_residual(&zeros((2, 3, 9))),
    "a residual of another length" => with_residual(&zeros((2, 4, 8))),
    "a residual without a batch" => with_residual(&zeros((3, 8))),
    "a residual of another dtype" => with_residual(&of(DType::F64, (2, 3, 8))),
    "a softcap that f32 does not hold" =>
        load(MultiHeadAttentionConfig::new(8, 4).with_softcap(1e-300))?.forward(&zeros((1, 3, 8))),
    "a fused kernel for F64" => {
        let layer = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(8, 4), VarBuilder::zeros(DType::F64, &CPU))?;
        layer.forward_with(AttentionInput::new(&of(DType::F64, (1, 3, 8))).with_backend(Backend::Fused))
    },
};
