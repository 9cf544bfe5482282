//! The calls that are timed, by their sizes.

use std::fmt;

use candle_core::DType;
use clap::ValueEnum;
use serde_json::{Value, json};

/// The sections of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Section {
    Forward,
    Masks,
    Training,
    F32,
    Decode,
    Linear,
    Layer,
    Model,
    Memory,
}

/// A row of the table.
#[derive(Debug, Clone)]
pub struct Cell {
    pub name: String,
    pub section: Section,
    pub work: Work,
    pub mark: Mark,
}

#[derive(Debug, Clone, Copy)]
pub enum Work {
    Attention(AttentionSizes),
    /// One token through a layer with a full cache.
    CachedToken(CachedSizes),
    /// One row of inputs by a large weight.
    Row(RowSizes),
    DeltaRule(DeltaSizes),
    /// A forward and a backward pass of a layer.
    LayerTraining(LayerSizes),
    /// A model in the shape of Llama: a prompt, and a token after it.
    Model(ModelStep),
    /// The bytes that a forward and a backward pass add to the peak of the device's memory.
    Memory(AttentionSizes),
}

/// The aim of a row.
#[derive(Debug, Clone)]
pub enum Mark {
    /// At least this share of PyTorch's speed.
    OfPytorch(f64),
    /// At least this share of another row's speed, for each pair of a query and a key that it may attend to.
    OfPairs { other: String, share: f64 },
    /// At most this share of another row's time.
    OfTime { other: String, share: f64 },
    /// At least this share of the memory's bandwidth for reading keys and values once.
    OfBandwidth(f64),
    /// At most this many milliseconds.
    Milliseconds(f64),
    /// At most this many MiB.
    Mebibytes(f64),
    /// No aim: another row refers to this one, or it is there to be known.
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MaskKind {
    None,
    Causal,
    /// Each sequence has its own length, from half of T to T.
    Lengths,
    /// Causal, with a window of [`WINDOW`] keys.
    Window,
    /// Causal, with ALiBi.
    Alibi,
    /// Causal, sequences of the same lengths as [`Lengths`](Self::Lengths) one after the other.
    Packed,
    /// (1, H, T_q, T_kv), in the dtype of the call.
    Bias,
    /// (B, 1, T_q, T_kv).
    BooleanMask,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    Forward,
    /// Forward and backward.
    Training,
}

pub const WINDOW: usize = 512;

/// A call of attention.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSizes {
    pub b: usize,
    pub h: usize,
    pub h_kv: usize,
    pub t_q: usize,
    pub t_kv: usize,
    pub d: usize,
    pub dtype: DType,
    pub mask: MaskKind,
    pub pass: Pass,
}

#[derive(Debug, Clone, Copy)]
pub struct CachedSizes {
    pub h: usize,
    pub h_kv: usize,
    pub d: usize,
    pub t_kv: usize,
    /// Whether keys and values are stored in 8 bits instead of bf16.
    pub q8: bool,
}

#[derive(Debug, Clone, Copy)]
pub struct DeltaSizes {
    pub h: usize,
    pub t: usize,
    pub d: usize,
    pub pass: Pass,
    /// Whether the reference path runs.
    pub reference: bool,
}

#[derive(Debug, Clone, Copy)]
pub struct LayerSizes {
    pub b: usize,
    pub t: usize,
    pub embed_dim: usize,
    pub h: usize,
    pub dtype: DType,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelStep {
    Prompt,
    Token,
}

impl AttentionSizes {
    /// Returns the lengths of the sequences of a call with lengths.
    pub fn lens(&self) -> Vec<usize> {
        (0..self.b).map(|b| self.t_kv - b * (self.t_kv / 2) / self.b).collect()
    }

    /// Returns the number of (query, key) pairs of a head that the mask allows, for all sequences.
    pub fn pairs(&self) -> usize {
        let Self { b, t_q, t_kv, .. } = *self;
        let causal = |queries: usize, keys: usize| (0..queries).map(|i| keys - queries + i + 1).sum::<usize>();
        match self.mask {
            MaskKind::None | MaskKind::Bias | MaskKind::BooleanMask => b * t_q * t_kv,
            MaskKind::Causal | MaskKind::Alibi => b * causal(t_q, t_kv),
            MaskKind::Lengths => self.lens().iter().map(|len| t_q * len).sum(),
            MaskKind::Window => b * (0..t_q).map(|i| (t_kv - t_q + i + 1).min(WINDOW)).sum::<usize>(),
            MaskKind::Packed => self.lens().iter().map(|&len| causal(len, len)).sum(),
        }
    }

    /// Returns the bytes of keys and values.
    pub fn kv_bytes(&self) -> usize {
        2 * self.b * self.h_kv * self.t_kv * self.d * self.dtype.size_in_bytes()
    }
}

/// The sizes of a weight.
#[derive(Debug, Clone, Copy)]
pub struct RowSizes {
    pub outputs: usize,
    pub inputs: usize,
    /// Whether the weight has codes of 4 bits.
    pub has_codes: bool,
}

impl CachedSizes {
    /// Returns the bytes of keys and values, and of their scales.
    fn kv_bytes(&self) -> usize {
        let row = if self.q8 { self.d + 4 } else { 2 * self.d };
        2 * self.h_kv * self.t_kv * row
    }
}

impl fmt::Display for AttentionSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { b, h, h_kv, t_q, t_kv, d, .. } = self;
        let dtype = self.dtype.as_str();
        if *t_q == 1 {
            return write!(f, "{dtype} one query b{b} h{h}/{h_kv} t{t_kv} d{d}");
        }
        let mask = match self.mask {
            MaskKind::None => "",
            MaskKind::Causal => " causal",
            MaskKind::Lengths => " lengths",
            MaskKind::Window => " window",
            MaskKind::Alibi => " ALiBi",
            MaskKind::Packed => " packed",
            MaskKind::Bias => " bias",
            MaskKind::BooleanMask => " boolean mask",
        };
        let pass = if self.pass == Pass::Training { " backward too" } else { "" };
        write!(f, "{dtype} b{b} h{h} t{t_q} d{d}{mask}{pass}")
    }
}

impl Section {
    pub fn name(self) -> &'static str {
        match self {
            Self::Forward => "forward",
            Self::Masks => "masks",
            Self::Training => "training",
            Self::F32 => "f32",
            Self::Decode => "decode",
            Self::Linear => "linear",
            Self::Layer => "layer",
            Self::Model => "model",
            Self::Memory => "memory",
        }
    }
}

impl Cell {
    /// Returns the cell as PyTorch's script reads it.
    pub fn to_json(&self) -> Value {
        let mut cell = json!({
            "name": self.name, "section": self.section.name(), "work": self.work.to_json(),
            "mark": self.mark.to_json(),
        });
        match self.work {
            Work::Attention(sizes) => {
                cell["pairs"] = sizes.pairs().into();
                cell["kv_bytes"] = sizes.kv_bytes().into();
            }
            Work::CachedToken(sizes) => cell["kv_bytes"] = sizes.kv_bytes().into(),
            _ => {}
        }
        cell
    }
}

impl Work {
    fn to_json(self) -> Value {
        let attention = |kind: &str, sizes: AttentionSizes| {
            let AttentionSizes { b, h, h_kv, t_q, t_kv, d, dtype, mask, pass } = sizes;
            json!({
                "kind": kind, "b": b, "h": h, "h_kv": h_kv, "t_q": t_q, "t_kv": t_kv, "d": d, "dtype": dtype.as_str(),
                "mask": mask.name(), "training": pass == Pass::Training, "lens": sizes.lens(), "window": WINDOW,
            })
        };
        match self {
            Self::Attention(sizes) => attention("attention", sizes),
            Self::Memory(sizes) => attention("memory", sizes),
            Self::CachedToken(CachedSizes { h, h_kv, d, t_kv, q8 }) => {
                json!({"kind": "cached_token", "h": h, "h_kv": h_kv, "d": d, "t_kv": t_kv, "q8": q8})
            }
            Self::Row(RowSizes { outputs, inputs, has_codes }) => {
                json!({"kind": "row", "outputs": outputs, "inputs": inputs, "has_codes": has_codes})
            }
            Self::DeltaRule(DeltaSizes { h, t, d, pass, reference }) => {
                let training = pass == Pass::Training;
                json!({"kind": "delta_rule", "h": h, "t": t, "d": d, "training": training, "reference": reference})
            }
            Self::LayerTraining(LayerSizes { b, t, embed_dim, h, dtype }) => {
                json!({"kind": "layer", "b": b, "t": t, "embed_dim": embed_dim, "h": h, "dtype": dtype.as_str()})
            }
            Self::Model(step) => {
                json!({"kind": "model", "step": if step == ModelStep::Prompt { "prompt" } else { "token" }})
            }
        }
    }
}

impl MaskKind {
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Causal => "causal",
            Self::Lengths => "lengths",
            Self::Window => "window",
            Self::Alibi => "alibi",
            Self::Packed => "packed",
            Self::Bias => "bias",
            Self::BooleanMask => "boolean_mask",
        }
    }
}

impl Mark {
    fn to_json(&self) -> Value {
        match self {
            Self::OfPytorch(share) => json!({"kind": "pytorch", "share": share}),
            Self::OfPairs { other, share } => json!({"kind": "pairs", "other": other, "share": share}),
            Self::OfTime { other, share } => json!({"kind": "time", "other": other, "share": share}),
            Self::OfBandwidth(share) => json!({"kind": "bandwidth", "share": share}),
            Self::Milliseconds(most) => json!({"kind": "milliseconds", "most": most}),
            Self::Mebibytes(most) => json!({"kind": "mebibytes", "most": most}),
            Self::None => Value::Null,
        }
    }
}
