//! What examples over lists of texts share: where texts come from, how long they may be, and how one is shown.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use candle_attention::text::{Encoding, SimpleTokenizer};
use candle_core::{Result, bail};
use clap::Args;

use crate::common::page::{self, PageOfLayers};
use crate::common::{EXAMPLE, read_optional, read_text};
use crate::model::Encoder;

/// Characters of a text that are shown.
const SHOWN: usize = 50;
/// The file that says how many tokens a text may have.
pub const TOKENIZER: &str = "tokenizer_config.json";

/// Texts, and how they go through a model.
#[derive(Debug, Args)]
pub struct TextArgs {
    /// Texts, in front of those of --file
    #[arg(value_name = "TEXT", required_unless_present = "file")]
    pub texts: Vec<String>,

    /// A text file with a text on each line; blank lines count for none
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Texts that go through the model at a time
    #[arg(long, value_name = "N", default_value = "32")]
    pub batch: NonZeroUsize,
}

impl TextArgs {
    /// The arguments, then the lines of the file.
    pub fn read(&self) -> Result<Vec<String>> {
        let mut texts = self.texts.clone();
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

/// The most tokens that a checkpoint's tokenizer and the positions of its model take.
pub fn max_tokens(folder: &Path, positions: Option<usize>) -> Result<Option<usize>> {
    let said = read_optional(&folder.join(TOKENIZER))?["model_max_length"].as_u64();
    // Where there is no limit, the file has a number of thirty digits.
    Ok(said.and_then(|most| usize::try_from(most).ok()).into_iter().chain(positions).min())
}

/// A checkpoint's tokenizer; texts are cut at so many tokens.
pub fn tokenizer(folder: &Path, max_tokens: Option<usize>) -> Result<SimpleTokenizer> {
    let whole = SimpleTokenizer::from_file(folder.join("tokenizer.json"))?;
    Ok(if let Some(most) = max_tokens { whole.with_truncation(most)? } else { whole })
}

/// Runs the model over one input and writes a page of what every layer attends to.
pub fn write_page(
    model: &Encoder,
    tokenizer: &SimpleTokenizer,
    title: &str,
    input: &Encoding,
    path: &Path,
) -> Result<()> {
    let tokens = page::texts(tokenizer, &input.ids);
    let mut page = PageOfLayers::new(title, &tokens, &tokens, model.blocks.layers_and_heads())?;
    model.through_blocks(&[&input.ids], &input.type_ids, |attention, input| {
        page.attend("", |wanted| attention.forward_with_statistics(input, wanted))
    })?;
    page.write(path)
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
