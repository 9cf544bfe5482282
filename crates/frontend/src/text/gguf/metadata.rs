//! The keys of `tokenizer.ggml` in the metadata of a file.

use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::{Result, bail};

/// The expected value of a flag.
pub(super) const FLAG: &str = "true or false";

/// The keys of `tokenizer.ggml`.
pub(super) struct TokenizerMetadata<'a>(pub &'a Content);

impl<'a> TokenizerMetadata<'a> {
    pub fn fail<T>(&self, key: &str, found: impl std::fmt::Display, expected: &str) -> Result<T> {
        bail!("[gguf] tokenizer.ggml.{key} has {found}, expected {expected}")
    }

    /// Returns the value of a key read by `read`, if the file has the key.
    pub fn one<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Result<T>) -> Result<Option<T>> {
        let Some(value) = self.0.metadata.get(&format!("tokenizer.ggml.{key}")) else { return Ok(None) };
        match read(value) {
            Ok(value) => Ok(Some(value)),
            Err(_) => self.fail(key, format!("{value:?}"), expected),
        }
    }

    /// Returns the list of a key with each entry read by `read`, if the file has the key.
    pub fn list<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Result<T>) -> Result<Option<Vec<T>>> {
        let Some(list) = self.one(key, "a list", Value::to_vec)? else { return Ok(None) };
        let entry = |value| read(value).or_else(|_| self.fail(key, format!("{value:?}"), expected));
        list.iter().map(entry).collect::<Result<_>>().map(Some)
    }

    pub fn texts(&self, key: &str) -> Result<Vec<&'a str>> {
        self.required(key, self.list(key, "texts", |value| value.to_string().map(String::as_str))?)
    }

    pub fn text(&self, key: &str) -> Result<&'a str> {
        self.required(key, self.one(key, "a text", |value| value.to_string().map(String::as_str))?)
    }

    /// Returns a flag, or `default` if the file does not have it.
    pub fn flag(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.one(key, FLAG, Value::to_bool)?.unwrap_or(default))
    }

    /// Returns the score of each of `count` tokens.
    pub fn scores(&self, count: usize) -> Result<Vec<f32>> {
        let scores = self.list("scores", "numbers", Value::to_f32)?.unwrap_or_default();
        if scores.len() != count {
            return self.fail("scores", scores.len(), &format!("{count} entries"));
        }
        Ok(scores)
    }

    fn required<T>(&self, key: &str, found: Option<T>) -> Result<T> {
        found.map_or_else(|| bail!("[gguf] the metadata has no tokenizer.ggml.{key}"), Ok)
    }
}

/// Reads a whole number of any type.
pub(super) fn integer(value: &Value) -> Result<i64> {
    match *value {
        Value::I8(number) => Ok(number.into()),
        Value::I16(number) => Ok(number.into()),
        Value::I32(number) => Ok(number.into()),
        Value::I64(number) => Ok(number),
        ref value => value.to_u64()?.try_into().map_err(candle_core::Error::wrap),
    }
}
