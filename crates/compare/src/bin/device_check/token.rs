//! One token through a block of a Llama on a device: its numbers, compared with the CPU in f64, and the number of
//! kernels of this project that it launches on CUDA.

use std::collections::HashMap;

use candle_attention::init::TorchSeed;
use candle_attention::{
    AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, PackedGatedLinear, PackedLinear,
    RmsNorm, RopeConfig,
};
use candle_attention_cuda::{is_available, launches_of_thread};
use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::{Activation, VarBuilder};

use super::check::{Checked, DTYPES, allowed, relative_error};
use super::layer;
use super::table::Row;

const WIDTH: usize = 256;
const MLP_WIDTH: usize = 512;
const EPS: f64 = 1e-6;

/// The tokens of a prompt, and the kernels of the token after it.
struct Prompt {
    len: usize,
    launches: u64,
}

/// Two norms, rotations of queries and keys, attention, and the products: of queries, keys and values together, of the
/// output, of gate and up together, and of down. With many keys, a kernel combines the parts of attention.
const PROMPTS: [Prompt; 3] =
    [Prompt { len: 12, launches: 9 }, Prompt { len: 90, launches: 9 }, Prompt { len: 700, launches: 10 }];

/// The weights of a block.
struct Weights {
    attention: HashMap<String, Tensor>,
    attention_norm: Tensor,
    mlp_norm: Tensor,
    /// (MLP_WIDTH, WIDTH).
    gate: Tensor,
    up: Tensor,
    /// (WIDTH, MLP_WIDTH).
    down: Tensor,
}

/// A block: attention and a gated MLP, each with its norm and a residual.
struct Block {
    attention: MultiHeadAttention,
    attention_norm: RmsNorm,
    mlp_norm: RmsNorm,
    gated: PackedGatedLinear,
    down: PackedLinear,
}

/// The output of a token, and the number of its launches.
struct Token {
    output: Tensor,
    launches: u64,
}

/// Checks the numbers and the launches of a token after a short and after a long prompt.
pub fn check(device: &Device, tolerance: f64) -> Result<Row> {
    let mut row = Row::new("a token of a block");
    let has_kernels = device.is_cuda() && is_available(device).is_ok();
    for dtype in DTYPES {
        let weights = Weights::draw(dtype)?;
        for Prompt { len, launches } in PROMPTS {
            let expected_launches = if has_kernels { launches } else { 0 };
            let checked = compare(&weights, len, dtype, device, expected_launches);
            // Another number of launches is an error.
            if has_kernels && checked.is_ok() {
                let name = dtype.as_str();
                row.note(&format!("a token after {len} in {name} launches {launches} kernels of candle-attention"));
            }
            row.add(dtype, checked, tolerance * allowed(dtype), &format_args!("a token after {len}"));
        }
    }
    Ok(row)
}

fn compare(weights: &Weights, len: usize, dtype: DType, device: &Device, expected_launches: u64) -> Result<Checked> {
    let xs = TorchSeed::new(12).randn((1, len + 1, WIDTH))?.to_dtype(dtype)?;
    let expected = Block::new(weights, DType::F64, &Device::Cpu)?.last_token(&xs.to_dtype(DType::F64)?)?;
    let found = Block::new(weights, dtype, device)?.last_token(&xs.to_device(device)?)?;
    if found.launches != expected_launches {
        bail!("{} kernels of candle-attention, expected {expected_launches}", found.launches)
    }
    Ok(Checked { error: relative_error(&found.output, &expected.output)?, plan: None })
}

/// Returns the config of the attention, with grouped heads and rotary positions.
fn config() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(WIDTH, 4).with_num_kv_heads(2).with_causal(true).with_rope(RopeConfig::new(10_000.0))
}

impl Weights {
    /// Draws weights on the CPU.
    fn draw(dtype: DType) -> Result<Self> {
        let seed = TorchSeed::new(11);
        let matrix = |rows: usize, columns: usize| -> Result<Tensor> {
            (seed.randn((rows, columns))? * (columns as f64).powf(-0.5))?.to_dtype(dtype)
        };
        Ok(Self {
            attention: layer::weights(&config(), dtype)?,
            attention_norm: seed.randn(WIDTH)?.to_dtype(dtype)?,
            mlp_norm: seed.randn(WIDTH)?.to_dtype(dtype)?,
            gate: matrix(MLP_WIDTH, WIDTH)?,
            up: matrix(MLP_WIDTH, WIDTH)?,
            down: matrix(WIDTH, MLP_WIDTH)?,
        })
    }
}

impl Block {
    /// Makes a block with these weights in a dtype on a device.
    fn new(weights: &Weights, dtype: DType, device: &Device) -> Result<Self> {
        let own = |tensor: &Tensor| tensor.to_dtype(dtype)?.to_device(device);
        let norm = |weight: &Tensor| RmsNorm::new(own(weight)?, EPS);
        let linear = |weight: &Tensor| PackedLinear::new(&own(weight)?, None);
        let vb = VarBuilder::from_tensors(weights.attention.clone(), dtype, device);
        Ok(Self {
            attention: MultiHeadAttention::new(&config(), vb)?,
            attention_norm: norm(&weights.attention_norm)?,
            mlp_norm: norm(&weights.mlp_norm)?,
            gated: PackedGatedLinear::new(linear(&weights.gate)?, linear(&weights.up)?, Activation::Silu)?,
            down: linear(&weights.down)?,
        })
    }

    /// Computes all tokens but the last one (1, T, E) through a cache, then the last one.
    fn last_token(&self, xs: &Tensor) -> Result<Token> {
        let mut cache = AttentionCache::default();
        let last = xs.dim(1)? - 1;
        self.forward(&xs.narrow(1, 0, last)?, &mut cache)?;
        let token = xs.narrow(1, last, 1)?.contiguous()?;
        let before = launches_of_thread();
        let output = self.forward(&token, &mut cache)?;
        Ok(Token { output, launches: launches_of_thread() - before })
    }

    fn forward(&self, xs: &Tensor, cache: &mut AttentionCache) -> Result<Tensor> {
        let normed = self.attention_norm.forward(xs)?;
        let sum = self.attention.forward_with(AttentionInput::new(&normed).with_cache(cache).with_residual(xs))?;
        let hidden = self.gated.forward(&self.mlp_norm.forward(&sum)?)?;
        self.down.forward_with_residual(&hidden, &sum)
    }
}
