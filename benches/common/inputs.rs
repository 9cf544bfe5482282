//! The tensors that a cell is timed on.

use candle_core::{DType, Device, Result, Shape, Tensor};

use super::cell::Cell;

/// q (B, H, T_q, D) and copies of k and v (B, H_kv, T_kv, D): one copy, or more than the processor's cache can store.
pub struct Inputs {
    pub q: Tensor,
    pub kv: Vec<(Tensor, Tensor)>,
    /// Copies of k and v in 8 bits; `kv` has them once in f32.
    pub q8: Vec<[Q8Rows; 2]>,
}

/// Rows of 8 bits: a number is `(code - 128) · scale`.
#[derive(Clone)]
pub struct Q8Rows {
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
}

impl Q8Rows {
    /// Makes codes and scales that follow no pattern.
    fn new(rows: usize, width: usize, seed: u64) -> Self {
        let bits = |n: usize| (n as u64 + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let codes = (0..rows * width).map(|n| (bits(n) % 255 + 1) as u8).collect();
        // The standard deviation of the numbers is about one.
        let scales = (0..rows).map(|row| (bits(row) % 64 + 96) as f32 / 128.0 / 73.0).collect();
        Self { codes, scales }
    }

    fn floats(&self, shape: (usize, usize, usize, usize)) -> Result<Tensor> {
        let rows = self.codes.chunks_exact(shape.3).zip(&self.scales);
        let floats = rows.flat_map(|(row, scale)| row.iter().map(move |&code| (f32::from(code) - 128.0) * scale));
        Tensor::from_vec(floats.collect::<Vec<_>>(), shape, &Device::Cpu)
    }
}

impl Inputs {
    pub fn new(cell: &Cell, copies: usize) -> Result<Self> {
        let normal = |h: usize, t: usize| random((cell.b, h, t, cell.d), 1.0, cell.dtype);
        let q = normal(cell.h, cell.t_q)?;
        if cell.q8 {
            let shape = (cell.b, cell.h_kv, cell.t_kv, cell.d);
            let rows = [1, 2].map(|seed| Q8Rows::new(cell.b * cell.h_kv * cell.t_kv, cell.d, seed << 32));
            let kv = vec![(rows[0].floats(shape)?, rows[1].floats(shape)?)];
            return Ok(Self { q, kv, q8: vec![rows; copies] });
        }
        let (k, v) = (normal(cell.h_kv, cell.t_kv)?, normal(cell.h_kv, cell.t_kv)?);
        let mut kv = vec![(k.clone(), v.clone())];
        for _ in 1..copies {
            kv.push((k.copy()?, v.copy()?));
        }
        Ok(Self { q, kv, q8: Vec::new() })
    }
}

/// Returns normally distributed numbers.
pub fn random(shape: impl Into<Shape>, deviation: f64, dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, 1., shape, &Device::Cpu)?.affine(deviation, 0.0)?.to_dtype(dtype)
}
