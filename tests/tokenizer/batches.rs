//! Padding, lengths and starts.

use candle_attention::ValidLens;
use candle_attention::text::{PaddingSide, SimpleTokenizer, SpecialTokens, TokenizerError};
use candle_core::{DType, Device};
use serde_json::json;

use super::documents::{cls_and_sep, file, letters, load, padding, truncation};
use super::{ids, message, tutorial};

#[test]
fn a_batch_is_padded_on_the_right() {
    let batch = tutorial().encode_batch(&["hello", "how are you", ""]).unwrap();
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
fn a_batch_of_one_length_needs_no_padding_token() {
    let batch = SimpleTokenizer::from_words(["a", "b"]).unwrap().encode_batch(&["a b", "b b"]).unwrap();
    assert_eq!(batch.ids(), [[0, 1], [1, 1]]);
    assert_eq!(batch.valid_lens().unwrap(), ValidLens::from(vec![2, 2]));
}

#[test]
fn the_padding_token_is_the_usual_one_or_the_chosen_one() {
    let pads = |words: &[&str]| SimpleTokenizer::from_words(words.to_vec()).unwrap().padding_token();
    assert_eq!(pads(&["a", "[PAD]", "<pad>"]).as_deref(), Some("<pad>"));
    assert_eq!(pads(&["a", "[PAD]"]).as_deref(), Some("[PAD]"));
    assert_eq!(pads(&["a", "<PAD>"]), None);
    let tokenizer = tutorial().with_padding("?").unwrap();
    assert_eq!(tokenizer.encode_batch(&["you", "are you"]).unwrap().ids(), [[5, 6], [4, 5]]);
}

#[test]
fn a_batch_of_empty_texts_has_no_columns() {
    for tokenizer in [tutorial(), SimpleTokenizer::from_words(["a"]).unwrap()] {
        let batch = tokenizer.encode_batch(&["", " "]).unwrap();
        assert_eq!(batch.ids_tensor(&Device::Cpu).unwrap().dims(), [2, 0]);
        assert_eq!(batch.valid_lens().unwrap(), ValidLens::from(vec![0, 0]));
        assert_eq!(batch.starts(), ValidLens::from(vec![0, 0]));
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

#[test]
fn a_file_that_pads_on_the_left_gives_starts() {
    let bytes = file(letters(), json!({"padding": padding("Left", json!("BatchLongest"), None)}));
    let tokenizer = SimpleTokenizer::from_bytes(&bytes).unwrap();
    let batch = tokenizer.encode_batch(&["a", "b c d", ""]).unwrap();
    assert_eq!(batch.ids(), [[0, 0, 3], [4, 5, 6], [0, 0, 0]]);
    assert_eq!(batch.tokens()[0], ["[PAD]", "[PAD]", "a"]);
    assert_eq!((batch.lens(), batch.padding_side()), (&[1, 3, 0][..], PaddingSide::Left));
    assert_eq!(batch.starts(), ValidLens::from(vec![2, 0, 3]));
    // Also where there is no padding: the answer must not depend on the data.
    for batch in [batch, tokenizer.encode_batch(&["a"]).unwrap()] {
        assert!(message(batch.valid_lens()).starts_with("[tokenizer] the batch is padded on the left"));
    }
    let right = tokenizer.with_padding_side(PaddingSide::Right).unwrap();
    let batch = right.encode_batch(&["a", "b c d"]).unwrap();
    assert_eq!(batch.ids(), [[3, 0, 0], [4, 5, 6]]);
    assert_eq!(batch.valid_lens().unwrap(), ValidLens::from(vec![1, 3]));
}

#[test]
fn padding_goes_to_the_chosen_side() {
    assert_eq!(
        tutorial().with_padding_side(PaddingSide::Left).unwrap().encode_batch(&["you", "you ?"]).unwrap().ids(),
        [[0, 5], [5, 6]]
    );
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
        assert_eq!(tokenizer.encode_batch(&["a", "b c"]).unwrap().ids(), [[1, 3, 2, 0], [1, 4, 5, 2]]);
        assert_eq!(tokenizer.encode_batch(&["a", &long]).unwrap().num_truncated(), [0, 0]);
    }
}

#[test]
fn a_cut_is_counted() {
    let tokenizer = load(letters(), json!({"post_processor": cls_and_sep()})).with_truncation(4).unwrap();
    let encoding = tokenizer.encode("a b c d a").unwrap();
    assert_eq!((encoding.ids, encoding.num_truncated), (vec![1, 3, 4, 2], 3));
    let encoding = tokenizer.encode_with("a b c d a", SpecialTokens::Without).unwrap();
    assert_eq!((encoding.ids, encoding.num_truncated), (vec![3, 4, 5, 6], 1));
    let batch = tokenizer.encode_batch(&["a", "a b", "a b c"]).unwrap();
    assert_eq!((batch.ids()[0].as_slice(), batch.num_truncated()), (&[1, 3, 2, 0][..], &[0, 0, 1][..]));
    for most in [0, 1, 2] {
        assert_eq!(
            message(tokenizer.clone().with_truncation(most)),
            format!("[tokenizer] texts are cut at {most} tokens, expected more than the 2 that are added")
        );
    }
    assert_eq!(ids(&tutorial().with_truncation(1).unwrap(), "how are you"), [3]);
}
