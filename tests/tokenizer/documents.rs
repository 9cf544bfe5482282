//! Small tokenizer.json documents, whose models are those of `models.json`.

use candle_attention::text::SimpleTokenizer;
use serde_json::{Value, json};

/// A model, or a part of a document, by its name.
pub fn named(name: &str) -> Value {
    let named: Value = serde_json::from_str(include_str!("models.json")).expect("JSON");
    named[name].clone()
}

/// A tokenizer.json around a model, with the keys of `parts` on top, those of "model" in the model.
pub fn file(model: &str, parts: Value) -> Vec<u8> {
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null, "model": named(model),
    });
    for (key, value) in parts.as_object().expect("keys") {
        match (&mut file[key], value) {
            (Value::Object(model), Value::Object(own)) if key == "model" => model.extend(own.clone()),
            (place, value) => *place = value.clone(),
        }
    }
    file.to_string().into_bytes()
}

pub fn load(model: &str, parts: Value) -> SimpleTokenizer {
    SimpleTokenizer::from_bytes(file(model, parts)).expect("a tokenizer")
}

pub fn special(id: u32, content: &str) -> Value {
    json!({
        "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    })
}

pub fn padding(direction: &str, strategy: Value, multiple: Option<usize>) -> Value {
    json!({
        "strategy": strategy, "direction": direction, "pad_to_multiple_of": multiple, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "[PAD]",
    })
}
