//! Random calls on every path, against the oracle.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::case::{Recipe, recipes};
use crate::*;

crate::on_each_device!(gated_delta_rule_on_random_calls_matches_oracle);

fn dtypes(device: &Device) -> &'static [DType] {
    let all = &[DType::F32, DType::BF16, DType::F16, DType::F64];
    if device.is_metal() { &all[..3] } else { all }
}

/// Checks that the draws have each rule with each kind of decay in each dtype, dense and packed; calls without tokens,
/// with and without a state; and values of width 0.
fn gated_delta_rule_on_random_calls_matches_oracle(device: &Device) {
    let drawn = RefCell::new(BTreeSet::new());
    for_all(400, recipes(dtypes(device)), |recipe| {
        let Recipe { decay, has_beta, is_packed, dtype, .. } = &recipe;
        drawn.borrow_mut().insert(format!("{decay:?} {has_beta} {is_packed} {dtype:?}"));
        if recipe.lens.iter().all(|&len| len == 0) {
            drawn.borrow_mut().insert(format!("no tokens {is_packed} {}", recipe.has_state));
        } else if recipe.d_v == 0 {
            drawn.borrow_mut().insert(format!("no values {is_packed}"));
        }
        let case = recipe.case();
        let mut paths = recipe.paths(device);
        let expected = case.recur();
        // The reference path, and another each time.
        let others = paths.len() - 1;
        paths[1..].rotate_left(recipe.seed as usize % others);
        paths[..2].iter().try_for_each(|path| {
            let outcome = recipe.check(&case, &expected, device, path);
            outcome.map_err(|difference| difference.context(format!("{path:?}")))
        })
    });
    let expected = 3 * 2 * 2 * dtypes(device).len() + 4 + 2;
    let found = drawn.take().len();
    assert!(found == expected || std::env::var_os("PROPTEST_CASES").is_some(), "{found} of {expected} are drawn");
}
