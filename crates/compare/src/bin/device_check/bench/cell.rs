//! The cells that are timed.

use std::fmt;

use candle_attention::AttentionMask;
use candle_core::{DType, Device, Result, Tensor};
use serde_json::{Value, json};

/// A call of attention by its sizes.
#[derive(Debug, Clone, Copy)]
pub struct Cell {
    pub b: usize,
    pub h: usize,
    pub h_kv: usize,
    pub t_q: usize,
    pub t_kv: usize,
    pub d: usize,
    pub causal: bool,
    pub dtype: DType,
}

/// The tokens of a prefill cell, and the numbers of a position (H · D), as in the figures of the FlashAttention papers.
const TOKENS: usize = 16_384;
const WIDTH: usize = 2048;

/// Returns the cells. Prefill: D 64 and 128, T from 2,048 to 16,384, with and without a causal mask. Decode: one query,
/// 8,192 keys, 32 heads on 8 key heads, for one sequence and for 32.
pub fn cells(longest: usize) -> Vec<Cell> {
    let mut cells = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for d in [64, 128] {
            for t in [2048, 4096, 8192, 16_384].into_iter().filter(|&t| t <= longest) {
                let (b, h) = (TOKENS / t, WIDTH / d);
                cells.extend([true, false].map(|causal| Cell { b, h, h_kv: h, t_q: t, t_kv: t, d, causal, dtype }));
            }
        }
        let t_kv = 8192.min(longest);
        cells.extend([1, 32].map(|b| Cell { b, h: 32, h_kv: 8, t_q: 1, t_kv, d: 128, causal: false, dtype }));
    }
    cells
}

impl Cell {
    pub fn is_decode(&self) -> bool {
        self.t_q == 1
    }

    /// Returns the operations of two products over the (query, key) pairs that the mask allows.
    pub fn flops(&self) -> f64 {
        let (t_q, t_kv) = (self.t_q as f64, self.t_kv as f64);
        let pairs = if self.causal { t_q * (2.0 * t_kv - t_q + 1.0) / 2.0 } else { t_q * t_kv };
        4.0 * (self.b * self.h * self.d) as f64 * pairs
    }

    /// Returns the bytes of keys and values.
    pub fn kv_bytes(&self) -> usize {
        2 * self.b * self.h_kv * self.t_kv * self.d * self.dtype.size_in_bytes()
    }

    /// Returns the bytes of the scores in f32. The reference path allocates a few tensors of this size.
    pub fn score_bytes(&self) -> f64 {
        4.0 * (self.b * self.h) as f64 * self.t_q as f64 * self.t_kv as f64
    }

    pub fn mask(&self) -> AttentionMask {
        if self.causal { AttentionMask::causal() } else { AttentionMask::none() }
    }

    /// Returns q (B, H, T_q, D), and `copies` of k and v (B, H_kv, T_kv, D).
    pub fn tensors(&self, copies: usize, device: &Device) -> Result<(Tensor, Vec<(Tensor, Tensor)>)> {
        let draw = |h: usize, t: usize| Tensor::randn(0f32, 1., (self.b, h, t, self.d), device)?.to_dtype(self.dtype);
        let kv = (0..copies).map(|_| Ok((draw(self.h_kv, self.t_kv)?, draw(self.h_kv, self.t_kv)?)));
        Ok((draw(self.h, self.t_q)?, kv.collect::<Result<_>>()?))
    }

    pub fn to_json(self) -> Value {
        let Self { b, h, h_kv, t_q, t_kv, d, causal, dtype } = self;
        let (flops, kv_bytes) = (self.flops(), self.kv_bytes());
        json!({
            "name": self.to_string(), "b": b, "h": h, "h_kv": h_kv, "t_q": t_q, "t_kv": t_kv, "d": d, "causal": causal,
            "dtype": dtype.as_str(), "flops": flops, "kv_bytes": kv_bytes,
        })
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { b, h, h_kv, t_q, t_kv, d, .. } = self;
        let dtype = self.dtype.as_str();
        if self.is_decode() {
            return write!(f, "{dtype} decode b{b} h{h}/{h_kv} t{t_kv} d{d}");
        }
        write!(f, "{dtype} prefill b{b} h{h} t{t_q} d{d}{}", if self.causal { " causal" } else { "" })
    }
}
