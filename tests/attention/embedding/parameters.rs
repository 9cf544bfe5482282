//! How the tables begin, and where gradients go.

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer};
use candle_core::{DType, IndexOp, Module, Tensor, Var};
use candle_nn::{Embedding, VarBuilder, VarMap};

use super::{CPU, firsts, ids, table, weights};

/// The gradient of the sum of `weight` times the output, with `weight` counting up from 1.
fn gradient(layer: &EmbeddingLayer, ids: &Tensor, of: &Tensor) -> Vec<Vec<f32>> {
    let out = layer.forward(ids).unwrap();
    let weight = Tensor::arange(1u32, out.elem_count() as u32 + 1, &CPU).unwrap();
    let weight = weight.to_dtype(DType::F32).unwrap().reshape(out.shape()).unwrap();
    let loss = (out * weight).unwrap().sum_all().unwrap();
    loss.backward().unwrap().get(of).unwrap().to_vec2().unwrap()
}

/// A layer over new variables.
fn trained(cfg: &EmbeddingConfig) -> (VarMap, EmbeddingLayer) {
    let map = VarMap::new();
    let layer = EmbeddingLayer::new(cfg, VarBuilder::from_varmap(&map, DType::F32, &CPU)).unwrap();
    (map, layer)
}

#[test]
fn new_tables_are_drawn_from_the_standard_normal_distribution() {
    let (map, layer) = trained(&EmbeddingConfig::new(400, 50).with_max_positions(300));
    let mut names: Vec<_> = map.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    assert_eq!(names, ["embedding.weight", "position_embedding.weight"]);
    for table in [layer.embeddings(), layer.position_embeddings().unwrap()] {
        let values = table.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let variance = values.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 0.05 && (variance - 1.).abs() < 0.1, "{mean} {variance}");
    }
    assert_eq!(layer.position_embeddings().unwrap().dims(), [300, 50]);
}

#[test]
fn gradients_flow_into_the_rows_that_were_used() {
    let var = Var::from_tensor(&table(4)).unwrap();
    let layer = EmbeddingLayer::from_embedding(Embedding::new(var.as_tensor().clone(), 3)).unwrap();
    let batch = Tensor::new(&[[1u32, 3], [1, 2]], &CPU).unwrap();
    assert_eq!(
        gradient(&layer, &batch, &var),
        [[0., 0., 0.], [1. + 7., 2. + 8., 3. + 9.], [10., 11., 12.], [4., 5., 6.]]
    );
}

#[test]
fn gradients_flow_into_the_positions_too() {
    let (_map, layer) = trained(&EmbeddingConfig::new(4, 3).with_max_positions(3).with_padding_idx(0));
    let batch = Tensor::new(&[[1u32, 0], [1, 2]], &CPU).unwrap();
    // The padding token's position learns, as in PyTorch: only its row of the token table does not.
    assert_eq!(
        gradient(&layer, &batch, layer.position_embeddings().unwrap()),
        [[1. + 7., 2. + 8., 3. + 9.], [4. + 10., 5. + 11., 6. + 12.], [0., 0., 0.]]
    );
}

#[test]
fn the_padding_row_of_a_new_table_is_zero_in_the_variable_itself() {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &CPU);
    let layer = EmbeddingLayer::new(&EmbeddingConfig::new(5, 3).with_padding_idx(2), vb.pp("front")).unwrap();
    let saved = map.data().lock().unwrap()["front.embedding.weight"].as_tensor().to_vec2::<f32>().unwrap();
    for (i, row) in saved.iter().enumerate() {
        assert_eq!(row.iter().all(|&v| v == 0.), i == 2, "row {i}: {row:?}");
    }
    assert_eq!(firsts(&layer.forward(&ids(&[2])).unwrap()), [0.]);
}

#[test]
fn the_padding_row_of_a_loaded_table_is_the_files() {
    let cfg = EmbeddingConfig::new(7, 3).with_padding_idx(2);
    let from_file = EmbeddingLayer::new(&cfg, weights(&[("embedding.weight", table(7))])).unwrap();
    assert_eq!(firsts(&from_file.forward(&ids(&[2, 1])).unwrap()), [20., 10.]);
    // A second layer on the same variables must not reset what has been set since.
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F32, &CPU);
    EmbeddingLayer::new(&cfg, vb.clone()).unwrap();
    map.data().lock().unwrap()["embedding.weight"].set(&table(7)).unwrap();
    let again = EmbeddingLayer::new(&cfg, vb).unwrap();
    assert_eq!(firsts(&again.forward(&ids(&[2, 1])).unwrap()), [20., 10.]);
}

#[test]
fn the_padding_row_gets_no_gradient() {
    let (map, layer) = trained(&EmbeddingConfig::new(4, 3).with_padding_idx(1));
    // Values that would spoil a product with zero.
    let row = Tensor::new(&[[f32::NAN, f32::INFINITY, 1.]], &CPU).unwrap();
    layer.embeddings().slice_set(&row, 0, 1).unwrap();
    let batch = Tensor::new(&[[1u32, 3], [1, 2]], &CPU).unwrap();
    let var = map.data().lock().unwrap()["embedding.weight"].as_tensor().clone();
    let out = layer.forward(&batch).unwrap();
    assert_eq!(out.i((0, 0, 2)).unwrap().to_scalar::<f32>().unwrap(), 1.);
    let grads = out.sum_all().unwrap().backward().unwrap();
    assert_eq!(
        grads.get(&var).unwrap().to_vec2::<f32>().unwrap(),
        [[0., 0., 0.], [0., 0., 0.], [1., 1., 1.], [1., 1., 1.]]
    );
}

#[test]
fn training_moves_the_layer_and_its_variables_together() {
    let (map, layer) = trained(&EmbeddingConfig::new(3, 2));
    let before = layer.forward(&ids(&[1])).unwrap().to_vec2::<f32>().unwrap();
    let var = map.all_vars().remove(0);
    var.set(&(var.as_tensor() + 1.).unwrap()).unwrap();
    let after = layer.forward(&ids(&[1])).unwrap().to_vec2::<f32>().unwrap();
    assert_eq!(after[0], before[0].iter().map(|v| v + 1.).collect::<Vec<_>>());
}

#[test]
fn a_configuration_survives_json_and_may_leave_options_out() {
    let full = EmbeddingConfig::new(7, 3).with_max_positions(4).with_padding_idx(0);
    let json = serde_json::to_string(&full).unwrap();
    assert_eq!(serde_json::from_str::<EmbeddingConfig>(&json).unwrap(), full);
    let short = r#"{"vocab_size":7,"embed_dim":3}"#;
    assert_eq!(serde_json::from_str::<EmbeddingConfig>(short).unwrap(), EmbeddingConfig::new(7, 3));
    assert_eq!(serde_json::to_string(&EmbeddingConfig::new(7, 3)).unwrap(), short);
}
