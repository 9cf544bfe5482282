//! The fused kernel of the CPU, as Candle's custom operations.

mod backward;

use std::ops::Range;
use std::sync::OnceLock;

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, Error, Result, Shape, Tensor, WithDType};

use super::rows::RowRanges;
use super::validate::{self, Call};
use super::{Attended, AttentionStatistics, OutputOrder, Outputs, plan, reference};
use backward::FlattenedFlash;
use candle_attention_kernels::flash::{
    self, Alibi, Dims, DistanceBias, Dropout, DropoutMask, KvRows, Problem, ScoreOptions, SoftmaxStats, Strided,
};
use candle_attention_kernels::{Element, Tier};
use candle_attention_modules::base::rowwise::{
    Op3, Operand, Read, Ternary, read, strided, with_contiguous_rows, with_float,
};
use candle_attention_modules::base::{check_memory, executor};

/// What is wanted of a call. No input is tracked for gradients where it is statistics.
pub(super) fn attend(call: &Call, tier: Tier, outputs: Outputs) -> Result<Attended> {
    let (validate::Dims { b, h, t_q, .. }, wants_lse) = (call.dims, outputs == Outputs::LogSumExp);
    if wants_lse {
        check_memory(call.op, format_args!("a log-sum-exp of {:?}", [b, h, t_q]), &[b, h, t_q])?;
    }
    let [q, k, v] = [with_contiguous_rows(&call.q)?, with_contiguous_rows(&call.k)?, with_contiguous_rows(&call.v)?];
    let score_tensors = ScoreTensors::new(call)?;
    let is_tracked = plan::tracks_gradients(call);
    if is_tracked && call.dims.is_empty() {
        // Candle has no views of nothing to take gradients apart with.
        return Ok(Attended { weights: None, ..reference::attend(call)? });
    }
    let lse = wants_lse.then(OnceLock::new);
    let observed = match outputs {
        Outputs::Statistics(wanted) => Some(Observed { options: wanted.as_kernels(), found: OnceLock::new() }),
        _ => None,
    };
    let flash = Flash { lse, observed, ..Flash::new(call, tier, &score_tensors, is_tracked)? };
    let attended = if !is_tracked {
        let flash = Op3(flash);
        let context = q.apply_op3_no_bwd(&k, &v, &flash)?;
        let Op3(flash) = flash;
        let lse = flash.lse.and_then(OnceLock::into_inner);
        let found = flash.observed.and_then(|observed| observed.found.into_inner());
        let statistics = match (found, outputs) {
            (Some(found), Outputs::Statistics(wanted)) => Some(AttentionStatistics::of_kernel(found, call, wanted)?),
            _ => None,
        };
        let lse = lse.map(|lse| Tensor::from_vec(lse, (b, h, t_q), call.q.device())).transpose()?;
        Attended { lse, statistics, ..Attended::context(context) }
    } else if wants_lse || score_tensors.are_tracked() {
        let (context, lse) = FlattenedFlash::attend([&q, &k, &v], &score_tensors, flash)?;
        Attended { lse, ..Attended::context(context) }
    } else {
        Attended::context(q.apply_op3(&k, &v, Op3(flash))?)
    };
    // The context as it lies in memory, as (B, H, T_q, D_v).
    match call.output_order {
        OutputOrder::Bhtd => Ok(attended),
        OutputOrder::Bthd => Ok(Attended { context: attended.context.transpose(1, 2)?, ..attended }),
    }
}

/// The weights that a call drops.
enum DrawnDropout {
    /// By the seed of Philox, which is drawn unless it was given.
    Philox(u64),
    /// By PyTorch's generator: a bit for each weight.
    Kept(Vec<u8>),
}

impl DrawnDropout {
    /// With the probability, if there is to be dropout.
    fn draw(call: &Call) -> Result<Option<(Self, f64)>> {
        let (p, options) = (call.options.dropout, call.options);
        if !options.train || p == 0.0 {
            return Ok(None);
        }
        let mask = match (&options.dropout_seed, options.dropout_philox_seed) {
            (Some(seed), _) => {
                let validate::Dims { b, h, t_q, t_kv, .. } = call.dims;
                let keep = seed.dropout_keep((b, h, t_q, t_kv), p)?.flatten_all()?.to_vec1::<u8>()?;
                let byte = |bits: &[u8]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | bit);
                Self::Kept(keep.chunks(8).map(byte).collect())
            }
            (None, Some(seed)) => Self::Philox(seed),
            (None, None) => {
                // 24 bits of each number, from the generator of the device.
                let numbers = Tensor::rand(0f32, 1f32, 3, call.q.device())?.to_vec1::<f32>()?;
                let bits = |x: f32| (f64::from(x) * f64::from(1 << 24)) as u64;
                Self::Philox(numbers.into_iter().fold(0u64, |seed, x| seed.rotate_left(24) ^ bits(x)))
            }
        };
        Ok(Some((mask, p)))
    }

    fn as_kernels(&self) -> DropoutMask<'_> {
        match self {
            Self::Philox(seed) => DropoutMask::Philox(*seed),
            Self::Kept(bits) => DropoutMask::Kept(bits),
        }
    }
}

/// What a call reads besides q, k and v, in f32. Gradients flow into it.
struct ScoreTensors {
    /// Broadcastable to (B, H, T_q, T_kv).
    bias: Option<Tensor>,
    /// Rows of (B or 1, H).
    distances: Option<Tensor>,
    /// (H,).
    slopes: Option<Tensor>,
    sinks: Option<Tensor>,
}

impl ScoreTensors {
    fn new(call: &Call) -> Result<Self> {
        let floats = |tensor: &Option<Tensor>| tensor.as_ref().map(|tensor| tensor.to_dtype(DType::F32)).transpose();
        let bias = call.mask.bias_tensor(call.score_dims(), DType::F32, call.q.device())?;
        let narrowed = |bias: Tensor| {
            // An entry that a view repeats is one entry, whose gradient is the sum.
            let repeats = |dim: &usize| bias.dims()[*dim] > 1 && bias.stride()[*dim] == 0;
            (0..4).filter(repeats).try_fold(bias.clone(), |bias, dim| bias.narrow(dim, 0, 1))
        };
        Ok(Self {
            bias: bias.map(narrowed).transpose()?,
            distances: match floats(&call.options.distance_bias)? {
                Some(biases) if biases.rank() == 2 => Some(biases.unsqueeze(0)?.contiguous()?),
                biases => biases.map(|biases| biases.contiguous()).transpose()?,
            },
            slopes: floats(&call.options.alibi_slopes)?,
            sinks: floats(&call.options.sinks)?,
        })
    }

    /// Those that are tracked for gradients, in the order of the fields.
    fn tracked(&self) -> impl Iterator<Item = &Tensor> {
        [&self.bias, &self.distances, &self.slopes, &self.sinks]
            .into_iter()
            .flatten()
            .filter(|tensor| tensor.track_op())
    }

    fn are_tracked(&self) -> bool {
        self.tracked().next().is_some()
    }
}

/// A call without q, k and v.
struct Flash {
    op: &'static str,
    tier: Tier,
    dims: Dims,
    scale: f64,
    softcap: Option<f32>,
    /// (B, T_q).
    ranges: Vec<Range<usize>>,
    /// (B, T_q), where there are slopes.
    positions: Vec<f32>,
    slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    dropout: Option<(DrawnDropout, f64)>,
    /// (B, T_q), where there are biases by distance.
    origins: Vec<i64>,
    distances: Option<Tensor>,
    /// Broadcastable to (B, H, T_q, T_kv).
    bias: Option<Tensor>,
    keep: Option<Tensor>,
    /// Of keys and values of 8 bits.
    scales: Option<[Tensor; 2]>,
    output_order: OutputOrder,
    /// What the forward pass leaves for the backward pass, if there is to be one.
    stats: Option<OnceLock<Vec<SoftmaxStats>>>,
    /// Candle's operations give one tensor; the second result leaves by here, if it is wanted.
    lse: Option<OnceLock<Vec<f32>>>,
    observed: Option<Observed>,
}

/// Statistics that are wanted, and leave as the log-sum-exp does.
struct Observed {
    options: flash::StatisticsOptions,
    found: OnceLock<flash::Statistics>,
}

impl Flash {
    fn new(call: &Call, tier: Tier, score_tensors: &ScoreTensors, is_tracked: bool) -> Result<Self> {
        let validate::Dims { b, h, t_q, t_kv, d, d_v } = call.dims;
        let rows = RowRanges::new(call)?;
        let numbers = |tensor: &Option<Tensor>| tensor.as_ref().map(Tensor::to_vec1).transpose();
        Ok(Self {
            op: call.op,
            tier,
            dims: Dims { b, h, h_kv: call.k.dim(1)?, t_q, t_kv, d, d_v },
            scale: call.scale(),
            softcap: call.options.softcap.map(|softcap| softcap as f32),
            ranges: rows.keys,
            positions: rows.positions.into_iter().map(|position| position as f32).collect(),
            slopes: numbers(&score_tensors.slopes)?,
            sinks: numbers(&score_tensors.sinks)?,
            dropout: DrawnDropout::draw(call)?,
            origins: rows.origins,
            distances: score_tensors.distances.as_ref().map(Tensor::detach),
            bias: score_tensors.bias.as_ref().map(Tensor::detach),
            keep: call.mask.explicit_keep(call.score_dims(), call.q.device())?,
            scales: call.scales.cloned(),
            output_order: call.output_order,
            stats: is_tracked.then(OnceLock::new),
            lse: None,
            observed: None,
        })
    }

    /// The context as it lies in memory.
    fn context_shape(&self) -> Shape {
        let Dims { b, h, t_q, d_v, .. } = self.dims;
        match self.output_order {
            OutputOrder::Bhtd => (b, h, t_q, d_v).into(),
            OutputOrder::Bthd => (b, t_q, h, d_v).into(),
        }
    }

    fn error(&self, error: impl std::fmt::Display) -> Error {
        Error::msg(format!("[{}] {error}", self.op))
    }

    /// Gives the call to a function.
    fn with_problem<'a, E: WithDType, R>(
        &'a self,
        q: Strided<'a, E, 3>,
        [k, v]: [KvRows<'a, E>; 2],
        run: impl FnOnce(&Problem<E>) -> Result<R>,
    ) -> Result<R> {
        let [distances, bias, keep] = [&self.distances, &self.bias, &self.keep].map(|tensor| tensor.as_ref().map(read));
        let distance_bias = match &distances {
            Some(biases) => {
                Some(DistanceBias { rows: biases.strided()?, len: biases.layout.dims()[2], origins: &self.origins })
            }
            None => None,
        };
        let scores = ScoreOptions {
            scale: self.scale,
            softcap: self.softcap,
            alibi: self.slopes.as_ref().map(|slopes| Alibi { slopes, positions: &self.positions }),
            distance_bias,
            bias: bias.as_ref().map(Read::strided).transpose()?,
            keep: keep.as_ref().map(Read::strided).transpose()?,
            sinks: self.sinks.as_deref(),
            dropout: self.dropout.as_ref().map(|(mask, p)| Dropout { mask: mask.as_kernels(), p: *p }),
        };
        run(&Problem {
            dims: self.dims,
            q,
            k,
            v,
            ranges: &self.ranges,
            scores,
            output_order: self.output_order,
            executor: executor(),
        })
    }

    /// The context, and the other results to where they are wanted.
    fn attend<E: Element + WithDType>(&self, q: Strided<E, 3>, kv: [KvRows<E>; 2]) -> Result<Vec<E>> {
        if let Some(Observed { options, found }) = &self.observed {
            return self.with_problem(q, kv, |problem| {
                let attended = flash::attend_with_statistics(problem, self.tier, options);
                let (context, statistics) = attended.map_err(|error| self.error(error))?;
                let _ = found.set(statistics);
                Ok(context)
            });
        }
        let (mut lse, mut stats) = (Vec::new(), Vec::new());
        let context = self.with_problem(q, kv, |problem| {
            let (lse, stats) = (self.lse.is_some().then_some(&mut lse), self.stats.is_some().then_some(&mut stats));
            flash::attend_vec(problem, self.tier, lse, stats).map_err(|error| self.error(error))
        })?;
        // An operation that runs again, as no one does, gives the same.
        let _ = self.lse.as_ref().map(|to| to.set(lse));
        let _ = self.stats.as_ref().map(|to| to.set(stats));
        Ok(context)
    }

    fn attend_to<E: Element + WithDType>(&self, [q, k, v]: [Operand; 3]) -> Result<Vec<E>> {
        let scales = self.scales.as_ref().map(|scales| scales.each_ref().map(read));
        let kv = match &scales {
            None => [KvRows::Float(strided(k.0.as_slice()?, k.1)), KvRows::Float(strided(v.0.as_slice()?, v.1))],
            Some([of_k, of_v]) => [
                KvRows::Q8 { codes: strided(k.0.as_slice()?, k.1), scales: of_k.strided()? },
                KvRows::Q8 { codes: strided(v.0.as_slice()?, v.1), scales: of_v.strided()? },
            ],
        };
        self.attend(strided(q.0.as_slice()?, q.1), kv)
    }
}

impl Ternary for Flash {
    const NAME: &'static str = "flash-attention";

    fn forward(&self, operands: [Operand; 3]) -> Result<(CpuStorage, Shape)> {
        let dtype = operands[0].0.dtype();
        let context = with_float!(self.op, dtype, |E| self.attend_to::<E>(operands).map(E::to_cpu_storage_owned));
        Ok((context?, self.context_shape()))
    }

    fn backward(&self, operands: [&Tensor; 3], context: &Tensor, gradient: &Tensor) -> Result<[Option<Tensor>; 3]> {
        self.operand_gradients(operands, context, gradient)
    }
}
