//! ALiBi: scores decrease with the distance of query and key, by a slope for each head.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::{CallContext, KeyValueHeads, Positions, QueryKeyPositions, ScoreArguments, ScoreTerm, SharedTerm};
use candle_attention_modules::base::{accumulation_dtype, check_entries, check_memory, number, to_device};

/// The config of ALiBi (<https://arxiv.org/abs/2108.12409>): a score decreases by
/// `slope · |query position - key position|`, with positions as the mask counts them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AlibiConfig {
    /// The slopes of the paper, see [`alibi_slopes`]: BLOOM, and MPT by default.
    #[default]
    Standard,
    /// The series of the paper with another largest exponent than 8: `alibi_bias_max` of MPT.
    BiasMax(f64),
    /// A slope for each query head.
    Slopes(Vec<f32>),
    /// The biases of Falcon: `slope · j` times the scale of the scores for a key at position j of its sequence, where
    /// the slope, j and the product are rounded to bf16. Because of the rounding, they do not depend on the distance
    /// only.
    Falcon,
}

impl AlibiConfig {
    /// Returns the slope of each query head; for Falcon, before they are rounded.
    ///
    /// # Errors
    /// As [`alibi_slopes`].
    pub fn slopes(&self, num_heads: usize) -> Result<Vec<f32>> {
        let bias_max = match self {
            // As in the paper, and in every model but some of MPT.
            Self::Standard | Self::Falcon => 8.0,
            Self::BiasMax(bias_max) => *bias_max,
            Self::Slopes(slopes) => return Ok(slopes.clone()),
        };
        check_memory("alibi", format_args!("a slope for each of {num_heads} heads"), &[num_heads, size_of::<f32>()])?;
        let n = num_heads.next_power_of_two();
        let slope = |i: usize| (-(i as f64) * bias_max / n as f64).exp2() as f32;
        if n == num_heads {
            return Ok((1..=n).map(slope).collect());
        }
        // The rule of MPT and of the paper: the even slopes are those of the power of two below.
        let even = (2..=n).step_by(2);
        let odd = (1..=n).step_by(2);
        Ok(even.chain(odd).take(num_heads).map(slope).collect())
    }

    /// Checks that the slopes are in their range and fit the number of query heads.
    ///
    /// # Errors
    /// Names the option, what was found and what was expected.
    pub fn validate(&self, num_heads: usize) -> Result<()> {
        match self {
            Self::Standard | Self::Falcon => Ok(()),
            Self::BiasMax(bias_max) => number::above_zero("alibi", "bias_max", *bias_max),
            Self::Slopes(slopes) => {
                check_entries("alibi", "the list of slopes", slopes.len(), num_heads, "heads")?;
                slopes.iter().try_for_each(|&slope| number::finite("alibi", "a slope", f64::from(slope)))
            }
        }
    }
}

/// Returns ALiBi's slope for each of `num_heads` heads: `2^(-8/n)`, its square, its cube and so on for n heads, if n is
/// a power of two. Other numbers of heads take the slopes of the power of two below, and then every second slope of the
/// power of two above.
///
/// # Errors
/// If the slopes do not fit in memory.
///
/// ```
/// use candle_attention::{SdpaOptions, alibi_slopes};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// assert_eq!(alibi_slopes(4)?, [0.25, 0.0625, 0.015625, 0.00390625]);
/// assert_eq!(alibi_slopes(6)?, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
/// let options = SdpaOptions::default().with_alibi_slopes(&Tensor::from_vec(alibi_slopes(6)?, 6, &Device::Cpu)?);
/// # Ok(()) }
/// ```
pub fn alibi_slopes(num_heads: usize) -> Result<Vec<f32>> {
    AlibiConfig::Standard.slopes(num_heads)
}

/// Returns the score modifier of `heads`, which are some of `num_heads` heads.
pub(crate) fn alibi(
    config: &AlibiConfig,
    num_heads: usize,
    heads: Range<usize>,
    device: &Device,
) -> Result<SharedTerm> {
    let slopes = &config.slopes(num_heads)?[heads];
    Ok(Arc::new(match config {
        AlibiConfig::Falcon => {
            Alibi::OfKeys(Tensor::new(slopes, &Device::Cpu)?.to_dtype(DType::BF16)?.reshape((1, (), 1, 1))?)
        }
        _ => Alibi::OfDistances(Tensor::new(slopes, device)?),
    }))
}

/// The term of a layer.
#[derive(Debug)]
enum Alibi {
    /// Slopes (H,) in f32, for the distance of each query and key.
    OfDistances(Tensor),
    /// Slopes (1, H, 1, 1) in bf16 on the CPU, for the position of each key, which does not depend on the query.
    OfKeys(Tensor),
}

impl ScoreTerm for Alibi {
    fn modify(&self, arguments: &mut ScoreArguments, _: Option<&mut KeyValueHeads>, call: &CallContext) -> Result<()> {
        let slopes = match self {
            Self::OfDistances(slopes) if call.has_tree => return add_biases_by_pair(slopes, arguments, call),
            Self::OfDistances(slopes) => {
                arguments.options.alibi_slopes = Some(slopes.clone());
                return Ok(());
            }
            Self::OfKeys(slopes) => slopes,
        };
        if call.packed.is_some() {
            bail!(
                "[multi_head_attention] the layer has a bias for each key that follows from its position, which packed \
                 sequences do not take"
            )
        }
        let Some(QueryKeyPositions { keys, .. }) = call.positions else { return Ok(()) };
        let positions = Tensor::from_slice(&keys.entries, (keys.rows(), 1, 1, keys.t), &Device::Cpu)?;
        let biases = positions.to_dtype(DType::BF16)?.broadcast_mul(slopes)?.to_dtype(DType::F64)?;
        let biases = (biases * arguments.options.scale.unwrap_or(1.0))?;
        let biases = biases.to_dtype(accumulation_dtype(arguments.q.dtype()))?;
        let biases = to_device(&biases, arguments.q.device())?;
        arguments.mask = arguments.mask.clone().with_bias(&biases);
        Ok(())
    }
}

/// Adds the bias of each query and key by their positions, for calls in which these are not the indices of the keys.
fn add_biases_by_pair(slopes: &Tensor, arguments: &mut ScoreArguments, call: &CallContext) -> Result<()> {
    let Some(QueryKeyPositions { queries, keys }) = call.positions else { return Ok(()) };
    let device = arguments.q.device();
    let h = slopes.dim(0)?;
    let b = queries.rows().max(keys.rows());
    let bytes = [b, h, queries.t, keys.t, size_of::<f32>()];
    check_memory("alibi", format_args!("a bias for each of {} queries and {} keys", queries.t, keys.t), &bytes)?;
    // f32 has all positions.
    let column = |positions: &Positions, dims: (usize, usize, usize, usize)| {
        Tensor::from_slice(&positions.entries, dims, &Device::Cpu)?.to_dtype(DType::F32)?.to_device(device)
    };
    let query_positions = column(queries, (queries.rows(), 1, queries.t, 1))?;
    let key_positions = column(keys, (keys.rows(), 1, 1, keys.t))?;
    let distances = query_positions.broadcast_sub(&key_positions)?.abs()?;
    let biases = distances.broadcast_mul(&slopes.to_dtype(DType::F32)?.neg()?.reshape((1, h, 1, 1))?)?;
    let biases = biases.to_dtype(accumulation_dtype(arguments.q.dtype()))?;
    arguments.mask = arguments.mask.clone().with_bias(&biases);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the slopes by the recursion of Press et al.
    fn recipe(n: usize) -> Vec<f64> {
        if n.is_power_of_two() {
            let first = 2f64.powf(-8.0 / n as f64);
            return (1..=n).map(|i| first.powi(i as i32)).collect();
        }
        let below = n.next_power_of_two() / 2;
        let mut slopes = recipe(below);
        slopes.extend(recipe(2 * below).into_iter().step_by(2).take(n - below));
        slopes
    }

    #[test]
    fn alibi_slopes_match_the_paper_for_every_number_of_heads() {
        for n in 1..200 {
            let found = alibi_slopes(n).expect("few heads");
            let expected = recipe(n);
            assert_eq!(found.len(), n);
            for (slope, exact) in found.iter().zip(expected) {
                assert!((f64::from(*slope) / exact - 1.0).abs() < 1e-6, "{n} heads: {slope}, expected {exact}");
            }
        }
        assert!(alibi_slopes(0).expect("no heads").is_empty());
        for n in [usize::MAX, 1 << 62] {
            let error = alibi_slopes(n).expect_err("no memory holds them").to_string();
            assert!(
                error.starts_with(&format!("[alibi] a slope for each of {n} heads does not fit in memory")),
                "{error}"
            );
        }
    }
}
