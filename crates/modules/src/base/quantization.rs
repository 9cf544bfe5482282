//! Recognises quantised weights: by the tensors next to a weight, by its dtype, and by the config of its model.

use std::fmt;

use serde_json::Value;

/// A method of quantisation, by the tensors that it stores for a linear layer.
struct Method {
    name: &'static str,
    /// The names below the module of the layer. All of them are there.
    tensors: &'static [&'static str],
}

/// The methods. If another method has the tensors of one too, the one with more tensors comes first.
const METHODS: [Method; 19] = [
    Method { name: "GPTQ", tensors: &["qweight", "g_idx"] },
    Method { name: "AWQ or GPTQ", tensors: &["qweight", "qzeros"] },
    Method { name: "GPTQ or AWQ", tensors: &["qweight"] },
    Method { name: "bitsandbytes, 4 bits (NF4)", tensors: &["weight.quant_state.bitsandbytes__nf4"] },
    Method { name: "bitsandbytes, 4 bits (FP4)", tensors: &["weight.quant_state.bitsandbytes__fp4"] },
    Method { name: "bitsandbytes, 4 bits", tensors: &["weight.absmax"] },
    Method { name: "bitsandbytes, 8 bits", tensors: &["SCB"] },
    Method { name: "compressed-tensors, NVFP4", tensors: &["weight_packed", "weight_global_scale"] },
    Method { name: "compressed-tensors", tensors: &["weight_packed"] },
    Method { name: "NVFP4", tensors: &["weight_scale_2"] },
    Method { name: "FP8", tensors: &["scale_weight"] },
    Method { name: "HQQ", tensors: &["W_q"] },
    Method { name: "torchao", tensors: &["_weight_qdata"] },
    Method { name: "quanto", tensors: &["weight._data"] },
    Method { name: "quanto, 2 or 4 bits", tensors: &["weight._data._data"] },
    Method { name: "EETQ", tensors: &["weight_scales"] },
    Method { name: "AQLM", tensors: &["codes", "codebooks"] },
    Method { name: "MLX", tensors: &["scales", "biases"] },
    Method { name: "MLX (MXFP4, MXFP8 or NVFP4)", tensors: &["scales"] },
];

/// The signs that a weight is quantised.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct QuantizationSigns {
    /// The method that the tensors next to the weight belong to.
    method: Option<&'static str>,
    /// The names of these tensors.
    beside: Vec<String>,
    /// The dtype of the weight, if it is one of integers or of packed numbers.
    dtype: Option<String>,
    /// The method that the config names, and the key that names it.
    config: Option<ConfigMethod>,
    /// Why a weight of a method that is known cannot be read.
    problem: Option<String>,
}

/// The method of quantisation that a config names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigMethod {
    /// The key, with the keys of the objects around it.
    pub key: String,
    /// The method and its bits.
    pub method: String,
}

impl QuantizationSigns {
    /// Returns the signs that tensors next to a parameter are; `None` if there are none. `has` returns whether there is
    /// a tensor of a name.
    pub fn beside(parameter: &str, has: impl Fn(&str) -> bool) -> Option<Self> {
        let module = parameter.strip_suffix(".weight").unwrap_or(parameter);
        for Method { name, tensors } in METHODS {
            let beside: Vec<_> = tensors.iter().map(|tensor| format!("{module}.{tensor}")).collect();
            if beside.iter().all(|tensor| has(tensor)) {
                return Some(Self { method: Some(name), beside, ..Self::default() });
            }
        }
        // Experts are parameters without a module.
        let beside = vec![format!("{parameter}_blocks"), format!("{parameter}_scales")];
        if beside.iter().all(|tensor| has(tensor)) {
            return Some(Self { method: Some("MXFP4"), beside, ..Self::default() });
        }
        None
    }

    /// Returns the sign that the dtype of a weight is.
    pub fn of_dtype(dtype: String) -> Self {
        Self { dtype: Some(dtype), ..Self::default() }
    }

    /// Adds the dtype of the weight.
    #[must_use]
    pub fn with_dtype(self, dtype: String) -> Self {
        Self { dtype: Some(dtype), ..self }
    }

    /// Adds what the config of the model says.
    #[must_use]
    pub fn with_config(self, config: &Value) -> Self {
        Self { config: ConfigMethod::of(config), ..self }
    }

    /// Adds why the weight cannot be read although its method is known.
    #[must_use]
    pub fn with_problem(self, problem: String) -> Self {
        Self { problem: Some(problem), ..self }
    }
}

/// The end of a sentence about a weight: "is quantised, ..".
impl fmt::Display for QuantizationSigns {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut signs = Vec::new();
        if let Some(config) = &self.config {
            signs.push(format!("`{}` in the config", config.key));
        }
        match self.beside.as_slice() {
            [] => {}
            [one] => signs.push(format!("{one} next to it")),
            several => signs.push(format!("{} next to it", several.join(" and "))),
        }
        if let Some(dtype) = &self.dtype {
            signs.push(format!("dtype {dtype}"));
        }
        let method = match (&self.config, self.method) {
            (Some(config), _) => format!("it looks like {} ", config.method),
            (None, Some(method)) => format!("it looks like {method} "),
            (None, None) => String::new(),
        };
        write!(f, "is quantised, expected a weight of floats; {method}({})", signs.join(", "))?;
        match &self.problem {
            Some(problem) => write!(f, ": {problem}"),
            None => Ok(()),
        }
    }
}

/// The keys of a config whose objects describe its quantisation.
const KEYS: [&str; 3] = ["quantization_config", "quantization", "compression_config"];

impl ConfigMethod {
    /// Returns the object of the key that [`of`](Self::of) finds.
    pub fn object(config: &Value) -> Option<&Value> {
        let own = config.as_object()?;
        let found = KEYS.iter().find_map(|key| own.get(*key).filter(|found| found.is_object()));
        found.or_else(|| own.values().find_map(Self::object))
    }

    /// Finds the first key `quantization_config` or `quantization` with an object, at any level of a config.
    pub fn of(config: &Value) -> Option<Self> {
        let object = config.as_object()?;
        for key in KEYS {
            if let Some(found) = object.get(key).filter(|found| found.is_object()) {
                return Some(Self { key: key.to_string(), method: method_of(found) });
            }
        }
        for (key, part) in object {
            if let Some(found) = Self::of(part) {
                return Some(Self { key: format!("{key}.{}", found.key), ..found });
            }
        }
        None
    }

    /// Returns the object that `quantization_config` is at any level of a config, the outermost first.
    pub fn objects(config: &Value) -> Vec<&Value> {
        let Some(object) = config.as_object() else { return Vec::new() };
        let mut found = Vec::new();
        found.extend(object.get("quantization_config").filter(|own| !own.is_null()));
        for part in object.iter().filter(|(key, _)| *key != "quantization_config").map(|(_, part)| part) {
            found.extend(Self::objects(part));
        }
        found
    }
}

/// Returns the method that an object of a config describes, and the number of bits if the object has it.
fn method_of(object: &Value) -> String {
    let named = ["quant_method", "quant_algo", "quant_library"].iter().find_map(|key| object[*key].as_str());
    let method = match named {
        Some("gptq") => "GPTQ",
        Some("awq") => "AWQ",
        Some("hqq") => "HQQ",
        Some("fp8") => "FP8",
        Some("mxfp4") => "MXFP4",
        Some("modelopt") => object["quant_algo"].as_str().unwrap_or("ModelOpt"),
        Some(other) => other,
        None if object["group_size"].is_number() && object["bits"].is_number() => "MLX",
        None => "a method that the config does not name",
    };
    let flag = |key: &str| object[key] == true;
    let of_groups =
        || object["config_groups"].as_object()?.values().find_map(|group| group["weights"]["num_bits"].as_u64());
    let bits = match ["bits", "w_bit", "num_bits", "nbits"].iter().find_map(|key| object[*key].as_u64()) {
        Some(bits) => Some(bits),
        None if flag("load_in_4bit") || flag("_load_in_4bit") => Some(4),
        None if flag("load_in_8bit") || flag("_load_in_8bit") => Some(8),
        None => of_groups(),
    };
    match bits {
        Some(bits) => format!("{method}, {bits} bits"),
        None => method.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quantization_is_found_at_any_level_of_a_config() {
        let mlx = json!({"bits": 4, "group_size": 32});
        let found = |config: Value| ConfigMethod::of(&config).map(|found| format!("{}: {}", found.key, found.method));
        assert_eq!(found(json!({"quantization": mlx})).as_deref(), Some("quantization: MLX, 4 bits"));
        let inner = json!({"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 8}}});
        assert_eq!(found(inner).as_deref(), Some("text_config.quantization_config: GPTQ, 8 bits"));
        let groups =
            json!({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}});
        let found_groups = found(json!({"quantization_config": groups}));
        assert_eq!(found_groups.as_deref(), Some("quantization_config: compressed-tensors, 4 bits"));
        let nested = json!({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}});
        assert_eq!(
            found(json!({"a": {"b": nested}})).as_deref(),
            Some("a.b.quantization_config: bitsandbytes, 8 bits")
        );
        for plain in [json!({}), json!({"quantization_config": null}), json!({"quantization": false}), json!([1])] {
            assert_eq!(found(plain), None);
        }
    }

    #[test]
    fn more_special_methods_are_found_first() {
        for (index, method) in METHODS.iter().enumerate() {
            let names: Vec<_> = method.tensors.iter().map(|tensor| format!("q_proj.{tensor}")).collect();
            let found = QuantizationSigns::beside("q_proj.weight", |name| names.iter().any(|own| own == name));
            assert_eq!(found.and_then(|found| found.method), Some(method.name), "method {index}");
        }
        assert_eq!(QuantizationSigns::beside("q_proj.weight", |name| name == "k_proj.qweight"), None);
    }
}
