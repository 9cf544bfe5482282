//! Models that MLX converted: what mlx-lm's conversion changes in the weights of some models, and how it is undone.
//!
//! mlx-lm writes `format: mlx` into the header of a file. It stores the weights of depthwise convolutions as (C, K, 1),
//! and the norms that multiply by `1 + w` as `1 + w` in Qwen3-Next, Qwen3.5 and Step 3.5, but as `w` in Gemma.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use serde_json::Value;

use super::stored::StoredEntry;

/// The values of `model_type` of models whose norms mlx-lm stores as `1 + w`, where PyTorch stores `w`.
const ONE_MORE: [&str; 8] = [
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "qwen4_exp",
    "qwen4_exp_text",
    "step3p5",
];

/// The norms that these models have, except the norm of the model's output.
const NORMS: [&str; 4] =
    ["input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight"];

/// Returns whether mlx-lm stores the norms of a model as `1 + w`, where PyTorch stores `w`.
pub(crate) fn stores_one_more(model_type: &str) -> bool {
    ONE_MORE.contains(&model_type)
}

/// Returns whether a tensor is the weight of a norm that mlx-lm stores as `1 + w` in these models.
pub(crate) fn is_norm(name: &str) -> bool {
    let is_named = |suffix: &str| name.strip_suffix(suffix).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    NORMS.iter().any(|norm| is_named(norm)) || is_named("model.norm.weight")
}

/// Returns the shape (C, 1, K) of the weight of a convolution that MLX stores as (C, K, 1), which has the same
/// elements in the same order; `None` for another shape.
pub(crate) fn torch_shape(shape: &[usize]) -> Option<[usize; 3]> {
    match *shape {
        [channels, taps, 1] if taps > 1 => Some([channels, 1, taps]),
        _ => None,
    }
}

/// Returns whether a tensor is the weight of a depthwise convolution.
pub(crate) fn is_convolution(name: &str) -> bool {
    ["conv1d.weight", "conv_1d.weight", "conv.conv.weight"].iter().any(|end| name.ends_with(end))
}

/// The library that wrote a checkpoint, as far as it changes how weights are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Origin {
    /// Whether MLX converted the model.
    pub is_of_mlx: bool,
    /// Whether the norms are as PyTorch stores them. It is false where MLX converted a model that is not known.
    pub norms_as_in_pytorch: bool,
}

impl Origin {
    /// The origin of a checkpoint that other libraries wrote.
    const OTHER: Self = Self { is_of_mlx: false, norms_as_in_pytorch: true };
}

/// Undoes the conversion of MLX in a checkpoint. `files` are those whose header says that MLX wrote them; without any,
/// the shapes of convolutions tell it.
pub(super) fn undo(entries: &mut BTreeMap<String, StoredEntry>, files: &BTreeSet<Arc<Path>>, config: &Value) -> Origin {
    let orders = convolutions(entries, files);
    if files.is_empty() && !orders.of_mlx {
        return Origin::OTHER;
    }
    let is_of_mlx = |entry: &StoredEntry| match entry {
        StoredEntry::Stored(stored) => files.is_empty() || files.contains(&stored.file),
        StoredEntry::Unreadable { .. } | StoredEntry::Quantized { .. } => false,
    };
    let names: Vec<_> = entries.iter().filter(|(_, entry)| is_of_mlx(entry)).map(|(name, _)| name.clone()).collect();
    // mlx-lm itself takes a model whose convolutions are in PyTorch's order for one that is not converted.
    let norms = if orders.of_pytorch { Norms::AsInPyTorch } else { Norms::of(entries, config) };
    for name in names {
        if norms == Norms::OneMore && is_norm(&name) {
            change(entries, &name, |entry| entry.is_one_more = entry.shape.len() == 1);
        } else if is_convolution(&name) {
            change(entries, &name, |entry| {
                if let Some(shape) = torch_shape(&entry.shape) {
                    entry.shape = shape.to_vec();
                }
            });
            rename_convolution(entries, &name);
        } else if is_multiplied(entries, &name) && !orders.of_pytorch {
            refuse_multiplied(entries, &name);
        }
    }
    Origin { is_of_mlx: true, norms_as_in_pytorch: norms != Norms::Unknown }
}

/// The orders of dimensions in which a checkpoint stores the weights of convolutions next to recurrences.
#[derive(Default)]
struct Orders {
    /// Whether some weight is (C, K, 1).
    of_mlx: bool,
    /// Whether some weight is (C, 1, K).
    of_pytorch: bool,
}

/// Finds the orders of convolutions in the files of MLX, or in all files if none says that it is of MLX. Convolutions
/// of other modules may have one tap and many channels.
fn convolutions(entries: &BTreeMap<String, StoredEntry>, files: &BTreeSet<Arc<Path>>) -> Orders {
    let mut orders = Orders::default();
    for (name, entry) in entries {
        let StoredEntry::Stored(stored) = entry else { continue };
        let is_looked_at = files.is_empty() || files.contains(&stored.file);
        let Some((layer, _)) = name.split_once(".conv").or_else(|| split_before(name, "_conv")) else { continue };
        if !is_looked_at || !is_convolution(name) || !entries.contains_key(&format!("{layer}.A_log")) {
            continue;
        }
        match stored.shape[..] {
            [_, taps, 1] if taps > 1 => orders.of_mlx = true,
            [_, 1, taps] if taps > 1 => orders.of_pytorch = true,
            _ => {}
        }
    }
    orders
}

/// Splits a name before the last part that has `text` in it: `a.q_conv1d.weight` into `a` and the rest.
fn split_before<'a>(name: &'a str, text: &str) -> Option<(&'a str, &'a str)> {
    name.find(text).and_then(|at| name[..at].rfind('.').map(|dot| (&name[..dot], &name[dot + 1..])))
}

/// How a conversion stores the norms that PyTorch stores as w.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Norms {
    AsInPyTorch,
    OneMore,
    Unknown,
}

impl Norms {
    /// Returns how the model of a checkpoint stores its norms: by its layers, or by the config next to it.
    fn of(entries: &BTreeMap<String, StoredEntry>, config: &Value) -> Self {
        // One convolution for all of queries, keys and values: Qwen's linear attention.
        if entries.keys().any(|name| name.ends_with("linear_attn.conv1d.weight")) {
            return Self::OneMore;
        }
        let types = [&config["model_type"], &config["text_config"]["model_type"]];
        let types: Vec<_> = types.into_iter().filter_map(Value::as_str).collect();
        if types.iter().any(|model_type| stores_one_more(model_type)) {
            return Self::OneMore;
        }
        let is_gemma = || entries.keys().any(|name| name.ends_with("pre_feedforward_layernorm.weight"));
        if types.is_empty() && !is_gemma() { Self::Unknown } else { Self::AsInPyTorch }
    }
}

fn change(
    entries: &mut BTreeMap<String, StoredEntry>,
    name: &str,
    change: impl FnOnce(&mut super::stored::TensorLocation),
) {
    if let Some(StoredEntry::Stored(stored)) = entries.get_mut(name) {
        change(stored);
    }
}

/// Renames a convolution of Kimi Linear to its name in PyTorch: `q_conv.conv` to `q_conv1d`.
fn rename_convolution(entries: &mut BTreeMap<String, StoredEntry>, name: &str) {
    for part in ["q_conv", "k_conv", "v_conv"] {
        if let Some(layer) = name.strip_suffix(&format!("{part}.conv.weight"))
            && let Some(entry) = entries.remove(name)
        {
            entries.insert(format!("{layer}{part}1d.weight"), entry);
        }
    }
}

/// Returns whether MLX multiplied a weight by one of Falcon H1's factors, which the model applies by itself. Its layers
/// have attention and a state space model.
fn is_multiplied(entries: &BTreeMap<String, StoredEntry>, name: &str) -> bool {
    let Some((layer, projection)) = name.split_once(".self_attn.") else { return false };
    ["q_proj.weight", "k_proj.weight", "o_proj.weight"].contains(&projection)
        && entries.contains_key(&format!("{layer}.mamba.A_log"))
}

fn refuse_multiplied(entries: &mut BTreeMap<String, StoredEntry>, name: &str) {
    let shape = entries.get(name).and_then(StoredEntry::shape).map(<[usize]>::to_vec);
    let problem = "MLX multiplied it by the factors of Falcon H1's config, expected the model before its conversion";
    entries.insert(
        name.to_string(),
        StoredEntry::Unreadable { dtype: None, shape, problem: problem.to_string(), raw: None },
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norms_of_mlx_are_those_of_its_conversion() {
        for name in ["q_norm.weight", "a.k_norm.weight", "model.norm.weight", "language_model.model.norm.weight"] {
            assert!(is_norm(name), "{name}");
        }
        // The norm of linear attention, of an image encoder, and of other names.
        for name in ["a.linear_attn.norm.weight", "norm.weight", "vision.norm.weight", "a.xq_norm.weight"] {
            assert!(!is_norm(name), "{name}");
        }
    }

    #[test]
    fn names_are_split_before_a_part() {
        assert_eq!(split_before("a.b.q_conv1d.weight", "_conv"), Some(("a.b", "q_conv1d.weight")));
        assert_eq!(split_before("q_conv1d.weight", "_conv"), None);
    }
}
