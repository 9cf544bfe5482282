//! What is printed, drawn and written.

use std::fmt::Write;
use std::time::Duration;

use candle_attention::LayerOutput;
use candle_attention::plot::{Heads, HeatMap, TerminalOptions};
use candle_attention::text::{Batch, PaddingSide};
use candle_core::{DType, Result, Tensor};
use serde_json::json;
use unicode_width::UnicodeWidthStr;

use crate::args::Args;
use crate::system::System;

#[derive(Debug, Default, Clone, Copy)]
pub struct Times {
    pub weights: Duration,
    pub tokens: Duration,
    pub embedding: Duration,
    pub attention: Duration,
}

pub struct Report<'a> {
    pub args: &'a Args,
    pub system: &'a System,
    pub batch: &'a Batch,
    pub hidden: &'a Tensor,
    pub attention: &'a LayerOutput,
    pub times: Times,
}

impl Report<'_> {
    pub fn to_text(&self) -> Result<String> {
        let mut text = String::new();
        for row in 0..self.args.texts.len() {
            text.push_str(&self.token_table(row));
        }
        if let Some(said_by) = self.system.words.said_by {
            let _ = writeln!(text, "words     {said_by}");
        }
        let (num_heads, num_kv_heads, head_dim) = self.system.layer.heads();
        let kv = if num_kv_heads == num_heads { String::new() } else { format!(", {num_kv_heads} of keys and values") };
        let heads = if num_heads == 1 { "1 head".to_string() } else { format!("{num_heads} heads") };
        let lines = [
            ("hidden", format!("{} {}", shape(self.hidden), self.hidden.dtype().as_str())),
            ("output", format!("{}, {heads}{kv} of width {head_dim}", shape(&self.attention.output))),
            ("", format!("[0, 0, ..] = {}", self.first_numbers()?)),
            ("mask", self.mask_line()),
            ("weights", self.system.weights.clone()),
            ("embedding", self.system.embedded_by.clone()),
            ("device", format!("{:?}", self.hidden.device().location()).to_lowercase()),
            ("times", self.times_line()),
        ];
        for (name, line) in lines {
            let _ = writeln!(text, "{name:<10}{line}");
        }
        for row in 0..self.args.texts.len() {
            let map = self.heat_map(row)?.to_terminal(self.heads(Heads::Mean), &TerminalOptions::detect())?;
            let _ = write!(text, "\n{map}\n");
        }
        Ok(text)
    }

    pub fn to_json(&self) -> Result<String> {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let value = json!({
            "tokens": self.batch.tokens(),
            "ids": self.batch.ids(),
            "lens": self.batch.lens(),
            "words": self.system.words.said_by,
            "hidden_shape": self.hidden.dims(),
            "output_shape": self.attention.output.dims(),
            "num_heads": self.system.layer.heads().0,
            "output": nested(&self.attention.output)?,
            "attention_shape": self.attention.weights.dims(),
            "attention": nested(&self.attention.weights.flatten(0, 1)?)?,
            "weights": self.system.weights,
            "embedding": self.system.embedded_by,
            "dtype": self.hidden.dtype().as_str(),
            "device": format!("{:?}", self.hidden.device().location()).to_lowercase(),
            "milliseconds": {
                "weights": milliseconds(self.times.weights),
                "tokens": milliseconds(self.times.tokens),
                "embedding": milliseconds(self.times.embedding),
                "attention": milliseconds(self.times.attention),
            },
        });
        Ok(format!("{value}\n"))
    }

    /// Writes the picture that --plot asks for: one file, or `FILE-1.svg`, `FILE-2.svg` .. for several texts.
    pub fn plot(&self) -> Result<()> {
        let Some(file) = &self.args.plot else { return Ok(()) };
        for row in 0..self.args.texts.len() {
            let file = if self.args.texts.len() == 1 {
                file.clone()
            } else {
                let stem = file.file_stem().unwrap_or_default().to_string_lossy();
                let extension = file.extension().unwrap_or_default().to_string_lossy();
                file.with_file_name(format!("{stem}-{}.{extension}", row + 1))
            };
            let map = self.heat_map(row)?.with_title(&self.args.texts[row]);
            map.save(file, self.heads(Heads::All))
                .map_err(|error| candle_core::Error::msg(format!("--plot: {}", crate::common::one_line(&error))))?;
        }
        Ok(())
    }

    /// --head, or what is shown without it.
    fn heads(&self, otherwise: Heads) -> Heads {
        self.args.head.map_or(otherwise, Heads::One)
    }

    /// The weights of one text, without its padding.
    fn heat_map(&self, row: usize) -> Result<HeatMap> {
        let (start, len) = self.span(row);
        let rows = self.attention.weights.narrow(0, row, 1)?.narrow(2, start, len)?;
        let mut weights = rows.narrow(3, start, len)?;
        let tokens = &self.batch.tokens()[row][start..start + len];
        let mut keys = tokens.to_vec();
        if self.system.layer.has_learned_key() {
            let learned = rows.narrow(3, self.batch.seq_len(), 1)?;
            weights = Tensor::cat(&[&weights.contiguous()?, &learned.contiguous()?], 3)?;
            keys.push("(learned)".into());
        }
        HeatMap::new(&weights)?.with_query_tokens(tokens)?.with_key_tokens(&keys)
    }

    /// Where a text lies in its padded row.
    fn span(&self, row: usize) -> (usize, usize) {
        let len = self.batch.lens()[row];
        match self.batch.padding_side() {
            PaddingSide::Right => (0, len),
            PaddingSide::Left => (self.batch.seq_len() - len, len),
        }
    }

    /// Tokens above their ids.
    fn token_table(&self, row: usize) -> String {
        let (mut tokens, mut ids) = (String::from("tokens    "), String::from("ids       "));
        for (token, id) in self.batch.tokens()[row].iter().zip(&self.batch.ids()[row]) {
            // Tokens are untrusted text: control characters are not sent to the terminal.
            let token = token.replace(|c: char| c.is_control(), "\u{fffd}");
            let id = id.to_string();
            let width = token.width().max(id.len());
            let pad = |shown: &str| " ".repeat(width - shown.width() + 2);
            tokens.push_str(&(token.clone() + &pad(&token)));
            ids.push_str(&(id.clone() + &pad(&id)));
        }
        format!("{}\n{}\n", tokens.trim_end(), ids.trim_end())
    }

    /// What is hidden from a token.
    fn mask_line(&self) -> String {
        let causal = self.args.causal || self.system.layer.is_causal();
        let padded = self.batch.lens().iter().any(|&len| len < self.batch.seq_len());
        let lens = || self.batch.lens().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match (causal, padded) {
            (false, false) => "none".into(),
            (true, false) => "causal: later tokens are hidden".into(),
            (false, true) => format!("padding is hidden (lengths {})", lens()),
            (true, true) => format!("later tokens and padding are hidden (lengths {})", lens()),
        }
    }

    fn first_numbers(&self) -> Result<String> {
        let (start, _) = self.span(0);
        let row = self.attention.output.get(0)?.get(start)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let shown: Vec<_> = row.iter().take(4).map(|value| format!("{value:.4}")).collect();
        let rest = if row.len() > 4 { ", .." } else { "" };
        Ok(format!("[{}{rest}]", shown.join(", ")))
    }

    fn times_line(&self) -> String {
        let Times { weights, tokens, embedding, attention } = self.times;
        [("weights", weights), ("tokens", tokens), ("embedding", embedding), ("attention", attention)]
            .map(|(name, time)| format!("{name} {:.2} ms", time.as_secs_f64() * 1e3))
            .join(", ")
    }
}

/// A tensor of rank 3 as nested lists, with the digits that its dtype has.
fn nested(tensor: &Tensor) -> Result<serde_json::Value> {
    Ok(match tensor.dtype() {
        DType::F64 => json!(tensor.to_vec3::<f64>()?),
        _ => json!(tensor.to_dtype(DType::F32)?.to_vec3::<f32>()?),
    })
}

fn shape(tensor: &Tensor) -> String {
    let dims: Vec<_> = tensor.dims().iter().map(ToString::to_string).collect();
    format!("({})", dims.join(", "))
}
