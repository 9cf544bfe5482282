//! One call: what a caller describes, and the same once it is known to be sound.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::backward::BackwardCall;
use super::dropout::Dropout;
use super::scores::{DistanceTable, RelativeBias};
use super::statistics::StatisticsOutput;
use crate::cpu::{Executor, SharedPtr};
use crate::error::{Error, check_len};
pub use crate::number::Strided;
use crate::number::{Number, Stored};

/// The order of the context in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum OutputLayout {
    /// Contiguous as (B, H, T, D).
    #[default]
    Bhtd,
    /// Contiguous as (B, T, H, D), as a layer merges its heads: transposed and reshaped to (B, T, H·D) without a copy.
    Bthd,
}

/// The dimensions of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    /// B: sequences in the batch.
    pub b: usize,
    /// H: query heads.
    pub h: usize,
    /// H_kv: key and value heads, which divide H. Query head h reads key head h / (H / H_kv).
    pub h_kv: usize,
    /// T_q: queries in a sequence.
    pub t_q: usize,
    /// T_kv: keys in a sequence.
    pub t_kv: usize,
    /// D: the width of queries and keys.
    pub d: usize,
    /// D_v: the width of values.
    pub d_v: usize,
}

impl Dims {
    /// The query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.h / self.h_kv
    }

    /// The query rows that share a key head: row `i · group + g` is query i of the g-th head of the group, so that
    /// neighbours see nearly the same keys.
    pub(super) fn rows(&self) -> usize {
        self.t_q * self.group()
    }

    /// Which query of which head a row of a key head is.
    pub(super) fn row(&self, kv: KvHead, row: usize) -> Row {
        Row { b: kv.b, head: kv.head * self.group() + row % self.group(), query: row / self.group() }
    }

    /// The number of a row in (B, H, T_q).
    pub(super) fn row_index(&self, row: Row) -> usize {
        (row.b * self.h + row.head) * self.t_q + row.query
    }

    /// The key head of an index below B·H_kv.
    pub(super) fn kv_head(&self, index: usize) -> KvHead {
        KvHead { b: index / self.h_kv, head: index % self.h_kv }
    }
}

/// A key head of a sequence.
#[derive(Clone, Copy)]
pub(super) struct KvHead {
    pub b: usize,
    pub head: usize,
}

/// A query of a head of a sequence.
#[derive(Clone, Copy)]
pub(super) struct Row {
    pub b: usize,
    pub head: usize,
    pub query: usize,
}

/// Keys or values: (B, H_kv, T_kv) rows of contiguous numbers.
#[derive(Debug, Clone, Copy)]
pub enum KvRows<'a, E> {
    /// Elements as those of the queries.
    Float(Strided<'a, E, 3>),
    /// 8 bits a number, each of which is `(code - 128) · scale`.
    Q8 {
        /// The numbers.
        codes: Strided<'a, u8, 3>,
        /// The scale of each row.
        scales: Strided<'a, f32, 3>,
    },
}

impl<'a, E> From<Strided<'a, E, 3>> for KvRows<'a, E> {
    fn from(rows: Strided<'a, E, 3>) -> Self {
        Self::Float(rows)
    }
}

impl<E> KvRows<'_, E> {
    fn check(&self, what: &str, dims: [usize; 3], width: usize) -> Result<(), Error> {
        match self {
            Self::Float(rows) => rows.check(what, dims, width),
            Self::Q8 { codes, scales } => {
                codes.check(what, dims, width)?;
                scales.check(&format!("the scales of {what}"), dims, 1)
            }
        }
    }
}

/// ALiBi: `-slope · |position - key|` is added to a score.
#[derive(Debug, Clone, Copy)]
pub struct Alibi<'a> {
    /// A slope for each query head, (H,).
    pub slopes: &'a [f32],
    /// The key position of each query, (B, T_q).
    pub positions: &'a [f32],
}

/// What happens to a score before the softmax, in the order of the fields, and to the softmax's sum.
#[derive(Debug, Clone, Copy)]
pub struct ScoreOptions<'a> {
    /// Multiplied to the product of a query and a key, usually 1 / √D.
    pub scale: f64,
    /// `softcap · tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Distances between queries and keys, added to the scores.
    pub alibi: Option<Alibi<'a>>,
    /// Added to the scores by the distance of query and key.
    pub relative_bias: Option<RelativeBias<'a>>,
    /// Added to the scores: (B, H, T_q, T_kv).
    pub bias: Option<Strided<'a, f32, 4>>,
    /// 0 hides a key from a query: (B, H, T_q, T_kv).
    pub keep: Option<Strided<'a, u8, 4>>,
    /// A logit for each query head that takes part in the softmax's sum and has no value: (H,).
    pub sinks: Option<&'a [f32]>,
    /// Weights that are dropped after the softmax.
    pub dropout: Option<Dropout<'a>>,
}

impl Default for ScoreOptions<'_> {
    /// Scores as they are.
    fn default() -> Self {
        Self {
            scale: 1.0,
            softcap: None,
            alibi: None,
            relative_bias: None,
            bias: None,
            keep: None,
            sinks: None,
            dropout: None,
        }
    }
}

/// What the softmax of a query was made with, from which its weights can be made again: the log-sum-exp in two parts,
/// since one f32 would lose the sum beside a large score.
#[derive(Debug, Clone, Copy, Default)]
pub struct SoftmaxStats {
    /// The largest exponent, a sink's included, as a power of two; of 16 where the call has a bias.
    pub(super) max: f32,
    /// The sum of all weights, a sink's included, relative to it.
    pub(super) sum: f32,
}

/// How scores leave the product of queries and keys and reach the exponential, which takes powers of two.
#[derive(Debug, Clone, Copy)]
pub(super) struct ScoreUnits {
    /// Multiplied to the queries.
    pub query: f32,
    /// Multiplied to the products before softcap and biases.
    pub product: f32,
    /// From there to exponents; above 0, so that the largest stays the largest.
    pub exponent: f32,
    /// See [`ScoreOptions::exponent_unit`].
    pub exponent_unit: f32,
}

impl ScoreOptions<'_> {
    /// Whether something other than a factor stands between the product and the softmax.
    pub(super) fn modify_scores(&self) -> bool {
        self.softcap.is_some() || self.alibi.is_some() || self.has_bias()
    }

    /// Whether something of any size is added to scores.
    fn has_bias(&self) -> bool {
        self.relative_bias.is_some() || self.bias.is_some()
    }

    /// What an exponent and a running maximum count, in powers of two. Masks hold biases down to the least f32, which
    /// times log2 e is -inf. With a bias they count multiples of 4, which no score exceeds; as a power of two it
    /// changes no other digit.
    pub(super) fn exponent_unit(&self) -> f32 {
        if self.has_bias() { 4.0 } else { 1.0 }
    }

    /// The scale is split into a power of two and what is left, between 1 and 2: the power changes no digit of a query,
    /// and the rest is multiplied to the products, whose rounding it does not add to. `pairs` says that queries stay
    /// bf16, where a small one would lose digits to a power too.
    pub(super) fn units(&self, pairs: bool) -> ScoreUnits {
        use std::f64::consts::LOG2_E;
        let magnitude = self.scale.abs();
        let sign = 1f64.copysign(self.scale);
        let (query, rest) = match (magnitude == 0.0, pairs) {
            (true, _) => (0.0, 1.0),
            (false, true) => (sign, magnitude),
            (false, false) => {
                let power = magnitude.log2().floor().clamp(-126.0, 127.0).exp2();
                (sign * power, magnitude / power)
            }
        };
        let (query, whole, exponent_unit) = (query as f32, (rest * LOG2_E) as f32, self.exponent_unit());
        if self.modify_scores() || !whole.is_normal() {
            let exponent = LOG2_E as f32 / exponent_unit;
            return ScoreUnits { query, product: rest as f32, exponent, exponent_unit };
        }
        ScoreUnits { query, product: 1.0, exponent: whole, exponent_unit }
    }
}

/// One call of [`attend`](super::attend).
#[derive(Debug, Clone, Copy)]
pub struct Problem<'a, E> {
    /// The sizes of everything else.
    pub dims: Dims,
    /// Queries: (B, H, T_q), rows of D contiguous elements.
    pub q: Strided<'a, E, 3>,
    /// Keys: (B, H_kv, T_kv), rows of D.
    pub k: KvRows<'a, E>,
    /// Values: (B, H_kv, T_kv), rows of D_v, stored as the keys are.
    pub v: KvRows<'a, E>,
    /// The keys that each query of each sequence sees: (B, T_q). A query that sees none gets zeros.
    pub ranges: &'a [Range<usize>],
    /// What happens to the scores.
    pub scores: ScoreOptions<'a>,
    /// The order of the context.
    pub output_layout: OutputLayout,
    /// Runs the call if it is brief; rayon otherwise.
    pub executor: Option<Executor>,
}

impl<E> Problem<'_, E> {
    /// The elements of the context, B·H·T_q·D_v.
    ///
    /// # Errors
    /// If no memory can hold as many.
    pub fn context_len(&self) -> Result<usize, Error> {
        let Dims { b, h, t_q, d_v, .. } = self.dims;
        // No partial product overflows either, and log-sum-exps, which D_v = 0 leaves, are counted.
        let counts = [b, h, t_q, d_v, size_of::<f32>()];
        let bytes = counts.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim.max(1)));
        match bytes.filter(|&bytes| bytes <= isize::MAX as usize) {
            Some(_) => Ok(b * h * t_q * d_v),
            None => Err(Error::Memory(format!("a context of {:?}", [b, h, t_q, d_v]))),
        }
    }

    /// That every index of the call lies within its slice.
    pub(super) fn check(&self) -> Result<(), Error> {
        let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = self.dims;
        if h_kv == 0 || !h.is_multiple_of(h_kv) {
            return Err(Error::Shape(format!("expected key heads that divide the {h} query heads, found {h_kv}")));
        }
        self.q.check("q", [b, h, t_q], d)?;
        self.k.check("k", [b, h_kv, t_kv], d)?;
        self.v.check("v", [b, h_kv, t_kv], d_v)?;
        check_len("ranges", self.ranges.len(), b * t_q)?;
        // An empty range may stand anywhere.
        if let Some(range) = self.ranges.iter().find(|range| !range.is_empty() && range.end > t_kv) {
            return Err(Error::Shape(format!("expected ranges within {t_kv} keys, found {range:?}")));
        }
        let ScoreOptions { alibi, relative_bias, bias, keep, sinks, dropout, .. } = &self.scores;
        if let Some(Alibi { slopes, positions }) = alibi {
            check_len("slopes", slopes.len(), h)?;
            check_len("positions", positions.len(), b * t_q)?;
        }
        if let Some(relative_bias) = relative_bias {
            relative_bias.check(&self.dims, self.ranges)?;
        }
        bias.map_or(Ok(()), |bias| bias.check("bias", [b, h, t_q, t_kv], 1))?;
        keep.map_or(Ok(()), |keep| keep.check("keep", [b, h, t_q, t_kv], 1))?;
        sinks.map_or(Ok(()), |sinks| check_len("sinks", sinks.len(), h))?;
        dropout.map_or(Ok(()), |dropout| dropout.check(&self.dims))
    }
}

impl<E> Strided<'_, E, 3> {
    /// A row of queries, of D elements.
    #[inline(always)]
    pub(super) fn query(&self, row: Row) -> *const E {
        self.at([row.b, row.head, row.query])
    }
}

/// What decides about scores, whatever their elements were.
#[derive(Clone, Copy)]
pub(super) struct ScoreInputs<'a> {
    pub dims: Dims,
    pub ranges: &'a [Range<usize>],
    pub options: ScoreOptions<'a>,
    /// The distance biases of the options, for tiles.
    pub distances: Option<&'a DistanceTable<'a>>,
}

impl ScoreInputs<'_> {
    /// The keys that a query sees.
    pub fn range(&self, row: Row) -> &Range<usize> {
        &self.ranges[row.b * self.dims.t_q + row.query]
    }

    /// ALiBi's slope, negative, and the position of a query.
    pub fn slope_and_position(&self, alibi: &Alibi, row: Row) -> (f32, f32) {
        (-alibi.slopes[row.head], alibi.positions[row.b * self.dims.t_q + row.query])
    }

    /// Whether the mask of kept keys, if there is one, shows a key to a query.
    pub fn is_kept(&self, row: Row, key: usize) -> bool {
        // SAFETY: the view was checked for every query and key of the call.
        self.options.keep.as_ref().is_none_or(|keep| unsafe { *keep.at([row.b, row.head, row.query, key]) != 0 })
    }
}

/// Keys or values of a call.
#[derive(Clone, Copy)]
pub struct StoredRows<'a, S> {
    pub(super) rows: Strided<'a, S, 3>,
    /// Of rows that are scaled.
    pub(super) scales: Option<Strided<'a, f32, 3>>,
    /// D or D_v.
    pub(super) width: usize,
}

impl<S: Stored> StoredRows<'_, S> {
    /// The numbers of a key.
    #[inline(always)]
    pub(super) fn row(&self, kv: KvHead, key: usize) -> *const S {
        self.rows.at([kv.b, kv.head, key])
    }

    /// The numbers from one row to the next.
    pub fn stride(&self) -> usize {
        self.rows.strides[2]
    }

    /// What the numbers of a key are to be multiplied by.
    #[inline(always)]
    pub(super) fn scale(&self, kv: KvHead, key: usize) -> f32 {
        match &self.scales {
            // SAFETY: the view was checked for every key of the call.
            Some(scales) if S::IS_SCALED => unsafe { *scales.at([kv.b, kv.head, key]) },
            _ => 1.0,
        }
    }
}

/// Where the results of a call go.
pub(super) struct Outputs<'a, E> {
    /// Not written in a backward pass.
    pub context: *mut [E],
    pub lse: Option<&'a mut [MaybeUninit<f32>]>,
    pub stats: Option<&'a mut [MaybeUninit<SoftmaxStats>]>,
    pub statistics: Option<StatisticsOutput<'a>>,
}

/// A problem that was checked, without its keys and values, and where its results go.
pub struct Call<'a, E> {
    pub(super) q: Strided<'a, E, 3>,
    pub(super) inputs: ScoreInputs<'a>,
    output_layout: OutputLayout,
    /// B·H·T_q rows of D_v elements.
    context: SharedPtr<E>,
    /// (B, H, T_q).
    lse: Option<SharedPtr<f32>>,
    /// (B, H, T_q).
    stats: Option<SharedPtr<SoftmaxStats>>,
    /// Those of the weights, if they are wanted.
    pub(super) statistics: Option<StatisticsOutput<'a>>,
    pub(super) executor: Option<Executor>,
}

impl<'a, E: Number> Call<'a, E> {
    pub(super) fn new(problem: &Problem<'a, E>, outputs: Outputs<'a, E>) -> Result<Self, Error> {
        let Problem { dims, q, ranges, scores: options, output_layout, executor, .. } = *problem;
        let Outputs { context, lse, stats, statistics } = outputs;
        let count = problem.context_len()?;
        problem.check()?;
        check_len("context", context.len(), count)?;
        let queries = dims.b * dims.h * dims.t_q;
        lse.as_ref().map_or(Ok(()), |lse| check_len("lse", lse.len(), queries))?;
        stats.as_ref().map_or(Ok(()), |stats| check_len("stats", stats.len(), queries))?;
        Ok(Self {
            q,
            inputs: ScoreInputs { dims, ranges, options, distances: None },
            output_layout,
            context: SharedPtr(context.cast()),
            lse: lse.map(|lse| SharedPtr(lse.as_mut_ptr().cast())),
            stats: stats.map(|stats| SharedPtr(stats.as_mut_ptr().cast())),
            statistics,
            executor,
        })
    }

    /// The row of the context for a query, D_v elements that are not initialised before they are written.
    #[inline(always)]
    pub(super) fn context_row(&self, row: Row) -> *mut E {
        let dims = &self.inputs.dims;
        let index = match self.output_layout {
            OutputLayout::Bhtd => dims.row_index(row),
            OutputLayout::Bthd => (row.b * dims.t_q + row.query) * dims.h + row.head,
        };
        self.context.0.wrapping_add(index * dims.d_v)
    }

    /// Writes the log-sum-exp of a query and what it is made of, if they are wanted.
    ///
    /// # Safety
    /// The row belongs to the call, and no other thread writes its log-sum-exp.
    #[inline(always)]
    pub(super) unsafe fn write_lse(&self, row: Row, stats: SoftmaxStats, lse: impl FnOnce() -> f32) {
        let index = self.inputs.dims.row_index(row);
        // SAFETY: there is an element for each query of each head.
        unsafe {
            if let Some(to) = self.lse {
                to.add(index).write(lse());
            }
            if let Some(to) = self.stats {
                to.add(index).write(stats);
            }
        }
    }
}

/// What is computed on a kernel, with keys and values as they are stored.
pub enum KernelCall<'a, 'b, E> {
    Float(&'a Call<'b, E>, [StoredRows<'b, E>; 2]),
    Q8(&'a Call<'b, E>, [StoredRows<'b, u8>; 2]),
    Backward(&'a BackwardCall<'b, E>, [StoredRows<'b, E>; 2]),
}
