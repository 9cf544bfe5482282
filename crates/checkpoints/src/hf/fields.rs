//! The fields of a `config.json`, read by type.

use std::sync::LazyLock;

use candle_core::{Result, bail};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Other names of fields: (alias, field), as `attribute_map` in transformers.
pub(super) type Aliases = &'static [(&'static str, &'static str)];

static EMPTY: LazyLock<Map<String, Value>> = LazyLock::new(Map::new);

/// The fields of one object of a `config.json` for one layer. Every error names the model and the field, and says what
/// was expected and what was found.
#[derive(Debug, Clone)]
pub(super) struct Fields<'a> {
    model: &'static str,
    /// The index of the layer; 0 before it is known.
    pub layer: usize,
    /// The number of layers; 0 before it is known.
    pub num_layers: usize,
    /// The prefix of the fields' names in errors, for an object in the config.
    within: String,
    object: &'a Map<String, Value>,
    /// The fields of this layer alone, which override the others.
    overrides: Option<&'a Map<String, Value>>,
    aliases: Vec<(&'static str, &'static str)>,
    /// The beginning of the names of fields that are for layers of one kind.
    preferred: Option<&'static str>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(
        model: &'static str,
        object: &'a Map<String, Value>,
        aliases: Vec<(&'static str, &'static str)>,
    ) -> Self {
        Self {
            model,
            layer: 0,
            num_layers: 0,
            within: String::new(),
            object,
            overrides: None,
            aliases,
            preferred: None,
        }
    }

    /// Reads fields whose names begin with `prefix` in place of those without it, where there are such.
    pub(super) fn preferring(self, prefix: &'static str) -> Self {
        Self { preferred: Some(prefix), ..self }
    }

    /// Returns the object in a field; `None` where it is absent, null or empty.
    pub(super) fn object(&self, name: &str) -> Result<Option<Self>> {
        match self.get(name) {
            Some(Value::Object(object)) if object.is_empty() => Ok(None),
            Some(Value::Object(object)) => Ok(Some(self.within(name, object))),
            Some(value) => self.expected(name, value, "an object"),
            None => Ok(None),
        }
    }

    /// Returns the object in a field; an object without fields where it is absent or null.
    pub(super) fn section(&self, name: &str) -> Result<Self> {
        Ok(self.object(name)?.unwrap_or_else(|| self.within(name, &EMPTY)))
    }

    /// Returns the fields of an object, whose name is that of errors.
    pub(super) fn within<'b>(&self, name: &str, object: &'b Map<String, Value>) -> Fields<'b> {
        let within = format!("{}{name}.", self.within);
        Fields { within, layer: self.layer, num_layers: self.num_layers, ..Fields::new(self.model, object, Vec::new()) }
    }

    /// Returns the fields of a layer, with those that `per_layer_config` has for it.
    pub(super) fn of(self, layer: usize, num_layers: usize) -> Result<Self> {
        const NAME: &str = "per_layer_config";
        let mut overrides = None;
        for (key, value) in self.object(NAME)?.iter().flat_map(|layers| layers.object) {
            let (Ok(number), Value::Object(object)) = (key.parse::<usize>(), value) else {
                return self.fail(format!("{NAME} has {key}: {value}, expected a layer's number and an object"));
            };
            if number == layer {
                overrides = Some(object);
            }
        }
        Ok(Self { layer, num_layers, overrides, ..self })
    }

    pub(super) fn fail<T>(&self, message: impl std::fmt::Display) -> Result<T> {
        bail!("[hf] {}: {message}", self.model)
    }

    fn expected<T>(&self, name: &str, found: &Value, expected: &str) -> Result<T> {
        self.fail(format!("{}{name} is {found}, expected {expected}", self.within))
    }

    /// Returns the value, which may be null.
    fn raw(&self, name: &str) -> Option<&'a Value> {
        let aliases = self.aliases.iter().filter(|(_, field)| *field == name).map(|(alias, _)| *alias);
        let mut names = aliases.chain([name]);
        if let Some(overrides) = self.overrides
            && let Some(value) = names.clone().find_map(|spelling| overrides.get(spelling))
        {
            return Some(value);
        }
        if let Some(prefix) = self.preferred
            && let Some(value) = self.object.get(&format!("{prefix}{name}"))
        {
            return Some(value);
        }
        names.find_map(|spelling| self.object.get(spelling))
    }

    /// Returns whether there is such a field, null or not.
    pub(super) fn has(&self, name: &str) -> bool {
        self.raw(name).is_some()
    }

    /// Returns the value, unless it is absent or null.
    pub(super) fn get(&self, name: &str) -> Option<&'a Value> {
        self.raw(name).filter(|value| !value.is_null())
    }

    fn read<T: Field<'a>>(&self, name: &str, value: &'a Value) -> Result<T> {
        match T::deserialize(value) {
            Ok(read) if read.is_valid() => Ok(read),
            _ => self.expected(name, value, T::EXPECTED),
        }
    }

    /// Reads a value, which may not be null, or its default where it is absent.
    pub(super) fn get_or<T: Field<'a>>(&self, name: &str, default: T) -> Result<T> {
        self.raw(name).map_or(Ok(default), |value| self.read(name, value))
    }

    /// Reads a whole number that may be 0. Null means 0 where that is the default.
    pub(super) fn count(&self, name: &str, default: usize) -> Result<usize> {
        match self.get(name) {
            None if default == 0 => Ok(0),
            Some(count) if *count == 0 => Ok(0),
            _ => self.get_or(name, default),
        }
    }

    /// Reads a height and a width: two numbers, or one if they are the same.
    pub(super) fn pair(&self, name: &str, default: [usize; 2]) -> Result<[usize; 2]> {
        match self.get(name) {
            None => Ok(default),
            Some(value) if value.is_array() => match self.read::<Vec<usize>>(name, value)?[..] {
                [height, width] if height > 0 && width > 0 => Ok([height, width]),
                _ => self.expected(name, value, "one number or two, of at least 1"),
            },
            Some(value) => self.read(name, value).map(|size| [size; 2]),
        }
    }

    /// Reads a value that has to be there.
    pub(super) fn required<T: Field<'a>>(&self, name: &str) -> Result<T> {
        match self.raw(name) {
            Some(value) => self.read(name, value),
            None => self.fail(format!("{}{name} is missing, expected {}", self.within, T::EXPECTED)),
        }
    }

    /// Reads a value; `None` where it is absent or null.
    pub(super) fn optional<T: Field<'a>>(&self, name: &str) -> Result<Option<T>> {
        self.get(name).map(|value| self.read(name, value)).transpose()
    }

    /// Reads a value; `None` where it is null, or its default where it is absent.
    pub(super) fn nullable<T: Field<'a>>(&self, name: &str, default: Option<T>) -> Result<Option<T>> {
        if self.has(name) { self.optional(name) } else { Ok(default) }
    }

    /// Returns the entry of the layer in a list; `None` where the list is absent or null.
    pub(super) fn of_layer(&self, name: &str) -> Result<Option<&'a Value>> {
        match self.get(name) {
            Some(Value::Array(list)) if self.layer >= list.len() => {
                self.fail(format!("{name} has {} entries, expected one for each layer", list.len()))
            }
            Some(Value::Array(list)) => Ok(Some(&list[self.layer])),
            Some(value) => self.expected(name, value, "a list"),
            None => Ok(None),
        }
    }

    /// Reads a flag, or its default where it is absent. Null is false, as in Python.
    pub(super) fn flag(&self, name: &str, default: bool) -> Result<bool> {
        Ok(self.nullable(name, Some(default))?.unwrap_or(false))
    }

    /// Refuses every other value, if the field is there and not null.
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

    /// Refuses a field that the family does not read and that contradicts those that it reads.
    pub(super) fn agrees(&self, name: &str, actual: usize) -> Result<()> {
        match self.get(name) {
            Some(value) if value.as_u64() != Some(actual as u64) => {
                self.fail(format!("{name} is {value}, but {} has {actual} by its other fields", self.model))
            }
            _ => Ok(()),
        }
    }
}

/// A type of a field.
pub(super) trait Field<'a>: Deserialize<'a> {
    /// The values that are expected, for errors.
    const EXPECTED: &'static str;

    fn is_valid(&self) -> bool {
        true
    }
}

impl Field<'_> for usize {
    const EXPECTED: &'static str = "a whole number of at least 1";

    fn is_valid(&self) -> bool {
        *self > 0
    }
}

impl Field<'_> for f64 {
    const EXPECTED: &'static str = "a number";
}

impl Field<'_> for Vec<f64> {
    const EXPECTED: &'static str = "a list of numbers";
}

impl Field<'_> for Vec<usize> {
    const EXPECTED: &'static str = "a list of whole numbers";
}

impl Field<'_> for bool {
    const EXPECTED: &'static str = "true or false";
}

impl<'a> Field<'a> for &'a str {
    const EXPECTED: &'static str = "text";
}
