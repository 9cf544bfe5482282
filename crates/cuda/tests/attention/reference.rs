//! Calls of the kernels for the oracle, which computes attention and its gradients in f64.

use attention_oracle::problem::{Pair, Problem};
use candle_attention_cuda::{AttentionDims, BoundedKeys, CudaCall, DropoutMask, FirstPosition, KvCodeFormat, KvScales};
use candle_attention_kernels::flash::{WeightIndex, philox_keeps};
use candle_core::{DType, Result, Tensor};

/// A tensor's numbers in the order of its dimensions.
pub struct Rows {
    pub values: Vec<f64>,
    dims: Vec<usize>,
}

impl Rows {
    pub fn of(tensor: &Tensor) -> Result<Self> {
        let values = tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?;
        Ok(Self { values, dims: tensor.dims().to_vec() })
    }

    fn of_optional(tensor: Option<&Tensor>) -> Result<Option<Self>> {
        tensor.map(Self::of).transpose()
    }

    /// Returns the position of an entry. A dimension of one entry is broadcast.
    fn at(&self, index: &[usize]) -> usize {
        let dims = self.dims.iter().zip(index);
        dims.fold(0, |position, (&size, &own)| position * size + if size == 1 { 0 } else { own })
    }

    /// Returns the sums of numbers that are broadcast from these.
    fn sums(&self, numbers: impl Iterator<Item = (usize, f64)>) -> Vec<f64> {
        let mut sums = vec![0.0; self.values.len()];
        for (at, number) in numbers {
            sums[at] += number;
        }
        sums
    }
}

/// The gradients that flow into a call.
pub struct Loss {
    pub output_gradient: Rows,
    pub log_sum_exp_gradient: Rows,
}

/// The results of the forward pass.
pub struct ForwardResult {
    pub output: Vec<f64>,
    pub log_sum_exp: Vec<f64>,
}

/// The gradients.
pub struct BackwardResult {
    pub q: Vec<f64>,
    pub k: Vec<f64>,
    pub v: Vec<f64>,
    pub bias: Option<Vec<f64>>,
    pub relative_bias: Option<Vec<f64>>,
    pub slopes: Option<Vec<f64>>,
    pub sinks: Option<Vec<f64>>,
}

/// One of the sequences of a call.
struct Sequence {
    index: usize,
    first_query: usize,
    queries: usize,
    first_key: usize,
    keys: usize,
    position: i64,
}

/// A query and a key, counted in their sequence, and the distance of the key from the query's position.
struct PlacedPair<'a> {
    sequence: &'a Sequence,
    query: usize,
    key: usize,
    distance: i64,
}

/// The lists of the bounds of keys.
struct Lists {
    starts: Option<Vec<i32>>,
    lengths: Option<Vec<i32>>,
    prefixes: Option<Vec<i32>>,
    first_keys: Option<Vec<i32>>,
    end_keys: Option<Vec<i32>>,
}

impl Lists {
    fn of(keys: &BoundedKeys<Tensor>) -> Result<Self> {
        let list = |tensor: Option<&Tensor>| tensor.map(|own| own.flatten_all()?.to_vec1::<i32>()).transpose();
        Ok(Self {
            starts: list(keys.starts.as_ref())?,
            lengths: list(keys.lengths.as_ref())?,
            prefixes: list(keys.prefixes.as_ref())?,
            first_keys: list(keys.intervals.as_ref().map(|bounds| &bounds.starts))?,
            end_keys: list(keys.intervals.as_ref().map(|bounds| &bounds.ends))?,
        })
    }
}

/// A call with its numbers in f64.
struct CallNumbers<'a> {
    call: &'a CudaCall,
    q: Rows,
    k: Rows,
    v: Rows,
    bias: Option<Rows>,
    boolean_mask: Option<Rows>,
    relative_bias: Option<Rows>,
    slopes: Option<Rows>,
    sinks: Option<Rows>,
    lists: Lists,
    longest_queries: usize,
    sequences: Vec<Sequence>,
    dropout_seed: u64,
}

/// The format and the scales of keys or values that are codes.
struct RowCodes<'a> {
    format: KvCodeFormat,
    scales: &'a Tensor,
}

/// Returns keys or values of rows of `width` as numbers.
fn decoded(tensor: &Tensor, width: usize, codes: Option<RowCodes>) -> Result<Rows> {
    let stored = Rows::of(tensor)?;
    let Some(RowCodes { format, scales }) = codes else { return Ok(stored) };
    let scales = Rows::of(scales)?;
    let (bytes, scales_of_row) = (stored.dims[3], scales.dims[3]);
    let mut values = Vec::new();
    for (row, row_codes) in stored.values.chunks_exact(bytes).enumerate() {
        for column in 0..width {
            let number = match format {
                KvCodeFormat::Q8 => row_codes[column] - 128.0,
                KvCodeFormat::E4M3 => e4m3_number(row_codes[column] as u32),
                KvCodeFormat::Q4 => {
                    let byte = row_codes[column / 32 * 16 + column % 16] as u32;
                    f64::from(if column % 32 < 16 { byte % 16 } else { byte / 16 }) - 7.5
                }
            };
            values.push(number * scales.values[row * scales_of_row + column * scales_of_row / width]);
        }
    }
    let mut dims = stored.dims;
    dims[3] = width;
    Ok(Rows { values, dims })
}

/// Returns a float of 8 bits: a sign, 4 bits of exponent and 3 of mantissa.
fn e4m3_number(code: u32) -> f64 {
    let exponent = (code >> 3 & 15) as i32;
    let mantissa = f64::from(code & 7) / 8.0;
    let size = if exponent == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) };
    if code >= 128 { -size } else { size }
}

/// Returns the sequences of a call: the entries of its batch, or packed ones.
fn sequences(call: &CudaCall) -> Result<Vec<Sequence>> {
    let AttentionDims { b, t_q, t_kv, .. } = call.dims;
    let positions = match &call.keys.first_position {
        FirstPosition::Each(positions) => Some(positions.to_vec1::<i32>()?),
        _ => None,
    };
    let ends = |tensor: &Tensor| -> Result<Vec<usize>> {
        Ok(tensor.to_vec1::<i32>()?.into_iter().map(|n| n as usize).collect())
    };
    let mut found: Vec<Sequence> = Vec::new();
    match &call.keys.packed {
        Some(packed) => {
            let of_queries = ends(&packed.cu_seqlens_q)?;
            let of_keys = ends(&packed.cu_seqlens_kv)?;
            for index in 0..of_queries.len() - 1 {
                found.push(Sequence {
                    index,
                    first_query: of_queries[index],
                    queries: of_queries[index + 1] - of_queries[index],
                    first_key: of_keys[index],
                    keys: of_keys[index + 1] - of_keys[index],
                    position: 0,
                });
            }
        }
        None => found.extend((0..b).map(|index| Sequence {
            index,
            first_query: 0,
            queries: t_q,
            first_key: 0,
            keys: t_kv,
            position: 0,
        })),
    }
    for sequence in &mut found {
        sequence.position = match (&call.keys.first_position, &positions) {
            (FirstPosition::Same(position), _) => i64::from(*position),
            (_, Some(positions)) => i64::from(positions[sequence.index]),
            _ => sequence.keys as i64 - sequence.queries as i64,
        };
    }
    Ok(found)
}

impl<'a> CallNumbers<'a> {
    fn new(call: &'a CudaCall) -> Result<Self> {
        let codes_of_k =
            call.kv_scales.as_ref().map(|KvScales { format, k, .. }| RowCodes { format: *format, scales: k });
        let codes_of_v =
            call.kv_scales.as_ref().map(|KvScales { format, v, .. }| RowCodes { format: *format, scales: v });
        let scores = &call.scores;
        let dropout_seed = match scores.dropout.as_ref().map(|dropout| &dropout.mask) {
            None => 0,
            Some(DropoutMask::Philox(seed)) => *seed,
            Some(DropoutMask::KeptBits(_)) => panic!("expected a seed"),
            Some(DropoutMask::PhiloxOnDevice(halves)) => {
                let halves = halves.to_vec1::<u32>()?;
                u64::from(halves[0]) | u64::from(halves[1]) << 32
            }
        };
        Ok(Self {
            call,
            q: Rows::of(&call.q)?,
            k: decoded(&call.k, call.dims.d, codes_of_k)?,
            v: decoded(&call.v, call.dims.d_v, codes_of_v)?,
            bias: Rows::of_optional(scores.bias.as_ref())?,
            boolean_mask: Rows::of_optional(scores.boolean_mask.as_ref())?,
            relative_bias: Rows::of_optional(scores.relative_bias.as_ref())?,
            slopes: Rows::of_optional(scores.alibi_slopes.as_ref())?,
            sinks: Rows::of_optional(scores.sinks.as_ref())?,
            lists: Lists::of(&call.keys)?,
            longest_queries: call.keys.packed.as_ref().map_or(call.dims.t_q, |packed| packed.longest_queries),
            sequences: sequences(call)?,
            dropout_seed,
        })
    }

    /// Returns a pair in its sequence; `None` if query and key are of two sequences.
    fn placed(&self, pair: Pair) -> Option<PlacedPair<'_>> {
        let is_packed = self.call.keys.packed.is_some();
        let sequence = match is_packed {
            false => &self.sequences[pair.b],
            true => self.sequences.iter().find(|own| {
                (own.first_query..own.first_query + own.queries).contains(&pair.query)
                    && (own.first_key..own.first_key + own.keys).contains(&pair.key)
            })?,
        };
        let query = pair.query - sequence.first_query;
        let key = pair.key - sequence.first_key;
        Some(PlacedPair { sequence, query, key, distance: key as i64 - (sequence.position + query as i64) })
    }

    /// Returns whether a query attends to a key.
    fn attends(&self, pair: Pair) -> bool {
        let Some(PlacedPair { sequence, key, distance, .. }) = self.placed(pair) else { return false };
        let keys = &self.call.keys;
        let key = key as i64;
        let position = key - distance;
        let entry = |list: &Option<Vec<i32>>, otherwise: i64| {
            list.as_ref().map_or(otherwise, |list| i64::from(list[sequence.index]))
        };
        let of_row = |list: &Option<Vec<i32>>, otherwise: i64| {
            list.as_ref().map_or(otherwise, |list| i64::from(list[pair.b * self.call.dims.t_q + pair.query]))
        };
        let is_in_prefix = key < entry(&self.lists.prefixes, 0);
        // No distance is larger than i32.
        let bound = |most: usize| most.min(i32::MAX as usize) as i64;
        let is_allowed = match &self.boolean_mask {
            Some(mask) => mask.values[mask.at(&[pair.b, pair.head, pair.query, pair.key])] != 0.0,
            None => true,
        };
        is_allowed
            && key >= entry(&self.lists.starts, 0)
            && key < entry(&self.lists.lengths, i64::MAX)
            && (!keys.causal || distance <= 0 || is_in_prefix)
            && keys.left.is_none_or(|left| -distance <= bound(left))
            && keys.right.is_none_or(|right| distance <= bound(right))
            && keys.chunk.is_none_or(|chunk| position.div_euclid(chunk as i64) == key.div_euclid(chunk as i64))
            && key >= of_row(&self.lists.first_keys, 0)
            && key < of_row(&self.lists.end_keys, i64::MAX)
    }

    /// Returns the sum of ALiBi and the biases of a pair of one sequence.
    fn bias_of(&self, pair: Pair) -> f64 {
        let Some(placed) = self.placed(pair) else { return 0.0 };
        let mut sum = 0.0;
        if let Some(slopes) = &self.slopes {
            sum -= slopes.values[pair.head] * placed.distance.abs() as f64;
        }
        if let Some(biases) = &self.relative_bias {
            sum += biases.values[self.relative_bias_entry(biases, pair, &placed)];
        }
        if let Some(bias) = &self.bias {
            sum += bias.values[bias.at(&[pair.b, pair.head, pair.query, pair.key])];
        }
        sum
    }

    /// Returns the position of a pair's entry in the relative bias.
    fn relative_bias_entry(&self, biases: &Rows, pair: Pair, placed: &PlacedPair) -> usize {
        biases.at(&[placed.sequence.index, pair.head, self.longest_queries - 1 + placed.key - placed.query])
    }

    /// Returns the factor of a weight by dropout.
    fn dropout_factor(&self, pair: Pair) -> f64 {
        let Some(dropout) = &self.call.scores.dropout else { return 1.0 };
        let Pair { b, head, query, key } = pair;
        match philox_keeps(self.dropout_seed, dropout.p, WeightIndex { b, head, query, key }) {
            true => 1.0 / (1.0 - dropout.p),
            false => 0.0,
        }
    }

    /// Runs the oracle.
    fn with_problem<T>(&self, run: impl FnOnce(&Problem) -> T) -> T {
        run(&Problem {
            dims: self.call.dims,
            q: &self.q.values,
            k: &self.k.values,
            v: &self.v.values,
            scale: self.call.scores.scale,
            softcap: self.call.scores.softcap,
            sinks: self.sinks.as_ref().map(|sinks| &sinks.values[..]),
            bias: &|pair| self.bias_of(pair),
            attends: &|pair| self.attends(pair),
            dropout: &|pair| self.dropout_factor(pair),
            has_uniform_empty_rows: false,
        })
    }
}

/// Computes the output (B, H, T_q, D_v) and the log-sum-exp.
pub fn forward(call: &CudaCall) -> Result<ForwardResult> {
    let found = CallNumbers::new(call)?.with_problem(|problem| problem.forward());
    Ok(ForwardResult { output: found.output, log_sum_exp: found.log_sum_exp })
}

/// Computes the gradients.
pub fn backward(call: &CudaCall, loss: &Loss) -> Result<BackwardResult> {
    let numbers = CallNumbers::new(call)?;
    let found = numbers
        .with_problem(|problem| problem.backward(&loss.output_gradient.values, &loss.log_sum_exp_gradient.values));
    let AttentionDims { h, t_q, t_kv, .. } = call.dims;
    let of_pairs: Vec<(Pair, f64)> = found
        .scores
        .into_iter()
        .enumerate()
        .map(|(at, gradient)| {
            let pair =
                Pair { b: at / (h * t_q * t_kv), head: at / (t_q * t_kv) % h, query: at / t_kv % t_q, key: at % t_kv };
            (pair, gradient)
        })
        .filter(|(_, gradient)| *gradient != 0.0)
        .collect();
    let pairs = || of_pairs.iter().map(|&(pair, gradient)| (pair, gradient));
    let placed = |pair: Pair| numbers.placed(pair).expect("a pair of one sequence");
    Ok(BackwardResult {
        q: found.q,
        k: found.k,
        v: found.v,
        bias: numbers.bias.as_ref().map(|bias| {
            bias.sums(pairs().map(|(pair, of_score)| (bias.at(&[pair.b, pair.head, pair.query, pair.key]), of_score)))
        }),
        relative_bias: numbers.relative_bias.as_ref().map(|biases| {
            biases.sums(
                pairs().map(|(pair, of_score)| (numbers.relative_bias_entry(biases, pair, &placed(pair)), of_score)),
            )
        }),
        slopes: numbers.slopes.as_ref().map(|slopes| {
            slopes.sums(pairs().map(|(pair, of_score)| (pair.head, -of_score * placed(pair).distance.abs() as f64)))
        }),
        sinks: numbers.sinks.as_ref().map(|_| found.sinks),
    })
}
