//! Code that examples over lists of texts share: reading texts, their greatest length, and printing their beginnings.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Result, bail};
use clap::Args;

use crate::common::page::{self, PageOfLayers};
use crate::common::{EXAMPLE, read_optional, read_text};
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
    #[arg(long, value_name = "N", default_value = "32")]
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

/// Returns the most tokens that both the checkpoint's tokenizer and the positions of its model accept.
pub fn max_tokens(folder: &Path, positions: Option<usize>) -> Result<Option<usize>> {
    // The file has a number of thirty digits if there is no limit.
    let length = read_optional(&folder.join(TOKENIZER))?["model_max_length"].as_u64();
    let most = length.and_then(|length| usize::try_from(length).ok());
    Ok(match (most, positions) {
        (Some(most), Some(positions)) => Some(most.min(positions)),
        (most, positions) => most.or(positions),
    })
}

/// Loads a checkpoint's tokenizer, which cuts texts at `max_tokens`.
pub fn tokenizer(folder: &Path, max_tokens: Option<usize>) -> Result<SimpleTokenizer> {
    let mut tokenizer = SimpleTokenizer::from_file(folder.join("tokenizer.json"))?;
    if let Some(most) = max_tokens {
        tokenizer = tokenizer.with_truncation(most)?;
    }
    Ok(tokenizer)
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
    format!("{} texts, {tokens} tokens, {seconds:.3} s: {texts:.1} texts/s, {tokens_rate:.1} tokens/s", lens.len())
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
