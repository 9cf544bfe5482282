//! The fields of configs in JSON: errors that name the right field, or the field with a wrong value.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::{Error as ValueError, MapAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, IntoDeserializer, MapAccess, Visitor};

use super::{edits, nearest};

/// Names that other libraries or earlier versions have for something that a config has under another name.
#[derive(Debug, Clone, Copy)]
pub struct Synonym {
    /// The other names.
    pub names: &'static [&'static str],
    /// A field of the config. The advice is for configs that have it.
    pub field: &'static str,
    /// The text that an error shows instead of the unknown name.
    pub advice: &'static str,
}

impl Synonym {
    /// Returns the other names of one field.
    pub const fn of(field: &'static str, names: &'static [&'static str], advice: &'static str) -> Self {
        Self { names, field, advice }
    }
}

/// Returns serde's error with the text of [`unknown_field`], if there is one.
pub fn explain_unknown_field<E: Error>(error: E, synonyms: &[Synonym]) -> E {
    match unknown_field(&error.to_string(), synonyms) {
        Some(text) => E::custom(text),
        None => error,
    }
}

/// Returns serde's error about an unknown field with a question for the field that is meant instead of the list of all
/// fields; `None` for another error, and if no field is near. The list has the fields of the struct without that field,
/// which may be a part of the config.
pub fn unknown_field(text: &str, synonyms: &[Synonym]) -> Option<String> {
    let quoted: Vec<&str> = text.strip_prefix("unknown field ")?.split('`').collect();
    // The texts between quotes and those in quotes take turns; the last one is the position in the file.
    let [_, unknown, .., position] = quoted[..] else { return None };
    let known: Vec<&str> = quoted[2..].iter().skip(1).step_by(2).copied().collect();
    let meant = if let Some(advice) = advice(synonyms, &known, unknown) {
        advice.to_string()
    } else if let Some(field) = misspelt(unknown, known.iter().copied()) {
        format!("`{field}`")
    } else {
        // A misspelling of another library's name.
        let of_known = synonyms.iter().filter(|synonym| known.contains(&synonym.field));
        let name = misspelt(unknown, of_known.flat_map(|synonym| synonym.names.iter().copied()))?;
        advice(synonyms, &known, name)?.to_string()
    };
    Some(format!("unknown field `{unknown}`, did you mean {meant}?{position}"))
}

/// Returns what to write instead of a name, if it is a synonym of one of the known fields.
fn advice(synonyms: &[Synonym], known: &[&str], name: &str) -> Option<&'static str> {
    let is_meant = |synonym: &&Synonym| synonym.names.contains(&name) && known.contains(&synonym.field);
    synonyms.iter().find(is_meant).map(|synonym| synonym.advice)
}

/// Returns the known name of which another one is a misspelling, if there is one.
fn misspelt<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let nearest = *nearest(unknown, known).first()?;
    // Names of other things may be near too.
    (3 * edits(unknown, nearest) <= unknown.len().max(nearest.len())).then_some(nearest)
}

/// Reads the value of a field that is a variant of an enum. The error for a value of another type names the field and
/// the variants.
///
/// # Errors
/// For another value than a variant.
pub fn variant<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
    field: &'static str,
) -> Result<T, D::Error> {
    // Only formats for people tell the type of a value.
    if !deserializer.is_human_readable() {
        return T::deserialize(deserializer);
    }
    let visitor = VariantVisitor { field, variant: PhantomData };
    match deserializer.deserialize_any(visitor)? {
        Some(value) => Ok(value),
        None => Err(D::Error::custom(format!("invalid type: null, expected `{field}` as {}", variants::<T>()))),
    }
}

/// Reads the value of a field that is a variant of an enum or null, as [`variant`] does.
///
/// # Errors
/// For another value than a variant or null.
pub fn optional_variant<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
    field: &'static str,
) -> Result<Option<T>, D::Error> {
    if !deserializer.is_human_readable() {
        return Option::deserialize(deserializer);
    }
    deserializer.deserialize_any(VariantVisitor { field, variant: PhantomData })
}

/// Returns the list of the variants of an enum, from serde's error about an unknown one.
fn variants<'de, T: Deserialize<'de>>() -> String {
    let unknown: Result<T, ValueError> = T::deserialize("".into_deserializer());
    let text = unknown.err().map(|error| error.to_string()).unwrap_or_default();
    text.split_once("expected ").map_or("a variant".to_string(), |(_, list)| list.to_string())
}

/// A visitor of a variant by its name, or by a map from its name to its content.
struct VariantVisitor<T> {
    field: &'static str,
    variant: PhantomData<T>,
}

impl<'de, T: Deserialize<'de>> Visitor<'de> for VariantVisitor<T> {
    type Value = Option<T>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "`{}` as {}", self.field, variants::<T>())
    }

    fn visit_str<E: Error>(self, name: &str) -> Result<Self::Value, E> {
        T::deserialize(name.into_deserializer()).map(Some)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        T::deserialize(MapAccessDeserializer::new(map)).map(Some)
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
}
