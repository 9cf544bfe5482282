//! The fields of a `config.json`, read by type.

use std::sync::LazyLock;

use candle_core::{Result, bail};
use serde_json::{Map, Value};

/// Other names under which a configuration may give a field: (other, own), as `attribute_map` in transformers.
pub(super) type Aliases = &'static [(&'static str, &'static str)];

static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

/// The fields of one object of a `config.json`. Every error names the model and the field, and says what was expected and
/// what was found.
#[derive(Debug, Clone)]
pub(super) struct Fields<'a> {
    model: &'static str,
    /// The prefix of the fields' names in errors, for an object in the config.
    within: String,
    object: &'a Map<String, Value>,
    aliases: Vec<(&'static str, &'static str)>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(
        model: &'static str,
        object: &'a Map<String, Value>,
        aliases: Vec<(&'static str, &'static str)>,
    ) -> Self {
        Self { model, within: String::new(), object, aliases }
    }

    /// The object in a field; `None` where it is absent, null or empty.
    pub(super) fn object(&self, name: &str) -> Result<Option<Self>> {
        match self.get(name) {
            Some(Value::Object(object)) if object.is_empty() => Ok(None),
            Some(Value::Object(object)) => Ok(Some(self.within(name, object))),
            Some(value) => self.expected(name, value, "an object"),
            None => Ok(None),
        }
    }

    /// The object in a field; one without fields where it is absent or null.
    pub(super) fn section(&self, name: &str) -> Result<Self> {
        Ok(self.object(name)?.unwrap_or_else(|| self.within(name, &EMPTY)))
    }

    fn within(&self, name: &str, object: &'a Map<String, Value>) -> Self {
        Self { within: format!("{}{name}.", self.within), object, aliases: Vec::new(), model: self.model }
    }

    pub(super) fn fail<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        bail!("[hf] {}: {message}", self.model)
    }

    fn expected<T>(&self, name: &str, found: &Value, expected: &str) -> Result<T> {
        self.fail(format!("{}{name} is {found}, expected {expected}", self.within))
    }

    /// The value as it stands, null included.
    fn raw(&self, name: &str) -> Option<&'a Value> {
        let aliases = self.aliases.iter().filter(|(_, own)| *own == name).map(|(other, _)| *other);
        aliases.chain([name]).find_map(|name| self.object.get(name))
    }

    /// Whether there is such a field, be it null.
    pub(super) fn has(&self, name: &str) -> bool {
        self.raw(name).is_some()
    }

    /// The value, unless it is absent or null.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.raw(name).filter(|value| !value.is_null())
    }

    /// A number of things, at least 1.
    pub(super) fn size(&self, name: &str, default: usize) -> Result<usize> {
        self.raw(name).map_or(Ok(default), |value| self.whole(name, value))
    }

    fn whole(&self, name: &str, value: &Value) -> Result<usize> {
        match value.as_u64().and_then(|value| usize::try_from(value).ok()) {
            Some(size) if size > 0 => Ok(size),
            _ => self.expected(name, value, "a whole number of at least 1"),
        }
    }

    /// A number of things, or nothing where it is absent or null.
    pub(super) fn optional_size(&self, name: &str) -> Result<Option<usize>> {
        self.get(name).map(|value| self.whole(name, value)).transpose()
    }

    /// A number of things, or nothing where it is null.
    pub(super) fn size_or_null(&self, name: &str, default: Option<usize>) -> Result<Option<usize>> {
        if self.has(name) { self.optional_size(name) } else { Ok(default) }
    }

    pub(super) fn number(&self, name: &str, default: f64) -> Result<f64> {
        self.raw(name).map_or(Ok(default), |value| self.real(name, value))
    }

    fn real(&self, name: &str, value: &Value) -> Result<f64> {
        match value.as_f64() {
            Some(number) => Ok(number),
            None => self.expected(name, value, "a number"),
        }
    }

    /// A number that has to be there.
    pub(super) fn required(&self, name: &str) -> Result<f64> {
        match self.raw(name) {
            Some(value) => self.real(name, value),
            None => self.fail(format!("{}{name} is missing, expected a number", self.within)),
        }
    }

    /// A number, or nothing where it is absent or null.
    pub(super) fn optional_number(&self, name: &str) -> Result<Option<f64>> {
        self.get(name).map(|value| self.real(name, value)).transpose()
    }

    /// A number, or nothing where it is null.
    pub(super) fn number_or_null(&self, name: &str, default: Option<f64>) -> Result<Option<f64>> {
        if self.has(name) { self.optional_number(name) } else { Ok(default) }
    }

    /// A list of numbers that has to be there.
    pub(super) fn numbers(&self, name: &str) -> Result<Vec<f64>> {
        match self.list(name)? {
            Some(list) => list.iter().map(|value| self.real(name, value)).collect(),
            None => self.fail(format!("{}{name} is missing, expected a list of numbers", self.within)),
        }
    }

    /// A list, or nothing where it is absent or null.
    fn list(&self, name: &str) -> Result<Option<&'a [Value]>> {
        match self.get(name) {
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(value) => self.expected(name, value, "a list"),
            None => Ok(None),
        }
    }

    /// The entry of a layer in a list, or nothing where the list is absent or null.
    pub(super) fn of_layer(&self, name: &str, layer: usize) -> Result<Option<&'a Value>> {
        match self.list(name)? {
            Some(list) if layer >= list.len() => {
                self.fail(format!("{name} has {} entries, expected one for each layer", list.len()))
            }
            Some(list) => Ok(Some(&list[layer])),
            None => Ok(None),
        }
    }

    /// A name, or nothing where it is absent or null.
    pub(super) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        match self.get(name) {
            Some(Value::String(text)) => Ok(Some(text)),
            Some(value) => self.expected(name, value, "text"),
            None => Ok(None),
        }
    }

    /// Yes or no; null is no, as in Python.
    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        match self.raw(name) {
            None => Ok(default),
            Some(Value::Null) => Ok(false),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(value) => self.expected(name, value, "true or false"),
        }
    }

    /// An error for any other value, where there is one that is not null.
    pub(super) fn only(&self, name: &str, accepted: impl Into<Value>) -> Result<()> {
        let accepted = accepted.into();
        let same = |value: &Value| *value == accepted || (value.is_f64() && value.as_f64() == accepted.as_f64());
        match self.get(name) {
            Some(value) if !same(value) => {
                self.fail(format!("{}{name} is {value}, which is not supported, expected {accepted}", self.within))
            }
            _ => Ok(()),
        }
    }

    /// An error where a field that the family does not read contradicts those that it reads.
    pub(super) fn agrees(&self, name: &str, actual: usize) -> Result<()> {
        match self.get(name) {
            Some(value) if value.as_u64() != Some(actual as u64) => {
                self.fail(format!("{name} is {value}, but {} has {actual} by its other fields", self.model))
            }
            _ => Ok(()),
        }
    }
}
