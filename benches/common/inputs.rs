//! The tensors that a cell is timed on.

use candle_attention::KvCodeFormat;
use candle_core::{DType, Device, Result, Shape, Tensor};

use super::cell::Cell;

/// q (B, H, T_q, D) and copies of k and v (B, H_kv, T_kv, D): one copy, or more than the processor's cache can store.
pub struct Inputs {
    pub q: Tensor,
    pub kv: Vec<(Tensor, Tensor)>,
    /// Copies of k and v as codes; `kv` has them once in f32.
    pub codes: Vec<[CodedRows; 2]>,
}

/// Rows of codes.
#[derive(Clone)]
pub struct CodedRows {
    format: KvCodeFormat,
    pub codes: Vec<u8>,
    pub scales: Vec<f32>,
}

impl CodedRows {
    /// Makes codes and scales that follow no pattern.
    fn new(format: KvCodeFormat, rows: usize, width: usize, seed: u64) -> Self {
        let bits = |n: usize| (n as u64 + seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
        let byte = |n: usize| match format {
            KvCodeFormat::Q8 => (bits(n) % 255 + 1) as u8,
            // Numbers from 1 to 7.5 with both signs.
            KvCodeFormat::E4M3 => 56 + (bits(n) % 24) as u8 + 128 * (bits(n) / 24 % 2) as u8,
            KvCodeFormat::Q4 => bits(n) as u8,
        };
        let codes = (0..rows * format.bytes(width)).map(byte).collect();
        let deviation = match format {
            KvCodeFormat::Q8 => 73.0,
            KvCodeFormat::E4M3 | KvCodeFormat::Q4 => 4.6,
        };
        // The standard deviation of the numbers is about one.
        let count = rows * format.scales(width);
        let scales = (0..count).map(|row| (bits(row) % 64 + 96) as f32 / 128.0 / deviation).collect();
        Self { format, codes, scales }
    }

    fn floats(&self, shape: (usize, usize, usize, usize)) -> Result<Tensor> {
        let width = shape.3;
        let groups = self.format.scales(width);
        let mut floats = Vec::with_capacity(self.codes.len());
        for (row, scales) in self.codes.chunks_exact(self.format.bytes(width)).zip(self.scales.chunks_exact(groups)) {
            for n in 0..width {
                floats.push(self.number(row, n) * scales[n * groups / width]);
            }
        }
        Tensor::from_vec(floats, shape, &Device::Cpu)
    }

    /// Returns number `n` of a row without its scale.
    fn number(&self, row: &[u8], n: usize) -> f32 {
        match self.format {
            KvCodeFormat::Q8 => f32::from(row[n]) - 128.0,
            KvCodeFormat::E4M3 => {
                // The codes that are made here have exponents of 0 to 2.
                let magnitude = f32::from(8 + row[n] % 8) / 8.0 * f32::from(1u8 << (row[n] % 128 / 8 - 7));
                if row[n] < 128 { magnitude } else { -magnitude }
            }
            KvCodeFormat::Q4 => f32::from(row[n / 32 * 16 + n % 16] >> (n % 32 / 16 * 4) & 15) - 7.5,
        }
    }
}

impl Inputs {
    pub fn new(cell: &Cell, copies: usize) -> Result<Self> {
        let normal = |h: usize, t: usize| random((cell.b, h, t, cell.d), 1.0, cell.dtype);
        let q = normal(cell.h, cell.t_q)?;
        if let Some(format) = cell.codes {
            let shape = (cell.b, cell.h_kv, cell.t_kv, cell.d);
            let rows = [1, 2].map(|seed| CodedRows::new(format, cell.b * cell.h_kv * cell.t_kv, cell.d, seed << 32));
            let kv = vec![(rows[0].floats(shape)?, rows[1].floats(shape)?)];
            return Ok(Self { q, kv, codes: vec![rows; copies] });
        }
        let (k, v) = (normal(cell.h_kv, cell.t_kv)?, normal(cell.h_kv, cell.t_kv)?);
        let mut kv = vec![(k.clone(), v.clone())];
        for _ in 1..copies {
            kv.push((k.copy()?, v.copy()?));
        }
        Ok(Self { q, kv, codes: Vec::new() })
    }
}

/// Returns normally distributed numbers.
pub fn random(shape: impl Into<Shape>, deviation: f64, dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, 1., shape, &Device::Cpu)?.affine(deviation, 0.0)?.to_dtype(dtype)
}
