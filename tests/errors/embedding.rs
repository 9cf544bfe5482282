//! Ids, tables and positions that do not fit an [`EmbeddingLayer`].

use std::collections::HashMap;

use candle_attention::init::TorchSeed;
use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Embedding, VarBuilder};

use crate::{CPU, Case, of, zeros};

fn embedding(cfg: EmbeddingConfig) -> Result<EmbeddingLayer> {
    EmbeddingLayer::new(&cfg, VarBuilder::zeros(DType::F32, &CPU))
}

fn embed(ids: &Tensor) -> Result<()> {
    embedding(EmbeddingConfig::new(7, 4))?.forward(ids).map(drop)
}

/// So many ids from a position on, where there are four.
fn embed_at(t: usize, offset: usize) -> Result<()> {
    embedding(EmbeddingConfig::new(7, 3).with_max_positions(4))?.forward_at(&of(DType::U32, t), offset).map(drop)
}

/// A layer of 7 words, and of two positions if asked for, with a file of these tensors.
fn load(positions: bool, tensors: &[(&str, [usize; 2])]) -> Result<()> {
    let tensors: HashMap<_, _> = tensors.iter().map(|(name, shape)| (name.to_string(), zeros(shape))).collect();
    let cfg = EmbeddingConfig::new(7, 3);
    let cfg = if positions { cfg.with_max_positions(2) } else { cfg };
    EmbeddingLayer::new(&cfg, VarBuilder::from_tensors(tensors, DType::F32, &CPU)).map(drop)
}

fn wrap(table: Tensor, hidden_size: usize) -> Result<()> {
    EmbeddingLayer::from_embedding(Embedding::new(table, hidden_size)).map(drop)
}

pub const CASES: &[Case] = cases! {
    "no words" => embedding(EmbeddingConfig::new(0, 4)),
    "vectors of no width" => embedding(EmbeddingConfig::new(7, 0)),
    "a padding row behind the table" => embedding(EmbeddingConfig::new(7, 4).with_padding_idx(7)),
    "no positions" => embedding(EmbeddingConfig::new(7, 4).with_max_positions(0)),
    "an id behind the table" => embed(&Tensor::new(&[[0u32, 6], [7, 0]], &CPU)?),
    "a negative id" => embed(&Tensor::new(&[3i64, -1], &CPU)?),
    "the id that Candle takes for padding" => embed(&Tensor::new(&[u32::MAX], &CPU)?),
    "vectors for ids" => embed(&zeros((1, 3))),
    "ids with heads" => embed(&of(DType::U32, (1, 2, 3))),
    "more tokens than positions" =>
        embedding(EmbeddingConfig::new(7, 4).with_max_positions(2))?.forward(&of(DType::U32, 3)),
    "positions beyond counting" =>
        embedding(EmbeddingConfig::new(7, 4).with_max_positions(2))?.forward_at(&of(DType::U32, 1), usize::MAX),
    "integer vectors from a seed" =>
        EmbeddingLayer::new(&EmbeddingConfig::new(7, 4), TorchSeed::new(0).var_builder(DType::U32, &CPU)),
    "an id behind the table, in one sequence" => embed(&Tensor::new(&[1u32, 2, 7], &CPU)?),
    "an id behind the table, in a view" => embed(&Tensor::new(&[[1u32, 2, 3], [4, 9, 8]], &CPU)?.t()?),
    "the largest byte" => embed(&Tensor::new(&[u8::MAX], &CPU)?),
    "the largest id" => embed(&Tensor::new(&[i64::MAX], &CPU)?),
    "one id" => embed(&Tensor::new(1u32, &CPU)?),
    "more tokens than positions, from 0 on" => embed_at(5, 0),
    "more tokens than positions, from 3 on" => embed_at(2, 3),
    "no tokens behind the last position" => embed_at(0, 5),
    "a file without a table" => load(false, &[("weight", [7, 3])]),
    "a table of another size" => load(false, &[("embedding.weight", [8, 3])]),
    "a file without positions" => load(true, &[("embedding.weight", [7, 3])]),
    "a table of another width than it says" => wrap(zeros((7, 3)), 4),
    "a table with a batch" => wrap(zeros((1, 7, 3)), 3),
    "a table of ids" => wrap(of(DType::U32, (7, 3)), 3),
    "a table of no words" => wrap(zeros((0, 3)), 3),
};
