//! AWQ in the version `gemv_fast`: `qweight` (out / 4, in) of I16, with `scales` (groups, out) and `qzeros` (groups,
//! out) of floats, both of which may have more rows than there are groups.
//!
//! A number is `code · scale + zero`: the zeros are stored times their scales, and negative. A row of `qweight` has the
//! codes of 4 outputs, for 64 inputs of one output after the other.

use std::sync::Arc;

use candle_core::{Result, bail};
use safetensors::Dtype;

use super::bits::append_stream;
use super::groups::Groups;
use super::tensors::Tensors;
use super::{Found, Module, QuantizedFormat};
use candle_attention_modules::base::{CodeValues, QuantizedWeight};

/// The number of outputs in a row of `qweight`.
const OUTPUTS: usize = 4;
/// The number of neighbouring inputs of one output in a row of `qweight`.
const INPUTS: usize = 64;
/// The number of neighbouring inputs whose codes are permuted among each other.
const ORDERED: usize = 32;

#[derive(Debug)]
struct GemvFast {
    outputs: usize,
    inputs: usize,
    group: usize,
}

/// Finds a layer, which has a tensor `qweight`.
pub(super) fn find(module: &Module, bits: usize, group: Option<usize>) -> Result<Found> {
    let tensors = module.tensors;
    let all = ["qweight", "qzeros", "scales"].map(|name| tensors.matrix(name));
    let are_words = tensors.get("qweight").is_some_and(|own| own.dtype == Dtype::I16);
    let Some(format) = sizes(all, group).filter(|_| are_words && bits == 4) else {
        bail!(
            "expected codes of 4 bits, `qweight` (out / 4, in) of I16, inputs in whole groups and in steps of 64, and \
             `qzeros` and `scales` (groups, out), found {bits} bits, {}",
            tensors.described()
        )
    };
    let (outputs, inputs) = (format.outputs, format.inputs);
    Ok(Found { outputs, inputs, format: Arc::new(format), tensors: vec!["qweight", "qzeros", "scales"] })
}

/// Returns the sizes of a layer by the shapes of its tensors; `None` where they do not fit each other.
fn sizes(all: [Option<[usize; 2]>; 3], group: Option<usize>) -> Option<GemvFast> {
    let [[rows, inputs], zeros, scales] = [all[0]?, all[1]?, all[2]?];
    let outputs = rows.checked_mul(OUTPUTS)?;
    let group = group.unwrap_or(inputs);
    let is_whole =
        outputs > 0 && inputs > 0 && group > 0 && inputs.is_multiple_of(INPUTS) && inputs.is_multiple_of(group);
    (is_whole && zeros == scales && scales[1] == outputs && scales[0] >= inputs / group).then_some(GemvFast {
        outputs,
        inputs,
        group,
    })
}

/// Returns the place of the code of an input among the codes of 32 neighbours.
fn place(input: usize) -> usize {
    let [eight, pair, own] = [input / 8, input % 8 / 2, input % 2];
    pair * 8 + own * 4 + eight
}

impl QuantizedFormat for GemvFast {
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight> {
        let &Self { outputs, inputs, group } = self;
        let mut stored = Vec::with_capacity(outputs * inputs);
        append_stream(&tensors.bytes("qweight")?, 4, &mut stored);
        let mut codes = Vec::with_capacity(stored.len());
        for rows in stored.chunks_exact(OUTPUTS * inputs) {
            for output in 0..OUTPUTS {
                for first in (0..inputs).step_by(ORDERED) {
                    let before = first % INPUTS;
                    let own = &rows[(first - before) * OUTPUTS + output * INPUTS + before..][..ORDERED];
                    codes.extend((0..ORDERED).map(|input| own[place(input)]));
                }
            }
        }
        drop(stored);
        let groups = Groups::of_neighbours(inputs, group);
        let of_groups =
            |name| groups.numbers(outputs, &tensors.numbers(name)?, |output, index| index * outputs + output);
        let values = CodeValues::Minimums(of_groups("qzeros")?);
        let scales = of_groups("scales")?;
        Ok(QuantizedWeight { outputs, inputs, bits: 4, codes, group, values, scales, input_order: None })
    }
}
