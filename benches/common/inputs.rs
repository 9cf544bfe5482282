//! The tensors that a cell is timed on.

use candle_core::{DType, Device, Result, Shape, Tensor};

use super::cell::Cell;

/// q (B, H, T_q, D) and copies of k and v (B, H_kv, T_kv, D): one, or as many as no cache holds.
pub struct Inputs {
    pub q: Tensor,
    pub kv: Vec<(Tensor, Tensor)>,
}

impl Inputs {
    pub fn new(cell: &Cell, copies: usize) -> Result<Self> {
        let normal = |h: usize, t: usize| random((cell.b, h, t, cell.d), 1.0, cell.dtype);
        let q = normal(cell.h, cell.t_q)?;
        let (k, v) = (normal(cell.h_kv, cell.t_kv)?, normal(cell.h_kv, cell.t_kv)?);
        let mut kv = vec![(k.clone(), v.clone())];
        for _ in 1..copies {
            kv.push((k.copy()?, v.copy()?));
        }
        Ok(Self { q, kv })
    }
}

/// Normally distributed numbers.
pub fn random(shape: impl Into<Shape>, deviation: f64, dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, 1., shape, &Device::Cpu)?.affine(deviation, 0.0)?.to_dtype(dtype)
}
