//! Every parameter of a layer gets a gradient, and it is the right one.

use std::collections::HashMap;

use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig as Config};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

use crate::array::{Array, Random};
use crate::by_hand::{Input, Parameters, forward, parameters};
use crate::call::attention_mask;
use crate::common::{assert_close, values};
use crate::layer::{configs, input, is_self};
use crate::oracle::{Lens, Mask, Part};
use crate::recipe::dtypes;
use crate::tensors::{CPU, named};

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
    Tensor::from_vec(factors, ys.shape(), &CPU)?.to_dtype(ys.dtype())?.mul(ys)?.sum_all()
}

/// Lengths under which the first sequence is padded and its first query sees nothing, and a bias.
fn padding_and_bias() -> Vec<Mask> {
    let mut random = Random::new(29);
    let bias = Array::new(&[4, 4]).filled(|| random.between(-1.0, 1.0));
    vec![Mask::of(Part::ValidLens(Lens::PerQuery(vec![vec![0, 2, 3, 3], vec![4; 4]]))), Mask::of(Part::Bias(bias))]
}

/// How keys and values come to a layer.
#[derive(Clone, Copy)]
enum Through {
    Call,
    Memory,
}

/// The outputs of a layer of which some parameters and inputs are variables, and the gradients of these.
fn backward(
    cfg: &Config,
    input: &Input,
    dtype: DType,
    through: Through,
    tracked: impl Fn(&str) -> bool,
) -> Result<(Tensor, HashMap<String, Tensor>)> {
    let mut vars = HashMap::new();
    let mut leaf = |name: &str, tensor: Tensor| -> Result<Tensor> {
        if !tracked(name) {
            return Ok(tensor);
        }
        let var = Var::from_tensor(&tensor)?;
        vars.insert(name.to_string(), var.clone());
        Ok(var.into_inner())
    };
    let parameters = parameters(cfg, 3).into_iter();
    let parameters = parameters.map(|(name, numbers)| Ok((name.clone(), leaf(&name, numbers.tensor(dtype, &CPU)?)?)));
    let vb = VarBuilder::from_tensors(parameters.collect::<Result<_>>()?, dtype, &CPU);
    let layer = MultiHeadAttention::new(cfg, vb)?;
    let xs = leaf("queries", input.queries.tensor(dtype, &CPU)?)?;
    let mask = attention_mask(&input.mask, &CPU, |_, _, bias| leaf("bias", bias.tensor(dtype, &CPU)?))?;
    let call = AttentionInput::new(&xs).with_mask(&mask);
    let is_self = is_self(cfg, SIZES[1], SIZES[2]);
    let (keys, vs) = match is_self {
        true => (xs.clone(), xs.clone()),
        false => (leaf("keys", input.keys.tensor(dtype, &CPU)?)?, leaf("values", input.values.tensor(dtype, &CPU)?)?),
    };
    let ys = match through {
        Through::Memory => layer.forward_with(call.with_memory(&layer.project_memory(&keys, &vs)?))?,
        Through::Call if is_self => layer.forward_with(call)?,
        Through::Call => layer.forward_with(call.with_key_value(&keys, &vs))?,
    };
    if vars.is_empty() {
        return Ok((ys, HashMap::new()));
    }
    let store = loss_of(&ys)?.backward()?;
    let gradient = |(name, var): (String, Var)| {
        let gradient = store.get(&var).unwrap_or_else(|| panic!("{name} has no gradient")).clone();
        assert_eq!(gradient.dims(), var.dims(), "{name}");
        (name, gradient)
    };
    Ok((ys, vars.into_iter().map(gradient).collect()))
}

#[test]
fn every_parameter_and_input_has_the_gradient_of_plain_loops() {
    let mut probes = 0;
    for (name, cfg) in configs() {
        for masks in [vec![], padding_and_bias()] {
            let input = input(&cfg, SIZES, masks);
            let parameters = parameters(&cfg, 3);
            let [gradients, of_memory] = [Through::Call, Through::Memory]
                .map(|through| backward(&cfg, &input, DType::F64, through, |_| true).expect("backward runs").1);
            for (which, gradient) in gradients {
                assert_close(&of_memory[&which], &gradient, 1e-9, &format!("{name}, {which} through a memory"));
                let gradient = values(&gradient);
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
                            "bias" => {
                                let Part::Bias(bias) = &mut input.mask[1].parts[0] else { panic!("no bias") };
                                bias.data[n] += step;
                            }
                            _ => parameters.get_mut(&which).expect("a parameter").data[n] += step,
                        }
                        loss(&cfg, &parameters, &input)
                    };
                    let difference = (loss_at(STEP) - loss_at(-STEP)) / (2.0 * STEP);
                    let close = (gradient[n] - difference).abs() <= TOLERANCE * (1.0 + difference.abs());
                    assert!(close, "{name}: {which}, entry {n} is {}, expected {difference}", gradient[n]);
                    probes += 1;
                }
            }
        }
    }
    assert!(probes > 1000, "{probes}");
}

/// Where one tensor alone is tracked, the outputs stay as they are and it still gets its gradient: no fused step, and
/// no product for q, k and v at once, swallows it.
#[test]
fn what_is_tracked_alone_gets_the_same_gradient() -> Result<()> {
    for (dtype, tolerance) in [(DType::F64, 1e-11), (DType::F32, 2e-4)] {
        for (name, cfg) in configs() {
            let input = input(&cfg, SIZES, padding_and_bias());
            let (plain, _) = backward(&cfg, &input, dtype, Through::Call, |_| false)?;
            for (which, expected) in backward(&cfg, &input, dtype, Through::Call, |_| true)?.1 {
                let (ys, gradients) = backward(&cfg, &input, dtype, Through::Call, |name| name == which)?;
                let what = format!("{name}: {which} alone in {dtype:?}");
                assert_close(&ys, &plain, if dtype == DType::F64 { 1e-13 } else { 1e-5 }, &what);
                let most = values(&expected).into_iter().fold(1.0, |most: f64, entry| most.max(entry.abs()));
                assert_close(&gradients[&which], &expected, tolerance * most, &what);
            }
        }
    }
    Ok(())
}

/// In every dtype that trains, over the variables that a layer asks for. A bias of keys alone moves all scores of a
/// query together, so its gradient is zero there but for rounding.
#[test]
fn every_parameter_gets_a_gradient_in_every_dtype() -> Result<()> {
    for &dtype in dtypes(&CPU) {
        for (name, cfg) in configs() {
            let varmap = VarMap::new();
            let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&varmap, dtype, &CPU))?;
            let input = input(&cfg, SIZES, vec![]);
            let [xs, keys, vs] = [&input.queries, &input.keys, &input.values].map(|x| x.tensor(dtype, &CPU));
            let (xs, keys, vs) = (xs?, keys?, vs?);
            let ys = layer.forward_with(AttentionInput::new(&xs).with_key_value(&keys, &vs))?;
            let store = loss_of(&ys)?.backward()?;
            for (parameter, var) in named(&varmap) {
                let what = format!("{name}: {parameter} in {dtype:?}");
                let gradient = values(store.get(&var).unwrap_or_else(|| panic!("{what}")));
                let some = gradient.iter().any(|&entry| entry != 0.0) || parameter == "k_proj.bias";
                assert!(some && gradient.iter().all(|entry| entry.is_finite()), "{what}");
            }
        }
    }
    Ok(())
}
