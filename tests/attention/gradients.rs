//! Gradients of the functions: of the reference path against central differences of the oracle, in f64; of the kernel
//! against the reference path's; and of both against PyTorch's.

mod pytorch;

use candle_attention::{AttentionMask, SdpaOptions, merge_attention};
use candle_core::{DType, Result, Tensor, Var};
use proptest::prelude::*;

use crate::array::Random;
use crate::call::{CPU, Call, Leaf, Outcome, Path};
use crate::common::{bits, values};
use crate::isolation::{fill_unseen, vectors};
use crate::merge::{keep_columns, options};
use crate::oracle::{Attended, Case, Dims, Part};
use crate::recipe::{Chosen, DTYPES, Kind, Layout, Reach, Recipe, for_all, kernel_recipes, recipes};
use crate::threads::pool;

/// What takes part in the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Function {
    Context,
    Weights,
    Lse,
    /// Context and log-sum-exp of keys cut in three.
    Merged(usize, usize),
}

/// The loss is a sum of the results with these factors, so that its gradient differs in every entry.
struct Factors {
    context: Vec<f64>,
    weights: Vec<f64>,
    lse: Vec<f64>,
}

impl Factors {
    fn new(case: &Case, seed: u64) -> Self {
        let Dims { b, h, t_q, t_kv, d_v, .. } = case.dims;
        let mut random = Random::new(seed);
        // Numbers that bf16 holds.
        let mut draw = |count: usize| (0..count).map(|_| random.up_to(64) as f64 / 32.0 - 1.0).collect();
        Self { context: draw(b * h * t_q * d_v), weights: draw(b * h * t_q * t_kv), lse: draw(b * h * t_q) }
    }

    /// The oracle's. A row that sees nothing has a log-sum-exp of -inf, which stays out of the loss.
    fn loss(&self, function: Function, attended: &Attended) -> f64 {
        let dot =
            |a: &[f64], b: &[f64]| a.iter().zip(b).filter(|(_, b)| b.is_finite()).map(|(a, b)| a * b).sum::<f64>();
        dot(&self.context, &attended.context)
            + match function {
                Function::Context => 0.0,
                Function::Weights => dot(&self.weights, &attended.weights),
                Function::Lse | Function::Merged(..) => dot(&self.lse, &attended.lse),
            }
    }
}

/// A call whose leaves are variables, or some of them.
struct Tracked<'a> {
    case: &'a Case,
    call: Call,
    leaves: Vec<(Leaf, Var)>,
    function: Function,
    factors: Factors,
}

impl<'a> Tracked<'a> {
    fn new(case: &'a Case, dtype: DType, function: Function, seed: u64) -> Result<Self> {
        Self::of_some(case, dtype, (function, seed), |_| true)
    }

    fn of_some(
        case: &'a Case,
        dtype: DType,
        (function, seed): (Function, u64),
        is_tracked: impl Fn(Leaf) -> bool,
    ) -> Result<Self> {
        let mut leaves = Vec::new();
        let call = Call::with_leaves(case, dtype, &CPU, &mut |which, tensor| {
            if !is_tracked(which) {
                return Ok(tensor);
            }
            let var = Var::from_tensor(&tensor)?;
            leaves.push((which, var.clone()));
            Ok(var.into_inner())
        })?;
        Ok(Self { case, call, leaves, function, factors: Factors::new(case, seed) })
    }

    fn loss(&self, call: &Call) -> Result<Tensor> {
        let dot = |factors: &[f64], tensor: &Tensor| {
            let factors = Tensor::from_slice(factors, tensor.shape(), &CPU)?.to_dtype(tensor.dtype())?;
            (factors * tensor)?.sum_all()?.to_dtype(DType::F64)
        };
        let with_lse = |(context, lse): (Tensor, Tensor)| {
            let finite = lse.detach().gt(f64::NEG_INFINITY)?.where_cond(&lse, &lse.zeros_like()?)?;
            dot(&self.factors.context, &context)? + dot(&self.factors.lse, &finite)?
        };
        match self.function {
            Function::Context => dot(&self.factors.context, &call.context()?),
            Function::Weights => {
                let output = call.with_weights()?;
                dot(&self.factors.context, &output.context)? + dot(&self.factors.weights, &output.weights)?
            }
            Function::Lse => with_lse(call.with_lse()?),
            Function::Merged(first, second) => with_lse(self.merged(first, second)?),
        }
    }

    fn merged(&self, first: usize, second: usize) -> Result<(Tensor, Tensor)> {
        let Dims { b, h, t_q, t_kv, .. } = self.case.dims;
        let ends = [0, first.min(second), first.max(second), t_kv].map(|end| end.min(t_kv));
        let part = |n: usize| {
            let (start, len) = (ends[n], ends[n + 1] - ends[n]);
            let keys: Vec<usize> = (start..start + len).collect();
            let mut mask = AttentionMask::none().with_keep(&keep_columns(self.case, &keys, &CPU)?);
            let mut options: SdpaOptions = options(self.case);
            for (leaf, var) in &self.leaves {
                match leaf {
                    Leaf::Bias(m, p) => {
                        let Part::Bias(array) = &self.case.masks[*m].parts[*p] else { continue };
                        let whole = array.look(var)?.broadcast_as((b, h, t_q, t_kv))?;
                        mask = mask.with_bias(&whole.narrow(3, start, len)?);
                    }
                    // In the part in the middle, which may have no keys.
                    Leaf::Sinks if n == 1 => options = options.with_sinks(var),
                    _ => {}
                }
            }
            let Call { q, k, v, .. } = &self.call;
            let (k, v) = (k.narrow(2, start, len)?, v.narrow(2, start, len)?);
            Call { q: q.clone(), k, v, mask, options }.with_lse()
        };
        merge_attention(&(0..3).map(part).collect::<Result<Vec<_>>>()?)
    }

    /// The gradient of each leaf; zeros where there is none.
    fn gradients(&self, call: &Call) -> Result<Vec<(Leaf, Tensor)>> {
        let store = self.loss(call)?.backward()?;
        let gradient = |(leaf, var): &(Leaf, Var)| {
            let gradient = store.get(var).cloned().map_or_else(|| var.zeros_like(), Ok)?;
            assert_eq!((gradient.dims(), gradient.dtype()), (var.dims(), var.dtype()), "{leaf:?}");
            Ok((*leaf, gradient))
        };
        self.leaves.iter().map(gradient).collect()
    }
}

fn numbers(case: &mut Case, leaf: Leaf) -> &mut Vec<f64> {
    match leaf {
        Leaf::Q => &mut case.q.data,
        Leaf::K => &mut case.k.data,
        Leaf::V => &mut case.v.data,
        Leaf::Bias(mask, part) => match &mut case.masks[mask].parts[part] {
            Part::Bias(bias) => &mut bias.data,
            other => panic!("{other:?} is no bias"),
        },
        Leaf::Sinks => case.options.sinks.as_mut().expect("the case has sinks"),
        Leaf::Slopes => case.options.alibi_slopes.as_mut().expect("the case has slopes"),
        Leaf::Distances => &mut case.options.distance_bias.as_mut().expect("the case has them").data,
    }
}

/// The step of a difference: its own error is about the square of this times a third derivative, and rounding adds the
/// last digit of the loss over the step. Both stay far below `TOLERANCE`.
const STEP: f64 = 1e-5;
const TOLERANCE: f64 = 1e-6;
/// Entries of one tensor that are held against differences; all of them are looked at for being finite.
const PROBES: usize = 16;

fn equal_differences(case: &Case, function: Function, seed: u64) -> Result<Outcome> {
    let tracked = Tracked::new(case, DType::F64, function, seed)?;
    let mut random = Random::new(seed ^ 0xff);
    for (leaf, gradient) in tracked.gradients(&tracked.call)? {
        let gradient = values(&gradient);
        if let Some(n) = gradient.iter().position(|entry| !entry.is_finite()) {
            return Ok(Err(format!("{leaf:?}: the gradient of entry {n} is {}", gradient[n])));
        }
        for probe in 0..gradient.len().min(PROBES) {
            let n = if gradient.len() <= PROBES { probe } else { random.up_to(gradient.len() - 1) };
            let mut moved = case.clone();
            let value = numbers(&mut moved, leaf)[n];
            let mut loss_at = |value: f64| {
                numbers(&mut moved, leaf)[n] = value;
                tracked.factors.loss(function, &moved.attend())
            };
            let difference = (loss_at(value + STEP) - loss_at(value - STEP)) / (2.0 * STEP);
            // What has no part in the loss has a gradient of nothing but rounding.
            let most = if difference == 0.0 { 1e-9 } else { TOLERANCE * (1.0 + difference.abs()) };
            if (gradient[n] - difference).abs() > most || difference.is_nan() {
                return Ok(Err(format!("{leaf:?}: that of entry {n} is {}, expected {difference}", gradient[n])));
            }
        }
    }
    Ok(Ok(()))
}

#[test]
fn random_gradients_equal_differences() {
    let functions = prop_oneof![
        Just(Function::Context),
        Just(Function::Weights),
        Just(Function::Lse),
        (0..9usize, 0..9usize).prop_map(|(first, second)| Function::Merged(first, second)),
    ];
    for_all(400, (recipes(&[DType::F64]), functions), |(mut recipe, function): (Recipe, Function)| {
        if let Function::Merged(..) = function {
            // Parts have distances of their own, and an empty row of a part is no empty row of the whole.
            (recipe.chosen.alibi, recipe.chosen.distances) = (false, false);
            recipe.uniform_empty_rows = false;
        }
        equal_differences(&recipe.case(), function, recipe.seed).unwrap_or_else(|error| Err(error.to_string()))
    });
}

/// How far a gradient of the kernel may be off, relative to the largest of its tensor: some roundings of each score,
/// weight and sum.
fn tolerance(case: &Case, dtype: DType) -> f64 {
    let steepest = case.attend().score_terms.into_iter().fold(1.0, f64::max);
    match dtype {
        DType::F32 => 4e-6 * (4.0 + steepest),
        DType::F16 => 1e-3 * (4.0 + steepest / 16.0),
        _ => 1e-2 * (4.0 + steepest / 16.0),
    }
}

/// NaN and infinities in keys and values that no query sees, in queries that see none, and in what their contexts get.
fn spoil_hidden(tracked: &mut Factors, case: &mut Case, special: f64) {
    fill_unseen(case, special);
    let Dims { b, h, t_q, t_kv, d, d_v, .. } = case.dims;
    for (row, [b, h, i]) in vectors(b, h, t_q).enumerate() {
        if !(0..t_kv).any(|j| case.sees([b, h, i, j])) {
            tracked.context[row * d_v..(row + 1) * d_v].fill(special);
            for place in (0..d).map(|d| case.q.place([b, h, i, d])).collect::<Vec<_>>() {
                case.q.data[place] = special;
            }
        }
    }
}

/// With dropout in some cases, the log-sum-exp in the loss in others, and nothing but NaN and infinities where nobody
/// looks. In pools of several sizes, every gradient has the same bits.
fn equal_those_of_the_reference_path(mut recipe: Recipe) -> Result<Outcome> {
    let (dtype, seed) = (recipe.dtype, recipe.seed);
    let special = [None, None, Some(f64::NAN), Some(f64::INFINITY)][(seed / 16 % 4) as usize];
    if special.is_some() {
        // Views without repetition, and no weight for what sees no key.
        (recipe.layouts, recipe.chosen.sinks) = ([Layout::HeadsTransposed; 3], false);
    }
    let case = recipe.case();
    let Dims { h, h_kv, t_q, t_kv, d_v, .. } = case.dims;
    let function = if seed.is_multiple_of(4) { Function::Lse } else { Function::Context };
    let drops = |options: SdpaOptions| match seed.is_multiple_of(3) {
        true => options.with_dropout(0.3, true).with_dropout_philox_seed(seed),
        false => options,
    };
    let exact = Tracked::new(&case, DType::F64, function, seed)?;
    let expected = exact.gradients(&exact.call.clone().with(drops))?;
    let (mut spoilt, mut factors) = (case.clone(), Factors::new(&case, seed));
    if let Some(special) = special {
        spoil_hidden(&mut factors, &mut spoilt, special);
    }
    let tracked = Tracked { factors, ..Tracked::new(&spoilt, dtype, function, seed)? };
    for path in Path::kernels() {
        let call = tracked.call.by(path).with(drops);
        let found = tracked.gradients(&call)?;
        for ((leaf, gradient), (_, expected)) in found.iter().zip(&expected) {
            let (gradient, expected) = (values(gradient), values(expected));
            let largest = expected.iter().fold(0.0, |most: f64, x| most.max(x.abs()));
            // What cancels leaves the rounding of its terms; a slope is multiplied by a distance.
            let terms = 1.0 + ((t_q * h / h_kv) as f64).sqrt() / 4.0;
            let terms = if *leaf == Leaf::Slopes { 2.0 * (t_q + t_kv) as f64 } else { terms };
            let floor = terms * (1.0 + 0.01 * d_v as f64);
            let most = tolerance(&case, dtype) * (largest + floor);
            let is_off = |(got, expected): (&f64, &f64)| (got - expected).abs() > most || got.is_nan();
            if let Some(n) = gradient.iter().zip(&expected).position(is_off) {
                let (got, expected) = (gradient[n], expected[n]);
                return Ok(Err(format!("{path:?}, {leaf:?}: entry {n} is {got}, expected {expected} to {most:e}")));
            }
        }
        for threads in [1, 2, 5].into_iter().filter(|_| seed.is_multiple_of(2)) {
            let again = pool(threads).install(|| tracked.gradients(&call))?;
            if again.iter().zip(&found).any(|((_, again), (_, found))| bits(again) != bits(found)) {
                return Ok(Err(format!("{path:?}: {threads} threads, another gradient")));
            }
        }
    }
    Ok(Ok(()))
}

#[test]
fn random_gradients_of_the_kernel_are_those_of_the_reference_path() {
    for_all(112, kernel_recipes(), |recipe| {
        equal_those_of_the_reference_path(recipe).unwrap_or_else(|error| Err(error.to_string()))
    });
}

/// Every mask with tensors of every reach, all options at once.
fn everything(dtype: DType) -> Recipe {
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 60, t_kv: 200, d: 24, d_v: 16 };
    let masks = vec![Kind::Causal, Kind::Keep(Reach::Keys), Kind::Bias(Reach::Head), Kind::Bias(Reach::Keys)];
    Recipe { chosen: Chosen::ALL, seed: 4, ..Recipe::of_kernel(dims, masks, dtype) }
}

/// Neither which inputs are tracked beside one, nor a second backward pass, changes a bit of a gradient; and a result
/// that is used twice gets the sum.
#[test]
fn what_is_tracked_alone_or_twice_gets_the_same_gradient() -> Result<()> {
    let causal = |dtype| Recipe { masks: vec![vec![Kind::Causal]], chosen: Chosen::default(), ..everything(dtype) };
    for recipe in DTYPES.into_iter().flat_map(|dtype| [everything(dtype), causal(dtype)]) {
        let (case, dtype) = (recipe.case(), recipe.dtype);
        let all = Tracked::new(&case, dtype, Function::Context, 5)?;
        let call = all.call.by(Path::kernels().pop().expect("a tier"));
        let loss = all.loss(&call)?;
        let (first, second) = (loss.backward()?, loss.backward()?);
        let (twice, once) =
            (((&loss + (&loss * 2.0)?)? + (all.loss(&call)? * 3.0)?)?.backward()?, (loss * 6.0)?.backward()?);
        for (leaf, var) in &all.leaves {
            let gradient = first.get(var).expect("a gradient");
            assert!(bits(gradient) == bits(second.get(var).expect("a gradient")), "{leaf:?} again in {dtype:?}");
            let alone = Tracked::of_some(&case, dtype, (Function::Context, 5), |which| which == *leaf)?;
            let gradients = alone.gradients(&alone.call.by(Path::kernels().pop().expect("a tier")))?;
            assert!(bits(&gradients[0].1) == bits(gradient), "{leaf:?} alone in {dtype:?}");
            if dtype == DType::F32 {
                let [twice, once] = [&twice, &once].map(|store| values(store.get(var).expect("a gradient")));
                let most = 1e-5 * once.iter().fold(1e-3, |most: f64, x| most.max(x.abs()));
                assert!(twice.iter().zip(&once).all(|(a, b)| (a - b).abs() < most), "{leaf:?} of several uses");
            }
        }
    }
    Ok(())
}
