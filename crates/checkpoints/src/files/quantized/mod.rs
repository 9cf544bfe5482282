//! Quantised layers. The tensors that a method of quantisation stores for a linear layer become one weight (out, in) by
//! its usual name, so that everything else reads quantised checkpoints as plain ones.
//!
//! Each method is a file here: a function that finds the method in the tensors below a module, and a
//! [`QuantizedFormat`] that reads them.

mod awq;
mod awq_fast;
mod bitnet;
mod bits;
mod bitsandbytes;
mod compressed;
pub(super) mod float8;
pub(super) mod floats;
mod gptq;
mod groups;
mod hqq;
mod mlx;
mod nvfp4;
mod packed_words;
mod quanto;
mod scales;
mod settings;
mod tensors;
mod torchao;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use candle_core::Result;
use serde_json::Value;

use super::raw::RawTensor;
use candle_attention_modules::base::QuantizedWeight;
use candle_attention_modules::warn_once;
use floats::float8_of;
pub(super) use settings::Settings;
use tensors::Tensors;

/// A function that finds a layer of a method; `Ok(None)` for a module that is not one.
type Finder = fn(&Module) -> Result<Option<Found>>;

/// The methods, in the order in which they are looked for: if one has the tensors of another and more, it comes first.
const FINDERS: [Finder; 11] = [
    bitsandbytes::find,
    bitnet::find,
    hqq::find,
    torchao::find,
    quanto::find,
    awq::find,
    gptq::find,
    compressed::find,
    mlx::find,
    nvfp4::find,
    float8::find,
];

/// A method of quantisation with the settings of one layer.
trait QuantizedFormat: fmt::Debug + Send + Sync {
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
    /// The text that the header of its file has for the tensor `weight`.
    metadata: Option<&'a str>,
}

/// A quantised layer that was found.
struct Found {
    outputs: usize,
    inputs: usize,
    format: Arc<dyn QuantizedFormat>,
    /// The tensors of the method, by their names below the module.
    tensors: Vec<&'static str>,
}

/// The weight of a quantised layer in files.
#[derive(Debug, Clone)]
pub(super) struct QuantizedEntry {
    /// The shape (out, in); that of floats of 8 bits may have other dimensions.
    pub shape: Vec<usize>,
    format: Arc<dyn QuantizedFormat>,
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

/// The quantised layers of a checkpoint.
pub(super) struct QuantizedLayers {
    pub layers: Vec<QuantizedLayer>,
    /// The names of tensors that have no use here: the scales of caches.
    pub unused: Vec<String>,
}

/// Finds the quantised layers among the tensors of a checkpoint; `metadata` has the texts of the headers of its files.
/// Layers of methods that are not known are not among them; reading them is an error that names the method.
pub(super) fn layers(
    tensors: &BTreeMap<String, RawTensor>,
    config: &Value,
    metadata: &HashMap<String, String>,
) -> QuantizedLayers {
    let settings = Settings::new(config);
    let mut modules: BTreeMap<&str, Tensors> = BTreeMap::new();
    let mut layers = Vec::new();
    for (name, raw) in tensors {
        let (module, tensor) = split(name);
        modules.entry(module).or_default().insert(tensor, raw.clone());
        if tensor != "weight" && float8_of(raw.dtype).is_some() {
            let own = parameter(name, tensors);
            let full_name = |own_name: &str| own_name.replacen("weight", name, 1);
            let parameter_module = Module { name, tensors: &own, settings: &settings, metadata: None };
            layers.extend(layer(&parameter_module, full_name));
        }
    }
    for (name, own) in &modules {
        let full_name = |tensor: &str| if name.is_empty() { tensor.to_string() } else { format!("{name}.{tensor}") };
        let of_weight = metadata.get(&full_name("weight")).map(String::as_str);
        layers.extend(layer(&Module { name, tensors: own, settings: &settings, metadata: of_weight }, full_name));
    }
    let unused = if layers.is_empty() { Vec::new() } else { scales_of_caches(tensors) };
    QuantizedLayers { layers, unused }
}

/// Returns the tensors of a parameter that is not the weight of a module, such as experts, under the names that they
/// have in a module.
fn parameter(name: &str, tensors: &BTreeMap<String, RawTensor>) -> Tensors {
    let mut own = Tensors::default();
    for ending in ["", "_scale_inv", "_scale"] {
        if let Some(raw) = tensors.get(&format!("{name}{ending}")) {
            own.insert(&format!("weight{ending}"), raw.clone());
        }
    }
    own
}

/// Reads what a module is; `None` where it is not a quantised layer of a method that is known.
fn layer(module: &Module, full_name: impl Fn(&str) -> String) -> Option<QuantizedLayer> {
    let found = FINDERS.iter().find_map(|find| find(module).transpose())?;
    let weight = full_name("weight");
    let found = match found {
        Ok(found) => found,
        Err(error) => return Some(QuantizedLayer { weight, tensors: Vec::new(), entry: Err(error) }),
    };
    // A tensor of floats of 8 bits keeps its dimensions, and so do several matrices in words.
    let shape_of = |name| module.tensors.get(name).map(|codes| codes.shape.as_slice());
    let shape = match (shape_of("weight"), shape_of("weight_packed")) {
        (Some(shape), _) if shape.iter().product::<usize>() == found.outputs * found.inputs => shape.to_vec(),
        (None, Some([outputs @ .., _])) if outputs.len() > 1 => [outputs, &[found.inputs]].concat(),
        _ => vec![found.outputs, found.inputs],
    };
    let tensors = module.tensors.only(&found.tensors);
    let entry = QuantizedEntry { shape, format: found.format, tensors };
    Some(QuantizedLayer { weight, tensors: found.tensors.into_iter().map(full_name).collect(), entry: Ok(entry) })
}

/// The names of scales of activations, which a layer that computes in floats has no use for.
const SCALES_OF_ACTIVATIONS: [&str; 7] = [
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "scale_input",
    "output_scale",
    "input_scale_ub",
    "input_zero_point",
];

/// Returns the scales of activations that a quantised layer has, which are passed over.
fn passed_over(module: &Module) -> Vec<&'static str> {
    let mut there = Vec::new();
    for name in SCALES_OF_ACTIVATIONS {
        if module.tensors.get(name).is_some() {
            warn_once!("[weights] {} has {name}: scales of activations are passed over", module.name);
            there.push(name);
        }
    }
    there
}

/// Returns the scales of keys and values in a cache: one number each.
fn scales_of_caches(tensors: &BTreeMap<String, RawTensor>) -> Vec<String> {
    let is_one = |(name, raw): &(&String, &RawTensor)| {
        let last = name.rsplit('.').next().unwrap_or_default();
        ["k_scale", "v_scale", "q_scale", "prob_scale"].contains(&last) && raw.shape.iter().product::<usize>() == 1
    };
    let names: Vec<_> = tensors.iter().filter(is_one).map(|(name, _)| name.clone()).collect();
    if let Some(name) = names.first() {
        warn_once!("[weights] {name}: scales of caches are passed over");
    }
    names
}

/// Splits the name of a tensor into that of a module and the rest. bitsandbytes and quanto put a `.` into the rest:
/// `q_proj.weight.absmax`.
fn split(name: &str) -> (&str, &str) {
    if let Some(at) = name.find(".weight.") {
        return (&name[..at], &name[at + 1..]);
    }
    name.rsplit_once('.').unwrap_or(("", name))
}
