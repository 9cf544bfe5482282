//! Norms between layers: outputs and gradients against PyTorch's (`pytorch.py`), and against f64 for every kind of
//! input.

mod modules;

use crate::precision::errors;
use crate::*;

const EPS: f64 = 1e-5;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Rms,
    PlusOne,
    Layer,
    LayerNoBias,
}

const KINDS: [Kind; 4] = [Kind::Rms, Kind::PlusOne, Kind::Layer, Kind::LayerNoBias];

/// A call of a norm.
#[derive(Debug, Clone)]
struct Norm {
    kind: Kind,
    xs: Array,
    weight: Array,
    bias: Array,
    /// In the loss, if they are given.
    factors: Option<Vec<f64>>,
}

impl Norm {
    /// Draws numbers, with a row of zeros at the end.
    fn drawn(kind: Kind, xs: Array) -> Self {
        let random = &mut Random::new(17);
        let width = xs.dim(xs.rank() - 1);
        let mut xs = xs.uniform(random, 2.0, DType::F32);
        xs.data.iter_mut().rev().take(width).for_each(|x| *x = 0.0);
        let [weight, bias] = [(); 2].map(|()| Array::new(&[width]).uniform(random, 2.0, DType::F32));
        Self { kind, xs, weight, bias, factors: None }
    }

    fn all(&self, dtypes: [DType; 2]) -> Result<Named> {
        backward(self, &dtypes, |_| true)
    }

    /// Compares with f64, relative to the largest number, or to 1.
    fn check(&self, dtypes: [DType; 2], tolerance: impl Fn(DType) -> f64) -> Result<()> {
        let rounded = |array: &Array, dtype| array.clone().rounded(dtype);
        let [xs, weight, bias] =
            [(&self.xs, 0), (&self.weight, 1), (&self.bias, 1)].map(|(x, n)| rounded(x, dtypes[n]));
        let call = Self { xs, weight, bias, ..self.clone() };
        let found = call.all(dtypes)?;
        let exact = call.all([DType::F64; 2])?;
        are_near(&found, &exact, |name, largest| tolerance(found[name].dtype()) * largest.max(1.0))
            .map_err(|error| error.context(format!("{:?} of {:?} in {dtypes:?}", self.kind, self.xs)))
    }
}

impl Operation for Norm {
    /// The dtypes of the inputs and of the weights.
    type Way = [DType; 2];

    fn run(&self, &[of_xs, of_weight]: &Self::Way, leaf: Leaf) -> Result<Vec<Tensor>> {
        let mut look = |name, array: &Array, dtype| array.look(&leaf(name, array.leaf(dtype, &Device::Cpu)?)?);
        let xs = look("xs", &self.xs, of_xs)?;
        let weight = look("weight", &self.weight, of_weight)?;
        let norm: Box<dyn Module> = match self.kind {
            Kind::Rms => Box::new(RmsNorm::new(weight, EPS)?),
            Kind::PlusOne => Box::new(RmsNorm::plus_one(weight, EPS)?),
            Kind::Layer => Box::new(LayerNorm::new(weight, look("bias", &self.bias, of_weight)?, EPS)?),
            Kind::LayerNoBias => Box::new(LayerNorm::new_no_bias(weight, EPS)?),
        };
        let ys = norm.forward(&xs)?;
        assert!(ys.is_contiguous() && ys.dtype() == xs.dtype(), "{:?}", self.kind);
        Ok(vec![ys])
    }

    fn factor(&self, n: usize) -> f64 {
        self.factors.as_ref().map_or_else(|| factor(n), |factors| factors[n])
    }
}

#[test]
fn norm_outputs_and_gradients_match_pytorch() -> Result<()> {
    let numbers = recorded_tensors("attention/norms/pytorch.safetensors")?;
    for width in [1, 7, 40] {
        let recorded = |name: &str| {
            let tensor = &numbers[&format!("{width}.{name}")];
            let mut entries = values(tensor).into_iter();
            Array::new(tensor.dims()).filled(|| entries.next().expect("a number for each entry"))
        };
        let xs = recorded("xs");
        let weight = recorded("weight");
        let bias = recorded("bias");
        let factors = Some(recorded("factors").data);
        for (kind, norm) in [(Kind::Rms, "rms"), (Kind::Layer, "layer"), (Kind::LayerNoBias, "layer_no_bias")] {
            let xs = xs.clone();
            let weight = weight.clone();
            let bias = bias.clone();
            let factors = factors.clone();
            let given = Norm { kind, xs, weight, bias, factors };
            let torchs = |dtype: &str, like: &Named| -> Result<Named> {
                let flat = &numbers[&format!("{norm}.{width}.{dtype}")];
                let mut start = 0;
                let part = |name: &str| {
                    let tensor = &like[name];
                    start += tensor.elem_count();
                    let own = flat.narrow(0, start - tensor.elem_count(), tensor.elem_count())?;
                    Ok((name.to_string(), own.reshape(tensor.shape())?))
                };
                let names = ["result 0", "xs", "weight", "bias"].into_iter().filter(|name| like.contains_key(*name));
                let parts = names.map(part).collect::<Result<_>>();
                assert_eq!(start, flat.elem_count(), "{norm}: as many numbers as PyTorch's");
                parts
            };
            let wide = given.all([DType::F64; 2])?;
            let exact = torchs("f64", &wide)?;
            are_near(&wide, &exact, |_, largest| 1e-12 * largest.max(1.0))?;
            for (dtype, name) in [(DType::F32, "f32"), (DType::BF16, "bf16"), (DType::F16, "f16")] {
                let ours = given.all([dtype; 2])?;
                let theirs = torchs(name, &ours)?;
                for (what, wanted) in &exact {
                    let [our_errors, their_errors] =
                        [&ours, &theirs].map(|found| errors(&found[what], &values(wanted)));
                    for (own, other) in our_errors.into_iter().zip(their_errors) {
                        let is_near = own <= 1.1 * other + 1e-5;
                        assert!(is_near, "{kind:?}, {width} wide, {name}, {what}: {own:e} beside {other:e}");
                    }
                }
            }
        }
    }
    Ok(())
}

/// Runs in f64, so that f64 is the reference of all other tests.
#[test]
fn rms_norm_plus_one_equals_rms_norm_of_weight_plus_one() -> Result<()> {
    let given = Norm::drawn(Kind::PlusOne, Array::new(&[3, 9]));
    let mut more = Norm { kind: Kind::Rms, ..given.clone() };
    more.weight.data.iter_mut().for_each(|weight| *weight += 1.0);
    let [found, expected] = [given, more].map(|norm| norm.all([DType::F64; 2]));
    are_near(&found?, &expected?, |_, largest| 1e-12 * largest.max(1.0))
}

/// Lists inputs of every rank, of widths around the lanes of a sum, for several tasks, empty ones, and views of any
/// strides.
fn inputs() -> Vec<Array> {
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
    use View::{Broadcast, Narrow, Transpose};
    let views: [(&[usize], &[View]); 6] = [
        (&[2, 5, 4, 8], &[Transpose(1, 2)]),
        (&[7, 5, 3], &[Transpose(0, 1), Transpose(1, 2)]),
        (&[4, 6], &[Transpose(0, 1)]),
        (&[3, 4, 10], &[Narrow { dim: 2, start: 2, len: 7 }, Narrow { dim: 1, start: 1, len: 2 }]),
        (&[1, 3, 5], &[Broadcast(vec![4, 3, 5])]),
        (&[2, 3, 2, 2, 6], &[Transpose(1, 3)]),
    ];
    let view = |(shape, steps): (&[usize], &[View])| steps.iter().cloned().fold(Array::new(shape), Array::view);
    shapes.into_iter().map(Array::new).chain(views.map(view)).collect()
}

#[test]
fn norm_outputs_and_gradients_match_f64() -> Result<()> {
    // A result is rounded once; Candle adds up the gradients of a broadcast in half precision.
    let tolerance = |dtype| match dtype {
        DType::BF16 => 1.0 / 64.0,
        DType::F16 => 1.0 / 512.0,
        _ => 5e-5,
    };
    for (xs, kind) in inputs().into_iter().flat_map(|xs| KINDS.map(|kind| (xs.clone(), kind))) {
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            Norm::drawn(kind, xs.clone()).check([dtype; 2], tolerance)?;
        }
    }
    Ok(())
}

/// Checks a weight in f32 with inputs in half precision, and the reverse.
#[test]
fn norm_weights_of_other_dtype_than_input_match_f64() -> Result<()> {
    for dtypes in [[DType::BF16, DType::F32], [DType::F16, DType::F32], [DType::F32, DType::BF16]] {
        let tolerance = |dtype| if dtype == DType::F32 { 1e-5 } else { 1.0 / 128.0 };
        KINDS.into_iter().try_for_each(|kind| Norm::drawn(kind, Array::new(&[3, 21])).check(dtypes, tolerance))?;
    }
    Ok(())
}

/// Checks means that are far from zero, where a difference of squares would lose all digits of the variance: it would
/// be off by about 50, and the mean by 0.001.
#[test]
fn layer_norm_of_large_mean_keeps_precision() -> Result<()> {
    [Kind::Layer, Kind::LayerNoBias].into_iter().try_for_each(|kind| {
        let mut norm = Norm::drawn(kind, Array::new(&[4, 24]));
        // Whole numbers are exact in f32.
        norm.xs.data.iter_mut().for_each(|x| *x = (*x * 10.0).round() + 30_000.0);
        norm.check([DType::F32; 2], |_| 1e-3)
    })
}

#[test]
fn norm_bits_do_not_depend_on_threads_or_tracking() -> Result<()> {
    let pools: Vec<_> = [1, 3, 8].into_iter().map(pool).collect();
    for (dtype, kind) in
        [DType::F32, DType::BF16, DType::F64].into_iter().flat_map(|dtype| KINDS.map(|kind| (dtype, kind)))
    {
        let norm = Norm::drawn(kind, Array::new(&[2, 200, 150]));
        is_tracked_alone(&norm, &[dtype; 2], [0.0; 2])?;
        is_the_same_in(&pools, &norm, &[dtype; 2], |_| true)?;
    }
    Ok(())
}
