//! What is printed: how similar the sentences are.

use candle_core::{Result, Tensor};

use crate::embed::normalized;
use crate::texts::shown;

/// More sentences than this make a list of nearest ones, since a table of all pairs would not fit a screen.
const TABLE: usize = 12;

/// The cosines of all pairs of vectors (N, E) as a table, or the nearest to each.
pub fn similarity(vectors: &Tensor, sentences: &[String]) -> Result<String> {
    let unit = normalized(vectors)?;
    let cosines: Vec<Vec<f32>> = unit.matmul(&unit.t()?)?.to_vec2()?;
    let digits = sentences.len().to_string().len();
    let rows = cosines.iter().zip(sentences).enumerate();
    if sentences.len() > TABLE {
        let nearest = rows.filter_map(|(i, (row, sentence))| {
            let others = row.iter().enumerate().filter(|&(j, _)| j != i);
            let (j, cosine) = others.max_by(|a, b| a.1.total_cmp(b.1))?;
            Some(format!("{:>digits$}  {cosine:>7.4}  to {:>digits$}  {}\n", i + 1, j + 1, shown(sentence)))
        });
        return Ok(format!("the nearest to each, by cosine similarity\n{}", nearest.collect::<String>()));
    }
    let heads: String = (1..=sentences.len()).map(|i| format!("{i:>8}")).collect();
    let table = rows.map(|(i, (row, sentence))| {
        let cells: String = row.iter().map(|cosine| format!(" {cosine:>7.4}")).collect();
        format!("{:>digits$}{cells}  {}\n", i + 1, shown(sentence))
    });
    Ok(format!("cosine similarity\n{:digits$}{heads}\n{}", "", table.collect::<String>()))
}
