//! Decomposed relative positions in a grid of patches, as part of the product of queries and keys.

use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_nn::Init;

use super::{ScoreTerm, Scores, Term, TermCall};
use crate::base::{ParameterList, Source, Spec, accumulation_dtype};

/// The parameters of [`ContentPositions::Grid`](crate::ContentPositions::Grid).
#[derive(Debug, Clone)]
pub(super) struct GridTables {
    /// Rows and columns of the grid.
    sizes: [usize; 2],
    /// (2 · rows - 1, D) and (2 · columns - 1, D), which all heads share.
    parameters: ParameterList,
}

pub(super) const NAMES: [&str; 2] = ["rel_pos_h", "rel_pos_w"];

impl ScoreTerm for GridTables {
    fn add(&self, scores: &mut Scores, call: &TermCall) -> Result<()> {
        let [q, k] = self.widen(&scores.q, &scores.own_keys(call)?, scores.scale())?;
        (scores.q, scores.k) = (q, Some(k));
        Ok(())
    }

    fn parameters(&self) -> Option<&ParameterList> {
        Some(&self.parameters)
    }

    fn freeze(&self) -> Result<Option<Term>> {
        Ok(Some(Arc::new(Self { sizes: self.sizes, parameters: self.parameters.freeze()? })))
    }
}

impl GridTables {
    pub(super) fn load(sizes: [usize; 2], d: usize, source: &Source) -> Result<Self> {
        let table = |axis: usize| Spec::new(NAMES[axis], [2 * sizes[axis] - 1, d], Init::Const(0.0));
        Ok(Self { sizes, parameters: ParameterList::load(&[table(0), table(1)], source)? })
    }

    /// Queries (B, H, T, D) and keys (B, H_kv, T, D), views of (B, T, ..), made wider: a query by its product with the
    /// table's entry for each row and each column of keys, a key by ones at its own row and column. `scale` times the
    /// product of the two is then the whole score.
    fn widen(&self, q: &Tensor, k: &Tensor, scale: f64) -> Result<[Tensor; 2]> {
        let [rows, columns] = self.sizes;
        let (b, h, t, d) = q.dims4()?;
        if t != rows * columns {
            bail!("[multi_head_attention] queries have {t} tokens, expected the {rows} × {columns} of the grid")
        }
        let (q, k) = (q.transpose(1, 2)?.contiguous()?, k.transpose(1, 2)?);
        let (dtype, wide) = (q.dtype(), accumulation_dtype(q.dtype()));
        if b == 0 {
            let wider = |x: &Tensor| Tensor::zeros((0, x.dim(2)?, t, d + rows + columns), dtype, x.device());
            return Ok([wider(&q)?, wider(&k)?]);
        }
        // The kernel scales the whole product.
        let by_rows = (q.to_dtype(wide)? / scale)?.reshape((b, rows, columns * h, d))?;
        let by_columns = by_rows.reshape((b, rows, columns, h * d))?.transpose(1, 2)?.contiguous()?;
        let by_columns = by_columns.reshape((b, columns, rows * h, d))?;
        let of_rows = by_rows.broadcast_matmul(&self.of_axis(0, wide)?)?.reshape((b, t, h, rows))?;
        let of_columns = by_columns.broadcast_matmul(&self.of_axis(1, wide)?)?;
        let of_columns = of_columns.reshape((b, columns, rows, h * columns))?.transpose(1, 2)?.contiguous()?;
        let of_columns = of_columns.reshape((b, t, h, columns))?;
        let q = Tensor::cat(&[&q, &of_rows.to_dtype(dtype)?, &of_columns.to_dtype(dtype)?], D::Minus1)?;
        let places = self.places(dtype)?.to_device(k.device())?.unsqueeze(1)?.unsqueeze(0)?;
        let places = places.broadcast_as((b, t, k.dim(2)?, rows + columns))?.contiguous()?;
        let k = Tensor::cat(&[&k.contiguous()?, &places], D::Minus1)?;
        Ok([q.transpose(1, 2)?, k.transpose(1, 2)?])
    }

    /// The table's entry of each place of a query and each of a key on an axis, (n, D, n).
    fn of_axis(&self, axis: usize, dtype: DType) -> Result<Tensor> {
        let (n, table) = (self.sizes[axis], self.parameters.expect(NAMES[axis])?);
        let distances = (0..n).flat_map(|query| (0..n).map(move |key| (query + n - 1 - key) as u32));
        let distances = Tensor::from_vec(distances.collect::<Vec<_>>(), n * n, table.device())?;
        let entries = table.to_dtype(dtype)?.index_select(&distances, 0)?;
        entries.reshape((n, n, ()))?.transpose(1, 2)?.contiguous()
    }

    /// Ones at the row and the column of each patch, (T, rows + columns).
    fn places(&self, dtype: DType) -> Result<Tensor> {
        let [rows, columns] = self.sizes;
        let mut ones = vec![0f32; rows * columns * (rows + columns)];
        for (patch, ones) in ones.chunks_exact_mut(rows + columns).enumerate() {
            ones[patch / columns] = 1.0;
            ones[rows + patch % columns] = 1.0;
        }
        Tensor::from_vec(ones, (rows * columns, rows + columns), &Device::Cpu)?.to_dtype(dtype)
    }
}
