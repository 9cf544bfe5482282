//! Requests as lines of JSON.

use std::path::Path;

use candle_attention::text::SimpleTokenizer;
use candle_core::{Result, bail};
use serde::Deserialize;

use crate::common::{EXAMPLE, read_text};

/// The latest arrival in seconds, which is about 30 years.
const LATEST: f64 = 1e9;

/// A line of the file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    id: Option<String>,
    prompt: Option<String>,
    ids: Option<Vec<u32>>,
    max_tokens: usize,
    #[serde(default)]
    arrival: f64,
}

/// The prompt of a request.
#[derive(Debug)]
pub enum Prompt {
    Text(String),
    Ids(Vec<u32>),
}

/// A request of the file.
#[derive(Debug)]
pub struct FileRequest {
    /// The name of the request: its "id", or the number of its line.
    pub name: String,
    pub prompt: Prompt,
    pub max_tokens: usize,
    /// The time of arrival in seconds after the start.
    pub arrival: f64,
}

impl FileRequest {
    /// Returns the token ids of the prompt. Text needs a tokenizer.
    pub fn ids(&self, tokenizer: Option<&SimpleTokenizer>) -> Result<Vec<u32>> {
        match (&self.prompt, tokenizer) {
            (Prompt::Ids(ids), _) => Ok(ids.clone()),
            (Prompt::Text(text), Some(tokenizer)) => Ok(tokenizer.encode(text)?.ids),
            (Prompt::Text(_), None) => bail!("[{EXAMPLE}] a text needs a tokenizer"),
        }
    }
}

/// Reads the requests of a file in the order of their arrival. Blank lines are skipped.
///
/// # Errors
/// If the file cannot be read, for a line that is no request, and if there is none. The error has the number of the
/// line.
pub fn read(path: &Path) -> Result<Vec<FileRequest>> {
    let mut requests: Vec<FileRequest> = Vec::new();
    for (n, text) in read_text(path)?.lines().enumerate() {
        if text.trim().is_empty() {
            continue;
        }
        match parse(text, n + 1) {
            Err(mistake) => bail!("[{EXAMPLE}] {}, line {}: {mistake}", path.display(), n + 1),
            Ok(request) if requests.iter().any(|earlier| earlier.name == request.name) => {
                bail!("[{EXAMPLE}] {}, line {}: there is a request {:?} before", path.display(), n + 1, request.name)
            }
            Ok(request) => requests.push(request),
        }
    }
    if requests.is_empty() {
        bail!("[{EXAMPLE}] {}: there is no request", path.display())
    }
    // Stable, so that requests of one time stay in the order of their lines.
    requests.sort_by(|one, other| one.arrival.total_cmp(&other.arrival));
    Ok(requests)
}

/// Returns the request of a line, or its mistake.
fn parse(text: &str, number: usize) -> std::result::Result<FileRequest, String> {
    // A struct may also be written as a list.
    if !text.trim_start().starts_with('{') {
        return Err("expected an object of JSON".to_string());
    }
    let line: Line = serde_json::from_str(text).map_err(|error| {
        let message = error.to_string();
        // The line in the message is always 1.
        let reason = message.rsplit_once(" at line ").map_or(message.as_str(), |(reason, _)| reason);
        format!("{reason} (column {})", error.column())
    })?;
    let prompt = match (line.prompt, line.ids) {
        (Some(prompt), None) => Prompt::Text(prompt),
        (None, Some(ids)) if ids.is_empty() => return Err("the list \"ids\" is empty".to_string()),
        (None, Some(ids)) => Prompt::Ids(ids),
        _ => return Err("expected one of \"prompt\" and \"ids\"".to_string()),
    };
    if line.max_tokens == 0 {
        return Err("\"max_tokens\" is 0, expected a number of 1 or more".to_string());
    }
    if !(0.0..=LATEST).contains(&line.arrival) {
        return Err(format!("\"arrival\" is {}, expected a number of seconds from 0 to {LATEST}", line.arrival));
    }
    let name = line.id.unwrap_or_else(|| number.to_string());
    Ok(FileRequest { name, prompt, max_tokens: line.max_tokens, arrival: line.arrival })
}
