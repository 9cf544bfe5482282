//! A layer of plain tensors holds its query, key and value projections in one weight, and shows views of it.

use std::collections::HashMap;

use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{CpuStorage, DType, Result, Storage, Tensor};
use candle_nn::{VarBuilder, VarMap};

use crate::common::assert_close;
use crate::grid::{grid, layouts_of};
use crate::{CPU, invented, load};

/// Where a tensor's buffer lies, and where in it the tensor begins.
fn place(tensor: &Tensor) -> (usize, usize) {
    let (storage, layout) = tensor.storage_and_layout();
    let address = match &*storage {
        Storage::Cpu(CpuStorage::F32(buffer)) => buffer.as_ptr() as usize,
        Storage::Cpu(CpuStorage::F64(buffer)) => buffer.as_ptr() as usize,
        _ => panic!("an f32 or f64 tensor on the CPU"),
    };
    (address, layout.start_offset())
}

fn len_of_buffer(tensor: &Tensor) -> usize {
    let (storage, _) = tensor.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(buffer)) = &*storage else { panic!("an f32 tensor on the CPU") };
    buffer.len()
}

fn by_name(tensors: Vec<(String, Tensor)>) -> HashMap<String, Tensor> {
    tensors.into_iter().collect()
}

/// q, k and v lie one after the other in one buffer that holds nothing else, whatever layout they came from; biases
/// too, with zeros where there is none.
#[test]
fn every_layout_is_loaded_into_one_weight() -> Result<()> {
    let (mut all, mut two, mut none) = (0, 0, 0);
    // The rows of a gate would lie between those of queries and keys.
    for cfg in grid().into_iter().filter(|cfg| cfg.output_gate().is_none()).step_by(7) {
        let canonical = invented(&cfg, WeightLayout::Canonical)?;
        for layout in layouts_of(&cfg) {
            let what = format!("{layout}, {cfg:?}");
            let layer = load(&cfg, layout, &canonical.state_dict(layout)?)?;
            let (q, k, v, _) = &layer.projections()?;
            let [wq, wk, wv] = [q, k, v].map(|linear| place(linear.weight()));
            let sizes = [q, k, v].map(|linear| linear.weight().elem_count());
            for (linear, bias) in [q, k, v].into_iter().zip(cfg.qkv_bias()) {
                assert_eq!(linear.bias().is_some(), bias, "{what}");
            }
            let joined = match (cfg.embed_dim() == cfg.key_size(), cfg.key_size() == cfg.value_size()) {
                (true, true) => {
                    all += 1;
                    assert_eq!([wq, wk, wv], [(wq.0, 0), (wq.0, sizes[0]), (wq.0, sizes[0] + sizes[1])], "{what}");
                    vec![q, k, v]
                }
                (false, true) => {
                    two += 1;
                    assert_eq!([wk, wv], [(wk.0, 0), (wk.0, sizes[1])], "{what}");
                    vec![k, v]
                }
                (true, false) => {
                    two += 1;
                    assert_eq!([wq, wk], [(wq.0, 0), (wq.0, sizes[0])], "{what}");
                    vec![q, k]
                }
                (false, false) => {
                    none += 1;
                    assert!(wq.0 != wk.0 && wk.0 != wv.0, "{what}");
                    continue;
                }
            };
            let weights: usize = joined.iter().map(|linear| linear.weight().elem_count()).sum();
            let biases: usize = joined.iter().filter_map(|linear| linear.weight().dim(0).ok()).sum();
            let mut start = 0;
            for linear in joined {
                assert!(linear.weight().is_contiguous(), "{what}");
                assert_eq!(len_of_buffer(linear.weight()), weights, "{what}");
                if let Some(bias) = linear.bias() {
                    assert_eq!((place(bias).1, len_of_buffer(bias)), (start, biases), "{what}");
                }
                start += linear.weight().dim(0)?;
            }
        }
    }
    assert!(all > 100 && two > 100 && none > 100, "{all}, {two}, {none}");
    Ok(())
}

/// A checkpoint whose rows are by part already is not copied, in f64, which is not packed.
#[test]
fn packed_rows_are_used_where_they_lie() -> Result<()> {
    let cfg = MultiHeadAttentionConfig::new(8, 4).with_bias(true);
    let names = [("torch", "in_proj_weight", "in_proj_bias"), ("packed:Wqkv", "Wqkv.weight", "Wqkv.bias")];
    for (layout, weight, bias) in names {
        let layout: WeightLayout = layout.parse()?;
        let file = invented(&cfg, WeightLayout::Canonical)?.state_dict(layout)?;
        let wide = |(name, tensor): (String, Tensor)| Ok((name, tensor.to_dtype(DType::F64)?));
        let file = by_name(file.into_iter().map(wide).collect::<Result<_>>()?);
        let vb = VarBuilder::from_tensors(file.clone(), DType::F64, &CPU);
        let layer = MultiHeadAttention::load(&cfg, layout, vb)?;
        let (q, k, v, _) = &layer.projections()?;
        for linear in [q, k, v] {
            assert_eq!(place(linear.weight()).0, place(&file[weight]).0, "{layout}");
            assert_eq!(place(linear.bias().expect("a bias")).0, place(&file[bias]).0, "{layout}");
        }
        let canonical = by_name(layer.state_dict(WeightLayout::Canonical)?);
        assert_eq!(place(&canonical["k_proj.weight"]), place(k.weight()), "{layout}");
    }
    Ok(())
}

/// Training changes a variable where it lies: a layer over variables reads them there.
#[test]
fn variables_stay_where_they_are() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &CPU);
    let layer = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(8, 4).with_bias(true), vb)?;
    let (q, k, v, _) = &layer.projections()?;
    let vars = vars.data().lock().expect("one thread");
    for (name, linear) in [("q_proj", q), ("k_proj", k), ("v_proj", v)] {
        assert_eq!(place(linear.weight()), place(&vars[&format!("{name}.weight")]), "{name}");
        assert_eq!(place(linear.bias().expect("a bias")), place(&vars[&format!("{name}.bias")]), "{name}");
    }
    Ok(())
}

/// Loaded from a file into variables, the layer learns: the next call and what is saved see each step.
#[test]
fn a_layer_loaded_into_variables_still_learns() -> Result<()> {
    let cfg = MultiHeadAttentionConfig::new(8, 4).with_bias(true);
    let written = by_name(invented(&cfg, WeightLayout::Canonical)?.state_dict(WeightLayout::Canonical)?);
    let vars = VarMap::new();
    let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_varmap(&vars, DType::F32, &CPU))?;
    for (name, var) in vars.data().lock().expect("one thread").iter() {
        var.set(&written[name])?;
    }
    let xs = (Tensor::arange(0f32, 40f32, &CPU)? * 0.61)?.sin()?.reshape((1, 5, 8))?;
    let before = layer.forward(&xs)?;
    let frozen = invented(&cfg, WeightLayout::Canonical)?;
    // The rounding of sums of eight products of numbers up to 1, through three matrices.
    let tolerance = 2e-5;
    assert_close(&frozen.forward(&xs)?, &before, tolerance, "the same weights");
    let gradients = before.sqr()?.sum_all()?.backward()?;
    for (name, var) in vars.data().lock().expect("one thread").iter() {
        let gradient = gradients.get(var).unwrap_or_else(|| panic!("{name} has no gradient"));
        var.set(&(var.as_tensor() - (gradient * 1e-3)?)?)?;
    }
    let loss = |ys: &Tensor| ys.sqr()?.sum_all()?.to_scalar::<f32>();
    let after = layer.forward(&xs)?;
    assert!(loss(&after)? < loss(&before)?);
    assert_close(&frozen.forward(&xs)?, &before, tolerance, "plain tensors do not learn");
    let saved = layer.state_dict(WeightLayout::Canonical)?.into_iter().map(|(name, tensor)| (name, tensor.detach()));
    let saved = load(&cfg, WeightLayout::Canonical, &saved.collect::<Vec<_>>())?;
    assert_close(&saved.forward(&xs)?, &after, tolerance, "what is saved has learned");
    Ok(())
}
