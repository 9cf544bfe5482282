//! Decomposed relative positions of the patches of an image (MViTv2, SAM, ViTDet), as part of the product of queries
//! and keys.

use candle_core::{D, Result, Tensor};

use super::super::{CallContext, KeyValueHeads, ScoreArguments, ScoreTerm};
use super::OP;
use super::call::{Image, projected_keys, wide};
use super::distances::rows_of;
use super::specs::{LayerSpecs, zeros};
use candle_attention_modules::base::{ParameterList, ParameterSpec, accumulation_dtype, check_memory, matmul_by_head};

/// The parameter (2 · rows - 1, D) of distances down, which all heads share.
const HEIGHT: &str = "rel_pos_h";
/// The parameter (2 · columns - 1, D) of distances across.
const WIDTH: &str = "rel_pos_w";

/// The term of [`ContentPositions::Grid`](crate::ContentPositions::Grid).
#[derive(Debug)]
pub(super) struct GridTerm {
    pub image: Image,
    pub parameters: ParameterList,
}

/// One of the two axes of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ImageAxis {
    Down,
    Across,
}

impl ImageAxis {
    /// Returns the number of lines along the axis: the rows or the columns of the image.
    fn lines(self, image: Image) -> usize {
        match self {
            Self::Down => image.rows,
            Self::Across => image.columns,
        }
    }
}

/// Returns the parameters of the term: a table of vectors for each axis.
pub(super) fn specs(image: Image, layer: &LayerSpecs) -> Vec<ParameterSpec> {
    vec![
        layer.shared(HEIGHT, &[2 * image.rows - 1, layer.head_dim], zeros()),
        layer.shared(WIDTH, &[2 * image.columns - 1, layer.head_dim], zeros()),
    ]
}

impl ScoreTerm for GridTerm {
    fn modify(&self, arguments: &mut ScoreArguments, kv: Option<&mut KeyValueHeads>, call: &CallContext) -> Result<()> {
        let kv = projected_keys(kv, call)?;
        self.image.check("grid", &arguments.q)?;
        if arguments.q.elem_count() > 0 {
            let scale = arguments.options.scale.unwrap_or(1.0);
            let wider_q = self.wider_queries(&arguments.q, scale)?;
            kv.keys = self.wider_keys(&kv.keys)?;
            arguments.q = wider_q;
        }
        Ok(())
    }
}

/// Queries and keys are made wider by `rows + columns` entries: a query by its product with the vector of the distance
/// to each row and to each column, a key by ones at its own row and column. `scale` times their product is then the
/// whole score.
impl GridTerm {
    /// Returns queries (B, H, T, D), a view of (B, T, ..), with their products.
    fn wider_queries(&self, q: &Tensor, scale: f64) -> Result<Tensor> {
        let Image { rows, columns } = self.image;
        let (b, h, t, d) = q.dims4()?;
        let dtype = accumulation_dtype(q.dtype());
        let shape = [b, t, h, d + rows + columns];
        let bytes = [&shape[..], &[dtype.size_in_bytes()]].concat();
        check_memory(OP, format_args!("queries of shape {shape:?}"), &bytes)?;
        let q = q.transpose(1, 2)?.contiguous()?;
        // The kernel scales the whole product.
        let unscaled = (q.to_dtype(dtype)? / scale)?.reshape((b, rows, columns, h * d))?;
        let down = self.products(ImageAxis::Down, &unscaled, h)?.reshape((b, t, h, rows))?.to_dtype(q.dtype())?;
        let across =
            self.products(ImageAxis::Across, &unscaled, h)?.reshape((b, t, h, columns))?.to_dtype(q.dtype())?;
        Tensor::cat(&[q, down, across], D::Minus1)?.transpose(1, 2)
    }

    /// Returns the products of queries (B, rows, columns, H · D) with the vectors of the distances along an axis of n
    /// lines: (B, rows, columns, H · n).
    fn products(&self, axis: ImageAxis, queries: &Tensor, h: usize) -> Result<Tensor> {
        let (b, rows, columns, width) = queries.dims4()?;
        let n = axis.lines(self.image);
        let queries_of_line = rows * columns / n;
        let name = if axis == ImageAxis::Down { HEIGHT } else { WIDTH };
        // The dimension of `queries` along the axis.
        let dim = if axis == ImageAxis::Down { 1 } else { 2 };
        let vectors = by_lines(n, &wide(&self.parameters, name)?)?;
        let lines = queries.transpose(1, dim)?.contiguous()?.reshape((b, n, queries_of_line * h, width / h))?;
        let products = matmul_by_head(&lines, &vectors)?;
        products.reshape((b, n, queries_of_line, h * n))?.transpose(1, dim)?.contiguous()
    }

    /// Returns keys (B, H_kv, T, D), a view of (B, T, ..), with ones at their row and column.
    fn wider_keys(&self, k: &Tensor) -> Result<Tensor> {
        let k = k.transpose(1, 2)?;
        let Image { rows, columns } = self.image;
        let (b, t, h_kv, _) = k.dims4()?;
        let ones = |axis: ImageAxis| {
            let n = axis.lines(self.image);
            let shape = if axis == ImageAxis::Down { (1, n, 1, 1, n) } else { (1, 1, n, 1, n) };
            check_lines(n, &[k.dtype().size_in_bytes()])?;
            let ones = Tensor::eye(n, k.dtype(), k.device())?.reshape(shape)?;
            ones.broadcast_as((b, rows, columns, h_kv, n))?.reshape((b, t, h_kv, n))
        };
        let wider = [k.contiguous()?, ones(ImageAxis::Down)?, ones(ImageAxis::Across)?];
        Tensor::cat(&wider, D::Minus1)?.transpose(1, 2)
    }
}

/// Checks that a tensor for each two of `n` rows or columns fits in memory. `bytes` has the sizes of one entry.
fn check_lines(n: usize, bytes: &[usize]) -> Result<()> {
    check_memory(OP, format_args!("the positions of {n} rows or columns"), &[&[n, n], bytes].concat())
}

/// Returns the vector of a table (2 · n - 1, D) for each line of a query and each line of a key on an axis of n lines:
/// (n, D, n).
fn by_lines(n: usize, table: &Tensor) -> Result<Tensor> {
    check_lines(n, &[table.dim(1)?, table.dtype().size_in_bytes()])?;
    let distances = (0..n).flat_map(|query| (0..n).map(move |key| query + n - 1 - key));
    rows_of(table, distances)?.reshape((n, n, ()))?.transpose(1, 2)?.contiguous()
}
