//! `EmbeddingLayer`: ids to vectors, how the tables begin, and where gradients go.

use std::collections::HashMap;

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer};
use candle_core::{DType, Device, IndexOp, Module, NdArray, Result, Tensor, Var};
use candle_nn::{Embedding, VarBuilder, VarMap};

use crate::common::{Golden, assert_close, values};

const CPU: Device = Device::Cpu;

/// Row i of a (rows, 3) table is [10 i, 10 i + 1, 10 i + 2].
fn table(rows: usize) -> Result<Tensor> {
    Tensor::from_iter((0..rows).flat_map(|i| (0..3).map(move |j| (10 * i + j) as f32)), &CPU)?.reshape((rows, 3))
}

fn layer(rows: usize) -> Result<EmbeddingLayer> {
    EmbeddingLayer::from_embedding(Embedding::new(table(rows)?, 3))
}

fn load(cfg: &EmbeddingConfig, tensors: &[(&str, Tensor)]) -> Result<EmbeddingLayer> {
    let tensors: HashMap<_, _> = tensors.iter().map(|(name, tensor)| (name.to_string(), tensor.clone())).collect();
    EmbeddingLayer::new(cfg, VarBuilder::from_tensors(tensors, DType::F32, &CPU))
}

/// Of seven words; positions add 0.1, 0.2, 0.3, 0.4 to every feature.
fn layer_with_4_positions() -> Result<EmbeddingLayer> {
    let positions = Tensor::new(&[0.1f32, 0.2, 0.3, 0.4], &CPU)?.unsqueeze(1)?.repeat((1, 3))?;
    let cfg = EmbeddingConfig::new(7, 3).with_max_positions(4);
    load(&cfg, &[("embedding.weight", table(7)?), ("position_embedding.weight", positions)])
}

/// The first feature of each vector.
fn firsts(layer: &EmbeddingLayer, ids: impl NdArray) -> Result<Vec<f64>> {
    firsts_at(layer, ids, 0)
}

fn firsts_at(layer: &EmbeddingLayer, ids: impl NdArray, offset: usize) -> Result<Vec<f64>> {
    let vectors = layer.forward_at(&Tensor::new(ids, &CPU)?, offset)?;
    Ok(values(&vectors.narrow(vectors.rank() - 1, 0, 1)?).into_iter().map(|x| (x * 10.0).round() / 10.0).collect())
}

#[test]
fn the_golden_vectors_hold() -> Result<()> {
    let golden = Golden::open("frontend_embedding");
    let config: EmbeddingConfig = serde_json::from_value(golden.config["args"].clone()).expect("a config");
    assert_eq!(config, EmbeddingConfig::new(100, 50));
    let file = std::fs::read(golden.file("model.safetensors"))?;
    let layer = EmbeddingLayer::new(&config, VarBuilder::from_buffered_safetensors(file, DType::F32, &CPU)?)?;
    for case in golden.cases() {
        // A look-up does no arithmetic: every bit is PyTorch's.
        assert_close(&layer.forward(golden.get(&case, "ids"))?, golden.get(&case, "output"), 0.0, &case);
    }
    Ok(())
}

#[test]
fn each_id_becomes_its_row() -> Result<()> {
    let layer = layer(7)?;
    assert_eq!((layer.vocab_size(), layer.embed_dim(), layer.position_embeddings().is_none()), (7, 3, true));
    let found = layer.forward(&Tensor::new(&[[6u32, 0], [6, 4]], &CPU)?)?;
    let expected = [[[60f32, 61., 62.], [0., 1., 2.]], [[60., 61., 62.], [40., 41., 42.]]];
    assert_eq!(found.to_vec3::<f32>()?, expected);
    for dtype in [DType::U8, DType::U32, DType::I64, DType::I32, DType::I16] {
        let found = layer.forward(&Tensor::new(&[3u32, 1], &CPU)?.to_dtype(dtype)?)?;
        assert_eq!(found.to_vec2::<f32>()?, [[30., 31., 32.], [10., 11., 12.]], "{dtype:?}");
    }
    for dtype in [DType::F16, DType::BF16, DType::F64] {
        let layer = EmbeddingLayer::from_embedding(Embedding::new(table(7)?.to_dtype(dtype)?, 3))?;
        assert_eq!(layer.forward(&Tensor::new(&[2u32], &CPU)?)?.dtype(), dtype);
        assert_eq!(firsts(&layer, &[2u32])?, [20.]);
    }
    Ok(())
}

/// candle's `index_select` gives zeros for the largest number of the ids' dtype.
#[test]
fn the_largest_narrow_id_is_an_id_like_any_other() -> Result<()> {
    assert_eq!(firsts(&layer(300)?, &[255u8, 254])?, [2550., 2540.]);
    Ok(())
}

#[test]
fn ids_and_tables_may_have_any_strides() -> Result<()> {
    let (grid, layer) = (Tensor::new(&[[0u32, 1, 2], [3, 4, 5]], &CPU)?, layer(7)?);
    let transposed = table(7)?.t()?.contiguous()?.t()?;
    assert!(!transposed.is_contiguous());
    let of_view = EmbeddingLayer::from_embedding(Embedding::new(transposed, 3))?;
    let repeated = Tensor::new(&[5u32], &CPU)?.broadcast_as((2, 3))?;
    for ids in [grid.t()?, grid.i((.., 1))?, grid.i(1)?.narrow(0, 1, 2)?, repeated] {
        let expected = layer.forward(&ids.force_contiguous()?)?;
        assert_close(&layer.forward(&ids)?, &expected, 0.0, "a view of ids");
        assert_close(&of_view.forward(&ids)?, &expected, 0.0, "a view of a table");
    }
    Ok(())
}

#[test]
fn no_ids_give_no_vectors() -> Result<()> {
    for layer in [layer(7)?, layer_with_4_positions()?] {
        for (shape, expected) in [(vec![0], vec![0, 3]), (vec![2, 0], vec![2, 0, 3]), (vec![0, 2], vec![0, 2, 3])] {
            assert_eq!(layer.forward(&Tensor::zeros(shape, DType::U32, &CPU)?)?.dims(), expected);
        }
    }
    Ok(())
}

#[test]
fn a_tokenizers_batch_goes_straight_in() -> Result<()> {
    let tokenizer = SimpleTokenizer::from_words(["<pad>", "a", "b"])?;
    for texts in [["a b", "b"], ["", ""]] {
        let batch = tokenizer.encode_batch(&texts)?;
        assert_eq!(layer(3)?.forward(&batch.ids_tensor(&CPU)?)?.dims(), [2, batch.seq_len(), 3]);
    }
    Ok(())
}

/// Decoding one by one gives what the whole sequence gives; without positions the offset makes no difference.
#[test]
fn positions_are_added_from_the_offset_on() -> Result<()> {
    let layer = layer_with_4_positions()?;
    assert_eq!(firsts(&layer, &[1u32, 1, 1])?, [10.1, 10.2, 10.3]);
    assert_eq!(firsts_at(&layer, &[[1u32, 2], [3, 4]], 1)?, [10.2, 20.3, 30.2, 40.3]);
    for (n, id) in [6u32, 0, 3, 3].into_iter().enumerate() {
        assert_eq!(firsts_at(&layer, &[id], n)?, firsts(&layer, &[6u32, 0, 3, 3])?[n..=n]);
    }
    assert_eq!(firsts_at(&self::layer(7)?, &[5u32], usize::MAX)?, [50.]);
    Ok(())
}

/// A layer over new variables.
fn trained(cfg: &EmbeddingConfig) -> Result<(VarMap, EmbeddingLayer)> {
    let map = VarMap::new();
    let layer = EmbeddingLayer::new(cfg, VarBuilder::from_varmap(&map, DType::F32, &CPU))?;
    Ok((map, layer))
}

fn variable(map: &VarMap, name: &str) -> Var {
    map.data().lock().expect("one thread")[name].clone()
}

#[test]
fn new_tables_are_drawn_from_the_standard_normal_distribution() -> Result<()> {
    let (map, layer) = trained(&EmbeddingConfig::new(400, 50).with_max_positions(300))?;
    assert_eq!(map.all_vars().len(), 2);
    for (name, dims) in [("embedding.weight", [400, 50]), ("position_embedding.weight", [300, 50])] {
        let numbers = values(&variable(&map, name));
        let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
        let variance = numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / numbers.len() as f64;
        assert!(mean.abs() < 0.05 && (variance - 1.).abs() < 0.1, "{mean} {variance}");
        assert_eq!(variable(&map, name).dims(), dims);
    }
    // Training moves the layer and its variables together.
    let before = firsts(&layer, &[1u32])?[0];
    let table = variable(&map, "embedding.weight");
    table.set(&(table.as_tensor() + 1.)?)?;
    assert!((firsts(&layer, &[1u32])?[0] - before - 1.0).abs() < 1e-6);
    Ok(())
}

/// Of the sum of the output times numbers that count up from 1.
#[test]
fn gradients_flow_into_the_rows_and_positions_that_were_used() -> Result<()> {
    let gradient = |layer: &EmbeddingLayer, ids: &Tensor, of: &Tensor| -> Result<_> {
        let out = layer.forward(ids)?;
        let factors = Tensor::arange(1f32, (out.elem_count() + 1) as f32, &CPU)?.reshape(out.shape())?;
        (out * factors)?.sum_all()?.backward()?.get(of).expect("a gradient").to_vec2::<f32>()
    };
    let var = Var::from_tensor(&table(4)?)?;
    let layer = EmbeddingLayer::from_embedding(Embedding::new(var.as_tensor().clone(), 3))?;
    let found = gradient(&layer, &Tensor::new(&[[1u32, 3], [1, 2]], &CPU)?, &var)?;
    assert_eq!(found, [[0., 0., 0.], [1. + 7., 2. + 8., 3. + 9.], [10., 11., 12.], [4., 5., 6.]]);
    // The padding token's position learns, as in PyTorch: only its row of the token table does not.
    let (map, layer) = trained(&EmbeddingConfig::new(4, 3).with_max_positions(3).with_padding_idx(0))?;
    let positions = variable(&map, "position_embedding.weight");
    let found = gradient(&layer, &Tensor::new(&[[1u32, 0], [1, 2]], &CPU)?, &positions)?;
    assert_eq!(found, [[1. + 7., 2. + 8., 3. + 9.], [4. + 10., 5. + 11., 6. + 12.], [0., 0., 0.]]);
    Ok(())
}

/// Zero in a new variable, the file's where it is loaded, and as it was set where a second layer shares the variable.
#[test]
fn the_padding_row_begins_at_zero_and_stays_as_it_is() -> Result<()> {
    let cfg = EmbeddingConfig::new(7, 3).with_padding_idx(2);
    let (map, layer) = trained(&cfg)?;
    for (i, row) in variable(&map, "embedding.weight").to_vec2::<f32>()?.iter().enumerate() {
        assert_eq!(row.iter().all(|&x| x == 0.), i == 2, "row {i}: {row:?}");
    }
    assert_eq!(firsts(&layer, &[2u32])?, [0.]);
    assert_eq!(firsts(&load(&cfg, &[("embedding.weight", table(7)?)])?, &[2u32, 1])?, [20., 10.]);
    variable(&map, "embedding.weight").set(&table(7)?)?;
    let again = EmbeddingLayer::new(&cfg, VarBuilder::from_varmap(&map, DType::F32, &CPU))?;
    assert_eq!(firsts(&again, &[2u32, 1])?, [20., 10.]);
    Ok(())
}

#[test]
fn the_padding_row_gets_no_gradient() -> Result<()> {
    let (map, layer) = trained(&EmbeddingConfig::new(4, 3).with_padding_idx(1))?;
    // Values that would spoil a product with zero.
    let row = Tensor::new(&[[f32::NAN, f32::INFINITY, 1.]], &CPU)?;
    layer.embeddings().slice_set(&row, 0, 1)?;
    let out = layer.forward(&Tensor::new(&[[1u32, 3], [1, 2]], &CPU)?)?;
    assert_eq!(out.i((0, 0, 2))?.to_scalar::<f32>()?, 1.);
    let gradients = out.sum_all()?.backward()?;
    let found = gradients.get(&variable(&map, "embedding.weight")).expect("a gradient").to_vec2::<f32>()?;
    assert_eq!(found, [[0., 0., 0.], [0., 0., 0.], [1., 1., 1.], [1., 1., 1.]]);
    Ok(())
}

#[test]
fn a_configuration_survives_json_and_may_leave_options_out() {
    let full = EmbeddingConfig::new(7, 3).with_max_positions(4).with_padding_idx(0);
    let json = serde_json::to_string(&full).expect("JSON");
    assert_eq!(serde_json::from_str::<EmbeddingConfig>(&json).expect("a config"), full);
    let short = r#"{"vocab_size":7,"embed_dim":3}"#;
    assert_eq!(serde_json::from_str::<EmbeddingConfig>(short).expect("a config"), EmbeddingConfig::new(7, 3));
    assert_eq!(serde_json::to_string(&EmbeddingConfig::new(7, 3)).expect("JSON"), short);
}
