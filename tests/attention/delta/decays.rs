//! Gradients with decays of any strength: the kernels' against the reference path's in f64.

use std::collections::HashMap;

use super::case::{Decay, Recipe, Rule};
use crate::*;

/// The decays of the tokens of a case.
#[derive(Debug, Clone, Copy)]
enum Strengths {
    /// All are near one number.
    Near(f64),
    Any,
    /// One of ten is strong.
    FewStrong,
}

impl Strengths {
    fn draw(self, random: &mut Random) -> f64 {
        let decay = match self {
            Self::Near(decay) => decay * random.between(0.8, 1.0),
            Self::Any => random.between(-100.0, 0.0),
            Self::FewStrong if random.chance(0.1) => random.between(-100.0, -10.0),
            Self::FewStrong => random.between(-0.2, 0.0),
        };
        round(decay, DType::F32)
    }
}

/// Returns a case of one head.
fn with_strengths(strengths: Strengths, decay: Decay, has_beta: bool, seed: u64) -> Rule {
    let random = &mut Random::new(seed);
    let tokens = [3, 16, 33, 70][random.up_to(3)];
    let plain = Recipe::plain(vec![tokens], [1, 1, 1], [24, 9]);
    let recipe = Recipe { decay: Some(decay), has_beta, dtype: DType::F32, factor_dtype: DType::F32, seed, ..plain };
    let mut rule = Rule::of(recipe);
    rule.case.decay.as_mut().expect("a decay").data.fill_with(|| strengths.draw(random));
    rule
}

/// Checks the gradients of decays. The error of each is at most 1e-4 of the largest of the head, and of the largest
/// gradient of a factor times the own factor, which a strong decay among weak ones has to itself.
fn decay_gradients_are_near(decays: &[f64], found: &Tensor, expected: &Tensor) -> Result<()> {
    let numbers = values(expected);
    let factors: Vec<f64> = decays.iter().map(|decay| decay.exp()).collect();
    let largest = numbers.iter().fold(0f64, |so_far, x| so_far.max(x.abs()));
    let of_factors = numbers.iter().zip(&factors).fold(0f64, |so_far, (x, factor)| so_far.max((x / factor).abs()));
    compare("decay", found, (expected.dims(), DType::F32), &numbers, |n| {
        1e-4 * largest.min(of_factors * factors[n]) + SMALLEST
    })
}

/// The numbers below this one are not exact in f32, which has 2^-126 as its least normal number.
const SMALLEST: f64 = 1e-36;

#[test]
fn gated_delta_rule_gradients_with_decays_of_any_strength_match_f64() -> Result<()> {
    let near = [-0.1, -1.0, -10.0, -16.0, -21.0, -40.0, -80.0, -100.0].map(Strengths::Near);
    let all: Vec<_> = near.into_iter().chain([Strengths::Any, Strengths::FewStrong, Strengths::FewStrong]).collect();
    for seed in 0..4 * all.len() as u64 {
        let strengths = all[seed as usize % all.len()];
        let decay = if seed % 2 == 0 { Decay::PerHead } else { Decay::PerChannel };
        let rule = with_strengths(strengths, decay, seed % 3 > 0, seed);
        let expected = backward(&rule, &(true, DeltaOptions::default().with_backend(Backend::Reference)), |_| true)?;
        for path in &rule.recipe.paths(&CPU)[1..] {
            let mut found = backward(&rule, &(false, path.clone()), |_| true)?;
            let of_decays = found.remove("decay").expect("the gradient of decays");
            let decays = &rule.case.decay.as_ref().expect("a decay").data;
            let outcome = decay_gradients_are_near(decays, &of_decays, &expected["decay"])
                .and_then(|()| are_near(&found, &expected, |_, largest| 2e-5 * largest + SMALLEST));
            outcome.map_err(|error| error.context(format!("{strengths:?}, {:?} on {path:?}", rule.recipe)))?;
        }
    }
    Ok(())
}

/// Returns the gradients of `A_log` of a layer, one for each head, with decays of about -1, -8, -17 and -34 a token.
fn gradients_of_rates(dtype: DType) -> Result<Vec<f64>> {
    let cfg = GatedDeltaNetConfig::new(8, 4).with_num_key_heads(2).with_key_head_dim(12).with_value_head_dim(6);
    let net = GatedDeltaNet::new(&cfg, TorchSeed::new(5).var_builder(DType::F32, &CPU))?;
    let mut tensors: HashMap<_, _> = net.state_dict(DeltaLayout::Qwen3_5)?.into_iter().collect();
    tensors.insert("A_log".to_string(), Tensor::new(&[0.5f32, 4.0, 8.0, 16.0], &CPU)?.log()?);
    tensors.insert("dt_bias".to_string(), Tensor::new(&[2f32; 4], &CPU)?);
    let rates = Var::from_tensor(&tensors["A_log"].to_dtype(dtype)?)?;
    let wide = |(name, tensor): (String, Tensor)| Ok((name, tensor.to_dtype(dtype)?));
    let mut weights = tensors.into_iter().map(wide).collect::<Result<HashMap<_, _>>>()?;
    weights.insert("A_log".to_string(), rates.as_tensor().clone());
    let trained = GatedDeltaNet::load(&cfg, DeltaLayout::Qwen3_5, VarBuilder::from_tensors(weights, dtype, &CPU))?;
    let random = &mut Random::new(1);
    let xs = Array::new(&[1, 1, 40, 8]).filled(|| round(random.between(-1.0, 1.0), DType::F32));
    let xs = xs.tensor(dtype, &CPU)?.squeeze(0)?;
    let gradients = trained.forward(&xs)?.sum_all()?.backward()?;
    Ok(values(gradients.get(&rates).expect("the gradient of A_log")))
}

#[test]
fn gated_delta_net_gradients_of_a_log_with_strong_decays_match_f64() -> Result<()> {
    let exact = gradients_of_rates(DType::F64)?;
    for (head, (found, expected)) in gradients_of_rates(DType::F32)?.into_iter().zip(exact).enumerate() {
        assert!((found - expected).abs() <= 1e-4 * expected.abs(), "head {head}: {found}, expected {expected}");
    }
    Ok(())
}
