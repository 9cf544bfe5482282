//! Numbers at the ends of their range.

use candle_attention::AttentionMask;
use candle_attention::cpu::Tier;
use candle_core::{DType, Result, Tensor};

use crate::array::{Array, round};
use crate::common::values;
use crate::flash::fused::{CPU, Call, check};
use crate::oracle::{Case, Dims, Mask, Part};
use crate::recipe::{Chosen, DTYPES, Kind, Layout, Recipe};

const DIMS: Dims = Dims { b: 1, h: 2, h_kv: 1, t_q: 19, t_kv: 67, d: 16, d_v: 8 };

fn draws() -> Vec<Recipe> {
    let masks: [&[Kind]; 4] = [&[], &[Kind::Causal], &[Kind::ValidLens], &[Kind::Band]];
    masks.into_iter().flat_map(|kinds| DTYPES.map(|dtype| Recipe::of_kernel(DIMS, kinds.to_vec(), dtype))).collect()
}

fn set(array: &mut Array, dtype: DType, value: impl Fn(f64) -> f64) {
    array.data.iter_mut().for_each(|x| *x = round(value(*x), dtype));
}

#[track_caller]
fn assert_agrees(case: &Case, dtype: DType, what: &str) {
    check(case, dtype).unwrap_or_else(|difference| panic!("{what} in {dtype:?}: {difference}"));
}

/// Weights of a row sum to one however large its scores are, so that values of one give one.
#[track_caller]
fn assert_sums_to_one(case: &Case, dtype: DType, what: &str) {
    let mut ones = case.clone();
    set(&mut ones.v, dtype, |_| 1.0);
    let call = Call::fused(&ones, dtype).expect("tensors");
    let expected = ones.attend().context;
    for tier in Tier::available() {
        let context = values(&call.on_tier(tier).context().expect("the call runs"));
        let most = if dtype == DType::BF16 { 2f64.powi(-7) } else { 1e-3 };
        for (n, (got, expected)) in context.into_iter().zip(&expected).enumerate() {
            assert!(
                (got - expected).abs() <= most,
                "{what} in {dtype:?} on {tier}: entry {n} is {got}, not {expected}"
            );
        }
    }
}

#[test]
fn scores_of_ten_thousand_do_not_overflow() {
    for draw in draws() {
        for (size, scale) in [(25.0, 1.0), (25.0, -1.0), (1.0, 625.0), (0.01, -6e6)] {
            for bias in [0.0, 1e4, -1e4] {
                let mut case = draw.case();
                case.options.scale = Some(scale);
                set(&mut case.q, draw.dtype, |x| x.signum() * size);
                set(&mut case.k, draw.dtype, |x| x.signum() * size);
                let biases = Array::new(&[DIMS.t_kv]).filled(|| bias);
                case.masks.push(Mask::of(Part::Bias(biases)));
                let what = format!("size {size}, scale {scale}, bias {bias}");
                assert_agrees(&case, draw.dtype, &what);
                assert_sums_to_one(&case, draw.dtype, &what);
            }
        }
    }
}

/// Products of up to 1e36 under a scale that brings them back to a few units, and the reverse.
#[test]
fn the_scale_meets_products_of_any_size() {
    for draw in draws().iter().filter(|draw| draw.dtype != DType::F16) {
        for (q, k, scale) in [
            (1e15, 1e15, 1e-30),
            (1e30, 1.0, 1e-30),
            (1.0, 1e30, -1e-30),
            (1e18, 1e17, 1e-35),
            (1e-15, 1e-15, 1e30),
            (1e-30, 1.0, 1e30),
            (1.0, 1e-30, 1e30),
            (1e15, 1e-15, 1.0),
        ] {
            let mut case = draw.case();
            case.options.scale = Some(scale);
            set(&mut case.q, draw.dtype, |x| x * q);
            set(&mut case.k, draw.dtype, |x| x * k);
            let what = format!("q around {q:e}, k around {k:e}, scale {scale:e}");
            assert_agrees(&case, draw.dtype, &what);
            assert_sums_to_one(&case, draw.dtype, &what);
        }
    }
}

/// Scores that rise or fall by hundreds from one key to the next: the running maximum moves in every tile, or never.
#[test]
fn the_running_maximum_may_move_at_every_key() {
    for mut draw in draws() {
        draw.scale = Some(1.0);
        for slope in [30.0, -30.0, 0.3, -0.3] {
            let mut case = draw.case();
            let mut j = 0.0;
            let ramp = Array::new(&[DIMS.t_kv]).filled(|| {
                j += 1.0;
                slope * j
            });
            case.masks.push(Mask::of(Part::Bias(ramp)));
            assert_agrees(&case, draw.dtype, &format!("a slope of {slope}"));
        }
    }
}

/// Values up to the largest number, whose weighted mean is a number too.
#[test]
fn large_values_do_not_overflow() {
    for draw in draws() {
        let most = match draw.dtype {
            DType::F16 => 30_000.0,
            _ => 1e36,
        };
        let mut case = draw.case();
        set(&mut case.v, draw.dtype, |x| x * most);
        assert_agrees(&case, draw.dtype, "large values");
    }
}

/// f32 and f16 keep subnormal values; bf16's dot products may take them for zero, and no more than that.
#[test]
fn subnormal_values_are_kept() -> Result<()> {
    for (dtype, smallest) in
        [(DType::F32, 2f64.powi(-149)), (DType::F16, 2f64.powi(-24)), (DType::BF16, 2f64.powi(-133))]
    {
        for t_kv in [1, 9, 40] {
            let (q, k) = (Tensor::ones((1, 1, 5, 8), dtype, &CPU)?, Tensor::ones((1, 1, t_kv, 8), dtype, &CPU)?);
            let value = 100.0 * smallest;
            let v = Tensor::from_vec(vec![value; t_kv * 20], (1, 1, t_kv, 20), &CPU)?.to_dtype(dtype)?;
            for tier in Tier::available() {
                let got = values(&Call::plain(&q, &k, &v, &AttentionMask::none()).on_tier(tier).context()?);
                for x in got {
                    let near = (x - value).abs() <= smallest * (t_kv as f64 + 1.0);
                    let flushed = dtype == DType::BF16 && x == 0.0;
                    assert!(near || flushed, "{tier}: a mean of {value:e} is {x:e} in {dtype:?} over {t_kv} keys");
                }
            }
        }
    }
    Ok(())
}

/// Subnormal keys, brought back by the scale, count in f32 and f16; bf16's dot products may take them for zero.
#[test]
fn subnormal_keys_are_kept() -> Result<()> {
    for (dtype, key, scale) in
        [(DType::F32, 2f64.powi(-128), 2f64.powi(125)), (DType::F16, 2f64.powi(-20), 2f64.powi(17))]
    {
        let q = (Tensor::ones((1, 1, 3, 1), dtype, &CPU)? * 4.0)?;
        let k = Tensor::new(&[[[[key], [0.0], [-key]]]], &CPU)?.to_dtype(dtype)?;
        let v = Tensor::new(&[[[[1f32], [0.], [0.]]]], &CPU)?.to_dtype(dtype)?;
        let expected = 0.5f64.exp() / (0.5f64.exp() + 1.0 + (-0.5f64).exp());
        for tier in Tier::available() {
            let call = Call::plain(&q, &k, &v, &AttentionMask::none());
            let got = values(&call.on_tier(tier).with(|options| options.with_scale(scale)).context()?);
            for x in got {
                let most = if dtype == DType::F16 { 4e-4 } else { 1e-6 };
                assert!((x - expected).abs() <= most, "{tier}: {x} of {expected} in {dtype:?}");
            }
        }
    }
    Ok(())
}

/// A sink of -inf is no sink; one of 1e4 takes all; one of +inf or NaN leaves what the reference path leaves.
#[test]
fn sinks_of_any_size() -> Result<()> {
    let mut draw = Recipe::of_kernel(DIMS, vec![Kind::Causal], DType::F32);
    draw.chosen = Chosen { sinks: true, ..Chosen::default() };
    for dtype in DTYPES {
        draw.dtype = dtype;
        for sinks in [[f64::NEG_INFINITY, 0.0], [1e4, -1e4], [f64::NEG_INFINITY; 2]] {
            let mut case = draw.case();
            case.options.sinks = Some(sinks.to_vec());
            assert_agrees(&case, dtype, &format!("sinks {sinks:?}"));
        }
        for sinks in [[f64::INFINITY, 0.0], [0.0, f64::NAN]] {
            let mut case = draw.case();
            case.options.sinks = Some(sinks.to_vec());
            let call = Call::fused(&case, dtype)?;
            let (context, lse) = call.on_reference().with_lse()?;
            let nan = |x: &Tensor| values(x).into_iter().map(f64::is_nan).collect::<Vec<_>>();
            for tier in Tier::available() {
                let (got, got_lse) = call.on_tier(tier).with_lse()?;
                let same = nan(&got) == nan(&context) && nan(&got_lse) == nan(&lse);
                assert!(same, "{tier}: NaN elsewhere than on the reference path with sinks {sinks:?} in {dtype:?}");
            }
        }
    }
    Ok(())
}

/// Caps far below and far above the scores.
#[test]
fn caps_of_any_size() {
    for mut draw in draws() {
        draw.layouts = [Layout::Packed, Layout::HeadsTransposed, Layout::CacheHead];
        for (softcap, scale) in [(1e-3, 1.0), (30.0, 10.0), (50.0, 1e-3), (1e4, 1.0), (1e-20, 1e10), (1.0, 1e30)] {
            let mut case = draw.case();
            (case.options.softcap, case.options.scale) = (Some(softcap), Some(scale));
            assert_agrees(&case, draw.dtype, &format!("cap {softcap}, scale {scale}"));
        }
    }
}

/// `torch.finfo(dtype).min`, which Hugging Face's masks hold, is a number: a row of nothing else gets the mean, as in PyTorch and on
/// the reference path, and the larger of two such numbers wins.
#[test]
fn the_least_numbers_of_a_bias_compare_as_numbers() -> Result<()> {
    for (dtype, t_q) in DTYPES.into_iter().flat_map(|dtype| [(dtype, 1), (dtype, 30)]) {
        let q = Tensor::ones((1, 1, t_q, 8), dtype, &CPU)?;
        let k = Tensor::ones((1, 1, 3, 8), dtype, &CPU)?;
        let v = Tensor::new(&[[[[1f32], [2.], [6.]]]], &CPU)?.to_dtype(dtype)?;
        for (bias, expected, most) in [
            ([f32::MIN; 3], 3.0, f32::MIN),
            ([-3.389_531_4e38; 3], 3.0, -3.389_531_4e38),
            ([-3.4e38, -3.0e38, -3.4e38], 2.0, -3.0e38),
            ([0.0, 3e38, 0.0], 2.0, 3e38),
        ] {
            let mask = AttentionMask::none().with_bias(&Tensor::new(&[[[bias]]], &CPU)?);
            let call = Call::plain(&q, &k, &v, &mask);
            let tiers = Tier::available().into_iter().map(|tier| (tier.to_string(), call.on_tier(tier).with_lse()));
            for (path, found) in tiers.chain([("reference".into(), call.on_reference().with_lse())]) {
                let (context, lse) = found?;
                let context_agrees = values(&context).iter().all(|x| (x - expected).abs() < 0.02);
                let lse_agrees = values(&lse).iter().all(|x| (x / f64::from(most) - 1.0).abs() < 1e-6);
                assert!(context_agrees && lse_agrees, "{path}, {dtype:?}, bias {bias:?}: {context} {lse}");
            }
        }
    }
    Ok(())
}
