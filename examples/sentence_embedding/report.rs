//! What is printed: how similar the sentences are.

use std::fmt::Write;

use candle_core::{Error, Result, Tensor};

use crate::embed::normalized;
use crate::texts::shown;

/// More sentences than this make a list of nearest ones, since a table of all pairs would not fit a screen.
const TABLE: usize = 12;

/// The cosines of all pairs of vectors (N, E) as a table, or the nearest to each.
pub fn similarity(vectors: &Tensor, sentences: &[String]) -> Result<String> {
    let unit = normalized(vectors)?;
    let cosines: Vec<Vec<f32>> = unit.matmul(&unit.t()?)?.to_vec2()?;
    let mut text = String::new();
    let digits = sentences.len().to_string().len();
    if sentences.len() > TABLE {
        writeln!(text, "the nearest to each, by cosine similarity").map_err(Error::wrap)?;
        for (i, (row, sentence)) in cosines.iter().zip(sentences).enumerate() {
            let others = row.iter().enumerate().filter(|&(j, _)| j != i);
            let Some((j, cosine)) = others.max_by(|a, b| a.1.total_cmp(b.1)) else { continue };
            let line = format!("{:>digits$}  {cosine:>7.4}  to {:>digits$}  {}", i + 1, j + 1, shown(sentence));
            writeln!(text, "{line}").map_err(Error::wrap)?;
        }
        return Ok(text);
    }
    let heads: String = (1..=sentences.len()).map(|i| format!("{i:>8}")).collect();
    writeln!(text, "cosine similarity\n{:digits$}{heads}", "").map_err(Error::wrap)?;
    for (i, (row, sentence)) in cosines.iter().zip(sentences).enumerate() {
        let cells: String = row.iter().map(|cosine| format!(" {cosine:>7.4}")).collect();
        writeln!(text, "{:>digits$}{cells}  {}", i + 1, shown(sentence)).map_err(Error::wrap)?;
    }
    Ok(text)
}
