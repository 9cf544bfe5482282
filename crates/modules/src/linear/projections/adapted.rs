//! A linear layer with low-rank adapters by name.

use candle_core::{Module, Result, Tensor, bail};

use super::lora::LoraMatrices;
use super::modules::Projection;
use super::named::NamedUpdates;
use crate::base::check_entries;
use crate::linear::PackedLinear;

const OP: &str = "adapted_linear";

/// A linear layer with low-rank adapters by name, of which each sequence of a batch chooses one: the MLP or the head of
/// a model whose attention has the same adapters.
///
/// `candle_attention::peft::Adapters` loads it. [`Module::forward`] computes the layer without an adapter.
#[derive(Debug, Clone)]
#[doc(alias = "lora")]
pub struct AdaptedLinear {
    linear: PackedLinear,
    named: NamedUpdates,
}

impl AdaptedLinear {
    /// Makes a layer without adapters.
    ///
    /// # Errors
    /// For a layer with an activation, which comes after the sum of both products.
    pub fn new(linear: PackedLinear) -> Result<Self> {
        if let Some(activation) = linear.activation() {
            bail!("[{OP}] the linear layer has the activation {activation:?}, expected one without")
        }
        Ok(Self { linear, named: NamedUpdates::default() })
    }

    /// Adds an adapter by name, with its matrices for [`Projection::Output`], if it has some.
    ///
    /// # Errors
    /// For a name that is there already, and if a packed matrix cannot be allocated.
    #[doc(hidden)]
    pub fn with_named_adapter(mut self, name: &str, matrices: &[LoraMatrices]) -> Result<Self> {
        self.named.add(OP, name, matrices)?;
        Ok(self)
    }

    /// Returns the layer without adapters.
    pub fn linear(&self) -> &PackedLinear {
        &self.linear
    }

    /// Returns the names of the adapters.
    pub fn adapter_names(&self) -> Vec<&str> {
        self.named.names().collect()
    }

    /// Computes the layer for `xs` (B, T, in) with an adapter for each of the B sequences, or for `xs` (n, in) with an
    /// adapter for each of the n rows; `None` is the layer without one.
    ///
    /// # Errors
    /// For an input of another rank or width, for another number of names, and for a name that the layer does not have.
    #[doc(alias = "adapter_names")]
    pub fn forward_with_adapters(&self, xs: &Tensor, names: &[Option<&str>]) -> Result<Tensor> {
        let (b, t) = match *xs.dims() {
            [b, t, _] => (b, t),
            [n, _] => (n, 1),
            _ => bail!("[{OP}] input has shape {:?}, expected (B, T, in) or (n, in)", xs.dims()),
        };
        check_entries(OP, "names", names.len(), b, "sequences")?;
        let chosen = self.named.rows(OP, names, |s| s * t..(s + 1) * t)?;
        let mut outputs = [self.linear.forward(xs)?];
        if chosen.is_empty() {
            let [output] = outputs;
            return Ok(output);
        }
        let shape = outputs[0].shape().clone();
        outputs[0] = outputs[0].reshape((b, t, self.linear.out_dim()))?;
        let rows = xs.reshape((b, t, self.linear.in_dim()))?;
        self.named.add_to(&[Projection::Output], &mut outputs, &rows, &chosen, false)?;
        outputs[0].reshape(shape)
    }
}

impl Module for AdaptedLinear {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.linear.forward(xs)
    }
}
