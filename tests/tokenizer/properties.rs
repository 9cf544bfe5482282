//! Properties of all words and all texts.

use candle_attention::AttentionMask;
use candle_attention::text::{PaddingSide, SimpleTokenizer, Split, TokenizerError};
use candle_core::{DType, Device, Tensor};
use proptest::prelude::*;

use crate::common::recorded;

use super::{ids, save_and_load, tutorial};

fn words() -> impl Strategy<Value = Vec<String>> {
    proptest::collection::hash_set("[^\\s\\x1c-\\x1f]{1,6}", 1..20).prop_map(|set| set.into_iter().collect())
}

proptest! {
    #[test]
    fn tokenizer_ids_round_trip_through_text(words in words(), picks in proptest::collection::vec(any::<prop::sample::Index>(), 0..20)) {
        let tokenizer = SimpleTokenizer::from_words(words.clone()).unwrap();
        let ids: Vec<u32> = picks.iter().map(|pick| pick.index(words.len()) as u32).collect();
        for &id in &ids {
            prop_assert_eq!(tokenizer.id_to_token(id), Some(words[id as usize].clone()));
            prop_assert_eq!(tokenizer.token_to_id(&words[id as usize]), Some(id));
        }
        prop_assert_eq!((tokenizer.id_to_token(words.len() as u32), tokenizer.token_to_id("two words")), (None, None));
        let text = tokenizer.decode(&ids).unwrap();
        prop_assert_eq!(tokenizer.encode(&text).unwrap().ids, ids.clone());
        prop_assert_eq!(save_and_load(&tokenizer).encode(&text).unwrap().ids, ids);
    }

    #[test]
    fn tokenizer_encodes_each_word_or_names_first_unknown_word(text in "[ab\\s\\x1c-\\x1f]{0,12}|\\PC{0,12}|.{0,12}") {
        let tokenizer = SimpleTokenizer::from_words(["a", "b", "ab"]).unwrap();
        let words: Vec<&str> = text
            .split(|c: char| c.is_whitespace() || ('\x1c'..='\x1f').contains(&c))
            .filter(|word| !word.is_empty())
            .collect();
        let first_unknown = words.iter().position(|word| !["a", "b", "ab"].contains(word));
        match (tokenizer.encode(&text), first_unknown) {
            (Ok(encoding), None) => prop_assert_eq!(encoding.tokens, words),
            (Err(TokenizerError::UnknownWord { word, position, .. }), Some(first)) => {
                prop_assert_eq!((word.as_str(), position), (words[first], first));
            }
            (result, _) => prop_assert!(false, "{:?}", result),
        }
    }

    /// Compares the attention mask with the one that transformers makes of the same padding.
    #[test]
    fn tokenizer_batch_matches_single_texts(
        texts in proptest::collection::vec("(hello|you|\\?| ){0,8}", 1..8),
        side in prop::sample::select(vec![PaddingSide::Left, PaddingSide::Right]),
    ) {
        let tokenizer = tutorial().with_split(Split::Punctuation).with_padding_side(side).unwrap();
        let known: Vec<_> = texts.into_iter().filter(|text| tokenizer.encode(text).is_ok()).collect();
        prop_assume!(!known.is_empty());
        let batch = tokenizer.encode_batch(&known).unwrap();
        for (i, text) in known.iter().enumerate() {
            let single = ids(&tokenizer, text);
            let missing = vec![0; batch.seq_len() - single.len()];
            let row = match side {
                PaddingSide::Left => [missing, single.clone()].concat(),
                PaddingSide::Right => [single.clone(), missing].concat(),
            };
            prop_assert_eq!(&batch.ids()[i], &row);
            prop_assert_eq!(batch.tokens()[i].len(), row.len());
            prop_assert_eq!(batch.lens()[i], single.len());
        }
        let b = known.len();
        let t = batch.lens().iter().copied().max().unwrap();
        prop_assert_eq!((batch.batch_size(), batch.seq_len()), (b, t));
        let tensor = batch.ids_tensor(&Device::Cpu).unwrap();
        prop_assert_eq!((tensor.dtype(), tensor.dims()), (DType::U32, &[b, t][..]));
        prop_assert_eq!(tensor.to_vec2::<u32>().unwrap(), batch.ids());
        let ones = batch.tokens().iter().flatten().map(|token| u8::from(token != "<pad>"));
        let ones = Tensor::from_iter(ones, &Device::Cpu).unwrap().reshape((b, t)).unwrap();
        let expected = AttentionMask::from_attention_mask(&ones).unwrap();
        let drawn = |mask: &AttentionMask| mask.resolve(b, 2, t).unwrap().to_string();
        prop_assert_eq!(drawn(&batch.mask()), drawn(&expected));
        let other = batch.mask().resolve(b, 1, t + 1).unwrap_err().to_string();
        let message = format!("[attention_mask] the attention mask has {t} columns, expected");
        prop_assert!(other.starts_with(&message), "{other}");
    }
}

/// Joins and truncates pairs as the tokenizers crate does, at every length that fits.
#[test]
fn tokenizer_pairs_match_tokenizers_crate() {
    use tokenizers::{Tokenizer, TruncationParams};

    let texts = ["", "man", "the sky is blue", "a girl carries a baby on the street while the old man plays a guitar"];
    for model in ["bert", "xlm-roberta"] {
        let path = recorded(&format!("rerank/models/{model}/tokenizer.json"));
        let own = SimpleTokenizer::from_file(&path).expect("a tokenizer");
        let mut theirs = Tokenizer::from_file(&path).expect("the same");
        let mut cut = 0;
        for max_length in (5..40).map(Some).chain([None]) {
            let own = max_length.map_or(own.clone(), |most| own.clone().with_truncation(most).expect("room"));
            let params = max_length.map(|max_length| TruncationParams { max_length, ..TruncationParams::default() });
            theirs.with_truncation(params).expect("room");
            for first in texts {
                for second in texts {
                    let own = own.encode_pair(first, second).unwrap();
                    let theirs = theirs.encode((first, second), true).unwrap();
                    assert_eq!(own.ids, theirs.get_ids(), "{model}, {max_length:?}: {first}, {second}");
                    assert_eq!(own.type_ids, theirs.get_type_ids(), "{model}, {max_length:?}: {first}, {second}");
                    assert_eq!(own.tokens, theirs.get_tokens());
                    cut += usize::from(own.num_truncated > 0);
                }
            }
        }
        assert!(cut > 100, "{cut}");
    }
}
