//! Layers over variables learn.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, Backend, MultiHeadLatentAttention,
    MultiHeadLatentAttentionConfig as Config,
};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::array::Random;
use crate::common::{assert_close, assert_near, max_error, values};
use crate::layers::{CPU, draw, layer, parameters};

fn config() -> Config {
    Config::new(5, 2)
        .with_q_lora_rank(4)
        .with_kv_lora_rank(6)
        .with_nope_head_dim(3)
        .with_rope_head_dim(2)
        .with_value_head_dim(3)
        .with_bias(true)
}

/// A layer over variables, and these by name.
fn trained(dtype: DType) -> Result<(MultiHeadLatentAttention, Vec<(String, Var)>)> {
    let variables = VarMap::new();
    let layer = MultiHeadLatentAttention::new(&config(), VarBuilder::from_varmap(&variables, dtype, &CPU))?;
    let parameters = parameters(&config(), &mut Random::new(31));
    let named: Vec<_> = variables.data().lock().expect("no panic before").clone().into_iter().collect();
    assert_eq!(named.len(), parameters.len());
    named.iter().try_for_each(|(name, variable)| variable.set(&parameters[name].tensor(dtype, &CPU)?))?;
    Ok((layer, named))
}

#[test]
fn gradients_are_those_of_finite_differences() -> Result<()> {
    let (layer, variables) = trained(DType::F64)?;
    let random = &mut Random::new(32);
    let (xs, factors) = (draw(random, &[4, 5], DType::F64)?, draw(random, &[4, 5], DType::F64)?);
    let loss = || layer.forward(&xs)?.mul(&factors)?.sum_all();
    let gradients = loss()?.backward()?;
    for (name, variable) in &variables {
        let gradient = values(gradients.get(variable).unwrap_or_else(|| panic!("{name} has no gradient")));
        let before = values(variable);
        for i in [0, before.len() / 2, before.len() - 1] {
            let at = |moved: f64| -> Result<f64> {
                let mut numbers = before.clone();
                numbers[i] += moved;
                variable.set(&Tensor::from_vec(numbers, variable.shape(), &CPU)?)?;
                loss()?.to_scalar::<f64>()
            };
            let expected = (at(1e-5)? - at(-1e-5)?) / 2e-5;
            at(0.0)?;
            assert!((gradient[i] - expected).abs() < 1e-7, "{name} at {i}: {}, not {expected}", gradient[i]);
        }
    }
    Ok(())
}

/// What a variable is set to shows in the next call, in either form. A detached cache, of which no gradient is asked,
/// leaves generation to the fused kernel, whichever form a call has.
#[test]
fn variables_are_read_in_every_call() -> Result<()> {
    let (layer, variables) = trained(DType::F32)?;
    let xs = draw(&mut Random::new(33), &[4, 5], DType::F32)?;
    let detached = AttentionCacheConfig::new().with_detached(true);
    let run = |cache: &mut AttentionCache, i: usize, t: usize| {
        let xs = xs.narrow(0, i, t)?;
        layer.forward_with(AttentionInput::new(&xs).with_backend(Backend::Fused).with_cache(cache))
    };
    let mut before = layer.forward(&xs)?;
    for (name, variable) in &variables {
        variable.set(&(variable.as_tensor() * 1.5)?)?;
        let after = layer.forward(&xs)?;
        assert!(max_error(&after, &before) > 1e-4, "{name}");
        let mut cache = AttentionCache::new(&detached)?;
        let decoded = (0..4).map(|i| run(&mut cache, i, 1)).collect::<Result<Vec<_>>>()?;
        assert_close(&Tensor::cat(&decoded, 0)?, &after, 1e-5, name);
        before = after;
    }
    let mut cache = AttentionCache::new(&detached)?;
    [4, 1, 1, 4].into_iter().try_for_each(|t| run(&mut cache, 0, t).map(drop))?;
    assert_eq!(cache.lens(), [10]);
    Ok(())
}

/// Packed weights have no gradient of their own, and pass that of the input on.
#[test]
fn an_input_s_gradient_passes_through_plain_weights() -> Result<()> {
    let (trained, _) = trained(DType::F32)?;
    let plain = layer(&config(), &parameters(&config(), &mut Random::new(31)), DType::F32, &CPU)?;
    let xs = Var::from_tensor(&draw(&mut Random::new(35), &[4, 5], DType::F32)?)?;
    let [expected, found] = [&trained, &plain].map(|layer| layer.forward(&xs)?.sqr()?.sum_all()?.backward());
    let (expected, found) = (expected?, found?);
    assert_near(found.get(&xs).expect("a gradient"), expected.get(&xs).expect("a gradient"), 1e-5, "the input's");
    Ok(())
}
