//! What is refused, and in which words.

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_core::{DType, Module, Tensor};
use candle_nn::VarBuilder;

use super::{CPU, ids, layer, layer_with_4_positions, message, table, weights};

#[test]
fn more_tokens_than_positions_are_an_error() {
    let layer = layer_with_4_positions();
    let refused = |t: usize, offset: usize| message(layer.forward_at(&ids(&vec![0; t]), offset));
    assert_eq!(refused(5, 0), "[embedding] 5 tokens from position 0 on do not fit into 4 positions");
    assert_eq!(refused(2, 3), "[embedding] 2 tokens from position 3 on do not fit into 4 positions");
    assert_eq!(refused(0, 5), "[embedding] 0 tokens from position 5 on do not fit into 4 positions");
    assert!(refused(1, usize::MAX).ends_with("do not fit into 4 positions"));
    assert_eq!(layer.forward_at(&ids(&[]), 4).unwrap().dims(), [0, 3]);
}

#[test]
fn ids_out_of_range_name_their_place_and_value() {
    assert_eq!(
        message(layer(7).forward(&ids(&[1, 2, 7]))),
        "[embedding] id 7 at position 2 is not below the vocabulary size 7"
    );
    let batch = Tensor::new(&[[1u32, 2, 3], [4, 9, 8]], &CPU).unwrap();
    assert_eq!(
        message(layer(7).forward(&batch)),
        "[embedding] id 9 at position 1 of sequence 1 is not below the vocabulary size 7"
    );
    assert_eq!(
        message(layer(7).forward(&batch.t().unwrap())),
        "[embedding] id 9 at position 1 of sequence 1 is not below the vocabulary size 7"
    );
    assert_eq!(
        message(layer(7).forward(&Tensor::new(&[0i64, -1], &CPU).unwrap())),
        "[embedding] id -1 at position 1 is negative"
    );
}

#[test]
fn the_largest_number_of_a_dtype_is_out_of_range_and_not_zero() {
    let refused = [
        (Tensor::new(&[u8::MAX], &CPU).unwrap(), "255"),
        (Tensor::new(&[u32::MAX], &CPU).unwrap(), "4294967295"),
        (Tensor::new(&[i64::MAX], &CPU).unwrap(), "9223372036854775807"),
    ];
    for (ids, id) in refused {
        assert_eq!(
            message(layer(7).forward(&ids)),
            format!("[embedding] id {id} at position 0 is not below the vocabulary size 7")
        );
    }
}

#[test]
fn float_ids_and_other_ranks_are_refused() {
    let floats = Tensor::new(&[1f32], &CPU).unwrap();
    assert_eq!(message(layer(7).forward(&floats)), "[embedding] expected ids of an integer dtype, found F32");
    let scalar = Tensor::new(1u32, &CPU).unwrap();
    assert_eq!(message(layer(7).forward(&scalar)), "[embedding] expected ids (T,) or (B, T), found []");
    let cube = Tensor::zeros((1, 2, 3), DType::U32, &CPU).unwrap();
    assert_eq!(message(layer(7).forward(&cube)), "[embedding] expected ids (T,) or (B, T), found [1, 2, 3]");
}

#[test]
fn sizes_that_make_no_table_are_refused() {
    let refused = |cfg: EmbeddingConfig| message(EmbeddingLayer::new(&cfg, VarBuilder::zeros(DType::F32, &CPU)));
    assert_eq!(refused(EmbeddingConfig::new(0, 3)), "[embedding] vocab_size 0 and embed_dim 3 must be at least 1");
    assert_eq!(refused(EmbeddingConfig::new(7, 0)), "[embedding] vocab_size 7 and embed_dim 0 must be at least 1");
    assert_eq!(
        refused(EmbeddingConfig::new(7, 3).with_max_positions(0)),
        "[embedding] max_positions must be at least 1, found 0; leave it out for no positions"
    );
    assert_eq!(
        refused(EmbeddingConfig::new(7, 3).with_padding_idx(7)),
        "[embedding] padding_idx 7 is not below the vocabulary size 7"
    );
}

#[test]
fn missing_and_misshapen_parameters_are_errors() {
    let cfg = EmbeddingConfig::new(7, 3);
    let error = message(EmbeddingLayer::new(&cfg, weights(&[("weight", table(7))])));
    assert!(error.contains("embedding.weight"), "{error}");
    let error = message(EmbeddingLayer::new(&cfg, weights(&[("embedding.weight", table(8))])));
    assert!(error.contains("embedding.weight") && error.contains("[7, 3]") && error.contains("[8, 3]"), "{error}");
    let error = message(EmbeddingLayer::new(&cfg.with_max_positions(2), weights(&[("embedding.weight", table(7))])));
    assert!(error.contains("position_embedding.weight"), "{error}");
}
