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
use crate::{CPU, Misuse, check, zeros};

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

const MISSING: &[Misuse] = &[
    (
        "a query weight that is not there",
        || changed(WeightLayout::Canonical, &[("q_proj.weight", &[])]),
        "[multi_head_attention] q_proj.weight is missing, expected shape [8, 8] (layout canonical)",
    ),
    (
        "an output weight that is not there",
        || changed(WeightLayout::D2l, &[("W_o.weight", &[])]),
        "[multi_head_attention] W_o.weight is missing, expected shape [8, 8] (layout d2l)",
    ),
    (
        "a bias that is not there",
        || load(cfg(), WeightLayout::Book, &[], cfg().with_k_bias(true)),
        "[multi_head_attention] W_key.bias is missing, expected shape [8] (layout book)",
    ),
    (
        "a packed bias that is not there",
        || load(cfg(), WeightLayout::Torch, &[("out_proj.bias", &[8])], cfg().with_bias(true)),
        "[multi_head_attention] in_proj_bias is missing, expected shape [24] (layout torch)",
    ),
    (
        "fewer heads than the config",
        || {
            let three = MultiHeadAttentionConfig::new(8, 3).with_head_dim(4).with_out_proj(false);
            load(stack(), BOOK_STACK, &[], three)
        },
        "[multi_head_attention] heads.2.W_query.weight is missing, expected shape [4, 8] (layout stacked:book)",
    ),
    (
        "a head without keys",
        || changed(BOOK_STACK, &[("heads.1.W_key.weight", &[])]),
        "[multi_head_attention] heads.1.W_key.weight is missing, expected shape [4, 8] (layout stacked:book)",
    ),
    (
        "sinks that are not there",
        || load(cfg(), WeightLayout::Canonical, &[], cfg().with_sinks(true)),
        "[multi_head_attention] sinks is missing, expected shape [2] (layout canonical)",
    ),
    (
        "a learned key that is not there",
        || load(cfg(), WeightLayout::Torch, &[], cfg().with_bias_kv(true)),
        "[multi_head_attention] bias_k is missing, expected shape [1, 1, 8] (layout torch)",
    ),
    (
        "a norm that is not there",
        || {
            let norm = QkNorm { kind: QkNormKind::Layer, scope: QkNormScope::PerHead, eps: 1e-5 };
            load(cfg(), WeightLayout::Canonical, &[("q_norm.weight", &[4])], cfg().with_qk_norm(norm))
        },
        "[multi_head_attention] q_norm.bias is missing, expected shape [4] (layout canonical)",
    ),
    (
        "the weights of another layout",
        || {
            let vb = candle_attention::weights::open(models().join("book_mha/model.safetensors"), DType::F32, &CPU)?;
            MultiHeadAttention::new(&MultiHeadAttentionConfig::new(3, 2).with_out_dim(2), vb).map(drop)
        },
        "[multi_head_attention] q_proj.weight is missing, expected shape [2, 3] (layout canonical)",
    ),
    (
        "a prefix too few",
        || {
            let path = models().join("frontend_48/prefixed.safetensors");
            let vb = candle_attention::weights::open(path, DType::F32, &CPU)?;
            MultiHeadAttention::new(&MultiHeadAttentionConfig::new(48, 4).with_qkv_bias(true), vb.pp("model")).map(drop)
        },
        "[multi_head_attention] model.q_proj.weight is missing, expected shape [48, 48] (layout canonical)",
    ),
    (
        "the weights of additive attention",
        || {
            let vb =
                candle_attention::weights::open(models().join("d2l_additive/model.safetensors"), DType::F32, &CPU)?;
            let cfg = MultiHeadAttentionConfig::new(5, 1).with_head_dim(8).with_key_size(6).with_value_size(4);
            MultiHeadAttention::load(&cfg, WeightLayout::D2l, vb).map(drop)
        },
        "[multi_head_attention] W_v.weight is missing, expected shape [8, 4] (layout d2l)",
    ),
];

const MISSHAPEN: &[Misuse] = &[
    (
        "a query weight of another width",
        || changed(WeightLayout::Canonical, &[("q_proj.weight", &[8, 6])]),
        "[multi_head_attention] q_proj.weight has shape [8, 6], expected [8, 8] (layout canonical)",
    ),
    (
        "a transposed weight",
        || load(cfg().with_key_size(5), WeightLayout::Book, &[("W_key.weight", &[5, 8])], cfg().with_key_size(5)),
        "[multi_head_attention] W_key.weight has shape [5, 8], expected [8, 5] (layout book)",
    ),
    (
        "a bias of another width",
        || {
            let cfg = cfg().with_bias(true);
            load(cfg.clone(), WeightLayout::Bert, &[("output.dense.bias", &[4])], cfg)
        },
        "[multi_head_attention] output.dense.bias has shape [4], expected [8] (layout bert)",
    ),
    (
        "key heads in the file where the config has as many as query heads",
        || load(cfg().with_num_kv_heads(1), WeightLayout::Canonical, &[], cfg()),
        "[multi_head_attention] k_proj.weight has shape [4, 8], expected [8, 8] (layout canonical)",
    ),
    (
        "a packed weight with fewer rows",
        || changed(WeightLayout::Torch, &[("in_proj_weight", &[16, 8])]),
        "[multi_head_attention] in_proj_weight has shape [16, 8], expected [24, 8] (layout torch)",
    ),
    (
        "a linear layer where GPT-2 has its transposed one",
        || changed(WeightLayout::Conv1d, &[("c_attn.weight", &[24, 8])]),
        "[multi_head_attention] c_attn.weight has shape [24, 8], expected [8, 24] (layout conv1d)",
    ),
    (
        "heads of different widths",
        || changed(RAW_STACK, &[("heads.1.Wk", &[8, 5])]),
        "[multi_head_attention] heads.1.Wk has shape [8, 5], expected [8, 4] (layout stacked-raw:short)",
    ),
    (
        "a variable of another shape",
        || {
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
            MultiHeadAttention::new(&MultiHeadAttentionConfig::new(6, 2), vb.clone())?;
            MultiHeadAttention::new(&cfg(), vb).map(drop)
        },
        "[multi_head_attention] q_proj.weight: shape mismatch on q_proj.weight: [8, 8] <> [6, 6] (layout canonical)",
    ),
    (
        "a variable of another dtype",
        || {
            let vars = VarMap::new();
            VarBuilder::from_varmap(&vars, DType::F16, &CPU).get((8, 8), "k_proj.weight")?;
            MultiHeadAttention::new(&cfg(), VarBuilder::from_varmap(&vars, DType::F32, &CPU)).map(drop)
        },
        "[multi_head_attention] k_proj.weight has dtype F16, expected the builder's F32 (layout canonical)",
    ),
    (
        "a norm over the projection where the config has it over a head",
        || {
            let norm = |scope| QkNorm { kind: QkNormKind::Rms, scope, eps: 1e-6 };
            let (whole, head) = (norm(QkNormScope::Projection), norm(QkNormScope::PerHead));
            load(cfg().with_qk_norm(whole), WeightLayout::Canonical, &[], cfg().with_qk_norm(head))
        },
        "[multi_head_attention] q_norm.weight has shape [8], expected [4] (layout canonical)",
    ),
    (
        "integer weights",
        || MultiHeadAttention::new(&cfg(), VarBuilder::zeros(DType::I64, &CPU)).map(drop),
        "[multi_head_attention] the builder gives weights as I64, expected F32, F16, BF16 or F64",
    ),
    (
        "weights of eight bits",
        || MultiHeadAttention::new(&cfg(), VarBuilder::zeros(DType::F8E4M3, &CPU)).map(drop),
        "[multi_head_attention] the builder gives weights as F8E4M3, expected F32, F16, BF16 or F64",
    ),
    (
        "variables beyond memory",
        || {
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
            MultiHeadAttention::new(&MultiHeadAttentionConfig::new(1 << 29, 1), vb).map(drop)
        },
        "[multi_head_attention] q_proj.weight would have shape [536870912, 536870912], which no memory holds (layout canonical)",
    ),
    (
        "variables beyond counting",
        || {
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
            MultiHeadAttention::new(&MultiHeadAttentionConfig::new(u32::MAX as usize, 1), vb).map(drop)
        },
        "[multi_head_attention] q_proj.weight would have shape [4294967295, 4294967295], which no memory holds (layout canonical)",
    ),
];

const SURPLUS: &[Misuse] = &[
    (
        "a bias that the config denies",
        || load(cfg().with_qkv_bias(true), WeightLayout::Canonical, &[], cfg()),
        "[multi_head_attention] q_proj.bias is in the file, but the config says there is no such bias (layout canonical)",
    ),
    (
        "an output bias that the config denies",
        || load(cfg().with_bias(true), WeightLayout::Book, &[], cfg().with_qkv_bias(true)),
        "[multi_head_attention] out_proj.bias is in the file, but the config says there is no such bias (layout book)",
    ),
    (
        "a packed bias that the config denies",
        || changed(WeightLayout::Torch, &[("in_proj_bias", &[24])]),
        "[multi_head_attention] in_proj_bias is in the file, but the config says there is no such bias (layout torch)",
    ),
    (
        "a bias of GPT-2 that the config denies",
        || changed(WeightLayout::Conv1d, &[("c_attn.bias", &[24])]),
        "[multi_head_attention] c_attn.bias is in the file, but the config says there is no such bias (layout conv1d)",
    ),
    (
        "a bias of a head that the config denies",
        || changed(BOOK_STACK, &[("heads.1.W_value.bias", &[4])]),
        "[multi_head_attention] heads.1.W_value.bias is in the file, but the config says there is no such bias (layout stacked:book)",
    ),
    (
        "an output projection that the config denies",
        || load(cfg(), WeightLayout::Canonical, &[], stack()),
        "[multi_head_attention] o_proj.weight is in the file, but the config says there is no output projection (layout canonical)",
    ),
    (
        "a plain output projection that the config denies",
        || load(cfg(), WeightLayout::Raw(Naming::D2l, Orientation::InOut), &[], stack()),
        "[multi_head_attention] W_o is in the file, but the config says there is no output projection (layout raw:d2l)",
    ),
    (
        "a packed layer's output projection that the config denies",
        || load(cfg(), "packed:Wqkv-Wo".parse()?, &[], stack()),
        "[multi_head_attention] Wo.weight is in the file, but the config says there is no output projection (layout packed:Wqkv-Wo)",
    ),
    (
        "an output projection under another layout's name",
        || load(stack(), WeightLayout::Canonical, &[("out_proj.weight", &[8, 8])], stack()),
        "[multi_head_attention] out_proj.weight is in the file, but the config says there is no output projection (layout canonical)",
    ),
    (
        "an output projection behind a stack of heads",
        || changed(BOOK_STACK, &[("out_proj.weight", &[8, 8])]),
        "[multi_head_attention] out_proj.weight is in the file, but the config says there is no output projection (layout stacked:book)",
    ),
    (
        "an output projection of a head",
        || changed(RAW_STACK, &[("heads.0.Wo", &[4, 4])]),
        "[multi_head_attention] heads.0.Wo is in the file, but the config says there is no output projection (layout stacked-raw:short)",
    ),
    (
        "more heads than the config",
        || changed(BOOK_STACK, &[("heads.2.W_query.weight", &[4, 8])]),
        "[multi_head_attention] the file has more than the 2 heads of the config (layout stacked:book)",
    ),
    (
        "more plain heads than the config",
        || changed(RAW_STACK, &[("heads.2.Wq", &[8, 4])]),
        "[multi_head_attention] the file has more than the 2 heads of the config (layout stacked-raw:short)",
    ),
    (
        "a norm of queries",
        || changed(WeightLayout::Canonical, &[("q_norm.weight", &[4])]),
        "[multi_head_attention] q_norm.weight is in the file, but the config says there is no qk_norm (layout canonical)",
    ),
    (
        "a norm of keys",
        || changed(WeightLayout::Canonical, &[("k_norm.weight", &[4])]),
        "[multi_head_attention] k_norm.weight is in the file, but the config says there is no qk_norm (layout canonical)",
    ),
    (
        "a layer norm where the config has a root mean square",
        || {
            let norm = |kind| QkNorm { kind, scope: QkNormScope::PerHead, eps: 1e-6 };
            let (layer, rms) = (norm(QkNormKind::Layer), norm(QkNormKind::Rms));
            load(cfg().with_qk_norm(layer), WeightLayout::Canonical, &[], cfg().with_qk_norm(rms))
        },
        "[multi_head_attention] q_norm.bias is in the file, but the config says there is no such bias (layout canonical)",
    ),
    (
        "sinks",
        || changed(WeightLayout::Canonical, &[("sinks", &[2])]),
        "[multi_head_attention] sinks is in the file, but the config says there are no sinks (layout canonical)",
    ),
    (
        "a learned key",
        || load(cfg().with_bias_kv(true), WeightLayout::Torch, &[], cfg()),
        "[multi_head_attention] bias_k is in the file, but the config says there is no bias_kv (layout torch)",
    ),
    (
        "a learned value alone",
        || changed(WeightLayout::Torch, &[("bias_v", &[1, 1, 8])]),
        "[multi_head_attention] bias_v is in the file, but the config says there is no bias_kv (layout torch)",
    ),
    (
        "a bias of additive attention",
        || {
            let shapes: [(&str, &[usize]); 4] =
                [("W_k.weight", &[5, 3]), ("W_q.weight", &[5, 4]), ("w_v.weight", &[1, 5]), ("W_q.bias", &[5])];
            let tensors = shapes.map(|(name, shape)| (name.to_string(), zeros(shape))).into_iter().collect();
            let vb = VarBuilder::from_tensors(tensors, DType::F32, &CPU);
            AdditiveAttention::new(&AdditiveAttentionConfig::new(4, 3, 5), vb).map(drop)
        },
        "[additive_attention] W_q.bias is in the file, but the config says there is no such bias (layout d2l)",
    ),
];

#[test]
fn missing_tensors_are_named_with_their_shape_and_layout() {
    check(MISSING);
}

#[test]
fn misshapen_tensors_are_named_with_both_shapes() {
    check(MISSHAPEN);
}

#[test]
fn tensors_that_would_be_left_out_are_named() {
    check(SURPLUS);
}

/// The config that the shapes imply, where they imply none.
#[test]
fn shapes_that_imply_no_config_are_named() {
    check(&[
        (
            "no number of heads",
            || infer("book_mha", WeightLayout::Book, None),
            "[weights] shapes do not tell the number of heads; give num_heads (at least 1)",
        ),
        (
            "no heads",
            || infer("book_mha", WeightLayout::Book, Some(0)),
            "[weights] shapes do not tell the number of heads; give num_heads (at least 1)",
        ),
        (
            "another number of heads than the stack has",
            || infer("book_stack", BOOK_STACK, Some(3)),
            "[weights] the file has a stack of 2 heads, but num_heads is 3",
        ),
        (
            "heads that do not divide",
            || infer("book_mha", WeightLayout::Book, Some(3)),
            "[weights] the query projection has 2 rows, which is no multiple of 3; is num_heads right?",
        ),
        (
            "heads beyond counting",
            || infer("packed_wqkv", "packed:Wqkv".parse()?, Some(usize::MAX)),
            "[weights] Wqkv has … rows, which is no multiple of 18446744073709551615; is num_heads right?",
        ),
        (
            "packed rows without an output projection",
            || {
                let header = r#"{"Wqkv.weight":{"dtype":"F32","shape":[12,4],"data_offsets":[0,192]}}"#;
                let path = crate::file("packed_alone", &crate::files::safetensors(header, 192));
                Checkpoint::open(path)?.infer_config("", "packed:Wqkv".parse()?, Some(4)).map(drop)
            },
            "[weights] without out_proj the rows of Wqkv do not tell which are keys; give a config",
        ),
        ("another layout", || infer("book_mha", WeightLayout::Short, Some(2)), "[weights] Wq.weight is missing"),
    ]);
}

fn infer(folder: &str, layout: WeightLayout, num_heads: Option<usize>) -> Result<()> {
    let checkpoint = Checkpoint::open(models().join(folder).join("model.safetensors"))?;
    checkpoint.infer_config("", layout, num_heads).map(drop)
}
