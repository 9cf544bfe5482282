//! Random calls on every path, against the oracle.

use std::cell::RefCell;
use std::collections::BTreeSet;

use candle_core::{DType, Device, Result, Tensor};

use crate::case::{Call, Decay, Recipe, recipes};
use crate::common::property::for_all;
use crate::common::{assert_close, bits, values};

crate::on_each_device!(random_calls_give_the_oracles_numbers, a_call_is_as_good_as_its_halves,);

fn dtypes(device: &Device) -> &'static [DType] {
    let all = &[DType::F32, DType::BF16, DType::F16, DType::F64];
    if device.is_metal() { &all[..3] } else { all }
}

/// Each rule, with each kind of decay, in each dtype, dense and packed, is among the draws; so are calls without tokens
/// from a state and from none, and values without entries.
fn random_calls_give_the_oracles_numbers(device: &Device) {
    let drawn = RefCell::new(BTreeSet::new());
    for_all(400, recipes(dtypes(device)), |recipe| {
        let Recipe { decay, has_beta, is_packed, dtype, .. } = &recipe;
        drawn.borrow_mut().insert(format!("{decay:?} {has_beta} {is_packed} {dtype:?}"));
        if recipe.lens.iter().all(|&len| len == 0) {
            drawn.borrow_mut().insert(format!("no tokens {is_packed} {}", recipe.has_state));
        } else if recipe.d_v == 0 {
            drawn.borrow_mut().insert(format!("no values {is_packed}"));
        }
        let (case, mut paths) = (recipe.case(), recipe.paths(device));
        let expected = case.recur();
        // The reference path, and another each time.
        let others = paths.len() - 1;
        paths[1..].rotate_left(recipe.seed as usize % others);
        paths[..2].iter().try_for_each(|path| {
            let outcome = recipe.check(&case, &expected, device, path);
            outcome.map_err(|difference| format!("{path:?}: {difference}"))
        })
    });
    let (expected, found) = (3 * 2 * 2 * dtypes(device).len() + 4 + 2, drawn.take().len());
    assert!(found == expected || std::env::var_os("PROPTEST_CASES").is_some(), "{found} of {expected} are drawn");
}

/// From the state that the first half leaves, be it by single tokens.
fn a_call_is_as_good_as_its_halves(device: &Device) -> Result<()> {
    let recipe =
        Recipe { dtype: DType::F32, factor_dtype: DType::F32, ..Recipe::plain(vec![130; 2], [2, 2, 4], [16, 24]) };
    let whole = recipe.call(&recipe.case(), device)?;
    for path in recipe.paths(device) {
        let (y, state) = whole.run(&path)?;
        for at in [1, 64, 65, 129] {
            let part = |start: usize, len: usize, state: &Option<Tensor>| -> Result<_> {
                let mut part = whole.clone();
                part.state = None;
                for tensor in part.inputs() {
                    *tensor = tensor.narrow(2, start, len)?;
                }
                part.state = state.clone();
                part.run(&path)
            };
            let (first, between) = part(0, at, &whole.state)?;
            let (second, last) = part(at, 130 - at, &Some(between))?;
            assert_close(&Tensor::cat(&[first, second], 2)?, &y, 1e-5, "y");
            assert_close(&last, &state, 1e-5, "state");
        }
    }
    Ok(())
}

/// Factors of zero leave nothing of the state that a call is given.
#[test]
fn a_decay_of_negative_infinity_forgets() -> Result<()> {
    for decay in [Decay::PerHead, Decay::PerChannel] {
        let recipe = Recipe { decay: Some(decay), dtype: DType::F32, ..Recipe::plain(vec![9], [1, 1, 1], [3, 4]) };
        let whole = recipe.call(&recipe.case(), &Device::Cpu)?;
        let forgets = |decay: &Tensor| Tensor::full(f32::NEG_INFINITY, decay.shape(), decay.device());
        let whole = Call { decay: whole.decay.as_ref().map(forgets).transpose()?, ..whole };
        let fresh = Call { state: None, ..whole.clone() };
        for path in recipe.paths(&Device::Cpu) {
            let ((y, state), (fresh_y, fresh_state)) = (whole.run(&path)?, fresh.run(&path)?);
            assert_eq!((bits(&y), bits(&state)), (bits(&fresh_y), bits(&fresh_state)));
            assert!(values(&y).iter().all(|y| y.is_finite()));
        }
    }
    Ok(())
}
