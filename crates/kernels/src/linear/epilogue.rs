//! The operations that follow the sums of a product while they are in a cache.

use super::operands::Right;
use super::weight::PackedWeight;
use crate::cpu::{Vector, erfc, sigmoid};
use crate::error::{Error, check_len};

/// The operations that follow the sums of a product: `activation(sums + bias) · (up · xs + up's bias) + residual`, each
/// of them if it is given. They are computed in f32, and the result is rounded once.
#[derive(Clone, Copy, Debug)]
pub struct Epilogue<'a, X> {
    /// A bias for each output of the weight.
    pub bias: Option<&'a [f32]>,
    /// A function of each sum with its bias.
    pub activation: Option<Activation>,
    /// A second product of the same rows.
    pub up: Option<Up<'a>>,
    /// Numbers that are added to the result, (rows, columns).
    pub residual: Option<&'a [X]>,
}

/// The second product of a gated product.
#[derive(Clone, Copy, Debug)]
pub struct Up<'a> {
    /// A weight with the shape, element and instruction set of the first one.
    pub weight: &'a PackedWeight,
    /// A bias for each output of the weight.
    pub bias: Option<&'a [f32]>,
}

impl<X> Default for Epilogue<'_, X> {
    fn default() -> Self {
        Self { bias: None, activation: None, up: None, residual: None }
    }
}

impl<X> Epilogue<'_, X> {
    /// Checks the sizes against the right operand and the `count` elements of the result.
    pub(super) fn check(&self, right: &Right<X>, count: usize) -> Result<(), Error> {
        let columns = right.all_columns();
        if let Some(bias) = self.bias {
            check_len("bias", bias.len(), columns)?;
        }
        if let Some(Up { weight: up, bias }) = self.up {
            let Right::Weight { weight, .. } = right else {
                return Err(Error::Shape("expected a packed weight together with that of the up product".into()));
            };
            if !up.is_like(weight) {
                return Err(Error::Shape(format!("expected the up product's weight to be {weight:?}, found {up:?}")));
            }
            if let Some(bias) = bias {
                check_len("the up product's bias", bias.len(), columns)?;
            }
        }
        if let Some(residual) = self.residual {
            check_len("residual", residual.len(), count)?;
        }
        Ok(())
    }
}

/// A function of each output, with the largest error on any instruction set. NaN stays NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `x / 2 · (1 + erf(x / √2))`, to 3e-7 of `|x|`; NaN for -inf, as `-inf · 0`.
    Gelu,
    /// `x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³)))`, to 5e-7 of `|x|`; NaN for -inf.
    GeluTanh,
    /// `x / (1 + exp(-x))`, to 3e-7 of `|x|`; NaN for -inf.
    Silu,
    /// The larger of x and 0.
    Relu,
}

impl Activation {
    /// Computes the function of each lane.
    ///
    /// # Safety
    /// As [`Vector`].
    #[inline(always)]
    pub(crate) unsafe fn apply<V: Vector>(self, x: V) -> V {
        use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};
        // SAFETY: the processor has the instruction set of V, by this method's contract.
        unsafe {
            match self {
                Self::Gelu => x.mul(V::splat(0.5)).mul(erfc(x.mul(V::splat(-FRAC_1_SQRT_2)))),
                // (1 + tanh u) / 2 = sigmoid(2 u), and 2 √(2/π) = √2 · 2/√π.
                Self::GeluTanh => {
                    const TWICE: f32 = std::f32::consts::SQRT_2 * FRAC_2_SQRT_PI;
                    let factor = x.mul(x).mul_add(V::splat(TWICE * 0.044715), V::splat(TWICE));
                    x.mul(sigmoid(x.mul(factor)))
                }
                Self::Silu => x.mul(sigmoid(x)),
                Self::Relu => V::splat(0.0).max(x),
            }
        }
    }
}
