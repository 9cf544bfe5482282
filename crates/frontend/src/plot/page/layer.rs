//! Statistics of a layer as the bytes that `decode.js` reads.

use std::fmt;

use candle_attention_core::AttentionStatistics;
use candle_attention_modules::base::{Expect, FLOATS};
use candle_core::{DType, Device, Result, Tensor, bail};

use crate::plot::style;

/// How far a weight may leave \[0, 1\] by rounding, as in heat maps.
const ROUNDING: f32 = 0.01;

/// The size of a layer's statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) heads: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    /// Top keys of each query.
    pub(super) top: usize,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [heads, keys, top] =
            [(self.heads, "head"), (self.keys, "key"), (self.top, "top key")].map(|(n, noun)| style::count(n, noun));
        let queries = if self.queries == 1 { "query" } else { "queries" };
        write!(f, "{heads}, {} {queries}, {keys} and {top}", self.queries)
    }
}

#[derive(Debug, Clone)]
pub(super) struct Layer {
    pub(super) name: String,
    /// Little-endian, in this order: received sums (H, T_kv) and entropies (H, T_q) in f32, top keys (H, T_q, k) in u16
    /// or u32, codes of their weights in u16, and, where all weights are kept, their codes (H, T_q, T_kv) in u8.
    pub(super) bytes: Vec<u8>,
    pub(super) has_all_weights: bool,
}

impl Layer {
    /// Sequence `b` of statistics.
    pub(super) fn new(name: String, statistics: &AttentionStatistics, b: usize) -> Result<(Self, Shape)> {
        let AttentionStatistics { top_keys, top_weights, entropy, received, weights } = statistics;
        let has_batch = match *top_keys.dims() {
            [batch, _, _, _] if b >= batch => bail!("[page] sequence {b} is not below the batch size {batch}"),
            [_, _, _, _] => true,
            [_, _, _] if b == 0 => false,
            [_, _, _] => bail!("[page] there is no sequence {b} in statistics without the dimension B"),
            _ => bail!("[page] the top keys have shape {:?}; expected (B, H, T_q, k) or (H, T_q, k)", top_keys.dims()),
        };
        let of_sequence = |tensor: &Tensor, what: &str| match has_batch {
            true if tensor.dims().first().is_none_or(|&batch| b >= batch) => {
                bail!("[page] {what} of shape {:?} has no sequence {b}", tensor.dims())
            }
            true => tensor.get(b),
            false => Ok(tensor.clone()),
        };
        let top_keys = of_sequence(top_keys, "top_keys")?;
        let (heads, queries, top) = top_keys.dims3()?;
        let received = of_sequence(received, "received")?;
        let keys = received.dims().last().copied().unwrap_or_default();
        let shape = Shape { heads, queries, keys, top };
        if heads == 0 || (top == 0 && queries > 0 && keys > 0) {
            bail!("[page] layer {name:?} has {shape}; expected at least one head and one top key")
        }
        Expect::one("page", "top_keys", &top_keys).dtype_of(&[DType::U32], "")?;

        let mut bytes = Vec::new();
        let received = floats(&received, "received", &[heads, keys])?;
        let entropy = floats(&of_sequence(entropy, "entropy")?, "entropy", &[heads, queries])?;
        bytes.extend(received.iter().chain(&entropy).flat_map(|number| number.to_le_bytes()));

        let found = top_keys.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<u32>()?;
        if let Some(key) = found.iter().find(|&&key| key as usize >= keys) {
            bail!("[page] the top keys have key {key}; expected keys below {keys}")
        }
        // Two bytes hold all keys below 65,536.
        let len = if keys > usize::from(u16::MAX) + 1 { 4 } else { 2 };
        found.iter().for_each(|key| bytes.extend(&key.to_le_bytes()[..len]));
        let top_weights = floats(&of_sequence(top_weights, "top_weights")?, "top_weights", &[heads, queries, top])?;
        extend_with_codes::<2>(&mut bytes, &name, &top_weights)?;
        if let Some(weights) = weights {
            let weights = floats(&of_sequence(weights, "weights")?, "weights", &[heads, queries, keys])?;
            extend_with_codes::<1>(&mut bytes, &name, &weights)?;
        }
        Ok((Self { name, bytes, has_all_weights: weights.is_some() }, shape))
    }
}

/// The numbers of a tensor of floats of this shape.
fn floats(tensor: &Tensor, what: &str, shape: &[usize]) -> Result<Vec<f32>> {
    Expect::one("page", what, tensor).sizes(shape)?.dtype_of(&FLOATS, "")?;
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// Appends the square roots of weights in whole steps of `SIZE` bytes, so that small weights keep their digits: 0 is
/// for 0 alone, the last code for what is not finite, the one before it for 1.
fn extend_with_codes<const SIZE: usize>(bytes: &mut Vec<u8>, name: &str, weights: &[f32]) -> Result<()> {
    let last = (1u32 << (8 * SIZE)) - 1;
    for &weight in weights {
        if weight.is_finite() && !(-ROUNDING..=1.0 + ROUNDING).contains(&weight) {
            bail!("[page] layer {name:?} has a weight of {weight}; expected weights from 0 to 1")
        }
        let code = match weight {
            _ if !weight.is_finite() => last,
            _ if weight <= 0.0 => 0,
            _ => ((weight.min(1.0).sqrt() * (last - 1) as f32).round() as u32).max(1),
        };
        bytes.extend(&code.to_le_bytes()[..SIZE]);
    }
    Ok(())
}
