//! Every parameter of a layer gets a gradient, and it is the right one.

use std::collections::HashMap;

use candle_attention::{
    AttentionInput, AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig as Config, QkNorm, QkNormKind,
    QkNormScope,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::by_hand::{Input, Parameters, forward, parameters, tensors};
use crate::call::attention_mask;
use crate::common::{assert_close, values};
use crate::layer::{configs, input, is_self};
use crate::oracle::{Lens, Mask, Part};
use crate::recipe::dtypes;

const STEP: f64 = 1e-5;
const TOLERANCE: f64 = 1e-6;
const SIZES: [usize; 3] = [2, 4, 4];

/// A factor for each output, so that the gradient differs in every entry.
fn factor(n: usize) -> f64 {
    ((n as f64 + 1.0) * 1.7).sin()
}

fn loss(cfg: &Config, parameters: &Parameters, input: &Input) -> f64 {
    forward(cfg, parameters, input).ys.into_iter().enumerate().map(|(n, y)| factor(n) * y).sum()
}

fn loss_of(ys: &Tensor) -> Result<Tensor> {
    let factors: Vec<f64> = (0..ys.elem_count()).map(factor).collect();
    Tensor::from_vec(factors, ys.shape(), &Device::Cpu)?
        .to_dtype(ys.dtype())?
        .to_device(ys.device())?
        .mul(ys)?
        .sum_all()
}

/// The first sequence is padded, and its first query sees nothing.
fn padding() -> Vec<Mask> {
    let lens = Lens::PerQuery(vec![vec![0, 2, 3, 3], vec![4; 4]]);
    vec![Mask::of(Part::ValidLens(lens))]
}

/// Backward through a layer whose parameters and inputs are variables.
fn gradients(cfg: &Config, input: &Input) -> Result<HashMap<String, (Vec<f64>, Tensor)>> {
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F64, &Device::Cpu);
    let layer = MultiHeadAttention::new(cfg, vb)?;
    let mut vars: HashMap<String, Var> = varmap.data().lock().expect("one thread").clone();
    let numbers = tensors(&parameters(cfg, 3), DType::F64, &Device::Cpu)?;
    assert_eq!(vars.len(), numbers.len(), "the layer asks for the parameters that the config names");
    for (name, var) in &vars {
        var.set(&numbers[name])?;
    }
    let [t_q, t_kv] = [SIZES[1], SIZES[2]];
    let mut leaf = |name: &str, tensor: Tensor| -> Result<Tensor> {
        let var = Var::from_tensor(&tensor)?;
        vars.insert(name.into(), var.clone());
        Ok(var.into_inner())
    };
    let xs = leaf("queries", input.queries.tensor(DType::F64, &Device::Cpu)?)?;
    let mask = attention_mask(&input.mask, &Device::Cpu, |_, _, bias| bias.tensor(DType::F64, &Device::Cpu))?;
    let ys = if is_self(cfg, t_q, t_kv) {
        layer.forward_with(AttentionInput::new(&xs).with_mask(&mask))?
    } else {
        let keys = leaf("keys", input.keys.tensor(DType::F64, &Device::Cpu)?)?;
        let values = leaf("values", input.values.tensor(DType::F64, &Device::Cpu)?)?;
        layer.forward_with(AttentionInput::new(&xs).with_key_value(&keys, &values).with_mask(&mask))?
    };
    let store = loss_of(&ys)?.backward()?;
    vars.into_iter()
        .map(|(name, var)| {
            let gradient = store.get(&var).unwrap_or_else(|| panic!("{name} has no gradient"));
            assert_eq!(gradient.dims(), var.dims(), "{name}");
            Ok((name, (values(gradient), var.as_tensor().clone())))
        })
        .collect()
}

#[test]
fn every_parameter_and_input_has_the_gradient_of_plain_loops() {
    let mut probes = 0;
    for (name, cfg) in configs() {
        for masks in [vec![], padding()] {
            let input = input(&cfg, SIZES, masks);
            let parameters = parameters(&cfg, 3);
            for (which, (gradient, _)) in gradients(&cfg, &input).expect("backward runs") {
                assert!(gradient.iter().all(|entry| entry.is_finite()), "{name}, {which}: {gradient:?}");
                let count = gradient.len();
                for n in [0, count / 3, count / 2, count - 1] {
                    let loss_at = |step: f64| {
                        let (mut parameters, mut input) = (parameters.clone(), input.clone());
                        match which.as_str() {
                            "queries" => {
                                input.queries.data[n] += step;
                                if is_self(&cfg, SIZES[1], SIZES[2]) {
                                    (input.keys, input.values) = (input.queries.clone(), input.queries.clone());
                                }
                            }
                            "keys" => input.keys.data[n] += step,
                            "values" => input.values.data[n] += step,
                            _ => parameters.get_mut(&which).expect("a parameter").data[n] += step,
                        }
                        loss(&cfg, &parameters, &input)
                    };
                    let difference = (loss_at(STEP) - loss_at(-STEP)) / (2.0 * STEP);
                    let most = TOLERANCE * (1.0 + difference.abs());
                    assert!(
                        (gradient[n] - difference).abs() <= most,
                        "{name}: the gradient of {which}, entry {n} is {}, expected {difference}",
                        gradient[n]
                    );
                    probes += 1;
                }
            }
        }
    }
    assert!(probes > 1000, "{probes}");
}

/// In every dtype that trains, not only in that of the differences. A bias of keys alone moves all scores of a query
/// together, so its gradient is zero there but for rounding.
#[test]
fn every_parameter_gets_a_gradient_in_every_dtype() {
    for &dtype in dtypes(&Device::Cpu) {
        for (name, cfg) in configs() {
            let run = || -> Result<()> {
                let varmap = VarMap::new();
                let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&varmap, dtype, &Device::Cpu))?;
                let input = input(&cfg, SIZES, vec![]);
                let [xs, keys, vs] =
                    [&input.queries, &input.keys, &input.values].map(|x| x.tensor(dtype, &Device::Cpu));
                let (xs, keys, vs) = (xs?, keys?, vs?);
                let ys = layer.forward_with(AttentionInput::new(&xs).with_key_value(&keys, &vs))?;
                let store = loss_of(&ys)?.backward()?;
                for (parameter, var) in varmap.data().lock().expect("one thread").iter() {
                    let gradient = store.get(var).unwrap_or_else(|| panic!("{name}: {parameter} in {dtype:?}"));
                    let gradient = values(gradient);
                    let some = gradient.iter().any(|&entry| entry != 0.0) || parameter == "k_proj.bias";
                    assert!(some && gradient.iter().all(|entry| entry.is_finite()), "{name}: {parameter} in {dtype:?}");
                }
                Ok(())
            };
            run().unwrap_or_else(|error| panic!("{name} in {dtype:?}: {error}"));
        }
    }
}

/// Where one tensor alone is trained, it still gets its gradient: no fused step swallows it.
#[test]
fn a_parameter_that_is_trained_alone_gets_its_gradient() -> Result<()> {
    for dtype in [DType::F64, DType::F32] {
        for (name, cfg) in configs() {
            let frozen = tensors(&parameters(&cfg, 3), dtype, &Device::Cpu)?;
            let input = input(&cfg, SIZES, vec![]);
            let [xs, keys, vs] = [&input.queries, &input.keys, &input.values].map(|x| x.tensor(dtype, &Device::Cpu));
            let (xs, keys, vs) = (xs?, keys?, vs?);
            let call = || AttentionInput::new(&xs).with_key_value(&keys, &vs);
            let build =
                |parameters| MultiHeadAttention::new(&cfg, VarBuilder::from_tensors(parameters, dtype, &Device::Cpu));
            let plain = build(frozen.clone())?.forward_with(call())?;
            for parameter in frozen.keys() {
                let var = Var::from_tensor(&frozen[parameter])?;
                let mut trained = frozen.clone();
                trained.insert(parameter.clone(), var.as_tensor().clone());
                let ys = build(trained)?.forward_with(call())?;
                let close = if dtype == DType::F64 { 1e-13 } else { 1e-5 };
                assert_close(&ys, &plain, close, "what is tracked takes the same values");
                let store = loss_of(&ys)?.backward()?;
                assert!(store.get(&var).is_some(), "{name}: {parameter} alone in {dtype:?}");
            }
        }
    }
    Ok(())
}

/// A bias that the call gives is trained through the layer, a learned key beside it or not.
#[test]
fn the_bias_of_a_call_gets_its_gradient() -> Result<()> {
    for bias_kv in [false, true] {
        let cfg = Config::new(12, 4).with_causal(true).with_bias_kv(bias_kv);
        let layer = crate::layer::layer(&cfg, DType::F64, &Device::Cpu)?;
        let xs = input(&cfg, SIZES, vec![]).queries.tensor(DType::F64, &Device::Cpu)?;
        let bias = Var::rand(-1f64, 1.0, (4, 4), &Device::Cpu)?;
        let loss_at = |bias: &Tensor| {
            let mask = AttentionMask::none().with_bias(bias);
            loss_of(&layer.forward_with(AttentionInput::new(&xs).with_mask(&mask))?)
        };
        let store = loss_at(&bias)?.backward()?;
        let gradient = values(store.get(&bias).expect("the bias has a gradient"));
        for (n, &entry) in gradient.iter().enumerate() {
            let mut step = vec![0.0; 16];
            step[n] = STEP;
            let step = Tensor::from_vec(step, (4, 4), &Device::Cpu)?;
            let forward = values(&loss_at(&(bias.as_tensor() + &step)?)?)[0];
            let backward = values(&loss_at(&(bias.as_tensor() - &step)?)?)[0];
            let difference = (forward - backward) / (2.0 * STEP);
            assert!((entry - difference).abs() <= TOLERANCE, "entry {n}: {entry}, expected {difference}");
            let hidden = n % 4 > n / 4;
            assert_eq!(entry == 0.0, hidden || (n == 0 && !bias_kv), "entry {n}: {entry}");
        }
    }
    Ok(())
}

/// The tracked norm is Candle's operations, the other a fused one: the same numbers in every dtype, to within a few units
/// in the last place of the largest.
#[test]
fn norms_give_the_same_numbers_tracked_and_not() -> Result<()> {
    for kind in [QkNormKind::Rms, QkNormKind::RmsPlusOne, QkNormKind::Layer, QkNormKind::LayerNoBias] {
        for scope in [QkNormScope::PerHead, QkNormScope::PerHeadWeights, QkNormScope::Projection] {
            let cfg = Config::new(24, 4).with_qk_norm(QkNorm { kind, scope, eps: 1e-5 });
            for (dtype, digit) in
                [(DType::F32, 2f64.powi(-20)), (DType::F16, 2f64.powi(-10)), (DType::BF16, 2f64.powi(-7))]
            {
                let layer = crate::layer::layer(&cfg, dtype, &Device::Cpu)?;
                let xs = Tensor::rand(-1f32, 1.0, (2, 5, 24), &Device::Cpu)?.to_dtype(dtype)?;
                let tracked = Var::from_tensor(&xs)?;
                let ys = layer.forward_with(&xs)?;
                let largest = values(&ys).into_iter().map(f64::abs).fold(0.0, f64::max);
                let what = format!("{kind:?} {scope:?} in {dtype:?}");
                assert_close(&layer.forward_with(tracked.as_tensor())?, &ys, 2.0 * digit * largest, &what);
            }
        }
    }
    Ok(())
}
