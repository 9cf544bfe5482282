//! Weights that are missing, misshapen or surplus, layouts that cannot hold a config, and names that leave two readings
//! or none.

use candle_attention::weights::{self, Checkpoint};
use candle_nn::VarMap;

use crate::common::models;
use crate::wrong::Shapes;
use crate::*;

fn cfg() -> Config {
    Config::new(8, 2)
}

fn stack() -> Config {
    cfg().with_out_proj(false)
}

fn norm(kind: QkNormKind, scope: QkNormScope) -> QkNorm {
    QkNorm { kind, scope, eps: 1e-6 }
}

fn state_of(cfg: &Config, layout: WeightLayout) -> Result<Shapes> {
    Ok(wrong::shapes_of(&MultiHeadAttention::load(cfg, layout, any_weights())?.state_dict(layout)?))
}

fn opened(path: &str) -> Result<VarBuilder<'static>> {
    weights::open(models().join(path), DType::F32, &CPU)
}

/// Each tensor of a layer with every option that a layout has a place for, missing, misshapen, and beside a config
/// without these options.
#[test]
fn tensors_of_a_layout() -> Result<()> {
    let gate = OutputGate {
        activation: GateActivation::Sigmoid,
        scope: GateScope::PerEntry,
        place: GatePlace::Own { bias: true },
    };
    let norm = norm(QkNormKind::Layer, QkNormScope::PerHead);
    let biased = || cfg().with_key_size(5).with_bias(true);
    let rich = biased().with_bias_kv(true).with_sinks(true).with_output_gate(gate);
    for (layout, rich, bare) in [
        ("canonical", rich, stack().with_key_size(5)),
        ("book", biased().with_qk_norm(norm), cfg().with_key_size(5)),
        ("bert", biased(), cfg().with_key_size(5)),
        ("d2l", biased(), stack().with_key_size(5)),
        ("raw:d2l", cfg().with_key_size(5), stack().with_key_size(5)),
        ("torch", cfg().with_bias(true).with_bias_kv(true), cfg()),
        ("conv1d", cfg().with_bias(true), cfg()),
        ("packed:Wqkv-Wo", cfg().with_bias(true), stack()),
        ("stacked:book", stack().with_qkv_bias(true), stack()),
        ("stacked-raw:short", stack(), stack()),
    ] {
        let layout: WeightLayout = layout.parse()?;
        let (whole, fewer) = (state_of(&rich, layout)?, state_of(&bare, layout)?);
        let load = |cfg: &Config, shapes: &Shapes| MultiHeadAttention::load(cfg, layout, wrong::builder(shapes));
        assert_reviewed(
            &format!("layouts/{}", layout.to_string().replace(':', "-")),
            &[
                wrong::weights(&whole, |shapes| load(&rich, shapes)),
                wrong::surplus(&fewer, &whole, |shapes| load(&bare, shapes)),
            ],
        );
    }
    Ok(())
}

#[test]
fn other_tensors_than_those_of_the_config() -> Result<()> {
    // The weights of a layer of one config, with one more, for another config.
    let load = |written: Config, layout: &str, more: Option<(&str, &[usize])>, asked: Config| {
        let layout = layout.parse()?;
        let mut shapes = state_of(&written, layout)?;
        shapes.extend(more.map(|(name, shape)| (name.to_string(), shape.to_vec())));
        MultiHeadAttention::load(&asked, layout, wrong::builder(&shapes))
    };
    let heads = |n, width| Config::new(8, n).with_head_dim(width).with_out_proj(false);
    let with_norm = |kind, scope| cfg().with_qk_norm(norm(kind, scope));
    let cases = cases! {
        "fewer heads than the config" => load(stack(), "stacked:book", None, heads(3, 4)),
        "more heads than any memory holds the names of" => load(stack(), "stacked:book", None, heads(1 << 31, 1)),
        "key heads in the file where the config has as many as query heads" =>
            load(cfg().with_num_kv_heads(1), "canonical", None, cfg()),
        "heads of different widths" => load(stack(), "stacked-raw:short", Some(("heads.1.Wk", &[8, 5])), stack()),
        "an output projection under another layout's name" =>
            load(stack(), "canonical", Some(("out_proj.weight", &[8, 8])), stack()),
        "an output projection behind a stack of heads" =>
            load(stack(), "stacked:book", Some(("out_proj.weight", &[8, 8])), stack()),
        "an output projection of a head" =>
            load(stack(), "stacked-raw:short", Some(("heads.0.Wo", &[4, 4])), stack()),
        "more heads than the config" =>
            load(stack(), "stacked:book", Some(("heads.2.W_query.weight", &[4, 8])), stack()),
        "more plain heads than the config" => load(stack(), "stacked-raw:short", Some(("heads.2.Wq", &[8, 4])), stack()),
        "a gate" => load(cfg(), "canonical", Some(("g_proj.weight", &[8, 8])), cfg()),
        "a layer norm where the config has a root mean square" => {
            let of = |kind| with_norm(kind, QkNormScope::PerHead);
            load(of(QkNormKind::Layer), "canonical", None, of(QkNormKind::Rms))
        },
        "a norm over the projection where the config has it over a head" => {
            let of = |scope| with_norm(QkNormKind::Rms, scope);
            load(of(QkNormScope::Projection), "canonical", None, of(QkNormScope::PerHead))
        },
        "the weights of another layout" =>
            MultiHeadAttention::new(&Config::new(3, 2).with_out_dim(2), opened("book_mha/model.safetensors")?),
        "a prefix too few" => {
            let vb = opened("frontend_48/prefixed.safetensors")?.pp("model");
            MultiHeadAttention::new(&Config::new(48, 4).with_qkv_bias(true), vb)
        },
        "the weights of additive attention" => {
            let cfg = Config::new(5, 1).with_head_dim(8).with_key_size(6).with_value_size(4);
            MultiHeadAttention::load(&cfg, WeightLayout::D2l, opened("d2l_additive/model.safetensors")?)
        },
        "a variable of another shape" => {
            let vb = variables();
            MultiHeadAttention::new(&Config::new(6, 2), vb.clone())?;
            MultiHeadAttention::new(&cfg(), vb)
        },
        "a second config over the same variables" => {
            let vb = variables();
            MultiHeadAttention::new(&cfg().with_qkv_bias(true), vb.clone())?;
            MultiHeadAttention::new(&cfg(), vb)
        },
        "a variable of another dtype" => {
            let vars = VarMap::new();
            VarBuilder::from_varmap(&vars, DType::F16, &CPU).get((8, 8), "k_proj.weight")?;
            MultiHeadAttention::new(&cfg(), VarBuilder::from_varmap(&vars, DType::F32, &CPU))
        },
        "variables beyond memory" => MultiHeadAttention::new(&Config::new(1 << 29, 1), variables()),
        "variables beyond counting" => MultiHeadAttention::new(&Config::new(u32::MAX as usize, 1), variables()),
    };
    let dtypes = each("a builder of", [DType::I64, DType::F8E4M3], |dtype| {
        MultiHeadAttention::new(&cfg(), VarBuilder::zeros(dtype, &CPU))
    });
    assert_reviewed("tensors", &[cases, dtypes]);
    Ok(())
}

#[test]
fn layouts_without_a_place() {
    let cfg = || Config::new(8, 4);
    let gated = |place| {
        cfg().with_output_gate(OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::PerEntry, place })
    };
    let configs = [
        ("torch", gated(GatePlace::Own { bias: false })),
        ("packed:qkv_proj", gated(GatePlace::Query)),
        ("raw:book", gated(GatePlace::Query)),
        ("conv1d", gated(GatePlace::Query)),
        ("stacked:book", cfg()),
        ("stacked:short", cfg().with_num_kv_heads(2).with_out_proj(false)),
        ("raw:book", cfg().with_qkv_bias(true)),
        ("raw-transposed:d2l", cfg().with_out_bias(true)),
        ("stacked-raw:short", cfg().with_out_proj(false).with_v_bias(true)),
        ("torch", cfg().with_q_bias(true)),
        ("torch", cfg().with_qkv_bias(true)),
        ("torch", cfg().with_out_proj(false)),
        ("torch", cfg().with_num_kv_heads(2)),
        ("torch", cfg().with_head_dim(3)),
        ("packed:qkv_proj", cfg().with_key_size(5).with_value_size(8)),
        ("conv1d", cfg().with_value_size(5)),
        ("packed:query_key_value:by-head", cfg().with_q_bias(true).with_v_bias(true)),
    ];
    let mut cases = Vec::new();
    for (layout, cfg) in configs {
        cases.extend(each("a layer in", [layout], |layout| {
            MultiHeadAttention::load(&cfg, layout.parse()?, any_weights())
        }));
        cases.extend(each("the state of a layer in", [layout], |layout| {
            layer(cfg.clone())?.state_dict(layout.parse()?)
        }));
    }
    let folder = cases! {
        "a folder that is not there" =>
            layer(cfg())?.save(crate::DIR.path().join("nowhere/model.safetensors"), WeightLayout::Canonical),
    };
    assert_reviewed("layouts", &[cases, folder]);
}

#[test]
fn detection() {
    let detect = |names: &[(&str, &[usize])]| WeightLayout::detect(&weights_of(names));
    let squares: [&[(&str, &[usize])]; 8] = [
        &[("mlp.weight", &[8, 8])],
        &[("W_q.weight", &[8, 4]), ("W_k.weight", &[8, 4]), ("w_v.weight", &[1, 8])],
        &[("W_query", &[8, 8])],
        &[("heads.0.Wq", &[8, 8])],
        &[("query_key_value.weight", &[24, 8])],
        &[("c_attn.weight", &[24, 8])],
        &[("q_proj.weight", &[8, 8]), ("o_proj.weight", &[8, 8]), ("dense.weight", &[8, 8])],
        &[("q_proj.weight", &[8, 8]), ("Wq.weight", &[8, 8])],
    ];
    let others = cases! {
        "a wrong prefix" => WeightLayout::detect(&opened("frontend_48/prefixed.safetensors")?.pp("model").pp("attn")),
        "a wrong prefix of a checkpoint" => {
            let path = models().join("frontend_48/prefixed.safetensors");
            Checkpoint::open(path)?.detect("model.layers.1.self_attn")
        },
        "a builder that claims every name" => WeightLayout::detect(&any_weights()),
        "fresh variables" => WeightLayout::detect(&variables()),
        "variables, whose shapes Candle does not tell" => {
            let vb = variables();
            MultiHeadAttention::load(&cfg(), "raw:book".parse()?, vb.clone())?;
            WeightLayout::detect(&vb)
        },
    };
    assert_reviewed(
        "detection",
        &[each("", squares, detect), others, each("the layout", ["llama", "Book", ""], str::parse::<WeightLayout>)],
    );
}

/// The config that a folder of `models/` implies.
fn infer(folder: &str, layout: &str, num_heads: Option<usize>) -> Result<Config> {
    Checkpoint::open(models().join(folder).join("model.safetensors"))?.infer_config("", layout.parse()?, num_heads)
}

/// A layer of the config that these shapes imply, without an element each, so that the file is small.
fn infer_empty((num_heads, shapes): (usize, [[usize; 2]; 3])) -> Result<MultiHeadAttention> {
    let (mut entries, mut end) = (Vec::new(), 0);
    for (name, [rows, columns]) in ["q_proj", "k_proj", "v_proj"].iter().zip(shapes) {
        let start = end;
        end += rows * columns * 4;
        let place = format!(r#""shape":[{rows},{columns}],"data_offsets":[{start},{end}]"#);
        entries.push(format!(r#""{name}.weight":{{"dtype":"F32",{place}}}"#));
    }
    let path = file("empty", &files::safetensors(&format!("{{{}}}", entries.join(",")), end));
    let cfg = Checkpoint::open(&path)?.infer_config("", WeightLayout::Canonical, Some(num_heads))?;
    MultiHeadAttention::new(&cfg, weights::open(&path, DType::F32, &CPU)?)
}

#[test]
fn inferred_configs() {
    let heads = [
        ("book_mha", "book", None),
        ("book_mha", "book", Some(0)),
        ("book_stack", "stacked:book", Some(3)),
        ("book_mha", "book", Some(3)),
        ("packed_wqkv", "packed:Wqkv", Some(usize::MAX)),
        ("book_mha", "short", Some(2)),
    ];
    let packed = cases! {
        "packed rows without an output projection" => {
            let header = r#"{"Wqkv.weight":{"dtype":"F32","shape":[12,4],"data_offsets":[0,192]}}"#;
            let path = file("packed_alone", &files::safetensors(header, 192));
            Checkpoint::open(path)?.infer_config("", "packed:Wqkv".parse()?, Some(4))
        },
    };
    let beyond_counting = [
        (1, [[1, 4], [1, 4], [1 << 59, 0]]),
        (64, [[64, 0], [1, 0], [1 << 59, 0]]),
        (2, [[1 << 59, 0], [2, 0], [2, 0]]),
        (2, [[2, 0], [1 << 59, 0], [1 << 59, 0]]),
        (1, [[0, 1 << 59], [0, 1 << 59], [0, 1 << 59]]),
    ];
    assert_reviewed(
        "inferred_configs",
        &[
            each("", heads, |(folder, layout, heads)| infer(folder, layout, heads)),
            packed,
            each("heads and shapes", beyond_counting, infer_empty),
        ],
    );
}
