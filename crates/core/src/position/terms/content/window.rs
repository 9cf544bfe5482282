//! Biases by the place of a key from its query in a window of an image, and cosine scores (Swin and Swin v2).

use std::sync::{Arc, OnceLock};

use candle_core::{Device, Result, Tensor, bail};
use candle_nn::{Init, ops};

use super::{ScoreTerm, Scores, Term, TermCall};
use crate::base::{
    Heads, LINEAR_WEIGHT, ParameterList, Source, Spec, Stored, accumulation_dtype, fits_in_memory, linear_bias,
};
use crate::norm::Norm;

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
    bias: Arc<OnceLock<Tensor>>,
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
        if self.is_cosine() {
            scores.options.scale = Some(1.0);
        }
        Ok(())
    }

    fn parameters(&self) -> Option<&ParameterList> {
        Some(&self.parameters)
    }

    fn freeze(&self) -> Result<Option<Term>> {
        Ok(Some(Arc::new(Self { parameters: self.parameters.freeze()?, bias: Arc::default(), ..self.clone() })))
    }
}

impl WindowTables {
    pub(super) fn of_table(sizes: [usize; 2], h: usize, source: &Source) -> Result<Self> {
        let init = Init::Randn { mean: 0.0, stdev: 0.02 };
        let table = spec(TABLE, &[places(sizes)?, h], init, source).by_head(Heads::Query, 1);
        Ok(Self { sizes, parameters: ParameterList::load(&[table], source)?, cosine: None, bias: Arc::default() })
    }

    pub(super) fn of_cosines(
        sizes: [usize; 2],
        trained: Option<[usize; 2]>,
        heads: [usize; 2],
        source: &Source,
    ) -> Result<Self> {
        let [h, d] = heads;
        let [scale, weight, bias, last] = COSINE;
        let specs = [
            spec(scale, &[h, 1, 1], Init::Const(10f64.ln()), source).by_head(Heads::Query, 0),
            spec(weight, &[HIDDEN, 2], LINEAR_WEIGHT, source),
            spec(bias, &[HIDDEN], linear_bias(2), source),
            spec(last, &[h, HIDDEN], LINEAR_WEIGHT, source).by_head(Heads::Query, 0),
        ];
        // A length of 1e-12 is the least that anything is divided by.
        let norm = Norm::without_weight(1e-24 / d as f64, d, source)?;
        let cosine = Cosine { trained: trained.unwrap_or(sizes), norm };
        let parameters = ParameterList::load(&specs, source)?;
        Ok(Self { sizes, parameters, cosine: Some(cosine), bias: Arc::default() })
    }

    /// An error if the file has any.
    pub(super) fn refuse(source: &Source) -> Result<()> {
        let names = PREFIXES.into_iter().flat_map(|prefix| [TABLE, COSINE[0]].map(|name| format!("{prefix}{name}")));
        names.into_iter().try_for_each(|name| source.refuse(&name, "the config has no content_positions"))
    }

    /// Whether queries have their scale already.
    fn is_cosine(&self) -> bool {
        self.cosine.is_some()
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
        if let Some(bias) = self.bias.get() {
            return Ok(bias.clone());
        }
        let bias = self.computed(t)?;
        // Training changes a variable in its own place, which a bias of before would not see.
        if !bias.track_op() {
            self.bias.get_or_init(|| bias.clone());
        }
        Ok(bias)
    }

    fn computed(&self, t: usize) -> Result<Tensor> {
        let of_places = match &self.cosine {
            Some(cosine) => self.of_network(cosine)?,
            None => self.wide(TABLE)?,
        };
        let h = of_places.dim(1)?;
        if !fits_in_memory(&[t, t, h]) {
            bail!("[content_positions] a bias of {:?} does not fit in memory", [h, t, t])
        }
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
    if !fits_in_memory(&sizes) {
        bail!("[content_positions] a bias for {sizes:?} places does not fit in memory")
    }
    Ok(sizes[0] * sizes[1])
}

/// A parameter, below whichever prefix the file has it.
fn spec(name: &str, shape: &[usize], init: Init, source: &Source) -> Spec {
    let names = PREFIXES.map(|prefix| format!("{prefix}{name}"));
    let stored = names.iter().find(|name| source.has(name)).unwrap_or(&names[0]);
    Spec::new(name, shape, init).stored(Stored::Whole(stored.clone()))
}
