//! Whether a loss reaches every variable.

use std::sync::PoisonError;

use candle_core::backprop::GradStore;
use candle_nn::VarMap;

/// The names of the variables that a loss gave no gradient, in alphabetical order: those that training would leave as
/// they are, in silence. Call it once, after the first `loss.backward()`, and expect nothing.
///
/// A variable is among them where the loss does not depend on it, and where an operation on the way has no backward
/// pass: `candle_nn::rms_norm`, `layer_norm` with a bias, `softmax_last_dim` and `rope` have none, so that nothing
/// before them learns. [`RmsNorm`](crate::RmsNorm), [`LayerNorm`](crate::LayerNorm) and the attention of this crate
/// have one. A gradient of zeros is a gradient.
///
/// ```
/// use candle_attention::{rms_norm, untrained};
/// use candle_core::{DType, Device, Result, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap, linear_no_bias};
///
/// fn names(norm: impl Fn(VarBuilder) -> Result<Box<dyn Module>>) -> Result<Vec<String>> {
///     let vars = VarMap::new();
///     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
///     let below = linear_no_bias(8, 8, vb.pp("below"))?;
///     let norm = norm(vb.pp("norm"))?;
///     let loss = norm.forward(&below.forward(&Tensor::randn(0f32, 1., (2, 8), &Device::Cpu)?)?)?.sum_all()?;
///     Ok(untrained(&loss.backward()?, &vars))
/// }
///
/// # fn main() -> Result<()> {
/// assert_eq!(names(|vb| Ok(Box::new(candle_nn::rms_norm(8, 1e-6, vb)?)))?, ["below.weight", "norm.weight"]);
/// assert!(names(|vb| Ok(Box::new(rms_norm(8, 1e-6, vb)?)))?.is_empty());
/// # Ok(()) }
/// ```
pub fn untrained(gradients: &GradStore, vars: &VarMap) -> Vec<String> {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    let without = vars.iter().filter(|(_, var)| gradients.get(var.as_tensor()).is_none());
    let mut names: Vec<_> = without.map(|(name, _)| name.clone()).collect();
    names.sort();
    names
}
