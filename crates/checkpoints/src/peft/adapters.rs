//! Several adapters of one model, of which each sequence of a batch chooses one.

use candle_core::{Result, bail};
use candle_nn::VarBuilder;
use serde_json::Value;

use super::OP;
use super::adapter::Adapter;
use super::load::shared_by_sequences;
use crate::hf;
use candle_attention_core::internal::{AdaptableModule, AdapterMatrices};
use candle_attention_core::{MultiHeadAttention, WeightLayout};
use candle_attention_modules::linear::{AdaptedLinear, LoraMatrices, PackedLinear, Projection};

/// Several adapters of one model by name, of which each sequence of a batch chooses one.
///
/// A call computes the projections of the layer once for all sequences, and the products with the matrices of an
/// adapter for the sequences that chose it. Each sequence has the numbers that it has in a layer with its adapter
/// alone.
///
/// ```no_run
/// use candle_attention::peft::{Adapter, Adapters};
/// use candle_attention::{AttentionInput, weights};
/// use candle_core::{DType, Device, Tensor};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let json = serde_json::from_str(&std::fs::read_to_string("model/config.json")?)?;
/// let vb = weights::open("model/model.safetensors", DType::F32, &Device::Cpu)?;
/// let adapters = Adapters::new()
///     .with("french", Adapter::open("french", DType::F32, &Device::Cpu)?)?
///     .with("law", Adapter::open("law", DType::F32, &Device::Cpu)?)?;
/// let attention = adapters.load_attention(&json, 0, vb)?;
/// let xs = Tensor::zeros((3, 5, 64), DType::F32, &Device::Cpu)?;
/// let names = [Some("french"), None, Some("law")]; // of each sequence
/// let ys = attention.forward_with(AttentionInput::new(&xs).with_adapters(&names))?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
#[doc(alias("lora", "load_adapter", "adapter_names"))]
pub struct Adapters(Vec<NamedAdapter>);

/// An adapter with its name.
#[derive(Debug, Clone)]
struct NamedAdapter {
    name: String,
    adapter: Adapter,
}

impl Adapters {
    /// Makes an empty list.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an adapter.
    ///
    /// # Errors
    /// For a name that is there already.
    pub fn with(mut self, name: &str, adapter: Adapter) -> Result<Self> {
        if self.get(name).is_some() {
            bail!("[{OP}] there are two adapters with the name {name:?}, expected different names")
        }
        self.0.push(NamedAdapter { name: name.to_string(), adapter });
        Ok(self)
    }

    /// Returns the adapter of a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Adapter> {
        self.0.iter().find(|named| named.name == name).map(|named| &named.adapter)
    }

    /// Returns the names, in the order in which they were added.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|named| named.name.as_str())
    }

    /// Returns a copy of a layer with all adapters, as [`Adapter::load_onto`] loads one. Calls choose them with
    /// [`AttentionInput::with_adapters`](candle_attention_core::AttentionInput::with_adapters). A layer that an adapter
    /// excludes has its name too, and no update for it.
    ///
    /// The layer has to stay unmerged; [`Adapter::load_onto`] loads a single adapter that can be merged.
    ///
    /// # Errors
    /// As [`Adapter::load_onto`], for a layer with content-based positions, and for an adapter that has other values of
    /// the layer's own parameters (`bias`, `modules_to_save`), which all sequences share.
    pub fn load_onto(
        &self,
        layer: &MultiHeadAttention,
        layout: WeightLayout,
        module: &str,
    ) -> Result<MultiHeadAttention> {
        let mut loaded = layer.clone();
        for NamedAdapter { name, adapter } in &self.0 {
            loaded = adapter.load_onto_by_name(name, &loaded, layout, module)?;
        }
        Ok(loaded)
    }

    /// Loads one layer's attention as [`hf::load_attention`] does, and all adapters onto it. `vb` is a builder at the
    /// root of the model.
    ///
    /// # Errors
    /// As [`hf::load_attention`] and [`load_onto`](Self::load_onto).
    pub fn load_attention(&self, json: &Value, layer: usize, vb: VarBuilder) -> Result<MultiHeadAttention> {
        let places = hf::attention_modules(json, layer, &vb)?;
        let mut attention = hf::load_attention(json, layer, vb)?;
        for NamedAdapter { name, adapter } in &self.0 {
            if let Some((layout, module)) = adapter.place_of(&attention, &places)? {
                attention = adapter.load_onto_by_name(name, &attention, *layout, module)?;
            }
        }
        Ok(attention)
    }

    /// Returns another linear layer of the model with all adapters, such as a layer of the MLP. `module` is its full
    /// name in the model. The rows of `linear` belong to this module alone: a weight that joins the rows of several
    /// modules is loaded as a layer for each.
    ///
    /// ```no_run
    /// use candle_attention::peft::{Adapter, Adapters};
    /// use candle_attention::{PackedLinear, weights};
    /// use candle_core::{DType, Device, Tensor};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let vb = weights::open("model/model.safetensors", DType::F32, &Device::Cpu)?;
    /// let adapters = Adapters::new().with("french", Adapter::open("french", DType::F32, &Device::Cpu)?)?;
    /// let name = "model.layers.0.mlp.down_proj";
    /// let down = PackedLinear::new(&vb.get((64, 256), &format!("{name}.weight"))?, None)?;
    /// let down = adapters.load_linear(down, name)?;
    /// let xs = Tensor::zeros((2, 5, 256), DType::F32, &Device::Cpu)?;
    /// let ys = down.forward_with_adapters(&xs, &[Some("french"), None])?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// For a layer with an activation, for a matrix that is missing or of another shape, and for an adapter that has
    /// another weight or bias of the module, which all sequences share.
    pub fn load_linear(&self, linear: PackedLinear, module: &str) -> Result<AdaptedLinear> {
        let own = AdaptableModule {
            name: module.to_string(),
            other_name: None,
            outputs: linear.out_dim(),
            inputs: linear.in_dim(),
        };
        let mut adapted = AdaptedLinear::new(linear)?;
        for NamedAdapter { name, adapter } in &self.0 {
            adapter.refuse_parameters(name, module)?;
            let mut updates = Vec::new();
            if let Some(AdapterMatrices { a, b, scaling, dropout }) = adapter.matrices(module, &own)? {
                let b = [(Projection::Output, b.into())].into();
                updates.push(LoraMatrices { a: a.into(), b, scaling, dropout });
            }
            adapted = adapted.with_named_adapter(name, &updates)?;
        }
        Ok(adapted)
    }
}

impl Adapter {
    /// Checks that the adapter `name` has no other weight or bias of a module, by its full name.
    fn refuse_parameters(&self, name: &str, module: &str) -> Result<()> {
        let has_parameter = |leaf: &str| self.tensors.parameter_name(&format!("{module}.{leaf}")).is_some();
        let is_replaced = match &self.tensors.file {
            Some(file) => !file.is_whole_model && (has_parameter("weight") || has_parameter("bias")),
            None => false,
        };
        if is_replaced || self.config.saved_by(module).is_some() {
            return shared_by_sequences(name, &format!("weight or bias of {module}"));
        }
        Ok(())
    }
}
