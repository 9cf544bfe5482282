//! What every layer of an encoder attends to.

use std::path::Path;

use candle_attention::text::SimpleTokenizer;
use candle_core::Result;

use crate::common::page::{PageOfLayers, texts};
use crate::model::Encoder;

/// Runs the model over the tokens of one input, whose `segments` are empty if it is one text, and writes the page.
pub fn write(
    model: &Encoder,
    tokenizer: &SimpleTokenizer,
    title: &str,
    ids: &[u32],
    segments: &[u32],
    path: &Path,
) -> Result<()> {
    let (tokens, (layers, _)) = (texts(tokenizer, ids), model.size()?);
    let heads = model.attention(0).map_or(0, |attention| attention.config().num_heads());
    let mut page = PageOfLayers::new(title, &tokens, &tokens, [layers, heads])?;
    model.through_blocks(&[ids], segments, |attention, input| {
        page.attend(|wanted| attention.forward_with_statistics(input, wanted))
    })?;
    page.write(path)
}
