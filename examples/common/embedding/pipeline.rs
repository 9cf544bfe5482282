//! The modules after the model, in their order.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Module as _, Result, Tensor, bail};
use candle_nn::LayerNorm;

use super::fields::Fields;
use super::layers::{DENSE_KEYS, Dense, load_layer_norm, normalized};
use super::modules::{self, MODULES, Module};
use super::pooling::Pooling;
use super::transformer::TransformerSettings;
use crate::common::EXAMPLE;

/// The settings of what a module computes on, and of the name of its result.
const INPUT: &str = "module_input_name";
const OUTPUT: &str = "module_output_name";

/// A module after the model.
enum Step {
    Pooling(Pooling),
    Dense(Dense),
    LayerNorm(LayerNorm),
    Normalize,
}

/// The vectors that a module computes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    Tokens,
    Texts,
}

/// The modules of a checkpoint.
pub struct Pipeline {
    /// The folder of the model, below that of the checkpoint.
    pub model: PathBuf,
    pub settings: TransformerSettings,
    /// The modules after the model: first those on tokens, then one that pools, then those on texts.
    steps: Vec<Step>,
    /// The files that define the steps, for the report.
    pub source: String,
}

impl Pipeline {
    /// Reads the modules of a checkpoint. `task` chooses the route of a router. Without `modules.json` the vector is
    /// the normalised mean.
    pub fn read(folder: &Path, task: Option<&str>, device: &Device) -> Result<Self> {
        let Some(modules) = modules::read(folder, task)? else {
            let settings = read_settings(folder)?;
            let source = format!("assumed, since there is no {MODULES}");
            let steps = vec![Step::Pooling(Pooling::mean()), Step::Normalize];
            return Ok(Self { model: PathBuf::new(), settings, steps, source });
        };
        let Some((first, others)) = modules.split_first().filter(|(first, _)| first.kind == "Transformer") else {
            let found = modules.first().map_or("no module", |first| &first.kind);
            bail!("[{EXAMPLE}] {MODULES} begins with {found}, expected Transformer")
        };
        let settings = read_settings(&folder.join(&first.path))?;
        let mut steps = Vec::new();
        let mut level = Level::Tokens;
        let mut files = Vec::new();
        for module in others {
            let (step, of) = read_step(folder, module, device)?;
            let is_pooling = matches!(step, Some(Step::Pooling(_)));
            if is_pooling {
                files.push(module.file("config.json"));
            }
            // Only Dropout has no step.
            let Some(step) = step else { continue };
            if of != level {
                let found = if of == Level::Tokens { "of tokens after" } else { "of texts before" };
                bail!("[{EXAMPLE}] {MODULES} has {} on vectors {found} Pooling, expected the other order", module.kind)
            }
            if is_pooling {
                level = Level::Texts;
            }
            steps.push(step);
        }
        if level == Level::Tokens {
            bail!("[{EXAMPLE}] {MODULES} has no Pooling, expected one")
        }
        files.push(MODULES.to_string());
        let source = format!("as {} say", files.join(" and "));
        Ok(Self { model: first.path.clone(), settings, steps, source })
    }

    /// Returns the pooling.
    pub fn pooling(&self) -> Option<&Pooling> {
        self.steps.iter().find_map(|step| if let Step::Pooling(pooling) = step { Some(pooling) } else { None })
    }

    /// Computes the vectors (N, E) of texts in f32 from the hidden states (total, E) of their tokens. The first
    /// `unpooled` tokens of each text are not pooled.
    pub fn forward(&self, hidden: &Tensor, lens: &[usize], unpooled: usize) -> Result<Tensor> {
        let mut xs = hidden.clone();
        for step in &self.steps {
            xs = match step {
                Step::Pooling(pooling) => {
                    let mut vectors = Vec::with_capacity(lens.len());
                    let mut start = 0;
                    for &len in lens {
                        vectors.push(pooling.pool(&xs.narrow(0, start, len)?, unpooled)?);
                        start += len;
                    }
                    Tensor::stack(&vectors, 0)?
                }
                other => other.forward(&xs.to_dtype(DType::F32)?)?,
            };
        }
        Ok(xs)
    }

    /// Returns the description of the steps in reports.
    pub fn shown(&self) -> String {
        let shown = self.steps.iter().map(|step| match step {
            Step::Pooling(pooling) => pooling.shown(),
            Step::Dense(_) => "projected".to_string(),
            Step::LayerNorm(_) => "layer norm".to_string(),
            Step::Normalize => "normalised".to_string(),
        });
        shown.collect::<Vec<_>>().join(", ")
    }
}

/// Reads the settings of a model whose hidden states are pooled.
fn read_settings(folder: &Path) -> Result<TransformerSettings> {
    let settings = TransformerSettings::read(folder)?;
    settings.require("feature-extraction", "last_hidden_state")?;
    settings.refuse_template()?;
    settings.refuse_expansion()?;
    Ok(settings)
}

/// The modules after a model with a vector for each token.
pub struct TokenSteps(Vec<Step>);

impl TokenSteps {
    /// Reads modules of a checkpoint.
    ///
    /// # Errors
    /// If one of them computes on vectors of texts.
    pub fn read(folder: &Path, modules: &[Module], device: &Device) -> Result<Self> {
        let mut steps = Vec::new();
        for module in modules {
            match read_step(folder, module, device)? {
                (Some(step @ (Step::Dense(_) | Step::Normalize)), Level::Tokens) => steps.push(step),
                _ => bail!(
                    "[{EXAMPLE}] {MODULES} has {} in a model with a vector for each token, expected Dense, Normalize and \
                     MultiVectorMask on \"token_embeddings\"",
                    module.kind
                ),
            }
        }
        Ok(Self(steps))
    }

    /// Computes the vectors of tokens in f32 from their hidden states, both (total, E).
    pub fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        let mut xs = hidden.to_dtype(DType::F32)?;
        for step in &self.0 {
            xs = step.forward(&xs)?;
        }
        Ok(xs)
    }
}

impl Step {
    /// Computes vectors of vectors (N, E) in f32. Pooling is not among these steps.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(dense) => dense.forward(xs),
            Self::LayerNorm(norm) => norm.forward(xs),
            Self::Normalize => normalized(xs),
            Self::Pooling(_) => bail!("[{EXAMPLE}] vectors are pooled twice"),
        }
    }
}

/// Reads a module; `None` for one that does nothing in inference.
fn read_step(folder: &Path, module: &Module, device: &Device) -> Result<(Option<Step>, Level)> {
    let fields = Fields::of(&module.file("config.json"), read_config(folder, module)?)?;
    let own = folder.join(&module.path);
    Ok(match module.kind.as_str() {
        "Pooling" => (Some(Step::Pooling(Pooling::read(&fields)?)), Level::Tokens),
        "Dense" => {
            fields.only(&[&DENSE_KEYS[..], &[INPUT, OUTPUT]].concat())?;
            (Some(Step::Dense(Dense::load(&fields, &own, device)?)), level(&fields)?)
        }
        "LayerNorm" => (Some(Step::LayerNorm(load_layer_norm(&fields, &own, device)?)), Level::Texts),
        "Normalize" => {
            fields.only(&[INPUT, OUTPUT])?;
            (Some(Step::Normalize), level(&fields)?)
        }
        "Dropout" => {
            fields.only(&["dropout"])?;
            (None, Level::Texts)
        }
        other => bail!(
            "[{EXAMPLE}] {MODULES} has {other}, which is not known, expected Dense, Dropout, LayerNorm, Normalize, \
             Pooling, Router or Transformer"
        ),
    })
}

/// Reads the settings of a module; older versions wrote none for some kinds.
fn read_config(folder: &Path, module: &Module) -> Result<serde_json::Value> {
    let path = folder.join(&module.path).join("config.json");
    // A module that is not known is refused by its kind.
    let needs_none = !matches!(module.kind.as_str(), "Pooling" | "Dense" | "LayerNorm");
    if !path.is_file() && needs_none {
        return Ok(serde_json::json!({}));
    }
    crate::common::read_json(&path)
}

/// Returns the vectors that a module computes on, by its input and output.
fn level(fields: &Fields) -> Result<Level> {
    let input = fields.text(INPUT)?.unwrap_or("sentence_embedding");
    if fields.text(OUTPUT)?.is_some_and(|output| output != input) {
        return fields.fail(OUTPUT, &format!("its input, {input:?}"));
    }
    match input {
        "sentence_embedding" => Ok(Level::Texts),
        "token_embeddings" => Ok(Level::Tokens),
        _ => fields.fail(INPUT, "\"sentence_embedding\" or \"token_embeddings\""),
    }
}
