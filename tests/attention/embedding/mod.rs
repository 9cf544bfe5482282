//! `EmbeddingLayer`: ids to vectors, their gradients, and what is refused.

mod parameters;

use std::collections::HashMap;
use std::path::PathBuf;

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer};
use candle_core::{DType, Device, IndexOp, Module, Tensor};
use candle_nn::{Embedding, VarBuilder};

const CPU: Device = Device::Cpu;

/// Row i of a (rows, 3) table is [10 i, 10 i + 1, 10 i + 2].
fn table(rows: usize) -> Tensor {
    let values = (0..rows).flat_map(|i| (0..3).map(move |j| (10 * i + j) as f32));
    Tensor::from_iter(values, &CPU).unwrap().reshape((rows, 3)).unwrap()
}

fn weights(names: &[(&str, Tensor)]) -> VarBuilder<'static> {
    let tensors: HashMap<_, _> = names.iter().map(|(name, t)| ((*name).to_owned(), t.clone())).collect();
    VarBuilder::from_tensors(tensors, DType::F32, &CPU)
}

fn layer(rows: usize) -> EmbeddingLayer {
    EmbeddingLayer::new(&EmbeddingConfig::new(rows, 3), weights(&[("embedding.weight", table(rows))])).unwrap()
}

/// Positions add 0.1, 0.2, 0.3, 0.4 to every feature.
fn layer_with_4_positions() -> EmbeddingLayer {
    let positions = Tensor::new(&[0.1f32, 0.2, 0.3, 0.4], &CPU).unwrap().unsqueeze(1).unwrap().repeat((1, 3)).unwrap();
    let vb = weights(&[("embedding.weight", table(7)), ("position_embedding.weight", positions)]);
    EmbeddingLayer::new(&EmbeddingConfig::new(7, 3).with_max_positions(4), vb).unwrap()
}

fn ids(ids: &[u32]) -> Tensor {
    Tensor::new(ids, &CPU).unwrap()
}

/// The first feature of each vector (T, E).
fn firsts(vectors: &Tensor) -> Vec<f32> {
    vectors.i((.., 0)).unwrap().to_vec1().unwrap()
}

#[test]
fn the_golden_vectors_hold() {
    let root = std::env::var_os("CANDLE_ATTENTION_MODELS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("models"), PathBuf::from);
    let folder = root.join("frontend_embedding");
    let read = |name: &str| {
        let path = folder.join(name);
        std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    let config: serde_json::Value = serde_json::from_slice(&read("config.json")).unwrap();
    let config: EmbeddingConfig = serde_json::from_value(config["args"].clone()).unwrap();
    assert_eq!(config, EmbeddingConfig::new(100, 50));
    let vb = VarBuilder::from_buffered_safetensors(read("model.safetensors"), DType::F32, &CPU).unwrap();
    let layer = EmbeddingLayer::new(&config, vb).unwrap();
    let io = candle_core::safetensors::load_buffer(&read("io.safetensors"), &CPU).unwrap();
    let mut cases = 0;
    for (name, input) in &io {
        let Some(case) = name.strip_suffix(".ids") else {
            continue;
        };
        // A look-up does no arithmetic: every bit is PyTorch's.
        let found = layer.forward(input).unwrap();
        let expected = &io[&format!("{case}.output")];
        assert_eq!(found.dims(), expected.dims());
        let [found, expected] = [&found, expected].map(|t| t.flatten_all().unwrap().to_vec1::<f32>().unwrap());
        assert_eq!(found, expected, "{case}");
        cases += 1;
    }
    assert!(cases > 0);
}

#[test]
fn each_id_becomes_its_row() {
    let found = layer(7).forward(&ids(&[6, 0, 6])).unwrap();
    assert_eq!(found.to_vec2::<f32>().unwrap(), [[60., 61., 62.], [0., 1., 2.], [60., 61., 62.]]);
    let batch = Tensor::new(&[[1u32, 2], [3, 4]], &CPU).unwrap();
    let found = layer(7).forward(&batch).unwrap();
    assert_eq!(
        found.to_vec3::<f32>().unwrap(),
        [[[10., 11., 12.], [20., 21., 22.]], [[30., 31., 32.], [40., 41., 42.]]]
    );
}

#[test]
fn all_integer_dtypes_are_ids() {
    for dtype in [DType::U8, DType::U32, DType::I64, DType::I32, DType::I16] {
        let ids = ids(&[3, 1]).to_dtype(dtype).unwrap();
        assert_eq!(firsts(&layer(7).forward(&ids).unwrap()), [30., 10.], "{dtype:?}");
    }
}

/// candle's `index_select` gives zeros for the largest number of the ids' dtype.
#[test]
fn the_largest_narrow_id_is_an_id_like_any_other() {
    let ids = Tensor::new(&[255u8, 254], &CPU).unwrap();
    assert_eq!(firsts(&layer(300).forward(&ids).unwrap()), [2550., 2540.]);
}

#[test]
fn tables_of_every_float_dtype_work() {
    for dtype in [DType::F16, DType::BF16, DType::F64] {
        let layer = EmbeddingLayer::from_embedding(Embedding::new(table(7).to_dtype(dtype).unwrap(), 3)).unwrap();
        let found = layer.forward(&ids(&[2])).unwrap();
        assert_eq!(found.dtype(), dtype);
        assert_eq!(firsts(&found.to_dtype(DType::F32).unwrap()), [20.]);
    }
}

#[test]
fn ids_and_tables_may_have_any_strides() {
    let grid = Tensor::new(&[[0u32, 1, 2], [3, 4, 5]], &CPU).unwrap();
    let layer = layer(7);
    let transposed = layer.forward(&grid.t().unwrap()).unwrap();
    assert_eq!(transposed.i((.., .., 0)).unwrap().to_vec2::<f32>().unwrap(), [[0., 30.], [10., 40.], [20., 50.]]);
    assert_eq!(firsts(&layer.forward(&grid.i((.., 1)).unwrap()).unwrap()), [10., 40.]);
    assert_eq!(firsts(&layer.forward(&grid.i(1).unwrap().narrow(0, 1, 2).unwrap()).unwrap()), [40., 50.]);
    let repeated = ids(&[5]).broadcast_as((2, 3)).unwrap();
    assert_eq!(layer.forward(&repeated).unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap(), 6. * 153.);
    let transposed_table = table(7).t().unwrap().contiguous().unwrap().t().unwrap();
    assert!(!transposed_table.is_contiguous());
    let layer = EmbeddingLayer::from_embedding(Embedding::new(transposed_table, 3)).unwrap();
    assert_eq!(firsts(&layer.forward(&ids(&[4, 2])).unwrap()), [40., 20.]);
}

#[test]
fn no_ids_give_no_vectors() {
    for layer in [layer(7), layer_with_4_positions()] {
        for (shape, expected) in [(vec![0], vec![0, 3]), (vec![2, 0], vec![2, 0, 3]), (vec![0, 2], vec![0, 2, 3])] {
            let none = Tensor::zeros(shape, DType::U32, &CPU).unwrap();
            assert_eq!(layer.forward(&none).unwrap().dims(), expected);
        }
    }
}

#[test]
fn a_tokenizers_batch_goes_straight_in() {
    let tokenizer = SimpleTokenizer::from_words(["<pad>", "a", "b"]).unwrap();
    for texts in [["a b", "b"], ["", ""]] {
        let batch = tokenizer.encode_batch(&texts).unwrap();
        let vectors = layer(3).forward(&batch.ids_tensor(&CPU).unwrap()).unwrap();
        assert_eq!(vectors.dims(), [2, batch.seq_len(), 3]);
    }
}

#[test]
fn positions_are_added_from_the_offset_on() {
    let layer = layer_with_4_positions();
    assert_eq!(firsts(&layer.forward(&ids(&[1, 1, 1])).unwrap()), [10.1, 10.2, 10.3]);
    assert_eq!(firsts(&layer.forward_at(&ids(&[1, 1]), 2).unwrap()), [10.3, 10.4]);
    let batch = Tensor::new(&[[1u32, 2], [3, 4]], &CPU).unwrap();
    let found = layer.forward_at(&batch, 1).unwrap().i((.., .., 0)).unwrap();
    assert_eq!(found.to_vec2::<f32>().unwrap(), [[10.2, 20.3], [30.2, 40.3]]);
}

#[test]
fn decoding_one_by_one_gives_what_the_whole_sequence_gives() {
    let layer = layer_with_4_positions();
    let sequence = [6, 0, 3, 3];
    let one_by_one: Vec<_> = (0..4).map(|i| layer.forward_at(&ids(&sequence[i..=i]), i).unwrap()).collect();
    let whole = layer.forward(&ids(&sequence)).unwrap();
    assert_eq!(Tensor::cat(&one_by_one, 0).unwrap().to_vec2::<f32>().unwrap(), whole.to_vec2::<f32>().unwrap());
}

#[test]
fn without_positions_the_offset_makes_no_difference() {
    assert_eq!(firsts(&layer(7).forward_at(&ids(&[5]), usize::MAX).unwrap()), [50.]);
}

#[test]
fn a_candle_embedding_becomes_a_layer_if_it_is_a_table() {
    let layer = EmbeddingLayer::from_embedding(Embedding::new(table(7), 3)).unwrap();
    assert_eq!((layer.vocab_size(), layer.embed_dim()), (7, 3));
    assert!(layer.position_embeddings().is_none());
    assert_eq!(firsts(&layer.forward(&ids(&[4])).unwrap()), [40.]);
}
