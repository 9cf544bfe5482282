//! A builder of a model's weights with an adapter in them.

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};

use super::adapter::Adapter;
use candle_attention_modules::base::{accumulation_dtype, stored_name};

impl Adapter {
    /// Returns a builder of a model's weights with the adapter in them, for layers of any kind: linear and latent
    /// attention, the MLP, the head.
    ///
    /// `vb` is a builder at the root of the model. Each weight is merged when it is read, with the current values of
    /// the adapter, and is not tracked for gradients. A square weight is (in, out) if `fan_in_fan_out` says so.
    ///
    /// ```no_run
    /// use candle_attention::peft::Adapter;
    /// use candle_attention::{hf, weights};
    /// use candle_core::{DType, Device};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let json = serde_json::from_str(&std::fs::read_to_string("model/config.json")?)?;
    /// let vb = weights::open("model/model.safetensors", DType::F32, &Device::Cpu)?;
    /// let adapter = Adapter::open("adapter", DType::F32, &Device::Cpu)?;
    /// let attention = hf::load_linear_attention(&json, 0, adapter.merged_builder(vb))?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn merged_builder(&self, vb: VarBuilder<'static>) -> VarBuilder<'static> {
        let dtype = vb.dtype();
        let device = vb.device().clone();
        VarBuilder::from_backend(Box::new(MergedWeights { adapter: self.clone(), vb }), dtype, device)
    }
}

/// Reads the weights of a model and adds an adapter to them.
struct MergedWeights {
    adapter: Adapter,
    /// The model's weights.
    vb: VarBuilder<'static>,
}

impl MergedWeights {
    /// Returns a parameter of the model with the adapter.
    fn merge(&self, name: &str, own: Tensor) -> Result<Tensor> {
        if let Some(replacement) = self.adapter.replacement(name, &own)? {
            return replacement.detach().to_dtype(own.dtype())?.to_device(own.device());
        }
        let (Some(module), &[rows, columns]) = (name.strip_suffix(".weight"), own.dims()) else { return Ok(own) };
        // The shape tells whether a weight is (in, out), unless it is square.
        let delta = |is_transposed| -> Result<Option<Tensor>> {
            let (outputs, inputs) = if is_transposed { (columns, rows) } else { (rows, columns) };
            let delta = self.adapter.delta(module, outputs, inputs)?;
            if is_transposed { delta.map(|delta| delta.t()).transpose() } else { Ok(delta) }
        };
        let is_transposed = self.adapter.config().fan_in_fan_out();
        let update = match delta(is_transposed) {
            Err(error) if rows != columns => delta(!is_transposed).map_err(|_| error)?,
            found => found?,
        };
        let Some(update) = update else { return Ok(own) };
        let dtype = accumulation_dtype(own.dtype());
        let update = update.to_dtype(dtype)?.to_device(own.device())?;
        (own.to_dtype(dtype)? + update)?.to_dtype(own.dtype())
    }
}

impl SimpleBackend for MergedWeights {
    fn get(&self, shape: Shape, name: &str, init: Init, dtype: DType, _: &Device) -> Result<Tensor> {
        let own = self.vb.get_with_hints_dtype(shape, &stored_name(&self.vb, name), init, dtype)?;
        self.merge(name, own)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> Result<Tensor> {
        let own = self.vb.get_unchecked_dtype(&stored_name(&self.vb, name), dtype)?;
        self.merge(name, own)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.vb.contains_tensor(&stored_name(&self.vb, name))
    }
}
