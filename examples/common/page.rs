//! `--page`: what every head of every layer of a model attends to, as one HTML file.

use std::path::Path;

use candle_attention::plot::Page;
use candle_attention::text::SimpleTokenizer;
use candle_attention::{AttentionStatistics, StatisticsOptions};
use candle_core::{Result, Tensor};
use indicatif::ProgressBar;

/// Weights are kept as they are up to so many in all layers together; of longer texts, those of each token's top keys.
const MOST_WEIGHTS: usize = 4 << 20;

/// Characters of a text.
const MOST_OF_TITLE: usize = 60;

/// A page that grows as the layers of a model run.
pub struct PageOfLayers {
    page: Page,
    bar: ProgressBar,
    /// What is asked of a layer.
    wanted: StatisticsOptions,
}

impl PageOfLayers {
    /// For so many layers of so many heads. A title is the beginning of the text.
    pub fn new(text: &str, queries: &[String], keys: &[String], [layers, heads]: [usize; 2]) -> Result<Self> {
        let (t_q, t_kv) = (queries.len(), keys.len());
        let weights = [t_kv, layers, heads].iter().fold(t_q, |product, &count| product.saturating_mul(count));
        let wanted = StatisticsOptions::default();
        let wanted = if weights <= MOST_WEIGHTS { wanted.with_weights_of(0..t_q, 0..t_kv) } else { wanted };
        let bar = super::bar("attention", layers, "layers");
        let mut title: String = text.chars().take(MOST_OF_TITLE).collect();
        if title.len() < text.len() {
            title.push('…');
        }
        Ok(Self { page: Page::new(&title).with_query_tokens(queries)?.with_key_tokens(keys)?, bar, wanted })
    }

    /// Over a picture, a PNG file, of rows and columns of patches behind a class token.
    pub fn over_picture(self, png: &[u8], grid: [usize; 2]) -> Result<Self> {
        Ok(Self { page: self.page.with_picture(png, grid, 1)?, ..self })
    }

    /// Attends by `run`, that of the next layer, and keeps its statistics. A name stands beside the layer's number.
    pub fn attend(
        &mut self,
        name: &str,
        run: impl FnOnce(&StatisticsOptions) -> Result<(Tensor, AttentionStatistics)>,
    ) -> Result<Tensor> {
        let (output, statistics) = run(&self.wanted)?;
        self.page.push_layer(name, &statistics, 0)?;
        self.bar.inc(1);
        Ok(output)
    }

    /// Writes the page, in a folder that is made for it, and says so.
    pub fn write(self, path: &Path) -> Result<()> {
        self.bar.finish_and_clear();
        path.parent().map_or(Ok(()), std::fs::create_dir_all).map_err(super::cannot("write", path))?;
        self.page.write(path)?;
        eprintln!("{}: {:.2} MB, to open in a browser", path.display(), std::fs::metadata(path)?.len() as f64 / 1e6);
        Ok(())
    }
}

/// What each id stands for, as text where it is some by itself.
pub fn texts(tokenizer: &SimpleTokenizer, ids: &[u32]) -> Vec<String> {
    let text = |&id: &u32| {
        let token = tokenizer.id_to_token(id).unwrap_or_else(|| id.to_string());
        match tokenizer.decode(&[id]) {
            // SentencePiece takes the space from the first word.
            Ok(text) if token.starts_with('\u{2581}') => format!(" {}", text.trim_start()),
            Ok(text) if !text.is_empty() && !text.contains('\u{fffd}') => text,
            _ => token,
        }
    };
    ids.iter().map(text).collect()
}
