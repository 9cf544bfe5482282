//! Weights that are missing, misshapen or surplus.

use std::collections::HashMap;

use candle_attention::weights::{Checkpoint, Naming, Orientation, Storage};
use candle_attention::{
    AdditiveAttention, AdditiveAttentionConfig, MultiHeadAttention, MultiHeadAttentionConfig, QkNorm, QkNormKind,
    QkNormScope, WeightLayout,
};
use candle_core::{DType, Result};
use candle_nn::{VarBuilder, VarMap};

use crate::common::models;
use crate::{CPU, Case, zeros};

fn cfg() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(8, 2)
}

fn stack() -> MultiHeadAttentionConfig {
    cfg().with_out_proj(false)
}

/// The weights of a layer of this config, with tensors of these shapes added or put in their place, or taken away.
fn load(
    cfg: MultiHeadAttentionConfig,
    layout: WeightLayout,
    changes: &[(&str, &[usize])],
    asked: MultiHeadAttentionConfig,
) -> Result<()> {
    let whole = MultiHeadAttention::load(&cfg, layout, VarBuilder::zeros(DType::F32, &CPU))?;
    let mut tensors: HashMap<_, _> = whole.state_dict(layout)?.into_iter().collect();
    for (name, shape) in changes {
        match shape {
            [] => drop(tensors.remove(*name).expect("the tensor was there")),
            shape => drop(tensors.insert(name.to_string(), zeros(*shape))),
        }
    }
    MultiHeadAttention::load(&asked, layout, VarBuilder::from_tensors(tensors, DType::F32, &CPU)).map(drop)
}

fn changed(layout: WeightLayout, changes: &[(&str, &[usize])]) -> Result<()> {
    let cfg = if matches!(layout, WeightLayout::StackedHeads(..)) { stack() } else { cfg() };
    load(cfg.clone(), layout, changes, cfg)
}

const BOOK_STACK: WeightLayout = WeightLayout::StackedHeads(Naming::Book, Storage::Linear);
const RAW_STACK: WeightLayout = WeightLayout::StackedHeads(Naming::Short, Storage::Raw(Orientation::InOut));

pub const MISSING: &[Case] = cases! {
    "a query weight that is not there" => changed(WeightLayout::Canonical, &[("q_proj.weight", &[])]),
    "an output weight that is not there" => changed(WeightLayout::D2l, &[("W_o.weight", &[])]),
    "a bias that is not there" => load(cfg(), WeightLayout::Book, &[], cfg().with_k_bias(true)),
    "a packed bias that is not there" =>
        load(cfg(), WeightLayout::Torch, &[("out_proj.bias", &[8])], cfg().with_bias(true)),
    "fewer heads than the config" =>
        load(stack(), BOOK_STACK, &[], MultiHeadAttentionConfig::new(8, 3).with_head_dim(4).with_out_proj(false)),
    "more heads than any memory holds the names of" =>
        load(stack(), BOOK_STACK, &[], MultiHeadAttentionConfig::new(8, 1 << 31).with_head_dim(1).with_out_proj(false)),
    "a head without keys" => changed(BOOK_STACK, &[("heads.1.W_key.weight", &[])]),
    "sinks that are not there" => load(cfg(), WeightLayout::Canonical, &[], cfg().with_sinks(true)),
    "a learned key that is not there" => load(cfg(), WeightLayout::Torch, &[], cfg().with_bias_kv(true)),
    "a norm that is not there" => {
        let norm = QkNorm { kind: QkNormKind::Layer, scope: QkNormScope::PerHead, eps: 1e-5 };
        load(cfg(), WeightLayout::Canonical, &[("q_norm.weight", &[4])], cfg().with_qk_norm(norm))
    },
    "the weights of another layout" => {
        let vb = candle_attention::weights::open(models().join("book_mha/model.safetensors"), DType::F32, &CPU)?;
        MultiHeadAttention::new(&MultiHeadAttentionConfig::new(3, 2).with_out_dim(2), vb)
    },
    "a prefix too few" => {
        let path = models().join("frontend_48/prefixed.safetensors");
        let vb = candle_attention::weights::open(path, DType::F32, &CPU)?;
        MultiHeadAttention::new(&MultiHeadAttentionConfig::new(48, 4).with_qkv_bias(true), vb.pp("model"))
    },
    "the weights of additive attention" => {
        let vb = candle_attention::weights::open(models().join("d2l_additive/model.safetensors"), DType::F32, &CPU)?;
        let cfg = MultiHeadAttentionConfig::new(5, 1).with_head_dim(8).with_key_size(6).with_value_size(4);
        MultiHeadAttention::load(&cfg, WeightLayout::D2l, vb)
    },
};

pub const MISSHAPEN: &[Case] = cases! {
    "a query weight of another width" => changed(WeightLayout::Canonical, &[("q_proj.weight", &[8, 6])]),
    "a transposed weight" =>
        load(cfg().with_key_size(5), WeightLayout::Book, &[("W_key.weight", &[5, 8])], cfg().with_key_size(5)),
    "a bias of another width" => {
        let cfg = cfg().with_bias(true);
        load(cfg.clone(), WeightLayout::Bert, &[("output.dense.bias", &[4])], cfg)
    },
    "key heads in the file where the config has as many as query heads" =>
        load(cfg().with_num_kv_heads(1), WeightLayout::Canonical, &[], cfg()),
    "a packed weight with fewer rows" => changed(WeightLayout::Torch, &[("in_proj_weight", &[16, 8])]),
    "a linear layer where GPT-2 has its transposed one" =>
        changed(WeightLayout::Conv1d, &[("c_attn.weight", &[24, 8])]),
    "heads of different widths" => changed(RAW_STACK, &[("heads.1.Wk", &[8, 5])]),
    "a variable of another shape" => {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
        MultiHeadAttention::new(&MultiHeadAttentionConfig::new(6, 2), vb.clone())?;
        MultiHeadAttention::new(&cfg(), vb)
    },
    "a variable of another dtype" => {
        let vars = VarMap::new();
        VarBuilder::from_varmap(&vars, DType::F16, &CPU).get((8, 8), "k_proj.weight")?;
        MultiHeadAttention::new(&cfg(), VarBuilder::from_varmap(&vars, DType::F32, &CPU))
    },
    "a norm over the projection where the config has it over a head" => {
        let norm = |scope| QkNorm { kind: QkNormKind::Rms, scope, eps: 1e-6 };
        let (whole, head) = (norm(QkNormScope::Projection), norm(QkNormScope::PerHead));
        load(cfg().with_qk_norm(whole), WeightLayout::Canonical, &[], cfg().with_qk_norm(head))
    },
    "integer weights" => MultiHeadAttention::new(&cfg(), VarBuilder::zeros(DType::I64, &CPU)),
    "weights of eight bits" => MultiHeadAttention::new(&cfg(), VarBuilder::zeros(DType::F8E4M3, &CPU)),
    "variables beyond memory" => {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
        MultiHeadAttention::new(&MultiHeadAttentionConfig::new(1 << 29, 1), vb)
    },
    "variables beyond counting" => {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
        MultiHeadAttention::new(&MultiHeadAttentionConfig::new(u32::MAX as usize, 1), vb)
    },
};

pub const SURPLUS: &[Case] = cases! {
    "a bias that the config denies" => load(cfg().with_qkv_bias(true), WeightLayout::Canonical, &[], cfg()),
    "an output bias that the config denies" =>
        load(cfg().with_bias(true), WeightLayout::Book, &[], cfg().with_qkv_bias(true)),
    "a packed bias that the config denies" => changed(WeightLayout::Torch, &[("in_proj_bias", &[24])]),
    "a bias of GPT-2 that the config denies" => changed(WeightLayout::Conv1d, &[("c_attn.bias", &[24])]),
    "a bias of a head that the config denies" => changed(BOOK_STACK, &[("heads.1.W_value.bias", &[4])]),
    "an output projection that the config denies" => load(cfg(), WeightLayout::Canonical, &[], stack()),
    "a plain output projection that the config denies" =>
        load(cfg(), WeightLayout::Raw(Naming::D2l, Orientation::InOut), &[], stack()),
    "a packed layer's output projection that the config denies" => load(cfg(), "packed:Wqkv-Wo".parse()?, &[], stack()),
    "an output projection under another layout's name" =>
        load(stack(), WeightLayout::Canonical, &[("out_proj.weight", &[8, 8])], stack()),
    "an output projection behind a stack of heads" => changed(BOOK_STACK, &[("out_proj.weight", &[8, 8])]),
    "an output projection of a head" => changed(RAW_STACK, &[("heads.0.Wo", &[4, 4])]),
    "more heads than the config" => changed(BOOK_STACK, &[("heads.2.W_query.weight", &[4, 8])]),
    "more plain heads than the config" => changed(RAW_STACK, &[("heads.2.Wq", &[8, 4])]),
    "a norm of queries" => changed(WeightLayout::Canonical, &[("q_norm.weight", &[4])]),
    "a norm of keys" => changed(WeightLayout::Canonical, &[("k_norm.weight", &[4])]),
    "a layer norm where the config has a root mean square" => {
        let norm = |kind| QkNorm { kind, scope: QkNormScope::PerHead, eps: 1e-6 };
        let (layer, rms) = (norm(QkNormKind::Layer), norm(QkNormKind::Rms));
        load(cfg().with_qk_norm(layer), WeightLayout::Canonical, &[], cfg().with_qk_norm(rms))
    },
    "sinks" => changed(WeightLayout::Canonical, &[("sinks", &[2])]),
    "a learned key" => load(cfg().with_bias_kv(true), WeightLayout::Torch, &[], cfg()),
    "a learned value alone" => changed(WeightLayout::Torch, &[("bias_v", &[1, 1, 8])]),
    "a bias of additive attention" => {
        let shapes: [(&str, &[usize]); 4] =
            [("W_k.weight", &[5, 3]), ("W_q.weight", &[5, 4]), ("w_v.weight", &[1, 5]), ("W_q.bias", &[5])];
        let tensors = shapes.map(|(name, shape)| (name.to_string(), zeros(shape))).into_iter().collect();
        let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
        AdditiveAttention::new(&AdditiveAttentionConfig::new(4, 3, 5), vb)
    },
};

/// The config that the shapes imply, where they imply none.
pub const INFERENCE: &[Case] = cases! {
    "no number of heads" => infer("book_mha", WeightLayout::Book, None),
    "no heads" => infer("book_mha", WeightLayout::Book, Some(0)),
    "another number of heads than the stack has" => infer("book_stack", BOOK_STACK, Some(3)),
    "heads that do not divide" => infer("book_mha", WeightLayout::Book, Some(3)),
    "heads beyond counting" => infer("packed_wqkv", "packed:Wqkv".parse()?, Some(usize::MAX)),
    "packed rows without an output projection" => {
        let header = r#"{"Wqkv.weight":{"dtype":"F32","shape":[12,4],"data_offsets":[0,192]}}"#;
        let path = crate::file("packed_alone", &crate::files::safetensors(header, 192));
        Checkpoint::open(path)?.infer_config("", "packed:Wqkv".parse()?, Some(4))
    },
    "another layout" => infer("book_mha", WeightLayout::Short, Some(2)),
    // Each without an element, so that the file is small.
    "values beyond counting" => infer_empty("values", 1, [[1, 4], [1, 4], [1 << 59, 0]]),
    "values beyond counting for each head" => infer_empty("each_head", 64, [[64, 0], [1, 0], [1 << 59, 0]]),
    "queries beyond counting" => infer_empty("queries", 2, [[1 << 59, 0], [2, 0], [2, 0]]),
    "keys beyond counting" => infer_empty("keys", 2, [[2, 0], [1 << 59, 0], [1 << 59, 0]]),
    "inputs beyond counting" => infer_empty("inputs", 1, [[0, 1 << 59], [0, 1 << 59], [0, 1 << 59]]),
};

fn infer_empty(name: &str, num_heads: usize, shapes: [[usize; 2]; 3]) -> Result<()> {
    let (mut header, mut end) = (String::new(), 0);
    for (name, [rows, columns]) in ["q_proj", "k_proj", "v_proj"].iter().zip(shapes) {
        let start = end;
        end += rows * columns * 4;
        let entry =
            format!(r#""{name}.weight":{{"dtype":"F32","shape":[{rows},{columns}],"data_offsets":[{start},{end}]}}"#);
        header = if header.is_empty() { entry } else { format!("{header},{entry}") };
    }
    let path = crate::file(name, &crate::files::safetensors(&format!("{{{header}}}"), end));
    let cfg = Checkpoint::open(&path)?.infer_config("", WeightLayout::Canonical, Some(num_heads))?;
    let vb = candle_attention::weights::open(&path, DType::F32, &CPU)?;
    MultiHeadAttention::new(&cfg, vb).map(drop)
}

fn infer(folder: &str, layout: WeightLayout, num_heads: Option<usize>) -> Result<()> {
    let checkpoint = Checkpoint::open(models().join(folder).join("model.safetensors"))?;
    checkpoint.infer_config("", layout, num_heads).map(drop)
}
