//! Layers over variables learn.

use candle_attention::{
    AttentionCache, AttentionCacheConfig, AttentionInput, Backend, MultiHeadLatentAttention,
    MultiHeadLatentAttentionConfig as Config,
};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::array::Random;
use crate::common::{assert_close, max_error, values};
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
    let mut named = Vec::new();
    for (name, variable) in variables.data().lock().expect("no panic before").iter() {
        variable.set(&parameters[name].tensor(dtype, &CPU)?)?;
        named.push((name.clone(), variable.clone()));
    }
    assert_eq!(named.len(), parameters.len());
    Ok((layer, named))
}

#[test]
fn gradients_are_those_of_finite_differences() -> Result<()> {
    let (layer, variables) = trained(DType::F64)?;
    let random = &mut Random::new(32);
    let xs = draw(random, &[4, 5], DType::F64)?;
    let factors = draw(random, &[4, 5], DType::F64)?;
    let loss = || layer.forward(&xs)?.mul(&factors)?.sum_all();
    let gradients = loss()?.backward()?;
    for (name, variable) in &variables {
        let gradient = values(gradients.get(variable).unwrap_or_else(|| panic!("{name} has no gradient")));
        let before = values(variable);
        for i in [0, before.len() / 2, before.len() - 1] {
            let step = 1e-5;
            let at = |moved: f64| -> Result<f64> {
                let mut numbers = before.clone();
                numbers[i] += moved;
                variable.set(&Tensor::from_vec(numbers, variable.shape(), &CPU)?)?;
                loss()?.to_scalar::<f64>()
            };
            let expected = (at(step)? - at(-step)?) / (2.0 * step);
            at(0.0)?;
            assert!((gradient[i] - expected).abs() < 1e-7, "{name} at {i}: {}, not {expected}", gradient[i]);
        }
    }
    Ok(())
}

/// What a variable is set to shows in the next call, in either form.
#[test]
fn variables_are_read_in_every_call() -> Result<()> {
    let random = &mut Random::new(33);
    let (layer, variables) = trained(DType::F32)?;
    let xs = draw(random, &[4, 5], DType::F32)?;
    let detached = AttentionCacheConfig::new().with_detached(true);
    let decoded = || -> Result<Tensor> {
        let mut cache = AttentionCache::new(&detached)?;
        let tokens = (0..4).map(|i| xs.narrow(0, i, 1)).collect::<Result<Vec<_>>>()?;
        let ys = tokens.iter().map(|x| layer.forward_with(AttentionInput::new(x).with_cache(&mut cache)));
        Tensor::cat(&ys.collect::<Result<Vec<_>>>()?, 0)
    };
    let mut before = layer.forward(&xs)?;
    for (name, variable) in &variables {
        variable.set(&(variable.as_tensor() * 1.5)?)?;
        let after = layer.forward(&xs)?;
        assert!(max_error(&after, &before) > 1e-4, "{name}");
        assert_close(&decoded()?, &after, 1e-5, name);
        before = after;
    }
    Ok(())
}

/// Generation with a layer that is being trained does not leave the fused kernel, whichever form a call has.
#[test]
fn gradients_end_at_a_detached_cache() -> Result<()> {
    let (layer, _) = trained(DType::F32)?;
    let xs = draw(&mut Random::new(36), &[4, 5], DType::F32)?;
    let mut cache = AttentionCache::new(&AttentionCacheConfig::new().with_detached(true))?;
    for t in [4, 1, 1, 4] {
        let part = xs.narrow(0, 0, t)?;
        layer.forward_with(AttentionInput::new(&part).with_backend(Backend::Fused).with_cache(&mut cache))?;
    }
    assert_eq!(cache.lens(), [10]);
    Ok(())
}

/// Packed weights have no gradient of their own, and pass that of the input on.
#[test]
fn an_input_s_gradient_passes_through_plain_weights() -> Result<()> {
    let random = &mut Random::new(35);
    let (trained, _) = trained(DType::F32)?;
    let plain = layer(&config(), &parameters(&config(), &mut Random::new(31)), DType::F32, &CPU)?;
    let xs = Var::from_tensor(&draw(random, &[4, 5], DType::F32)?)?;
    let gradient = |layer: &MultiHeadLatentAttention| {
        let gradients = layer.forward(&xs)?.sqr()?.sum_all()?.backward()?;
        Ok::<_, candle_core::Error>(gradients.get(&xs).expect("the input is a variable").clone())
    };
    let expected = gradient(&trained)?;
    let largest = values(&expected).into_iter().map(f64::abs).fold(1.0, f64::max);
    assert_close(&gradient(&plain)?, &expected, 1e-5 * largest, "the input's gradient");
    Ok(())
}
