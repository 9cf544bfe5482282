//! The layer beside attention as Candle models usually write it, in turn in one run: `cargo bench --bench multi_head`.
//!
//! Both sides share weights and input, and their outputs are compared before anything is timed. Ratios are of medians.

use std::time::Instant;

use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder, VarMap, ops::softmax_last_dim};

struct Case {
    name: &'static str,
    b: usize,
    t: usize,
    embed_dim: usize,
    num_heads: usize,
    dtype: DType,
}

const CASES: [Case; 4] = [
    Case { name: "the tutorial's 6 tokens", b: 1, t: 6, embed_dim: 1536, num_heads: 16, dtype: DType::F32 },
    Case { name: "sentences", b: 8, t: 128, embed_dim: 768, num_heads: 12, dtype: DType::F32 },
    Case { name: "a page", b: 1, t: 1024, embed_dim: 768, num_heads: 12, dtype: DType::F32 },
    Case { name: "a page, bf16", b: 1, t: 1024, embed_dim: 768, num_heads: 12, dtype: DType::BF16 },
];
const RUNS: usize = 15;

fn main() -> Result<()> {
    println!("| case | B | T | E | heads | this crate, ms | hand-written, ms | ratio |");
    println!("| --- | --- | --- | --- | --- | --- | --- | --- |");
    for case in CASES {
        let cfg = MultiHeadAttentionConfig::new(case.embed_dim, case.num_heads).with_causal(true);
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let layer = MultiHeadAttention::new(&cfg, vb)?;
        // A layer for inference: plain tensors, which track no gradients.
        let tensors = layer.state_dict(candle_attention::WeightLayout::Canonical)?;
        let tensors = tensors.into_iter().map(|(name, tensor)| (name, tensor.detach())).collect();
        let vb = VarBuilder::from_tensors(tensors, case.dtype, &Device::Cpu);
        let layer = MultiHeadAttention::new(&cfg, vb)?;
        let by_hand = HandWritten::new(&layer, case.t)?;
        let xs = Tensor::randn(0f32, 1., (case.b, case.t, case.embed_dim), &Device::Cpu)?.to_dtype(case.dtype)?;

        let (ours, theirs) = (layer.forward(&xs)?, by_hand.forward(&xs)?);
        let gap = (ours.to_dtype(DType::F32)? - theirs.to_dtype(DType::F32)?)?.abs()?.max_all()?.to_scalar::<f32>()?;
        let tolerance = if case.dtype == DType::F32 { 1e-4 } else { 5e-2 };
        assert!(gap < tolerance, "{}: the two sides differ by {gap}", case.name);

        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..RUNS {
            ours.push(milliseconds(|| layer.forward(&xs))?);
            theirs.push(milliseconds(|| by_hand.forward(&xs))?);
        }
        let (ours, theirs) = (median(ours), median(theirs));
        println!(
            "| {} | {} | {} | {} | {} | {ours:.2} | {theirs:.2} | {:.2} |",
            case.name,
            case.b,
            case.t,
            case.embed_dim,
            case.num_heads,
            theirs / ours
        );
    }
    Ok(())
}

fn milliseconds(f: impl Fn() -> Result<Tensor>) -> Result<f64> {
    let start = Instant::now();
    std::hint::black_box(f()?);
    Ok(start.elapsed().as_secs_f64() * 1e3)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Project, transpose, multiply, mask by addition, softmax, multiply, project.
struct HandWritten {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    num_heads: usize,
    /// Made once, as models do that cache it.
    mask: Tensor,
}

impl HandWritten {
    fn new(layer: &MultiHeadAttention, t: usize) -> Result<Self> {
        let (q, k, v, o) = layer.projections();
        let hidden: Vec<f32> = (0..t * t).map(|at| if at % t > at / t { f32::NEG_INFINITY } else { 0.0 }).collect();
        let mask = Tensor::from_vec(hidden, (1, 1, t, t), &Device::Cpu)?.to_dtype(q.weight().dtype())?;
        Ok(Self {
            q_proj: q.clone(),
            k_proj: k.clone(),
            v_proj: v.clone(),
            o_proj: o.expect("the layer has an output projection").clone(),
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
