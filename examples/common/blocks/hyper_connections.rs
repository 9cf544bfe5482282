//! Hyper-connections (<https://arxiv.org/abs/2409.19606>) of DeepSeek V4: the residual of a block is several streams. A
//! module reads a weighted sum of the streams, and its output is added to each by a weight, after the streams are
//! mixed by a matrix whose rows and columns have about the sum 1.

use candle_attention::PackedLinear;
use candle_core::{D, DType, Module, Result, Tensor, bail};
use candle_nn::ops;
use serde_json::Value;

use super::family::required;
use super::weights::Weights;

/// The numbers of a model's hyper-connections.
#[derive(Clone, Copy)]
struct Numbers {
    streams: usize,
    /// The number of passes that bring the sums of rows and columns of a mixing matrix to 1.
    passes: usize,
    /// The number that keeps weights from 0.
    eps: f64,
    /// The number that is added to the mean square of the streams.
    norm_eps: f64,
}

impl Numbers {
    fn of(json: &Value) -> Result<Self> {
        Ok(Self {
            streams: required(json, &["hc_mult"])?,
            passes: json["hc_sinkhorn_iters"].as_u64().unwrap_or(20) as usize,
            eps: json["hc_eps"].as_f64().unwrap_or(1e-6),
            norm_eps: json["rms_norm_eps"].as_f64().unwrap_or(1e-6),
        })
    }

    /// Returns the streams (B, T, N, E) of a token in one row that is normalised, times a projection (rows, N · E):
    /// (B, T, rows), in f32.
    fn project(self, xs: &Tensor, projection: &PackedLinear) -> Result<Tensor> {
        let flat = xs.flatten_from(2)?.to_dtype(DType::F32)?;
        let square = (flat.sqr()?.mean_keepdim(D::Minus1)? + self.norm_eps)?;
        projection.forward(&flat.broadcast_div(&square.sqrt()?)?)
    }

    /// Returns the weights (B, T, N) by which a module reads streams, from their logits.
    fn reading_weights(self, logits: &Tensor) -> Result<Tensor> {
        ops::sigmoid(logits)? + self.eps
    }
}

/// The sizes of [`Parameters`].
struct ParameterSizes {
    rows: usize,
    /// N · E, the number of entries of all streams of a token.
    entries: usize,
    /// The number of factors.
    parts: usize,
}

/// Rows of a projection that share a factor.
struct RowsOfPart {
    part: usize,
    first: usize,
    count: usize,
}

/// The parameters of projections of the streams, of which a token has one for each row.
struct Parameters {
    /// (rows, N · E).
    projection: PackedLinear,
    /// (rows,).
    base: Tensor,
    /// One factor for all rows, or for each part of them.
    scale: Tensor,
}

impl Parameters {
    /// Reads the parameters whose names have this prefix.
    fn read(weights: &Weights, prefix: &str, sizes: ParameterSizes) -> Result<Self> {
        let ParameterSizes { rows, entries, parts } = sizes;
        let tensor = |name: &str, shape: &[usize]| {
            let name = format!("{prefix}{name}");
            let found = weights.get_unchecked_dtype(&name, DType::F32)?;
            if found.dims() != shape {
                bail!("[causal_lm] {}.{name} has the shape {:?}, expected {shape:?}", weights.prefix(), found.dims())
            }
            Ok(found)
        };
        Ok(Self {
            projection: PackedLinear::new(&tensor("fn", &[rows, entries])?, None)?,
            base: tensor("base", &[rows])?,
            scale: tensor("scale", &[parts])?,
        })
    }

    /// Returns some of the projections with their base and factor.
    fn scaled(&self, projected: &Tensor, rows: RowsOfPart) -> Result<Tensor> {
        let RowsOfPart { part, first, count } = rows;
        let own = projected.narrow(2, first, count)?.contiguous()?;
        own.broadcast_mul(&self.scale.narrow(0, part, 1)?)?.broadcast_add(&self.base.narrow(0, first, count)?)
    }
}

/// The hyper-connection of a module, attention or an MLP.
pub struct HyperConnection {
    numbers: Numbers,
    parameters: Parameters,
}

/// The input of a module, and the weights of its output and of the streams.
pub struct ReadStreams {
    /// The input of the module, (B, T, E).
    pub input: Tensor,
    /// The weight of the output in each stream, (B, T, N, 1).
    output_weights: Tensor,
    /// The streams after they are mixed, (B, T, N, E).
    mixed: Tensor,
}

impl ReadStreams {
    /// Adds the output (B, T, E) of the module to the streams: (B, T, N, E).
    pub fn with(&self, output: &Tensor) -> Result<Tensor> {
        &self.mixed + self.output_weights.broadcast_mul(&output.unsqueeze(2)?)?
    }
}

impl HyperConnection {
    /// Loads the connection of a module of a block: `attn` or `ffn`. `width` is that of a stream.
    pub fn load(json: &Value, block: &Weights, module: &str, width: usize) -> Result<Self> {
        let numbers = Numbers::of(json)?;
        let n = numbers.streams;
        let sizes = ParameterSizes { rows: (2 + n) * n, entries: n * width, parts: 3 };
        let parameters = Parameters::read(block, &format!("hc_{module}_"), sizes)?;
        Ok(Self { numbers, parameters })
    }

    /// Returns the input of the module for streams (B, T, N, E).
    pub fn read(&self, xs: &Tensor) -> Result<ReadStreams> {
        let Self { numbers, parameters } = self;
        let n = numbers.streams;
        let projected = numbers.project(xs, &parameters.projection)?;
        let of_input = parameters.scaled(&projected, RowsOfPart { part: 0, first: 0, count: n })?;
        let of_output = parameters.scaled(&projected, RowsOfPart { part: 1, first: n, count: n })?;
        let of_streams = parameters.scaled(&projected, RowsOfPart { part: 2, first: 2 * n, count: n * n })?;
        let reading = numbers.reading_weights(&of_input)?;
        let output_weights = (ops::sigmoid(&of_output)? * 2.0)?;
        let (b, t, ..) = xs.dims4()?;
        let mixing = self.balanced(&of_streams.reshape((b, t, n, n))?)?.to_dtype(xs.dtype())?;
        Ok(ReadStreams {
            input: sum_of_streams(xs, &reading)?,
            output_weights: output_weights.to_dtype(xs.dtype())?.unsqueeze(3)?,
            mixed: mixing.transpose(2, 3)?.contiguous()?.matmul(xs)?,
        })
    }

    /// Returns a matrix (.., N, N) of positive numbers whose rows and columns have about the sum 1.
    fn balanced(&self, logits: &Tensor) -> Result<Tensor> {
        let Numbers { passes, eps, .. } = self.numbers;
        let divided = |matrix: Tensor, dim: D| matrix.broadcast_div(&(matrix.sum_keepdim(dim)? + eps)?);
        let mut matrix = divided((ops::softmax(logits, D::Minus1)? + eps)?, D::Minus2)?;
        for _ in 1..passes {
            matrix = divided(divided(matrix, D::Minus1)?, D::Minus2)?;
        }
        Ok(matrix)
    }
}

/// The sum of the streams after the last block.
pub struct StreamSum {
    numbers: Numbers,
    parameters: Parameters,
}

impl StreamSum {
    /// Loads the sum of a model whose streams have this width.
    pub fn load(json: &Value, model: &Weights, width: usize) -> Result<Self> {
        let numbers = Numbers::of(json)?;
        // The first prefix is that of transformers, the other one is the published one.
        let prefixes = ["hc_head.hc_", "hc_head_"];
        let is_there = |prefix: &&str| model.contains_tensor(&format!("{prefix}fn"));
        let prefix = prefixes.into_iter().find(is_there).unwrap_or(prefixes[0]);
        let n = numbers.streams;
        let parameters = Parameters::read(model, prefix, ParameterSizes { rows: n, entries: n * width, parts: 1 })?;
        Ok(Self { numbers, parameters })
    }

    /// Returns embeddings (B, T, E) as streams (B, T, N, E).
    pub fn spread(&self, xs: &Tensor) -> Result<Tensor> {
        let (b, t, width) = xs.dims3()?;
        xs.unsqueeze(2)?.expand((b, t, self.numbers.streams, width))?.contiguous()
    }

    /// Returns the sum of streams (B, T, N, E): (B, T, E).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let projected = self.numbers.project(xs, &self.parameters.projection)?;
        let rows = RowsOfPart { part: 0, first: 0, count: self.numbers.streams };
        let logits = self.parameters.scaled(&projected, rows)?;
        sum_of_streams(xs, &self.numbers.reading_weights(&logits)?)
    }
}

/// Returns the sum of streams (B, T, N, E) by their weights (B, T, N): (B, T, E).
fn sum_of_streams(xs: &Tensor, weights: &Tensor) -> Result<Tensor> {
    xs.broadcast_mul(&weights.to_dtype(xs.dtype())?.unsqueeze(3)?)?.sum(2)
}
