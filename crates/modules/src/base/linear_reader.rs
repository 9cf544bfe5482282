//! Reads the weights of linear layers: floats, or the codes of quantised weights.

use std::sync::Arc;

use candle_core::{Result, Shape};

use super::parameters::{Parameter, WeightAndBias};
use super::quantized_weight::QuantizedWeight;
use super::reader::{LINEAR_WEIGHT, ParameterReader, linear_bias, stored_name};
use super::shard::Share;
use super::spec::{NO_BIAS, ParameterSpec};

impl ParameterReader<'_> {
    /// Returns the codes of a quantised weight (out, in), or this rank's share of them; `None` where the builder has
    /// floats.
    ///
    /// # Errors
    /// For a weight of another shape, one that cannot be read, and a share of the inputs that is not whole groups.
    pub fn read_codes(&self, spec: &ParameterSpec) -> Result<Option<QuantizedWeight>> {
        let stored = &stored_name(&self.vb, &spec.stored);
        let expected = Shape::from(spec.shape.as_slice());
        let explain = |error| self.explain(stored, &expected, error);
        let Some(weight) = QuantizedWeight::of_builder(&self.vb, stored).map_err(explain)? else { return Ok(None) };
        if spec.shape != [weight.outputs, weight.inputs] {
            let found = Shape::from((weight.outputs, weight.inputs));
            return self.fail(format!("{} has shape {found:?}, expected {expected:?}", self.full_name(stored)));
        }
        let Some(Share::Heads { heads, dim }) = spec.share else { return Ok(Some(weight)) };
        let own = self.own_range(heads, spec.shape[dim]);
        if own.len() == spec.shape[dim] {
            return Ok(Some(weight));
        }
        let part = if dim == 0 { weight.rows(&[own]) } else { weight.columns(own) };
        part.map(Some).map_err(explain)
    }

    /// Returns `name.weight` of shape (out, in), floats or codes, and `name.bias` (out,) if `has_bias`. Where heads
    /// divide one of the two dimensions, they are this rank's shard.
    ///
    /// # Errors
    /// As [`read_requested`](Self::read_requested) and [`read_codes`](Self::read_codes).
    pub fn linear(
        &self,
        name: &str,
        shape: (usize, usize),
        has_bias: bool,
        share: Option<Share>,
    ) -> Result<WeightAndBias> {
        let reader = self.pp(name);
        let spec = ParameterSpec { share, ..ParameterSpec::new("weight", [shape.0, shape.1], LINEAR_WEIGHT) };
        let weight = match reader.read_codes(&spec)? {
            Some(codes) => {
                let rows = 0..codes.outputs;
                Parameter::of_quantized(Arc::new(codes), 1, rows, reader.vb.device(), reader.vb.dtype())?
            }
            None => reader.read(&spec)?.into(),
        };
        let bias_share = if let Some(Share::Heads { dim: 1, .. }) = share { Some(Share::Sum) } else { share };
        let bias_spec = ParameterSpec::new("bias", [shape.0], linear_bias(shape.1)).only_if(has_bias, NO_BIAS);
        let bias = reader.read_requested(&ParameterSpec { share: bias_share, ..bias_spec })?;
        Ok(WeightAndBias { weight, bias: bias.map(Parameter::from) })
    }
}
