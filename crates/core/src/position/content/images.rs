//! Positions of patches of an image: in a grid, as part of the product of queries and keys (SAM), and in a window, as a
//! bias and with cosine scores (Swin and Swin v2).

use std::sync::Arc;

use candle_core::{D, DType, Device, Result, Tensor, bail};
use candle_nn::{Init, ops};

use super::{OP, ScoreTerm, Scores, TermCall};
use crate::position::{Latest, latest};
use candle_attention_modules::base::{
    Heads, LINEAR_WEIGHT, ParameterList, Source, Spec, Stored, accumulation_dtype, check_memory, linear_bias,
};
use candle_attention_modules::norm::Norm;

/// The parameters of [`ContentPositions::Grid`](crate::ContentPositions::Grid).
#[derive(Debug, Clone)]
pub(super) struct GridTables {
    /// Rows and columns of the grid.
    pub sizes: [usize; 2],
    /// (2 · rows - 1, D) and (2 · columns - 1, D), which all heads share.
    pub parameters: ParameterList,
}

pub(super) const GRID: [&str; 2] = ["rel_pos_h", "rel_pos_w"];

impl ScoreTerm for GridTables {
    fn add(&self, scores: &mut Scores, call: &TermCall) -> Result<()> {
        let [q, k] = self.widen(&scores.q, &scores.own_keys(call)?, scores.scale())?;
        (scores.q, scores.k) = (q, Some(k));
        Ok(())
    }
}

impl GridTables {
    pub(super) fn specs(sizes: [usize; 2], d: usize) -> Vec<Spec> {
        let table = |axis: usize| Spec::new(GRID[axis], [2 * sizes[axis] - 1, d], Init::Const(0.0));
        vec![table(0), table(1)]
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
        let (n, table) = (self.sizes[axis], self.parameters.expect(GRID[axis])?);
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

/// The parameters of [`ContentPositions::Window`](crate::ContentPositions::Window) and
/// [`ContentPositions::CosineWindow`](crate::ContentPositions::CosineWindow).
#[derive(Debug, Clone)]
pub(super) struct WindowTables {
    /// Rows and columns of the window.
    sizes: [usize; 2],
    /// [`TABLE`], or those of [`COSINE`].
    parameters: ParameterList,
    cosine: Option<Cosine>,
    /// (1, H, T, T), where nothing is tracked.
    bias: Arc<Latest<(), Tensor>>,
}

#[derive(Debug, Clone)]
struct Cosine {
    /// The window by which places are scaled.
    trained: [usize; 2],
    /// By the root of the mean square.
    norm: Norm,
}

const TABLE: &str = "relative_position_bias_table";
const COSINE: [&str; 4] = [
    "logit_scale",
    "continuous_position_bias_mlp.0.weight",
    "continuous_position_bias_mlp.0.bias",
    "continuous_position_bias_mlp.2.weight",
];
/// Below which files have them, the crate's own first.
const PREFIXES: [&str; 3] = ["", "self.", "relative_position_bias."];
/// Numbers between the two layers of Swin v2's network.
const HIDDEN: usize = 512;

impl ScoreTerm for WindowTables {
    fn add(&self, scores: &mut Scores, call: &TermCall) -> Result<()> {
        let [q, k] = self.scaled(scores.q.clone(), scores.own_keys(call)?)?;
        scores.mask = scores.mask.clone().with_bias(&self.bias(q.dim(2)?)?);
        (scores.q, scores.k) = (q, Some(k));
        if self.cosine.is_some() {
            // Queries have their scale already.
            scores.options.scale = Some(1.0);
        }
        Ok(())
    }
}

impl WindowTables {
    pub(super) fn of_table(sizes: [usize; 2], parameters: ParameterList) -> Self {
        Self { sizes, parameters, cosine: None, bias: Arc::default() }
    }

    /// Of cosines between heads of width `d`, for places that are scaled by the window `trained`.
    pub(super) fn of_cosines(
        sizes: [usize; 2],
        trained: [usize; 2],
        d: usize,
        parameters: ParameterList,
    ) -> Result<Self> {
        let scale = parameters.expect(COSINE[0])?;
        // A length of 1e-12 is the least that anything is divided by.
        let norm = Norm::without_weight(1e-24 / d as f64, d, scale.dtype(), scale.device())?;
        Ok(Self { cosine: Some(Cosine { trained, norm }), ..Self::of_table(sizes, parameters) })
    }

    pub(super) fn table_specs(sizes: [usize; 2], h: usize, source: &Source) -> Result<Vec<Spec>> {
        let init = Init::Randn { mean: 0.0, stdev: 0.02 };
        Ok(vec![spec(TABLE, &[places(sizes)?, h], init, source).by_head(Heads::Query, 1)])
    }

    pub(super) fn cosine_specs(h: usize, source: &Source) -> Vec<Spec> {
        let [scale, weight, bias, last] = COSINE;
        vec![
            spec(scale, &[h, 1, 1], Init::Const(10f64.ln()), source).by_head(Heads::Query, 0),
            spec(weight, &[HIDDEN, 2], LINEAR_WEIGHT, source),
            spec(bias, &[HIDDEN], linear_bias(2), source),
            spec(last, &[h, HIDDEN], LINEAR_WEIGHT, source).by_head(Heads::Query, 0),
        ]
    }

    /// An error if the file has any.
    pub(super) fn refuse(source: &Source) -> Result<()> {
        let names = PREFIXES.into_iter().flat_map(|prefix| [TABLE, COSINE[0]].map(|name| format!("{prefix}{name}")));
        names.into_iter().try_for_each(|name| source.refuse(&name, "the config has no content_positions"))
    }

    /// Queries (B, H, T, D) and keys (B, H_kv, T, D), views of (B, T, ..), of which products are the scores, but for
    /// the layer's scale where these are no cosines.
    fn scaled(&self, q: Tensor, k: Tensor) -> Result<[Tensor; 2]> {
        let Some(Cosine { norm, .. }) = &self.cosine else { return Ok([q, k]) };
        let (dtype, wide) = (q.dtype(), accumulation_dtype(q.dtype()));
        let (h, d) = (q.dim(1)?, q.dim(3)?);
        // Normed rows are as long as the root of D.
        let factors = (self.parameters.expect(COSINE[0])?.to_dtype(wide)?.minimum(100f64.ln())?.exp()? / d as f64)?
            .reshape((h, 1))?;
        let q = norm.forward(&q.transpose(1, 2)?)?.to_dtype(wide)?.broadcast_mul(&factors)?.to_dtype(dtype)?;
        Ok([q.transpose(1, 2)?, norm.forward(&k.transpose(1, 2)?)?.transpose(1, 2)?])
    }

    /// What the scores of `t` tokens get, (1, H, T, T).
    fn bias(&self, t: usize) -> Result<Tensor> {
        let [rows, columns] = self.sizes;
        if t != rows * columns {
            bail!("[multi_head_attention] queries have {t} tokens, expected the {rows} × {columns} of the window")
        }
        latest(&self.bias, |()| true, || self.computed(t), |bias| (!bias.track_op()).then_some(()))
    }

    fn computed(&self, t: usize) -> Result<Tensor> {
        let of_places = match &self.cosine {
            Some(cosine) => self.of_network(cosine)?,
            None => self.wide(TABLE)?,
        };
        let h = of_places.dim(1)?;
        check_memory(OP, format_args!("a bias of {:?}", [h, t, t]), &[h, t, t])?;
        let [rows, columns] = self.sizes;
        let place = |query: usize, key: usize| {
            let down = query / columns + rows - 1 - key / columns;
            (down * (2 * columns - 1) + query % columns + columns - 1 - key % columns) as u32
        };
        let pairs = (0..t).flat_map(|query| (0..t).map(move |key| place(query, key))).collect::<Vec<_>>();
        let pairs = Tensor::from_vec(pairs, t * t, of_places.device())?;
        of_places.index_select(&pairs, 0)?.reshape((t, t, h))?.permute((2, 0, 1))?.contiguous()?.unsqueeze(0)
    }

    /// What Swin v2's network gives for each place, (places, H).
    fn of_network(&self, cosine: &Cosine) -> Result<Tensor> {
        let [_, weight, bias, last] = COSINE;
        let weight = self.wide(weight)?;
        let [rows, columns] = self.sizes;
        let along = |axis: usize, n: usize| {
            let place = (n + 1) as f64 - self.sizes[axis] as f64;
            let scaled = 8.0 * place / (cosine.trained[axis].max(2) - 1) as f64;
            (scaled.signum() * (scaled.abs() + 1.0).log2() / 3.0) as f32
        };
        let pairs = (0..2 * rows - 1).flat_map(|y| (0..2 * columns - 1).map(move |x| [y, x]));
        let coordinates: Vec<_> = pairs.flat_map(|[y, x]| [along(0, y), along(1, x)]).collect();
        let coordinates = Tensor::from_vec(coordinates, (places(self.sizes)?, 2), &Device::Cpu)?;
        let coordinates = coordinates.to_device(weight.device())?.to_dtype(weight.dtype())?;
        let hidden = coordinates.matmul(&weight.t()?)?.broadcast_add(&self.wide(bias)?)?.relu()?;
        ops::sigmoid(&hidden.matmul(&self.wide(last)?.t()?)?)? * 16.0
    }

    fn wide(&self, name: &str) -> Result<Tensor> {
        let tensor = self.parameters.expect(name)?;
        tensor.to_dtype(accumulation_dtype(tensor.dtype()))
    }
}

/// How many places a key may have from its query.
fn places(sizes: [usize; 2]) -> Result<usize> {
    let sizes = sizes.map(|size| 2 * size - 1);
    check_memory(OP, format_args!("a bias for {sizes:?} places"), &sizes)?;
    Ok(sizes[0] * sizes[1])
}

/// A parameter, below whichever prefix the file has it.
fn spec(name: &str, shape: &[usize], init: Init, source: &Source) -> Spec {
    let names = PREFIXES.map(|prefix| format!("{prefix}{name}"));
    let stored = names.iter().find(|name| source.has(name)).unwrap_or(&names[0]);
    Spec::new(name, shape, init).stored(Stored::Whole(stored.clone()))
}
