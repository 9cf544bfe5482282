//! The layer and attention as Candle models usually write it, in turn in one run: `cargo bench --bench layer`, and `--
//! --help` for how to time one cell.
//!
//! Both sides share weights and input, and their outputs are compared before anything is timed.

#[expect(dead_code, reason = "each bench uses its own part of what they share")]
mod common;

use candle_attention::{AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig, SdpaOptions, WeightLayout};
use candle_core::{D, DType, Device, Module, Result, Tensor, bail};
use candle_nn::ops::softmax_last_dim;
use candle_nn::{Linear, VarBuilder, VarMap};
use clap::Parser;

use common::args::Args;
use common::cell::{Cell, Describe, Mask};
use common::check::compare_outputs;
use common::engine::{Engine, Entry};
use common::report::Kind;
use common::run;

fn main() -> Result<()> {
    let args = Args::parse();
    let Some(cells) = run::cells(&args, "layer", cells())? else { return Ok(()) };
    let mut bench = run::Bench::start(&args, Kind::Layer);
    for cell in &cells {
        let sides = Sides::new(cell)?;
        let (ours, theirs) = (sides.layer.forward(&sides.xs)?, sides.by_hand.forward(&sides.xs)?);
        compare_outputs(&ours, &theirs).map_err(|error| error.context(cell.name()))?;

        let calls = bench.calls(cell, &[Engine::Ours, Engine::HandWritten], |engine| {
            Ok(Entry::Ready(match engine {
                Engine::Ours => Box::new(|| sides.layer.forward(&sides.xs)),
                _ => Box::new(|| sides.by_hand.forward(&sides.xs)),
            }))
        })?;
        bench.time(cell, Sides::plan(cell)?, calls)?;
    }
    Ok(())
}

/// Returns cells from the tutorial's six tokens over sentences and a page to a batch of pages.
fn cells() -> Vec<Cell> {
    let layer = |(b, t), (e, heads), dtype| Cell {
        b,
        h: heads,
        h_kv: heads,
        embed_dim: Some(e),
        ..Cell::square(t, e / heads, Mask::Causal, dtype)
    };
    vec![
        layer((1, 6), (1536, 16), DType::F32),
        layer((8, 128), (768, 12), DType::F32),
        layer((1, 1024), (768, 12), DType::F32),
        layer((1, 1024), (768, 12), DType::BF16),
        layer((8, 1024), (768, 12), DType::F32),
        layer((8, 1024), (768, 12), DType::BF16),
    ]
}

/// Both sides of a cell, and their input (B, T, E).
struct Sides {
    layer: MultiHeadAttention,
    by_hand: HandWritten,
    xs: Tensor,
}

impl Sides {
    fn new(cell: &Cell) -> Result<Self> {
        let Some(embed_dim) = cell.embed_dim else { bail!("[layer] a cell of a layer has an embed_dim") };
        let cfg = MultiHeadAttentionConfig::new(embed_dim, cell.h).with_causal(true);
        let drawn = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let parameters = MultiHeadAttention::new(&cfg, drawn)?.state_dict(WeightLayout::Canonical)?;
        // A layer for inference: plain tensors, which track no gradients.
        let tensors = parameters.into_iter().map(|(name, tensor)| (name, tensor.detach())).collect();
        let vb = VarBuilder::from_tensors(tensors, cell.dtype, &Device::Cpu);
        let layer = MultiHeadAttention::new(&cfg, vb)?;
        let by_hand = HandWritten::new(&layer, cell.t_q)?;
        let xs = Tensor::randn(0f32, 1., (cell.b, cell.t_q, embed_dim), &Device::Cpu)?.to_dtype(cell.dtype)?;
        Ok(Self { layer, by_hand, xs })
    }

    /// Returns the path that attention inside the layer takes.
    fn plan(cell: &Cell) -> Result<String> {
        let q = Tensor::zeros((cell.b, cell.h, cell.t_q, cell.d), cell.dtype, &Device::Cpu)?;
        let plan = candle_attention::plan(&q, &q, &q, &AttentionMask::causal(), &SdpaOptions::default())?;
        Ok(plan.to_string())
    }
}

/// A layer that projects, transposes, multiplies, adds a mask, takes the softmax, multiplies, and projects.
struct HandWritten {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    num_heads: usize,
    /// Computed once, as in models that cache it.
    mask: Tensor,
}

impl HandWritten {
    fn new(layer: &MultiHeadAttention, t: usize) -> Result<Self> {
        let (q, k, v, o) = layer.projections()?;
        let Some(o) = o else { bail!("[layer] expected an output projection") };
        let hidden: Vec<f32> = (0..t * t).map(|at| if at % t > at / t { f32::NEG_INFINITY } else { 0.0 }).collect();
        let mask = Tensor::from_vec(hidden, (1, 1, t, t), &Device::Cpu)?.to_dtype(q.weight().dtype())?;
        Ok(Self {
            q_proj: q.clone(),
            k_proj: k.clone(),
            v_proj: v.clone(),
            o_proj: o.clone(),
            num_heads: layer.config().num_heads(),
            mask,
        })
    }

    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let (b, t, e) = xs.dims3()?;
        let d = e / self.num_heads;
        let heads = |proj: &Linear| proj.forward(xs)?.reshape((b, t, self.num_heads, d))?.transpose(1, 2)?.contiguous();
        let (q, k, v) = (heads(&self.q_proj)?, heads(&self.k_proj)?, heads(&self.v_proj)?);
        let scores = (q.matmul(&k.transpose(D::Minus2, D::Minus1)?)? / (d as f64).sqrt())?;
        let weights = softmax_last_dim(&scores.broadcast_add(&self.mask)?)?;
        self.o_proj.forward(&weights.matmul(&v)?.transpose(1, 2)?.reshape((b, t, e))?)
    }
}
