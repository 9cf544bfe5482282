//! Gradients of projections, compared with gradients of Candle's operations in f64, with any tracked operands.

use std::ops::Range;

use super::case::{self, ACTIVATIONS, Case, Layout, OF_WEIGHTS, Product, TYPES, Then, bits, products};
use crate::*;

const INPUTS: usize = 37;
const OUTPUTS: usize = 51;

/// Returns the tolerance of a dtype, relative to the largest number: the output and its gradient are rounded once, to
/// the weight's type if that is shorter.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2e-2,
        DType::F16 => 3e-3,
        _ => 1e-5,
    }
}

/// Some columns of a product, and what follows it.
#[derive(Clone)]
pub struct Projection {
    pub case: Case,
    pub columns: Range<usize>,
}

impl Projection {
    /// Returns the projection with all columns.
    pub fn of(case: Case) -> Self {
        Self { columns: 0..case.weight.dim(2), case }
    }
}

impl Operation for Projection {
    /// An instruction set, or Candle's own operations in f64.
    type Way = Option<InstructionSet>;

    fn run(&self, instruction_set: &Self::Way, leaf: Leaf) -> Result<Vec<Tensor>> {
        let types = if instruction_set.is_some() { self.case.types } else { (DType::F64, DType::F64) };
        let case::Tensors { weight, bias, xs, residual, up } = self.case.tensors_of(types, leaf)?;
        let columns = self.columns.clone();
        let activation = self.case.then.activation();
        let Some(instruction_set) = *instruction_set else {
            let rows: usize = xs.dims()[..xs.rank() - 1].iter().product();
            let product = |factor: &Tensor, addend: Option<&Tensor>| {
                let own = |all: &Tensor| all.narrow(0, columns.start, columns.len());
                let ys = xs.reshape((rows, self.case.xs.dim(3)))?.matmul(&own(factor)?.t()?)?;
                let ys = addend.map_or(Ok(ys.clone()), |addend| ys.broadcast_add(&own(addend)?))?;
                ys.reshape([&xs.dims()[..xs.rank() - 1], &[columns.len()]].concat())
            };
            let ys = product(&weight, bias.as_ref())?;
            let ys = activation.map_or(Ok(ys.clone()), |activation| activation.forward(&ys))?;
            let ys = up.map_or(Ok(ys.clone()), |up| ys * product(&up, bias.as_ref())?)?;
            return Ok(vec![residual.map_or(Ok(ys.clone()), |residual| ys + residual)?]);
        };
        let linear = PackedLinear::with_instruction_set(&weight, bias.as_ref(), Some(instruction_set))?;
        let is_trained = weight.track_op() || bias.as_ref().is_some_and(Tensor::track_op);
        assert_eq!(linear.is_packed(), !is_trained);
        let ys = match (activation, residual, up) {
            (Some(activation), _, Some(up)) => {
                let up = PackedLinear::with_instruction_set(&up, bias.as_ref(), Some(instruction_set))?;
                PackedGatedLinear::new(linear.clone(), up, activation)?.forward(&xs)?
            }
            (Some(activation), Some(residual), _) => {
                linear.clone().with_activation(activation)?.forward_with_residual(&xs, &residual)?
            }
            (Some(activation), ..) => {
                linear.clone().with_activation(activation)?.forward_columns(&xs, columns.clone())?
            }
            (None, Some(residual), _) => linear.forward_with_residual(&xs, &residual)?,
            (None, ..) => linear.forward_columns(&xs, columns.clone())?,
        };
        if is_trained && self.case.then == Then::Nothing {
            // Half precision under f32 is widened first, and then summed in the same order.
            let frozen = linear.freeze()?;
            assert!(
                frozen.is_packed() && bits(&ys) == bits(&frozen.forward_columns(&xs, columns)?),
                "{instruction_set}"
            );
        }
        Ok(vec![ys])
    }
}

impl Exact for Projection {
    fn buffers(&mut self) -> Vec<(String, &mut Vec<f64>)> {
        let Case { weight, bias, xs, .. } = &mut self.case;
        let all = [("weight", Some(weight)), ("bias", bias.as_mut()), ("xs", Some(xs))];
        all.into_iter().filter_map(|(name, array)| Some((name.to_string(), &mut array?.data))).collect()
    }

    fn exact(&self) -> Vec<f64> {
        let ys = self.case.expected().expect("tensors").ys;
        let outputs = self.case.weight.dim(2);
        ys.chunks(outputs.max(1)).flat_map(|row| row[self.columns.clone()].to_vec()).collect()
    }
}

/// Checks products of all columns and of some, on every instruction set, with views of variables of every layout, and
/// with empty sizes. All operands are tracked, or one alone with plain weights, which are packed, and with a plain
/// input.
#[test]
fn linear_gradients_match_f64() -> Result<()> {
    for (n, types) in TYPES.into_iter().enumerate() {
        // Of rows that repeat one, Candle adds up the gradients in half precision.
        let few = [1, 6, 7].into_iter().flat_map(|rows| Layout::ALL.map(|layout| (rows, layout, INPUTS, OUTPUTS)));
        let many = [Layout::Contiguous, Layout::HeadsTransposed, Layout::NarrowRows];
        let many = many.map(|layout| (600, layout, INPUTS, OUTPUTS));
        let none = [(0, 3, 2), (2, 4, 2), (2, 3, 0), (2, 0, 3)]
            .map(|(rows, inputs, outputs)| (rows, many[0].1, inputs, outputs));
        for (m, (rows, layout, inputs, outputs)) in few.chain(many).chain(none).enumerate() {
            let rank = 1 + (n + m) % 4;
            let of_weight = OF_WEIGHTS[(n + m / 4) % 4];
            let own = ACTIVATIONS[(n + m / 3) % ACTIVATIONS.len()];
            let follows = [Then::Residual, Then::Activation(own), Then::Both(own), Then::Gate(own)];
            let then = if m % 3 == 0 { follows[m / 3 % 4] } else { Then::Nothing };
            let plain = Product::plain(types, rows, (inputs, outputs));
            let product = Product { rank, layout, of_weight, then, bias: true, ..plain };
            let columns =
                if m % 2 == 0 || then != Then::Nothing { 0..outputs } else { outputs.div_ceil(6)..outputs * 5 / 6 };
            let call = Projection { columns, ..Projection::of(product.case()) };
            let expected = backward(&call, &None, |_| true)?;
            // Candle's own activations, which have the gradients, round after each of their steps.
            let most = tolerance(types.0) * if then.activation().is_some() { 2.0 } else { 1.0 };
            let alone = expected.keys().filter(|name| !name.starts_with("result ")).map(Some);
            for (instruction_set, only) in alone.chain([None]).flat_map(|only| {
                InstructionSet::available().into_iter().map(move |instruction_set| (instruction_set, only))
            }) {
                let found = backward(&call, &Some(instruction_set), |name| only.is_none_or(|only| only == name))?;
                are_near(&found, &expected, |_, largest| most * largest)
                    .map_err(|error| error.context(format!("{instruction_set}: {only:?} of {product:?}")))?;
            }
        }
    }
    Ok(())
}

/// Checks random products, and a large one whose rows and columns are both split.
#[test]
fn linear_bits_do_not_depend_on_threads() {
    let pools: Vec<_> = [1, 3, 7].into_iter().map(pool).collect();
    let check = |product: &Product, only: Option<&str>| {
        let call = Projection::of(product.case());
        let own = |instruction_set| {
            is_the_same_in(&pools, &call, &Some(instruction_set), |name| only.is_none_or(|only| only == name))
        };
        InstructionSet::available().into_iter().try_for_each(own)
    };
    for_all(10, products(), |mut product| {
        product.inputs += 800;
        product.outputs += 400;
        product.rows = product.rows.min(9);
        check(&product, Some("xs"))
    });
    for types in TYPES {
        check(&Product::plain(types, 500, (130, 200)), None).expect("the same bits");
    }
}

#[test]
fn linear_follows_its_variables_until_frozen() -> Result<()> {
    let gate = variable((OUTPUTS, INPUTS))?;
    let up = variable((OUTPUTS, INPUTS))?;
    let xs = random((4, INPUTS))?;
    let [of_gate, of_up] = [&gate, &up].map(|var| PackedLinear::new(var, None));
    let gated = PackedGatedLinear::new(of_gate?, of_up?, Activation::Silu)?;
    let tracked = PackedLinear::new(&gate, None)?.with_activation(Activation::Silu)?;
    let frozen = tracked.freeze()?;
    let frozen_gated = gated.freeze()?;
    assert_eq!(frozen.activation(), Some(Activation::Silu));
    let before = tracked.forward(&xs)?;
    let before_gated = gated.forward(&xs)?;
    gate.set(&random((OUTPUTS, INPUTS))?)?;
    let activated = xs.matmul(&gate.t()?)?.silu()?;
    for (found, expected, what) in [
        (tracked.forward(&xs)?, &activated, "after a step"),
        (gated.forward(&xs)?, &(&activated * xs.matmul(&up.t()?)?)?, "gated, after a step"),
        (frozen.forward(&xs)?, &before, "frozen before it"),
        (frozen_gated.forward(&xs)?, &before_gated, "gated, frozen before it"),
    ] {
        assert_near(&found, expected, 1e-5, what);
    }
    assert!(!frozen.forward(&xs)?.track_op() && !frozen_gated.forward(&xs)?.track_op());
    assert_eq!(bits(&frozen.freeze()?.forward(&xs)?), bits(&frozen.forward(&xs)?), "frozen twice");
    Ok(())
}
