//! Factors of queries by position that a model learns.

use candle_core::{DType, Result, Tensor};
use candle_nn::Init;

use crate::position::Positions;
use candle_attention_modules::base::{Heads, Parameter, ParameterReader, ParameterSpec};

/// The names of the scales.
pub(super) const SCALE_NAMES: [&str; 2] = ["softmax_scaling.scale", "ssmax_scaling.s"];

/// The factor `scale · ln(position + 1) + bias` of the queries of each head (Mistral Large 4).
#[derive(Debug, Clone)]
pub(super) struct LearnedTemperature {
    /// (heads,).
    scale: Parameter,
    /// (heads,).
    bias: Parameter,
}

impl LearnedTemperature {
    /// Reads `softmax_scaling.scale` and `.bias`, or `ssmax_scaling.s` and `.b`, of some heads: the query heads of a
    /// layer, of which a rank may have some, or all heads of an indexer.
    pub fn load(heads: usize, are_query_heads: bool, source: &ParameterReader) -> Result<Self> {
        let read = |names: [&str; 2], initial: f64| -> Result<Parameter> {
            let name = if source.has(names[1]) { names[1] } else { names[0] };
            let spec = ParameterSpec::new(name, [heads], Init::Const(initial));
            Ok(source.read(&if are_query_heads { spec.by_head(Heads::Query, 0) } else { spec })?.into())
        };
        Ok(Self { scale: read(SCALE_NAMES, 0.0)?, bias: read(["softmax_scaling.bias", "ssmax_scaling.b"], 1.0)? })
    }

    /// Multiplies heads (B, T, heads, width) by their factors. `log_positions` is that of [`log_positions`].
    pub fn scaled(&self, heads: &Tensor, log_positions: &Tensor) -> Result<Tensor> {
        let (scale, bias) = (self.scale.tensor()?, self.bias.tensor()?);
        let of_heads =
            |parameter: &Tensor| parameter.reshape((1, 1, parameter.elem_count(), 1))?.to_dtype(heads.dtype());
        let logs = log_positions.to_dtype(heads.dtype())?;
        heads.broadcast_mul(&logs.broadcast_mul(&of_heads(&scale)?)?.broadcast_add(&of_heads(&bias)?)?)
    }

    /// Returns a copy for inference.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self { scale: self.scale.freeze()?, bias: self.bias.freeze()? })
    }
}

/// Returns `ln(position + 1)` of the tokens of a call, (1, T, 1, 1), or (B, T, 1, 1) if sequences have different
/// positions.
pub(super) fn log_positions(positions: &Positions, like: &Tensor) -> Result<Tensor> {
    let logs: Vec<f32> = positions.entries.iter().map(|&position| (position as f32 + 1.0).ln()).collect();
    Tensor::from_vec(logs, (positions.rows(), positions.t, 1, 1), like.device())?.to_dtype(DType::F32)
}
