//! Attention and its gradients by plain loops in f64.

use candle_attention_cuda::{CudaCall, DropoutMask, FirstPosition, KvScales};
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

    /// Returns zeros of the same shape.
    fn zeros(&self) -> Vec<f64> {
        vec![0.0; self.values.len()]
    }

    /// Returns the position of an entry. A dimension of one entry is broadcast.
    fn at(&self, index: &[usize]) -> usize {
        let dims = self.dims.iter().zip(index);
        dims.fold(0, |position, (&size, &own)| position * size + if size == 1 { 0 } else { own })
    }

    fn get(&self, index: &[usize]) -> f64 {
        self.values[self.at(index)]
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
    batch: usize,
    first_query: usize,
    queries: usize,
    first_key: usize,
    keys: usize,
    position: i64,
}

/// A call with its numbers in f64.
struct Problem<'a> {
    call: &'a CudaCall,
    q: Rows,
    k: Rows,
    v: Rows,
    bias: Option<Rows>,
    boolean_mask: Option<Rows>,
    relative_bias: Option<Rows>,
    slopes: Option<Rows>,
    sinks: Option<Rows>,
    longest_queries: usize,
    sequences: Vec<Sequence>,
}

/// The weight of a key for a query.
struct Weight {
    /// The key in its sequence.
    key: usize,
    /// After the softmax, before dropout.
    weight: f64,
    /// The factor by dropout.
    factor: f64,
    /// The derivative of the score by the product of query and key.
    slope: f64,
}

/// The softmax of a query.
struct Row {
    weights: Vec<Weight>,
    sink_weight: f64,
    log_sum_exp: f64,
}

fn optional(tensor: Option<&Tensor>) -> Result<Option<Rows>> {
    tensor.map(Rows::of).transpose()
}

/// Returns keys or values as numbers.
fn decoded(tensor: &Tensor, scales: Option<&Tensor>) -> Result<Rows> {
    let mut rows = Rows::of(tensor)?;
    if let Some(scales) = scales {
        let scales = Rows::of(scales)?;
        let columns = rows.dims[3];
        for (index, value) in rows.values.iter_mut().enumerate() {
            *value = (*value - 128.0) * scales.values[index / columns];
        }
    }
    Ok(rows)
}

impl<'a> Problem<'a> {
    fn new(call: &'a CudaCall) -> Result<Self> {
        let scales = call.kv_scales.as_ref();
        let scores = &call.scores;
        let (k, v) = (
            decoded(&call.k, scales.map(|KvScales { k, .. }| k))?,
            decoded(&call.v, scales.map(|KvScales { v, .. }| v))?,
        );
        let (t_q, t_kv) = (call.q.dim(2)?, call.k.dim(2)?);
        let lens = |tensor: &Tensor| -> Result<Vec<usize>> {
            Ok(tensor.to_vec1::<i32>()?.into_iter().map(|n| n as usize).collect())
        };
        let (ends, key_ends) = match &call.keys.packed {
            Some(packed) => (lens(&packed.cu_seqlens_q)?, lens(&packed.cu_seqlens_kv)?),
            None => ((0..=call.q.dim(0)?).map(|b| b * t_q).collect(), (0..=call.q.dim(0)?).map(|b| b * t_kv).collect()),
        };
        let positions = match &call.keys.first_position {
            FirstPosition::Each(positions) => Some(positions.to_vec1::<i32>()?),
            _ => None,
        };
        let mut sequences = Vec::new();
        for index in 0..ends.len() - 1 {
            let (queries, keys) = (ends[index + 1] - ends[index], key_ends[index + 1] - key_ends[index]);
            let is_packed = call.keys.packed.is_some();
            sequences.push(Sequence {
                index,
                batch: if is_packed { 0 } else { index },
                first_query: if is_packed { ends[index] } else { 0 },
                queries,
                first_key: if is_packed { key_ends[index] } else { 0 },
                keys,
                position: match (&call.keys.first_position, &positions) {
                    (FirstPosition::Same(position), _) => i64::from(*position),
                    (_, Some(positions)) => i64::from(positions[index]),
                    _ => keys as i64 - queries as i64,
                },
            });
        }
        Ok(Self {
            call,
            q: Rows::of(&call.q)?,
            k,
            v,
            bias: optional(scores.bias.as_ref())?,
            boolean_mask: optional(scores.boolean_mask.as_ref())?,
            relative_bias: optional(scores.relative_bias.as_ref())?,
            slopes: optional(scores.alibi_slopes.as_ref())?,
            sinks: optional(scores.sinks.as_ref())?,
            longest_queries: call.keys.packed.as_ref().map_or(t_q, |packed| packed.longest_queries),
            sequences,
        })
    }

    fn group(&self) -> usize {
        self.q.dims[1] / self.k.dims[1]
    }

    /// Returns whether a query attends to a key, both counted in their sequence.
    fn attends(&self, sequence: &Sequence, head: usize, query: usize, key: usize) -> Result<bool> {
        let keys = &self.call.keys;
        let entry = |tensor: &Option<Tensor>, otherwise: i64| -> Result<i64> {
            match tensor {
                Some(tensor) => Ok(i64::from(tensor.to_vec1::<i32>()?[sequence.index])),
                None => Ok(otherwise),
            }
        };
        let position = sequence.position + query as i64;
        let distance = key as i64 - position;
        let is_in_prefix = (key as i64) < entry(&keys.prefixes, 0)?;
        let mut attends = (key as i64) >= entry(&keys.starts, 0)? && (key as i64) < entry(&keys.lengths, i64::MAX)?;
        attends &= !keys.causal || distance <= 0 || is_in_prefix;
        // No distance is larger than i32.
        let bound = |most: usize| most.min(i32::MAX as usize) as i64;
        attends &= keys.left.is_none_or(|left| -distance <= bound(left));
        attends &= keys.right.is_none_or(|right| distance <= bound(right));
        attends &=
            keys.chunk.is_none_or(|chunk| position.div_euclid(chunk as i64) == (key as i64).div_euclid(chunk as i64));
        if let Some(intervals) = &keys.intervals {
            let row = sequence.batch * self.q.dims[2] + sequence.first_query + query;
            let of_row =
                |tensor: &Tensor| -> Result<i64> { Ok(i64::from(tensor.flatten_all()?.to_vec1::<i32>()?[row])) };
            attends &= (key as i64) >= of_row(&intervals.starts)? && (key as i64) < of_row(&intervals.ends)?;
        }
        if let Some(mask) = &self.boolean_mask {
            attends &= mask.get(&[sequence.batch, head, query, key]) != 0.0;
        }
        Ok(attends)
    }

    /// Returns the entry of the relative bias of a pair.
    fn distance(&self, sequence: &Sequence, head: usize, query: usize, key: usize) -> [usize; 3] {
        [sequence.index, head, self.longest_queries - 1 + key - query]
    }

    /// Returns the softmax of a query.
    fn row(&self, sequence: &Sequence, head: usize, query: usize) -> Result<Row> {
        let scores = &self.call.scores;
        let d = self.q.dims[3];
        let from_query = self.q.at(&[sequence.batch, head, sequence.first_query + query, 0]);
        let mut weights = Vec::new();
        for key in 0..sequence.keys {
            if !self.attends(sequence, head, query, key)? {
                continue;
            }
            let from_key = self.k.at(&[sequence.batch, head / self.group(), sequence.first_key + key, 0]);
            let (q, k) = (&self.q.values[from_query..from_query + d], &self.k.values[from_key..from_key + d]);
            let mut score = q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() * scores.scale;
            let mut slope = scores.scale;
            if let Some(cap) = scores.softcap {
                let tanh = (score / cap).tanh();
                score = cap * tanh;
                slope *= 1.0 - tanh * tanh;
            }
            if let Some(slopes) = &self.slopes {
                let position = sequence.position + query as i64;
                score -= slopes.values[head] * (position - key as i64).abs() as f64;
            }
            if let Some(biases) = &self.relative_bias {
                score += biases.get(&self.distance(sequence, head, query, key));
            }
            if let Some(bias) = &self.bias {
                score += bias.get(&[sequence.batch, head, query, key]);
            }
            let factor = match &scores.dropout {
                None => 1.0,
                Some(dropout) => {
                    let seed = match &dropout.mask {
                        DropoutMask::Philox(seed) => *seed,
                        DropoutMask::KeptBits(_) => panic!("a seed"),
                        DropoutMask::PhiloxOnDevice(halves) => {
                            let halves = halves.to_vec1::<u32>()?;
                            u64::from(halves[0]) | u64::from(halves[1]) << 32
                        }
                    };
                    let index = WeightIndex {
                        b: sequence.batch,
                        head,
                        query: sequence.first_query + query,
                        key: sequence.first_key + key,
                    };
                    if philox_keeps(seed, dropout.p, index) { 1.0 / (1.0 - dropout.p) } else { 0.0 }
                }
            };
            weights.push(Weight { key, weight: score, factor, slope });
        }
        let sink = self.sinks.as_ref().map_or(f64::NEG_INFINITY, |sinks| sinks.values[head]);
        let largest = weights.iter().fold(sink, |largest, weight| largest.max(weight.weight));
        if largest == f64::NEG_INFINITY {
            return Ok(Row { weights: Vec::new(), sink_weight: 0.0, log_sum_exp: f64::NEG_INFINITY });
        }
        let sum = weights.iter().map(|weight| (weight.weight - largest).exp()).sum::<f64>() + (sink - largest).exp();
        for weight in &mut weights {
            weight.weight = (weight.weight - largest).exp() / sum;
        }
        Ok(Row { weights, sink_weight: (sink - largest).exp() / sum, log_sum_exp: largest + sum.ln() })
    }
}

/// Computes the output (B, H, T_q, D_v) and the log-sum-exp.
pub fn forward(call: &CudaCall) -> Result<ForwardResult> {
    let problem = Problem::new(call)?;
    let (heads, t_q, d_v) = (problem.q.dims[1], problem.q.dims[2], problem.v.dims[3]);
    let rows = problem.q.dims[0] * heads * t_q;
    let mut found = ForwardResult { output: vec![0.0; rows * d_v], log_sum_exp: vec![0.0; rows] };
    for sequence in &problem.sequences {
        for head in 0..heads {
            for query in 0..sequence.queries {
                let at = (sequence.batch * heads + head) * t_q + sequence.first_query + query;
                let row = problem.row(sequence, head, query)?;
                found.log_sum_exp[at] = row.log_sum_exp;
                for weight in &row.weights {
                    let row_of_value = [sequence.batch, head / problem.group(), sequence.first_key + weight.key, 0];
                    let from = problem.v.at(&row_of_value);
                    for column in 0..d_v {
                        let value = problem.v.values[from + column];
                        found.output[at * d_v + column] += weight.weight * weight.factor * value;
                    }
                }
            }
        }
    }
    Ok(found)
}

/// Computes the gradients.
pub fn backward(call: &CudaCall, loss: &Loss) -> Result<BackwardResult> {
    let problem = Problem::new(call)?;
    let (heads, t_q, d, d_v) = (problem.q.dims[1], problem.q.dims[2], problem.q.dims[3], problem.v.dims[3]);
    let zeros = |rows: &Option<Rows>| rows.as_ref().map(Rows::zeros);
    let mut found = BackwardResult {
        q: problem.q.zeros(),
        k: problem.k.zeros(),
        v: problem.v.zeros(),
        bias: zeros(&problem.bias),
        relative_bias: zeros(&problem.relative_bias),
        slopes: zeros(&problem.slopes),
        sinks: zeros(&problem.sinks),
    };
    for sequence in &problem.sequences {
        for head in 0..heads {
            for query in 0..sequence.queries {
                let at = (sequence.batch * heads + head) * t_q + sequence.first_query + query;
                let row = problem.row(sequence, head, query)?;
                let output_gradient = &loss.output_gradient.values[at * d_v..(at + 1) * d_v];
                let of_log_sum_exp = loss.log_sum_exp_gradient.values[at];
                let kv_head = head / problem.group();
                let first_value = problem.v.at(&[sequence.batch, kv_head, sequence.first_key, 0]);
                let first_key = problem.k.at(&[sequence.batch, kv_head, sequence.first_key, 0]);
                let weight_gradient = |weight: &Weight| {
                    let value = &problem.v.values[first_value + weight.key * d_v..][..d_v];
                    weight.factor
                        * output_gradient.iter().zip(value).map(|(gradient, value)| gradient * value).sum::<f64>()
                };
                let mean = row.weights.iter().map(|weight| weight.weight * weight_gradient(weight)).sum::<f64>();
                if let Some(sinks) = &mut found.sinks {
                    sinks[head] += row.sink_weight * (of_log_sum_exp - mean);
                }
                for weight in &row.weights {
                    let score_gradient = weight.weight * (weight_gradient(weight) - mean + of_log_sum_exp);
                    let product_gradient = score_gradient * weight.slope;
                    for column in 0..d {
                        let (of_query, of_key) = (at * d + column, first_key + weight.key * d + column);
                        found.q[of_query] += product_gradient * problem.k.values[of_key];
                        found.k[of_key] += product_gradient * problem.q.values[of_query];
                    }
                    let value_gradient = &mut found.v[first_value + weight.key * d_v..][..d_v];
                    for (sum, gradient) in value_gradient.iter_mut().zip(output_gradient) {
                        *sum += weight.weight * weight.factor * gradient;
                    }
                    if let (Some(gradient), Some(bias)) = (&mut found.bias, &problem.bias) {
                        gradient[bias.at(&[sequence.batch, head, query, weight.key])] += score_gradient;
                    }
                    if let (Some(gradient), Some(biases)) = (&mut found.relative_bias, &problem.relative_bias) {
                        gradient[biases.at(&problem.distance(sequence, head, query, weight.key))] += score_gradient;
                    }
                    if let Some(slopes) = &mut found.slopes {
                        let position = sequence.position + query as i64;
                        slopes[head] -= score_gradient * (position - weight.key as i64).abs() as f64;
                    }
                }
            }
        }
    }
    Ok(found)
}
