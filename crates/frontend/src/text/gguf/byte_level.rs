//! BPE whose merges are in the file: over bytes, or over characters.

use candle_core::{Result, bail};
use serde_json::{Value, json};

use super::divisions::Division;
use super::metadata::TokenizerMetadata;
use super::{Base, Pieces, unknown_token};

/// Builds BPE with the division that `tokenizer.ggml.pre` names.
pub(super) fn byte_level(metadata: &TokenizerMetadata, pieces: &Pieces) -> Result<Base> {
    let pre = metadata.text("pre")?;
    let Some(division) = Division::find(pre) else {
        bail!("[gguf] tokenizer.ggml.pre is {pre:?}, expected one of: {}", Division::names().join(", "))
    };
    by_division(metadata, pieces, division)
}

/// Builds BPE over characters, as Gemma 4 has it.
pub(super) fn gemma4(metadata: &TokenizerMetadata, pieces: &Pieces) -> Result<Base> {
    let Some(division) = Division::find("gemma4") else { bail!("[gguf] expected the division of Gemma 4") };
    by_division(metadata, pieces, division)
}

fn by_division(metadata: &TokenizerMetadata, pieces: &Pieces, division: &Division) -> Result<Base> {
    let mut merges = Vec::new();
    for merge in metadata.texts("merges")? {
        // The first token has at least one character, which may be a blank.
        let after_first = merge.chars().next().map_or(0, char::len_utf8);
        match merge[after_first..].find(' ') {
            Some(at) => merges.push(json!([&merge[..after_first + at], &merge[after_first + at + 1..]])),
            None => return metadata.fail("merges", format!("{merge:?}"), "two tokens with a space between"),
        }
    }
    let mut steps: Vec<_> = division
        .steps
        .iter()
        .map(|regex| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false}))
        .collect();
    let mut model = json!({"type": "BPE", "merges": merges, "ignore_merges": division.looks_up_words});
    model["vocab"] = pieces.vocabulary();
    let (normalizer, decoder) = if division.is_raw {
        model["unk_token"] = unknown_token(pieces);
        model["fuse_unk"] = true.into();
        model["byte_fallback"] = true.into();
        let decoders = [
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        let normalizer = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        (normalizer, json!({"type": "Sequence", "decoders": decoders}))
    } else {
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        steps.push(bytes.clone());
        (if division.composes { json!({"type": "NFC"}) } else { Value::Null }, bytes)
    };
    let tokenizer = json!({
        "version": "1.0",
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": decoder,
        "model": model,
    });
    // Files of Gemma 4 say that texts have no first token, which llama.cpp corrects.
    let always_adds_bos = division.adds_bos && division.is_raw;
    Ok(Base { adds_bos: division.adds_bos, always_adds_bos, ..Base::new(tokenizer) })
}
