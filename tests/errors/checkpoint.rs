//! Errors of weights that are missing, misshapen or surplus, of layouts that do not support a config, and of names that
//! allow two readings or none.

use std::collections::{BTreeMap, HashMap};

use candle_attention::weights::Checkpoint;
use candle_core::Var;

use crate::common::models;
use crate::files::safetensors;
use crate::words::{self, Fields};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("layer of weights", loaded),
    ("names", names),
    ("layout", |line, _| line.trim_matches('"').parse::<WeightLayout>().map(accepted)),
    ("inferred", inferred),
    ("checkpoint calls", |line, _| named(CALLS, line)),
];

/// Loads a layer from weights, or from a `VarMap` with variables. A call may also take a layer's weights and return its
/// state in the layout.
fn loaded(_: &str, call: &Fields) -> Result<String> {
    let layout = call.get::<String>("layout")?.map_or(Ok(WeightLayout::Canonical), |layout| layout.parse())?;
    let config = call.need("config")?;
    if call.is("state") {
        return MultiHeadAttention::new(&config, any_weights())?.state_dict(layout).map(accepted);
    }
    let vb = match call.read("variables", words::named::<Vec<_>>)? {
        Some(variables) => {
            let vars = VarMap::new();
            for (name, tensor) in variables {
                vars.data().lock().expect("one thread").insert(name, Var::from_tensor(&tensor)?);
            }
            VarBuilder::from_varmap(&vars, DType::F32, &CPU)
        }
        None => call.builder("zeros")?,
    };
    let vb = call.get::<String>("prefix")?.map_or(vb.clone(), |prefix| vb.pp(prefix));
    MultiHeadAttention::load(&config, layout, vb).map(accepted)
}

/// Detects the layout of the tensors of a file, which may come with a config.json, or lists the prefixes of its layers.
/// The builder is Candle's, which lists no names, unless the call says otherwise.
fn names(_: &str, call: &Fields) -> Result<String> {
    let tensors = call.read("tensors", words::named::<HashMap<_, _>>)?.expect("names and tensors");
    let prefix: String = call.get("prefix")?.unwrap_or_default();
    let config = call.json("config");
    let folder = if config.is_some() { "named" } else { "names" };
    let path = file(&format!("{folder}/model.safetensors"), &[]);
    candle_core::safetensors::save(&tensors, &path)?;
    if let Some(config) = config {
        file("named/config.json", config.to_string().as_bytes());
    }
    let below = |vb: VarBuilder<'static>| if prefix.is_empty() { vb } else { vb.pp(&prefix) };
    let layout = match call.get::<String>("by")?.as_deref() {
        None => WeightLayout::detect(&below(VarBuilder::from_tensors(tensors, DType::F32, &CPU))),
        Some("builder") => WeightLayout::detect(&below(weights::open(path, DType::F32, &CPU)?)),
        Some("checkpoint") => Checkpoint::open(path)?.detect(&prefix),
        _ => return Ok(format!("{:?}", Checkpoint::open(path)?.attention_layers())),
    };
    layout.map(|layout| layout.to_string())
}

/// Returns the layer of the config that is inferred from a folder of `models/`, or from a file of these tensors.
fn inferred(_: &str, call: &Fields) -> Result<String> {
    let mut entries = Vec::new();
    let mut end = 0;
    for (name, [rows, columns]) in call.need::<BTreeMap<String, [usize; 2]>>("tensors")? {
        let start = end;
        end += rows * columns * 4;
        let location = format!(r#""shape":[{rows},{columns}],"data_offsets":[{start},{end}]"#);
        entries.push(format!(r#""{name}":{{"dtype":"F32",{location}}}"#));
    }
    let path = match call.get::<String>("folder")? {
        Some(folder) => models().join(folder).join("model.safetensors"),
        None => file("inferred", &safetensors(&format!("{{{}}}", entries.join(",")), end)),
    };
    let layout = call.need::<String>("layout")?.parse()?;
    let cfg = Checkpoint::open(&path)?.infer_config("", layout, call.get("heads")?)?;
    MultiHeadAttention::load(&cfg, layout, weights::open(&path, DType::F32, &CPU)?)?;
    Ok(format!("{cfg:?}"))
}

fn opened(path: &str) -> Result<VarBuilder<'static>> {
    weights::open(models().join(path), DType::F32, &CPU)
}

const CALLS: &[Named] = calls! {
    "a wrong prefix" => WeightLayout::detect(&opened("frontend_48/prefixed.safetensors")?.pp("model").pp("attn")),
    "a wrong prefix of a checkpoint" =>
        Checkpoint::open(models().join("frontend_48/prefixed.safetensors"))?.detect("model.layers.1.self_attn"),
    "a builder that claims every name" => WeightLayout::detect(&any_weights()),
    "fresh variables" => WeightLayout::detect(&variables()),
    "variables, whose shapes Candle does not tell" => {
        let vb = variables();
        MultiHeadAttention::load(&Config::new(8, 2), "raw:book".parse()?, vb.clone())?;
        WeightLayout::detect(&vb)
    },
    "a folder that is not there" => {
        let layer = MultiHeadAttention::new(&Config::new(8, 4), any_weights())?;
        layer.save(in_folder("nowhere/model.safetensors"), WeightLayout::Canonical)
    },
};
