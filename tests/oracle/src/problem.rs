//! Attention and its gradients over slices, in plain f64 loops: the definition that all tests in Rust compare with.
//!
//! Everything that differs between calls, such as masks, biases and dropout, is a function of a query and a key.

pub use candle_attention_call::AttentionDims as Dims;

/// A query of a head, and a key.
#[derive(Debug, Clone, Copy)]
pub struct Pair {
    pub b: usize,
    pub head: usize,
    pub query: usize,
    pub key: usize,
}

/// A call. All slices are contiguous.
pub struct Problem<'a> {
    pub dims: Dims,
    /// (B, H, T_q, D)
    pub q: &'a [f64],
    /// (B, H_kv, T_kv, D)
    pub k: &'a [f64],
    /// (B, H_kv, T_kv, D_v)
    pub v: &'a [f64],
    pub scale: f64,
    pub softcap: Option<f64>,
    /// (H,): logits that take weight and have no value.
    pub sinks: Option<&'a [f64]>,
    /// Returns the sum of everything that is added to a score after the softcap.
    pub bias: &'a dyn Fn(Pair) -> f64,
    /// Returns whether a query attends to a key.
    pub attends: &'a dyn Fn(Pair) -> bool,
    /// Returns the factor of a weight after the softmax: 1 without dropout.
    pub dropout: &'a dyn Fn(Pair) -> f64,
    /// Whether rows without a key have the mean of all values, not zeros.
    pub has_uniform_empty_rows: bool,
}

/// The results of a forward pass.
#[derive(Debug, Clone, Default)]
pub struct Forward {
    /// (B, H, T_q, D_v)
    pub output: Vec<f64>,
    /// (B, H, T_q)
    pub log_sum_exp: Vec<f64>,
    /// (B, H, T_q, T_kv), before dropout.
    pub weights: Vec<f64>,
}

/// The gradients of a loss.
#[derive(Debug, Clone, Default)]
pub struct Gradients {
    /// (B, H, T_q, D)
    pub q: Vec<f64>,
    /// (B, H_kv, T_kv, D)
    pub k: Vec<f64>,
    /// (B, H_kv, T_kv, D_v)
    pub v: Vec<f64>,
    /// (B, H, T_q, T_kv): the gradient of each score, which is that of everything added to the score.
    pub scores: Vec<f64>,
    /// (H,)
    pub sinks: Vec<f64>,
}

/// The softmax of the scores of a query.
struct Row {
    /// (T_kv,)
    weights: Vec<f64>,
    /// Whether each key is part of the output, (T_kv,).
    takes_part: Vec<bool>,
    sink_weight: f64,
    log_sum_exp: f64,
}

impl Problem<'_> {
    /// Returns the pairs of a row of (B, H, T_q).
    fn pairs(&self, row: usize) -> impl Iterator<Item = Pair> + use<> {
        let Dims { h, t_q, t_kv, .. } = self.dims;
        (0..t_kv).map(move |key| Pair { b: row / (h * t_q), head: row / t_q % h, query: row % t_q, key })
    }

    /// Returns the row of a pair in (B, H_kv, T_kv).
    fn key_row(&self, pair: Pair) -> usize {
        let Dims { h, h_kv, t_kv, .. } = self.dims;
        (pair.b * h_kv + pair.head / (h / h_kv)) * t_kv + pair.key
    }

    /// Returns the product of a query and a key times the scale.
    fn product(&self, row: usize, pair: Pair) -> f64 {
        let d = self.dims.d;
        let query = &self.q[row * d..(row + 1) * d];
        let key = &self.k[self.key_row(pair) * d..][..d];
        query.iter().zip(key).map(|(x, y)| x * y).sum::<f64>() * self.scale
    }

    /// Returns the softmax of a row of (B, H, T_q). The scores of masked keys are not read.
    fn row(&self, row: usize) -> Row {
        let mut scores = Vec::new();
        let mut seen = Vec::new();
        for pair in self.pairs(row) {
            let attends = (self.attends)(pair);
            let mut score = f64::NEG_INFINITY;
            if attends {
                score = self.product(row, pair);
                if let Some(softcap) = self.softcap {
                    score = softcap * (score / softcap).tanh();
                }
                score += (self.bias)(pair);
            }
            scores.push(score);
            seen.push(attends);
        }
        let head = row / self.dims.t_q % self.dims.h;
        let sink = self.sinks.map_or(f64::NEG_INFINITY, |sinks| sinks[head]);
        let largest = scores.iter().fold(sink, |largest, score| largest.max(*score));
        if largest == f64::NEG_INFINITY && !scores.iter().any(|score| score.is_nan()) {
            return self.empty_row(seen);
        }
        // The largest number is none of those that are NaN.
        let from = if largest == f64::NEG_INFINITY { f64::NAN } else { largest };
        let is_empty = scores.iter().all(|score| *score == f64::NEG_INFINITY);
        let powers: Vec<f64> = scores.iter().map(|score| (score - from).exp()).collect();
        let sink_power = (sink - from).exp();
        let sum = powers.iter().sum::<f64>() + sink_power;
        let log_sum_exp = from + sum.ln();
        if is_empty {
            return Row { log_sum_exp, sink_weight: sink_power / sum, ..self.empty_row(seen) };
        }
        let weights = powers.iter().zip(&seen).map(|(power, seen)| if *seen { power / sum } else { 0.0 }).collect();
        Row { weights, takes_part: seen, sink_weight: sink_power / sum, log_sum_exp }
    }

    /// Returns the softmax of a row without a key, and without a sink.
    fn empty_row(&self, seen: Vec<bool>) -> Row {
        let t_kv = self.dims.t_kv;
        let (weight, takes_part) = match self.has_uniform_empty_rows {
            true => (1.0 / t_kv as f64, vec![true; t_kv]),
            false => (0.0, seen),
        };
        Row { weights: vec![weight; t_kv], takes_part, sink_weight: 0.0, log_sum_exp: f64::NEG_INFINITY }
    }

    /// Computes the output, the log-sum-exp and the weights.
    pub fn forward(&self) -> Forward {
        let Dims { b, h, t_q, d_v, .. } = self.dims;
        let mut found = Forward::default();
        for row in 0..b * h * t_q {
            let Row { weights, takes_part, log_sum_exp, .. } = self.row(row);
            let mut output = vec![0.0; d_v];
            // A masked key is not part of the sum, even if its value is NaN.
            for pair in self.pairs(row).filter(|pair| takes_part[pair.key]) {
                let weight = weights[pair.key] * (self.dropout)(pair);
                let value = &self.v[self.key_row(pair) * d_v..][..d_v];
                output.iter_mut().zip(value).for_each(|(sum, x)| *sum += weight * x);
            }
            found.output.extend(output);
            found.log_sum_exp.push(log_sum_exp);
            found.weights.extend(weights);
        }
        found
    }

    /// Computes the gradients of a loss from the gradients of the output (B, H, T_q, D_v) and of the log-sum-exp (B, H,
    /// T_q).
    pub fn backward(&self, output_gradient: &[f64], log_sum_exp_gradient: &[f64]) -> Gradients {
        let Dims { b, h, t_q, t_kv, d, d_v, .. } = self.dims;
        let mut found = Gradients {
            q: vec![0.0; self.q.len()],
            k: vec![0.0; self.k.len()],
            v: vec![0.0; self.v.len()],
            scores: vec![0.0; b * h * t_q * t_kv],
            sinks: vec![0.0; h],
        };
        for row in 0..b * h * t_q {
            let Row { weights, takes_part, sink_weight, .. } = self.row(row);
            let of_output = &output_gradient[row * d_v..(row + 1) * d_v];
            let of_log_sum_exp = log_sum_exp_gradient[row];
            let pairs: Vec<Pair> = self.pairs(row).filter(|pair| takes_part[pair.key]).collect();
            let weight_gradient = |pair: Pair| {
                let value = &self.v[self.key_row(pair) * d_v..][..d_v];
                (self.dropout)(pair) * of_output.iter().zip(value).map(|(x, y)| x * y).sum::<f64>()
            };
            let mean: f64 = pairs.iter().map(|pair| weights[pair.key] * weight_gradient(*pair)).sum();
            found.sinks[row / t_q % h] += sink_weight * (of_log_sum_exp - mean);
            for &pair in &pairs {
                let weight = weights[pair.key];
                let of_score = weight * (weight_gradient(pair) - mean + of_log_sum_exp);
                found.scores[row * t_kv + pair.key] = of_score;
                let mut of_product = of_score * self.scale;
                if let Some(softcap) = self.softcap {
                    let tanh = (self.product(row, pair) / softcap).tanh();
                    of_product *= 1.0 - tanh * tanh;
                }
                let key_row = self.key_row(pair);
                for n in 0..d {
                    found.q[row * d + n] += of_product * self.k[key_row * d + n];
                    found.k[key_row * d + n] += of_product * self.q[row * d + n];
                }
                let kept = weight * (self.dropout)(pair);
                for (sum, gradient) in found.v[key_row * d_v..][..d_v].iter_mut().zip(of_output) {
                    *sum += kept * gradient;
                }
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns numbers from -1 to 1 in no order.
    fn numbers(count: usize, salt: usize) -> Vec<f64> {
        (0..count).map(|n| ((n * 7919 + salt * 104_729) % 2003) as f64 / 1001.0 - 1.0).collect()
    }

    #[test]
    fn oracle_of_one_key_and_a_sink_matches_numbers_by_hand() {
        let dims = Dims { b: 1, h: 1, h_kv: 1, t_q: 1, t_kv: 2, d: 2, d_v: 1 };
        let problem = Problem {
            dims,
            q: &[1.0, 2.0],
            k: &[3.0, 0.5, f64::NAN, 1.0],
            v: &[5.0, f64::NAN],
            scale: 0.5,
            softcap: None,
            sinks: Some(&[2.0]),
            bias: &|_| 1.0,
            attends: &|pair| pair.key == 0,
            dropout: &|_| 2.0,
            has_uniform_empty_rows: false,
        };
        // The score is (3 + 1) / 2 + 1 = 3, and the sink is 2.
        let weight = 1.0 / (1.0 + (-1f64).exp());
        let found = problem.forward();
        assert!((found.weights[0] - weight).abs() < 1e-15 && found.weights[1] == 0.0, "{:?}", found.weights);
        assert!((found.output[0] - 10.0 * weight).abs() < 1e-14, "{:?}", found.output);
        assert!((found.log_sum_exp[0] - (3.0 - weight.ln())).abs() < 1e-14, "{:?}", found.log_sum_exp);
        let masked = Problem { attends: &|_| false, sinks: None, ..problem };
        let empty = masked.forward();
        assert_eq!((empty.output[0], empty.log_sum_exp[0]), (0.0, f64::NEG_INFINITY));
    }

    #[test]
    fn oracle_gradients_match_central_differences_of_every_entry() {
        const STEP: f64 = 1e-5;
        let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 3, t_kv: 4, d: 3, d_v: 2 };
        let Dims { b, h, h_kv, t_q, t_kv, d, d_v } = dims;
        let sizes = [b * h * t_q * d, b * h_kv * t_kv * d, b * h_kv * t_kv * d_v, b * h * t_q * t_kv, h];
        let inputs: Vec<Vec<f64>> = sizes.iter().enumerate().map(|(n, &size)| numbers(size, n)).collect();
        let of_output = numbers(b * h * t_q * d_v, 8);
        let of_log_sum_exp = numbers(b * h * t_q, 9);
        let with = |own: &[Vec<f64>], run: &mut dyn FnMut(&Problem)| {
            run(&Problem {
                dims,
                q: &own[0],
                k: &own[1],
                v: &own[2],
                scale: 0.8,
                softcap: Some(1.5),
                sinks: Some(&own[4]),
                bias: &|pair| own[3][((pair.b * h + pair.head) * t_q + pair.query) * t_kv + pair.key],
                attends: &|pair| pair.key <= pair.query + 1 && pair.query + pair.b != 3,
                dropout: &|pair| if (pair.key + pair.query) % 3 == 0 { 0.0 } else { 1.5 },
                has_uniform_empty_rows: false,
            });
        };
        let loss = |moved: &[Vec<f64>]| {
            let mut sum = 0.0;
            with(moved, &mut |problem| {
                let Forward { output, log_sum_exp, .. } = problem.forward();
                sum += output.iter().zip(&of_output).map(|(x, factor)| x * factor).sum::<f64>();
                let finite = log_sum_exp.iter().zip(&of_log_sum_exp).filter(|(x, _)| x.is_finite());
                sum += finite.map(|(x, factor)| x * factor).sum::<f64>();
            });
            sum
        };
        let mut found = Gradients::default();
        with(&inputs, &mut |problem| found = problem.backward(&of_output, &of_log_sum_exp));
        for (n, gradient) in [found.q, found.k, found.v, found.scores, found.sinks].iter().enumerate() {
            for (entry, own) in gradient.iter().enumerate() {
                let at = |step: f64| {
                    let mut moved = inputs.clone();
                    moved[n][entry] += step;
                    loss(&moved)
                };
                let expected = (at(STEP) - at(-STEP)) / (2.0 * STEP);
                assert!((own - expected).abs() < 1e-8, "input {n}, entry {entry}: {own}, expected {expected}");
            }
        }
    }
}
