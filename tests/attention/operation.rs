//! Properties of every operation, which computes results, with gradients, from the numbers of some buffers.

use std::collections::BTreeMap;
use std::thread;

use candle_core::backprop::GradStore;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::*;

/// A function that replaces the tensor of a named buffer by another of the same numbers, for example a variable.
pub type Leaf<'a> = &'a mut dyn FnMut(&str, Tensor) -> Result<Tensor>;

/// A call of an operation.
pub trait Operation: Sync {
    /// How it is computed.
    type Way: Sync;

    fn run(&self, way: &Self::Way, leaf: Leaf) -> Result<Vec<Tensor>>;

    /// Returns the factor of the nth number of the results in the loss.
    fn factor(&self, n: usize) -> f64 {
        factor(n)
    }
}

/// Returns a different factor for each number, so that a gradient differs in every entry. Factors are exact in bf16.
pub fn factor(n: usize) -> f64 {
    Random::new(n as u64).up_to(64) as f64 / 32.0 - 1.0
}

/// A call whose results are known in f64.
pub trait Exact: Operation + Clone {
    fn buffers(&mut self) -> Vec<(String, &mut Vec<f64>)>;

    /// Returns the numbers of all results.
    fn exact(&self) -> Vec<f64>;
}

/// The results by number, and the gradients by the names of their buffers.
pub type Named = BTreeMap<String, Tensor>;

pub fn is_result(name: &str) -> bool {
    name.starts_with("result ")
}

/// Returns the results of a call, and the gradients of its tracked inputs.
pub fn backward<O: Operation>(call: &O, way: &O::Way, is_tracked: impl Fn(&str) -> bool) -> Result<Named> {
    differentiate(call, way, is_tracked, false)
}

/// Differentiates a sum of the results with a factor for each number. If `twice`, it is done again on another thread,
/// and the gradients have the same bits.
fn differentiate<O: Operation>(
    call: &O,
    way: &O::Way,
    is_tracked: impl Fn(&str) -> bool,
    twice: bool,
) -> Result<Named> {
    let mut vars = BTreeMap::new();
    let results = call.run(way, &mut |name, tensor| {
        if !is_tracked(name) {
            return Ok(tensor);
        }
        let var = Var::from_tensor(&tensor)?;
        vars.insert(name.to_string(), var.clone());
        Ok(var.into_inner())
    })?;
    let mut named = Named::new();
    let mut loss = None;
    let mut first = 0;
    for (n, result) in results.into_iter().enumerate() {
        named.insert(format!("result {n}"), result.detach());
        if vars.is_empty() {
            continue;
        }
        let factors: Vec<f64> = (first..first + result.elem_count()).map(|at| call.factor(at) / 2.0).collect();
        first += result.elem_count();
        // Rows that are fully masked have a log-sum-exp of -inf, which is not part of the loss.
        let is_finite = values(&result).iter().all(|x| x.is_finite());
        let finite = match is_finite {
            true => result.clone(),
            false => result.detach().gt(f64::NEG_INFINITY)?.where_cond(&result, &result.zeros_like()?)?,
        };
        let factors = Tensor::from_vec(factors, result.shape(), &crate::call::CPU)?.to_dtype(result.dtype())?;
        let half = (finite * factors.to_device(result.device())?)?.sum_all()?;
        let wide = if result.device().is_metal() { DType::F32 } else { DType::F64 };
        // A result that is used twice gets the sum.
        let own = (half.to_dtype(wide)? + half.to_dtype(wide)?)?;
        loss = Some(loss.map_or(Ok(own.clone()), |loss: Tensor| loss + own)?);
    }
    let Some(loss) = loss else { return Ok(named) };
    let gradients = of_variables(&vars, &loss.backward()?)?;
    if twice {
        let again = thread::scope(|scope| scope.spawn(|| loss.backward()).join().expect("no panic"))?;
        are_same(&of_variables(&vars, &again)?, &gradients)?;
    }
    named.extend(gradients);
    Ok(named)
}

fn of_variables(vars: &BTreeMap<String, Var>, store: &GradStore) -> Result<Named> {
    let gradient = |(name, var): (&String, &Var)| {
        // No entry is a gradient of zero.
        let gradient = store.get(var).map_or_else(|| var.zeros_like(), |found| Ok(found.clone()))?;
        if (gradient.dims(), gradient.dtype()) != (var.dims(), var.dtype()) {
            bail!("the gradient of {name} is {gradient:?} of {var:?}");
        }
        Ok((name.clone(), gradient))
    };
    vars.iter().map(gradient).collect()
}

/// Compares found with expected tensors; `most` returns the tolerance of an entry, from the name and the largest
/// number.
pub fn are_near(found: &Named, expected: &Named, most: impl Fn(&str, f64) -> f64) -> Result<()> {
    for (name, own) in found {
        let numbers = values(&expected[name]);
        let largest = numbers.iter().filter(|x| x.is_finite()).fold(0.0, |so_far: f64, x| so_far.max(x.abs()));
        compare(name, own, (expected[name].dims(), own.dtype()), &numbers, |_| most(name, largest))?;
    }
    Ok(())
}

pub fn are_same(found: &Named, expected: &Named) -> Result<()> {
    match found.iter().find(|(name, found)| bits(found) != bits(&expected[*name])) {
        Some((name, _)) => bail!("{name} has other bits"),
        None => Ok(()),
    }
}

/// Checks in f64 that gradients are the finite differences of the exact numbers, to within `tolerance` of 1 or the
/// slope. Moves `probes` entries of each buffer.
pub fn has_slopes<O: Exact>(call: &O, way: &O::Way, tolerance: f64, probes: usize) -> Result<()> {
    // Its own error is about the square of this times a third derivative, and rounding adds the last digit of the loss
    // over the step.
    const STEP: f64 = 1e-5;
    let gradients = differentiate(call, way, |_| true, true)?;
    let mut moved = call.clone();
    for buffer in 0..moved.buffers().len() {
        let name = moved.buffers()[buffer].0.clone();
        let gradient = values(&gradients[&name]);
        if let Some(n) = gradient.iter().position(|entry| !entry.is_finite()) {
            bail!("{name}: the gradient of entry {n} is {}", gradient[n]);
        }
        let count = gradient.len();
        let mut random = Random::new(gradient.len() as u64);
        for probe in 0..count.min(probes) {
            let n = if count <= probes { probe } else { random.up_to(count - 1) };
            let value = moved.buffers()[buffer].1[n];
            let mut loss_at = |number: f64| -> f64 {
                moved.buffers()[buffer].1[n] = number;
                let exact = moved.exact().into_iter().enumerate().filter(|(_, x)| x.is_finite());
                exact.map(|(at, x)| call.factor(at) * x).sum()
            };
            let slope = (loss_at(value + STEP) - loss_at(value - STEP)) / (2.0 * STEP);
            moved.buffers()[buffer].1[n] = value;
            // What has no part in the loss has a gradient of nothing but rounding.
            let most = if slope == 0.0 { 1e-9 } else { tolerance * (1.0 + slope.abs()) };
            if (gradient[n] - slope).abs() > most || slope.is_nan() {
                bail!("{name}: the gradient of entry {n} is {}, expected {slope}", gradient[n]);
            }
        }
    }
    Ok(())
}

/// Checks that other tracked inputs change the gradient of an input by at most a fraction of the largest number, and
/// results by at most a fraction of the largest or of 1: no fused step swallows a gradient.
pub fn is_tracked_alone<O: Operation>(call: &O, way: &O::Way, [of_result, of_gradient]: [f64; 2]) -> Result<()> {
    let most = |name: &str, largest: f64| largest.max(1.0) * if is_result(name) { of_result } else { of_gradient };
    let all = differentiate(call, way, |_| true, true)?;
    are_near(&backward(call, way, |_| false)?, &all, most)?;
    all.keys().filter(|name| !is_result(name)).try_for_each(|name| {
        let alone = backward(call, way, |other| other == name)?;
        are_near(&alone, &all, most).map_err(|error| error.context(format!("{name} alone")))
    })
}

pub fn pool(threads: usize) -> ThreadPool {
    ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool")
}

/// Checks that results and gradients have the same bits in each pool.
pub fn is_the_same_in<O: Operation>(
    pools: &[ThreadPool],
    call: &O,
    way: &O::Way,
    is_tracked: impl Fn(&str) -> bool + Sync,
) -> Result<()> {
    let first = pools[0].install(|| differentiate(call, way, &is_tracked, true))?;
    pools[1..].iter().try_for_each(|pool| are_same(&pool.install(|| backward(call, way, &is_tracked))?, &first))
}

/// Checks that NaN and infinities reach only results that depend on them: results are near the exact ones, as `check`
/// says, and results whose exact numbers do not change keep their bits.
pub fn isolates<O: Exact>(
    [clean, spoilt]: [&O; 2],
    ways: &[O::Way],
    check: impl Fn(&O::Way, &[Tensor]) -> Result<()>,
) -> Result<()> {
    let numbers = [clean, spoilt].map(Exact::exact);
    for way in ways {
        let [before, after] = [clean, spoilt].map(|call| call.run(way, &mut |_, tensor| Ok(tensor)));
        let before = before?;
        let after = after?;
        check(way, &after)?;
        let [before, after] = [before, after].map(|results| results.iter().flat_map(bits).collect::<Vec<_>>());
        let stays = |n: &usize| numbers[0][*n].to_bits() == numbers[1][*n].to_bits();
        if let Some(n) = (0..before.len()).filter(stays).find(|&n| before[n] != after[n]) {
            bail!("number {n} of the results changes, though its exact one does not");
        }
    }
    Ok(())
}
