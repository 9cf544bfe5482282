//! [`SimpleTokenizer`] from and to a `tokenizer.json`.

use std::path::Path;

use tokenizers::Tokenizer;

use super::error::{BoxError, TokenizerError};
use super::pipeline;
use super::tokenizer::SimpleTokenizer;

type Result<T> = std::result::Result<T, TokenizerError>;

impl SimpleTokenizer {
    /// Reads a Hugging Face `tokenizer.json`, or what [`save`](Self::save) has written.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is not a `tokenizer.json`, or asks for something impossible: truncation to
    /// fewer tokens than the special ones, a post-processor with tokens that it does not define.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = std::fs::read(path).map_err(|source| TokenizerError::File {
            action: "read",
            path: path.to_owned(),
            source,
        })?;
        Self::load(&bytes).map_err(|source| TokenizerError::Load { path: Some(path.to_owned()), source })
    }

    /// [`from_file`](Self::from_file) with the file's bytes.
    ///
    /// # Errors
    ///
    /// As there, but for the reading.
    pub fn from_bytes(bytes: impl AsRef<[u8]>) -> Result<Self> {
        Self::load(bytes.as_ref()).map_err(|source| TokenizerError::Load { path: None, source })
    }

    fn load(bytes: &[u8]) -> std::result::Result<Self, BoxError> {
        let mut inner = pipeline::shielded(|| Tokenizer::from_bytes(bytes))?;
        let padding = inner.get_padding().cloned();
        inner.with_padding(None);
        pipeline::validate(&inner, padding.as_ref())?;
        Ok(Self { inner, padding })
    }

    /// Writes a `tokenizer.json` with everything chosen here; loading it gives the same behaviour.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let mut whole = self.inner.clone();
        whole.with_padding(self.padding.clone());
        let json = whole.to_string(true).map_err(|source| TokenizerError::Pipeline { action: "save", source })?;
        std::fs::write(path, json).map_err(|source| TokenizerError::File {
            action: "write",
            path: path.to_owned(),
            source,
        })
    }
}
