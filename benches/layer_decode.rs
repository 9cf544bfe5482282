//! One token through a whole layer with a cache, and through a layer as Candle models usually write it: `cargo bench
//! --bench layer_decode`, and `-- --help` for how to time one cell.
//!
//! The time of these calls is the time of reading weights, keys and values. A model reads those of all its layers
//! before it returns to the first, so each call takes the next of many layers, which are `--total` MiB together.

#[expect(dead_code, reason = "each bench uses its own part of what they share")]
mod common;

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig,
};
use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::ops::softmax_last_dim;
use candle_nn::{Linear, VarBuilder};
use clap::Parser;
use serde_json::{Value, json};

use common::args::Args;
use common::cell::{Describe, Work, dtype_name};
use common::check::compare_outputs;
use common::engine::{Call, Engine};
use common::inputs::random;
use common::report::Kind;
use common::run::{self, Calls};

const NAMES: [&str; 4] = ["q_proj", "k_proj", "v_proj", "o_proj"];

fn main() -> Result<()> {
    let args = Args::parse();
    let Some(cells) = run::cells(&args, "layer_decode", cells())? else { return Ok(()) };
    let mut bench = run::Bench::start(&args, Kind::Decode);
    for cell in &cells {
        let xs = random((1, 1, cell.embed_dim), 1.0, cell.dtype)?;
        let Layers { mut ours, mut theirs } = Layers::new(cell, &args)?;
        if let (Some(ours), Some(theirs)) = (ours.first_mut(), theirs.first()) {
            compare_outputs(&ours.step(&xs)?, &theirs.step(&xs)?).map_err(|error| error.context(cell.name()))?;
        }
        let mut calls = Calls::default();
        if !ours.is_empty() {
            calls.ready.push((Engine::Ours, each_in_turn(&mut ours, |layer| layer.step(&xs))));
        }
        if !theirs.is_empty() {
            calls.ready.push((Engine::HandWritten, each_in_turn(&mut theirs, |layer| layer.step(&xs))));
        }
        bench.time(cell, "a layer with its cache".into(), calls)?;
    }
    Ok(())
}

/// Returns a call that runs the next of several layers each time.
fn each_in_turn<'a, L>(layers: &'a mut [L], step: impl Fn(&mut L) -> Result<Tensor> + 'a) -> Call<'a> {
    let mut next = 0;
    Box::new(move || {
        next = (next + 1) % layers.len();
        step(&mut layers[next])
    })
}

/// A layer of E with H heads, and the number of positions in its cache.
struct Cell {
    dtype: DType,
    embed_dim: usize,
    h: usize,
    h_kv: usize,
    t_kv: usize,
}

/// Returns the layer of a model of 7 billion parameters, a layer whose query heads share key heads, and the layers of
/// small models (E 576 is SmolLM2-135M's), which show the cost of a call besides its reading.
fn cells() -> Vec<Cell> {
    let mut cells = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for (embed_dim, h, h_kv, t_kv) in
            [(4096, 32, 32, 2048), (4096, 32, 8, 2048), (2048, 32, 8, 512), (1024, 16, 4, 512), (576, 9, 3, 256)]
        {
            cells.push(Cell { dtype, embed_dim, h, h_kv, t_kv });
        }
    }
    cells
}

impl Cell {
    fn head_dim(&self) -> usize {
        self.embed_dim / self.h
    }

    fn config(&self) -> MultiHeadAttentionConfig {
        MultiHeadAttentionConfig::new(self.embed_dim, self.h).with_num_kv_heads(self.h_kv).with_causal(true)
    }

    /// Returns (out, in) of each projection.
    fn shapes(&self) -> [(usize, usize); 4] {
        let (e, kv) = (self.embed_dim, self.h_kv * self.head_dim());
        [(e, e), (kv, e), (kv, e), (e, e)]
    }

    fn bytes(&self) -> usize {
        let weights: usize = self.shapes().iter().map(|(o, i)| o * i).sum();
        (weights + 2 * self.h_kv * self.t_kv * self.head_dim()) * self.dtype.size_in_bytes()
    }
}

impl Describe for Cell {
    fn name(&self) -> String {
        format!("e{} h{}/{} t1 of {} {}", self.embed_dim, self.h, self.h_kv, self.t_kv, dtype_name(self.dtype))
    }

    fn dtype(&self) -> DType {
        self.dtype
    }

    fn to_json(&self) -> Value {
        json!({
            "cell": self.name(), "dtype": dtype_name(self.dtype), "e": self.embed_dim, "h": self.h, "h_kv": self.h_kv,
            "t_kv": self.t_kv,
        })
    }

    fn work(&self) -> Result<Work> {
        let numbers = (self.bytes() / self.dtype.size_in_bytes()) as f64;
        // A multiply-add for every weight, and for each head that reads it, every number of a key or value.
        let cached = (2 * self.h_kv * self.t_kv * self.head_dim()) as f64;
        let flops = 2.0 * (numbers - cached + cached * (self.h / self.h_kv) as f64);
        Ok(Work { flops, bytes: self.bytes() as f64, pairs: None })
    }
}

/// The layers of each side, enough to fill the bytes to walk through; none for a side that was not requested.
struct Layers {
    ours: Vec<Ours>,
    theirs: Vec<HandWritten>,
}

impl Layers {
    fn new(cell: &Cell, args: &Args) -> Result<Self> {
        let mut weights = Vec::with_capacity(NAMES.len());
        for (o, i) in cell.shapes() {
            weights.push(random((o, i), (i as f64).recip().sqrt(), cell.dtype)?);
        }
        // Keys and values are projected from hidden states, so that both sides store the same.
        let before = random((1, cell.t_kv, cell.embed_dim), 1.0, cell.dtype)?;
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..args.total_bytes().div_ceil(cell.bytes()) {
            if args.engines.contains(&Engine::Ours) {
                ours.push(Ours::new(cell, &weights, &before)?);
            }
            if args.engines.contains(&Engine::HandWritten) {
                theirs.push(HandWritten::new(cell, &weights, &before)?);
            }
        }
        Ok(Self { ours, theirs })
    }
}

struct Ours {
    layer: MultiHeadAttention,
    cache: AttentionCache,
    t_kv: usize,
}

impl Ours {
    fn new(cell: &Cell, weights: &[Tensor], before: &Tensor) -> Result<Self> {
        let named = |(name, weight): (&&str, &Tensor)| (format!("{name}.weight"), weight.clone());
        let tensors = NAMES.iter().zip(weights).map(named).collect();
        let layer =
            MultiHeadAttention::new(&cell.config(), VarBuilder::from_tensors(tensors, cell.dtype, &Device::Cpu))?;
        let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_capacity(cell.t_kv + 1))?;
        layer.forward_with(AttentionInput::new(before).with_cache(&mut cache))?;
        Ok(Self { layer, cache, t_kv: cell.t_kv })
    }

    fn step(&mut self, xs: &Tensor) -> Result<Tensor> {
        let ys = self.layer.forward_with(AttentionInput::new(xs).with_cache(&mut self.cache))?;
        self.cache.truncate(self.t_kv)?;
        Ok(ys)
    }
}

/// A layer that projects, appends by `cat`, repeats the key heads, multiplies, takes the softmax, multiplies, and
/// projects; f32 between the products, as in Candle's Llama.
struct HandWritten {
    projections: Vec<Linear>,
    cache: [Tensor; 2],
    h: usize,
    h_kv: usize,
}

impl HandWritten {
    fn new(cell: &Cell, weights: &[Tensor], before: &Tensor) -> Result<Self> {
        let projections = weights.iter().map(|weight| Ok(Linear::new(weight.copy()?, None))).collect::<Result<_>>()?;
        let unfilled = Tensor::zeros(0, cell.dtype, &Device::Cpu)?;
        let mut this = Self { projections, cache: [unfilled.clone(), unfilled], h: cell.h, h_kv: cell.h_kv };
        this.cache = [this.heads(1, before, cell.h_kv)?, this.heads(2, before, cell.h_kv)?];
        Ok(this)
    }

    /// Projects (1, T, E) to (1, heads, T, D).
    fn heads(&self, projection: usize, xs: &Tensor, heads: usize) -> Result<Tensor> {
        let ys = self.projections[projection].forward(xs)?;
        let (b, t, width) = ys.dims3()?;
        ys.reshape((b, t, heads, width / heads))?.transpose(1, 2)?.contiguous()
    }

    fn step(&self, xs: &Tensor) -> Result<Tensor> {
        let (b, t, e) = xs.dims3()?;
        let q = self.heads(0, xs, self.h)?;
        let all = |projection: usize| -> Result<Tensor> {
            let new = self.heads(projection, xs, self.h_kv)?;
            let all = Tensor::cat(&[&self.cache[projection - 1], &new], 2)?;
            let (_, h_kv, t_kv, d) = all.dims4()?;
            let times = self.h / h_kv;
            all.unsqueeze(2)?.expand((b, h_kv, times, t_kv, d))?.reshape((b, self.h, t_kv, d))
        };
        let f32 = |tensor: Tensor| tensor.to_dtype(DType::F32);
        let (q, k, v) = (f32(q)?, f32(all(1)?)?, f32(all(2)?)?);
        let scores = (q.matmul(&k.transpose(D::Minus2, D::Minus1)?)? / (q.dim(3)? as f64).sqrt())?;
        let context = softmax_last_dim(&scores)?.matmul(&v)?.to_dtype(xs.dtype())?;
        self.projections[3].forward(&context.transpose(1, 2)?.reshape((b, t, e))?)
    }
}
