//! The output of the program.

use std::path::Path;
use std::time::Duration;

use candle_attention::LayerOutput;
use candle_attention::plot::{Heads, HeatMap, TerminalOptions};
use candle_attention::text::Batch;
use candle_core::{DType, Result, Tensor};
use unicode_width::UnicodeWidthStr;

use crate::common::counted;
use crate::common::page::PageOfLayers;
use crate::source::Source;

pub struct Report {
    pub source: Source,
    pub batch: Batch,
    pub hidden: Tensor,
    pub output: LayerOutput,
    pub times: Vec<(&'static str, Duration)>,
}

impl Report {
    pub fn to_text(&self) -> Result<String> {
        let cfg = self.source.layer.config();
        let hidden = &self.hidden;
        let output = &self.output.output;
        let first = output.get(0)?.get(0)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let first: String = first.iter().take(4).map(|number| format!("{number:.4}, ")).collect();
        let step = |(name, time): &(&str, Duration)| format!("{name} {:.2} ms", time.as_secs_f64() * 1e3);
        let is_padded = self.batch.lens().iter().any(|&len| len < self.batch.seq_len());
        let mask = match (cfg.causal(), is_padded) {
            (false, false) => "none",
            (true, false) => "causal",
            (false, true) => "padding",
            (true, true) => "causal, padding",
        };
        let lines = [
            ("hidden", format!("{:?} {}", hidden.dims3()?, hidden.dtype().as_str())),
            (
                "output",
                format!("{:?}, {} of width {}", output.dims3()?, counted(cfg.num_heads(), "head"), cfg.head_dim()),
            ),
            ("", format!("[0, 0, ..] = [{first}..]")),
            ("mask", mask.to_string()),
            ("weights", self.source.weights.clone()),
            ("embedding", self.source.embedding.clone()),
            ("device", format!("{:?}", hidden.device().location()).to_lowercase()),
            ("times", self.times.iter().map(step).collect::<Vec<_>>().join(", ")),
        ];
        let mut text: String = (0..self.batch.batch_size()).map(|row| self.token_table(row)).collect();
        text.extend(lines.map(|(name, line)| format!("{name:<10}{line}\n")));
        Ok(text)
    }

    /// Returns the attention weights of each text as heat maps for the terminal.
    pub fn heat_maps(&self) -> Result<String> {
        let map = |row| self.heat_map(row)?.to_terminal(Heads::Mean, &TerminalOptions::detect());
        (0..self.batch.batch_size()).map(|row| Ok(format!("\n{}\n", map(row)?))).collect()
    }

    /// Returns tokens above their ids.
    fn token_table(&self, row: usize) -> String {
        let mut tokens = String::from("tokens    ");
        let mut ids = String::from("ids       ");
        for (token, id) in self.batch.tokens()[row].iter().zip(&self.batch.ids()[row]) {
            // Tokens are untrusted text: control characters are not sent to the terminal.
            let token = token.replace(char::is_control, "\u{fffd}");
            let id = id.to_string();
            let width = token.width().max(id.len()) + 2;
            for (line, cell) in [(&mut tokens, token), (&mut ids, id)] {
                *line += &format!("{cell}{}", " ".repeat(width - cell.width()));
            }
        }
        format!("{}\n{}\n", tokens.trim_end(), ids.trim_end())
    }

    /// Returns the heat map of one text, without its padding.
    pub fn heat_map(&self, row: usize) -> Result<HeatMap> {
        let len = self.batch.lens()[row];
        let t = self.batch.seq_len();
        let weights = self.output.weights.narrow(0, row, 1)?.narrow(2, 0, len)?;
        let weights = Tensor::cat(&[weights.narrow(3, 0, len)?, weights.narrow(3, t, weights.dim(3)? - t)?], 3)?;
        HeatMap::new(&weights)?.with_query_tokens(&self.batch.tokens()[row][..len])?.with_key_tokens(&self.keys(row)?)
    }

    /// Returns the tokens of one text, followed by learned keys of the layer.
    fn keys(&self, row: usize) -> Result<Vec<String>> {
        let learned = self.output.weights.dim(3)? - self.batch.seq_len();
        let tokens = &self.batch.tokens()[row][..self.batch.lens()[row]];
        Ok([tokens, &vec!["(learned)".to_string(); learned]].concat())
    }

    /// Writes the weights of the first text, without its padding, as a page.
    pub fn write_page(&self, title: &str, file: &Path) -> Result<()> {
        let heads = self.source.layer.config().num_heads();
        let len = self.batch.lens()[0];
        let hidden = self.hidden.narrow(0, 0, 1)?.narrow(1, 0, len)?;
        let mut page = PageOfLayers::new(title, &self.batch.tokens()[0][..len], &self.keys(0)?, 1, heads)?;
        page.attend("", |wanted| self.source.layer.forward_with_statistics(&hidden, wanted))?;
        page.write(file)
    }
}
