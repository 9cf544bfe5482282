//! Calls of attention with masks, biases and options, written from the design and not from the code of the crate.
//! [`Problem`] computes them.
//!
//! A mask answers for one query and one key, [`Case::sees`]: there are no ranges, no broadcasting and no tensors.

use crate::array::Array;
pub use crate::problem::Dims;
use crate::problem::{Forward, Pair, Problem};

/// One number a sequence, or one a query.
#[derive(Debug, Clone)]
pub enum Lens {
    PerSequence(Vec<usize>),
    PerQuery(Vec<Vec<usize>>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Alignment {
    Free,
    Causal,
    UpperLeft,
    Offset(usize),
    /// One for each sequence.
    Offsets(Vec<i64>),
}

#[derive(Debug, Clone)]
pub enum Part {
    ValidLens(Lens),
    Starts(Lens),
    Window(usize),
    LocalWindow(usize, usize),
    Chunk(usize),
    Prefix(Lens),
    /// A tensor in which zero means masked.
    BoolMask(Array),
    Bias(Array),
}

/// One mask: an alignment, and parts that are combined with AND.
#[derive(Debug, Clone)]
pub struct Mask {
    pub alignment: Alignment,
    pub parts: Vec<Part>,
}

#[derive(Debug, Clone, Default)]
pub struct Options {
    pub scale: Option<f64>,
    pub softcap: Option<f64>,
    pub alibi_slopes: Option<Vec<f64>>,
    /// A number for each distance of query and key, (B or 1, H, 1, T_q + T_kv - 1).
    pub relative_bias: Option<Array>,
    pub sinks: Option<Vec<f64>>,
}

/// One call: what goes in.
#[derive(Debug, Clone)]
pub struct Case {
    pub dims: Dims,
    /// (B, H, T_q, D)
    pub q: Array,
    /// (B, H_kv, T_kv, D)
    pub k: Array,
    /// (B, H_kv, T_kv, D_v)
    pub v: Array,
    /// Masks that are combined with AND.
    pub masks: Vec<Mask>,
    /// Rows without a key take the mean of all keys, not zeros.
    pub uniform_fully_masked_rows: bool,
    pub options: Options,
}

/// The results in row-major order, and the sums of absolute terms behind them, for bounds on rounding.
#[derive(Debug, Clone, Default)]
pub struct Attended {
    /// (B, H, T_q, D_v)
    pub context: Vec<f64>,
    /// (B, H, T_q, T_kv)
    pub weights: Vec<f64>,
    /// (B, H, T_q)
    pub lse: Vec<f64>,
    /// (B, H, T_q): the largest sum of absolute values behind one score of the row.
    pub score_terms: Vec<f64>,
    /// (B, H, T_q, D_v): the weighted sum of absolute values.
    pub context_terms: Vec<f64>,
}

impl Lens {
    /// Returns the options of one sequence.
    fn of_sequence(&self, b: usize) -> Self {
        match self {
            Self::PerSequence(lens) => Self::PerSequence(vec![lens[b]]),
            Self::PerQuery(rows) => Self::PerQuery(vec![rows[b].clone()]),
        }
    }

    fn get(&self, b: usize, i: usize) -> usize {
        match self {
            Self::PerSequence(lens) => lens[b],
            Self::PerQuery(rows) => rows[b][i],
        }
    }
}

impl Mask {
    /// Returns a mask of one constraint, without an alignment.
    pub fn of(part: Part) -> Self {
        Self { alignment: Alignment::Free, parts: vec![part] }
    }

    pub fn new(alignment: Alignment, parts: impl Into<Vec<Part>>) -> Self {
        Self { alignment, parts: parts.into() }
    }

    /// Returns the mask of one sequence.
    pub fn of_sequence(&self, b: usize) -> Self {
        let part = |part: &Part| match part {
            Part::ValidLens(lens) => Part::ValidLens(lens.of_sequence(b)),
            Part::Starts(lens) => Part::Starts(lens.of_sequence(b)),
            Part::Prefix(lens) => Part::Prefix(lens.of_sequence(b)),
            Part::BoolMask(keep) => Part::BoolMask(keep.of_sequence(b)),
            Part::Bias(bias) => Part::Bias(bias.of_sequence(b)),
            other => other.clone(),
        };
        let alignment = match &self.alignment {
            Alignment::Offsets(offsets) => Alignment::Offsets(vec![offsets[b]]),
            other => other.clone(),
        };
        Self { alignment, parts: self.parts.iter().map(part).collect() }
    }

    /// Returns the key position of query i. The last query is at the last key unless the alignment says otherwise.
    fn position(&self, dims: &Dims, b: usize, i: usize) -> i128 {
        match &self.alignment {
            Alignment::Free | Alignment::Causal => i as i128 + dims.t_kv as i128 - dims.t_q as i128,
            Alignment::UpperLeft => i as i128,
            Alignment::Offset(n) => i as i128 + *n as i128,
            Alignment::Offsets(offsets) => i as i128 + i128::from(offsets[b]),
        }
    }

    fn is_relative(&self) -> bool {
        let relative = |part: &Part| matches!(part, Part::Window(_) | Part::LocalWindow(..) | Part::Chunk(_));
        self.alignment != Alignment::Free || self.parts.iter().any(relative)
    }

    /// Returns whether query i of head h in sequence b attends to key j. Its sequence begins at the key `first`.
    fn sees(&self, dims: &Dims, first: i128, [b, h, i, j]: [usize; 4]) -> bool {
        let key = j as i128;
        let position = self.position(dims, b, i);
        let later = self.alignment != Alignment::Free && key > position;
        let prefixes = self.parts.iter().filter_map(|part| match part {
            Part::Prefix(lens) => Some(lens),
            _ => None,
        });
        // Two prefixes are combined with AND, like any two parts, so both have to relax the causal constraint.
        let lifted = prefixes.clone().count() > 0 && prefixes.clone().all(|prefix| j < prefix.get(b, i));
        let hidden_by = |part: &Part| match part {
            Part::ValidLens(lens) => j >= lens.get(b, i),
            Part::Starts(starts) => j < starts.get(b, i),
            Part::Window(w) => position - key > *w as i128 - 1,
            Part::LocalWindow(left, right) => key < position - *left as i128 || key > position + *right as i128,
            Part::Chunk(size) => {
                (key - first).div_euclid(*size as i128) != (position - first).div_euclid(*size as i128)
            }
            Part::BoolMask(keep) => keep.at([b, h, i, j]) == 0.0,
            Part::Prefix(_) | Part::Bias(_) => false,
        };
        (!later || lifted) && !self.parts.iter().any(hidden_by)
    }
}

/// Returns the number of first keys that a tensor masks for all queries. A query among these keys does not count if it
/// attends to all keys.
fn padding(dims: &Dims, b: usize, sees: impl Fn([usize; 4]) -> bool) -> usize {
    let Dims { h, t_q, t_kv, .. } = *dims;
    let mut most = t_kv;
    let mut last_open = None;
    for (head, i) in (0..h).flat_map(|head| (0..t_q).map(move |i| (head, i))) {
        let first_seen = (0..t_kv).find(|&j| sees([b, head, i, j]));
        if first_seen == Some(0) && (1..t_kv).all(|j| sees([b, head, i, j])) {
            last_open = last_open.max(Some((i + t_kv).saturating_sub(t_q)));
        } else {
            most = most.min(first_seen.unwrap_or(t_kv));
        }
        if most == 0 {
            return 0;
        }
    }
    if most == t_kv || last_open.is_some_and(|key| key >= most) { 0 } else { most }
}

impl Case {
    /// Returns whether query i of head h in sequence b attends to key j.
    pub fn sees(&self, index: [usize; 4]) -> bool {
        let first = self.first_key(index[0], index[2]) as i128;
        self.masks.iter().all(|mask| mask.sees(&self.dims, first, index))
    }

    /// Returns whether query i of sequence b attends to key j by all parts but tensors.
    pub fn sees_without_tensors(&self, [b, i, j]: [usize; 3]) -> bool {
        let first = self.first_key(b, i) as i128;
        self.masks.iter().all(|mask| {
            let is_interval = |part: &&Part| !matches!(part, Part::BoolMask(_) | Part::Bias(_));
            let parts: Vec<_> = mask.parts.iter().filter(is_interval).cloned().collect();
            Mask::new(mask.alignment.clone(), parts).sees(&self.dims, first, [b, 0, i, j])
        })
    }

    /// Returns the key at which the sequence of query i begins, from which chunks count: the last one by all starts and
    /// all padding on the left.
    fn first_key(&self, b: usize, i: usize) -> usize {
        let parts = || self.masks.iter().flat_map(|mask| &mask.parts);
        if !parts().any(|part| matches!(part, Part::Chunk(_))) {
            return 0;
        }
        let firsts = parts().map(|part| match part {
            Part::Starts(starts) => starts.get(b, i),
            Part::BoolMask(keep) => padding(&self.dims, b, |index| keep.at(index) != 0.0),
            Part::Bias(bias) => padding(&self.dims, b, |index| bias.at(index) > f64::from(f32::MIN)),
            _ => 0,
        });
        firsts.max().unwrap_or(0)
    }

    /// Returns the call of one sequence.
    pub fn of_sequence(&self, b: usize) -> Self {
        let [q, k, v] = [&self.q, &self.k, &self.v].map(|array| array.of_sequence(b));
        let masks = self.masks.iter().map(|mask| mask.of_sequence(b)).collect();
        let mut options = self.options.clone();
        options.relative_bias = options.relative_bias.map(|biases| biases.of_sequence(b));
        Self { dims: Dims { b: 1, ..self.dims }, q, k, v, masks, options, ..self.clone() }
    }

    pub fn kv_head(&self, h: usize) -> usize {
        h / (self.dims.h / self.dims.h_kv)
    }

    /// Returns whether all masks that define positions define the same one for each query.
    pub fn positions_agree(&self) -> bool {
        (0..self.dims.b).all(|b| {
            let relative = self.masks.iter().filter(|mask| mask.is_relative());
            let mut positions = relative.map(|mask| mask.position(&self.dims, b, 0));
            let first = positions.next();
            positions.all(|position| Some(position) == first)
        })
    }

    /// Returns the position from which ALiBi's distances count, that of the masks that define positions.
    pub fn position(&self, b: usize, i: usize) -> i128 {
        let free = Mask { alignment: Alignment::Free, parts: Vec::new() };
        self.masks.iter().find(|mask| mask.is_relative()).unwrap_or(&free).position(&self.dims, b, i)
    }

    /// Returns the sum of ALiBi and all biases, by distance and by mask.
    pub fn bias(&self, [b, h, i, j]: [usize; 4]) -> f64 {
        self.bias_terms([b, h, i, j]).into_iter().sum()
    }

    fn bias_terms(&self, [b, h, i, j]: [usize; 4]) -> Vec<f64> {
        let biases = self.masks.iter().flat_map(|mask| &mask.parts).filter_map(|part| match part {
            Part::Bias(bias) => Some(bias.at([b, h, i, j])),
            _ => None,
        });
        let distance = (self.position(b, i) - j as i128).unsigned_abs() as f64;
        let alibi = self.options.alibi_slopes.iter().map(|slopes| -slopes[h] * distance);
        let by_distance =
            self.options.relative_bias.iter().map(|relative| relative.at([b, h, 0, self.dims.t_q - 1 - i + j]));
        alibi.chain(by_distance).chain(biases).collect()
    }

    /// Computes the results of the call, and the sums of absolute terms behind them.
    pub fn attend(&self) -> Attended {
        let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = self.dims;
        let (q, k, v) = (
            numbers(&self.q, [b, h, t_q, d]),
            numbers(&self.k, [b, h_kv, t_kv, d]),
            numbers(&self.v, [b, h_kv, t_kv, d_v]),
        );
        let at = |pair: Pair| ((pair.b * h + pair.head) * t_q + pair.query) * t_kv + pair.key;
        let pairs =
            (0..b * h * t_q * t_kv).map(|n| [n / (h * t_q * t_kv), n / (t_q * t_kv) % h, n / t_kv % t_q, n % t_kv]);
        let seen: Vec<bool> = pairs.map(|index| self.sees(index)).collect();
        let scale = self.options.scale.unwrap_or(1.0 / (d as f64).sqrt());
        let forward = Problem {
            dims: self.dims,
            q: &q,
            k: &k,
            v: &v,
            scale,
            softcap: self.options.softcap,
            sinks: self.options.sinks.as_deref(),
            bias: &|pair| self.bias(index_of(pair)),
            attends: &|pair| seen[at(pair)],
            dropout: &|_| 1.0,
            has_uniform_empty_rows: self.uniform_fully_masked_rows,
        }
        .forward();
        let mut out = Attended::default();
        for row in 0..b * h * t_q {
            let head = row / t_q % h;
            let key_head = row / (h * t_q) * h_kv + self.kv_head(head);
            let sink = self.options.sinks.as_ref().map_or(0.0, |sinks| finite(sinks[head]));
            let mut score_terms = sink;
            let mut context_terms = vec![0.0; d_v];
            for key in 0..t_kv {
                let pair = Pair { b: row / (h * t_q), head, query: row % t_q, key };
                let weight = forward.weights[row * t_kv + key];
                let key_row = key_head * t_kv + key;
                if seen[row * t_kv + key] {
                    let products = q[row * d..(row + 1) * d].iter().zip(&k[key_row * d..(key_row + 1) * d]);
                    let of_products = products.map(|(x, y)| finite(x * y)).sum::<f64>() * scale.abs();
                    let of_biases = self.bias_terms(index_of(pair)).into_iter().map(finite).sum::<f64>();
                    score_terms = score_terms.max(of_products + of_biases);
                }
                if seen[row * t_kv + key] || weight != 0.0 {
                    for (size, value) in context_terms.iter_mut().zip(&v[key_row * d_v..]) {
                        *size += finite(weight * value);
                    }
                }
            }
            out.score_terms.push(score_terms);
            out.context_terms.extend(context_terms);
        }
        let Forward { output, log_sum_exp, weights } = forward;
        Attended { context: output, weights, lse: log_sum_exp, ..out }
    }
}

/// Returns the indices of a pair in (B, H, T_q, T_kv).
fn index_of(pair: Pair) -> [usize; 4] {
    [pair.b, pair.head, pair.query, pair.key]
}

/// Returns a term of a bound on rounding: NaN and infinities are not rounded, so they add nothing.
fn finite(term: f64) -> f64 {
    if term.is_finite() { term.abs() } else { 0.0 }
}

/// Returns the numbers of an array in row-major order.
fn numbers(array: &Array, shape: [usize; 4]) -> Vec<f64> {
    let [_, heads, t, width] = shape;
    let index = |n: usize| [n / (heads * t * width), n / (t * width) % heads, n / width % t, n % width];
    (0..shape.iter().product()).map(|n| array.at(index(n))).collect()
}

/// Attends from one query (D) to keys and values (T, D), scaled by 1/√D, fast enough for the sizes of models.
pub fn exact_attention(query: &[f64], keys: &[f64], values: &[f64]) -> Vec<f64> {
    let d = query.len();
    let scale = 1.0 / (d as f64).sqrt();
    let scores: Vec<f64> = keys.chunks_exact(d).map(|key| scale * dot(query, key)).collect();
    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut sum = 0.0;
    let mut context = vec![0.0; d];
    for (score, value) in scores.iter().zip(values.chunks_exact(d)) {
        let weight = (score - largest).exp();
        sum += weight;
        context.iter_mut().zip(value).for_each(|(context, value)| *context += weight * value);
    }
    context.into_iter().map(|x| x / sum).collect()
}

/// Multiplies one row by a weight (out, in) and adds the bias.
pub fn exact_linear(row: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let output = |(n, own): (usize, &f64)| own + dot(row, &weight[n * row.len()..][..row.len()]);
    bias.iter().enumerate().map(output).collect()
}

/// Sums in eight accumulators, since one accumulator waits for its last addition.
fn dot(one: &[f64], other: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (xs, ys) in one.chunks(8).zip(other.chunks(8)) {
        sums.iter_mut().zip(xs.iter().zip(ys)).for_each(|(sum, (x, y))| *sum += x * y);
    }
    sums.iter().sum()
}

/// Multiplies rows (.., in) by a weight (out, in) and adds its bias. Returns the outputs, and the sums of the
/// magnitudes of all terms of each output.
pub fn linear_with_sizes(xs: &[f64], weight: &[f64], bias: &[f64], rows: usize) -> (Vec<f64>, Vec<f64>) {
    let inputs = xs.len() / rows.max(1);
    let through = |numbers: &[f64], factors: &[f64], offsets: &[f64]| -> Vec<f64> {
        (0..rows).flat_map(|row| exact_linear(&numbers[row * inputs..][..inputs], factors, offsets)).collect()
    };
    let sizes = |numbers: &[f64]| numbers.iter().map(|x| x.abs()).collect::<Vec<_>>();
    (through(xs, weight, bias), through(&sizes(xs), &sizes(weight), &sizes(bias)))
}
