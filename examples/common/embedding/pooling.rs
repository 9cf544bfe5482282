//! The ways from the hidden states of tokens to the vector of a text.

use candle_core::{DType, Result, Tensor, bail};
use serde_json::Value;

use super::fields::Fields;
use crate::common::EXAMPLE;

/// A way of pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// The hidden state of the first token.
    Cls,
    /// The largest of each coordinate.
    Max,
    /// The mean.
    Mean,
    /// The sum divided by the root of the number of tokens.
    MeanSqrtLen,
    /// The mean with weights 1, 2, 3 and so on.
    WeightedMean,
    /// The hidden state of the last token.
    LastToken,
}

/// A mode with its names.
struct ModeNames {
    mode: Mode,
    /// The name in a `pooling_mode`.
    name: &'static str,
    /// The flag in older files.
    flag: &'static str,
    /// The description in reports.
    shown: &'static str,
}

/// All modes, in the order in which the vectors of several flags are joined.
const MODES: [ModeNames; 6] = [
    ModeNames { mode: Mode::Cls, name: "cls", flag: "pooling_mode_cls_token", shown: "first token" },
    ModeNames { mode: Mode::Max, name: "max", flag: "pooling_mode_max_tokens", shown: "maximum over tokens" },
    ModeNames { mode: Mode::Mean, name: "mean", flag: "pooling_mode_mean_tokens", shown: "mean over tokens" },
    ModeNames {
        mode: Mode::MeanSqrtLen,
        name: "mean_sqrt_len_tokens",
        flag: "pooling_mode_mean_sqrt_len_tokens",
        shown: "sum over tokens by the root of their number",
    },
    ModeNames {
        mode: Mode::WeightedMean,
        name: "weightedmean",
        flag: "pooling_mode_weightedmean_tokens",
        shown: "mean over tokens weighted by position",
    },
    ModeNames { mode: Mode::LastToken, name: "lasttoken", flag: "pooling_mode_lasttoken", shown: "last token" },
];

/// A module that pools; the vectors of several modes are joined.
#[derive(Debug, Clone)]
pub struct Pooling {
    pub modes: Vec<Mode>,
    /// Whether the tokens of the prompt are pooled too.
    pub includes_prompt: bool,
}

impl Pooling {
    /// Returns the pooling of a checkpoint without files that define it.
    pub fn mean() -> Self {
        Self { modes: vec![Mode::Mean], includes_prompt: true }
    }

    /// Reads the settings of a module.
    pub fn read(fields: &Fields) -> Result<Self> {
        let flags = MODES.each_ref().map(|names| names.flag);
        let others = ["word_embedding_dimension", "embedding_dimension", "pooling_mode", "include_prompt"];
        fields.only(&[&others[..], &flags].concat())?;
        let modes = match fields.get("pooling_mode") {
            Value::Null => {
                let mut modes = Vec::new();
                for names in &MODES {
                    if fields.flag(names.flag, false)? {
                        modes.push(names.mode);
                    }
                }
                if modes.is_empty() { vec![Mode::Mean] } else { modes }
            }
            Value::Array(list) => list.iter().map(|name| named(fields, name)).collect::<Result<_>>()?,
            name => vec![named(fields, name)?],
        };
        if modes.is_empty() {
            return fields.fail("pooling_mode", "a mode or several");
        }
        Ok(Self { modes, includes_prompt: fields.flag("include_prompt", true)? })
    }

    /// Pools the hidden states (T, E) of a text to a vector (modes · E,) in f32, without the first `unpooled` tokens.
    ///
    /// # Errors
    /// If there are no other tokens.
    pub fn pool(&self, hidden: &Tensor, unpooled: usize) -> Result<Tensor> {
        let (len, _) = hidden.dims2()?;
        if unpooled >= len {
            bail!("[{EXAMPLE}] a sentence of {len} tokens has none after its prompt's {unpooled} to pool")
        }
        let pooled = hidden.narrow(0, unpooled, len - unpooled)?.to_dtype(DType::F32)?;
        let vectors = self.modes.iter().map(|mode| mode.pool(&pooled, unpooled)).collect::<Result<Vec<_>>>()?;
        Tensor::cat(&vectors, 0)
    }

    /// Returns the description in reports.
    pub fn shown(&self) -> String {
        let shown = |mode: &Mode| MODES.iter().find(|names| names.mode == *mode).map_or("", |names| names.shown);
        self.modes.iter().map(shown).collect::<Vec<_>>().join(" and ")
    }
}

/// Splits the first dimension of a tensor into one part of each length.
pub fn parts(xs: &Tensor, lens: &[usize]) -> Result<Vec<Tensor>> {
    let mut parts = Vec::with_capacity(lens.len());
    let mut start = 0;
    for &len in lens {
        parts.push(xs.narrow(0, start, len)?);
        start += len;
    }
    Ok(parts)
}

/// Returns the mode of this name.
fn named(fields: &Fields, name: &Value) -> Result<Mode> {
    match MODES.iter().find(|names| name == names.name) {
        Some(names) => Ok(names.mode),
        None => fields.fail("pooling_mode", &MODES.each_ref().map(|names| names.name).join(", ")),
    }
}

impl Mode {
    /// Pools hidden states (T, E) that come after `before` others.
    fn pool(self, hidden: &Tensor, before: usize) -> Result<Tensor> {
        let len = hidden.dim(0)?;
        match self {
            Self::Cls => hidden.get(0),
            Self::LastToken => hidden.get(len - 1),
            Self::Max => hidden.max(0),
            Self::Mean => hidden.mean(0),
            Self::MeanSqrtLen => hidden.sum(0)? / (len as f64).sqrt(),
            Self::WeightedMean => {
                let weights: Vec<f32> = (before + 1..before + len + 1).map(|weight| weight as f32).collect();
                let sum: f32 = weights.iter().sum();
                hidden.broadcast_mul(&Tensor::from_vec(weights, (len, 1), hidden.device())?)?.sum(0)? / f64::from(sum)
            }
        }
    }
}
