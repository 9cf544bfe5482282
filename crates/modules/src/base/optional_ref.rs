//! References that a call may lack.

use std::sync::Arc;

use candle_core::{Tensor, Var};

/// The argument of a builder that takes a `&T`, or an `Option` of it for a call that may lack it: a mask, a tensor or
/// lengths.
///
/// Pointers to a `T`, variables for tensors, and vectors and arrays for slices are taken as
/// well, as a parameter of type `&T` would.
///
/// ```
/// use candle_attention::AttentionMask;
/// use candle_core::{Device, Tensor, Var};
/// # fn main() -> candle_core::Result<()> {
/// let mask = AttentionMask::causal();
/// let bias = Tensor::zeros((3, 3), candle_core::DType::F32, &Device::Cpu)?;
/// for mask in [mask.clone().with_bias(&bias), mask.clone().with_bias(&Var::from_tensor(&bias)?)] {
///     assert!(mask.to_additive((1, 1, 3, 3), bias.dtype(), &Device::Cpu).is_ok());
/// }
/// let attn_mask: Option<&Tensor> = None;
/// assert!(AttentionMask::none().with_bias(attn_mask).is_none());
/// # Ok(()) }
/// ```
pub trait OptionalRef<'a, T: ?Sized> {
    /// Returns the reference, if there is one.
    fn into_option(self) -> Option<&'a T>;
}

impl<'a, T: ?Sized> OptionalRef<'a, T> for &'a T {
    fn into_option(self) -> Option<&'a T> {
        Some(self)
    }
}

impl<'a, T: ?Sized> OptionalRef<'a, T> for Option<&'a T> {
    fn into_option(self) -> Option<&'a T> {
        self
    }
}

impl<'a, T> OptionalRef<'a, T> for &'a Option<T> {
    fn into_option(self) -> Option<&'a T> {
        self.as_ref()
    }
}

impl<'a, T: ?Sized> OptionalRef<'a, T> for &'a mut T {
    fn into_option(self) -> Option<&'a T> {
        Some(self)
    }
}

impl<'a, T: ?Sized> OptionalRef<'a, T> for &'a &T {
    fn into_option(self) -> Option<&'a T> {
        Some(self)
    }
}

impl<'a, T: ?Sized> OptionalRef<'a, T> for &'a Arc<T> {
    fn into_option(self) -> Option<&'a T> {
        Some(self)
    }
}

impl<'a, T: ?Sized> OptionalRef<'a, T> for &'a Box<T> {
    fn into_option(self) -> Option<&'a T> {
        Some(self)
    }
}

impl<'a> OptionalRef<'a, Tensor> for &'a Var {
    fn into_option(self) -> Option<&'a Tensor> {
        Some(self)
    }
}

impl<'a, T> OptionalRef<'a, [T]> for &'a Vec<T> {
    fn into_option(self) -> Option<&'a [T]> {
        Some(self)
    }
}

impl<'a, T, const N: usize> OptionalRef<'a, [T]> for &'a [T; N] {
    fn into_option(self) -> Option<&'a [T]> {
        Some(self)
    }
}
