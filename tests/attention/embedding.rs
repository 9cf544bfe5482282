//! `EmbeddingLayer`: ids to vectors, how the tables begin, and where gradients go.

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer};
use candle_core::NdArray;
use candle_nn::Embedding;

use crate::*;

/// Row i of a (rows, 3) table is [10 i, 10 i + 1, 10 i + 2].
fn table(rows: usize) -> Result<Tensor> {
    Tensor::from_iter((0..rows).flat_map(|i| (0..3).map(move |j| (10 * i + j) as f32)), &CPU)?.reshape((rows, 3))
}

fn layer(rows: usize) -> Result<EmbeddingLayer> {
    EmbeddingLayer::from_embedding(Embedding::new(table(rows)?, 3))
}

/// Of seven words; positions add 0.1, 0.2, 0.3, 0.4 to every feature.
fn layer_with_4_positions() -> Result<EmbeddingLayer> {
    let positions = Tensor::new(&[0.1f32, 0.2, 0.3, 0.4], &CPU)?.unsqueeze(1)?.repeat((1, 3))?;
    let tensors = [("embedding.weight".into(), table(7)?), ("position_embedding.weight".into(), positions)].into();
    EmbeddingLayer::new(&EmbeddingConfig::new(7, 3).with_max_positions(4), builder(tensors))
}

/// A layer over new variables.
fn trained(cfg: &EmbeddingConfig) -> Result<(VarMap, EmbeddingLayer)> {
    let map = VarMap::new();
    let layer = EmbeddingLayer::new(cfg, VarBuilder::from_varmap(&map, DType::F32, &CPU))?;
    Ok((map, layer))
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
    // candle's `index_select` gives zeros for the largest number of the ids' dtype.
    assert_eq!(firsts(&self::layer(300)?, &[255u8, 254])?, [2550., 2540.]);
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
fn no_ids_give_no_vectors_and_a_tokenizers_batch_goes_straight_in() -> Result<()> {
    for layer in [layer(7)?, layer_with_4_positions()?] {
        for (shape, expected) in [(vec![0], vec![0, 3]), (vec![2, 0], vec![2, 0, 3]), (vec![0, 2], vec![0, 2, 3])] {
            assert_eq!(layer.forward(&Tensor::zeros(shape, DType::U32, &CPU)?)?.dims(), expected);
        }
    }
    for texts in [["a b", "b"], ["", ""]] {
        let batch = SimpleTokenizer::from_words(["<pad>", "a", "b"])?.encode_batch(&texts)?;
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

#[test]
fn new_tables_are_drawn_from_the_standard_normal_distribution() -> Result<()> {
    let (map, layer) = trained(&EmbeddingConfig::new(400, 50).with_max_positions(300))?;
    let tables = named(&map);
    assert_eq!(tables.len(), 2);
    for (name, dims) in [("embedding.weight", [400, 50]), ("position_embedding.weight", [300, 50])] {
        let (numbers, count) = (values(&tables[name]), (dims[0] * dims[1]) as f64);
        let mean = numbers.iter().sum::<f64>() / count;
        let variance = numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        assert!(mean.abs() < 0.05 && (variance - 1.).abs() < 0.1, "{mean} {variance}");
        assert_eq!(tables[name].dims(), dims);
    }
    // Training moves the layer and its variables together.
    let (before, table) = (firsts(&layer, &[1u32])?[0], &tables["embedding.weight"]);
    table.set(&(table.as_tensor() + 1.)?)?;
    assert!((firsts(&layer, &[1u32])?[0] - before - 1.0).abs() < 1e-6);
    Ok(())
}

/// Of the sum of the output times numbers that count up from 1.
#[test]
fn gradients_flow_into_the_rows_and_positions_that_were_used() -> Result<()> {
    let gradient = |layer: &EmbeddingLayer, ids: &[[u32; 2]; 2], of: &Tensor| -> Result<_> {
        let out = layer.forward(&Tensor::new(ids, &CPU)?)?;
        let factors = Tensor::arange(1f32, (out.elem_count() + 1) as f32, &CPU)?.reshape(out.shape())?;
        (out * factors)?.sum_all()?.backward()?.get(of).expect("a gradient").to_vec2::<f32>()
    };
    let var = Var::from_tensor(&table(4)?)?;
    let layer = EmbeddingLayer::from_embedding(Embedding::new(var.as_tensor().clone(), 3))?;
    let found = gradient(&layer, &[[1, 3], [1, 2]], &var)?;
    assert_eq!(found, [[0., 0., 0.], [1. + 7., 2. + 8., 3. + 9.], [10., 11., 12.], [4., 5., 6.]]);
    // The padding token's position learns, as in PyTorch: only its row of the token table does not.
    let (map, layer) = trained(&EmbeddingConfig::new(4, 3).with_max_positions(3).with_padding_idx(0))?;
    let found = gradient(&layer, &[[1, 0], [1, 2]], &named(&map)["position_embedding.weight"])?;
    assert_eq!(found, [[1. + 7., 2. + 8., 3. + 9.], [4. + 10., 5. + 11., 6. + 12.], [0., 0., 0.]]);
    // Whatever its values: these would spoil a product with zero.
    let (map, layer) = trained(&EmbeddingConfig::new(4, 3).with_padding_idx(1))?;
    layer.embeddings().slice_set(&Tensor::new(&[[f32::NAN, f32::INFINITY, 1.]], &CPU)?, 0, 1)?;
    assert_eq!(layer.forward(&Tensor::new(&[1u32], &CPU)?)?.i((0, 2))?.to_scalar::<f32>()?, 1.);
    let found = gradient(&layer, &[[1, 3], [1, 2]], &named(&map)["embedding.weight"])?;
    assert_eq!(found, [[0., 0., 0.], [0., 0., 0.], [10., 11., 12.], [4., 5., 6.]]);
    Ok(())
}

/// Zero in a new variable, the file's where it is loaded, and as it was set where a second layer shares the variable.
#[test]
fn the_padding_row_begins_at_zero_and_stays_as_it_is() -> Result<()> {
    let cfg = EmbeddingConfig::new(7, 3).with_padding_idx(2);
    let (map, layer) = trained(&cfg)?;
    let variable = &named(&map)["embedding.weight"];
    for (i, row) in variable.to_vec2::<f32>()?.iter().enumerate() {
        assert_eq!(row.iter().all(|&x| x == 0.), i == 2, "row {i}: {row:?}");
    }
    assert_eq!(firsts(&layer, &[2u32])?, [0.]);
    let loaded = EmbeddingLayer::new(&cfg, builder([("embedding.weight".into(), table(7)?)].into()))?;
    assert_eq!(firsts(&loaded, &[2u32, 1])?, [20., 10.]);
    variable.set(&table(7)?)?;
    let again = EmbeddingLayer::new(&cfg, VarBuilder::from_varmap(&map, DType::F32, &CPU))?;
    assert_eq!(firsts(&again, &[2u32, 1])?, [20., 10.]);
    Ok(())
}

#[test]
fn a_configuration_survives_json_and_may_leave_options_out() {
    let full = EmbeddingConfig::new(7, 3).with_max_positions(4).with_padding_idx(0);
    survives_json(&full);
    let short = r#"{"vocab_size":7,"embed_dim":3}"#;
    assert_eq!(survives_json(&EmbeddingConfig::new(7, 3)), short);
}
