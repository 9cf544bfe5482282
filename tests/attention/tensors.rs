//! Tensors that several tests draw, and their gradients.

use std::collections::HashMap;

use candle_core::Shape;

use crate::*;

pub use crate::call::CPU;

pub type Tensors = HashMap<String, Tensor>;

/// Draws normally distributed numbers in f32.
pub fn random(shape: impl Into<Shape>) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, &CPU)
}

pub fn variable(shape: impl Into<Shape>) -> Result<Var> {
    Var::from_tensor(&random(shape)?)
}

pub fn builder(tensors: Tensors) -> VarBuilder<'static> {
    VarBuilder::from_tensors(tensors, DType::F32, &CPU)
}

/// Returns the variables of a map by name.
pub fn named(variables: &VarMap) -> HashMap<String, Var> {
    variables.data().lock().expect("one thread").clone()
}

/// Returns the gradients of a sum in which each entry of `ys` has a different factor.
#[track_caller]
pub fn gradients(ys: &Tensor, of: &[&Tensor]) -> Result<Vec<Tensor>> {
    let factors = (Tensor::arange(0f32, ys.elem_count() as f32, ys.device())? * 0.37)?.sin()?;
    let store = (ys * factors.reshape(ys.dims())?.to_dtype(ys.dtype())?)?.sum_all()?.backward()?;
    let gradient = |x: &&Tensor| {
        let gradient = store.get(x).unwrap_or_else(|| panic!("{:?} has no gradient", x.dims()));
        assert_eq!((gradient.dims(), gradient.dtype()), (x.dims(), x.dtype()), "the gradient's shape and dtype");
        gradient.clone()
    };
    Ok(of.iter().map(gradient).collect())
}
