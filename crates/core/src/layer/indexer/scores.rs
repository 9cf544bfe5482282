//! The scores of an indexer's queries for keys: `Σ_h w_h · relu(q_h · k)`.

use candle_core::{Error, IndexOp, Result, Tensor, bail};

use super::IndexQueries;
use candle_attention_kernels::linear::{Activation, Epilogue, Matrix, Product, Right, multiply_vec};
use candle_attention_kernels::{InstructionSet, Workers, for_each_chunk};
use candle_attention_modules::base::rowwise::{read, to_vec};

/// The name of the operation in errors.
const OP: &str = "indexer";

/// The number of products of queries with keys that are computed at a time: they stay in a cache until the heads are
/// summed.
pub(in crate::layer) const PRODUCTS: usize = 1 << 21;

/// The number of scores that are summed by a task.
const KEYS_OF_TASK: usize = 1 << 12;

impl IndexQueries {
    /// Returns the scores (B, n, T_kv) of n queries from `start` on, for keys (B, width, T_kv) with any strides.
    pub fn scores(&self, keys: &Tensor, start: usize, n: usize) -> Result<Vec<f32>> {
        let (.., num_heads, head_dim) = self.q.dims4()?;
        let (b, _, t_kv) = keys.dims3()?;
        let q = self.q.narrow(1, start, n)?.contiguous()?.reshape((b, n * num_heads, head_dim))?;
        let Some(of_queries) = &self.weights else {
            bail!("[{OP}] the queries of an indexer have no factors of heads, expected one for each")
        };
        let own_weights = of_queries.narrow(1, start, n)?.contiguous()?;
        if !q.device().is_cpu() {
            let of_heads = q.matmul(&keys.contiguous()?)?.relu()?.reshape((b * n, num_heads, t_kv))?;
            return to_vec(&own_weights.reshape((b * n, 1, num_heads))?.matmul(&of_heads)?);
        }
        let weights = to_vec::<f32>(&own_weights)?;
        let mut scores = vec![0f32; b * n * t_kv];
        for (sequence, of_sequence) in scores.chunks_exact_mut(n * t_kv).enumerate() {
            let rows = ScoredRows {
                queries: &q.i(sequence)?,
                keys: &keys.i(sequence)?.t()?,
                weights: &weights[sequence * n * num_heads..][..n * num_heads],
                num_heads,
            };
            rows.write_scores(of_sequence)?;
        }
        Ok(scores)
    }
}

/// Some queries of a sequence on the CPU, and the keys that they have scores for.
struct ScoredRows<'a> {
    /// (rows · heads, width), contiguous.
    queries: &'a Tensor,
    /// (keys, width).
    keys: &'a Tensor,
    /// The factor of each head, (rows, heads).
    weights: &'a [f32],
    num_heads: usize,
}

impl ScoredRows<'_> {
    /// Writes the scores, (rows, keys).
    fn write_scores(&self, scores: &mut [f32]) -> Result<()> {
        let (t_kv, width) = self.keys.dims2()?;
        let columns = self.weights.len();
        let queries = read(self.queries);
        let queries =
            Matrix { data: queries.contiguous()?, rows: columns, columns: width, stride: width, is_transposed: false };
        // The kernels multiply with rows that are contiguous.
        let keys = if self.keys.stride()[1] == 1 { self.keys.clone() } else { self.keys.contiguous()? };
        let stride = keys.stride()[0];
        let stored_keys = read(&keys);
        let key_numbers = &stored_keys.elements::<f32>()?[keys.layout().start_offset()..];
        let instruction_set =
            InstructionSet::choose(None, false).map_err(|error| Error::msg(format!("[{OP}] {error}")))?;
        let step = (PRODUCTS / columns).clamp(1, t_kv);
        for first in (0..t_kv).step_by(step) {
            let count = step.min(t_kv - first);
            let left = Matrix {
                data: &key_numbers[first * stride..],
                rows: count,
                columns: width,
                stride,
                is_transposed: false,
            };
            // The larger matrix is on the left, whose rows are read as they are stored.
            let product = Product {
                left,
                right: Right::Matrix { matrix: queries.t(), instruction_set },
                epilogue: Epilogue { activation: Some(Activation::Relu), ..Epilogue::default() },
            };
            let products = multiply_vec(&product).map_err(|error| Error::msg(format!("[{OP}] {error}")))?;
            let sums = HeadSums { products: &products, weights: self.weights, num_heads: self.num_heads, keys: count }
                .compute();
            for (to, own) in scores.chunks_exact_mut(t_kv).zip(sums.chunks_exact(count)) {
                to[first..first + count].copy_from_slice(own);
            }
        }
        Ok(())
    }
}

/// Products of keys with queries (keys, rows, heads), 0 where they are negative, and the factor of each head,
/// (rows, heads).
struct HeadSums<'a> {
    products: &'a [f32],
    weights: &'a [f32],
    num_heads: usize,
    keys: usize,
}

impl HeadSums<'_> {
    /// Returns `Σ_h w_h · product_h`, (rows, keys).
    fn compute(&self) -> Vec<f32> {
        let &Self { products, weights, num_heads, keys } = self;
        let rows = weights.len() / num_heads;
        let mut sums = vec![0f32; rows * keys];
        let sum_heads = |row: usize, first: usize, own: &mut [f32]| {
            let own_weights = &weights[row * num_heads..][..num_heads];
            for (key, sum) in own.iter_mut().enumerate() {
                let of_heads = &products[((first + key) * rows + row) * num_heads..][..num_heads];
                *sum = dot(of_heads, own_weights);
            }
        };
        if keys <= KEYS_OF_TASK {
            let rows_of_task = KEYS_OF_TASK / keys.max(1);
            let workers = Workers::for_tasks(rows.div_ceil(rows_of_task));
            for_each_chunk(&mut sums, rows_of_task * keys, workers, &|task, some| {
                for (n, own) in some.chunks_exact_mut(keys).enumerate() {
                    sum_heads(task * rows_of_task + n, 0, own);
                }
            });
            return sums;
        }
        let tasks_of_row = keys.div_ceil(KEYS_OF_TASK);
        let of_task = keys.div_ceil(tasks_of_row);
        for (row, of_row) in sums.chunks_exact_mut(keys).enumerate() {
            let workers = Workers::for_tasks(tasks_of_row);
            for_each_chunk(of_row, of_task, workers, &|task, own| sum_heads(row, task * of_task, own));
        }
        sums
    }
}

/// Returns the dot product of two slices of one length. It keeps a sum for each of several lanes, which the compiler
/// adds as vectors.
fn dot(one: &[f32], other: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    let (one_chunks, one_rest) = one.as_chunks::<LANES>();
    let (other_chunks, other_rest) = other.as_chunks::<LANES>();
    for (a, b) in one_chunks.iter().zip(other_chunks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = one_rest.iter().zip(other_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f32>() + rest
}
