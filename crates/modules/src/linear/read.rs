//! Packed layers of the weights of a builder, floats or codes.

use candle_core::{Error, Result, bail};
use candle_nn::VarBuilder;

use super::{OP, PackedLinear};
use crate::base::{QuantizedWeight, WeightAndBias};

/// Packs rows that were read: their codes if they have codes of one format, or their numbers.
impl TryFrom<WeightAndBias> for PackedLinear {
    type Error = Error;

    fn try_from(rows: WeightAndBias) -> Result<Self> {
        let Some(weight) = rows.weight.quantized()?.filter(|_| !rows.is_tracked()) else {
            return rows.to_linear()?.try_into();
        };
        let bias = match &rows.bias {
            Some(bias) => Some(bias.tensor()?),
            None => None,
        };
        PackedLinear::from_quantized_on(&weight, bias.as_ref(), rows.weight.dtype(), rows.weight.first().device())
    }
}

/// Packs the quantised weight of a builder with its bias; `None` where the builder has floats.
///
/// # Errors
/// For missing or misshapen tensors.
pub(super) fn codes_of_builder(
    inputs: usize,
    outputs: usize,
    has_bias: bool,
    vb: &VarBuilder,
) -> Result<Option<PackedLinear>> {
    let Some(weight) = QuantizedWeight::of_builder(vb, "weight")? else { return Ok(None) };
    if (weight.outputs, weight.inputs) != (outputs, inputs) {
        bail!(
            "[{OP}] {}.weight has shape {:?}, expected {:?}",
            vb.prefix(),
            (weight.outputs, weight.inputs),
            (outputs, inputs)
        )
    }
    let bias = if has_bias { Some(vb.get(outputs, "bias")?) } else { None };
    PackedLinear::from_quantized_on(&weight, bias.as_ref(), vb.dtype(), vb.device()).map(Some)
}
