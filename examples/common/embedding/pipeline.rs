//! The modules after the model, in their order.

use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Module as _, Result, Tensor, bail};
use candle_nn::LayerNorm;

use super::fields::Fields;
use super::layers::{DENSE_KEYS, Dense, load_layer_norm, normalized};
use super::modules::{self, MODULES, Module};
use super::pooling::{Pooling, parts};
use super::transformer::TransformerSettings;
use crate::common::{EXAMPLE, read_optional};

/// The settings of what a module computes on, and of the name of its result.
const INPUT: &str = "module_input_name";
const OUTPUT: &str = "module_output_name";
/// The setting of a model that pools.
const POOLING_STRATEGY: &str = "single_vector_pool_strategy";
/// The names of the vectors of texts, and of tokens.
const TEXTS: &str = "sentence_embedding";
const TOKENS: &str = "token_embeddings";

/// A module that computes vectors of vectors.
enum Step {
    Dense(Dense),
    LayerNorm(LayerNorm),
    Normalize,
}

/// Modules that compute vectors of vectors, one after the other.
#[derive(Default)]
pub struct Steps(Vec<Step>);

/// A module after the model, by the vectors that it computes on.
enum AfterModel {
    OnTokens(Step),
    Pooling(Pooling),
    OnTexts(Step),
    /// A module that does nothing in inference.
    Nothing,
}

/// The modules of a checkpoint.
pub struct Pipeline {
    /// The folder of the model, below that of the checkpoint.
    pub model: PathBuf,
    pub settings: TransformerSettings,
    on_tokens: Steps,
    pub pooling: Pooling,
    on_texts: Steps,
    /// The files that define the modules, for the report.
    pub source: String,
}

impl Pipeline {
    /// Reads the modules of a checkpoint. `task` chooses the route of a router. Without `modules.json` the vector is
    /// the normalised mean.
    pub fn read(folder: &Path, task: Option<&str>, device: &Device) -> Result<Self> {
        let Some(modules) = modules::read(folder, task)? else {
            let settings = read_settings(folder)?;
            let source = format!("assumed, since there is no {MODULES}");
            let on_texts = Steps(vec![Step::Normalize]);
            let (model, on_tokens) = (PathBuf::new(), Steps::default());
            return Ok(Self { model, settings, on_tokens, pooling: Pooling::mean(), on_texts, source });
        };
        let Some((first, others)) = modules.split_first().filter(|(first, _)| first.kind == "Transformer") else {
            let found = modules.first().map_or("no module", |first| &first.kind);
            bail!("[{EXAMPLE}] {MODULES} begins with {found}, expected Transformer")
        };
        let settings = read_settings(&folder.join(&first.path))?;
        let (mut on_tokens, mut on_texts) = (Steps::default(), Steps::default());
        let mut pooling = None;
        let mut source = String::new();
        for module in others {
            let is_pooled = pooling.is_some();
            match read_module(folder, module, TEXTS, device)? {
                AfterModel::Nothing => {}
                AfterModel::OnTokens(_) | AfterModel::Pooling(_) if is_pooled => {
                    return wrong_order(module, "of tokens after");
                }
                AfterModel::OnTexts(_) if !is_pooled => return wrong_order(module, "of texts before"),
                AfterModel::OnTokens(step) => on_tokens.0.push(step),
                AfterModel::OnTexts(step) => on_texts.0.push(step),
                AfterModel::Pooling(own) => {
                    pooling = Some(own);
                    source = format!("as {} and {MODULES} say", module.file("config.json"));
                }
            }
        }
        let pooling = match pooling {
            Some(own) => own,
            // The model of Jina v4 pools.
            None if others.is_empty() && pools_mean(&folder.join(&first.path))? => {
                source = format!("as {POOLING_STRATEGY} in config.json says");
                on_texts.0.push(Step::Normalize);
                Pooling::mean()
            }
            None => bail!("[{EXAMPLE}] {MODULES} has no Pooling, expected one"),
        };
        Ok(Self { model: first.path.clone(), settings, on_tokens, pooling, on_texts, source })
    }

    /// Computes the vectors (N, E) of texts in f32 from the hidden states (total, E) of their tokens. The first
    /// `unpooled` tokens of each text are not pooled.
    pub fn forward(&self, hidden: &Tensor, lens: &[usize], unpooled: usize) -> Result<Tensor> {
        let tokens = parts(&self.on_tokens.forward(hidden)?, lens)?;
        let pooled = tokens.iter().map(|own| self.pooling.pool(own, unpooled)).collect::<Result<Vec<_>>>()?;
        self.on_texts.forward(&Tensor::stack(&pooled, 0)?)
    }

    /// Returns the description of the modules in reports.
    pub fn shown(&self) -> String {
        let pooling = self.pooling.shown();
        let before = self.on_tokens.0.iter().map(Step::shown);
        let after = self.on_texts.0.iter().map(Step::shown);
        before.chain([pooling.as_str()]).chain(after).collect::<Vec<_>>().join(", ")
    }
}

/// Returns whether the config of a model says that it pools its hidden states to their mean.
fn pools_mean(folder: &Path) -> Result<bool> {
    Ok(read_optional(&folder.join("config.json"))?[POOLING_STRATEGY] == "mean")
}

/// Returns the error of a module on the wrong side of the pooling.
fn wrong_order<T>(module: &Module, found: &str) -> Result<T> {
    bail!("[{EXAMPLE}] {MODULES} has {} on vectors {found} Pooling, expected the other order", module.kind)
}

/// Reads the settings of a model whose hidden states are pooled.
fn read_settings(folder: &Path) -> Result<TransformerSettings> {
    let settings = TransformerSettings::read(folder)?;
    settings.require("feature-extraction", "last_hidden_state")?;
    settings.refuse_expansion()?;
    Ok(settings)
}

impl Steps {
    /// Reads the modules after a model with a vector for each token.
    ///
    /// # Errors
    /// If one of them computes on vectors of texts.
    pub fn on_tokens(folder: &Path, modules: &[Module], device: &Device) -> Result<Self> {
        let mut steps = Vec::new();
        for module in modules {
            match read_module(folder, module, TOKENS, device)? {
                AfterModel::OnTokens(step) => steps.push(step),
                _ => bail!(
                    "[{EXAMPLE}] {MODULES} has {} in a model with a vector for each token, expected Dense, Normalize and \
                     MultiVectorMask on \"token_embeddings\"",
                    module.kind
                ),
            }
        }
        Ok(Self(steps))
    }

    /// Makes one step, a projection by a weight (out, in).
    pub fn projection(weight: Tensor) -> Self {
        Self(vec![Step::Dense(Dense::projection(weight))])
    }

    /// Returns the steps with another after them, which normalises vectors.
    pub fn normalized(mut self) -> Self {
        self.0.push(Step::Normalize);
        self
    }

    /// Computes vectors (N, out) in f32 of vectors (N, in).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let mut ys = xs.to_dtype(DType::F32)?;
        for step in &self.0 {
            ys = step.forward(&ys)?;
        }
        Ok(ys)
    }
}

impl Step {
    /// Computes vectors of vectors (N, E) in f32.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(dense) => dense.forward(xs),
            Self::LayerNorm(norm) => norm.forward(xs),
            Self::Normalize => normalized(xs),
        }
    }

    /// Returns the description in reports.
    fn shown(&self) -> &str {
        match self {
            Self::Dense(_) => "projected",
            Self::LayerNorm(_) => "layer norm",
            Self::Normalize => "normalised",
        }
    }
}

/// Reads a module. `input` names the vectors that a projection without a name of its input computes on.
fn read_module(folder: &Path, module: &Module, input: &str, device: &Device) -> Result<AfterModel> {
    let fields = Fields::of(&module.file("config.json"), read_config(folder, module)?)?;
    let own = folder.join(&module.path);
    match module.kind.as_str() {
        "Pooling" => Pooling::read(&fields).map(AfterModel::Pooling),
        "Dense" => {
            fields.only(&[&DENSE_KEYS[..], &[INPUT, OUTPUT]].concat())?;
            on_its_input(Step::Dense(Dense::load(&fields, &own, device)?), &fields, input)
        }
        "LayerNorm" => Ok(AfterModel::OnTexts(Step::LayerNorm(load_layer_norm(&fields, &own, device)?))),
        "Normalize" => {
            fields.only(&[INPUT, OUTPUT])?;
            on_its_input(Step::Normalize, &fields, TEXTS)
        }
        "Dropout" => {
            fields.only(&["dropout"])?;
            Ok(AfterModel::Nothing)
        }
        other => bail!(
            "[{EXAMPLE}] {MODULES} has {other}, which is not known, expected Dense, Dropout, LayerNorm, Normalize, \
             Pooling, Router or Transformer"
        ),
    }
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

/// Returns a step on the vectors that the settings of its module name; `usual` is their name without a setting.
fn on_its_input(step: Step, fields: &Fields, usual: &str) -> Result<AfterModel> {
    let input = fields.text(INPUT)?.unwrap_or(usual);
    if fields.text(OUTPUT)?.is_some_and(|output| output != input) {
        return fields.fail(OUTPUT, &format!("its input, {input:?}"));
    }
    match input {
        TEXTS => Ok(AfterModel::OnTexts(step)),
        TOKENS => Ok(AfterModel::OnTokens(step)),
        _ => fields.fail(INPUT, "\"sentence_embedding\" or \"token_embeddings\""),
    }
}
