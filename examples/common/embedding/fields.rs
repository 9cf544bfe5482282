//! A JSON object of settings, whose keys all have to be known.

use std::path::Path;

use candle_core::{Result, bail};
use serde_json::{Map, Value};

use crate::common::{EXAMPLE, read_json};

/// The settings in a file.
pub struct Fields {
    /// The name of the file, for errors.
    file: String,
    object: Map<String, Value>,
}

impl Fields {
    /// Reads a file below a folder. A file that is missing has no settings.
    pub fn read(folder: &Path, file: &str) -> Result<Self> {
        let path = folder.join(file);
        let json = if path.is_file() { read_json(&path)? } else { Value::Object(Map::new()) };
        Self::of(file, json)
    }

    /// Returns the settings of an object, which is in this file.
    pub fn of(file: &str, json: Value) -> Result<Self> {
        match json {
            Value::Object(object) => Ok(Self { file: file.to_string(), object }),
            other => bail!("[{EXAMPLE}] {file} is {other}, expected an object"),
        }
    }

    pub fn file(&self) -> &str {
        &self.file
    }

    /// Returns the value of a key; null if it is not there.
    pub fn get(&self, key: &str) -> &Value {
        self.object.get(key).unwrap_or(&Value::Null)
    }

    /// Returns the settings in a section; one that is missing or null has no settings.
    pub fn section(&self, key: &str) -> Result<Self> {
        let json = match self.get(key) {
            Value::Null => Value::Object(Map::new()),
            own => own.clone(),
        };
        Self::of(&format!("{key} of {}", self.file), json)
    }

    /// Returns the settings as JSON.
    pub fn into_object(self) -> Map<String, Value> {
        self.object
    }

    pub fn has(&self, key: &str) -> bool {
        self.object.contains_key(key)
    }

    /// Checks that all keys are among these.
    ///
    /// # Errors
    /// If one is not; the error names it.
    pub fn only(&self, known: &[&str]) -> Result<()> {
        for (key, value) in &self.object {
            if !known.contains(&key.as_str()) {
                bail!(
                    "[{EXAMPLE}] {} has {key}: {value}, which is not known, expected only {}",
                    self.file,
                    known.join(", ")
                )
            }
        }
        Ok(())
    }

    /// Returns a flag, or this default if it is missing or null.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            Value::Null => Ok(default),
            Value::Bool(flag) => Ok(*flag),
            _ => self.fail(key, "true or false"),
        }
    }

    /// Returns a text; `None` if it is missing or null.
    pub fn text(&self, key: &str) -> Result<Option<&str>> {
        match self.get(key) {
            Value::Null => Ok(None),
            Value::String(text) => Ok(Some(text)),
            _ => self.fail(key, "a text"),
        }
    }

    /// Returns a number of at least 1; `None` if it is missing or null.
    pub fn count(&self, key: &str, of: &str) -> Result<Option<usize>> {
        match self.get(key) {
            Value::Null => Ok(None),
            value => match value.as_u64().and_then(|count| usize::try_from(count).ok()) {
                Some(count) if count > 0 => Ok(Some(count)),
                _ => self.fail(key, &format!("a number of {of}")),
            },
        }
    }

    /// Returns the error of a key whose value is not as expected.
    pub fn fail<T>(&self, key: &str, expected: &str) -> Result<T> {
        bail!("[{EXAMPLE}] {key} of {} is {}, expected {expected}", self.file, self.get(key))
    }
}
