//! A trait for the names and shapes of tensors.

use candle_core::{Error, Result, bail};
use candle_nn::VarBuilder;

use candle_attention_modules::base::{QuantizationSigns, has, missing_tensor_hint, root, stored_name};

/// Tensors by name, for the detection of a layout: of a builder, or of a checkpoint whose header was read.
///
/// Names are relative to a prefix.
pub trait TensorSource: Sized {
    /// Returns the prefix that names are relative to.
    fn prefix(&self) -> String;

    /// Returns the same tensors with names that are relative to another prefix, from the root.
    fn at(&self, prefix: &str) -> Self;

    /// Returns whether there is a tensor of this name.
    fn contains(&self, name: &str) -> bool;

    /// Returns the shape of a tensor that is there.
    ///
    /// # Errors
    /// If the shape cannot be read.
    fn shape(&self, name: &str) -> Result<Vec<usize>>;

    /// Returns a sentence about the tensors that are there instead of a missing one, if something is known of them.
    ///
    /// # Errors
    /// If there are no tensors at all, since they are made when a layer asks for them.
    fn hint(&self, missing: &str) -> Result<Option<String>>;

    /// Returns the signs that a weight is quantised; `None` if there are none.
    fn quantized(&self, name: &str) -> Option<QuantizationSigns>;
}

/// The tensors of a builder. It has no shapes, so that a tensor is read to know its shape.
impl TensorSource for VarBuilder<'_> {
    fn prefix(&self) -> String {
        Self::prefix(self)
    }

    fn at(&self, prefix: &str) -> Self {
        self.root().pp(prefix)
    }

    fn contains(&self, name: &str) -> bool {
        has(self, name)
    }

    fn shape(&self, name: &str) -> Result<Vec<usize>> {
        let error = match self.get_unchecked(&stored_name(self, name)) {
            Ok(tensor) => return Ok(tensor.dims().to_vec()),
            Err(error) => error,
        };
        if let Error::CannotFindTensor { .. } = root(&error) {
            return Err(error);
        }
        bail!(
            "[weight_layout] the shape of {name}, which tells its layout, cannot be read from this builder ({}); name \
             the layout",
            root(&error)
        )
    }

    fn hint(&self, missing: &str) -> Result<Option<String>> {
        let Err(error) = self.get_unchecked(missing) else { return Ok(None) };
        // A builder that reads files says that it cannot find the tensor; one that makes parameters, that it needs a
        // shape.
        if let Error::Msg(_) = root(&error) {
            let prefix = self.prefix();
            let below = if prefix.is_empty() { String::new() } else { format!(" below {prefix:?}") };
            bail!(
                "[weight_layout] nothing of attention is there{below} yet: a `VarMap`, a `TorchSeed` and \
                 `VarBuilder::zeros` make parameters when a layer asks for them; name a layout, as \
                 `WeightLayout::Canonical`"
            )
        }
        Ok(missing_tensor_hint(&error))
    }

    fn quantized(&self, name: &str) -> Option<QuantizationSigns> {
        QuantizationSigns::beside(&stored_name(self, name), |beside| has(self, beside))
    }
}
