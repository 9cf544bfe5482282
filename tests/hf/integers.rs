//! Integers of a `config.json` that no model has, large ones too: an error, or a layer, in little memory.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use candle_attention::{AttentionCache, AttentionCacheConfig, AttentionInput, hf};
use candle_core::{Error, Result};
use serde_json::{Value, json};

use crate::common::allocations::{self, Counting};
use crate::common::{listed, root};
use crate::golden::{forward, on_axes};
use crate::{Model, Tensors, all_models, builder};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const INTEGERS: [u64; 4] = [0, 1 << 31, 1 << 62, u64::MAX];

/// The last is there in a model that claims more layers than can be counted through.
const LAYERS: [usize; 2] = [1, 1 << 40];

/// A function that describes a layer of a config as text.
type Part = fn(&Value, usize) -> Result<String>;

const PARTS: [Part; 5] = [
    |config, layer| Ok(format!("{:?}", hf::attention_config(config, layer)?)),
    |config, layer| Ok(format!("{:?}", hf::latent_attention_config(config, layer)?)),
    |config, layer| Ok(format!("{:?}", hf::decoder_attention_config(config, layer)?)),
    |config, layer| Ok(format!("{:?}", hf::cross_attention_config(config, layer)?)),
    |config, layer| Ok(format!("{:?}", hf::kv_shared_layer(config, layer)?)),
];

fn told(part: Part, config: &Value, layer: usize) -> String {
    part(config, layer).unwrap_or_else(|error| bare(&error).to_string())
}

/// Lists the parts that an architecture has.
fn parts(config: &Value) -> Vec<Part> {
    let lacks = |text: String| {
        ["attention is latent", "is not latent", "in this architecture"].iter().any(|lack| text.contains(lack))
    };
    PARTS.into_iter().filter(|&part| !lacks(told(part, config, 0))).collect()
}

fn described(parts: &[Part], config: &Value, layer: usize) -> String {
    parts.iter().map(|&part| told(part, config, layer)).collect()
}

/// Returns the error without its backtrace, whose text takes more memory than a config.
fn bare(error: &Error) -> &Error {
    match error {
        Error::WithBacktrace { inner, .. } => bare(inner),
        error => error,
    }
}

/// Returns the result of `run`, which may allocate `most` bytes.
fn within<T>(most: usize, what: &str, run: impl FnOnce() -> T) -> T {
    allocations::reset();
    let result = catch_unwind(AssertUnwindSafe(run));
    let asked = allocations::asked();
    assert!(asked.bytes <= most, "{what}: {asked:?}");
    result.unwrap_or_else(|_| panic!("{what} panics"))
}

/// Reads the configs, and the layers of a checkpoint that has no tensors.
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

/// Lists the paths of all integers, as JSON pointers.
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

/// Loads a layer of a real checkpoint, and calls it with a few positions, with a cache too.
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
fn hf_configs_of_models_with_any_integers_are_errors_or_small_layers() {
    // The first backtrace reads the debug information, which takes more memory than any config.
    let _ = Error::msg("").bt().to_string();
    let mut tried = 0;
    for model in all_models() {
        let own = [0, 1].map(|layer| described(&PARTS, &model.config, layer));
        let is_read = |place: &String| {
            let config = with_field(&model.config, place, json!("text"));
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
                let config = with_field(&model.config, place, integer.into());
                parsed(&config, &what);
                called(&model, config, &what);
                all = with_field(&all, place, integer.into());
            }
            parsed(&all, &format!("{} with {integer} everywhere", model.name));
        }
    }
    assert!(tried > 300, "{tried} integers");
}

/// The fields that are read of the object at a path, a JSON pointer, and of the objects in it, as paths: flags, and
/// others.
#[derive(Default)]
struct Fields {
    flags: Vec<String>,
    others: Vec<String>,
}

impl Fields {
    fn find(&mut self, parts: &[Part], config: &Value, object: &str, names: &[&str]) {
        let own = described(parts, config, 0);
        // Most names are not read, which is seen of several at once.
        let is_read = |chunk: &&[&str]| {
            let put = |edited, name: &&str| with_field(&edited, &format!("{object}/{name}"), json!("text"));
            described(parts, &chunk.iter().fold(config.clone(), put), 0) != own
        };
        for name in names.chunks(8).filter(is_read).flatten() {
            let place = format!("{object}/{name}");
            let text = described(parts, &with_field(config, &place, json!("text")), 0);
            match text {
                _ if text == own => {}
                _ if text.contains("expected an object") => {
                    self.find(parts, &with_field(config, &place, json!({"unknown": 0})), &place, names);
                }
                _ if text.contains("expected true or false") => self.flags.push(place),
                _ => self.others.push(place),
            }
        }
    }
}

/// Returns the config with a field set, and with the objects above it.
fn with_field(config: &Value, place: &str, value: Value) -> Value {
    let mut config = config.clone();
    *place.split('/').skip(1).fold(&mut config, |part, name| match part {
        Value::Array(list) => &mut list[name.parse::<usize>().expect("a place of the list")],
        object => &mut object[name],
    }) = value;
    config
}

/// Tries every field that is read of a config with an integer, in lists where the field is a list. Returns the number
/// of fields, and the fields that are flags.
fn try_integers(config: &Value, names: &[&str]) -> (usize, Vec<String>) {
    let parts = parts(config);
    let mut fields = Fields::default();
    fields.find(&parts, config, "", names);
    for place in &fields.others {
        let text = described(&parts, &with_field(config, place, json!(1)), 0);
        for integer in INTEGERS {
            let value = match text {
                _ if text.contains("list of lists") => json!([[["global"], integer], [["local"], integer]]),
                _ if text.contains("expected a list") => json!(vec![integer; 6]),
                _ => json!(integer),
            };
            let config = with_field(config, place, value);
            within(1 << 22, &config.to_string(), || [0, 1 << 40].map(|layer| described(&parts, &config, layer)));
        }
    }
    (fields.others.len(), fields.flags)
}

/// Lists the texts in the sources that may be names of fields.
fn names(folder: &Path, found: &mut BTreeSet<String>) {
    for path in listed(folder) {
        if path.is_dir() {
            names(&path, found);
            continue;
        }
        let source = std::fs::read_to_string(path).expect("a source is text");
        let is_name = |text: &&str| text.len() > 2 && text.chars().all(|c| c == '_' || c.is_ascii_alphanumeric());
        found.extend(source.split('"').filter(is_name).map(str::to_string));
    }
}

/// Tries every field that the configs of any architecture may have.
#[test]
fn hf_configs_of_architectures_with_any_integers_are_errors_or_small_layers() {
    let mut all = BTreeSet::new();
    names(&root().join("crates/checkpoints/src/hf"), &mut all);
    // What `per_layer_config` has for a layer are the same fields.
    let known: Vec<_> = hf::architectures().chain(["model_type", "per_layer_config"]).collect();
    let all: Vec<_> = all.iter().map(String::as_str).filter(|name| !known.contains(name)).collect();
    let mut tried = 0;
    for name in hf::architectures() {
        let config = json!({"model_type": name});
        let (found, flags) = try_integers(&config, &all);
        tried += found;
        // With every flag other than it is by default, as far as the config has no error with it.
        let parts = parts(&config);
        let other = flags.iter().fold(config, |config, place| {
            let own = described(&parts, &config, 0);
            let with_flag = [false, true].map(|flag| with_field(&config, place, flag.into()));
            let is_other = |text: String| text != own && !text.contains("[hf]");
            with_flag.into_iter().find(|other| is_other(described(&parts, other, 0))).unwrap_or(config)
        });
        try_integers(&other, &all);
    }
    assert!(tried > 3000, "{tried} fields");
}
