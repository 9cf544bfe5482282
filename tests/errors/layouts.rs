//! Layouts that cannot hold a config, and names that leave two readings or none.

use std::collections::HashMap;

use candle_attention::weights::{Naming, Orientation};
use candle_attention::{
    GateActivation, GatePlace, GateScope, MultiHeadAttention, MultiHeadAttentionConfig, OutputGate, WeightLayout,
};
use candle_core::{DType, Result};
use candle_nn::{VarBuilder, VarMap};

use crate::common::models;
use crate::{CPU, Case, zeros};

fn cfg() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(8, 4)
}

fn load(cfg: MultiHeadAttentionConfig, layout: &str) -> Result<()> {
    MultiHeadAttention::load(&cfg, layout.parse()?, VarBuilder::zeros(DType::F32, &CPU)).map(drop)
}

fn save(cfg: MultiHeadAttentionConfig, layout: &str) -> Result<()> {
    let layer = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &CPU))?;
    layer.state_dict(layout.parse()?).map(drop)
}

fn detect(names: &[(&str, &[usize])]) -> Result<()> {
    let tensors: HashMap<_, _> = names.iter().map(|(name, shape)| (name.to_string(), zeros(*shape))).collect();
    WeightLayout::detect(&VarBuilder::from_tensors(tensors, DType::F32, &CPU)).map(drop)
}

fn gated(place: GatePlace) -> MultiHeadAttentionConfig {
    let (activation, scope) = (GateActivation::Sigmoid, GateScope::PerEntry);
    cfg().with_output_gate(OutputGate { activation, scope, place })
}

pub const LOADING: &[Case] = cases! {
    "a gate in PyTorch's module" => load(gated(GatePlace::Own { bias: false }), "torch"),
    "a gate among the queries of a packed weight" => load(gated(GatePlace::Query), "packed:qkv_proj"),
    "a gate of plain parameters" => load(gated(GatePlace::Query), "raw:book"),
    "a gate that the config denies" => {
        let tensors = ["q_proj", "k_proj", "v_proj", "o_proj", "g_proj"];
        let tensors = tensors.map(|name| (format!("{name}.weight"), zeros((8, 8))));
        MultiHeadAttention::new(&cfg(), VarBuilder::from_tensors(tensors.into(), DType::F32, &CPU))
    },
    "an output projection behind a stack" => load(cfg(), "stacked:book"),
    "shared key heads in a stack" => load(cfg().with_num_kv_heads(2).with_out_proj(false), "stacked:short"),
    "biases of plain parameters" => load(cfg().with_qkv_bias(true), "raw:book"),
    "an output bias of plain parameters" => load(cfg().with_out_bias(true), "raw-transposed:d2l"),
    "biases of a stack of plain parameters" => load(cfg().with_out_proj(false).with_v_bias(true), "stacked-raw:short"),
    "some biases in PyTorch's module" => load(cfg().with_q_bias(true), "torch"),
    "all biases but the last in PyTorch's module" => load(cfg().with_qkv_bias(true), "torch"),
    "no output projection in PyTorch's module" => load(cfg().with_out_proj(false), "torch"),
    "shared key heads in PyTorch's module" => load(cfg().with_num_kv_heads(2), "torch"),
    "wide heads in PyTorch's module" => load(cfg().with_head_dim(3), "torch"),
    "another input for the keys of a packed weight" =>
        load(cfg().with_key_size(5).with_value_size(8), "packed:qkv_proj"),
    "another input for the values of GPT-2" => load(cfg().with_value_size(5), "conv1d"),
    "some biases in a packed weight" =>
        load(cfg().with_q_bias(true).with_v_bias(true), "packed:query_key_value:by-head"),
};

pub const SAVING: &[Case] = cases! {
    "a gate in GPT-2" => save(gated(GatePlace::Query), "conv1d"),
    "an output projection behind a stack" => save(cfg(), "stacked:book"),
    "shared key heads in a stack" => save(cfg().with_num_kv_heads(1).with_out_proj(false), "stacked:d2l"),
    "biases of plain parameters" => save(cfg().with_k_bias(true), "raw:short"),
    "no output projection in PyTorch's module" => save(cfg().with_out_proj(false), "torch"),
    "some biases in PyTorch's module" => save(cfg().with_out_bias(true), "torch"),
    "another input for the keys of a packed weight" => save(cfg().with_key_size(5), "packed:Wqkv"),
    "a folder that is not there" => {
        let layer = MultiHeadAttention::new(&cfg(), VarBuilder::zeros(DType::F32, &CPU))?;
        layer.save(crate::DIR.path().join("nowhere/model.safetensors"), WeightLayout::Canonical)
    },
};

pub const DETECTION: &[Case] = cases! {
    "nothing of attention" => detect(&[("mlp.weight", &[8, 8])]),
    "a wrong prefix" => {
        let path = models().join("frontend_48/prefixed.safetensors");
        let vb = candle_attention::weights::open(path, DType::F32, &CPU)?;
        WeightLayout::detect(&vb.pp("model").pp("attn"))
    },
    "a wrong prefix of a checkpoint" => {
        let path = models().join("frontend_48/prefixed.safetensors");
        candle_attention::weights::Checkpoint::open(path)?.detect("model.layers.1.self_attn")
    },
    "the weights of additive attention" =>
        detect(&[("W_q.weight", &[8, 4]), ("W_k.weight", &[8, 4]), ("w_v.weight", &[1, 8])]),
    "a square plain parameter" => detect(&[("W_query", &[8, 8])]),
    "a stack of square plain parameters" => detect(&[("heads.0.Wq", &[8, 8])]),
    "a packed weight that two families order otherwise" => detect(&[("query_key_value.weight", &[24, 8])]),
    "a tall c_attn" => detect(&[("c_attn.weight", &[24, 8])]),
    "two output projections" =>
        detect(&[("q_proj.weight", &[8, 8]), ("o_proj.weight", &[8, 8]), ("dense.weight", &[8, 8])]),
    "two layers in one place" => detect(&[("q_proj.weight", &[8, 8]), ("Wq.weight", &[8, 8])]),
    "a builder that claims every name" => WeightLayout::detect(&VarBuilder::zeros(DType::F32, &CPU)),
    "fresh variables" => WeightLayout::detect(&VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU)),
    "variables, whose shapes Candle does not tell" => {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
        MultiHeadAttention::load(&cfg(), WeightLayout::Raw(Naming::Book, Orientation::InOut), vb.clone())?;
        WeightLayout::detect(&vb)
    },
    "an unknown layout" => "llama".parse::<WeightLayout>(),
    "a layout in capitals" => "Book".parse::<WeightLayout>(),
    "no layout" => "".parse::<WeightLayout>(),
};
