//! `EmbeddingLayer`: ids to vectors, how the tables begin, and where gradients go.

use candle_attention::text::{EmbeddingConfig, EmbeddingLayer, SimpleTokenizer};
use candle_core::NdArray;
use candle_nn::Embedding;

use crate::*;

/// Returns a table of shape (rows, 3) whose row i is [10 i, 10 i + 1, 10 i + 2].
fn table(rows: usize) -> Result<Tensor> {
    Tensor::from_iter((0..rows).flat_map(|i| (0..3).map(move |j| (10 * i + j) as f32)), &CPU)?.reshape((rows, 3))
}

/// Builds a layer over new variables.
fn trained(cfg: &EmbeddingConfig) -> Result<(VarMap, EmbeddingLayer)> {
    let map = VarMap::new();
    let layer = EmbeddingLayer::new(cfg, VarBuilder::from_varmap(&map, DType::F32, &CPU))?;
    Ok((map, layer))
}

/// Returns the first feature of each vector.
fn firsts(layer: &EmbeddingLayer, ids: impl NdArray) -> Result<Vec<f64>> {
    Ok(values(&layer.forward(&Tensor::new(ids, &CPU)?)?).into_iter().step_by(3).collect())
}

/// Builds a layer without positions, and a layer whose position p adds p / 4 to every feature, which is exact in every
/// dtype.
fn layers(table: &Tensor) -> Result<[EmbeddingLayer; 2]> {
    let positions = (Tensor::arange(0f32, 5., &CPU)? / 4.0)?.unsqueeze(1)?.repeat((1, 3))?.to_dtype(table.dtype())?;
    let tensors = [("embedding.weight".into(), table.clone()), ("position_embedding.weight".into(), positions)].into();
    let vb = VarBuilder::from_tensors(tensors, table.dtype(), &CPU);
    let with = EmbeddingLayer::new(&EmbeddingConfig::new(7, 3).with_max_positions(5), vb)?;
    Ok([EmbeddingLayer::from_embedding(Embedding::new(table.clone(), 3))?, with])
}

/// Checks ids and tables of any dtype and strides, and positions that start anywhere. No ids return no vectors.
#[test]
fn embedding_adds_rows_of_tokens_and_positions() -> Result<()> {
    let grid = Tensor::new(&[[0u32, 6, 2], [3, 4, 3]], &CPU)?;
    let none = [&[0][..], &[2, 0], &[0, 2]].map(|shape| Tensor::zeros(shape, DType::U32, &CPU));
    let of_dtypes = [DType::U8, DType::U32, DType::I64, DType::I32, DType::I16].map(|dtype| grid.to_dtype(dtype));
    let repeated = grid.i((0, ..1))?.broadcast_as((2, 3));
    let views = [grid.t(), grid.i((.., 1)), grid.i(1)?.narrow(0, 1, 2), repeated];
    let batches = none.into_iter().chain(of_dtypes).chain(views).collect::<Result<Vec<_>>>()?;
    let transposed = table(7)?.t()?.contiguous()?.t()?;
    assert!(!transposed.is_contiguous());
    for (table, &dtype) in [table(7)?, transposed].iter().flat_map(|x| dtypes(&CPU).iter().map(move |dtype| (x, dtype)))
    {
        let [without, with] = layers(&table.to_dtype(dtype)?)?;
        assert_eq!((without.vocab_size(), without.embed_dim(), without.position_embeddings().is_none()), (7, 3, true));
        let calls = [(&without, 0, 0.0), (&without, usize::MAX, 0.0), (&with, 0, 0.25), (&with, 2, 0.25)];
        for ((layer, offset, step), ids) in
            calls.into_iter().flat_map(|call| batches.iter().map(move |ids| (call, ids)))
        {
            let t = ids.dims()[ids.rank() - 1];
            let vector = |(n, id): (usize, f64)| {
                let position = step * (offset as f64 + (n % t) as f64);
                [0.0, 1.0, 2.0].map(|feature| 10.0 * id + feature + position)
            };
            let expected: Vec<_> = values(ids).into_iter().enumerate().flat_map(vector).collect();
            let found = layer.forward_at(ids, offset)?;
            let shape = [ids.dims(), &[3]].concat();
            compare(&format!("{ids:?} from {offset}"), &found, (&shape, dtype), &expected, |_| 0.0)?;
        }
    }
    // candle's `index_select` returns zeros for the largest number of the ids' dtype.
    let large = EmbeddingLayer::from_embedding(Embedding::new(table(300)?, 3))?;
    assert_eq!(firsts(&large, &[255u8, 254])?, [2550., 2540.]);
    // A tokenizer's batch goes straight in.
    for texts in [["a b", "b"], ["", ""]] {
        let batch = SimpleTokenizer::from_words(["<pad>", "a", "b"])?.encode_batch(&texts)?;
        assert_eq!(large.forward(&batch.ids_tensor(&CPU)?)?.dims(), [2, batch.seq_len(), 3]);
    }
    Ok(())
}

#[test]
fn embedding_of_new_variables_is_standard_normal() -> Result<()> {
    let (map, layer) = trained(&EmbeddingConfig::new(400, 50).with_max_positions(300))?;
    let tables = named(&map);
    assert_eq!(tables.len(), 2);
    for (name, dims) in [("embedding.weight", [400, 50]), ("position_embedding.weight", [300, 50])] {
        let numbers = values(&tables[name]);
        let count = (dims[0] * dims[1]) as f64;
        let mean = numbers.iter().sum::<f64>() / count;
        let variance = numbers.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / count;
        assert!(mean.abs() < 0.05 && (variance - 1.).abs() < 0.1, "{mean} {variance}");
        assert_eq!(tables[name].dims(), dims);
    }
    // Training moves the layer and its variables together.
    let before = firsts(&layer, &[1u32])?[0];
    let table = &tables["embedding.weight"];
    table.set(&(table.as_tensor() + 1.)?)?;
    assert!((firsts(&layer, &[1u32])?[0] - before - 1.0).abs() < 1e-6);
    Ok(())
}

/// Checks the gradients of the sum of the output times numbers that count up from 1.
#[test]
fn embedding_gradients_reach_only_rows_and_positions_in_use() -> Result<()> {
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
    let (vars, positioned) = trained(&EmbeddingConfig::new(4, 3).with_max_positions(3).with_padding_idx(0))?;
    let of_positions = gradient(&positioned, &[[1, 0], [1, 2]], &named(&vars)["position_embedding.weight"])?;
    assert_eq!(of_positions, [[1. + 7., 2. + 8., 3. + 9.], [4. + 10., 5. + 11., 6. + 12.], [0., 0., 0.]]);
    // NaN and infinities would not become zero in a product with zero.
    let (map, padded) = trained(&EmbeddingConfig::new(4, 3).with_padding_idx(1))?;
    padded.embeddings().slice_set(&Tensor::new(&[[f32::NAN, f32::INFINITY, 1.]], &CPU)?, 0, 1)?;
    assert_eq!(padded.forward(&Tensor::new(&[1u32], &CPU)?)?.i((0, 2))?.to_scalar::<f32>()?, 1.);
    let of_padded = gradient(&padded, &[[1, 3], [1, 2]], &named(&map)["embedding.weight"])?;
    assert_eq!(of_padded, [[0., 0., 0.], [0., 0., 0.], [10., 11., 12.], [4., 5., 6.]]);
    Ok(())
}

/// Checks that the row is zero in a new variable, the row of the file where it is loaded, and unchanged where a second
/// layer shares the variable.
#[test]
fn embedding_padding_row_starts_at_zero_and_is_not_trained() -> Result<()> {
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
fn embedding_config_round_trips_through_json() {
    let full = EmbeddingConfig::new(7, 3).with_max_positions(4).with_padding_idx(0);
    survives_json(&full);
    let short = r#"{"vocab_size":7,"embed_dim":3}"#;
    assert_eq!(survives_json(&EmbeddingConfig::new(7, 3)), short);
}
