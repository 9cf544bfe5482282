//! One thing wrong at a time: the tensors of a call that fits, each of another shape or dtype in turn, and the tensors
//! of a checkpoint, each missing or of another shape.

use serde_json::{Map, Value, json};

use crate::words::dtype_and_shape;
use crate::*;

/// A call that fits. Sizes of its tensors may be letters, which `sizes` has: `{"sizes": {"T": 3}, "xs": "1 T 8"}`.
pub struct Fitting {
    call: Value,
    sizes: Map<String, Value>,
}

impl Fitting {
    pub fn new(mut call: Value) -> Self {
        let sizes = call.as_object_mut().and_then(|call| call.remove("sizes"));
        Self { call, sizes: sizes.and_then(|sizes| sizes.as_object().cloned()).unwrap_or_default() }
    }

    /// Returns the call with numbers for letters.
    pub fn whole(&self) -> Value {
        let mut call = self.call.clone();
        for (place, text) in self.tensors() {
            let words = text.split(' ').map(|word| self.sizes.get(word).map_or(word.to_string(), Value::to_string));
            put(&mut call, &place, words.collect::<Vec<_>>().join(" "));
        }
        call
    }

    /// Lists the paths of its tensors and their texts. These fields of a call belong to a layer.
    fn tensors(&self) -> Vec<(String, String)> {
        fn find(json: &Value, place: &str, letters: &Map<String, Value>, found: &mut Vec<(String, String)>) {
            let is_size = |word: &str| letters.contains_key(word) || dtype_and_shape(word).is_some();
            match json {
                Value::String(text) if text.split(' ').all(is_size) => found.push((place.into(), text.clone())),
                Value::Object(fields) => {
                    for (name, field) in
                        fields.iter().filter(|(name, _)| !["config", "weights"].contains(&name.as_str()))
                    {
                        find(field, &format!("{place}/{name}"), letters, found);
                    }
                }
                Value::Array(list) => {
                    let entries = list.iter().enumerate();
                    entries.for_each(|(i, entry)| find(entry, &format!("{place}/{i}"), letters, found));
                }
                _ => {}
            }
        }
        let mut found = Vec::new();
        find(&self.call, "", &self.sizes, &mut found);
        found.sort();
        found
    }
}

fn put(call: &mut Value, place: &str, text: String) {
    *call.pointer_mut(place).expect("a tensor stands there") = text.into();
}

fn text((dtype, shape): (DType, &[usize])) -> String {
    let sizes = shape.iter().map(|size| format!(" {size}"));
    format!("{}{}", dtype.as_str(), sizes.collect::<String>())
}

/// Lists other shapes: none, without the first dimension, with one more, and with each dimension empty or larger by
/// one.
fn other_shapes(shape: &[usize]) -> Vec<Vec<usize>> {
    let mut others = vec![vec![], shape.get(1..).unwrap_or_default().to_vec(), [&[1], shape].concat()];
    for at in 0..shape.len() {
        for size in [0, shape[at] + 1] {
            let mut other = shape.to_vec();
            other[at] = size;
            others.push(other);
        }
    }
    others.dedup();
    others.retain(|other| other != shape);
    others
}

/// Lists the texts of calls in which one tensor has another shape or dtype, or in which one size is changed for all
/// tensors that have it.
pub fn tensors(fitting: &Fitting, said: impl Fn(Value) -> String) -> Vec<String> {
    let whole = fitting.whole();
    assert_eq!(said(whole.clone()), ACCEPTED, "{whole}");
    let mut texts = Vec::new();
    let tensors = fitting.tensors();
    for (place, _) in &tensors {
        let own = whole.pointer(place).and_then(Value::as_str).expect("a tensor stands there");
        let (dtype, shape) = dtype_and_shape(own).expect("a tensor");
        let mut with = |what: String, kind: DType, dims: &[usize]| {
            let mut call = whole.clone();
            put(&mut call, place, text((kind, dims)));
            texts.push(format!("{} {what}: {}", &place[1..], said(call)));
        };
        for other in other_shapes(&shape) {
            with(format!("{other:?}"), dtype, &other);
        }
        for other in [DType::F16, DType::F64, DType::I64].into_iter().filter(|other| *other != dtype) {
            with(format!("in {other:?}"), other, &shape);
        }
    }
    for (letter, size) in &fitting.sizes {
        let shared = tensors.iter().filter(|(_, text)| text.split(' ').any(|word| word == letter)).count() > 1;
        for other in [0, size.as_u64().expect("a size") + 1].into_iter().filter(|_| shared) {
            let mut sizes = fitting.sizes.clone();
            sizes.insert(letter.clone(), other.into());
            let call = Fitting { call: fitting.call.clone(), sizes }.whole();
            texts.push(format!("{letter} {other}: {}", said(call)));
        }
    }
    texts
}

/// Lists the texts of checkpoints in which one tensor is missing, or has another shape.
pub fn weights(fitting: &Fitting, said: impl Fn(Value) -> String) -> Vec<String> {
    let whole = fitting.whole();
    assert_eq!(said(whole.clone()), ACCEPTED, "{whole}");
    let mut texts = Vec::new();
    let mut names: Vec<_> = whole["weights"].as_object().expect("names and shapes").iter().collect();
    names.sort_by_key(|(name, _)| *name);
    for (name, own) in names {
        let with = |text: Value| said(merged(whole.clone(), json!({"weights": {name: text}})));
        texts.push(format!("no {name}: {}", with(Value::Null)));
        let (dtype, shape) = own.as_str().and_then(dtype_and_shape).expect("a tensor");
        let larger = shape.iter().map(|size| size + 1).collect();
        let transposed = shape.iter().rev().copied().collect();
        let rows = shape[..shape.len().saturating_sub(1)].to_vec();
        let mut others: Vec<Vec<usize>> = vec![larger, transposed, rows, vec![]];
        others.dedup();
        for other in others.into_iter().filter(|other| *other != shape) {
            texts.push(format!("{name} {other:?}: {}", with(text((dtype, &other)).into())));
        }
    }
    texts
}
