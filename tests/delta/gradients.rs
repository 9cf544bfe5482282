//! Gradients of every input: the reference path's against differences of the oracle's numbers, the kernels' against
//! the reference path's.

use std::collections::HashMap;

use attention_oracle::array::{Array, Layout};
use attention_oracle::delta::Delta;
use candle_attention::{Backend, DeltaOptions};
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::case::{Decay, Recipe};
use crate::common::{assert_close, values};

const CPU: Device = Device::Cpu;

/// Of a sum of all results, each times a number of its own.
fn weight(n: usize) -> f64 {
    (n as f64 * 0.7).cos()
}

fn weighted(results: [&Tensor; 2]) -> Result<Tensor> {
    let sums = results.map(|result| {
        let weights = (0..result.elem_count()).map(weight).collect();
        let weights = Tensor::from_vec::<_, f64>(weights, result.shape(), &CPU)?;
        result.to_dtype(DType::F64)?.mul(&weights)?.sum_all()
    });
    let [y, state] = sums;
    y? + state?
}

/// By the names of the inputs, in the order of the buffers of a case.
fn gradients(recipe: &Recipe, case: &Delta, path: &DeltaOptions) -> Result<HashMap<&'static str, Tensor>> {
    let mut vars = HashMap::new();
    let call = recipe.call_of_leaves(case, &CPU, &mut |name, tensor| {
        let var = Var::from_tensor(&tensor)?;
        let tensor = var.as_tensor().clone();
        vars.insert(name, var);
        Ok(tensor)
    })?;
    let (y, state) = call.run(path)?;
    let gradients = weighted([&y, &state])?.backward()?;
    let of = |(name, var): (&'static str, Var)| (name, gradients.get(&var).expect("it has a gradient").clone());
    Ok(vars.into_iter().map(of).collect())
}

fn input<'a>(case: &'a mut Delta, name: &str) -> &'a mut Array {
    let given = match name {
        "q" => Some(&mut case.q),
        "k" => Some(&mut case.k),
        "v" => Some(&mut case.v),
        "decay" => case.decay.as_mut(),
        "beta" => case.beta.as_mut(),
        _ => case.state.as_mut(),
    };
    given.expect("what has a gradient is given")
}

/// Central differences of the oracle's numbers, for each number of an input.
fn differences(case: &Delta, name: &str) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let sum = |numbers: Vec<f64>| numbers.iter().enumerate().map(|(n, x)| x * weight(n)).sum::<f64>();
    let count = input(&mut case.clone(), name).data.len();
    let slope = |n: usize| {
        let [up, down] = [STEP, -STEP].map(|step| {
            let mut case = case.clone();
            input(&mut case, name).data[n] += step;
            let recurred = case.recur();
            sum(recurred.y) + sum(recurred.state)
        });
        (up - down) / (2.0 * STEP)
    };
    (0..count).map(slope).collect()
}

/// Each rule, grouping and kind of decay, dense and packed, with norms and without, in layouts of every kind.
fn recipes(lens: [&[usize]; 2], dims: [usize; 2]) -> Vec<Recipe> {
    let mut recipes = Vec::new();
    for (n, heads) in [[2, 2, 2], [2, 2, 4], [4, 2, 2], [2, 4, 1]].into_iter().enumerate() {
        for decay in [None, Some(Decay::PerHead), Some(Decay::PerChannel)] {
            for (m, has_beta) in [false, true].into_iter().enumerate() {
                let is_packed = (n + m) % 2 == 1;
                let plain = Recipe::plain(lens[usize::from(is_packed)].to_vec(), heads, dims);
                let (seed, qk_norm) = (recipes.len() as u64, has_beta.then_some(0.3));
                let layouts = [0, 3, 7].map(|at| Layout::ALL[(recipes.len() + at) % Layout::ALL.len()]);
                let (has_state, one_factor) = (n != 1, n == 3);
                let plain = Recipe { decay, has_beta, has_state, layouts, ..plain };
                recipes.push(Recipe { is_packed, one_factor, qk_norm, seed, ..plain });
            }
        }
    }
    recipes
}

#[test]
fn the_reference_path_has_the_slopes_of_the_oracle() -> Result<()> {
    let reference = DeltaOptions::default().with_backend(Backend::Reference);
    let mut forgets = 0;
    for recipe in recipes([&[5, 5], &[2, 0, 5, 1]], [3, 2]) {
        let case = recipe.case();
        forgets += case.decay.iter().flat_map(|decay| &decay.data).filter(|decay| decay.is_infinite()).count();
        for (name, gradient) in gradients(&recipe, &case, &reference)? {
            let expected = Tensor::from_vec(differences(&case, name), gradient.shape(), &CPU)?;
            assert_close(&gradient, &expected, 1e-7, &format!("{name} of {recipe:?}"));
        }
    }
    assert!(forgets > 0, "no decay is -inf");
    Ok(())
}

/// Over more tokens than one block of a kernel has.
#[test]
fn kernels_have_the_gradients_of_the_reference_path() -> Result<()> {
    for recipe in recipes([&[70, 70], &[64, 0, 65, 1]], [5, 7]) {
        for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::BF16, 2f64.powi(-7)), (DType::F16, 2f64.powi(-10))] {
            let recipe = Recipe { dtype, factor_dtype: DType::F32, ..recipe.clone() };
            let (case, paths) = (recipe.case(), recipe.paths(&CPU));
            let expected = gradients(&recipe, &case, &paths[0])?;
            for path in &paths[1..] {
                for (name, gradient) in gradients(&recipe, &case, path)? {
                    let largest = values(&expected[name]).into_iter().map(f64::abs).fold(0.0, f64::max);
                    let what = format!("{name} of {recipe:?} on {path:?}");
                    assert_close(&gradient, &expected[name], tolerance * largest, &what);
                }
            }
        }
    }
    Ok(())
}

/// Inputs of which some are tracked, a loss by one of the results, and the same once more.
#[test]
fn parts_of_a_call_have_the_gradients_of_the_whole() -> Result<()> {
    let recipe = Recipe { dtype: DType::F32, factor_dtype: DType::F32, ..Recipe::plain(vec![9], [2, 2, 4], [5, 7]) };
    let case = recipe.case();
    let run = |backend, tracked: &[&str], results: [f64; 2]| -> Result<Vec<Option<Tensor>>> {
        let mut vars = Vec::new();
        let call = recipe.call_of_leaves(&case, &CPU, &mut |name, tensor| {
            let var = if tracked.contains(&name) { Some(Var::from_tensor(&tensor)?) } else { None };
            let leaf = var.as_ref().map_or(tensor, |var| var.as_tensor().clone());
            vars.push(var);
            Ok(leaf)
        })?;
        let (y, state) = call.run(&DeltaOptions::default().with_backend(backend))?;
        let loss = match results {
            [1.0, 0.0] => y.sqr()?.sum_all()?,
            [0.0, 1.0] => state.sqr()?.sum_all()?,
            _ => (y.sqr()?.sum_all()? + state.sqr()?.sum_all()?)?,
        };
        let [first, second] = [loss.backward()?, loss.backward()?];
        let elsewhere = std::thread::scope(|scope| scope.spawn(|| loss.backward()).join().expect("no panic"))?;
        for var in vars.iter().flatten() {
            assert_eq!(first.get(var).map(values), second.get(var).map(values), "once more");
            assert_eq!(first.get(var).map(values), elsewhere.get(var).map(values), "on another thread");
        }
        Ok(vars.iter().map(|var| var.as_ref().and_then(|var| first.get(var).cloned())).collect())
    };
    for tracked in [&["q"][..], &["v", "beta"], &["state"], &["decay"], &["q", "k", "v", "decay", "beta", "state"]] {
        for results in [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]] {
            let [expected, found] = [Backend::Reference, Backend::Fused].map(|backend| run(backend, tracked, results));
            for (expected, found) in expected?.iter().zip(&found?) {
                let what = format!("{tracked:?} by {results:?}");
                match (expected, found) {
                    (Some(expected), Some(found)) => assert_close(found, expected, 1e-5, &what),
                    // The last state does not depend on the queries.
                    (None, Some(found)) => assert!(values(found).iter().all(|x| *x == 0.0), "{what}"),
                    (expected, found) => assert_eq!(expected.is_some(), found.is_some(), "{what}"),
                }
            }
        }
    }
    Ok(())
}
