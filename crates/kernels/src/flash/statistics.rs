//! Statistics of the weights, which the forward pass never has as a whole.
//!
//! A weight is known when the sum over all keys of its query is. So a task keeps the scores of the few tiles that it
//! works on, T_kv for each of their queries, and goes over them a second time: that takes one more exponential for each
//! score, and no product.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::epilogue::with_sink;
use super::heuristics::StatisticsSplit;
use super::problem::{ScoreInputs, ScoreUnits};
use super::tile::Tile;
use super::workspace::{PanelState, Workspace};
use super::{AttentionKernels, Dims, Problem, Steps, attend_to};
use crate::cpu::{Kernel, MAX_COLUMNS, MAX_LANES, Scratch, SharedPtr, SimdTask, Tier, Vector, Workers, for_each_task};
use crate::cpu::{for_each_index, large_page_vec};
use crate::error::Error;

/// The most keys that [`StatisticsOptions::top`] may ask for: queries keep a sorted list of them.
pub const MAX_TOP: usize = 32;

/// What [`attend_with_statistics`] is to find out besides entropies and sums.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StatisticsOptions {
    /// How many of a query's largest weights, at most [`MAX_TOP`].
    pub top: usize,
    /// The queries whose weights are wanted as they are.
    pub rows: Range<usize>,
    /// The keys whose weights are.
    pub columns: Range<usize>,
}

/// Statistics of the weights before dropout.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Statistics {
    /// The keys with the largest weights of each query, the largest first, of two alike the lower key: (B, H, T_q, k),
    /// where k is the smaller of [`StatisticsOptions::top`] and T_kv. Keys of weight 0 come last, the lowest first.
    pub top_keys: Vec<u32>,
    /// Their weights.
    pub top_weights: Vec<f32>,
    /// `-Σ w ln w` of each query, (B, H, T_q).
    pub entropy: Vec<f32>,
    /// The sum over the queries of the weight that a key has, (B, H, T_kv).
    pub received: Vec<f32>,
    /// The weights that were asked for, (B, H, rows, columns).
    pub weights: Vec<f32>,
}

impl Statistics {
    /// Zeros for a call.
    fn zeros(dims: &Dims, options: &StatisticsOptions) -> Result<Self, Error> {
        let Dims { b, h, t_q, t_kv, .. } = *dims;
        let StatisticsOptions { top, rows, columns } = options;
        for (what, wanted, most) in [("rows", rows, t_q), ("columns", columns, t_kv)] {
            if wanted.start > wanted.end || wanted.end > most {
                return Err(Error::Shape(format!("expected {what} within 0..{most}, found {wanted:?}")));
            }
        }
        if *top > MAX_TOP || u32::try_from(t_kv).is_err() {
            let expected = format!("expected at most {MAX_TOP} top keys of {} keys", u32::MAX);
            return Err(Error::Shape(format!("{expected}, found {top} of {t_kv}")));
        }
        let (top, weights) = ([b, h, t_q, (*top).min(t_kv)], [b, h, rows.len(), columns.len()]);
        Ok(Self {
            top_keys: zeros(&top)?,
            top_weights: zeros(&top)?,
            entropy: zeros(&[b, h, t_q])?,
            received: zeros(&[b, h, t_kv])?,
            weights: zeros(&weights)?,
        })
    }
}

fn zeros<T: Copy + Default>(shape: &[usize]) -> Result<Vec<T>, Error> {
    let no_memory = || Error::Memory(format!("statistics of {shape:?}"));
    let count = shape.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim)).ok_or_else(no_memory)?;
    let mut vec = Vec::new();
    vec.try_reserve_exact(count).map_err(|_| no_memory())?;
    vec.resize(count, T::default());
    Ok(vec)
}

/// Where the statistics of a call go. Each task writes those of its own queries.
pub(super) struct StatisticsOutput<'a> {
    options: &'a StatisticsOptions,
    top_keys: SharedPtr<u32>,
    top_weights: SharedPtr<f32>,
    entropy: SharedPtr<f32>,
    received: SharedPtr<f32>,
    weights: SharedPtr<f32>,
}

/// [`attend_vec`](super::attend_vec) that also returns statistics of the weights. They are the same for any number of
/// threads. A call takes memory for them, and for each thread for T_kv scores of the queries of a tile or a few.
///
/// # Errors
/// As [`attend`](super::attend), and [`Error::Shape`] for more than [`MAX_TOP`] keys, or for rows and columns that are
/// not those of the call.
///
/// ```
/// use candle_attention_kernels::Tier;
/// use candle_attention_kernels::flash::{self, Dims, OutputOrder, Problem, ScoreOptions, StatisticsOptions, Strided};
///
/// // One query over three keys of width 1.
/// let (q, k, v) = ([1.0], [0.0, 1.0, 0.0], [1.0, 2.0, 3.0]);
/// let rows = |data| Strided { data, strides: [3, 3, 1] };
/// let problem = Problem {
///     dims: Dims { b: 1, h: 1, h_kv: 1, t_q: 1, t_kv: 3, d: 1, d_v: 1 },
///     q: rows(&q),
///     k: rows(&k).into(),
///     v: rows(&v).into(),
///     ranges: &[0..3],
///     scores: ScoreOptions::default(),
///     output_order: OutputOrder::Bhtd,
///     executor: None,
/// };
/// let options = StatisticsOptions { top: 2, ..Default::default() };
/// let (_, statistics) = flash::attend_with_statistics::<f32>(&problem, Tier::Scalar, &options)?;
/// assert_eq!(statistics.top_keys, [1, 0]);
/// assert!((statistics.received.iter().sum::<f32>() - 1.0).abs() < 1e-6);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn attend_with_statistics<E: AttentionKernels>(
    problem: &Problem<E>,
    tier: Tier,
    options: &StatisticsOptions,
) -> Result<(Vec<E>, Statistics), Error> {
    let count = problem.context_len()?;
    let mut found = Statistics::zeros(&problem.dims, options)?;
    let output = StatisticsOutput {
        options,
        top_keys: SharedPtr(found.top_keys.as_mut_ptr()),
        top_weights: SharedPtr(found.top_weights.as_mut_ptr()),
        entropy: SharedPtr(found.entropy.as_mut_ptr()),
        received: SharedPtr(found.received.as_mut_ptr()),
        weights: SharedPtr(found.weights.as_mut_ptr()),
    };
    let mut context = large_page_vec(count).ok_or_else(|| Error::Memory(format!("a context of {count} elements")))?;
    attend_to(problem, tier, &mut context.spare_capacity_mut()[..count], None, None, Some(output))?;
    // SAFETY: `attend_to` initialised every element.
    unsafe { context.set_len(count) };
    Ok((context, found))
}

/// Runs the steps of every task: contexts and statistics. `None` where there is no memory for scores.
pub(super) fn run(
    steps: &dyn Steps,
    dims: &Dims,
    output: &StatisticsOutput,
    split: StatisticsSplit,
    workers: Workers,
) -> Option<()> {
    let StatisticsSplit { panel, panels, parts } = split;
    let (heads, rows, words) = (dims.b * dims.h_kv, dims.rows(), dims.group() * dims.t_kv);
    // Tasks of one head add to sums of their own, which are added up in their order.
    let mut sums = Scratch::try_zeros(&[heads, parts, words])?;
    let all_sums = SharedPtr(sums.as_mut_ptr());
    let is_short = AtomicBool::new(false);
    let workspace = || Workspace { kept: Scratch::try_zeros(&[panels, dims.t_kv, panel]), ..steps.workspace() };
    for_each_task(heads * parts, workers, workspace, |workspace, task| {
        if workspace.kept.is_none() {
            return is_short.store(true, Ordering::Relaxed);
        }
        let (head, part) = (task % heads, task / heads);
        // SAFETY: the sums are initialised, and each task has its own.
        let received = unsafe { all_sums.slice((head * parts + part) * words, words) };
        // Every so many-th chunk, since the last ones see most keys of a causal mask.
        for first in (part * panels * panel..rows).step_by(parts * panels * panel) {
            let (kv, own) = (dims.kv_head(head), first..rows.min(first + panels * panel));
            steps.prefill(workspace, kv, own.clone(), 0..dims.t_kv);
            steps.observe(workspace, kv, own.clone(), output, received);
            steps.epilogue(workspace, kv, own);
        }
    });
    let sums = sums.words();
    for_each_index(heads, workers, &|head| {
        // SAFETY: the sums received by the heads of a group stand one after the other, and are this task's.
        let received = unsafe { output.received.slice(head * words, words) };
        for own in sums[head * parts * words..][..parts * words].chunks_exact(words.max(1)) {
            received.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
    });
    (!is_short.into_inner()).then_some(())
}

/// The statistics of some tiles whose scores were kept and whose state is that after all keys.
pub(super) struct Observe<'a, 'b> {
    pub inputs: &'a ScoreInputs<'b>,
    pub output: &'a StatisticsOutput<'a>,
    pub workspace: &'a mut Workspace,
    pub tiles: &'a [Tile],
    pub units: ScoreUnits,
    /// (group, T_kv), which are added to.
    pub received: &'a mut [f32],
}

impl SimdTask for Observe<'_, '_> {
    #[inline(always)]
    unsafe fn run<K: Kernel>(self) {
        let Self { inputs, output, workspace, tiles, units, received } = self;
        let panel = workspace.state.panel;
        let Some(kept) = workspace.kept.as_mut().map(Scratch::as_mut_ptr) else { return };
        for (index, tile) in tiles.iter().enumerate() {
            let state = workspace.state.of_panel(index);
            // SAFETY: the processor has the tier of K; the scores of the keys that the tile sees were kept.
            unsafe {
                let scores = kept.add(index * inputs.dims.t_kv * panel);
                KeptTile { inputs, output, tile, units, scores, panel }.observe::<K>(state, received);
            }
        }
    }
}

/// A tile whose scores (T_kv, panel) were kept.
struct KeptTile<'a, 'b> {
    inputs: &'a ScoreInputs<'b>,
    output: &'a StatisticsOutput<'a>,
    tile: &'a Tile,
    units: ScoreUnits,
    scores: *mut f32,
    panel: usize,
}

/// What scores become weights by: for each column, what is added to exponents, the factor on their powers and the
/// logarithm of its inverse.
struct Columns {
    shifts: [f32; MAX_COLUMNS],
    factors: [f32; MAX_COLUMNS],
    logarithms: [f32; MAX_COLUMNS],
    entropy: [f32; MAX_COLUMNS],
}

impl KeptTile<'_, '_> {
    /// # Safety
    /// The processor has the tier of K; the scores of the keys that the tile sees were kept.
    #[inline(always)]
    unsafe fn observe<K: Kernel>(&self, state: PanelState, received: &mut [f32]) {
        let (lanes, t_kv) = (K::Vector::LANES, self.inputs.dims.t_kv);
        let mut columns = self.columns(state);
        let mut top = Top::new(self.tile.rows.len(), self.output.options.top.min(t_kv));
        let of_head = self.columns_of_heads();
        for first in self.tile.some.clone().step_by(lanes) {
            let keys = first..self.tile.some.end.min(first + lanes);
            // SAFETY: as this method's contract.
            unsafe {
                self.find_top::<K>(&keys, &mut top);
                self.weigh::<K>(&keys, &mut columns);
                for (head, of_head) in of_head.iter().enumerate() {
                    let sums = self.sums_over::<K>(&keys, of_head);
                    let received = &mut received[head * t_kv..][keys.clone()];
                    received.iter_mut().zip(sums).for_each(|(received, sum)| *received += sum);
                }
            }
        }
        for (column, &entropy) in columns.entropy[..self.tile.rows.len()].iter().enumerate() {
            // SAFETY: the rows of the tile are this task's, and the scores of the keys that it sees are weights now.
            unsafe { self.write(column, entropy, &mut top) };
        }
    }

    fn columns(&self, state: PanelState) -> Columns {
        let zeros = [0f32; MAX_COLUMNS];
        let mut columns = Columns { shifts: zeros, factors: zeros, logarithms: zeros, entropy: zeros };
        for column in 0..self.panel {
            // SAFETY: the state has an element for each column.
            let (max, sum) = unsafe { (*state.max.add(column), *state.sum.add(column)) };
            let Some(row) = Some(self.tile.rows.start + column).filter(|row| *row < self.tile.rows.end) else {
                // Weighs nothing, but has powers that are to be finite.
                columns.shifts[column] = if max == f32::NEG_INFINITY { 0.0 } else { -max };
                continue;
            };
            let whole = with_sink(self.inputs, self.inputs.dims.row(self.tile.kv, row), max, sum);
            // A query that sees nothing weighs nothing.
            if whole.sum != 0.0 {
                columns.shifts[column] = -whole.max;
                (columns.factors[column], columns.logarithms[column]) = (1.0 / whole.sum, whole.sum.ln());
            }
        }
        columns
    }

    /// For each head of the group, 1 for the columns of its queries.
    fn columns_of_heads(&self) -> Vec<[f32; MAX_COLUMNS]> {
        let group = self.inputs.dims.group();
        let of_head = |head| {
            let mut of_head = [0f32; MAX_COLUMNS];
            for (column, row) in self.tile.rows.clone().enumerate() {
                of_head[column] = f32::from(u8::from(row % group == head));
            }
            of_head
        };
        (0..group).map(of_head).collect()
    }

    /// Takes up keys whose scores are among the largest of a column.
    ///
    /// # Safety
    /// As [`observe`](Self::observe); there are at most as many keys as lanes.
    #[inline(always)]
    unsafe fn find_top<K: Kernel>(&self, keys: &Range<usize>, top: &mut Top) {
        if top.k == 0 {
            return;
        }
        let mut most = [f32::NEG_INFINITY; MAX_COLUMNS];
        // SAFETY: as this method's contract.
        unsafe {
            for vector in 0..self.tile.vectors {
                let column = vector * K::Vector::LANES;
                let mut largest = K::Vector::splat(f32::NEG_INFINITY);
                for key in keys.clone() {
                    largest = K::Vector::load(self.scores.add(key * self.panel + column)).max(largest);
                }
                largest.store(most.as_mut_ptr().add(column));
            }
            for (column, &most) in most[..self.tile.rows.len()].iter().enumerate() {
                if most > top.least[column] {
                    for key in keys.clone() {
                        top.offer(column, key, *self.scores.add(key * self.panel + column));
                    }
                }
            }
        }
    }

    /// Scores become weights, and their entropy is added up.
    ///
    /// # Safety
    /// As [`observe`](Self::observe).
    #[inline(always)]
    unsafe fn weigh<K: Kernel>(&self, keys: &Range<usize>, columns: &mut Columns) {
        let ScoreUnits { exponent, exponent_unit, .. } = self.units;
        for vector in 0..self.tile.vectors {
            let column = vector * K::Vector::LANES;
            // SAFETY: as this method's contract; the arrays have an element for each column.
            unsafe {
                let of_columns = |array: &[f32; MAX_COLUMNS]| array.as_ptr().add(column);
                let shift = K::Vector::load(of_columns(&columns.shifts));
                let factor = K::Vector::load(of_columns(&columns.factors));
                let logarithm = K::Vector::load(of_columns(&columns.logarithms));
                let (zero, exponent) = (K::Vector::splat(0.0), K::Vector::splat(exponent));
                let unit = K::Vector::splat(exponent_unit);
                let natural = K::Vector::splat(-std::f32::consts::LN_2);
                let mut entropy = K::Vector::load(of_columns(&columns.entropy));
                for key in keys.clone() {
                    let at = self.scores.add(key * self.panel + column);
                    let power = K::Vector::load(at).mul(exponent).add(shift).mul(unit);
                    let weight = power.exp2().mul(factor);
                    weight.store(at);
                    let term = weight.mul(power.mul_add(natural, logarithm));
                    // Not 0 · inf of what weighs nothing; and a NaN stays one.
                    let is_nothing = weight.abs().less_than(K::Vector::splat(f32::MIN_POSITIVE));
                    entropy = entropy.add(K::Vector::select(is_nothing, zero, term));
                }
                entropy.store(columns.entropy.as_mut_ptr().add(column));
            }
        }
    }

    /// The sums over some columns of the weights of each key.
    ///
    /// # Safety
    /// As [`observe`](Self::observe); there are at most as many keys as lanes, and the scores are weights.
    #[inline(always)]
    unsafe fn sums_over<K: Kernel>(&self, keys: &Range<usize>, columns: &[f32; MAX_COLUMNS]) -> [f32; MAX_LANES] {
        let mut found = [0f32; MAX_LANES];
        // SAFETY: as this method's contract; the array has an element for each column.
        unsafe {
            let mut sums = [K::Vector::splat(0.0); MAX_LANES];
            for column in (0..self.tile.vectors).map(|vector| vector * K::Vector::LANES) {
                let counts = K::Vector::load(columns.as_ptr().add(column));
                for (key, sum) in keys.clone().zip(&mut sums) {
                    *sum = K::Vector::load(self.scores.add(key * self.panel + column)).mul_add(counts, *sum);
                }
            }
            K::Vector::sum_each(&sums).store(found.as_mut_ptr());
        }
        found
    }

    /// Writes what was found of a query.
    ///
    /// # Safety
    /// The row of the column is this task's alone; the scores of the keys that the tile sees are weights.
    unsafe fn write(&self, column: usize, entropy: f32, top: &mut Top) {
        let (dims, options) = (&self.inputs.dims, self.output.options);
        let row = dims.row(self.tile.kv, self.tile.rows.start + column);
        let (index, k) = (dims.row_index(row), top.k);
        // SAFETY: as this method's contract; a key that was taken up is one that the tile sees.
        unsafe {
            let weight = |key: usize| *self.scores.add(key * self.panel + column);
            self.output.entropy.add(index).write(entropy);
            let (keys, weights) =
                (self.output.top_keys.slice(index * k, k), self.output.top_weights.slice(index * k, k));
            let found = top.found(column).map(|key| (key, weight(key as usize))).filter(|(_, weight)| *weight != 0.0);
            let count = keys.iter_mut().zip(weights).zip(found).map(|((key, to), found)| (*key, *to) = found).count();
            let mut others = (0..).filter(|key| !top.found(column).take(count).any(|found| found == *key));
            keys[count..].iter_mut().for_each(|key| *key = others.next().unwrap_or(0));

            if options.rows.contains(&row.query) {
                let (count, width) = (options.rows.len(), options.columns.len());
                let first = ((row.b * dims.h + row.head) * count + row.query - options.rows.start) * width;
                let to = self.output.weights.slice(first, width);
                for (key, to) in options.columns.clone().zip(to).filter(|(key, _)| self.tile.some.contains(key)) {
                    *to = weight(key);
                }
            }
        }
    }
}

/// The largest scores of some columns and their keys, in order.
struct Top {
    k: usize,
    scores: Vec<f32>,
    keys: Vec<u32>,
    /// The last of each column, which another has to exceed.
    least: [f32; MAX_COLUMNS],
}

impl Top {
    fn new(columns: usize, k: usize) -> Self {
        let least = [f32::NEG_INFINITY; MAX_COLUMNS];
        Self { k, scores: vec![f32::NEG_INFINITY; columns * k], keys: vec![0; columns * k], least }
    }

    /// Keys are offered from the lowest on, so that of two alike the lower one comes first.
    fn offer(&mut self, column: usize, key: usize, score: f32) {
        if score > self.least[column] {
            let own = column * self.k..(column + 1) * self.k;
            let (scores, keys) = (&mut self.scores[own.clone()], &mut self.keys[own]);
            let at = scores.iter().position(|other| *other < score).unwrap_or(self.k - 1);
            scores[at..].rotate_right(1);
            keys[at..].rotate_right(1);
            (scores[at], keys[at]) = (score, key as u32);
            self.least[column] = scores[self.k - 1];
        }
    }

    /// The keys of a column, the best first.
    fn found(&self, column: usize) -> impl Iterator<Item = u32> {
        let own = column * self.k..(column + 1) * self.k;
        let seen = |(_, score): &(&u32, &f32)| **score > f32::NEG_INFINITY;
        self.keys[own.clone()].iter().zip(&self.scores[own]).filter(seen).map(|(&key, _)| key)
    }
}
