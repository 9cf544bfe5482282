//! Scores of pairs from hidden states: a head of sequence classification, or the logits of tokens.

use candle_attention::PackedLinear;
use candle_core::{DType, Error, Module, Result, Tensor, bail};
use candle_nn::{Activation, LayerNorm, VarBuilder};
use serde_json::Value;

use crate::common::EXAMPLE;
use crate::embedding::pooling::parts;
use crate::model::Encoder;
use crate::model::family::{Family, LogitScaling, text_config, ties_embeddings};
use crate::model::weights::Weights;
use crate::settings::ScoreKind;

/// The names of the layers of a head, and its activation.
struct HeadNames {
    dense: Option<&'static str>,
    norm: Option<&'static str>,
    score: &'static str,
    activation: HeadActivation,
}

/// An activation: one of Candle's, or tanh, which Candle has as a function.
#[derive(Clone, Copy)]
enum Nonlinearity {
    Tanh,
    Candle(Activation),
}

/// The activation of a head.
#[derive(Clone, Copy)]
enum HeadActivation {
    Fixed(Nonlinearity),
    /// The one that a field of config.json names, and the default.
    Field(&'static str, &'static str),
    /// As BERT's pooler: tanh, unless the config has an activation for it as that of DeBERTa has.
    Pooler,
}

const POOLER: HeadNames =
    HeadNames { dense: Some("pooler.dense"), norm: None, score: "classifier", activation: HeadActivation::Pooler };

/// The heads of RoBERTa and MPNet; DistilBERT; ModernBERT; EuroBERT; BERT, GTE, Nomic and DeBERTa; decoders.
const HEADS: [HeadNames; 10] = [
    HeadNames {
        dense: Some("classifier.dense"),
        score: "classifier.out_proj",
        activation: HeadActivation::Fixed(Nonlinearity::Tanh),
        ..POOLER
    },
    HeadNames {
        dense: Some("pre_classifier"),
        activation: HeadActivation::Fixed(Nonlinearity::Candle(Activation::Relu)),
        ..POOLER
    },
    HeadNames {
        dense: Some("head.dense"),
        norm: Some("head.norm"),
        activation: HeadActivation::Field("classifier_activation", "gelu"),
        ..POOLER
    },
    HeadNames {
        dense: Some("dense"),
        activation: HeadActivation::Fixed(Nonlinearity::Candle(Activation::Gelu)),
        ..POOLER
    },
    HeadNames { dense: Some("bert.pooler.dense"), ..POOLER },
    HeadNames { dense: Some("gte.pooler.dense"), ..POOLER },
    HeadNames { dense: Some("new.pooler.dense"), ..POOLER },
    HeadNames { dense: Some("nomic_bert.pooler.dense"), ..POOLER },
    POOLER,
    HeadNames { dense: None, score: "score", ..POOLER },
];

/// The hidden states that a head scores.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pooled {
    First,
    Last,
    Mean,
    /// All of them; the score of a text is the mean over its tokens.
    All,
}

/// A head: hidden states to scores.
pub struct Head {
    pooled: Pooled,
    layers: Layers,
    /// The description in the report.
    pub shown: String,
}

/// The layers of a head.
enum Layers {
    Classifier {
        dense: Option<PackedLinear>,
        activation: Nonlinearity,
        norm: Option<LayerNorm>,
        score: PackedLinear,
    },
    /// The rows of the model's output for one token or two; the score is the first logit less the second.
    Tokens {
        rows: PackedLinear,
        scaling: LogitScaling,
    },
}

impl Head {
    /// Loads a head of `model`, from its `config.json` and a builder at the checkpoint's root. `kind` says what makes
    /// scores, and `token` returns the text of a token.
    ///
    /// # Errors
    /// If the checkpoint has no such head, one of several classes, or one with a pooling that is not known.
    pub fn load(
        kind: ScoreKind,
        model: &Encoder,
        config: &Value,
        vb: VarBuilder,
        token: impl Fn(u32) -> String,
    ) -> Result<Self> {
        match kind {
            ScoreKind::Classifier => Self::classifier(model.blocks.width, config, &vb.into()),
            ScoreKind::Tokens { yes, no } => {
                let shown = match no {
                    None => format!("the logit of {:?}", token(yes)),
                    Some(no) => format!("the logit of {:?} less that of {:?}", token(yes), token(no)),
                };
                let ids: Vec<u32> = [Some(yes), no].into_iter().flatten().collect();
                Ok(Self { pooled: Pooled::Last, layers: token_rows(model, config, &vb.into(), &ids)?, shown })
            }
        }
    }

    /// Loads a head of sequence classification with one label.
    fn classifier(width: usize, config: &Value, weights: &Weights) -> Result<Self> {
        let has = |name: &str| weights.contains_tensor(&format!("{name}.weight"));
        let Some(names) = HEADS
            .into_iter()
            .find(|names| names.dense.is_none_or(has) && names.norm.is_none_or(has) && has(names.score))
        else {
            let known = HEADS.map(|names| names.shown()).join(", ");
            bail!("[{EXAMPLE}] no head in the checkpoint, looked for {known}")
        };
        let activation = names.activation.of(config)?;
        let score = weights.pp(names.score).plain_linear()?;
        if score.out_dim() != 1 {
            bail!(
                "[{EXAMPLE}] {} has {} scores: the checkpoint is of another kind, expected one label",
                names.score,
                score.out_dim()
            )
        }
        let dense = match names.dense {
            None => None,
            Some(name) => Some(weights.pp(name).plain_linear()?),
        };
        let norm = match names.norm {
            None => None,
            Some(name) => Some(head_norm(width, config, &weights.pp(name))?),
        };
        let may_lack_biases = config["model_type"] == "modernbert" || names.dense.is_none();
        for name in [names.dense, Some(names.score)].into_iter().flatten() {
            if !may_lack_biases && !weights.contains_tensor(&format!("{name}.bias")) {
                bail!("[{EXAMPLE}] {name} has no bias in the checkpoint, expected one")
            }
        }
        let pooled = pooling(config, &names)?;
        let shown = names.shown();
        Ok(Self { pooled, layers: Layers::Classifier { dense, activation, norm, score }, shown })
    }

    /// Computes the scores (N,) of texts of `lens` tokens in f32 from the hidden states (total, E) of their tokens.
    pub fn forward(&self, hidden: &Tensor, lens: &[usize]) -> Result<Tensor> {
        let mut pooled = Vec::with_capacity(lens.len());
        for own in parts(hidden, lens)? {
            pooled.push(match self.pooled {
                Pooled::First => own.narrow(0, 0, 1)?,
                Pooled::Last => own.narrow(0, own.dim(0)? - 1, 1)?,
                Pooled::Mean => own.to_dtype(DType::F32)?.mean_keepdim(0)?.to_dtype(own.dtype())?,
                Pooled::All => own,
            });
        }
        let scores = self.layers.forward(&Tensor::cat(&pooled, 0)?.contiguous()?)?;
        if self.pooled != Pooled::All {
            return Ok(scores);
        }
        let means = parts(&scores, lens)?.iter().map(|own| own.mean(0)).collect::<Result<Vec<_>>>()?;
        Tensor::stack(&means, 0)
    }
}

impl Layers {
    /// Computes the scores (N,) of hidden states (N, E) in f32.
    fn forward(&self, hidden: &Tensor) -> Result<Tensor> {
        match self {
            Self::Classifier { dense, activation, norm, score } => {
                let mut xs = hidden.clone();
                if let Some(dense) = dense {
                    xs = activation.forward(&dense.forward(&xs)?)?;
                }
                if let Some(norm) = norm {
                    xs = norm.forward(&xs)?;
                }
                score.forward(&xs)?.squeeze(1)?.to_dtype(DType::F32)
            }
            Self::Tokens { rows, scaling } => {
                let logits = scaling.forward(rows.forward(hidden)?.to_dtype(DType::F32)?)?;
                let yes = logits.narrow(1, 0, 1)?.squeeze(1)?;
                if logits.dim(1)? == 1 { Ok(yes) } else { yes - logits.narrow(1, 1, 1)?.squeeze(1)? }
            }
        }
    }
}

impl HeadNames {
    /// Returns the names of the layers in reports and errors.
    fn shown(&self) -> String {
        match self.dense {
            None => self.score.to_string(),
            Some(dense) => format!("{dense} with {}", self.score),
        }
    }
}

impl HeadActivation {
    /// Returns the activation of a model with this `config.json`.
    fn of(self, config: &Value) -> Result<Nonlinearity> {
        let (field, default) = match self {
            Self::Fixed(activation) => return Ok(activation),
            Self::Field(field, default) => (field, default),
            Self::Pooler if config["model_type"] == "deberta-v2" => ("pooler_hidden_act", "gelu"),
            Self::Pooler => return Ok(Nonlinearity::Tanh),
        };
        let name = config[field].as_str().unwrap_or(default);
        if name == "tanh" {
            return Ok(Nonlinearity::Tanh);
        }
        let unknown =
            |_| Error::Msg(format!("[{EXAMPLE}] {field} is {name:?}, expected tanh or one of Candle's names"));
        serde_json::from_value(Value::from(name)).map(Nonlinearity::Candle).map_err(unknown)
    }
}

impl Module for Nonlinearity {
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Tanh => xs.tanh(),
            Self::Candle(activation) => activation.forward(xs),
        }
    }
}

/// Returns the hidden states that a head of these names scores.
fn pooling(config: &Value, names: &HeadNames) -> Result<Pooled> {
    if names.dense.is_none() {
        return Ok(Pooled::Last);
    }
    let own = config["classifier_pooling"].as_str();
    match (config["model_type"].as_str().unwrap_or_default(), own) {
        ("modernbert", None | Some("cls")) | ("eurobert", Some("bos")) => Ok(Pooled::First),
        ("modernbert" | "eurobert", Some("mean")) => Ok(Pooled::Mean),
        ("eurobert", None | Some("late")) => Ok(Pooled::All),
        ("modernbert" | "eurobert", Some(other)) => {
            bail!("[{EXAMPLE}] classifier_pooling is {other:?}, expected cls, bos, mean or late")
        }
        _ => Ok(Pooled::First),
    }
}

/// Loads the norm of ModernBERT's head.
fn head_norm(width: usize, config: &Value, weights: &Weights) -> Result<LayerNorm> {
    let weight = weights.get(width, "weight")?;
    let eps = config["norm_eps"].as_f64().unwrap_or(1e-5);
    if weights.contains_tensor("bias") {
        return Ok(LayerNorm::new(weight, weights.get(width, "bias")?, eps));
    }
    Ok(LayerNorm::new_no_bias(weight, eps))
}

/// Loads the rows of the model's output for some tokens; the output is the embeddings again if the config ties them.
fn token_rows(model: &Encoder, config: &Value, weights: &Weights, ids: &[u32]) -> Result<Layers> {
    let head = weights.pp("lm_head");
    let is_tied = ties_embeddings(config).unwrap_or(!head.contains_tensor("weight"));
    let table = if is_tied { model.word_embeddings().clone() } else { head.get_unchecked("weight")? };
    let vocabulary = table.dim(0)?;
    if let Some(id) = ids.iter().find(|&&id| id as usize >= vocabulary) {
        bail!("[{EXAMPLE}] token {id} is scored, which is not one of the vocabulary of {vocabulary}")
    }
    let rows = Tensor::new(ids, table.device())?;
    let mut bias = None;
    if !is_tied && head.contains_tensor("bias") {
        bias = Some(head.get(vocabulary, "bias")?.index_select(&rows, 0)?);
    }
    let rows = PackedLinear::new(&table.index_select(&rows, 0)?, bias.as_ref())?;
    let json = text_config(config);
    Ok(Layers::Tokens { rows, scaling: LogitScaling::of(&Family::of(json)?, json) })
}
