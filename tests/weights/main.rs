//! Weights in every layout: written, read back, drawn, found in files.

#[path = "../common/mod.rs"]
mod common;

mod folders;
mod forgotten;
mod grid;
mod image_models;
mod norm_names;
mod one_weight;
mod packed_faults;
mod pth;
mod quantized;
mod quantized_faults;
mod quantized_files;
mod quantized_fuzz;
mod quantized_layers;
mod reading;
mod round_trip;
mod shards;
mod spelling;
mod tensor_parallel;
mod trained;
mod unknown;
mod variables;
mod x_transformers;

use std::collections::HashMap;

use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, Linear, VarBuilder, VarMap};

use common::DEVICE;
use common::allocations::Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

/// A builder that has a tensor for every name: multiples of 2^-12 between ±1 that depend on the name and the place.
struct Invented;

impl SimpleBackend for Invented {
    fn get(&self, shape: Shape, name: &str, _: Init, dtype: DType, device: &Device) -> Result<Tensor> {
        let mut state = name.bytes().fold(0u32, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        let values = (0..shape.elem_count()).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 19) as f32 / 4096.0 - 1.0
        });
        Tensor::from_iter(values, device)?.reshape(shape)?.to_dtype(dtype)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle_core::bail!("{name} has no shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        false
    }
}

/// Returns a layer whose numbers are all different.
fn invented(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> Result<MultiHeadAttention> {
    MultiHeadAttention::load(cfg, layout, VarBuilder::from_backend(Box::new(Invented), DType::F32, DEVICE.clone()))
}

fn load(
    cfg: &MultiHeadAttentionConfig,
    layout: WeightLayout,
    tensors: &[(String, Tensor)],
) -> Result<MultiHeadAttention> {
    let tensors = tensors.iter().cloned().collect();
    MultiHeadAttention::load(cfg, layout, VarBuilder::from_tensors(tensors, DType::F32, &DEVICE))
}

/// Name, shape and bits of a parameter.
type Bits = (String, Vec<usize>, Vec<u32>);

/// Returns the bits of every parameter, in one layout for all layers.
fn bits(layer: &MultiHeadAttention) -> Result<Vec<Bits>> {
    let named = |(name, tensor): &(String, Tensor)| {
        let values = tensor.flatten_all()?.to_vec1::<f32>()?;
        Ok((name.clone(), tensor.dims().to_vec(), values.into_iter().map(f32::to_bits).collect()))
    };
    layer.state_dict(WeightLayout::Canonical)?.iter().map(named).collect()
}

/// Asserts that both have the same names with the same numbers.
#[track_caller]
fn assert_same_tensors(got: &[(String, Tensor)], expected: &HashMap<String, Tensor>, what: &str) {
    let mut names: Vec<_> = got.iter().map(|(name, _)| name.as_str()).collect();
    let mut expected_names: Vec<_> = expected.keys().map(String::as_str).collect();
    names.sort();
    expected_names.sort();
    assert_eq!(names, expected_names, "{what}");
    for (name, tensor) in got {
        common::assert_close(tensor, &expected[name], 0.0, &format!("{what}, {name}"));
    }
}

/// Returns `sin` of multiples of a step, computed in f64 before rounding.
fn wave(step: f64, shape: impl Into<Shape>) -> Result<Tensor> {
    wave_on(&DEVICE, step, shape)
}

fn wave_on(device: &Device, step: f64, shape: impl Into<Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let numbers: Vec<f32> = (0..shape.elem_count()).map(|n| (n as f64 * step).sin() as f32).collect();
    Tensor::from_vec(numbers, shape, device)
}

/// Returns a layer of new variables, with or without biases. A stack of heads has no output projection.
fn fresh(layout: WeightLayout, biases: bool, cfg: MultiHeadAttentionConfig) -> Result<(VarMap, MultiHeadAttention)> {
    let vars = VarMap::new();
    let stack = matches!(layout, WeightLayout::StackedHeads(..));
    let cfg = cfg.with_qkv_bias(biases).with_out_bias(biases && !stack).with_out_proj(!stack);
    let layer = MultiHeadAttention::load(&cfg, layout, VarBuilder::from_varmap(&vars, DType::F32, &DEVICE))?;
    Ok((vars, layer))
}

/// Returns the q, k, v and, if there is one, output projection.
fn projections(layer: &MultiHeadAttention) -> Vec<Linear> {
    let (q, k, v, o) = layer.projections().expect("projections");
    [q, k, v].into_iter().chain(o).collect()
}
