//! A case through the fused kernel on every tier, held against the oracle.

use std::io::Write;

use candle_attention::OutputOrder;
use candle_attention::cpu::Tier;
use candle_core::{DType, Device, Result, Tensor};

pub use crate::call::Call;
use crate::call::{Expected, Outcome};
pub use crate::common::bits;
use crate::oracle::Case;

pub const CPU: Device = Device::Cpu;

/// The context alone, that in the other order of memory, and the log-sum-exp beside it, on every tier.
pub fn run(case: &Case, dtype: DType) -> Result<Vec<(Tier, [Tensor; 3])>> {
    let call = Call::fused(case, dtype)?;
    let run = |tier: Tier| {
        let call = call.on_tier(tier);
        let (sequence_first, lse) = call.in_order(OutputOrder::Bthd).with_lse()?;
        Ok((tier, [call.context()?, sequence_first, lse]))
    };
    Tier::available().into_iter().map(run).collect()
}

pub fn check(case: &Case, dtype: DType) -> Outcome {
    let expected = Expected::fused(case, dtype);
    for (tier, [heads_first, sequence_first, lse]) in run(case, dtype).map_err(|error| error.to_string())? {
        expected
            .context("context", &heads_first)
            .and_then(|()| expected.lse("lse", &lse))
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
