//! Gradients of projections: those of Candle's operations in f64, whatever is tracked.

use std::ops::Range;

use super::case::{Case, Layout, OF_WEIGHTS, Product, TYPES, bits, products};
use super::followed::{ACTIVATIONS, STEPS, by_candle, followed};
use crate::*;

const INPUTS: usize = 37;
const OUTPUTS: usize = 51;

/// How far numbers of a dtype may be from those of f64, relative to the largest: the output and its gradient are
/// rounded once, as numbers of the weight's type where it is the shorter.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2e-2,
        DType::F16 => 3e-3,
        _ => 1e-5,
    }
}

/// Some columns of a product.
#[derive(Clone)]
pub struct Projection {
    pub case: Case,
    columns: Range<usize>,
}

impl Projection {
    /// All columns.
    pub fn of(case: Case) -> Self {
        Self { columns: 0..case.weight.dim(2), case }
    }
}

impl Operation for Projection {
    /// A tier, or Candle's own operations in f64.
    type Way = Option<Tier>;

    fn run(&self, tier: &Self::Way, leaf: Leaf) -> Result<Vec<Tensor>> {
        let types = if tier.is_some() { self.case.types } else { (DType::F64, DType::F64) };
        let ((weight, bias, xs), columns) = (self.case.tensors_of(types, leaf)?, self.columns.clone());
        let Some(tier) = *tier else {
            let (weight, mut dims) = (weight.narrow(0, columns.start, columns.len())?, xs.dims().to_vec());
            let ys = xs.reshape(((), self.case.xs.dim(3)))?.matmul(&weight.t()?)?;
            let ys = match bias {
                Some(bias) => ys.broadcast_add(&bias.narrow(0, columns.start, columns.len())?)?,
                None => ys,
            };
            dims[xs.rank() - 1] = columns.len();
            return Ok(vec![ys.reshape(dims)?]);
        };
        let linear = PackedLinear::with_tier(&weight, bias.as_ref(), Some(tier))?;
        let is_trained = weight.track_op() || bias.is_some_and(|bias| bias.track_op());
        assert_eq!(linear.is_packed(), !is_trained);
        let ys = linear.forward_columns(&xs, columns.clone())?;
        if is_trained {
            // Half precision under f32 is widened first, and then summed in the same order.
            let frozen = linear.freeze()?;
            assert!(frozen.is_packed() && bits(&ys) == bits(&frozen.forward_columns(&xs, columns)?), "{tier}");
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
        let (ys, outputs) = (self.case.expected().expect("tensors").ys, self.case.weight.dim(2));
        ys.chunks(outputs.max(1)).flat_map(|row| row[self.columns.clone()].to_vec()).collect()
    }
}

/// What is tracked: all three, or one alone beside weights that are plain, and so packed, and beside a plain input.
const TRACKED: [&[&str]; 4] = [&["xs", "weight", "bias"], &["xs"], &["weight"], &["bias"]];

/// Of all columns and of some, on every tier, of views of variables of every layout.
#[test]
fn whatever_is_tracked_has_the_gradient_of_f64() -> Result<()> {
    for (n, types) in TYPES.into_iter().enumerate() {
        // Of rows that repeat one, Candle adds up the gradients in half precision.
        let few = [1, 6, 7].into_iter().flat_map(|rows| Layout::ALL.map(|layout| (rows, layout)));
        let many = [Layout::Contiguous, Layout::HeadsTransposed, Layout::NarrowRows].map(|layout| (600, layout));
        for (m, (rows, layout)) in few.chain(many).enumerate() {
            let (rank, of_weight) = (1 + (n + m) % 4, OF_WEIGHTS[(n + m / 4) % 4]);
            let plain = Product::plain(types, rows, (INPUTS, OUTPUTS));
            let product = Product { rank, layout, of_weight, bias: true, ..plain };
            let columns = if m % 2 == 0 { 0..OUTPUTS } else { 8..42 };
            let call = Projection { columns, ..Projection::of(product.case()) };
            let expected = backward(&call, &None, |_| true)?;
            for (tier, tracked) in Tier::available().into_iter().flat_map(|tier| TRACKED.map(|names| (tier, names))) {
                let found = backward(&call, &Some(tier), |name| tracked.contains(&name))?;
                are_near(&found, &expected, |_, largest| tolerance(types.0) * largest)
                    .map_err(|error| error.context(format!("{tier}: {tracked:?} of {product:?}")))?;
            }
        }
    }
    Ok(())
}

/// Beside random ones a large one, whose rows and columns are all split.
#[test]
fn random_projections_keep_their_bits_in_pools_of_any_size() {
    let pools: Vec<_> = [1, 3, 7].into_iter().map(pool).collect();
    let check = |product: &Product, tracked: &[&str]| {
        let call = Projection::of(product.case());
        let own = |tier| is_the_same_in(&pools, &call, &Some(tier), |name| tracked.contains(&name));
        Tier::available().into_iter().try_for_each(own)
    };
    for_all(10, products(), |mut product| {
        (product.inputs, product.outputs) = (800 + product.inputs, 400 + product.outputs);
        product.rows = product.rows.min(9);
        check(&product, TRACKED[1])
    });
    for types in TYPES {
        check(&Product::plain(types, 500, (130, 200)), TRACKED[0]).expect("the same bits");
    }
}

/// An activation, a residual and a gate: of all that is tracked, over packed weights and over variables.
#[test]
fn what_follows_a_product_has_gradients() -> Result<()> {
    let [xs, residual, gate, up] = [(6, INPUTS), (6, OUTPUTS), (OUTPUTS, INPUTS), (OUTPUTS, INPUTS)].map(variable);
    let (xs, residual, gate, up) = (xs?, residual?, gate?, up?);
    for are_trained in [false, true] {
        let [gate, up] =
            [&gate, &up].map(|var| if are_trained { var.as_tensor().clone() } else { var.as_detached_tensor() });
        let [of_gate, of_up] = [&gate, &up].map(|weight| PackedLinear::new(weight, None));
        let linears = [&of_gate?, &of_up?];
        for activation in ACTIVATIONS {
            let found = followed(linears, activation, [&xs, &residual])?;
            let products = [xs.matmul(&gate.t()?)?, xs.matmul(&up.t()?)?];
            let expected = by_candle([&products[0], &products[1]], activation, &residual)?;
            for (n, what) in STEPS.into_iter().enumerate() {
                assert_near(&found[n], &expected[n], 1e-5, what);
                let (with_residual, with_up) = ([true, false, true, false][n], n == 3 && are_trained);
                let leaves = [(&*xs, true), (&*residual, with_residual), (&gate, are_trained), (&up, with_up)];
                let leaves: Vec<_> = leaves.into_iter().filter(|(_, is_used)| *is_used).map(|(leaf, _)| leaf).collect();
                for (found, expected) in gradients(&found[n], &leaves)?.iter().zip(&gradients(&expected[n], &leaves)?) {
                    assert_near(found, expected, 1e-4, &format!("{what}, {activation:?}, trained: {are_trained}"));
                }
            }
            let of_residual = &followed(linears, activation, [&xs.detach(), &residual])?[0];
            gradients(of_residual, &[&residual])?;
        }
    }
    Ok(())
}

#[test]
fn a_projection_follows_its_variables_and_a_frozen_one_does_not() -> Result<()> {
    let (gate, up, xs) = (variable((OUTPUTS, INPUTS))?, variable((OUTPUTS, INPUTS))?, random((4, INPUTS))?);
    let [of_gate, of_up] = [&gate, &up].map(|var| PackedLinear::new(var, None));
    let gated = PackedGatedLinear::new(of_gate?, of_up?, Activation::Silu)?;
    let tracked = PackedLinear::new(&gate, None)?.with_activation(Activation::Silu)?;
    let (frozen, frozen_gated) = (tracked.freeze()?, gated.freeze()?);
    assert_eq!(frozen.activation(), Some(Activation::Silu));
    let (before, before_gated) = (tracked.forward(&xs)?, gated.forward(&xs)?);
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

/// No rows, no inputs, no outputs; over variables and over packed weights.
#[test]
fn nothing_has_gradients_of_nothing() -> Result<()> {
    for (rows, inputs, outputs) in [(0, 3, 2), (2, 0, 3), (2, 3, 0)] {
        let [xs, weight, bias] = [&[rows, inputs][..], &[outputs, inputs], &[outputs]].map(variable);
        let (xs, weight, bias) = (xs?, weight?, bias?);
        let ys = PackedLinear::new(&weight, Some(&bias))?.forward(&xs)?;
        assert_eq!(ys.dims(), [rows, outputs]);
        let store = ys.sum_all()?.backward()?;
        for (var, expected) in [(&xs, 0.0), (&weight, 0.0), (&bias, rows as f64)] {
            let found = values(store.get(var).expect("a gradient"));
            assert_eq!(found, vec![expected; var.elem_count()], "{rows} {inputs} {outputs}");
        }
    }
    let packed = PackedLinear::new(&random((3, 4))?, None)?;
    for (rows, columns) in [(2, 1..1), (0, 0..3)] {
        let xs = variable((rows, 4))?;
        let store = packed.forward_columns(&xs, columns)?.sum_all()?.backward()?;
        assert_eq!(store.get(&xs).map(values), Some(vec![0.0; rows * 4]));
    }
    Ok(())
}
