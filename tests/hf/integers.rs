//! Integers of a `config.json` that no model has, large ones too: an error, or a layer, in little memory.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use candle_attention::{AttentionCache, AttentionCacheConfig, AttentionInput, hf};
use candle_core::{Error, Result};
use serde_json::{Value, json};

use crate::common::allocations::{self, Counting};
use crate::golden::{forward, on_axes};
use crate::{Model, Tensors, all_models, builder};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const INTEGERS: [u64; 4] = [0, 1 << 31, 1 << 62, u64::MAX];

/// The last is there in a model that claims more layers than can be counted through.
const LAYERS: [usize; 4] = [0, 1, 5, 1 << 40];

/// What a config says of a layer, in words.
type Part = fn(&Value, usize) -> Result<String>;

const PARTS: [Part; 5] = [
    |config, layer| Ok(format!("{:?}", hf::attention_config(config, layer)?)),
    |config, layer| Ok(format!("{:?}", hf::latent_attention_config(config, layer)?)),
    |config, layer| Ok(format!("{:?}", hf::decoder_attention_config(config, layer)?)),
    |config, layer| Ok(format!("{:?}", hf::cross_attention_config(config, layer)?)),
    |config, layer| Ok(format!("{:?}", hf::kv_layer(config, layer)?)),
];

fn told(part: Part, config: &Value, layer: usize) -> String {
    part(config, layer).unwrap_or_else(|error| bare(&error).to_string())
}

/// What an architecture has of these.
fn parts(config: &Value) -> Vec<Part> {
    let lacks = |text: String| {
        ["attention is latent", "is not latent", "in this architecture"].iter().any(|lack| text.contains(lack))
    };
    PARTS.into_iter().filter(|&part| !lacks(told(part, config, 0))).collect()
}

fn described(parts: &[Part], config: &Value, layer: usize) -> String {
    parts.iter().map(|&part| told(part, config, layer)).collect()
}

/// Without its backtrace, whose text takes more memory than a config.
fn bare(error: &Error) -> &Error {
    match error {
        Error::WithBacktrace { inner, .. } => bare(inner),
        error => error,
    }
}

/// What `run` gives, if it takes so many bytes at most.
fn within<T>(most: usize, what: &str, run: impl FnOnce() -> T) -> T {
    allocations::reset();
    let result = catch_unwind(AssertUnwindSafe(run));
    let asked = allocations::asked();
    assert!(asked.bytes <= most, "{what}: {asked:?}");
    result.unwrap_or_else(|_| panic!("{what} panics"))
}

/// Configs, and the layers of a checkpoint that has no tensors.
fn parsed(config: &Value, what: &str) {
    for layer in LAYERS {
        within(1 << 22, &format!("layer {layer} of {what}"), || {
            let empty = || builder(Tensors::new());
            described(&PARTS, config, layer);
            assert!(hf::load_attention(config, layer, empty()).is_err());
            assert!(hf::load_latent_attention(config, layer, empty()).is_err());
            assert!(hf::load_decoder_attention(config, layer, empty()).is_err());
            assert!(hf::load_cross_attention(config, layer, empty()).is_err());
            assert!(hf::load_relative_bias(config, empty()).is_err());
            assert!(hf::load_decoder_relative_bias(config, empty()).is_err());
        });
    }
}

/// The places of all integers, as JSON pointers.
fn integers(value: &Value, place: &str, found: &mut Vec<String>) {
    match value {
        Value::Number(number) if !number.is_f64() => found.push(place.to_string()),
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, entry)| integers(entry, &format!("{place}/{i}"), found));
        }
        Value::Object(fields) => {
            fields.iter().for_each(|(name, field)| integers(field, &format!("{place}/{name}"), found));
        }
        _ => {}
    }
}

fn put(config: &Value, place: &str, value: Value) -> Value {
    let mut config = config.clone();
    *config.pointer_mut(place).expect("it has one there") = value;
    config
}

/// A layer of a real checkpoint, and what it makes of a few positions, with a cache too.
fn called(model: &Model, config: Value, what: &str) {
    let changed = Model { name: model.name.clone(), config, weights: model.weights.clone(), golden: Tensors::new() };
    let input = || on_axes(model, AttentionInput::new(&model.golden["layer0.in"]));
    drop(within(1 << 25, what, || forward(&changed, 0, input())));
    drop(within(1 << 25, what, || {
        let layer = hf::load_attention(&changed.config, 0, changed.vb())?;
        let mut cache = AttentionCache::new(&AttentionCacheConfig::for_layer(layer.config()))?;
        layer.forward_with(input().with_cache(&mut cache))
    }));
}

#[test]
fn no_integer_of_a_model_hurts() {
    // The first backtrace reads the debug information, which takes more memory than any config.
    let _ = Error::msg("").bt().to_string();
    let mut tried = 0;
    for model in all_models() {
        let own = [0, 1].map(|layer| described(&PARTS, &model.config, layer));
        let is_read = |place: &String| {
            let config = put(&model.config, place, json!("text"));
            own != [0, 1].map(|layer| described(&PARTS, &config, layer))
        };
        let mut places = Vec::new();
        integers(&model.config, "", &mut places);
        places.retain(is_read);
        tried += places.len();
        for integer in INTEGERS {
            let mut all = model.config.clone();
            for place in &places {
                let what = format!("{} with {integer} for {place}", model.name);
                let config = put(&model.config, place, integer.into());
                parsed(&config, &what);
                called(&model, config, &what);
                all = put(&all, place, integer.into());
            }
            parsed(&all, &format!("{} with {integer} everywhere", model.name));
        }
    }
    assert!(tried > 300, "{tried} integers");
}

/// `config` with a value in each of these fields of the object at a path.
fn with(config: &Value, path: &[&str], names: &[&str], value: &Value) -> Value {
    let mut config = config.clone();
    let object = path.iter().fold(&mut config, |object, &name| &mut object[name]);
    names.iter().for_each(|&name| object[name] = value.clone());
    config
}

/// Which of all `names` are read: of the object at a path, of the objects in it.
struct Reading<'a> {
    parts: Vec<Part>,
    names: &'a [&'a str],
    found: Vec<Vec<&'a str>>,
    /// Those that are true or false.
    flags: Vec<Vec<&'a str>>,
}

impl<'a> Reading<'a> {
    fn of(config: &Value, names: &'a [&'a str]) -> Self {
        let mut reading = Self { parts: parts(config), names, found: Vec::new(), flags: Vec::new() };
        reading.find(config, &[], names, &reading.described(config));
        reading
    }

    fn described(&self, config: &Value) -> String {
        described(&self.parts, config, 0)
    }

    /// Those of `names`, a half of which is left out where none of it changes what is said of the config.
    fn find(&mut self, config: &Value, path: &[&'a str], names: &'a [&'a str], own: &str) {
        let text = self.described(&with(config, path, names, &json!("text")));
        if text == own {
            return;
        }
        let (left, right) = names.split_at(names.len() / 2);
        if !left.is_empty() {
            self.find(config, path, left, own);
            return self.find(config, path, right, own);
        }
        let of_name = [path, right].concat();
        if text.contains("expected an object") {
            let config = with(config, path, right, &json!({"unknown": 0}));
            self.find(&config, &of_name, self.names, &self.described(&config));
        } else if text.contains("expected true or false") {
            self.flags.push(of_name);
        } else {
            self.found.push(of_name);
        }
    }

    /// `config` with its flags, as far as it has no error with them.
    fn flagged(&self, config: &Value, flag: bool) -> Value {
        self.flags.iter().fold(config.clone(), |config, path| {
            let with_flag = with_field(&config, path, &flag.into());
            if self.described(&with_flag).contains("[hf]") { config } else { with_flag }
        })
    }

    /// Every field that was found with an integer, in lists where the field is one.
    fn try_integers(&self, config: &Value) {
        for path in &self.found {
            let text = self.described(&with_field(config, path, &json!(1)));
            for integer in INTEGERS {
                let value = match text {
                    _ if text.contains("list of lists") => json!([[["global"], integer], [["local"], integer]]),
                    _ if text.contains("expected a list") => json!(vec![integer; 6]),
                    _ => json!(integer),
                };
                let config = with_field(config, path, &value);
                let run = || [0, 1 << 40].map(|layer| described(&self.parts, &config, layer));
                within(1 << 22, &config.to_string(), run);
            }
        }
    }
}

fn with_field(config: &Value, path: &[&str], value: &Value) -> Value {
    let (name, object) = path.split_last().expect("a field has a name");
    with(config, object, &[name], value)
}

/// The texts in the sources that may be names of fields.
fn names(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("the sources are there") {
        let path = entry.expect("they can be listed").path();
        if path.is_dir() {
            names(&path, found);
            continue;
        }
        let source = std::fs::read_to_string(path).expect("a source is text");
        let is_name = |text: &&str| text.len() > 2 && text.chars().all(|c| c == '_' || c.is_ascii_alphanumeric());
        found.extend(source.split('"').filter(is_name).map(str::to_string));
    }
}

/// Every field that the configs of any architecture may have.
#[test]
fn no_integer_of_an_architecture_hurts() {
    let mut all = BTreeSet::new();
    names(concat!(env!("CARGO_MANIFEST_DIR"), "/crates/checkpoints/src/hf").as_ref(), &mut all);
    // What `per_layer_config` has for a layer are the same fields.
    let known: Vec<_> = hf::architectures().chain(["model_type", "per_layer_config"]).collect();
    let all: Vec<_> = all.iter().map(String::as_str).filter(|name| !known.contains(name)).collect();
    let mut tried = 0;
    for name in hf::architectures() {
        let config = json!({"model_type": name});
        let reading = Reading::of(&config, &all);
        reading.try_integers(&config);
        tried += reading.found.len();
        for flag in [false, true] {
            let config = reading.flagged(&config, flag);
            Reading::of(&config, &all).try_integers(&config);
        }
    }
    assert!(tried > 3000, "{tried} fields");
}

#[test]
fn kinds_of_layers_that_repeat_are_counted() -> Result<()> {
    let types = json!([[["global", "local"], 2], [[], 1u64 << 62], [["local"], 0], [["local"], u64::MAX]]);
    let config = json!({"model_type": "gpt_neo", "num_layers": u64::MAX, "attention_types": types});
    for (layer, expected) in
        [(0, None), (1, Some(256)), (2, None), (3, Some(256)), (4, Some(256)), (1 << 40, Some(256))]
    {
        assert_eq!(hf::attention_config(&config, layer)?.window(), expected, "layer {layer}");
    }
    Ok(())
}
