//! Gradients of every input: the reference path's against the slopes of the oracle's numbers, the kernels' against the
//! reference path's.

use super::case::{Decay, Recipe, Rule};
use crate::*;

/// Lists each rule, grouping and kind of decay, dense and packed, with and without norms, in every layout.
fn recipes(lens: [&[usize]; 2], dims: [usize; 2]) -> Vec<Recipe> {
    let mut recipes = Vec::new();
    for (n, heads) in [[2, 2, 2], [2, 2, 4], [4, 2, 2], [2, 4, 1]].into_iter().enumerate() {
        for decay in [None, Some(Decay::PerHead), Some(Decay::PerChannel)] {
            for (m, has_beta) in [false, true].into_iter().enumerate() {
                let is_packed = (n + m) % 2 == 1;
                let plain = Recipe::plain(lens[usize::from(is_packed)].to_vec(), heads, dims);
                let seed = recipes.len() as u64;
                let qk_norm = has_beta.then_some(0.3);
                let layouts = [0, 3, 7].map(|at| Layout::ALL[(recipes.len() + at) % Layout::ALL.len()]);
                let has_state = n != 1;
                let one_factor = n == 3;
                let plain = Recipe { decay, has_beta, has_state, layouts, ..plain };
                recipes.push(Recipe { is_packed, one_factor, qk_norm, seed, ..plain });
            }
        }
    }
    recipes
}

#[test]
fn gated_delta_rule_reference_gradients_match_finite_differences() -> Result<()> {
    let reference = (true, DeltaOptions::default().with_backend(Backend::Reference));
    let mut forgets = 0;
    for recipe in recipes([&[5, 5], &[2, 0, 5, 1]], [3, 2]) {
        let call = Rule::of(recipe);
        forgets += call.case.decay.iter().flat_map(|decay| &decay.data).filter(|decay| decay.is_infinite()).count();
        has_slopes(&call, &reference, 1e-7, usize::MAX).map_err(|error| error.context(format!("{:?}", call.recipe)))?;
    }
    assert!(forgets > 0, "no decay is -inf");
    Ok(())
}

/// Checks calls that have more tokens than one block of a kernel, with both results in the loss or one of them. Neither
/// threads nor other tracked inputs change a bit.
#[test]
fn gated_delta_rule_kernel_gradients_match_reference() -> Result<()> {
    let pools: Vec<_> = [1, 3].into_iter().map(pool).collect();
    for (n, recipe) in recipes([&[70, 70], &[64, 0, 65, 1]], [5, 7]).into_iter().enumerate() {
        for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::BF16, 2f64.powi(-7)), (DType::F16, 2f64.powi(-10))] {
            let call = Rule::of(Recipe { dtype, factor_dtype: DType::F32, ..recipe.clone() });
            let paths = call.recipe.paths(&Device::Cpu).into_iter().map(|path| (false, path)).collect::<Vec<_>>();
            for only in if n % 6 > 0 { &[None][..] } else { &[None, Some(0), Some(1)] } {
                let call = Rule { only: *only, ..call.clone() };
                let expected = backward(&call, &paths[0], |_| true)?;
                let check = |path: &(bool, DeltaOptions)| -> Result<()> {
                    are_near(&backward(&call, path, |_| true)?, &expected, |_, largest| tolerance * largest)?;
                    if n % 6 > 0 || only.is_some() {
                        return Ok(());
                    }
                    is_tracked_alone(&call, path, [0.0; 2])?;
                    is_the_same_in(&pools, &call, path, |_| true)
                };
                paths[1..].iter().try_for_each(|path| {
                    check(path).map_err(|error| error.context(format!("{only:?} of {:?} on {path:?}", call.recipe)))
                })?;
            }
        }
    }
    Ok(())
}
