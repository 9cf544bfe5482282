//! Statistics of attention weights, which the fused kernel computes without storing the weights.

use std::ops::Range;

use candle_attention_call::{RequestedStatistics, WeightTile};
use candle_attention_kernels::flash::{self, MAX_TOP};
use candle_core::{DType, Device, Result, Tensor, bail};

use super::call::Call;
use candle_attention_call::AttentionDims as Dims;
use candle_attention_modules::base::rowwise::to_vec;
use candle_attention_modules::base::{copied_to, number};

/// The statistics to compute besides entropies and sums.
///
/// ```
/// use candle_attention::StatisticsOptions;
/// // The four keys with the largest weights of each query, and all weights of queries 100 to 103.
/// let options = StatisticsOptions::default().with_top_keys(4).with_weights_of(100..104, 0..1000);
/// assert_eq!(options.top_keys(), 4);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct StatisticsOptions {
    requested: RequestedStatistics,
}

impl Default for StatisticsOptions {
    fn default() -> Self {
        Self { requested: RequestedStatistics { top_keys: 8, tile: None } }
    }
}

impl StatisticsOptions {
    /// Sets how many keys with the largest weights are returned for each query, at most 32. The default is 8.
    pub fn with_top_keys(mut self, top_keys: usize) -> Self {
        self.requested.top_keys = top_keys;
        self
    }

    /// Returns how many keys with the largest weights are returned for each query.
    pub fn top_keys(&self) -> usize {
        self.requested.top_keys
    }

    /// Requests the weights of a tile too: of these queries and these keys.
    pub fn with_weights_of(mut self, queries: Range<usize>, keys: Range<usize>) -> Self {
        self.requested.tile = Some(WeightTile { queries, keys });
        self
    }

    /// Returns what the options request.
    pub(crate) fn requested(&self) -> &RequestedStatistics {
        &self.requested
    }
}

/// Checks that requested statistics fit a call.
pub(super) fn check(requested: &RequestedStatistics, call: &Call) -> Result<()> {
    let Dims { t_q, t_kv, .. } = call.attention.dims;
    check_sizes(call.op, requested, t_q, t_kv)
}

/// Checks that requested statistics fit a call of these numbers of queries and keys.
fn check_sizes(op: &str, requested: &RequestedStatistics, t_q: usize, t_kv: usize) -> Result<()> {
    number::within(op, "top_keys", requested.top_keys, 0..=MAX_TOP)?;
    let Some(WeightTile { queries, keys }) = &requested.tile else { return Ok(()) };
    let is_within = |range: &Range<usize>, count| range.start <= range.end && range.end <= count;
    if !is_within(queries, t_q) || !is_within(keys, t_kv) {
        bail!(
            "[{op}] weights of queries {queries:?} and keys {keys:?} were requested, expected some of {t_q} queries and \
             {t_kv} keys"
        )
    }
    Ok(())
}

/// Statistics of the weights of one call, after the softmax and before dropout: in f32 (f64 for f64 inputs), on q's
/// device, without gradients.
#[derive(Debug, Clone)]
pub struct AttentionStatistics {
    /// The keys with the largest weights of each query, (B, H, T_q, k) in u32, where k is the smaller of
    /// [`StatisticsOptions::top_keys`] and T_kv. The largest weight comes first, and for equal scores the lower key.
    /// Keys of weight 0, such as masked ones, come last, the lowest first.
    pub top_keys: Tensor,
    /// The weights of [`top_keys`](Self::top_keys): (B, H, T_q, k).
    pub top_weights: Tensor,
    /// The entropy `-Σ w ln w` over the keys of each query, in nats: (B, H, T_q). It is 0 for a fully masked query.
    pub entropy: Tensor,
    /// The sum over the queries of the weight of each key: (B, H, T_kv).
    pub key_weight_sums: Tensor,
    /// The weights that [`StatisticsOptions::with_weights_of`] requests: (B, H, queries, keys).
    pub weights: Option<Tensor>,
}

impl AttentionStatistics {
    /// Applies `change` to every tensor.
    pub(crate) fn map(mut self, change: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        self.top_keys = change(self.top_keys)?;
        self.top_weights = change(self.top_weights)?;
        self.entropy = change(self.entropy)?;
        self.key_weight_sums = change(self.key_weight_sums)?;
        self.weights = self.weights.map(change).transpose()?;
        Ok(self)
    }

    /// Returns the statistics that the CPU kernel computed for a call.
    pub(super) fn from_kernel(found: flash::Statistics, dims: Dims, requested: &RequestedStatistics) -> Result<Self> {
        let Dims { b, h, t_q, t_kv, .. } = dims;
        let device = &Device::Cpu;
        let k = requested.top_keys.min(t_kv);
        let weights = match &requested.tile {
            Some(WeightTile { queries, keys }) => {
                Some(Tensor::from_vec(found.weights, (b, h, queries.len(), keys.len()), device)?)
            }
            None => None,
        };
        Ok(Self {
            top_keys: Tensor::from_vec(found.top_keys, (b, h, t_q, k), device)?,
            top_weights: Tensor::from_vec(found.top_weights, (b, h, t_q, k), device)?,
            entropy: Tensor::from_vec(found.entropy, (b, h, t_q), device)?,
            key_weight_sums: Tensor::from_vec(found.key_weight_sums, (b, h, t_kv), device)?,
            weights,
        })
    }

    /// Checks the requested statistics, and returns them for weights (B, H, T_q, T_kv).
    ///
    /// # Errors
    /// For more top keys than a kernel returns, and for queries and keys that are not there.
    pub(crate) fn of_weights(op: &str, weights: &Tensor, requested: &RequestedStatistics) -> Result<Self> {
        check_sizes(op, requested, weights.dim(2)?, weights.dim(3)?)?;
        Self::from_weights(&weights.detach(), requested)
    }

    /// Returns the statistics of weights (B, H, T_q, T_kv), in plain loops: the specification.
    pub(super) fn from_weights(weights: &Tensor, requested: &RequestedStatistics) -> Result<Self> {
        let (b, h, t_q, t_kv) = weights.dims4()?;
        let k = requested.top_keys.min(t_kv);
        let device = weights.device();
        if weights.elem_count() == 0 {
            let zeros = |shape: &[usize]| Tensor::zeros(shape, weights.dtype(), device);
            let tile =
                requested.tile.as_ref().map(|WeightTile { queries, keys }| zeros(&[b, h, queries.len(), keys.len()]));
            return Ok(Self {
                top_keys: Tensor::zeros((b, h, t_q, k), DType::U32, device)?,
                top_weights: zeros(&[b, h, t_q, k])?,
                entropy: zeros(&[b, h, t_q])?,
                key_weight_sums: zeros(&[b, h, t_kv])?,
                weights: tile.transpose()?,
            });
        }
        let numbers = to_vec::<f64>(weights)?;
        let mut top_keys = Vec::new();
        let mut entropy = Vec::new();
        for index in 0..b * h * t_q {
            let row = &numbers[index * t_kv..][..t_kv];
            let mut order: Vec<_> = (0..t_kv as u32).collect();
            order.sort_by(|&one, &other| row[other as usize].total_cmp(&row[one as usize]));
            top_keys.extend_from_slice(&order[..k]);
            // A weight of 0 adds nothing. A NaN is not 0, so that it reaches the sum.
            entropy.push(row.iter().filter(|weight| **weight != 0.0).map(|weight| -weight * weight.ln()).sum::<f64>());
        }
        let top_keys = copied_to(device, top_keys, (b, h, t_q, k))?;
        let top_weights = if k > 0 {
            weights.contiguous()?.gather(&top_keys, 3)?
        } else {
            Tensor::zeros((b, h, t_q, 0), weights.dtype(), device)?
        };
        let entropy = Tensor::from_vec(entropy, (b, h, t_q), &Device::Cpu)?.to_dtype(weights.dtype())?;
        let tile = match &requested.tile {
            Some(WeightTile { queries, keys }) => {
                let rows = weights.narrow(2, queries.start, queries.len())?;
                Some(rows.narrow(3, keys.start, keys.len())?.contiguous()?)
            }
            None => None,
        };
        Ok(Self {
            top_keys,
            top_weights,
            entropy: entropy.to_device(device)?,
            key_weight_sums: weights.sum(2)?,
            weights: tile,
        })
    }
}
