//! Code that examples over lists of texts share: reading texts, their greatest length, batches, and printing their
//! beginnings.
#![allow(dead_code, reason = "each program uses a part")]

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Result, bail};
use clap::Args;
use serde_json::Value;

use crate::common::page::{self, PageOfLayers};
use crate::common::{EXAMPLE, count, counted, read_optional, read_text};
use crate::model::Encoder;

/// The number of characters of a text that are printed.
const SHOWN: usize = 50;
/// The file with the greatest number of tokens of a text.
pub const TOKENIZER: &str = "tokenizer_config.json";

/// The texts, and the number that go through a model at a time.
#[derive(Debug, Args)]
pub struct TextArgs {
    /// Texts, before those of --file
    #[arg(value_name = "TEXT", required_unless_present = "file")]
    pub texts: Vec<String>,

    /// A file with a text on each line; blank lines are skipped
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// The number of texts that go through the model at a time
    #[arg(long, value_name = "N", default_value = "32", value_parser = count)]
    pub batch: NonZeroUsize,
}

impl TextArgs {
    /// Returns the texts of the arguments, then those of the file.
    pub fn read(&self) -> Result<Vec<String>> {
        let mut texts = self.texts.clone();
        if let Some(index) = texts.iter().position(|text| text.trim().is_empty()) {
            bail!("[{EXAMPLE}] text {} is empty, expected a text with words", index + 1)
        }
        if let Some(path) = &self.file {
            let text = read_text(path)?;
            texts.extend(text.lines().filter(|line| !line.trim().is_empty()).map(str::to_string));
        }
        if texts.is_empty() {
            bail!("[{EXAMPLE}] there is no text")
        }
        Ok(texts)
    }
}

/// Returns the most tokens of a text: a number of the settings, or else the most that both the checkpoint's tokenizer
/// and the positions of its model accept.
pub fn max_tokens(given: Option<usize>, folder: &Path, positions: Option<usize>) -> Result<Option<usize>> {
    if given.is_some() {
        return Ok(given);
    }
    // The file has a number of thirty digits if there is no limit.
    let length = read_optional(&folder.join(TOKENIZER))?["model_max_length"].as_u64();
    let most = length.and_then(|length| usize::try_from(length).ok());
    Ok(match (most, positions) {
        (Some(most), Some(positions)) => Some(most.min(positions)),
        (most, positions) => most.or(positions),
    })
}

/// Loads a checkpoint's tokenizer.
pub fn tokenizer(folder: &Path) -> Result<SimpleTokenizer> {
    Ok(SimpleTokenizer::from_file(folder.join("tokenizer.json"))?)
}

/// Returns a tokenizer that cuts texts at `max_tokens`, if there is a limit.
pub fn cutting(tokenizer: SimpleTokenizer, max_tokens: Option<usize>) -> Result<SimpleTokenizer> {
    match max_tokens {
        Some(most) => Ok(tokenizer.with_truncation(most)?),
        None => Ok(tokenizer),
    }
}

/// Returns the text of a special token in a tokenizer's settings.
pub fn special_token(setting: &Value) -> Option<&str> {
    setting.as_str().or(setting["content"].as_str())
}

/// Computes a result of each text, in the order of the texts. `run` computes a batch; `done` is called with the
/// numbers of texts done and in all.
pub fn in_batches<T>(
    texts: &[Encoding],
    batch: NonZeroUsize,
    done: &mut dyn FnMut(usize, usize),
    mut run: impl FnMut(&[&Encoding]) -> Result<Vec<T>>,
) -> Result<Vec<T>> {
    // A batch has texts of about one length, so that no thread waits for a long one.
    let mut order: Vec<usize> = (0..texts.len()).collect();
    order.sort_by_key(|&text| texts[text].ids.len());
    let mut results = Vec::with_capacity(texts.len());
    for chosen in order.chunks(batch.get()) {
        let own: Vec<_> = chosen.iter().map(|&text| &texts[text]).collect();
        results.extend(chosen.iter().zip(run(&own)?));
        done(results.len(), texts.len());
    }
    results.sort_by_key(|(text, _)| **text);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

/// Runs the model over one input and writes a page of the attention of every layer.
pub fn write_page(
    model: &Encoder,
    tokenizer: &SimpleTokenizer,
    title: &str,
    input: &Encoding,
    path: &Path,
) -> Result<()> {
    let tokens = page::texts(tokenizer, &input.ids);
    let layers = model.blocks.softmax_attentions().count();
    let mut page = PageOfLayers::new(title, &tokens, &tokens, layers, model.blocks.num_heads())?;
    model.through_blocks(&[&input.ids], &input.type_ids, |attention, input| {
        page.attend("", |wanted| attention.forward_with_statistics(input, wanted))
    })?;
    page.write(path)
}

/// Returns a line about the speed of a run over texts of these numbers of tokens.
pub fn rate(lens: &[usize], time: Duration) -> String {
    let seconds = time.as_secs_f64().max(1e-9);
    let tokens: usize = lens.iter().sum();
    let [texts, tokens_rate] = [lens.len(), tokens].map(|count| count as f64 / seconds);
    let counts = [counted(lens.len(), "text"), counted(tokens, "token")].join(", ");
    format!("{counts}, {seconds:.3} s: {texts:.1} texts/s, {tokens_rate:.1} tokens/s")
}

/// Returns the beginning of a text, with control characters escaped.
pub fn shown(text: &str) -> String {
    let clean: String =
        text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect();
    match clean.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}..", clean[..end].trim_end()),
        None => clean,
    }
}
