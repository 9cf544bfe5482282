//! The option `--page`: the attention of every head of every layer of a model as one HTML file.

use std::path::Path;

use candle_attention::plot::Page;
use candle_attention::text::SimpleTokenizer;
use candle_attention::{AttentionStatistics, StatisticsOptions};
use candle_core::{Result, Tensor};
use indicatif::ProgressBar;

/// The most weights, in all layers together, that a page stores in full; for longer texts it stores the top keys of
/// each token.
const MOST_WEIGHTS: usize = 4 << 20;

/// The most characters of a title.
const MOST_OF_TITLE: usize = 60;

/// A page that grows as the layers of a model run.
pub struct PageOfLayers {
    page: Page,
    bar: ProgressBar,
    /// The statistics that each layer computes.
    statistics: StatisticsOptions,
}

impl PageOfLayers {
    /// Makes a page for `layers` layers of `heads` heads, whose title is the beginning of the text.
    pub fn new(text: &str, queries: &[String], keys: &[String], layers: usize, heads: usize) -> Result<Self> {
        let t_q = queries.len();
        let t_kv = keys.len();
        let mut statistics = StatisticsOptions::default();
        if t_q.saturating_mul(t_kv).saturating_mul(layers).saturating_mul(heads) <= MOST_WEIGHTS {
            statistics = statistics.with_weights_of(0..t_q, 0..t_kv);
        }
        let bar = super::bar("attention", layers, "layers");
        let mut title: String = text.chars().take(MOST_OF_TITLE).collect();
        if title.len() < text.len() {
            title.push('…');
        }
        Ok(Self { page: Page::new(&title).with_query_tokens(queries)?.with_key_tokens(keys)?, bar, statistics })
    }

    /// Shows weights over a picture, a PNG file, which has a grid of patches after a class token.
    pub fn over_picture(self, png: &[u8], grid: [usize; 2]) -> Result<Self> {
        Ok(Self { page: self.page.with_picture(png, grid, 1)?, ..self })
    }

    /// Runs the attention of the next layer by `run`, and stores its statistics. The name is shown next to the layer's
    /// number.
    pub fn attend(
        &mut self,
        name: &str,
        run: impl FnOnce(&StatisticsOptions) -> Result<(Tensor, AttentionStatistics)>,
    ) -> Result<Tensor> {
        let (output, statistics) = run(&self.statistics)?;
        self.page.push_layer(name, &statistics, 0)?;
        self.bar.inc(1);
        Ok(output)
    }

    /// Writes the page, and prints its size.
    pub fn write(self, path: &Path) -> Result<()> {
        self.bar.finish_and_clear();
        self.page.write(path)?;
        print_size(path)
    }
}

/// Prints the size of a page that was written.
pub fn print_size(path: &Path) -> Result<()> {
    eprintln!("{}: {:.2} MB, to open in a browser", path.display(), std::fs::metadata(path)?.len() as f64 / 1e6);
    Ok(())
}

/// Returns the text of each id, or its token if it has no text by itself.
pub fn texts(tokenizer: &SimpleTokenizer, ids: &[u32]) -> Vec<String> {
    let text = |&id: &u32| {
        let token = tokenizer.id_to_token(id).unwrap_or_else(|| id.to_string());
        match tokenizer.decode(&[id]) {
            // SentencePiece removes the space before the first word.
            Ok(text) if token.starts_with('\u{2581}') => format!(" {}", text.trim_start()),
            Ok(text) if !text.is_empty() && !text.contains('\u{fffd}') => text,
            _ => token,
        }
    };
    ids.iter().map(text).collect()
}
