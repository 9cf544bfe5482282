//! Norms between layers: outputs and gradients against PyTorch's (`pytorch.py`), and against f64 for every kind of
//! input.

mod modules;

use candle_attention::{LayerNorm, RmsNorm};
use candle_core::{D, DType, Device, Module, Result, Tensor, Var};

use crate::array::Random;
use crate::common::{bits, recorded_tensors, values};
use crate::threads::pool;

const CPU: Device = Device::Cpu;
const EPS: f64 = 1e-5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Rms,
    PlusOne,
    Layer,
    LayerNoBias,
}

const KINDS: [Kind; 4] = [Kind::Rms, Kind::PlusOne, Kind::Layer, Kind::LayerNoBias];

impl Kind {
    fn norm(self, [weight, bias]: [&Tensor; 2]) -> Result<Box<dyn Module>> {
        let weight = weight.clone();
        Ok(match self {
            Self::Rms => Box::new(RmsNorm::new(weight, EPS)?),
            Self::PlusOne => Box::new(RmsNorm::plus_one(weight, EPS)?),
            Self::Layer => Box::new(LayerNorm::new(weight, bias.clone(), EPS)?),
            Self::LayerNoBias => Box::new(LayerNorm::new_no_bias(weight, EPS)?),
        })
    }
}

type View = fn(&Tensor) -> Result<Tensor>;

const WHOLE: View = |xs| Ok(xs.clone());

/// xs, weight and bias, and the factors of the outputs in the loss.
#[derive(Clone)]
struct Given {
    leaves: [Tensor; 3],
    factors: Tensor,
}

impl Given {
    /// Drawn numbers, with a row of zeros at the end.
    fn drawn(shape: &[usize], view: View) -> Result<Self> {
        let mut random = Random::new(17);
        let mut draw = |shape: &[usize], zeros: usize| {
            let count = shape.iter().product::<usize>();
            let drawn = (0..count).map(|n| if n + zeros < count { random.between(-2.0, 2.0) as f32 } else { 0.0 });
            Tensor::from_vec(drawn.collect::<Vec<_>>(), shape, &CPU)
        };
        let xs = draw(shape, shape[shape.len() - 1])?;
        let seen = view(&xs)?;
        let width = [seen.dim(D::Minus1)?];
        Ok(Self { leaves: [xs, draw(&width, 0)?, draw(&width, 0)?], factors: draw(seen.dims(), 0)? })
    }

    fn to_dtype(&self, dtype: DType) -> Result<Self> {
        let [xs, weight, bias] = self.leaves.each_ref().map(|leaf| leaf.to_dtype(dtype));
        Ok(Self { leaves: [xs?, weight?, bias?], factors: self.factors.to_dtype(dtype)? })
    }

    /// The outputs, and the gradients of those of xs, weight and bias that are variables; a norm without a bias has
    /// two.
    fn run(&self, kind: Kind, view: View, are_vars: [bool; 3]) -> Result<Vec<Tensor>> {
        let mut given = self.clone();
        for (leaf, is_var) in given.leaves.iter_mut().zip(are_vars) {
            if is_var {
                *leaf = Var::from_tensor(leaf)?.into_inner();
            }
        }
        let [xs, weight, bias] = &given.leaves;
        let ys = kind.norm([weight, bias])?.forward(&view(xs)?)?;
        assert!(ys.is_contiguous() && ys.dtype() == xs.dtype(), "{kind:?}");
        let mut tensors = vec![ys.detach()];
        if are_vars == [false; 3] {
            return Ok(tensors);
        }
        let store = (&ys * &given.factors)?.sum_all()?.backward()?;
        let used = if kind == Kind::Layer { 3 } else { 2 };
        for (n, leaf) in given.leaves.iter().enumerate().take(used).filter(|(n, _)| are_vars[*n]) {
            let gradient = match store.get(leaf) {
                // Candle's operations on nothing are left out of its graphs.
                None if ys.elem_count() == 0 => leaf.zeros_like()?,
                gradient => gradient.unwrap_or_else(|| panic!("{kind:?}: leaf {n} has no gradient")).clone(),
            };
            assert_eq!((gradient.dims(), gradient.dtype()), (leaf.dims(), leaf.dtype()), "{kind:?}: leaf {n}");
            tensors.push(gradient);
        }
        Ok(tensors)
    }
}

/// The largest difference, and the root of the mean square.
fn errors(got: &Tensor, exact: &Tensor) -> [f64; 2] {
    let differences: Vec<f64> = values(got).iter().zip(values(exact)).map(|(a, b)| (a - b).abs()).collect();
    assert!(differences.iter().all(|x| x.is_finite()) && got.elem_count() == exact.elem_count());
    let squares = differences.iter().map(|x| x * x).sum::<f64>();
    [differences.iter().copied().fold(0.0, f64::max), (squares / differences.len().max(1) as f64).sqrt()]
}

/// Equal but for a part of the largest number, or of 1.
#[track_caller]
fn assert_like(got: &Tensor, exact: &Tensor, tolerance: f64, what: &str) {
    assert_eq!(got.dims(), exact.dims(), "{what}");
    let largest = values(exact).into_iter().fold(1.0, |most: f64, number| most.max(number.abs()));
    let [error, _] = errors(got, exact);
    assert!(error <= tolerance * largest, "{what}: off by {error:e} where the largest is {largest}");
}

#[test]
fn outputs_and_gradients_are_those_of_pytorch() -> Result<()> {
    let numbers = recorded_tensors("attention/norms/pytorch.safetensors")?;
    for width in [1, 7, 40] {
        let own = |name: &str| numbers[&format!("{width}.{name}")].clone();
        let given = Given { leaves: [own("xs"), own("weight"), own("bias")], factors: own("factors") };
        for (kind, name) in [(Kind::Rms, "rms"), (Kind::Layer, "layer"), (Kind::LayerNoBias, "layer_no_bias")] {
            let run = |dtype| given.to_dtype(dtype)?.run(kind, WHOLE, [true; 3]);
            let torchs = |dtype: &str, like: &[Tensor]| {
                let (flat, mut start) = (&numbers[&format!("{name}.{width}.{dtype}")], 0);
                let part = |tensor: &Tensor| {
                    start += tensor.elem_count();
                    flat.narrow(0, start - tensor.elem_count(), tensor.elem_count())?.reshape(tensor.shape())
                };
                let parts = like.iter().map(part).collect::<Result<Vec<_>>>();
                assert_eq!(start, flat.elem_count(), "{name}: as many numbers as PyTorch's");
                parts
            };
            let what = |dtype: &str, n: usize| format!("{name}, {width} wide, {dtype}, {n}");
            let ours = run(DType::F64)?;
            let exact = torchs("f64", &ours)?;
            for (n, (ours, exact)) in ours.iter().zip(&exact).enumerate() {
                assert_like(ours, exact, 1e-12, &what("f64", n));
            }
            for (dtype, name) in [(DType::F32, "f32"), (DType::BF16, "bf16"), (DType::F16, "f16")] {
                let ours = run(dtype)?;
                for (n, ((ours, theirs), exact)) in ours.iter().zip(torchs(name, &ours)?).zip(&exact).enumerate() {
                    for (own, theirs) in errors(ours, exact).into_iter().zip(errors(&theirs, exact)) {
                        assert!(own <= 1.1 * theirs + 1e-5, "{}: {own:e} beside {theirs:e}", what(name, n));
                    }
                }
            }
        }
    }
    Ok(())
}

/// In f64, so that all else may be held to f64.
#[test]
fn a_weight_of_plus_one_is_a_weight_and_one() -> Result<()> {
    let given = Given::drawn(&[3, 9], WHOLE)?.to_dtype(DType::F64)?;
    let mut more = given.clone();
    more.leaves[1] = (&more.leaves[1] + 1.0)?;
    let found = given.run(Kind::PlusOne, WHOLE, [true; 3])?;
    for (found, expected) in found.iter().zip(&more.run(Kind::Rms, WHOLE, [true; 3])?) {
        assert_like(found, expected, 1e-12, "1 + weight");
    }
    Ok(())
}

/// Shapes of every rank, widths around the lanes of a sum, several tasks, nothing at all, and views of any strides.
fn inputs() -> Vec<(Vec<usize>, View)> {
    let shapes: [&[usize]; 14] = [
        &[5],
        &[3, 16],
        &[2, 3, 17],
        &[2, 3, 4, 33],
        &[2, 2, 2, 3, 9],
        &[1, 1, 40, 700],
        &[0],
        &[0, 5],
        &[3, 0],
        &[2, 0, 4],
        &[2, 3, 0],
        &[4, 1],
        &[300, 64],
        &[90, 576],
    ];
    let views: [(&[usize], View); 6] = [
        (&[2, 5, 4, 8], |xs| xs.transpose(1, 2)),
        (&[7, 5, 3], |xs| xs.permute((1, 2, 0))),
        (&[4, 6], |xs| xs.t()),
        (&[3, 4, 10], |xs| xs.narrow(2, 2, 7)?.narrow(1, 1, 2)),
        (&[1, 3, 5], |xs| xs.broadcast_as((4, 3, 5))),
        (&[2, 3, 2, 2, 6], |xs| xs.transpose(1, 3)),
    ];
    let inputs = shapes.map(|shape| (shape, WHOLE)).into_iter().chain(views);
    inputs.map(|(shape, view)| (shape.to_vec(), view)).collect()
}

fn assert_those_of_f64(given: &Given, kind: Kind, view: View, tolerance: impl Fn(DType) -> f64) -> Result<()> {
    let exact = given.to_dtype(DType::F64)?.run(kind, view, [true; 3])?;
    for (n, (found, exact)) in given.run(kind, view, [true; 3])?.iter().zip(&exact).enumerate() {
        let what = format!("{kind:?}, {:?}, {:?}: {n}", given.leaves[0], given.leaves[1].dtype());
        assert_like(found, exact, tolerance(found.dtype()), &what);
    }
    Ok(())
}

#[test]
fn any_input_has_the_outputs_and_gradients_of_f64() -> Result<()> {
    // A result is rounded once; Candle adds up the gradients of a broadcast in half precision.
    let tolerance = |dtype| match dtype {
        DType::BF16 => 1.0 / 64.0,
        DType::F16 => 1.0 / 512.0,
        _ => 5e-5,
    };
    for ((shape, view), kind) in inputs().into_iter().flat_map(|input| KINDS.map(|kind| (input.clone(), kind))) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            assert_those_of_f64(&Given::drawn(&shape, view)?.to_dtype(dtype)?, kind, view, tolerance)?;
        }
    }
    Ok(())
}

/// A weight in f32 beside inputs in half precision, and the other way round.
#[test]
fn weights_of_another_precision_are_read_as_they_are() -> Result<()> {
    for (of_xs, of_weight) in [(DType::BF16, DType::F32), (DType::F16, DType::F32), (DType::F32, DType::BF16)] {
        let (mut given, weights) = (Given::drawn(&[3, 21], WHOLE)?.to_dtype(of_xs)?, Given::drawn(&[3, 21], WHOLE)?);
        let [_, weight, bias] = weights.to_dtype(of_weight)?.leaves;
        given.leaves = [given.leaves[0].clone(), weight, bias];
        let tolerance = |dtype| if dtype == DType::F32 { 1e-5 } else { 1.0 / 128.0 };
        KINDS.into_iter().try_for_each(|kind| assert_those_of_f64(&given, kind, WHOLE, tolerance))?;
    }
    Ok(())
}

/// Where a mean is far from zero, a difference of squares keeps no digit of the variance: it is off by about 50, and
/// the mean by 0.001.
#[test]
fn a_layer_norm_keeps_its_digits_beside_a_large_mean() -> Result<()> {
    let mut given = Given::drawn(&[4, 24], WHOLE)?;
    // Whole numbers are exact in f32.
    given.leaves[0] = ((&given.leaves[0] * 10.0)?.round()? + 30_000.0)?;
    [Kind::Layer, Kind::LayerNoBias].into_iter().try_for_each(|kind| assert_those_of_f64(&given, kind, WHOLE, |_| 1e-3))
}

/// Nothing that is tracked alone loses its gradient, tracking changes no output, and the bits are the same for any
/// number of threads.
#[test]
fn tracking_and_threads_change_no_bit() -> Result<()> {
    for (dtype, kind) in
        [DType::F32, DType::BF16, DType::F64].into_iter().flat_map(|dtype| KINDS.map(|kind| (dtype, kind)))
    {
        let given = Given::drawn(&[2, 350, 200], WHOLE)?.to_dtype(dtype)?;
        let run = |are_vars| -> Result<Vec<_>> { Ok(given.run(kind, WHOLE, are_vars)?.iter().map(bits).collect()) };
        let all = run([true; 3])?;
        assert!(run([false; 3])?[0] == all[0], "{kind:?}, {dtype:?}");
        for (leaf, expected) in all[1..].iter().enumerate() {
            let alone = run([0, 1, 2].map(|n| n == leaf))?;
            assert!(alone[1] == *expected && alone[0] == all[0], "{kind:?}, {dtype:?}: leaf {leaf}");
        }
        for threads in [1, 2, 3, 8] {
            assert!(pool(threads).install(|| run([true; 3]))? == all, "{kind:?}, {dtype:?}: {threads} threads");
        }
    }
    Ok(())
}
