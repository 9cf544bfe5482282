//! Layouts that cannot hold a config, and names that leave two readings or none.

use std::collections::HashMap;

use candle_attention::weights::{Naming, Orientation};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result};
use candle_nn::{VarBuilder, VarMap};

use crate::common::models;
use crate::{CPU, Misuse, check, zeros};

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

const LOADING: &[Misuse] = &[
    (
        "an output projection behind a stack",
        || load(cfg(), "stacked:book"),
        "[multi_head_attention] a stack of heads has no output projection, but the config wants one (layout stacked:book)",
    ),
    (
        "shared key heads in a stack",
        || load(cfg().with_num_kv_heads(2).with_out_proj(false), "stacked:short"),
        "[multi_head_attention] a stack of heads has keys for each of its 4 heads, but the config has num_kv_heads 2 (layout stacked:short)",
    ),
    (
        "biases of plain parameters",
        || load(cfg().with_qkv_bias(true), "raw:book"),
        "[multi_head_attention] the config wants a bias on W_query, which plain parameters do not have (layout raw:book)",
    ),
    (
        "an output bias of plain parameters",
        || load(cfg().with_out_bias(true), "raw-transposed:d2l"),
        "[multi_head_attention] the config wants a bias on W_o, which plain parameters do not have (layout raw-transposed:d2l)",
    ),
    (
        "biases of a stack of plain parameters",
        || load(cfg().with_out_proj(false).with_v_bias(true), "stacked-raw:short"),
        "[multi_head_attention] the config wants a bias on Wv, which plain parameters do not have (layout stacked-raw:short)",
    ),
    (
        "some biases in PyTorch's module",
        || load(cfg().with_q_bias(true), "torch"),
        "[multi_head_attention] torch.nn.MultiheadAttention has all four biases or none, but the config has some (layout torch)",
    ),
    (
        "all biases but the last in PyTorch's module",
        || load(cfg().with_qkv_bias(true), "torch"),
        "[multi_head_attention] torch.nn.MultiheadAttention has all four biases or none, but the config has some (layout torch)",
    ),
    (
        "no output projection in PyTorch's module",
        || load(cfg().with_out_proj(false), "torch"),
        "[multi_head_attention] torch.nn.MultiheadAttention has an output projection, but the config has none (layout torch)",
    ),
    (
        "shared key heads in PyTorch's module",
        || load(cfg().with_num_kv_heads(2), "torch"),
        "[multi_head_attention] torch.nn.MultiheadAttention has as many key heads as query heads, all of one width (layout torch)",
    ),
    (
        "wide heads in PyTorch's module",
        || load(cfg().with_head_dim(3), "torch"),
        "[multi_head_attention] torch.nn.MultiheadAttention has heads and an output of 8 in all (layout torch)",
    ),
    (
        "another input for the keys of a packed weight",
        || load(cfg().with_key_size(5).with_value_size(8), "packed:qkv_proj"),
        "[multi_head_attention] one packed weight reads one input, but the config has input widths 8, 5 and 8 (layout packed:qkv_proj)",
    ),
    (
        "another input for the values of GPT-2",
        || load(cfg().with_value_size(5), "conv1d"),
        "[multi_head_attention] one packed weight reads one input, but the config has input widths 8, 8 and 5 (layout conv1d)",
    ),
    (
        "some biases in a packed weight",
        || load(cfg().with_q_bias(true).with_v_bias(true), "packed:query_key_value:by-head"),
        "[multi_head_attention] one packed bias covers q, k and v, but the config wants some of them only (layout packed:query_key_value:by-head)",
    ),
];

const SAVING: &[Misuse] = &[
    (
        "an output projection behind a stack",
        || save(cfg(), "stacked:book"),
        "[state_dict] a stack of heads has no output projection, but the layer has one (layout stacked:book)",
    ),
    (
        "shared key heads in a stack",
        || save(cfg().with_num_kv_heads(1).with_out_proj(false), "stacked:d2l"),
        "[state_dict] a stack of heads has keys for each of its 4 heads, but the layer has 1 (layout stacked:d2l)",
    ),
    (
        "biases of plain parameters",
        || save(cfg().with_k_bias(true), "raw:short"),
        "[state_dict] plain parameters have no bias, but Wk has one (layout raw:short)",
    ),
    (
        "no output projection in PyTorch's module",
        || save(cfg().with_out_proj(false), "torch"),
        "[state_dict] torch.nn.MultiheadAttention has an output projection, but the config has none (layout torch)",
    ),
    (
        "some biases in PyTorch's module",
        || save(cfg().with_out_bias(true), "torch"),
        "[state_dict] torch.nn.MultiheadAttention has all four biases or none, but the config has some (layout torch)",
    ),
    (
        "another input for the keys of a packed weight",
        || save(cfg().with_key_size(5), "packed:Wqkv"),
        "[state_dict] one packed weight reads one input, but the config has input widths 8, 5 and 5 (layout packed:Wqkv)",
    ),
    (
        "a folder that is not there",
        || {
            let layer = MultiHeadAttention::new(&cfg(), VarBuilder::zeros(DType::F32, &CPU))?;
            layer.save(crate::DIR.path().join("nowhere/model.safetensors"), WeightLayout::Canonical)
        },
        "[save] cannot write DIR/nowhere/model.safetensors: …",
    ),
];

const DETECTION: &[Misuse] = &[
    (
        "nothing of attention",
        || detect(&[("mlp.weight", &[8, 8])]),
        "[weight_layout] no attention weights at the root of the file: looked for the query projections q_proj, W_query, Wq, W_q, self.query, attention.query, q_lin, q, wq, to_q, query, heads.0.{q_proj, W_query, Wq, W_q}, in_proj_weight, q_proj_weight, qkv_proj, Wqkv, query_key_value, c_attn, qkv, to_qkv; is a prefix missing (`vb.pp(..)`)?",
    ),
    (
        "a wrong prefix",
        || {
            let path = models().join("frontend_48/prefixed.safetensors");
            let vb = candle_attention::weights::open(path, DType::F32, &CPU)?;
            WeightLayout::detect(&vb.pp("model").pp("attn")).map(drop)
        },
        "[weight_layout] no attention weights below \"model.attn\": looked for the query projections …; there are \"model.layers.0.self_attn.q_proj.weight\", …, .. (8 in all)",
    ),
    (
        "a wrong prefix of a checkpoint",
        || {
            let path = models().join("frontend_48/prefixed.safetensors");
            candle_attention::weights::Checkpoint::open(path)?.detect("model.layers.1.self_attn").map(drop)
        },
        "[weight_layout] no attention weights below \"model.layers.1.self_attn\": looked for …",
    ),
    (
        "the weights of additive attention",
        || detect(&[("W_q.weight", &[8, 4]), ("W_k.weight", &[8, 4]), ("w_v.weight", &[1, 8])]),
        "[weight_layout] at the root of the file are the weights of an AdditiveAttention (w_v), not of a multi-head layer",
    ),
    (
        "a square plain parameter",
        || detect(&[("W_query", &[8, 8])]),
        "[weight_layout] the weights at the root of the file can be read as `raw:book` or as `raw-transposed:book`; name the one meant",
    ),
    (
        "a stack of square plain parameters",
        || detect(&[("heads.0.Wq", &[8, 8])]),
        "[weight_layout] the weights at the root of the file can be read as `stacked-raw:short` or as `stacked-raw-transposed:short`; name the one meant",
    ),
    (
        "a packed weight that two families order otherwise",
        || detect(&[("query_key_value.weight", &[24, 8])]),
        "[weight_layout] the weights at the root of the file can be read as `packed:query_key_value` (ChatGLM) or as `packed:query_key_value:by-head` (GPT-NeoX, Bloom, Falcon); name the one meant",
    ),
    (
        "a tall c_attn",
        || detect(&[("c_attn.weight", &[24, 8])]),
        "[weight_layout] the weights at the root of the file can be read as `packed:c_attn` (nanoGPT) or as `packed:c_attn:by-head` (GPT-BigCode); name the one meant",
    ),
    (
        "two output projections",
        || detect(&[("q_proj.weight", &[8, 8]), ("o_proj.weight", &[8, 8]), ("dense.weight", &[8, 8])]),
        "[weight_layout] the weights at the root of the file can be read as `canonical` or as `phi`; name the one meant",
    ),
    (
        "two layers in one place",
        || detect(&[("q_proj.weight", &[8, 8]), ("Wq.weight", &[8, 8])]),
        "[weight_layout] the weights at the root of the file can be read as `canonical` or as `short`; name the one meant",
    ),
    (
        "a builder that claims every name",
        || WeightLayout::detect(&VarBuilder::zeros(DType::F32, &CPU)).map(drop),
        "[weight_layout] no attention weights at the root of the file: …",
    ),
    (
        "fresh variables",
        || WeightLayout::detect(&VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU)).map(drop),
        "[weight_layout] no attention weights at the root of the file: …",
    ),
    (
        "variables, whose shapes Candle does not tell",
        || {
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
            MultiHeadAttention::load(&cfg(), WeightLayout::Raw(Naming::Book, Orientation::InOut), vb.clone())?;
            WeightLayout::detect(&vb).map(drop)
        },
        "[weight_layout] the shape of W_query, which tells its layout, cannot be had from this builder (…); name the layout",
    ),
    (
        "an unknown layout",
        || "llama".parse::<WeightLayout>().map(drop),
        "[weight_layout] unknown layout \"llama\", expected one of: canonical, book, short, d2l, bert, vit, distilbert, opt, phi, t5, meta, diffusers, x-transformers, mingpt, raw:canonical, …",
    ),
    (
        "a layout in capitals",
        || "Book".parse::<WeightLayout>().map(drop),
        "[weight_layout] unknown layout \"Book\", expected one of: …",
    ),
    ("no layout", || "".parse::<WeightLayout>().map(drop), "[weight_layout] unknown layout \"\", expected one of: …"),
];

#[test]
fn a_layout_that_cannot_hold_a_config_says_why_when_loading() {
    check(LOADING);
}

#[test]
fn a_layout_that_cannot_hold_a_layer_says_why_when_saving() {
    check(SAVING);
}

#[test]
fn detection_names_what_it_looked_for_and_every_reading() {
    check(DETECTION);
}
