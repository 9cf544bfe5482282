//! MXFP4, in which GPT-OSS publishes its experts: 32 numbers of 4 bits with a power of two for all of them
//! (<https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>).

use candle_core::{Device, Result, Tensor, bail};

/// Numbers that have one scale.
pub const BLOCK: usize = 32;

/// What 4 bits mean, without the sign, which is the highest bit.
const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Blocks (rows, blocks, 16) and their scales (rows, blocks), both u8, give (rows, 32 blocks) in f32 on the CPU. A byte
/// has two numbers, that of the low bits first; a scale is the exponent of 2 plus 127.
pub fn dequantize(blocks: &Tensor, scales: &Tensor) -> Result<Tensor> {
    let (rows, count) = match *blocks.dims() {
        [rows, count, 16] if scales.dims() == [rows, count] => (rows, count),
        _ => bail!(
            "[causal_lm] MXFP4 blocks and scales have shapes {:?} and {:?}, expected (.., rows, blocks, 16) and (.., rows, blocks)",
            blocks.dims(),
            scales.dims()
        ),
    };
    let (bytes, scales) = (blocks.flatten_all()?.to_vec1::<u8>()?, scales.flatten_all()?.to_vec1::<u8>()?);
    let mut numbers = Vec::with_capacity(2 * bytes.len());
    for (block, &scale) in bytes.chunks(16).zip(&scales) {
        let scale = (f32::from(scale) - 127.0).exp2();
        for bits in block.iter().flat_map(|byte| [byte & 15, byte >> 4]) {
            let magnitude = scale * MAGNITUDES[usize::from(bits & 7)];
            numbers.push(if bits & 8 == 0 { magnitude } else { -magnitude });
        }
    }
    Tensor::from_vec(numbers, (rows, BLOCK * count), &Device::Cpu)
}
