//! Keys cut at random, each part attended alone by the kernel, merge to what all keys together give.

use candle_attention::cpu::Tier;
use candle_attention::{AttentionMask, merge_attention};
use candle_core::{DType, Result, Tensor};
use proptest::prelude::*;

use crate::check::{Bounds, compare, compare_lse};
use crate::draw::{Draw, draws};
use crate::fused::{CPU, Call};
use crate::oracle::{Case, Dims};
use crate::recipe::for_all;

/// The keys from `start` to `end` as a call of their own: what is hidden and added is written out, since positions count
/// in the whole.
fn part(whole: &Call, case: &Case, [start, end]: [usize; 2], with_sinks: bool) -> Result<Call> {
    let Dims { b, h, t_q, .. } = case.dims;
    let cut = |tensor: &Tensor| tensor.narrow(2, start, end - start);
    let rows = (0..b).flat_map(|b| (0..h).flat_map(move |h| (0..t_q).map(move |i| [b, h, i])));
    let entries: Vec<_> = rows.flat_map(|[b, h, i]| (start..end).map(move |j| [b, h, i, j])).collect();
    let shape = (b, h, t_q, end - start);
    let keep: Vec<_> = entries.iter().map(|&index| u8::from(case.sees(index))).collect();
    let bias: Vec<_> = entries.iter().map(|&index| case.bias(index) as f32).collect();
    let mask = AttentionMask::none()
        .with_keep(&Tensor::from_vec(keep, shape, &CPU)?)
        .with_bias(&Tensor::from_vec(bias, shape, &CPU)?);
    let call = Call::plain(&whole.q, &cut(&whole.k)?, &cut(&whole.v)?, &mask);
    Ok(call.with(|mut options| {
        if let Some(scale) = case.options.scale {
            options = options.with_scale(scale);
        }
        if let Some(softcap) = case.options.softcap {
            options = options.with_softcap(softcap);
        }
        match &case.options.sinks {
            Some(sinks) if with_sinks => {
                let sinks: Vec<_> = sinks.iter().map(|&sink| sink as f32).collect();
                options.with_sinks(&Tensor::new(sinks, &CPU).expect("sinks are a tensor"))
            }
            _ => options,
        }
    }))
}

fn merged(draw: &Draw, case: &Case, cuts: &[usize], tier: Tier) -> Result<(Tensor, Tensor)> {
    let whole = Call::new(case, draw.dtype())?;
    let bounds = [&[0], cuts, &[case.dims.t_kv]].concat();
    let parts = bounds.windows(2).enumerate();
    let parts = parts.map(|(n, ends)| part(&whole, case, [ends[0], ends[1]], n == 0)?.on_tier(tier).with_lse());
    merge_attention(&parts.collect::<Result<Vec<_>>>()?)
}

#[test]
fn random_cuts_merge_to_the_whole() {
    let cuts = proptest::collection::vec(0.0..1.0f64, 0..5);
    for_all(200, (draws(), cuts, any::<bool>()), |(draw, cuts, doubled)| {
        let case = draw.case();
        let mut cuts: Vec<_> = cuts.into_iter().map(|cut| (cut * (case.dims.t_kv + 1) as f64) as usize).collect();
        if doubled {
            // The same cut twice leaves an empty part between.
            cuts.extend(cuts.clone());
        }
        cuts.sort_unstable();
        let expected = case.attend();
        let bounds = Bounds::fused(&case, &expected, draw.dtype());
        let Dims { b, h, t_q, d_v, .. } = case.dims;
        for tier in Tier::available() {
            let (context, lse) = merged(&draw, &case, &cuts, tier).map_err(|error| format!("{tier}: {error}"))?;
            compare("context", &context, (&[b, h, t_q, d_v], draw.dtype()), &expected.context, |n| {
                bounds.merged_context(n, &expected.lse)
            })
            .and_then(|()| compare_lse("lse", &lse, &case, &expected, &bounds, draw.dtype()))
            .map_err(|difference| format!("{tier}, cut at {cuts:?}: {difference}"))?;
        }
        Ok(())
    });
}

/// Without a mask a part is a plain call; parts of no keys and of hidden keys take nothing away.
#[test]
fn empty_parts_merge_to_nothing() -> Result<()> {
    for dtype in crate::fused::DTYPES {
        let draw = Draw::plain(Dims { b: 1, h: 2, h_kv: 1, t_q: 5, t_kv: 40, d: 16, d_v: 16 }, vec![], dtype);
        let call = Call::new(&draw.case(), dtype)?;
        for tier in Tier::available() {
            let call = call.on_tier(tier);
            let whole = call.with_lse()?;
            let none = Call { k: call.k.narrow(2, 0, 0)?, v: call.v.narrow(2, 0, 0)?, ..call.clone() }.with_lse()?;
            let hidden = Call { mask: AttentionMask::none().with_valid_lens(vec![0]), ..call.clone() }.with_lse()?;
            for parts in [vec![none.clone(), hidden.clone()], vec![hidden.clone(), none.clone(), hidden.clone()]] {
                let (context, lse) = merge_attention(&parts)?;
                assert!(crate::common::values(&context).iter().all(|&x| x == 0.0), "{tier}");
                assert!(crate::common::values(&lse).iter().all(|&x| x == f64::NEG_INFINITY), "{tier}");
            }
            let (context, lse) = merge_attention(&[none, whole.clone(), hidden])?;
            let most = if dtype == DType::F32 { 1e-6 } else { 0.0 };
            crate::common::assert_close(&context, &whole.0, most, &format!("{tier} {dtype:?}"));
            crate::common::assert_close(&lse, &whole.1, 1e-6, &format!("{tier} {dtype:?}"));
        }
    }
    Ok(())
}
