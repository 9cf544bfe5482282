//! One row of inputs by a large weight, in bf16 or as codes: the time of reading the weight.

use candle_attention::weights::{CodeValues, GroupNumbers};
use candle_attention::{PackedLinear, QuantizedWeight};
use candle_core::{DType, Device, Module, Result, Tensor};
use half::f16;

use super::cell::RowSizes;
use super::clock::Clock;
use super::outcome::Outcome;

/// The inputs that share a scale, as in GPTQ and AWQ.
const GROUP: usize = 128;

/// Times one row. Codes have 4 bits, with scales in f16 and whole zeros.
pub fn time(sizes: &RowSizes, clock: &Clock) -> Result<Outcome> {
    let RowSizes { outputs, inputs, has_codes } = *sizes;
    let device = &clock.device;
    let layer = if has_codes {
        let weight = codes(outputs, inputs)?;
        PackedLinear::from_quantized_on(&weight, None, DType::BF16, device)?
    } else {
        PackedLinear::new(&Tensor::zeros((outputs, inputs), DType::BF16, device)?, None)?
    };
    let xs = Tensor::ones((1, inputs), DType::BF16, &Device::Cpu)?.to_device(device)?;
    let ms = clock.milliseconds(|_| layer.forward(&xs))?;
    let path = if has_codes { "codes of 4 bits" } else { "bf16" };
    Ok(Outcome::Milliseconds { ms, path: path.into() })
}

fn codes(outputs: usize, inputs: usize) -> Result<QuantizedWeight> {
    let groups = outputs * inputs / GROUP;
    QuantizedWeight {
        outputs,
        inputs,
        bits: 4,
        codes: (0..outputs * inputs).map(|at| (at * 7 % 16) as u8).collect(),
        group: GROUP,
        values: CodeValues::Zeros(GroupNumbers::Whole(vec![8; groups])),
        scales: GroupNumbers::F16(vec![f16::from_f32(0.01); groups]),
        input_order: None,
    }
    .checked()
}
