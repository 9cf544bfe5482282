//! Quantised layers. The tensors that a method of quantisation stores for a linear layer become one weight (out, in) by
//! its usual name, so that everything else reads quantised checkpoints as plain ones.
//!
//! Each method is a file here: a function that finds the method in the tensors below a module, and a [`Format`] that
//! reads them.

mod bits;
mod mlx;
mod settings;
mod tensors;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use candle_core::Result;
use serde_json::Value;

use super::raw::RawTensor;
use candle_attention_modules::base::QuantizedWeight;
use settings::Settings;
use tensors::Tensors;

/// The methods, in the order in which they are looked for: if one has the tensors of another and more, it comes first.
const FINDERS: [fn(&Module) -> Result<Option<Found>>; 1] = [mlx::find];

/// A method of quantisation with the settings of one layer.
trait Format: fmt::Debug + Send + Sync {
    /// Reads the weight from the tensors of the layer.
    fn read(&self, tensors: &Tensors) -> Result<QuantizedWeight>;
}

/// A module of a checkpoint, which may be a quantised layer.
struct Module<'a> {
    /// The name of the module, from the root.
    name: &'a str,
    /// The tensors below it.
    tensors: &'a Tensors,
    settings: &'a Settings,
}

/// A quantised layer that was found.
struct Found {
    outputs: usize,
    inputs: usize,
    format: Arc<dyn Format>,
    /// The tensors of the method, by their names below the module.
    tensors: Vec<&'static str>,
}

/// The weight of a quantised layer in files.
#[derive(Debug, Clone)]
pub(super) struct QuantizedEntry {
    /// The shape (out, in).
    pub shape: Vec<usize>,
    format: Arc<dyn Format>,
    tensors: Tensors,
}

impl QuantizedEntry {
    /// Reads the weight.
    pub(super) fn read(&self) -> Result<QuantizedWeight> {
        self.format.read(&self.tensors)?.checked()
    }
}

/// A layer of a method that is known.
pub(super) struct QuantizedLayer {
    /// The name of the weight.
    pub weight: String,
    /// The names of the tensors of the method.
    pub tensors: Vec<String>,
    /// The weight, or the error of reading it.
    pub entry: Result<QuantizedEntry>,
}

/// Finds the quantised layers among the tensors of a checkpoint. Layers of methods that are not known are not among
/// them; reading them is an error that names the method.
pub(super) fn layers(tensors: impl Iterator<Item = (String, RawTensor)>, config: &Value) -> Vec<QuantizedLayer> {
    let settings = Settings::new(config);
    let mut modules: BTreeMap<String, Tensors> = BTreeMap::new();
    for (name, raw) in tensors {
        let (module, tensor) = split(&name);
        modules.entry(module.to_string()).or_default().insert(tensor, raw);
    }
    let mut layers = Vec::new();
    for (name, own) in &modules {
        let module = Module { name, tensors: own, settings: &settings };
        let full_name = |tensor: &str| if name.is_empty() { tensor.to_string() } else { format!("{name}.{tensor}") };
        let (used, entry) = match FINDERS.iter().find_map(|find| find(&module).transpose()) {
            None => continue,
            Some(Ok(found)) => {
                let shape = vec![found.outputs, found.inputs];
                let entry = QuantizedEntry { shape, format: found.format, tensors: own.only(&found.tensors) };
                (found.tensors, Ok(entry))
            }
            Some(Err(error)) => (Vec::new(), Err(error)),
        };
        let names = used.into_iter().map(full_name).collect();
        layers.push(QuantizedLayer { weight: full_name("weight"), tensors: names, entry });
    }
    layers
}

/// Splits the name of a tensor into that of a module and the rest. bitsandbytes and quanto put a `.` into the rest:
/// `q_proj.weight.absmax`.
fn split(name: &str) -> (&str, &str) {
    if let Some(at) = name.find(".weight.") {
        return (&name[..at], &name[at + 1..]);
    }
    name.rsplit_once('.').unwrap_or(("", name))
}
