//! The options of an adapter: PEFT's `adapter_config.json`.

use candle_core::{Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::OP;
use super::targets::{Modules, NamePattern};

/// The biases that are trained with an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AdapterBias {
    /// No biases.
    #[default]
    None,
    /// The biases of all modules.
    All,
    /// The biases of the modules that have low-rank matrices.
    LoraOnly,
}

/// The options of a LoRA adapter, as PEFT writes them to `adapter_config.json`.
///
/// ```
/// use candle_attention::peft::AdapterConfig;
/// use serde_json::json;
/// # fn main() -> candle_core::Result<()> {
/// // A new adapter of rank 8. The update is (16 / 8) · B A.
/// let config = AdapterConfig::new(8, 16.0, ["q_proj", "v_proj"])?.with_dropout(0.05)?;
/// // The options of a file.
/// let config = AdapterConfig::from_json(&json!({
///     "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "use_rslora": true,
/// }))?;
/// assert_eq!(config.scaling("model.layers.0.self_attn.q_proj")?, 16.0 / 8f64.sqrt());
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[doc(alias = "LoraConfig")]
pub struct AdapterConfig {
    /// All fields of the file, with those that only PEFT reads.
    json: Map<String, Value>,
    fields: AdapterFields,
}

/// The fields that loading and training depend on, with PEFT's defaults.
#[derive(Debug, Clone, Deserialize)]
struct AdapterFields {
    #[serde(default = "default_rank")]
    r: usize,
    #[serde(default = "default_alpha")]
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    bias: AdapterBias,
    target_modules: Modules,
    exclude_modules: Option<Modules>,
    layers_to_transform: Option<Layers>,
    layers_pattern: Option<Modules>,
    modules_to_save: Option<Vec<String>>,
    rank_pattern: Option<Map<String, Value>>,
    alpha_pattern: Option<Map<String, Value>>,
}

fn default_rank() -> usize {
    8
}

fn default_alpha() -> f64 {
    8.0
}

/// The layers that are adapted, counted from 0.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Layers {
    One(usize),
    Many(Vec<usize>),
}

/// The options that change the computation and are not supported, with the values that switch them off.
const UNSUPPORTED: [&str; 12] = [
    "use_dora",
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "layer_replication",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
];

/// The initialisations after which the weights of the model are unchanged.
const INITIALISATIONS: [&str; 3] = ["gaussian", "eva", "orthogonal"];

impl AdapterConfig {
    /// Returns the options of a new adapter of rank `r` on the modules whose names end with `target_modules`. The
    /// factor of the update is `lora_alpha / r`.
    ///
    /// # Errors
    /// For a rank of 0, a factor that is not finite, and no modules.
    pub fn new<S: Into<String>>(
        r: usize,
        lora_alpha: f64,
        target_modules: impl IntoIterator<Item = S>,
    ) -> Result<Self> {
        let names: Vec<String> = target_modules.into_iter().map(Into::into).collect();
        // PEFT writes a whole number without a fraction.
        let whole = lora_alpha as i64;
        let alpha = if whole as f64 == lora_alpha { json!(whole) } else { json!(lora_alpha) };
        Self::from_json(&json!({
            "base_model_name_or_path": null, "bias": "none", "fan_in_fan_out": false, "inference_mode": true,
            "init_lora_weights": true, "lora_alpha": alpha, "lora_dropout": 0.0, "modules_to_save": null,
            "peft_type": "LORA", "r": r, "target_modules": names, "task_type": null, "use_dora": false,
            "use_rslora": false,
        }))
    }

    /// Reads the options of an `adapter_config.json`.
    ///
    /// # Errors
    /// For a `peft_type` other than LoRA, which the error names; for an option that changes the computation and is not
    /// supported, such as DoRA; and for a field that is missing or of the wrong type.
    pub fn from_json(json: &Value) -> Result<Self> {
        let Some(object) = json.as_object() else { bail!("[{OP}] adapter_config is {json}, expected an object") };
        let peft_type = json["peft_type"].as_str();
        if peft_type != Some("LORA") {
            bail!("[{OP}] peft_type is {}, expected \"LORA\"", json["peft_type"])
        }
        for name in UNSUPPORTED {
            let is_off = match &json[name] {
                Value::Null | Value::Bool(false) => true,
                Value::Array(entries) => entries.is_empty(),
                _ => false,
            };
            if !is_off {
                bail!("[{OP}] {name} is {}, which is not supported, expected LoRA without it", json[name])
            }
        }
        match &json["init_lora_weights"] {
            Value::Null | Value::Bool(_) => {}
            Value::String(name) if INITIALISATIONS.contains(&name.as_str()) => {}
            other => bail!(
                "[{OP}] init_lora_weights is {other}, which changes the weights of the model too, expected an adapter \
                 of unchanged weights (PEFT's `path_initial_model_for_weight_conversion` saves one)"
            ),
        }
        if json["target_modules"].is_null() {
            bail!("[{OP}] target_modules is null, expected names of modules or a regular expression")
        }
        let fields = match AdapterFields::deserialize(json) {
            Ok(fields) => fields,
            Err(error) => bail!("[{OP}] adapter_config: {error}"),
        };
        let config = Self { json: object.clone(), fields };
        config.validate()?;
        Ok(config)
    }

    /// Returns the options as an `adapter_config.json`, with all fields of the file that they were read from.
    #[must_use]
    pub fn to_json(&self) -> Value {
        Value::Object(self.json.clone())
    }

    fn validate(&self) -> Result<()> {
        let AdapterFields { lora_dropout, target_modules, .. } = &self.fields;
        if !(0.0..1.0).contains(lora_dropout) {
            bail!("[{OP}] lora_dropout is {lora_dropout}, expected at least 0 and less than 1")
        }
        if let Modules::Names(names) = target_modules
            && names.is_empty()
        {
            bail!("[{OP}] target_modules is empty, expected names of modules or a regular expression")
        }
        check_sizes(self.fields.r, self.fields.lora_alpha)?;
        for pattern in [&self.fields.rank_pattern, &self.fields.alpha_pattern].into_iter().flatten() {
            for name in pattern.keys() {
                NamePattern::of_module(name)?;
            }
        }
        Ok(())
    }

    fn with(mut self, name: &str, value: Value) -> Result<Self> {
        self.json.insert(name.to_string(), value);
        Self::from_json(&self.to_json())
    }

    /// Sets the probability with which an entry of a module's input is dropped in training, before A. The default is 0.
    ///
    /// # Errors
    /// Unless it is at least 0 and less than 1.
    pub fn with_dropout(self, lora_dropout: f64) -> Result<Self> {
        self.with("lora_dropout", json!(lora_dropout))
    }

    /// Sets whether the factor of the update is `lora_alpha / sqrt(r)` (<https://arxiv.org/abs/2312.03732>) instead of
    /// `lora_alpha / r`. The default is false.
    ///
    /// # Errors
    /// None at present.
    pub fn with_rslora(self, use_rslora: bool) -> Result<Self> {
        self.with("use_rslora", json!(use_rslora))
    }

    /// Sets the biases that are trained with the adapter. The default is none.
    ///
    /// # Errors
    /// None at present.
    pub fn with_bias(self, bias: AdapterBias) -> Result<Self> {
        let name = match bias {
            AdapterBias::None => "none",
            AdapterBias::All => "all",
            AdapterBias::LoraOnly => "lora_only",
        };
        self.with("bias", json!(name))
    }

    /// Sets the name or the folder of the model, which PEFT's `AutoPeftModel` loads.
    ///
    /// # Errors
    /// None at present.
    pub fn with_base_model(self, name_or_path: &str) -> Result<Self> {
        self.with("base_model_name_or_path", json!(name_or_path))
    }

    /// Returns the biases that are trained with the adapter.
    #[must_use]
    pub fn bias(&self) -> AdapterBias {
        self.fields.bias
    }

    /// Returns the probability of dropout in training.
    #[must_use]
    pub fn dropout(&self) -> f64 {
        self.fields.lora_dropout
    }

    /// Returns whether the option says that weights are stored as (in, out). PEFT sets it by the type of each module.
    pub(super) fn fan_in_fan_out(&self) -> bool {
        self.fields.fan_in_fan_out
    }

    /// Returns the names of `target_modules`, if it is a list that applies to all layers alike.
    pub(super) fn plain_names(&self) -> Option<&[String]> {
        let AdapterFields { target_modules, exclude_modules, layers_to_transform, modules_to_save, .. } = &self.fields;
        let is_plain = exclude_modules.is_none() && layers_to_transform.is_none() && modules_to_save.is_none();
        match target_modules {
            Modules::Names(names) if is_plain => Some(names),
            _ => None,
        }
    }

    /// Returns whether `target_modules` is `all-linear`, which names do not tell from other modules.
    pub(super) fn targets_all_linear(&self) -> bool {
        self.fields.target_modules.are_all_linear()
    }

    /// Returns `target_modules` for an error.
    pub(super) fn targets(&self) -> String {
        match &self.fields.target_modules {
            Modules::Names(names) => format!("{names:?}"),
            pattern @ Modules::Pattern(_) => format!("{:?}", pattern.names()[0]),
        }
    }

    /// Returns whether a module, by its full name in the model, has low-rank matrices.
    ///
    /// # Errors
    /// For a regular expression that is not supported.
    pub fn is_target(&self, module: &str) -> Result<bool> {
        let AdapterFields { target_modules, exclude_modules, layers_to_transform, layers_pattern, .. } = &self.fields;
        if let Some(excluded) = exclude_modules
            && excluded.include(module)?
        {
            return Ok(false);
        }
        if self.is_below_saved(module) || !target_modules.include(module)? {
            return Ok(false);
        }
        let layers = match (layers_to_transform, target_modules) {
            (Some(Layers::One(layer)), Modules::Names(_)) => std::slice::from_ref(layer),
            (Some(Layers::Many(layers)), Modules::Names(_)) if !layers.is_empty() => layers,
            _ => return Ok(true),
        };
        if target_modules.names().iter().any(|name| name == module) {
            return Ok(true);
        }
        let patterns = layers_pattern.as_ref().map_or(&[][..], Modules::names);
        Ok(layer_of(module, patterns).is_some_and(|layer| layers.contains(&layer)))
    }

    /// Returns whether the adapter has its own values of parameters of the model.
    pub(super) fn replaces_parameters(&self) -> bool {
        self.fields.bias != AdapterBias::None || self.fields.modules_to_save.as_ref().is_some_and(|all| !all.is_empty())
    }

    fn saved(&self) -> &[String] {
        self.fields.modules_to_save.as_deref().unwrap_or_default()
    }

    /// Returns whether `modules_to_save` names a module or one around it, in whole parts of its name, so that it has no
    /// low-rank matrices.
    fn is_below_saved(&self, module: &str) -> bool {
        self.saved().iter().any(|name| format!(".{module}.").contains(&format!(".{name}.")))
    }

    /// Returns the entry of `modules_to_save` by which the adapter has a copy of a module. PEFT copies each module
    /// whose name ends with an entry, also within a part of the name, and all that is in it.
    pub(super) fn saved_by(&self, module: &str) -> Option<&str> {
        let is_around = |entry: &String| {
            let dots = module.match_indices('.').map(|(dot, _)| dot).chain([module.len()]);
            dots.into_iter().any(|end| !entry.is_empty() && module[..end].ends_with(entry.as_str()))
        };
        self.saved().iter().find(|entry| is_around(entry)).map(String::as_str)
    }

    /// Returns the rank of a module, by its full name in the model.
    ///
    /// # Errors
    /// For an entry of `rank_pattern` that is no positive whole number.
    pub fn rank(&self, module: &str) -> Result<usize> {
        let found = match_pattern(self.fields.rank_pattern.as_ref(), module)?;
        let rank = found.map_or(Some(self.fields.r), |value| value.as_u64().and_then(|rank| rank.try_into().ok()));
        match rank {
            Some(rank) if rank > 0 => Ok(rank),
            _ => bail!("[{OP}] rank_pattern has no rank for {module}, expected a whole number of at least 1"),
        }
    }

    /// Returns the factor of the update `B A` of a module, by its full name in the model.
    ///
    /// # Errors
    /// As [`rank`](Self::rank), and for an entry of `alpha_pattern` that is no number.
    pub fn scaling(&self, module: &str) -> Result<f64> {
        let r = self.rank(module)?;
        let found = match_pattern(self.fields.alpha_pattern.as_ref(), module)?;
        let Some(alpha) = found.map_or(Some(self.fields.lora_alpha), Value::as_f64) else {
            bail!("[{OP}] alpha_pattern has no number for {module}")
        };
        check_sizes(r, alpha)?;
        Ok(if self.fields.use_rslora { alpha / (r as f64).sqrt() } else { alpha / r as f64 })
    }
}

fn check_sizes(r: usize, alpha: f64) -> Result<()> {
    if r == 0 {
        bail!("[{OP}] r is 0, expected at least 1")
    }
    if !alpha.is_finite() {
        bail!("[{OP}] lora_alpha is {alpha}, expected a finite number")
    }
    Ok(())
}

/// Returns the value of the first pattern that matches a module, in alphabetical order, in which PEFT writes patterns.
fn match_pattern<'a>(patterns: Option<&'a Map<String, Value>>, module: &str) -> Result<Option<&'a Value>> {
    for (pattern, value) in patterns.into_iter().flatten() {
        if NamePattern::of_module(pattern)?.matches(module) {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// Returns the index of the layer that a module belongs to: the first number in its name that follows another part, or
/// that follows one
/// of `patterns`.
fn layer_of(module: &str, patterns: &[String]) -> Option<usize> {
    let parts: Vec<_> = module.split('.').collect();
    for (i, part) in parts.iter().enumerate().skip(1) {
        let is_layers = if patterns.is_empty() { i > 1 } else { patterns.iter().any(|name| name == parts[i - 1]) };
        if is_layers
            && i + 1 < parts.len()
            && let Ok(number) = part.parse()
        {
            return Some(number);
        }
    }
    None
}
