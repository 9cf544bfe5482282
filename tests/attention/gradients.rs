//! Gradients of the functions against central differences of the oracle, in f64; and against PyTorch's.

mod pytorch;

use candle_attention::{
    AttentionMask, SdpaOptions, merge_attention, scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse as with_lse, scaled_dot_product_attention_with_weights as with_weights,
};
use candle_core::{DType, Device, Result, Tensor, Var};
use proptest::prelude::*;

use crate::array::Random;
use crate::call::{Call, Leaf, Outcome};
use crate::common::values;
use crate::merge::{keep_columns, options};
use crate::oracle::{Attended, Case, Dims, Part};
use crate::recipe::{Recipe, for_all, recipes};

/// The step of a difference: its own error is about the square of this times a third derivative, and rounding adds the
/// last digit of the loss over the step. Both stay far below `TOLERANCE`.
const STEP: f64 = 1e-5;
const TOLERANCE: f64 = 1e-6;
/// Entries of one tensor that are held against differences; all of them are looked at for being finite.
const PROBES: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Function {
    Context,
    Weights,
    Lse,
    /// Of keys cut in three.
    Merged(usize, usize),
}

/// The loss is a sum of the results with these factors, so that its gradient differs in every entry.
struct Factors {
    context: Vec<f64>,
    weights: Vec<f64>,
    lse: Vec<f64>,
}

impl Factors {
    fn new(case: &Case, function: Function, seed: u64) -> Self {
        let Dims { b, h, t_q, t_kv, d_v, .. } = case.dims;
        let mut random = Random::new(seed);
        let mut draw = |used: bool, count: usize| -> Vec<f64> {
            (0..count).map(|_| if used { random.between(-1.0, 1.0) } else { 0.0 }).collect()
        };
        Self {
            context: draw(true, b * h * t_q * d_v),
            weights: draw(function == Function::Weights, b * h * t_q * t_kv),
            lse: draw(matches!(function, Function::Lse | Function::Merged(..)), b * h * t_q),
        }
    }

    /// A row that sees nothing has a log-sum-exp of -inf, which stays out of the loss.
    fn loss(&self, attended: &Attended) -> f64 {
        let dot =
            |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).filter(|(_, b)| b.is_finite()).map(|(a, b)| a * b).sum() };
        dot(&self.context, &attended.context) + dot(&self.weights, &attended.weights) + dot(&self.lse, &attended.lse)
    }

    fn loss_of(&self, context: &Tensor, weights: Option<&Tensor>, lse: Option<&Tensor>) -> Result<Tensor> {
        let dot = |factors: &[f64], tensor: &Tensor| {
            Tensor::from_slice(factors, tensor.shape(), tensor.device())?.mul(tensor)?.sum_all()
        };
        let mut loss = dot(&self.context, context)?;
        if let Some(weights) = weights {
            loss = (loss + dot(&self.weights, weights)?)?;
        }
        if let Some(lse) = lse {
            let finite = lse.detach().gt(f64::NEG_INFINITY)?.where_cond(lse, &lse.zeros_like()?)?;
            loss = (loss + dot(&self.lse, &finite)?)?;
        }
        Ok(loss)
    }
}

fn numbers(case: &mut Case, leaf: Leaf) -> &mut Vec<f64> {
    match leaf {
        Leaf::Q => &mut case.q.data,
        Leaf::K => &mut case.k.data,
        Leaf::V => &mut case.v.data,
        Leaf::Bias(mask, part) => match &mut case.masks[mask].parts[part] {
            Part::Bias(bias) => &mut bias.data,
            other => panic!("{other:?} is no bias"),
        },
        Leaf::Sinks => case.options.sinks.as_mut().expect("the case has sinks"),
        Leaf::Slopes => case.options.alibi_slopes.as_mut().expect("the case has slopes"),
    }
}

type Gradients = Vec<(Leaf, Vec<f64>)>;

/// Backward through the crate, with every input that can be tracked as a variable.
fn gradients(case: &Case, function: Function, factors: &Factors) -> Result<Gradients> {
    let mut leaves: Vec<(Leaf, Var)> = Vec::new();
    let arguments = Call::with_leaves(case, DType::F64, &Device::Cpu, &mut |which, tensor| {
        let var = Var::from_tensor(&tensor)?;
        leaves.push((which, var.clone()));
        Ok(var.as_tensor().clone())
    })?;
    let Call { q, k, v, mask, options } = &arguments;
    let loss = match function {
        Function::Context => factors.loss_of(&scaled_dot_product_attention(q, k, v, mask, options)?, None, None)?,
        Function::Weights => {
            let output = with_weights(q, k, v, mask, options)?;
            factors.loss_of(&output.context, Some(&output.weights), None)?
        }
        Function::Lse => {
            let (context, lse) = with_lse(q, k, v, mask, options)?;
            factors.loss_of(&context, None, Some(&lse))?
        }
        Function::Merged(first, second) => {
            let (context, lse) = merged(case, &arguments, &leaves, [first, second])?;
            factors.loss_of(&context, None, Some(&lse))?
        }
    };
    let store = loss.backward()?;
    let gradient = |(leaf, var): &(Leaf, Var)| {
        // No entry is a gradient of zero, which the differences have to confirm.
        let numbers = store.get(var).map_or_else(|| vec![0.0; var.elem_count()], values);
        (*leaf, numbers)
    };
    Ok(leaves.iter().map(gradient).collect())
}

fn merged(
    case: &Case,
    arguments: &Call,
    leaves: &[(Leaf, Var)],
    [first, second]: [usize; 2],
) -> Result<(Tensor, Tensor)> {
    let Dims { b, h, t_q, t_kv, .. } = case.dims;
    let ends = [0, first.min(second), first.max(second), t_kv].map(|end| end.min(t_kv));
    let part = |n: usize| {
        let (start, len) = (ends[n], ends[n + 1] - ends[n]);
        let keys: Vec<usize> = (start..start + len).collect();
        let mut mask = AttentionMask::none().with_keep(&keep_columns(case, &keys, &Device::Cpu)?);
        let mut options: SdpaOptions = options(case);
        for (leaf, var) in leaves {
            match leaf {
                Leaf::Bias(m, p) => {
                    let Part::Bias(array) = &case.masks[*m].parts[*p] else { continue };
                    let whole = array.look(var)?.broadcast_as((b, h, t_q, t_kv))?;
                    mask = mask.with_bias(&whole.narrow(3, start, len)?);
                }
                // In the part in the middle, which may have no keys.
                Leaf::Sinks if n == 1 => options = options.with_sinks(var),
                _ => {}
            }
        }
        let Call { q, k, v, .. } = arguments;
        with_lse(q, &k.narrow(2, start, len)?, &v.narrow(2, start, len)?, &mask, &options)
    };
    merge_attention(&(0..3).map(part).collect::<Result<Vec<_>>>()?)
}

fn check(case: &Case, function: Function, seed: u64) -> Outcome {
    let factors = Factors::new(case, function, seed);
    let gradients = gradients(case, function, &factors).map_err(|error| error.to_string())?;
    let mut random = Random::new(seed ^ 0xff);
    for (leaf, gradient) in gradients {
        if let Some(n) = gradient.iter().position(|entry| !entry.is_finite()) {
            return Err(format!("{leaf:?}: the gradient of entry {n} is {}", gradient[n]));
        }
        for probe in 0..gradient.len().min(PROBES) {
            let n = if gradient.len() <= PROBES { probe } else { random.up_to(gradient.len() - 1) };
            let mut moved = case.clone();
            let mut loss_at = |value: f64| {
                numbers(&mut moved, leaf)[n] = value;
                factors.loss(&moved.attend())
            };
            let value = numbers(&mut case.clone(), leaf)[n];
            let difference = (loss_at(value + STEP) - loss_at(value - STEP)) / (2.0 * STEP);
            // What has no part in the loss has a gradient of nothing but rounding.
            let most = if difference == 0.0 { 1e-9 } else { TOLERANCE * (1.0 + difference.abs()) };
            if (gradient[n] - difference).abs() > most || difference.is_nan() {
                return Err(format!("{leaf:?}: the gradient of entry {n} is {}, expected {difference}", gradient[n]));
            }
        }
    }
    Ok(())
}

fn functions() -> impl Strategy<Value = Function> {
    prop_oneof![
        Just(Function::Context),
        Just(Function::Weights),
        Just(Function::Lse),
        (0..9usize, 0..9usize).prop_map(|(first, second)| Function::Merged(first, second)),
    ]
}

#[test]
fn random_gradients_equal_differences() {
    for_all(400, (recipes(&[DType::F64]), functions()), |(mut recipe, function): (Recipe, Function)| {
        if let Function::Merged(..) = function {
            // Parts have distances of their own, and an empty row of a part is no empty row of the whole.
            recipe.chosen.alibi = false;
            recipe.uniform_empty_rows = false;
        }
        check(&recipe.case(), function, recipe.seed)
    });
}
