//! Weights that are missing, misshapen or surplus, layouts that cannot hold a config, and names that leave two readings
//! or none.

use std::collections::{BTreeMap, HashMap};

use candle_attention::weights::{self, Checkpoint};
use candle_core::Var;
use candle_nn::VarMap;
use serde::Deserialize;

use crate::common::models;
use crate::files::safetensors;
use crate::words::{Of, Tensors, builder, dtype};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("layer of weights", run::<Loaded>),
    ("names", run::<Names>),
    ("layout", |line, _| line.trim_matches('"').parse::<WeightLayout>().map(accepted)),
    ("inferred", run::<Inferred>),
    ("checkpoint calls", |line, _| named(CALLS, line)),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Loaded {
    config: Of<Config>,
    /// Canonical unless given.
    layout: Option<String>,
    dtype: Option<String>,
    #[serde(default)]
    weights: Value,
    prefix: Option<String>,
    /// Of a `VarMap` in the place of weights, which are there before.
    variables: Option<BTreeMap<String, Tensors>>,
    /// Whether the layer has weights, and its state is asked for in the layout.
    #[serde(default)]
    state: bool,
}

impl Call for Loaded {
    fn call(self) -> Result<String> {
        let layout = self.layout.map_or(Ok(WeightLayout::Canonical), |layout| layout.parse())?;
        if self.state {
            return MultiHeadAttention::new(&self.config.0, any_weights())?.state_dict(layout).map(accepted);
        }
        let vb = match self.variables {
            Some(variables) => {
                let vars = VarMap::new();
                for (name, tensor) in variables {
                    vars.data().lock().expect("one thread").insert(name, Var::from_tensor(&tensor)?);
                }
                VarBuilder::from_varmap(&vars, DType::F32, &CPU)
            }
            None => builder(&self.weights, dtype(&self.dtype))?,
        };
        let vb = self.prefix.map_or(vb.clone(), |prefix| vb.pp(prefix));
        MultiHeadAttention::load(&self.config.0, layout, vb).map(accepted)
    }
}

/// The layout of the tensors of a file, which may have a config.json beside it, or the prefixes of its layers.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Names {
    tensors: BTreeMap<String, Tensors>,
    config: Option<Value>,
    #[serde(default)]
    prefix: String,
    /// A builder of Candle, which lists no names, unless said.
    by: Option<String>,
}

impl Call for Names {
    fn call(self) -> Result<String> {
        let tensors: HashMap<_, _> =
            self.tensors.iter().map(|(name, tensor)| (name.clone(), (**tensor).clone())).collect();
        let folder = if self.config.is_some() { "named" } else { "names" };
        let path = file(&format!("{folder}/model.safetensors"), &[]);
        candle_core::safetensors::save(&tensors, &path)?;
        if let Some(config) = &self.config {
            file("named/config.json", config.to_string().as_bytes());
        }
        let below = |vb: VarBuilder<'static>| if self.prefix.is_empty() { vb } else { vb.pp(&self.prefix) };
        let layout = match self.by.as_deref() {
            None => WeightLayout::detect(&below(VarBuilder::from_tensors(tensors, DType::F32, &CPU))),
            Some("builder") => WeightLayout::detect(&below(weights::open(path, DType::F32, &CPU)?)),
            Some("checkpoint") => Checkpoint::open(path)?.detect(&self.prefix),
            _ => return Ok(format!("{:?}", Checkpoint::open(path)?.attention_layers())),
        };
        layout.map(|layout| layout.to_string())
    }
}

/// The layer of the config that a folder of `models/` implies, or a file of these tensors.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Inferred {
    layout: String,
    heads: Option<usize>,
    folder: Option<String>,
    tensors: BTreeMap<String, [usize; 2]>,
}

impl Call for Inferred {
    fn call(self) -> Result<String> {
        let (mut entries, mut end) = (Vec::new(), 0);
        for (name, [rows, columns]) in &self.tensors {
            let start = end;
            end += rows * columns * 4;
            let place = format!(r#""shape":[{rows},{columns}],"data_offsets":[{start},{end}]"#);
            entries.push(format!(r#""{name}":{{"dtype":"F32",{place}}}"#));
        }
        let path = match self.folder {
            Some(folder) => models().join(folder).join("model.safetensors"),
            None => file("inferred", &safetensors(&format!("{{{}}}", entries.join(",")), end)),
        };
        let layout: WeightLayout = self.layout.parse()?;
        let cfg = Checkpoint::open(&path)?.infer_config("", layout, self.heads)?;
        MultiHeadAttention::load(&cfg, layout, weights::open(&path, DType::F32, &CPU)?)?;
        Ok(format!("{cfg:?}"))
    }
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
        layer.save(DIR.path().join("nowhere/model.safetensors"), WeightLayout::Canonical)
    },
};
