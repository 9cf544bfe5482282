//! A case through the fused kernel on every tier, held against the oracle.

use std::io::Write;

use candle_attention::cpu::Tier;
use candle_attention::{
    AttentionMask, Backend, OutputOrder, SdpaOptions, scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse,
};
use candle_core::{DType, Device, Result, Tensor};

use crate::check::{Arguments, Bounds, Outcome, compare_context, compare_lse};
use crate::oracle::Case;

pub const CPU: Device = Device::Cpu;

/// The dtypes that the kernel computes in.
pub const DTYPES: [DType; 3] = [DType::F32, DType::BF16, DType::F16];

/// One call of the fused kernel.
#[derive(Clone)]
pub struct Call {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub mask: AttentionMask,
    pub options: SdpaOptions,
}

impl Call {
    pub fn new(case: &Case, dtype: DType) -> Result<Self> {
        let Arguments { q, k, v, mask, options } = Arguments::new(case, dtype, &CPU)?;
        Ok(Self { q, k, v, mask, options }.on(Backend::Fused))
    }

    /// Standard options.
    pub fn plain(q: &Tensor, k: &Tensor, v: &Tensor, mask: &AttentionMask) -> Self {
        let options = SdpaOptions::default().with_backend(Backend::Fused);
        Self { q: q.clone(), k: k.clone(), v: v.clone(), mask: mask.clone(), options }
    }

    fn on(self, backend: Backend) -> Self {
        self.with(|options| options.with_backend(backend))
    }

    pub fn on_reference(&self) -> Self {
        self.clone().on(Backend::Reference)
    }

    pub fn on_tier(&self, tier: Tier) -> Self {
        self.clone().with(|options| options.with_cpu_tier(tier))
    }

    pub fn in_order(&self, order: OutputOrder) -> Self {
        self.clone().with(|options| options.with_output_order(order))
    }

    pub fn with(mut self, change: impl FnOnce(SdpaOptions) -> SdpaOptions) -> Self {
        self.options = change(self.options);
        self
    }

    pub fn context(&self) -> Result<Tensor> {
        scaled_dot_product_attention(&self.q, &self.k, &self.v, &self.mask, &self.options)
    }

    pub fn with_lse(&self) -> Result<(Tensor, Tensor)> {
        scaled_dot_product_attention_with_lse(&self.q, &self.k, &self.v, &self.mask, &self.options)
    }
}

/// The bits of every number, in row-major order; a NaN is a NaN, whatever its sign and payload.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    crate::common::values(tensor)
        .into_iter()
        .map(|x| if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() })
        .collect()
}

/// The context, beside the log-sum-exp and alone and in both orders of memory, on every tier.
pub fn check(case: &Case, dtype: DType) -> Outcome {
    check_on(&Tier::available(), case, dtype)
}

pub fn check_on(tiers: &[Tier], case: &Case, dtype: DType) -> Outcome {
    let expected = case.attend();
    let bounds = Bounds::fused(case, &expected, dtype);
    let call = Call::new(case, dtype).map_err(|error| error.to_string())?;
    for &tier in tiers {
        let call = call.on_tier(tier);
        let run = || -> Result<_> {
            let heads_first = call.context()?;
            let (sequence_first, lse) = call.in_order(OutputOrder::Bthd).with_lse()?;
            Ok((heads_first, sequence_first, lse))
        };
        let (heads_first, sequence_first, lse) = run().map_err(|error| format!("{tier}: {error}"))?;
        compare_context("context", &heads_first, case, &expected, &bounds, dtype)
            .and_then(|()| compare_lse("lse", &lse, case, &expected, &bounds, dtype))
            .and_then(|()| lies_in(&heads_first, OutputOrder::Bhtd))
            .and_then(|()| lies_in(&sequence_first, OutputOrder::Bthd))
            .map_err(|difference| format!("{tier}: {difference}"))?;
        if bits(&heads_first) != bits(&sequence_first) {
            return Err(format!("{tier}: another context beside the log-sum-exp, in the other order"));
        }
    }
    Ok(())
}

fn lies_in(context: &Tensor, order: OutputOrder) -> Outcome {
    let lies = match order {
        OutputOrder::Bhtd => context.is_contiguous(),
        OutputOrder::Bthd => context.transpose(1, 2).is_ok_and(|context| context.is_contiguous()),
    };
    if lies { Ok(()) } else { Err(format!("strides {:?} of {:?} in {order:?}", context.stride(), context.dims())) }
}

/// Skipped tiers show in the output of every run. Not by `eprintln!`, which the test runner keeps to itself where tests
/// pass.
#[test]
fn tiers_that_this_processor_lacks_are_skipped() {
    let available = Tier::available();
    for tier in Tier::ALL {
        assert_eq!(tier.is_available(), available.contains(&tier));
        if !tier.is_available() {
            let _ = writeln!(std::io::stderr(), "skipped: this processor lacks the CPU tier {tier}");
        }
    }
    assert!(available.contains(&Tier::Scalar) && available.is_sorted(), "{available:?}");
}
