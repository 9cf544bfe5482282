//! Decays above 0 and scales far from 1, which overflow in the products of the fused kernel: `Auto` computes the
//! numbers of the recurrence, and `Fused` returns an error that names the bound.

use super::case::{Decay, Recipe, Rule};
use crate::*;

/// Returns a case of one head with one value for every decay.
fn with_decay(kind: Decay, decay: f64, tokens: usize, has_state: bool) -> Rule {
    let plain = Recipe::plain(vec![tokens], [1, 1, 1], [4, 3]);
    let mut rule =
        Rule::of(Recipe { decay: Some(kind), has_state, dtype: DType::F32, factor_dtype: DType::F32, ..plain });
    rule.case.decay.as_mut().expect("a decay").data.fill(decay);
    rule
}

fn with_scale(scale: f64, dtype: DType) -> Rule {
    let plain = Recipe::plain(vec![20], [2, 1, 2], [4, 3]);
    Rule::of(Recipe { scale: Some(scale), qk_norm: Some(1e-6), dtype, factor_dtype: DType::F32, ..plain })
}

/// Checks that `Auto` has the numbers and the gradients of the oracle's recurrence and of f64.
fn matches_recurrence(rule: &Rule) -> Result<()> {
    let recipe = &rule.recipe;
    let expected = rule.case.recur();
    let auto = DeltaOptions::default();
    recipe.check(&rule.case, &expected, &CPU, &auto).map_err(|error| error.context(format!("{recipe:?}")))?;
    let reference = backward(rule, &(true, auto.clone().with_backend(Backend::Reference)), |_| true)?;
    let tolerance = if recipe.dtype == DType::F32 { 1e-4 } else { 2f64.powi(-7) };
    are_near(&backward(rule, &(false, auto), |_| true)?, &reference, |_, largest| tolerance * largest)
        .map_err(|error| error.context(format!("gradients of {recipe:?}")))
}

/// Checks that the error of `Fused` names the bound, on each instruction set.
fn fused_names_bound(rule: &Rule, name: &str) -> Result<()> {
    for instruction_set in InstructionSet::available() {
        let fused = (false, DeltaOptions::default().with_backend(Backend::Fused).with_instruction_set(instruction_set));
        let error = error_text(rule.run(&fused, &mut |_, tensor| Ok(tensor)));
        assert!(
            error.starts_with("[gated_delta_rule] no fused path: ") && error.contains(name),
            "{instruction_set}: {error}"
        );
    }
    Ok(())
}

#[test]
fn gated_delta_rule_with_large_decays_above_zero_matches_recurrence() -> Result<()> {
    for kind in [Decay::PerHead, Decay::PerChannel] {
        for (decay, tokens) in [(23.0, 4), (5.6, 16), (40.0, 2), (3.0, 20)] {
            // From a state that is not 0, the recurrence overflows too if the decays add up to more than 80.
            for has_state in if decay * (tokens as f64) <= 80.0 { &[false, true][..] } else { &[false] } {
                let rule = with_decay(kind, decay, tokens, *has_state);
                matches_recurrence(&rule)?;
                fused_names_bound(&rule, "decay")?;
            }
        }
    }
    Ok(())
}

/// Checks the largest decay that the fused kernel accepts, at each token of a block and of the next block.
#[test]
fn gated_delta_rule_with_decays_up_to_bound_runs_fused() -> Result<()> {
    for kind in [Decay::PerHead, Decay::PerChannel] {
        for at in [0, 17, 63, 64, 69] {
            let mut rule = with_decay(kind, -0.5, 70, true);
            let decays = &mut rule.case.decay.as_mut().expect("a decay").data;
            let place = at * decays.len() / 70;
            decays[place] = 2.5;
            matches_recurrence(&rule)?;
            for instruction_set in InstructionSet::available() {
                let fused = DeltaOptions::default().with_backend(Backend::Fused).with_instruction_set(instruction_set);
                rule.recipe.check(&rule.case, &rule.case.recur(), &CPU, &fused)?;
            }
            rule.case.decay.as_mut().expect("a decay").data[place] = 2.5 + 1e-6;
            fused_names_bound(&rule, "decay is 2.500001, expected at most 2.5")?;
        }
        // The products of 16 factors are e^40.
        let largest = with_decay(kind, 2.5, 20, true);
        matches_recurrence(&largest)?;
        for instruction_set in InstructionSet::available() {
            let fused = DeltaOptions::default().with_backend(Backend::Fused).with_instruction_set(instruction_set);
            largest.recipe.check(&largest.case, &largest.case.recur(), &CPU, &fused)?;
        }
    }
    Ok(())
}

#[test]
fn gated_delta_rule_with_extreme_scale_and_norm_matches_recurrence() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        for scale in [2e19, -2e19, 1e-23, 1e-15, 1e15] {
            let rule = with_scale(scale, dtype);
            matches_recurrence(&rule)?;
            if ![1e-15, 1e15].contains(&scale) {
                fused_names_bound(&rule, "scale")?;
            }
        }
    }
    Ok(())
}

/// Checks a scale of 0, through which no gradient of queries passes.
#[test]
fn gated_delta_rule_with_scale_zero_matches_recurrence() -> Result<()> {
    matches_recurrence(&with_scale(0.0, DType::F32))
}
