//! The metadata of a GGUF file, read by type.

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Error, Result, bail};
use serde_json::Map;

use crate::hf::columns;
use candle_attention_modules::base::root;

columns! {
    /// An architecture of llama.cpp: a value of `general.architecture`.
    struct Architecture,
    /// The row that all others extend.
    first PLAIN:
    /// The value of `general.architecture`.
    name: &'static str = "",
    /// The `model_type` of the same model in transformers.
    model_type: &'static str = "",
    /// Whether llama.cpp's converter reorders the rows of q and k, so that the two entries of a rotated pair are
    /// neighbours.
    reorders_rotary: bool = false,
    /// Whether some layers have no softmax attention, and 0 key heads.
    is_hybrid: bool = false,
    /// Whether layers have different numbers of heads, which `adjust` reads.
    heads_by_layer: bool = false,
    /// Whether the factors of rotary frequencies are for layers without a window alone.
    factors_without_window: bool = false,
    /// Numbers that change attention and that `adjust` reads, among those that are refused in other architectures.
    reads: &'static [&'static str] = &[],
    /// Sets the fields that this architecture alone has.
    adjust: fn(&Metadata, &mut ConfigFields) -> Result<()> = |_, _| Ok(()),
    [None unless set]
    /// Which layers have a window where `attention.sliding_window_pattern` is one number.
    window_pattern: FullLayer,
}

/// The position of the layer without a window in each group of layers.
#[derive(Clone, Copy)]
pub(super) enum FullLayer {
    First,
    Last,
}

impl FullLayer {
    /// Returns whether a layer has a window, where every `period`-th layer has none. A period of 0 means that all
    /// layers have one, as in llama.cpp.
    pub fn has_window(self, layer: usize, period: usize) -> bool {
        if period == 0 {
            return true;
        }
        match self {
            Self::First => !layer.is_multiple_of(period),
            Self::Last => !(layer + 1).is_multiple_of(period),
        }
    }
}

/// Returns the kinds of layers, as configs call them.
pub(super) fn kinds_by_window(has_window: impl IntoIterator<Item = bool>) -> serde_json::Value {
    let kind = |is_sliding| if is_sliding { "sliding_attention" } else { "full_attention" };
    has_window.into_iter().map(kind).collect()
}

/// Sets a number of key heads, which has several names in configs.
pub(super) fn set_key_heads(fields: &mut ConfigFields, heads: usize) {
    for name in ["num_key_value_heads", "num_kv_heads"] {
        fields.insert(name.into(), heads.into());
    }
    fields.insert("multi_query".into(), (heads == 1).into());
}

/// The fields of a `config.json`.
pub(super) type ConfigFields = Map<String, serde_json::Value>;

/// llama.cpp's base of rotary frequencies where the metadata has none.
pub(super) const DEFAULT_BASE: f64 = 10_000.0;

/// The metadata of a file whose architecture is known.
pub(super) struct Metadata<'a> {
    pub content: &'a Content,
    pub architecture: &'static Architecture,
}

impl Metadata<'_> {
    /// Returns an error that names the architecture.
    pub fn fail<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        bail!("[gguf] {}: {message}", self.architecture.name)
    }

    /// Returns an error of a config with the metadata that it is about, since the error has the names of the config.
    pub fn explain(&self, error: &Error) -> Error {
        let whole_text = root(error).to_string();
        let text = whole_text.lines().next().unwrap_or_default().trim_start_matches("[hf] ");
        let mut causes = Vec::new();
        for (key, names) in NAMES_IN_CONFIGS {
            if let Some(value) = self.get(key)
                && names.iter().any(|name| text.contains(name))
            {
                causes.push(format!("{key} {}", shown(value)));
            }
        }
        if causes.is_empty() {
            return Error::msg(format!("[gguf] as a config.json: {text}"));
        }
        Error::msg(format!("[gguf] as a config.json: {text}; the metadata have {}", causes.join(", ")))
    }

    /// Returns the value of a key of the architecture.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.content.metadata.get(&format!("{}.{key}", self.architecture.name))
    }

    /// Returns an error about the value of a key.
    pub fn expected<T>(&self, key: &str, found: &Value, expected: &str) -> Result<T> {
        self.fail(format!("{key} is {}, expected {expected}", shown(found)))
    }

    /// Reads a whole number. A list has to have the same number for each layer.
    pub fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(found) = self.get(key) else { return Ok(None) };
        let size = match found {
            Value::Array(list) => {
                let first = list.first().and_then(whole);
                let is_one_number = list.len() == self.num_layers()? && list.iter().all(|entry| whole(entry) == first);
                if is_one_number { first } else { None }
            }
            one => whole(one),
        };
        match size {
            Some(size) => Ok(Some(size)),
            None => self.expected(key, found, "a whole number, the same for all layers"),
        }
    }

    /// Reads a whole number of at least 1.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        match (self.size(key)?, self.get(key)) {
            (Some(0), Some(found)) => self.expected(key, found, "a whole number of at least 1"),
            (count, _) => Ok(count),
        }
    }

    /// Reads a whole number of at least 1 that has to be there.
    pub fn required(&self, key: &str) -> Result<usize> {
        match self.count(key)? {
            Some(count) => Ok(count),
            None => self.fail(format!("the metadata has no {key}")),
        }
    }

    /// Reads a whole number for each layer, or one for all.
    pub fn per_layer(&self, key: &str) -> Result<Option<Vec<usize>>> {
        let layers = self.num_layers()?;
        match self.get(key) {
            None => Ok(None),
            Some(found @ Value::Array(list)) => match list.iter().map(whole).collect::<Option<Vec<_>>>() {
                Some(numbers) if numbers.len() == layers => Ok(Some(numbers)),
                _ => self.expected(key, found, "a whole number, or one for each layer"),
            },
            Some(_) => Ok(self.size(key)?.map(|size| vec![size; layers])),
        }
    }

    /// Reads a whole number that may be another one in layers with a window.
    pub fn of_windows(&self, key: &str, has_window: bool) -> Result<Option<usize>> {
        if has_window && let Some(size) = self.size(&format!("{key}_swa"))? {
            return Ok(Some(size));
        }
        self.size(key)
    }

    /// Reads a list of whole numbers of any length.
    pub fn list(&self, key: &str) -> Result<Option<Vec<usize>>> {
        match self.get(key) {
            None => Ok(None),
            Some(found @ Value::Array(list)) => match list.iter().map(whole).collect::<Option<Vec<_>>>() {
                Some(numbers) => Ok(Some(numbers)),
                None => self.expected(key, found, "a list of whole numbers"),
            },
            Some(found) => self.expected(key, found, "a list of whole numbers"),
        }
    }

    /// Reads the number of query heads, or that of the first layer where layers have different numbers.
    pub fn query_heads(&self) -> Result<usize> {
        let key = "attention.head_count";
        if !self.architecture.heads_by_layer {
            return self.required(key);
        }
        match (self.per_layer(key)?.and_then(|heads| heads.first().copied()), self.get(key)) {
            (Some(heads @ 1..), _) => Ok(heads),
            (_, Some(found)) => self.expected(key, found, "a whole number of at least 1 for each layer"),
            (_, None) => self.fail(format!("the metadata has no {key}")),
        }
    }

    /// Reads the number of key heads of the layers that have softmax attention; the other layers of the model have 0.
    pub fn key_heads(&self) -> Result<Option<usize>> {
        if self.architecture.heads_by_layer {
            return Ok(self.per_layer(KEY_HEADS)?.and_then(|heads| heads.first().copied()));
        }
        match (self.size_of_part(KEY_HEADS)?, self.get(KEY_HEADS)) {
            (None | Some(0), Some(found)) => self.expected(KEY_HEADS, found, "a whole number of at least 1"),
            (heads, _) => Ok(heads),
        }
    }

    /// Reads a whole number that is the same for all layers that have the part it is about; in a hybrid the others
    /// have 0.
    pub fn size_of_part(&self, key: &str) -> Result<Option<usize>> {
        let Some(found @ Value::Array(_)) = self.get(key).filter(|_| self.architecture.is_hybrid) else {
            return self.size(key);
        };
        let Some(numbers) = self.per_layer(key)? else { return Ok(None) };
        let mut with_part = numbers.iter().copied().filter(|&size| size > 0);
        match with_part.next() {
            Some(first) if with_part.any(|size| size != first) => {
                self.expected(key, found, "a whole number, the same for all layers that have one")
            }
            first => Ok(first),
        }
    }

    /// Returns whether each layer has key heads, which layers without softmax attention do not have.
    pub fn has_key_heads(&self) -> Result<Vec<bool>> {
        match self.per_layer(KEY_HEADS)? {
            Some(numbers) => Ok(numbers.into_iter().map(|heads| heads > 0).collect()),
            None => self.fail(format!("the metadata has no {KEY_HEADS}")),
        }
    }

    /// Reads the number of layers, without those that predict more tokens after the next one, which come last.
    pub fn num_hidden_layers(&self) -> Result<usize> {
        let layers = self.num_layers()?;
        let last = self.size("nextn_predict_layers")?.unwrap_or(0);
        match layers.checked_sub(last) {
            Some(hidden @ 1..) => Ok(hidden),
            _ => self.fail(format!("nextn_predict_layers is {last}, expected less than block_count, {layers}")),
        }
    }

    /// Reads the number of layers of the file. It is bounded, since configs have lists with an entry for each layer.
    pub fn num_layers(&self) -> Result<usize> {
        const MOST: usize = 65_536;
        let key = "block_count";
        match self.get(key) {
            None => self.fail(format!("the metadata has no {key}")),
            Some(found) => match whole(found) {
                Some(layers @ 1..=MOST) => Ok(layers),
                Some(layers @ 1..) => self.fail(format!("{key} is {layers}, expected at most {MOST}")),
                _ => self.expected(key, found, "a whole number of at least 1"),
            },
        }
    }

    /// Reads a finite number.
    pub fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(found) = self.get(key) else { return Ok(None) };
        let number = match found {
            Value::F64(number) => Some(*number),
            // The shortest decimal, which is what the configuration had that was converted.
            Value::F32(number) => number.to_string().parse().ok(),
            _ => None,
        };
        match number {
            Some(number) if number.is_finite() => Ok(Some(number)),
            _ => self.expected(key, found, "a finite number"),
        }
    }

    /// Reads a text.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(found) => self.expected(key, found, "text"),
        }
    }

    /// Reads a flag.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(found) => self.expected(key, found, "true or false"),
        }
    }

    /// Reads a flag for each layer.
    pub fn flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        let Some(found) = self.get(key) else { return Ok(None) };
        let mut flags = None;
        if let Value::Array(list) = found {
            flags = list.iter().map(is_set).collect::<Option<Vec<_>>>();
        }
        match flags {
            Some(each) if each.len() == self.num_layers()? => Ok(Some(each)),
            _ => self.expected(key, found, "true or false for each layer"),
        }
    }

    /// Reads the scale of the scores; 0 means the usual one, as in llama.cpp.
    pub fn scale(&self) -> Result<Option<f64>> {
        Ok(self.number("attention.scale")?.filter(|&scale| scale != 0.0))
    }

    /// Returns the factor by which files with lists of rotary factors multiply queries and keys.
    pub fn attention_factor(&self) -> Result<f64> {
        Ok(self.number(ATTENTION_FACTOR)?.unwrap_or(1.0))
    }
}

/// The key of the number of key heads.
const KEY_HEADS: &str = "attention.head_count_kv";

/// The key of the factor on queries and keys.
pub(super) const ATTENTION_FACTOR: &str = "rope.scaling.attn_factor";

/// The keys that configs are made of, and the names by which errors of configs call them.
const NAMES_IN_CONFIGS: &[(&str, &[&str])] = &[
    ("block_count", &["layer"]),
    ("embedding_length", &["hidden_size", "embed_dim"]),
    ("attention.head_count", &["num_attention_heads", "num_heads", "heads"]),
    ("attention.head_count_kv", &["num_key_value_heads", "num_kv_heads", "heads"]),
    ("attention.key_length", &["head_dim", "rotary_dim"]),
    ("attention.value_length", &["value_head_dim"]),
    ("attention.layer_norm_rms_epsilon", &["eps"]),
    ("attention.layer_norm_epsilon", &["eps"]),
    ("attention.scale", &["attention_multiplier", "scale"]),
    ("attn_logit_softcapping", &["softcap"]),
    ("attention.sliding_window", &["window", "local_attention", "sliding_attention"]),
    ("attention.sliding_window_pattern", &["layer_types", "sliding_attention"]),
    ("attention.max_alibi_bias", &["alibi"]),
    ("attention.clamp_kqv", &["clip_qkv"]),
    ("attention.causal", &["is_causal"]),
    ("context_length", &["max_position_embeddings", "original_context"]),
    ("rope.freq_base", &["rope_theta", "base"]),
    ("rope.freq_base_swa", &["rope_theta", "base"]),
    ("rope.dimension_count", &["rotary_dim"]),
    ("rope.scaling.factor", &["factor"]),
    ("rope.scale_linear", &["factor"]),
    ("rope.scaling.attn_factor", &["attention_factor"]),
    ("rope.scaling.original_context_length", &["original_context", "original_max_position_embeddings"]),
    ("rope.scaling.yarn_beta_fast", &["beta"]),
    ("rope.scaling.yarn_beta_slow", &["beta"]),
];

/// Returns a whole number of any integer type; none for a negative one.
pub(super) fn whole(value: &Value) -> Option<usize> {
    let number = match *value {
        Value::U8(number) => number.into(),
        Value::U16(number) => number.into(),
        Value::U32(number) => number.into(),
        Value::U64(number) => number,
        Value::I8(number) => number.try_into().ok()?,
        Value::I16(number) => number.try_into().ok()?,
        Value::I32(number) => number.try_into().ok()?,
        Value::I64(number) => number.try_into().ok()?,
        Value::F32(_) | Value::F64(_) | Value::Bool(_) | Value::String(_) | Value::Array(_) => return None,
    };
    usize::try_from(number).ok()
}

/// Returns a flag, which may also be 0 or 1 of any integer type.
pub(super) fn is_set(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(flag) => Some(*flag),
        other => match whole(other)? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        },
    }
}

/// Returns a value as errors show it.
pub(super) fn shown(value: &Value) -> String {
    match value {
        Value::Array(list) => format!("a list of {}", list.len()),
        Value::String(text) => format!("{text:?}"),
        value => format!("{value:?}"),
    }
}
