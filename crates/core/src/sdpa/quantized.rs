//! Attention to keys and values of 8 bits, as a cache keeps them.

use candle_core::{Device, Result, Tensor};

use super::plan::{Choice, Outputs, choose};
use super::validate::Call;
use super::{Attended, Beside, Plan, SdpaOptions, cpu};
use crate::mask::AttentionMask;
use candle_attention_kernels::Tier;

/// Keys and values whose numbers are `(code - 128) · scale`.
pub(crate) struct QuantizedKv {
    /// u8 codes of keys (B, H_kv, T_kv, D).
    pub k: Tensor,
    /// u8 codes of values (B, H_kv, T_kv, D_v).
    pub v: Tensor,
    /// The f32 scales of keys and of values, (B, H_kv, T_kv, 1).
    pub scales: [Tensor; 2],
}

/// A call whose keys and values a kernel reads as they are.
pub(crate) struct QuantizedCall<'a> {
    call: Call<'a>,
    tier: Tier,
}

impl<'a> QuantizedCall<'a> {
    /// `None` where no kernel does, and they have to become floats.
    ///
    /// # Errors
    /// As [`scaled_dot_product_attention`](super::scaled_dot_product_attention).
    pub fn new(
        q: &Tensor,
        kv: &'a QuantizedKv,
        mask: &'a AttentionMask,
        options: &'a SdpaOptions,
    ) -> Result<Option<Self>> {
        if !matches!(q.device(), Device::Cpu) {
            return Ok(None);
        }
        let call = Call::quantized("scaled_dot_product_attention", q, kv, mask, options)?;
        Ok(match choose(&call, Outputs::Context)? {
            Choice::Cpu(tier) => Some(Self { call, tier }),
            _ => None,
        })
    }

    /// The context (B, H, T_q, D_v), and statistics of the weights where they are wanted. There are no weights.
    pub fn attend(&self, beside: Beside) -> Result<Attended> {
        match beside {
            Beside::Statistics(wanted) => {
                wanted.check(&self.call)?;
                cpu::attend_with_statistics(&self.call, self.tier, wanted).map(Attended::with_statistics)
            }
            _ => cpu::attend(&self.call, self.tier).map(Attended::context),
        }
    }

    pub fn plan(&self) -> Plan {
        Choice::Cpu(self.tier).plan()
    }
}
