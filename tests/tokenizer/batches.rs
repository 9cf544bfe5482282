//! Padding, lengths, starts and cuts.

use candle_attention::text::{Batch, PaddingSide, SimpleTokenizer, SpecialTokens, TokenizerError};
use candle_attention::{AttentionMask, ValidLens};
use candle_core::{DType, Device, Tensor};
use serde_json::json;

use super::documents::{cls_and_sep, letters, load, padding, truncation};
use super::{ids, message, tutorial, words};

fn batch(tokenizer: &SimpleTokenizer, texts: &[&str]) -> Batch {
    tokenizer.encode_batch(texts).unwrap()
}

#[test]
fn a_batch_is_padded_on_the_right() {
    let batch = batch(&tutorial(), &["hello", "how are you", ""]);
    assert_eq!(batch.ids(), [[1, 0, 0], [3, 4, 5], [0, 0, 0]]);
    assert_eq!(batch.tokens()[0], ["hello", "<pad>", "<pad>"]);
    assert_eq!(batch.lens(), [1, 3, 0]);
    assert_eq!(batch.valid_lens().unwrap(), ValidLens::from(vec![1, 3, 0]));
    assert_eq!(batch.starts(), ValidLens::from(vec![0, 0, 0]));
    assert_eq!((batch.batch_size(), batch.seq_len(), batch.padding_side()), (3, 3, PaddingSide::Right));
    let tensor = batch.ids_tensor(&Device::Cpu).unwrap();
    assert_eq!((tensor.dtype(), tensor.dims()), (DType::U32, &[3, 3][..]));
    assert_eq!(tensor.to_vec2::<u32>().unwrap(), batch.ids());
}

#[test]
fn a_file_that_pads_on_the_left_gives_starts() {
    let tokenizer = load(letters(), json!({"padding": padding("Left", json!("BatchLongest"), None)}));
    let left = batch(&tokenizer, &["a", "b c d", ""]);
    assert_eq!(left.ids(), [[0, 0, 3], [4, 5, 6], [0, 0, 0]]);
    assert_eq!(left.tokens()[0], ["[PAD]", "[PAD]", "a"]);
    assert_eq!((left.lens(), left.padding_side()), (&[1, 3, 0][..], PaddingSide::Left));
    assert_eq!(left.starts(), ValidLens::from(vec![2, 0, 3]));
    // Also where there is no padding: the answer must not depend on the data.
    for batch in [left, batch(&tokenizer, &["a"])] {
        assert!(message(batch.valid_lens()).starts_with("[tokenizer] the batch is padded on the left"));
    }
    let right = batch(&tokenizer.with_padding_side(PaddingSide::Right).unwrap(), &["a", "b c d"]);
    assert_eq!(right.ids(), [[3, 0, 0], [4, 5, 6]]);
    assert_eq!(right.valid_lens().unwrap(), ValidLens::from(vec![1, 3]));
}

/// On either side, what transformers' attention mask of the same batch is.
#[test]
fn a_batch_gives_the_mask_of_its_padding() {
    for side in [PaddingSide::Right, PaddingSide::Left] {
        let batch = batch(&tutorial().with_padding_side(side).unwrap(), &["hello", "how are you", ""]);
        let ones =
            batch.tokens().iter().map(|row| row.iter().map(|token| u8::from(token != "<pad>")).collect::<Vec<_>>());
        let ones = Tensor::new(ones.collect::<Vec<_>>(), &Device::Cpu).unwrap();
        let expected = AttentionMask::from_attention_mask(&ones).unwrap();
        let drawn = |mask: &AttentionMask| mask.resolve(3, 2, 3).unwrap().to_string();
        assert_eq!(drawn(&batch.mask()), drawn(&expected), "{side:?}");
        let other = batch.mask().resolve(3, 1, 4).unwrap_err().to_string();
        assert!(other.starts_with("[attention_mask] the attention mask has 3 columns, expected"), "{other}");
    }
}

#[test]
fn the_padding_token_and_its_side_are_the_usual_ones_or_the_chosen_ones() {
    let pads = |vocab: &[&str]| words(vocab).padding_token();
    assert_eq!(pads(&["a", "[PAD]", "<pad>"]).as_deref(), Some("<pad>"));
    assert_eq!(pads(&["a", "[PAD]"]).as_deref(), Some("[PAD]"));
    assert_eq!(pads(&["a", "<PAD>"]), None);
    let left = tutorial().with_padding_side(PaddingSide::Left).unwrap();
    for (tokenizer, expected) in [(tutorial().with_padding("?").unwrap(), [5, 6]), (left, [0, 5])] {
        assert_eq!(batch(&tokenizer, &["you", "are you"]).ids(), [expected, [4, 5]]);
    }
}

#[test]
fn texts_of_one_length_need_no_padding_token_and_may_be_empty() {
    let one_length = batch(&words(&["a", "b"]), &["a b", "b b"]);
    assert_eq!(one_length.ids(), [[0, 1], [1, 1]]);
    assert_eq!(one_length.valid_lens().unwrap(), ValidLens::from(vec![2, 2]));
    for tokenizer in [tutorial(), words(&["a"])] {
        let empty = batch(&tokenizer, &["", " "]);
        assert_eq!(empty.ids_tensor(&Device::Cpu).unwrap().dims(), [2, 0]);
        assert_eq!(empty.valid_lens().unwrap(), ValidLens::from(vec![0, 0]));
        assert_eq!(empty.starts(), ValidLens::from(vec![0, 0]));
    }
}

#[test]
fn an_error_in_a_batch_names_the_first_text_that_fails() {
    let texts: Vec<_> = (0..100).map(|i| if i < 40 { "hello" } else { "you you?" }).collect();
    let error = tutorial().encode_batch(&texts).unwrap_err();
    assert!(matches!(error, TokenizerError::InBatch { index: 40, .. }));
    let text = message::<()>(Err(error));
    assert!(text.starts_with("[tokenizer] word 2, \"you?\", is not"), "{text}");
    assert!(text.ends_with(" (text 41 of the batch)"), "{text}");
}

/// As the file of all-MiniLM-L6-v2: padding to 128 tokens and truncation to 128.
#[test]
fn a_length_in_the_file_neither_pads_nor_cuts() {
    for strategy in [json!({"Fixed": 4}), json!({"Fixed": usize::MAX}), json!("BatchLongest")] {
        let parts = json!({
            "padding": padding("Right", strategy, Some(8)), "truncation": truncation("Right", 3, 5),
            "post_processor": cls_and_sep(),
        });
        let tokenizer = load(letters(), parts);
        assert_eq!(ids(&tokenizer, "a"), [1, 3, 2]);
        let long = vec!["a"; 600].join(" ");
        assert_eq!(ids(&tokenizer, &long).len(), 602);
        assert_eq!(batch(&tokenizer, &["a", "b c"]).ids(), [[1, 3, 2, 0], [1, 4, 5, 2]]);
        assert_eq!(batch(&tokenizer, &["a", &long]).num_truncated(), [0, 0]);
    }
}

#[test]
fn a_cut_is_counted() {
    let tokenizer = load(letters(), json!({"post_processor": cls_and_sep()})).with_truncation(4).unwrap();
    for (special, expected) in [(SpecialTokens::With, ([1, 3, 4, 2], 3)), (SpecialTokens::Without, ([3, 4, 5, 6], 1))] {
        let encoding = tokenizer.encode_with("a b c d a", special).unwrap();
        assert_eq!((encoding.ids.as_slice(), encoding.num_truncated), (&expected.0[..], expected.1));
    }
    let batch = batch(&tokenizer, &["a", "a b", "a b c"]);
    assert_eq!((batch.ids()[0].as_slice(), batch.num_truncated()), (&[1, 3, 2, 0][..], &[0, 0, 1][..]));
    for most in [0, 1, 2] {
        let expected = format!("[tokenizer] texts are cut at {most} tokens, expected more than the 2 that are added");
        assert_eq!(message(tokenizer.clone().with_truncation(most)), expected);
    }
    assert_eq!(ids(&tutorial().with_truncation(1).unwrap(), "how are you"), [3]);
}
