//! Positions of patches of an image: in a grid, as part of the product of queries and keys (SAM), and in a window, as a
//! bias and with cosine scores (Swin and Swin v2).

use candle_core::{D, Device, Result, Tensor};
use candle_nn::ops;

use super::distances::rows_of;
use super::{Content, ContentPositions, OP};
use crate::position::gathered;
use candle_attention_modules::base::{accumulation_dtype, check_memory};
use candle_attention_modules::norm::Norm;

/// Names of (2 · rows - 1, D) and (2 · columns - 1, D), which all heads share.
pub(super) const GRID: [&str; 2] = ["rel_pos_h", "rel_pos_w"];

/// Numbers between the two layers of Swin v2's network.
pub(super) const HIDDEN: usize = 512;

impl Content {
    /// Queries (B, H, T, D) and keys (B, H_kv, T, D), views of (B, T, ..), made wider: a query by its product with the
    /// table's entry for each row and each column of keys, a key by ones at its own row and column. `scale` times the
    /// product of the two is then the whole score.
    pub(super) fn widened(&self, q: &Tensor, k: &Tensor, scale: f64, sizes: [usize; 2]) -> Result<[Tensor; 2]> {
        let ([rows, columns], (b, h, t, d)) = (sizes, q.dims4()?);
        let wide = [b, t, h, d + rows + columns];
        let bytes = [&wide[..], &[accumulation_dtype(q.dtype()).size_in_bytes()]].concat();
        check_memory(OP, format_args!("queries of shape {wide:?}"), &bytes)?;
        for n in sizes {
            let bytes = [n, n, d.max(1), accumulation_dtype(q.dtype()).size_in_bytes()];
            check_memory(OP, format_args!("the positions of {n} rows or columns"), &bytes)?;
        }
        let (q, k) = (q.transpose(1, 2)?.contiguous()?, k.transpose(1, 2)?);
        let dtype = q.dtype();
        // The kernel scales the whole product.
        let unscaled = (q.to_dtype(accumulation_dtype(dtype))? / scale)?.reshape((b, rows, columns, h * d))?;
        let along = |axis: usize| {
            let (n, others) = (sizes[axis], sizes[1 - axis]);
            let lines = unscaled.transpose(1, 1 + axis)?.contiguous()?.reshape((b, n, others * h, d))?;
            let products = lines.broadcast_matmul(&of_axis(n, &self.wide(GRID[axis])?)?)?;
            let products = products.reshape((b, n, others, h * n))?.transpose(1, 1 + axis)?.contiguous()?;
            products.reshape((b, t, h, n))?.to_dtype(dtype)
        };
        let q = Tensor::cat(&[q, along(0)?, along(1)?], D::Minus1)?;
        let h_kv = k.dim(2)?;
        let place = |axis: usize| {
            let (n, mut shape) = (sizes[axis], [1; 5]);
            (shape[1 + axis], shape[4]) = (n, n);
            let ones = Tensor::eye(n, dtype, k.device())?.reshape(&shape)?;
            ones.broadcast_as((b, rows, columns, h_kv, n))?.reshape((b, t, h_kv, n))
        };
        let k = Tensor::cat(&[k.contiguous()?, place(0)?, place(1)?], D::Minus1)?;
        Ok([q.transpose(1, 2)?, k.transpose(1, 2)?])
    }

    /// Queries (B, H, T, D) and keys (B, H_kv, T, D), views of (B, T, ..), of which products are the scores.
    pub(super) fn cosines(&self, q: &Tensor, k: &Tensor) -> Result<[Tensor; 2]> {
        let (_, h, _, d) = q.dims4()?;
        // A length of 1e-12 is the least that anything is divided by.
        let norm = Norm::without_weight(1e-24 / d as f64, d, q.dtype(), q.device())?;
        let factors = self.wide("logit_scale")?.minimum(100f64.ln())?.exp()?;
        // Normed rows are as long as the root of D.
        let factors = (factors / d as f64)?.reshape((h, 1))?;
        let normed = norm.forward(&q.transpose(1, 2)?)?.to_dtype(factors.dtype())?;
        let q = normed.broadcast_mul(&factors)?.to_dtype(q.dtype())?;
        Ok([q.transpose(1, 2)?, norm.forward(&k.transpose(1, 2)?)?.transpose(1, 2)?])
    }

    /// What the scores of a window get, (1, H, T, T).
    pub(super) fn window_bias(&self, [rows, columns]: [usize; 2]) -> Result<Tensor> {
        let of_places = match self.positions {
            ContentPositions::CosineWindow { trained, .. } => self.network([rows, columns], trained)?,
            _ => self.parameters.expect("relative_position_bias_table")?,
        };
        let t = rows * columns;
        let place = |query: usize, key: usize| {
            let down = query / columns + rows - 1 - key / columns;
            down * (2 * columns - 1) + query % columns + columns - 1 - key % columns
        };
        let pairs = (0..t).flat_map(|query| (0..t).map(move |key| place(query, key)));
        gathered(OP, &of_places, pairs, &[t, t])?.unsqueeze(0)
    }

    /// What Swin v2's network gives for each place, (places, H).
    fn network(&self, sizes: [usize; 2], trained: Option<[usize; 2]>) -> Result<Tensor> {
        let wide = |name: &str| self.wide(&format!("continuous_position_bias_mlp.{name}"));
        let (weight, bias, last) = (wide("0.weight")?, wide("0.bias")?, wide("2.weight")?);
        let (places, trained) = (sizes.map(|size| 2 * size - 1), trained.unwrap_or(sizes));
        let bytes = [places[0], places[1], HIDDEN, weight.dtype().size_in_bytes()];
        check_memory(OP, format_args!("a bias for {places:?} places"), &bytes)?;
        let along = |axis: usize, n: usize| {
            let place = (n + 1) as f64 - sizes[axis] as f64;
            let scaled = 8.0 * place / (trained[axis].max(2) - 1) as f64;
            (scaled.signum() * (scaled.abs() + 1.0).log2() / 3.0) as f32
        };
        let pairs = (0..places[0]).flat_map(|y| (0..places[1]).map(move |x| [y, x]));
        let coordinates: Vec<_> = pairs.flat_map(|[y, x]| [along(0, y), along(1, x)]).collect();
        let coordinates = Tensor::from_vec(coordinates, (places[0] * places[1], 2), &Device::Cpu)?;
        let coordinates = coordinates.to_device(weight.device())?.to_dtype(weight.dtype())?;
        let hidden = coordinates.matmul(&weight.t()?)?.broadcast_add(&bias)?.relu()?;
        ops::sigmoid(&hidden.matmul(&last.t()?)?)? * 16.0
    }
}

/// A table's entry of each place of a query and each of a key on an axis of n, (n, D, n).
fn of_axis(n: usize, table: &Tensor) -> Result<Tensor> {
    let distances = (0..n).flat_map(|query| (0..n).map(move |key| query + n - 1 - key));
    rows_of(table, distances)?.reshape((n, n, ()))?.transpose(1, 2)?.contiguous()
}
