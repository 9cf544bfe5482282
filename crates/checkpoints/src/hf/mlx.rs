//! Models that MLX converted, behind a builder that does not undo the conversion: that of Candle, or that of a file
//! without the config of its model.

use candle_core::{DType, Device, Error, Result, Shape, Tensor, bail};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use super::entry::Entry;
use super::linear::Linear;
use crate::files::mlx;
use crate::files::one_less;
use candle_attention_modules::base::{Fact, has, root};

/// The number of layers in which a layer of linear attention is looked for: one in four has another kind.
const LAYERS: usize = 4;

impl Entry<'_> {
    /// Returns a builder whose norms are as PyTorch stores them, where MLX stores them as `1 + w` in this family.
    pub fn with_norms_as_in_pytorch<'a>(&self, vb: VarBuilder<'a>) -> VarBuilder<'a> {
        let is_of_mlx = Fact::WrittenByMlx.is_known_of(&vb);
        let is_one_more = mlx::stores_one_more(self.family.model_type);
        let is_undone = Fact::NormsAsInPyTorch.is_known_of(&vb);
        let has_order_of_mlx = !is_undone && is_one_more && self.has_convolutions_of_mlx(&vb);
        if is_undone || !(is_of_mlx || has_order_of_mlx) {
            return vb;
        }
        let prefix = vb.prefix();
        let dtype = vb.dtype();
        let device = vb.device().clone();
        let undone = VarBuilder::from_backend(Box::new(Undone { vb: vb.root(), is_one_more }), dtype, device);
        if prefix.is_empty() { undone } else { undone.pp(prefix) }
    }

    /// Refuses a model that MLX converted, for Candle's sharded builder, which cannot be changed.
    ///
    /// # Errors
    /// If the convolutions of its linear attention are in the order of MLX.
    pub fn refuse_conversion_of_mlx(&self, vb: &VarBuilder) -> Result<()> {
        if self.has_convolutions_of_mlx(vb) {
            bail!(
                "[hf] {}: MLX converted this model, since its convolutions are (C, K, 1), and stores norms as 1 + w, \
                 expected the model before its conversion, or `weights::open` without shards",
                self.family.model_type
            )
        }
        Ok(())
    }

    /// Returns whether the weight of the convolution of a layer of linear attention is (C, K, 1).
    fn has_convolutions_of_mlx(&self, vb: &VarBuilder) -> bool {
        let Some(Linear { names, .. }) = self.family.linear else { return false };
        for layer in 0..LAYERS {
            for module in names.modules(&[layer]) {
                let name = format!("{module}.conv1d.weight");
                if has(vb, &name)
                    && let Some(dims) = dims(vb, &name)
                {
                    return mlx::torch_shape(&dims).is_some();
                }
            }
        }
        false
    }
}

/// Returns the dimensions of a convolution's weight. Candle's sharded builder tells them in an error alone.
fn dims(vb: &VarBuilder, name: &str) -> Option<Vec<usize>> {
    if let Ok(weight) = vb.get_unchecked(name) {
        return Some(weight.dims().to_vec());
    }
    match root(&vb.get((1, 1, 1), name).err()?) {
        Error::UnexpectedShape { got, .. } => Some(got.dims().to_vec()),
        _ => None,
    }
}

/// Reads the tensors of a model that MLX converted as PyTorch stores them.
struct Undone<'a> {
    vb: VarBuilder<'a>,
    /// Whether norms are stored as `1 + w`.
    is_one_more: bool,
}

impl Undone<'_> {
    fn undo(&self, name: &str, tensor: Tensor) -> Result<Tensor> {
        if self.is_one_more && mlx::is_norm(name) && tensor.rank() == 1 {
            return one_less(&tensor);
        }
        match mlx::torch_shape(tensor.dims()) {
            Some(shape) if mlx::is_convolution(name) => tensor.reshape(&shape),
            _ => Ok(tensor),
        }
    }
}

impl SimpleBackend for Undone<'_> {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let error = match self.vb.get_with_hints_dtype(shape.clone(), name, init, dtype) {
            Ok(tensor) => return self.undo(name, tensor)?.to_device(device),
            Err(error) => error,
        };
        match root(&error) {
            Error::UnexpectedShape { got, .. }
                if mlx::is_convolution(name) && mlx::torch_shape(got.dims()).is_some_and(|got| got == shape.dims()) =>
            {
                self.get_unchecked(name, dtype, device)
            }
            _ => Err(error),
        }
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        self.undo(name, self.vb.get_unchecked_dtype(name, dtype)?)?.to_device(device)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        name == Fact::NormsAsInPyTorch.name() || self.vb.contains_tensor(name)
    }
}
