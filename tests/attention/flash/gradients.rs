//! Gradients through the fused kernel, on every tier, against those of the reference path in f64.

use candle_attention::cpu::Tier;
use candle_attention::{Backend, SdpaOptions};
use candle_core::{DType, Result, Tensor, Var};

use crate::array::Random;
use crate::call::{Leaf, Outcome};
use crate::common::{bits, values};
use crate::flash::fused::{CPU, Call};
use crate::oracle::{Case, Dims};
use crate::recipe::{Chosen, DTYPES, Kind, Reach, Recipe, for_all, kernel_recipes};

/// A call whose leaves are variables, or some of them, and the factors of its results in the loss.
struct Tracked {
    call: Call,
    leaves: Vec<(Leaf, Var)>,
    /// Of the context, and of the log-sum-exp if it takes part.
    factors: (Vec<f64>, Option<Vec<f64>>),
}

impl Tracked {
    fn new(case: &Case, dtype: DType, seed: u64, is_tracked: impl Fn(Leaf) -> bool) -> Result<Self> {
        let mut leaves = Vec::new();
        let call = Call::with_leaves(case, dtype, &CPU, &mut |which, tensor| {
            if !is_tracked(which) {
                return Ok(tensor);
            }
            let var = Var::from_tensor(&tensor)?;
            leaves.push((which, var.clone()));
            Ok(var.into_inner())
        })?;
        let drops = |options: SdpaOptions| options.with_dropout(0.3, true).with_dropout_philox_seed(seed);
        let call = if seed.is_multiple_of(3) { call.with(drops) } else { call };
        let Dims { b, h, t_q, d_v, .. } = case.dims;
        let mut random = Random::new(seed);
        // Numbers that bf16 holds.
        let mut draw =
            |count: usize| -> Vec<f64> { (0..count).map(|_| random.up_to(64) as f64 / 32.0 - 1.0).collect() };
        let factors = (draw(b * h * t_q * d_v), seed.is_multiple_of(4).then(|| draw(b * h * t_q)));
        Ok(Self { call, leaves, factors })
    }

    fn loss(&self, call: &Call) -> Result<Tensor> {
        let weighted = |tensor: &Tensor, factors: &[f64]| {
            Tensor::from_slice(factors, tensor.shape(), &CPU)?.to_dtype(tensor.dtype())?.mul(tensor)?.sum_all()
        };
        let (of_context, of_lse) = &self.factors;
        let Some(of_lse) = of_lse else { return weighted(&call.context()?, of_context) };
        let (context, lse) = call.with_lse()?;
        let finite = lse.detach().gt(f64::NEG_INFINITY)?.where_cond(&lse, &lse.zeros_like()?)?;
        weighted(&context, of_context)?.to_dtype(DType::F64)? + weighted(&finite, of_lse)?.to_dtype(DType::F64)?
    }

    /// The gradient of each leaf; zeros where there is none.
    fn gradients(&self, call: &Call) -> Result<Vec<(Leaf, Tensor)>> {
        let store = self.loss(call)?.backward()?;
        let gradient =
            |(leaf, var): &(Leaf, Var)| Ok((*leaf, store.get(var).cloned().map_or_else(|| var.zeros_like(), Ok)?));
        self.leaves.iter().map(gradient).collect()
    }
}

/// How far a gradient may be off, relative to the largest of its tensor: some roundings of each score, weight and sum.
fn tolerance(case: &Case, dtype: DType) -> f64 {
    let steepest = case.attend().score_terms.into_iter().fold(1.0, f64::max);
    match dtype {
        DType::F32 => 4e-6 * (4.0 + steepest),
        DType::F16 => 1e-3 * (4.0 + steepest / 16.0),
        _ => 1e-2 * (4.0 + steepest / 16.0),
    }
}

fn check(case: &Case, dtype: DType, seed: u64) -> Outcome {
    let run = || -> Result<Outcome> {
        let exact = Tracked::new(case, DType::F64, seed, |_| true)?;
        let expected = exact.gradients(&exact.call.on_reference())?;
        let tracked = Tracked::new(case, dtype, seed, |_| true)?;
        for tier in Tier::available() {
            let call = tracked.call.on(Backend::Fused).on_tier(tier);
            for ((leaf, gradient), (_, expected)) in tracked.gradients(&call)?.iter().zip(&expected) {
                let (gradient, expected) = (values(gradient), values(expected));
                let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
                // What cancels leaves the rounding of its terms; a slope is multiplied by a distance.
                let Dims { h, h_kv, t_q, t_kv, d_v, .. } = case.dims;
                let terms = 1.0 + ((t_q * h / h_kv) as f64).sqrt() / 4.0;
                let floor = match leaf {
                    Leaf::Slopes => 2.0 * (t_q + t_kv) as f64,
                    _ => terms * (1.0 + 0.01 * d_v as f64),
                };
                let most = tolerance(case, dtype) * (largest + floor);
                for (n, (got, expected)) in gradient.iter().zip(&expected).enumerate() {
                    let difference = (got - expected).abs();
                    if difference > most || difference.is_nan() {
                        return Ok(Err(format!(
                            "{tier}, {leaf:?}: entry {n} is {got}, expected {expected} to {most:e}"
                        )));
                    }
                }
            }
        }
        Ok(Ok(()))
    };
    run().unwrap_or_else(|error| Err(error.to_string()))
}

#[test]
fn random_gradients_are_those_of_the_reference_path() {
    for_all(96, kernel_recipes(), |recipe| check(&recipe.case(), recipe.dtype, recipe.seed));
}

/// Every mask with tensors of every reach, all options at once.
fn everything(dtype: DType) -> Recipe {
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 60, t_kv: 200, d: 24, d_v: 16 };
    let masks = vec![Kind::Causal, Kind::Keep(Reach::Keys), Kind::Bias(Reach::Head), Kind::Bias(Reach::Keys)];
    let chosen = Chosen { scale: true, softcap: true, alibi: true, sinks: true };
    Recipe { chosen, seed: 4, ..Recipe::of_kernel(dims, masks, dtype) }
}

/// Neither which inputs are tracked beside one, nor a second backward pass, changes a bit of a gradient.
#[test]
fn what_is_tracked_alone_gets_the_same_gradient() -> Result<()> {
    for dtype in DTYPES {
        for recipe in [
            everything(dtype),
            Recipe { masks: vec![vec![Kind::Causal]], chosen: Chosen::default(), ..everything(dtype) },
        ] {
            let all = Tracked::new(&recipe.case(), dtype, 5, |_| true)?;
            let call = all.call.on(Backend::Fused);
            let loss = all.loss(&call)?;
            let (first, second) = (loss.backward()?, loss.backward()?);
            for (leaf, var) in &all.leaves {
                let gradient = first.get(var).expect("a gradient");
                assert_eq!((gradient.dims(), gradient.dtype()), (var.dims(), var.dtype()));
                assert!(bits(gradient) == bits(second.get(var).expect("a gradient")), "{leaf:?} again in {dtype:?}");
                let alone = Tracked::new(&recipe.case(), dtype, 5, |which| which == *leaf)?;
                let gradients = alone.gradients(&alone.call.on(Backend::Fused))?;
                assert!(bits(&gradients[0].1) == bits(gradient), "{leaf:?} alone in {dtype:?}");
            }
        }
    }
    Ok(())
}

/// A result that is used twice, and an input of two calls, get the sum of both gradients.
#[test]
fn gradients_of_several_uses_add_up() -> Result<()> {
    let recipe = everything(DType::F32);
    let one = Tracked::new(&recipe.case(), DType::F32, 5, |_| true)?;
    let call = one.call.on(Backend::Fused);
    let context = call.context()?;
    let twice =
        ((context.sum_all()? + (&context * 2.0)?.sum_all()?)? + (call.context()? * 3.0)?.sum_all()?)?.backward()?;
    let once = (call.context()?.sum_all()? * 6.0)?.backward()?;
    for (leaf, var) in &one.leaves {
        let gradient = |store: &candle_core::backprop::GradStore| values(store.get(var).expect("a gradient"));
        let (twice, once) = (gradient(&twice), gradient(&once));
        let largest = once.iter().fold(1e-3, |most: f64, x| most.max(x.abs()));
        assert!(twice.iter().zip(&once).all(|(a, b)| (a - b).abs() < 1e-5 * largest), "{leaf:?}");
    }
    Ok(())
}

/// NaN and infinities in keys and values that no query sees, and in queries that see none and in what their contexts
/// get.
#[test]
fn what_is_hidden_is_silent() -> Result<()> {
    let (t_q, t_kv, d) = (70, 300, 16);
    for dtype in DTYPES {
        for nothing in [f32::NAN, f32::INFINITY] {
            let random = |t: usize| Tensor::randn(0f32, 1.0, (1, 2, t, d), &CPU);
            let [q, k, v, factors] = [random(t_q)?, random(t_kv)?, random(t_kv)?, random(t_q)?];
            // Queries from 50 on see nothing, keys from 290 on are seen by nobody.
            let lens: Vec<usize> = (0..t_q).map(|i| if i < 50 { 90 + 4 * i } else { 0 }).collect();
            let spoilt = |tensor: &Tensor, from: usize, with: f32| -> Result<Tensor> {
                let t = tensor.dim(2)?;
                let rest = Tensor::full(with, (1, 2, t - from, d), &CPU)?;
                Tensor::cat(&[tensor.narrow(2, 0, from)?, rest], 2)?.to_dtype(dtype)
            };
            let keep = Tensor::ones((1, t_kv), DType::U8, &CPU)?;
            for keep in [None, Some(keep)] {
                let mut mask = candle_attention::AttentionMask::none().with_valid_lens(vec![lens.clone()]);
                if let Some(keep) = keep {
                    mask = mask.with_keep(&keep);
                }
                let gradients = |with: f32, tier: Tier| -> Result<Vec<Vec<f64>>> {
                    let vars =
                        [(&q, 50), (&k, 290), (&v, 290)].map(|(x, from)| Var::from_tensor(&spoilt(x, from, with)?));
                    let [q, k, v] = vars;
                    let (q, k, v) = (q?, k?, v?);
                    let context = Call::plain(&q, &k, &v, &mask).on_tier(tier).context()?;
                    let store = (context * spoilt(&factors, 50, with)?)?.sum_all()?.backward()?;
                    Ok([&q, &k, &v].map(|var| values(store.get(var).expect("a gradient"))).into())
                };
                for tier in Tier::available() {
                    for (got, expected) in gradients(nothing, tier)?.into_iter().zip(gradients(0.0, tier)?) {
                        let most = if dtype == DType::F32 { 2e-5 } else { 0.05 };
                        let close = |(a, b): (&f64, &f64)| (a - b).abs() < most;
                        assert!(got.iter().zip(&expected).all(close), "{tier}, {nothing} in {dtype:?}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Neither the number of threads nor the rest of the batch changes a bit.
#[test]
fn threads_and_batches_change_no_bit() {
    let pools: Vec<_> =
        [1, 2, 5].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().expect("a pool")).into();
    for_all(24, kernel_recipes(), |mut recipe| {
        recipe.dims.b = 2;
        let case = recipe.case();
        let run = || -> Result<Outcome> {
            let tracked = Tracked::new(&case, recipe.dtype, recipe.seed, |_| true)?;
            for tier in Tier::available() {
                let call = tracked.call.on(Backend::Fused).on_tier(tier);
                let all = || -> Result<Vec<_>> {
                    Ok(tracked.gradients(&call)?.iter().map(|(_, gradient)| bits(gradient)).collect())
                };
                let one = pools[0].install(all)?;
                for pool in &pools[1..] {
                    if pool.install(all)? != one {
                        return Ok(Err(format!("{tier}: another number of threads, another gradient")));
                    }
                }
            }
            Ok(Ok(()))
        };
        run().unwrap_or_else(|error| Err(error.to_string()))
    });
}

/// Each sequence has the gradients that it has alone.
#[test]
fn a_sequence_does_not_feel_its_batch() -> Result<()> {
    let [q, k, v, factors] = [4, 2, 2, 4].map(|h| Tensor::randn(0f32, 1.0, (3, h, 150, 24), &CPU));
    let (q, k, v, factors) = (q?, k?, v?, factors?);
    for dtype in DTYPES {
        for tier in Tier::available() {
            let gradients = |b: usize, count: usize| -> Result<Vec<Tensor>> {
                let part = |x: &Tensor| x.narrow(0, b, count)?.to_dtype(dtype);
                let vars = [&q, &k, &v].map(|x| Var::from_tensor(&part(x)?));
                let [q, k, v] = vars;
                let (q, k, v) = (q?, k?, v?);
                let context =
                    Call::plain(&q, &k, &v, &candle_attention::AttentionMask::causal()).on_tier(tier).context()?;
                let store = (context * part(&factors)?)?.sum_all()?.backward()?;
                Ok([&q, &k, &v].map(|var| store.get(var).expect("a gradient").clone()).into())
            };
            let whole = gradients(0, 3)?;
            for b in 0..3 {
                for (alone, whole) in gradients(b, 1)?.iter().zip(&whole) {
                    assert!(bits(alone) == bits(&whole.narrow(0, b, 1)?), "{tier}, {dtype:?}, sequence {b}");
                }
            }
        }
    }
    Ok(())
}
