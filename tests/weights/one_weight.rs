//! A layer of plain tensors stores its query, key and value projections in one weight, and returns views of it.

use std::collections::HashMap;

use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{CpuStorage, DType, Result, Storage, Tensor};
use candle_nn::VarBuilder;

use crate::common::skips_device;
use crate::{DEVICE, invented};

/// Returns the address of a tensor's buffer, the offset of the tensor in it, and its length.
fn place(tensor: &Tensor) -> (usize, usize, usize) {
    let (storage, layout) = tensor.storage_and_layout();
    let (address, len) = match &*storage {
        Storage::Cpu(CpuStorage::F32(buffer)) => (buffer.as_ptr() as usize, buffer.len()),
        Storage::Cpu(CpuStorage::F64(buffer)) => (buffer.as_ptr() as usize, buffer.len()),
        _ => panic!("an f32 or f64 tensor on the CPU"),
    };
    (address, layout.start_offset(), len)
}

/// Asserts that projections of one input are consecutive in one buffer with nothing else, for every layout; biases too,
/// with zeros for missing ones. Addresses are compared on the CPU alone. The rows of a gate would be between the rows
/// of queries and keys.
pub fn assert_joined(layer: &MultiHeadAttention, what: &str) -> Result<()> {
    let cfg = layer.config();
    if cfg.output_gate().is_some() || !DEVICE.is_cpu() {
        return Ok(());
    }
    let (q, k, v, _) = layer.projections()?;
    let of_inputs = [(cfg.embed_dim(), q), (cfg.kdim(), k), (cfg.vdim(), v)];
    for ((_, linear), has_bias) in of_inputs.iter().zip([cfg.q_bias(), cfg.k_bias(), cfg.v_bias()]) {
        assert_eq!(linear.bias().is_some(), has_bias, "{what}");
    }
    let mut buffers = Vec::new();
    for joined in of_inputs.chunk_by(|(one, _), (other, _)| one == other) {
        let (buffer, _, len) = place(joined[0].1.weight());
        buffers.push(buffer);
        let rows: usize = joined.iter().map(|(_, linear)| linear.weight().dims()[0]).sum();
        let mut row = 0;
        let width = joined[0].0;
        for (_, linear) in joined {
            assert!(linear.weight().is_contiguous(), "{what}");
            assert_eq!(place(linear.weight()), (buffer, row * width, len), "{what}");
            if let Some(bias) = linear.bias().filter(|_| joined.len() > 1) {
                let (_, start, size) = place(bias);
                assert_eq!((start, size), (row, rows), "{what}");
            }
            row += linear.weight().dim(0)?;
        }
        assert!(joined.len() == 1 || len == rows * width, "{what}");
    }
    let count = buffers.len();
    buffers.dedup();
    assert_eq!(buffers.len(), count, "{what}");
    Ok(())
}

/// Loads a checkpoint whose rows are by projection already, in f64, which is not packed.
#[test]
fn packed_qkv_rows_are_not_copied() -> Result<()> {
    if skips_device("the addresses of the CPU are compared") {
        return Ok(());
    }
    let cfg = MultiHeadAttentionConfig::new(8, 4).with_bias(true);
    let names = [("torch", "in_proj_weight", "in_proj_bias"), ("packed:Wqkv", "Wqkv.weight", "Wqkv.bias")];
    for (layout, weight, bias) in names {
        let layout: WeightLayout = layout.parse()?;
        let file = invented(&cfg, WeightLayout::Canonical)?.state_dict(layout)?;
        let wide = |(name, tensor): (String, Tensor)| Ok((name, tensor.to_dtype(DType::F64)?));
        let file: HashMap<_, _> = file.into_iter().map(wide).collect::<Result<_>>()?;
        let vb = VarBuilder::from_tensors(file.clone(), DType::F64, &DEVICE);
        let layer = MultiHeadAttention::load(&cfg, layout, vb)?;
        let (q, k, v, _) = &layer.projections()?;
        for linear in [q, k, v] {
            assert_eq!(place(linear.weight()).0, place(&file[weight]).0, "{layout}");
            assert_eq!(place(linear.bias().expect("a bias")).0, place(&file[bias]).0, "{layout}");
        }
        let canonical: HashMap<_, _> = layer.state_dict(WeightLayout::Canonical)?.into_iter().collect();
        assert_eq!(place(&canonical["k_proj.weight"]), place(k.weight()), "{layout}");
    }
    Ok(())
}
