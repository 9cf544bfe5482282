//! Activations of gates.

/// The activation of a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// 1 / (1 + e^-x).
    Sigmoid,
    /// ln(1 + e^x).
    Softplus,
    /// x / (1 + e^-x).
    Silu,
    /// The larger one of x and 0.
    Relu,
    /// x times the distribution function of the normal distribution.
    Gelu,
    /// The approximation of [`Gelu`](Self::Gelu) by a hyperbolic tangent.
    GeluTanh,
}

impl Activation {
    /// Returns the number of the activation in the source.
    pub(super) fn code(self) -> i32 {
        match self {
            Self::Sigmoid => 0,
            Self::Softplus => 1,
            Self::Silu => 2,
            Self::Relu => 3,
            Self::Gelu => 4,
            Self::GeluTanh => 5,
        }
    }
}
