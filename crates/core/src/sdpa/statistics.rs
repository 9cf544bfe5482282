//! Statistics of attention weights, which the fused kernel finds without having the weights as a whole.

use std::ops::Range;

use candle_attention_kernels::flash::{self, MAX_TOP};
use candle_core::{Device, Result, Tensor, bail};
use macro_rules_attribute::apply;

use super::validate::{Call, Dims};
use super::{Outputs, PackedSequences, SdpaOptions, attend};
use crate::mask::AttentionMask;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::base::{Options, number, options};

/// What [`scaled_dot_product_attention_with_statistics`] is to find out, besides entropies and sums.
///
/// ```
/// use candle_attention::StatisticsOptions;
/// // The four keys that matter most to each query, and the weights of queries 100 to 103 in full.
/// let options = StatisticsOptions::default().with_top_keys(4).with_weights_of(100..104, 0..1000);
/// assert_eq!(options.top_keys(), 4);
/// ```
#[apply(options)]
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct StatisticsOptions {
    /// How many keys with the largest weights are wanted of each query, at most 32; 8 unless given.
    #[default(8)]
    top_keys: usize,
    window: Option<[Range<usize>; 2]>,
}

impl Default for StatisticsOptions {
    fn default() -> Self {
        Self::unset()
    }
}

impl StatisticsOptions {
    /// The weights of the queries `rows` and the keys `columns` are wanted as they are: that tile, and not those of all
    /// queries and keys.
    pub fn with_weights_of(self, rows: Range<usize>, columns: Range<usize>) -> Self {
        Self { window: Some([rows, columns]), ..self }
    }

    pub(super) fn check(&self, call: &Call) -> Result<()> {
        let (op, Dims { t_q, t_kv, .. }) = (call.op, call.dims);
        number::within(op, "top_keys", self.top_keys, 0..=MAX_TOP)?;
        let is_within = |range: &Range<usize>, count| range.start <= range.end && range.end <= count;
        match &self.window {
            Some([rows, columns]) if !is_within(rows, t_q) || !is_within(columns, t_kv) => bail!(
                "[{op}] weights of queries {rows:?} and keys {columns:?} were asked for, expected some of {t_q} queries \
                 and {t_kv} keys"
            ),
            _ => Ok(()),
        }
    }

    /// The same for the kernels.
    pub(super) fn as_kernels(&self) -> flash::RequestedStatistics {
        let [rows, columns] = self.window.clone().unwrap_or([0..0, 0..0]);
        flash::RequestedStatistics { top: self.top_keys, rows, columns }
    }
}

/// Statistics of the weights of one call, after the softmax and before dropout: in f32 (f64 for f64 inputs), on q's
/// device, without gradients.
#[derive(Debug, Clone)]
pub struct AttentionStatistics {
    /// The keys with the largest weights of each query, the largest first and of equal scores the lower key first:
    /// (B, H, T_q, k) in u32, where k is the smaller of [`StatisticsOptions::top_keys`] and T_kv. Keys of weight 0,
    /// such as hidden ones, come last, the lowest first.
    pub top_keys: Tensor,
    /// The weights of [`top_keys`](Self::top_keys): (B, H, T_q, k).
    pub top_weights: Tensor,
    /// `-Σ w ln w` over the keys of each query, in nats: (B, H, T_q). 0 for a query that sees no key.
    pub entropy: Tensor,
    /// The sum over the queries of the weight that a key has: (B, H, T_kv).
    pub key_weight_sums: Tensor,
    /// The weights of [`StatisticsOptions::with_weights_of`], if they were asked for: (B, H, rows, columns).
    pub weights: Option<Tensor>,
}

impl AttentionStatistics {
    /// All of them.
    pub(crate) fn tensors(&mut self) -> impl Iterator<Item = &mut Tensor> {
        let Self { top_keys, top_weights, entropy, key_weight_sums, weights } = self;
        [top_keys, top_weights, entropy, key_weight_sums].into_iter().chain(weights)
    }

    /// Those that the kernel found.
    pub(super) fn of_kernel(found: flash::Statistics, call: &Call, wanted: &StatisticsOptions) -> Result<Self> {
        let (Dims { b, h, t_q, t_kv, .. }, device) = (call.dims, call.q.device());
        let k = wanted.top_keys.min(t_kv);
        let weights = |[rows, columns]: &[Range<usize>; 2]| {
            Tensor::from_vec(found.weights, (b, h, rows.len(), columns.len()), device)
        };
        Ok(Self {
            top_keys: Tensor::from_vec(found.top_keys, (b, h, t_q, k), device)?,
            top_weights: Tensor::from_vec(found.top_weights, (b, h, t_q, k), device)?,
            entropy: Tensor::from_vec(found.entropy, (b, h, t_q), device)?,
            key_weight_sums: Tensor::from_vec(found.key_weight_sums, (b, h, t_kv), device)?,
            weights: wanted.window.as_ref().map(weights).transpose()?,
        })
    }

    /// The specification: those of weights (B, H, T_q, T_kv), in plain loops.
    pub(super) fn of_weights(weights: &Tensor, wanted: &StatisticsOptions) -> Result<Self> {
        let (b, h, t_q, t_kv) = weights.dims4()?;
        let (k, device) = (wanted.top_keys.min(t_kv), weights.device());
        let numbers = to_vec::<f64>(weights)?;
        let (mut top_keys, mut entropy) = (Vec::new(), Vec::new());
        for index in 0..b * h * t_q {
            let row = &numbers[index * t_kv..][..t_kv];
            let mut order: Vec<_> = (0..t_kv as u32).collect();
            order.sort_by(|&one, &other| row[other as usize].total_cmp(&row[one as usize]));
            top_keys.extend_from_slice(&order[..k]);
            // A weight of 0 adds nothing. A NaN is not 0, so that it reaches the sum.
            entropy.push(row.iter().filter(|weight| **weight != 0.0).map(|weight| -weight * weight.ln()).sum::<f64>());
        }
        let top_keys = Tensor::from_vec(top_keys, (b, h, t_q, k), device)?;
        let entropy = Tensor::from_vec(entropy, (b, h, t_q), &Device::Cpu)?.to_dtype(weights.dtype())?;
        let window = |[rows, columns]: &[Range<usize>; 2]| {
            weights.narrow(2, rows.start, rows.len())?.narrow(3, columns.start, columns.len())?.contiguous()
        };
        Ok(Self {
            top_weights: weights.contiguous()?.gather(&top_keys, 3)?,
            top_keys,
            entropy: entropy.to_device(device)?,
            key_weight_sums: weights.sum(2)?,
            weights: wanted.window.as_ref().map(window).transpose()?,
        })
    }
}

/// [`scaled_dot_product_attention`](crate::scaled_dot_product_attention) that also returns statistics of its weights:
/// for each query the keys with the largest weights and the entropy, for each key the weight that it receives, and the
/// weights of a window of queries and keys if they are asked for.
///
/// On a CPU, the fused kernel finds them. It takes memory for the statistics and for T_kv scores of some dozens of
/// queries in each thread, and goes over the scores a second time, with an exponential for each: for eight keys, about
/// a third more time than without at 2,048 tokens and more, and less than twice the time at 512.
///
/// ```
/// use candle_attention::{AttentionMask, SdpaOptions, StatisticsOptions, scaled_dot_product_attention_with_statistics};
/// use candle_core::{Device, Tensor};
/// # fn main() -> candle_core::Result<()> {
/// let xs = Tensor::randn(0f32, 1., (1, 8, 1000, 64), &Device::Cpu)?;
/// let (causal, options) = (AttentionMask::causal(), SdpaOptions::default());
/// let wanted = StatisticsOptions::default().with_top_keys(4);
/// let (ys, found) = scaled_dot_product_attention_with_statistics(&xs, &xs, &xs, &causal, &options, &wanted)?;
/// assert_eq!(ys.dims(), [1, 8, 1000, 64]);
/// assert_eq!(found.top_keys.dims(), [1, 8, 1000, 4]);
/// assert_eq!(found.key_weight_sums.dims(), [1, 8, 1000]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`scaled_dot_product_attention`](crate::scaled_dot_product_attention), for more than 32 keys, and for a window
/// that reaches past the queries or keys. [`Backend::Fused`](crate::Backend) is an error where an input is tracked for
/// gradients.
pub fn scaled_dot_product_attention_with_statistics(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &AttentionMask,
    options: &SdpaOptions,
    wanted: &StatisticsOptions,
) -> Result<(Tensor, AttentionStatistics)> {
    attend(Outputs::Statistics(wanted), [q, k, v], None, mask, options)?.with(|found| found.statistics.take())
}

/// [`scaled_dot_product_attention_varlen`](crate::scaled_dot_product_attention_varlen) that also returns statistics of
/// its weights, without the dimension B: for (H, total_q) queries and (H, total_kv) keys. Keys and windows count
/// through all sequences, and a query's weights for the keys of other sequences are 0.
///
/// # Errors
/// As [`scaled_dot_product_attention_varlen`](crate::scaled_dot_product_attention_varlen) and
/// [`scaled_dot_product_attention_with_statistics`].
pub fn scaled_dot_product_attention_varlen_with_statistics(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &PackedSequences,
    mask: &AttentionMask,
    options: &SdpaOptions,
    wanted: &StatisticsOptions,
) -> Result<(Tensor, AttentionStatistics)> {
    attend(Outputs::Statistics(wanted), [q, k, v], Some(sequences), mask, options)?
        .with(|found| found.statistics.take())
}
