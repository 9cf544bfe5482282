//! The fused kernel of the CPU, as one of Candle's custom operations.

use std::ops::Range;
use std::sync::Mutex;

use candle_core::{CpuStorage, CustomOp3, DType, Error, Layout, Result, Shape, Storage, Tensor, WithDType, bail};

use super::OutputOrder;
use super::rows::RowRanges;
use super::validate::{self, Call};
use crate::executor::executor;
use crate::rowwise::with_contiguous_rows;
use crate::size::fits_in_memory;
use candle_attention_kernels::flash::{self, Alibi, Dims, KvRows, Problem, ScoreOptions, Strided};
use candle_attention_kernels::{Element, Tier};

/// Context (B, H, T_q, D_v) in the call's order.
pub(super) fn attend(call: &Call, tier: Tier) -> Result<Tensor> {
    attend_into(call, tier, None)
}

/// The context, and the log-sum-exp (B, H, T_q) of each query.
pub(super) fn attend_with_lse(call: &Call, tier: Tier) -> Result<(Tensor, Tensor)> {
    let validate::Dims { b, h, t_q, .. } = call.dims;
    let mut lse = Vec::new();
    if !fits_in_memory(&[b, h, t_q]) || lse.try_reserve_exact(b * h * t_q).is_err() {
        bail!("[{}] a log-sum-exp of {:?} does not fit in memory", call.op, [b, h, t_q])
    }
    let context = attend_into(call, tier, Some(&mut lse))?;
    Ok((context, Tensor::from_vec(lse, (b, h, t_q), call.q.device())?))
}

fn attend_into(call: &Call, tier: Tier, lse: Option<&mut Vec<f32>>) -> Result<Tensor> {
    let rows = RowRanges::new(call)?;
    let dims = call.score_dims();
    let device = call.q.device();
    let floats = |tensor: &Option<Tensor>| -> Result<Option<Vec<f32>>> {
        tensor.as_ref().map(|tensor| tensor.to_dtype(DType::F32)?.to_vec1()).transpose()
    };
    let op = Flash {
        call,
        tier,
        ranges: rows.keys,
        positions: rows.positions.into_iter().map(|position| position as f32).collect(),
        slopes: floats(&call.options.alibi_slopes)?,
        sinks: floats(&call.options.sinks)?,
        bias: call.mask.bias_tensor(dims, DType::F32, device)?,
        keep: call.mask.explicit_keep(dims, device)?,
        lse: Mutex::new(lse),
    };
    let (k, v) = (with_contiguous_rows(&call.k)?, with_contiguous_rows(&call.v)?);
    let context = with_contiguous_rows(&call.q)?.apply_op3_no_bwd(&k, &v, &op)?;
    match call.output_order {
        OutputOrder::Bhtd => Ok(context),
        OutputOrder::Bthd => context.transpose(1, 2),
    }
}

struct Flash<'a> {
    call: &'a Call<'a>,
    tier: Tier,
    /// (B, T_q).
    ranges: Vec<Range<usize>>,
    /// (B, T_q), where there are slopes.
    positions: Vec<f32>,
    slopes: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    /// Broadcastable to (B, H, T_q, T_kv).
    bias: Option<Tensor>,
    keep: Option<Tensor>,
    /// Candle's operations give one tensor; the second result leaves by here.
    lse: Mutex<Option<&'a mut Vec<f32>>>,
}

impl CustomOp3 for Flash<'_> {
    fn name(&self) -> &'static str {
        "flash-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let qkv = [(q, q_layout), (k, k_layout), (v, v_layout)];
        let context = match q {
            CpuStorage::F32(_) => CpuStorage::F32(self.run(qkv)?),
            CpuStorage::BF16(_) => CpuStorage::BF16(self.run(qkv)?),
            CpuStorage::F16(_) => CpuStorage::F16(self.run(qkv)?),
            _ => bail!("[{}] the fused CPU kernel takes F32, BF16 or F16", self.call.op),
        };
        let validate::Dims { b, h, t_q, d_v, .. } = self.call.dims;
        let shape = match self.call.output_order {
            OutputOrder::Bhtd => (b, h, t_q, d_v),
            OutputOrder::Bthd => (b, t_q, h, d_v),
        };
        Ok((context, shape.into()))
    }
}

impl Flash<'_> {
    fn run<E: Element + WithDType>(&self, [q, k, v]: [(&CpuStorage, &Layout); 3]) -> Result<Vec<E>> {
        let validate::Dims { b, h, t_q, t_kv, d, d_v } = self.call.dims;
        let h_kv = self.call.k.dim(1)?;
        let mut lse = self.lse.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let [bias, keep] = [&self.bias, &self.keep].map(|tensor| tensor.as_ref().map(Tensor::storage_and_layout));
        let bias = bias.as_ref().map(|(storage, layout)| self.view(storage, layout)).transpose()?;
        let keep = keep.as_ref().map(|(storage, layout)| self.view(storage, layout)).transpose()?;
        let scales = self.call.scales.map(|scales| scales.each_ref().map(Tensor::storage_and_layout));
        let [k, v] = match &scales {
            None => [KvRows::Float(strided(k.0.as_slice()?, k.1)), KvRows::Float(strided(v.0.as_slice()?, v.1))],
            Some([of_k, of_v]) => [
                KvRows::Q8 { codes: strided(k.0.as_slice()?, k.1), scales: self.view(&of_k.0, of_k.1)? },
                KvRows::Q8 { codes: strided(v.0.as_slice()?, v.1), scales: self.view(&of_v.0, of_v.1)? },
            ],
        };
        let problem = Problem {
            dims: Dims { b, h, h_kv, t_q, t_kv, d, d_v },
            q: strided(q.0.as_slice()?, q.1),
            k,
            v,
            ranges: &self.ranges,
            scores: ScoreOptions {
                scale: self.call.scale(),
                softcap: self.call.options.softcap.map(|softcap| softcap as f32),
                alibi: self.slopes.as_ref().map(|slopes| Alibi { slopes, positions: &self.positions }),
                bias,
                keep,
                sinks: self.sinks.as_deref(),
            },
            output_order: self.call.output_order,
            executor: executor(),
        };
        flash::attend_vec(&problem, self.tier, lse.as_deref_mut())
            .map_err(|error| Error::msg(format!("[{}] {error}", self.call.op)))
    }

    fn view<'s, T: WithDType, const N: usize>(
        &self,
        storage: &'s Storage,
        layout: &Layout,
    ) -> Result<Strided<'s, T, N>> {
        match storage {
            Storage::Cpu(storage) => Ok(strided(storage.as_slice()?, layout)),
            _ => bail!("[{}] a tensor of the call is not on the CPU, where its queries are", self.call.op),
        }
    }
}

/// A view of the first N dimensions, in which a dimension of 1 in the layout stands for all entries.
fn strided<'a, T, const N: usize>(data: &'a [T], layout: &Layout) -> Strided<'a, T, N> {
    let stride = |n: usize| if layout.dims()[n] > 1 { layout.stride()[n] } else { 0 };
    // A view of nothing may begin anywhere.
    Strided { data: &data[layout.start_offset().min(data.len())..], strides: std::array::from_fn(stride) }
}
