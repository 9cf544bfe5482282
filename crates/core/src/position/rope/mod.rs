//! Rotary positions: angles by position, on one axis or several, and the rotation of heads.

mod angles;
mod axes;
mod config;
mod cuda;
mod frequencies;
mod metal;
mod scaling;
mod stored;

pub use axes::{RopeAxes, RopeAxisLayout};
pub use config::{RopeConfig, RopeStyle};
pub use cuda::ROTATION_CASE;
pub use metal::METAL_ROTATION_CASE;
pub use scaling::RopeScaling;

pub(crate) use frequencies::score_factor;

use std::sync::Arc;

use candle_core::{DType, Result, Tensor, bail};
use candle_nn::rotary_emb;

use crate::position::Positions;
use angles::{AngleRow, AngleTensors, Angles, Tables};
use candle_attention_modules::base::rowwise::{Row, RowPass, map_rows, read, to_vec, with_contiguous_rows, with_float};
use candle_attention_modules::base::{Dim, Expect, FLOATS, accumulation_dtype, check_memory, record};

const OP: &str = "rope";

/// Rotary embedding: the cosines and sines of a [`RopeConfig`] for heads of one width, and the rotation of queries and
/// keys by them.
///
/// Cosines and sines are computed once, in f32, and stored in a table that grows with the positions. Clones share the
/// table. A model makes one rotary embedding for all layers that have the same config:
///
/// ```
/// use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, RopeConfig, RotaryEmbedding};
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// # let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let rope = RopeConfig::new(10_000.0);
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true).with_rope(rope.clone());
/// let rotary = RotaryEmbedding::new(&rope, cfg.head_dim())?;
/// let layers = (0..2).map(|i| MultiHeadAttention::new(&cfg, vb.pp(i))?.with_rotary(rotary.clone()));
/// let layers = layers.collect::<candle_core::Result<Vec<_>>>()?;
/// # assert_eq!(layers.len(), 2);
/// # Ok(()) }
/// ```
#[doc(alias("rotate_half", "apply_rotary_pos_emb", "freqs_cis"))]
#[derive(Debug, Clone)]
pub struct RotaryEmbedding {
    config: RopeConfig,
    head_dim: usize,
    tables: Arc<Tables>,
    /// A table of the caller, which has a row for each position and does not grow.
    given: Option<Arc<Angles>>,
    /// Factors on the frequencies of the r/2 pairs.
    frequency_factors: Option<Arc<[f32]>>,
}

impl RotaryEmbedding {
    /// Returns the rotary embedding of heads of width `head_dim`. Cosines and sines are computed by the first call.
    ///
    /// # Errors
    /// As [`RopeConfig::validate`].
    pub fn new(config: &RopeConfig, head_dim: usize) -> Result<Self> {
        config.validate(head_dim)?;
        Ok(Self { config: config.clone(), head_dim, tables: Arc::default(), given: None, frequency_factors: None })
    }

    /// Multiplies the frequency of each of the r/2 pairs by a factor, (r/2,), that a model learned (Mistral Large 4).
    ///
    /// ```
    /// use candle_attention::{RopeConfig, RotaryEmbedding};
    /// use candle_core::{Device, Tensor};
    /// # fn main() -> candle_core::Result<()> {
    /// let rotary = RotaryEmbedding::new(&RopeConfig::new(10_000.0), 4)?;
    /// let doubled = rotary.clone().with_frequency_factors(&Tensor::new(&[2f32, 2.], &Device::Cpu)?)?;
    /// let q = Tensor::rand(0f32, 1., (1, 1, 1, 4), &Device::Cpu)?;
    /// let difference = (doubled.apply_from(&q, 3)? - rotary.apply_from(&q, 6)?)?;
    /// assert!(difference.abs()?.max_all()?.to_scalar::<f32>()? < 1e-6);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For another shape or dtype, for factors that are tracked for gradients, which do not flow into them, and for
    /// given tables.
    pub fn with_frequency_factors(self, factors: &Tensor) -> Result<Self> {
        let found = Expect::one("rope", "frequency factors", factors);
        found.shape(&[Dim::Named("r/2", self.half())])?.float("")?;
        if factors.track_op() {
            bail!("[rope] the frequency factors are tracked for gradients, which do not flow into them")
        }
        if self.given.is_some() {
            bail!("[rope] frequency factors are given with tables of cosines and sines, expected one of the two")
        }
        let frequency_factors = Some(to_vec::<f32>(factors)?.into());
        Ok(Self { tables: Arc::default(), frequency_factors, ..self })
    }

    /// Returns the rotary embedding of given tables of cosines and sines, (P, r/2) each: row p is for position p, and
    /// column i for pair i of the r entries of a head that the config rotates. They are stored in f32.
    ///
    /// The config says which entries are pairs; its base, scaling and direction are ignored. Most models of Hugging
    /// Face compute tables (P, r) in which the r/2 columns occur twice: pass `cos.narrow(1, 0, r / 2)?`.
    ///
    /// ```
    /// use candle_attention::{RopeConfig, RotaryEmbedding};
    /// use candle_core::{DType, Device, Tensor};
    /// # fn main() -> candle_core::Result<()> {
    /// let (positions, pairs) = (100, 4);
    /// let angles = Tensor::rand(0f32, 1., (positions, pairs), &Device::Cpu)?;
    /// let config = RopeConfig::new(10_000.0);
    /// let rotary = RotaryEmbedding::from_tables(&config, 2 * pairs, &angles.cos()?, &angles.sin()?)?;
    /// # let q = Tensor::zeros((1, 2, 3, 8), DType::F32, &Device::Cpu)?;
    /// let q = rotary.apply_from(&q, 97)?;
    /// assert!(rotary.apply_from(&q, 98).is_err()); // Position 100 is not in the tables.
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`RopeConfig::validate`], for a config with axes, and for tables of another shape or dtype, that do not fit
    /// in memory or that are tracked for gradients, which do not flow into them. A position past their end is an error
    /// of the call.
    pub fn from_tables(config: &RopeConfig, head_dim: usize, cos: &Tensor, sin: &Tensor) -> Result<Self> {
        let embedding = Self::new(config, head_dim)?;
        let half = embedding.half();
        if config.axes().is_some() {
            bail!("[rope] tables have one row for a position, but the config has axes")
        }
        Expect::one("rope", "cos", cos).shape(&[Dim::Any("P"), Dim::Named("r/2", half)])?;
        Expect::one("rope", "sin", sin).shape(&[Dim::Named("P", cos.dim(0)?), Dim::Named("r/2", half)])?;
        check_memory("rope", format_args!("a table of shape {:?}", cos.dims()), &[cos.elem_count(), size_of::<f32>()])?;
        let entries = |name: &str, table: &Tensor| -> Result<Vec<f32>> {
            if !FLOATS.contains(&table.dtype()) || table.track_op() {
                let tracked = if table.track_op() { " tracked for gradients" } else { "" };
                bail!("[rope] {name} is {:?}{tracked}, expected floats that are not tracked", table.dtype())
            }
            to_vec(table)
        };
        let given = Angles::new(entries("cos", cos)?, entries("sin", sin)?, half);
        Ok(Self { given: Some(Arc::new(given)), ..embedding })
    }

    /// Returns these tables, or tables with the frequency factors of another embedding if it has some.
    pub(crate) fn with_factors_of(self, other: &Self) -> Self {
        match &other.frequency_factors {
            Some(factors) => {
                Self { tables: Arc::default(), frequency_factors: Some(factors.clone()), given: None, ..self }
            }
            None => self,
        }
    }

    /// Returns the config.
    pub fn config(&self) -> &RopeConfig {
        &self.config
    }

    /// Returns the width of a head (D).
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Checks that the config and the width of heads are these; `op` is for the error.
    pub(crate) fn check_config(&self, op: &str, rope: &RopeConfig, d: usize) -> Result<()> {
        if self.frequency_factors.is_some() {
            bail!("[{op}] rotary tables have frequency factors, expected tables of {rope:?} alone")
        }
        if rope != self.config() || d != self.head_dim() {
            bail!(
                "[{op}] rotary tables are of {:?} and heads of {}, expected {rope:?} and heads of {d}",
                self.config(),
                self.head_dim()
            )
        }
        Ok(())
    }

    /// Rotates queries or keys (B, H, T, D) by integer positions (T,) or (B, T). The result has the same shape and
    /// dtype; the rotation is computed in f32 (f64 for f64). Differentiable.
    ///
    /// # Errors
    /// For another rank, width or dtype, for a result that does not fit in memory, and for positions of another shape,
    /// below 0, of 2^24 and more (where f32 cannot represent each), or past the end of given tables.
    pub fn apply(&self, xs: &Tensor, positions: &Tensor) -> Result<Tensor> {
        self.rotate(xs, |b, t| self.at(&Positions::from_tensor("positions", positions, b, t)?))
    }

    /// Rotates as [`apply`](Self::apply) does, by the positions `offset`, `offset + 1` and so on.
    ///
    /// # Errors
    /// As [`apply`](Self::apply).
    pub fn apply_from(&self, xs: &Tensor, offset: usize) -> Result<Tensor> {
        self.rotate(xs, |_, t| self.at(&Positions::starting_at(&[offset], t)?))
    }

    /// Rotates as [`apply`](Self::apply) does, by positions (A, T) or (A, B, T) on the config's axes, as in
    /// [`AttentionInput::with_axis_positions`](crate::AttentionInput::with_axis_positions).
    ///
    /// # Errors
    /// As [`apply`](Self::apply), and for a config without axes.
    pub fn apply_on_axes(&self, xs: &Tensor, positions: &Tensor) -> Result<Tensor> {
        self.rotate(xs, |b, t| match self.config().axes() {
            Some(axes) => self.on_axes(&axes.positions(positions, b, t)?),
            None => bail!("[rope] axis positions were given, but the config has no axes"),
        })
    }

    /// Rotates by the rotation of B sequences of T positions that `rotation` returns.
    fn rotate(&self, xs: &Tensor, rotation: impl FnOnce(usize, usize) -> Result<Rotation>) -> Result<Tensor> {
        let shape = [Dim::Any("B"), Dim::Any("H"), Dim::Any("T"), Dim::Named("D", self.head_dim())];
        Expect::many("rope", "xs", xs).shape(&shape)?.float("")?;
        let bytes = [xs.dims(), &[xs.dtype().size_in_bytes()]].concat();
        check_memory("rope", format_args!("a result of shape {:?}", xs.dims()), &bytes)?;
        rotation(xs.dim(0)?, xs.dim(2)?)?.apply(&xs.transpose(1, 2)?)?.transpose(1, 2)
    }
}

/// The rotation of the tokens of a call.
#[derive(Debug, Clone)]
pub(crate) struct Rotation {
    angles: Arc<Angles>,
    /// The row of angles of each token, T for all sequences or B · T.
    index: Arc<[u32]>,
    style: RopeStyle,
    /// The number of parts of a head inside of which entries are paired.
    parts: usize,
    /// Whether tokens are rotated by the opposite angles: in the backward pass, and where outputs rotate back.
    inverse: bool,
}

impl Rotation {
    /// Rotates queries or keys (B, T, H, D) of any strides. Returns a contiguous tensor of the same shape and dtype.
    /// Differentiable.
    pub(crate) fn apply(&self, xs: &Tensor) -> Result<Tensor> {
        let (b, t, ..) = xs.dims4()?;
        if xs.elem_count() > 0 && ![t, b * t].contains(&self.index.len()) {
            bail!("[rope] there are {} positions, expected {t}, or {b} times {t}", self.index.len())
        }
        if xs.device().is_cuda()
            && xs.elem_count() > 0
            && let Some(rotated) = self.by_kernel(xs)?
        {
            return Ok(rotated);
        }
        if xs.device().is_metal()
            && xs.elem_count() > 0
            && let Some(rotated) = self.on_metal(xs)?
        {
            return Ok(rotated);
        }
        if !xs.device().is_cpu() || xs.dtype() == DType::F64 {
            return self.by_candle(xs);
        }
        let xs = with_contiguous_rows(xs)?;
        let inverse = self.inverse();
        let backward = move |_: &Tensor, gradient: &Tensor| Ok(vec![Some(inverse.apply(gradient)?)]);
        with_float!("rope", xs.dtype(), |E| {
            let rotated: Vec<E> = {
                let reader = read(&xs);
                let rows = reader.rows::<E>()?;
                map_rows(&rows, [&rows], None, self).rows
            };
            record("rotary-embedding", &[Some(&xs)], rotated, xs.shape(), backward)
        })
    }

    /// Returns the rotation by the opposite angles.
    pub(crate) fn inverse(&self) -> Self {
        Self { inverse: !self.inverse, ..self.clone() }
    }

    /// Rotates the pairs of a head by the angles of its token.
    fn rotate_pairs(&self, head: &mut [f32], angles: AngleRow) {
        let AngleRow { cos: cosines, sin: sines } = angles;
        let sign = if self.inverse { -1.0 } else { 1.0 };
        let rotated = |x: f32, y: f32, cos: &f32, sin: &f32| {
            let signed_sin = sign * sin;
            (x * cos - y * signed_sin, y * cos + x * signed_sin)
        };
        match self.style {
            RopeStyle::RotateHalf => {
                let half = cosines.len() / self.parts;
                let parts = head.chunks_exact_mut(2 * half);
                let angles_of_parts = cosines.chunks_exact(half).zip(sines.chunks_exact(half));
                for (part, (own_cosines, own_sines)) in parts.zip(angles_of_parts) {
                    let (first, second) = part.split_at_mut(half);
                    for (((x, y), cos), sin) in first.iter_mut().zip(second).zip(own_cosines).zip(own_sines) {
                        (*x, *y) = rotated(*x, *y, cos, sin);
                    }
                }
            }
            RopeStyle::Interleaved => {
                for ((pair, cos), sin) in head.chunks_exact_mut(2).zip(cosines).zip(sines) {
                    (pair[0], pair[1]) = rotated(pair[0], pair[1], cos, sin);
                }
            }
        }
    }

    /// Rotates as [`apply`](Self::apply) does, on any device and for f64, by Candle's operations: the fused ones if
    /// nothing is tracked for gradients, since they have no backward pass.
    fn by_candle(&self, xs: &Tensor) -> Result<Tensor> {
        if xs.elem_count() == 0 {
            // An empty view may begin past the end of its buffer, where the copies of callers would panic.
            return if xs.track_op() { Ok(xs.clone()) } else { xs.zeros_like() };
        }
        let (b, t, h, d) = xs.dims4()?;
        let r = 2 * self.angles.half;
        let rows = self.index.len();
        let AngleTensors { cos, sin } = self.tensors(xs)?;
        // Sequences with different positions are concatenated to one sequence.
        let in_one = |part: Tensor, dims: [usize; 4]| if rows == t { Ok(part) } else { part.reshape(&dims) };
        let inputs = in_one(xs.narrow(3, 0, r)?, [1, rows, h, r])?.transpose(1, 2)?;
        let inputs = inputs.to_dtype(cos.dtype())?.contiguous()?;
        let rotate = match (self.style, xs.track_op()) {
            (RopeStyle::RotateHalf, false) => rotary_emb::rope,
            (RopeStyle::RotateHalf, true) => rotary_emb::rope_slow,
            (RopeStyle::Interleaved, false) => rotary_emb::rope_i,
            (RopeStyle::Interleaved, true) => rotary_emb::rope_i_slow,
        };
        let width = r / self.parts;
        let mut parts = Vec::with_capacity(self.parts);
        for part in 0..self.parts {
            let angles_of = |table: &Tensor| table.narrow(1, part * width / 2, width / 2)?.contiguous();
            let inputs_of = inputs.narrow(3, part * width, width)?.contiguous()?;
            parts.push(rotate(&inputs_of, &angles_of(&cos)?, &angles_of(&sin)?)?);
        }
        let rotated = Tensor::cat(&parts, 3)?.to_dtype(xs.dtype())?.transpose(1, 2)?;
        let rotated = in_one(rotated, [b, t, h, r])?;
        if r == d { rotated.contiguous() } else { Tensor::cat(&[&rotated, &xs.narrow(3, r, d - r)?], 3)?.contiguous() }
    }

    /// Returns the cosines and sines for `xs`, (T, r/2) or (B · T, r/2), in the dtype of the computation.
    fn tensors(&self, xs: &Tensor) -> Result<AngleTensors> {
        let index = &self.index;
        let device = xs.device();
        let in_a_row = index.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let chosen = |table: &Tensor| {
            let rows = match index.first() {
                Some(&first) if in_a_row => table.narrow(0, first as usize, index.len())?,
                _ => table.index_select(&Tensor::from_slice(index, index.len(), device)?, 0)?,
            };
            rows.to_dtype(accumulation_dtype(xs.dtype()))
        };
        let tables = self.angles.on(device)?;
        let sin = chosen(&tables.sin)?;
        Ok(AngleTensors { cos: chosen(&tables.cos)?, sin: if self.inverse { sin.neg()? } else { sin } })
    }
}

impl<E> RowPass<E, 1> for Rotation {
    /// The row of the token's angles.
    type Scratch = usize;

    fn begin_token(&self, token: usize, angles_row: &mut usize) {
        *angles_row = self.index[token % self.index.len()] as usize;
    }

    fn compute(&self, row: Row<1>, angles_row: &mut usize) {
        let [head] = row.inputs;
        row.output.copy_from_slice(head);
        self.rotate_pairs(row.output, self.angles.row(*angles_row));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::Positions;
    use candle_core::{Device, Var};

    /// Compares the three implementations on the CPU, with their gradients.
    #[test]
    fn rope_implementations_agree() -> Result<()> {
        let b = 2;
        let t = 3;
        let h = 2;
        let d = 8;
        let ragged =
            Positions::from_tensor("positions", &Tensor::new(&[[5u32, 6, 7], [0, 0, 1]], &Device::Cpu)?, b, t)?;
        for style in [RopeStyle::RotateHalf, RopeStyle::Interleaved] {
            for (r, parts) in [(4, 1), (8, 1), (8, 2)] {
                let axes = (parts > 1).then(|| RopeAxes::new(vec![r / 2 / parts; parts], RopeAxisLayout::AxialParts));
                let config = RopeConfig::new(100.0).with_style(style).with_rotary_dim(r).with_axes(axes);
                let rotary = RotaryEmbedding::new(&config, d)?;
                for positions in [Positions::starting_at(&[4], t)?, ragged.clone()] {
                    let rotation = rotary.at(&positions)?;
                    let xs = Var::from_tensor(&Tensor::randn(0f32, 1.0, (b, t, h, d), &Device::Cpu)?)?;
                    let weigh = Tensor::randn(0f32, 1.0, (b, t, h, d), &Device::Cpu)?;
                    let plain = xs.as_detached_tensor();
                    let applied = rotation.apply(&xs)?;
                    let composed = rotation.by_candle(&xs)?;
                    let fused = rotation.by_candle(&plain)?;
                    let gradient = |ys: &Tensor| -> Result<Tensor> {
                        let store = ys.mul(&weigh)?.sum_all()?.backward()?;
                        Ok(store.get(&xs).expect("xs are tracked").clone())
                    };
                    let pairs = [
                        (rotation.apply(&plain)?, applied.clone()),
                        (composed.clone(), applied.clone()),
                        (fused, applied.clone()),
                        (gradient(&composed)?, gradient(&applied)?),
                    ];
                    for (n, (found, expected)) in pairs.into_iter().enumerate() {
                        let off = (found - expected)?.abs()?.max_all()?.to_dtype(DType::F64)?.to_scalar::<f64>()?;
                        assert!(off < 1e-6, "{style:?}, r = {r}, {parts} parts, pair {n}: off by {off}");
                    }
                }
            }
        }
        Ok(())
    }
}
