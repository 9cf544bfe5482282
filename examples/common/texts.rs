//! What examples over lists of texts share: the lines of a file, batches, and a text in a list.

use std::path::Path;

use candle_core::{Error, Result};

/// Characters of a text that are shown.
const SHOWN: usize = 50;

/// The lines of a file that are not blank.
pub fn lines(example: &str, path: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Error::Msg(format!("[{example}] cannot read {}: {error}", path.display())))?;
    Ok(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_string).collect())
}

/// The size of a batch on the command line, of `what`.
pub fn batch(text: &str, what: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(batch) if batch > 0 => Ok(batch),
        _ => Err(format!("expected a number of {what} above 0")),
    }
}

/// The beginning of a text, with what would move the cursor spelled out.
pub fn shown(text: &str) -> String {
    let clean: String =
        text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect();
    match clean.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}..", clean[..end].trim_end()),
        None => clean,
    }
}
