//! The attention layers of a checkpoint: where they are, their layouts and their configs.

use candle_core::{Result, bail};
use serde_json::Value;

use super::Checkpoint;
use super::infer::infer_config;
use super::stored::StoredEntry;
use candle_attention_core::MultiHeadAttentionConfig;
use candle_attention_core::internal::{LayoutTensor, TensorSource, detect_with, nearest_layout, query_weights};
use candle_attention_core::weights::{PackedNaming, QkvOrder, WeightLayout};
use candle_attention_modules::base::{ConfigMethod, QuantizationSigns, SCALES, edits, moved_names};
use candle_attention_modules::linear::Projection;

/// The end of an error about a tensor of a file of MLX.
pub(crate) const OF_MLX: &str = "MLX converted this model, which renames, splits or transposes some weights";

impl Checkpoint {
    /// Returns the prefixes below which there is an attention layer, numbers in their natural order. The root is "".
    #[must_use]
    pub fn attention_layers(&self) -> Vec<String> {
        let names = query_weights();
        let moved = names.iter().flat_map(|name| moved_names(name));
        let mut suffixes = Vec::from_iter(moved.chain(names.iter().cloned()));
        // A name that ends with another comes before it.
        suffixes.sort_by_key(|name| std::cmp::Reverse(name.len()));
        let prefix_of = |name: &str| {
            for suffix in &suffixes {
                if let Some(prefix) = name.strip_suffix(suffix.as_str())
                    && (prefix.is_empty() || prefix.ends_with('.'))
                {
                    return Some(without_head(prefix.trim_end_matches('.')).to_string());
                }
            }
            None
        };
        let mut prefixes: Vec<_> = self.shapes().filter_map(|(name, _)| prefix_of(name)).collect();
        prefixes.sort_by_key(|prefix| natural_order(prefix));
        prefixes.dedup();
        prefixes
    }

    /// Detects the layout below a prefix as [`WeightLayout::detect`] does, from the names and shapes alone. Where they
    /// allow two readings, the checkpoint's own config decides, if it can: the `model_args` that nanoGPT saves with its
    /// weights, or the `config.json` next to the files, by its `model_type` or by `layout`.
    ///
    /// # Errors
    /// As [`WeightLayout::detect`].
    pub fn detect(&self, prefix: &str) -> Result<WeightLayout> {
        // A key of this crate; an unknown layout there is an error.
        let named = self.config["layout"].as_str().map(str::parse::<WeightLayout>).transpose()?;
        detect_with(&LayerTensors { checkpoint: self, prefix: prefix.to_string() }, |layout| {
            names_layout(&self.config, named, layout)
        })
    }

    /// Infers the config of the layer below a prefix from its shapes: widths, key heads, biases, output projection;
    /// and, where a causal `mask` buffer (T, T) was saved with the layer, causality and the context length. `num_heads`
    /// has to be given, except for a stack of heads, which can be counted, and for nanoGPT's checkpoints, which have
    /// it.
    ///
    /// # Errors
    /// If a tensor is missing, or the shapes do not fit `num_heads`.
    pub fn infer_config(
        &self,
        prefix: &str,
        layout: WeightLayout,
        num_heads: Option<usize>,
    ) -> Result<MultiHeadAttentionConfig> {
        let saved = || self.config["model_args"]["n_head"].as_u64().and_then(|heads| heads.try_into().ok());
        let tensors = LayerTensors { checkpoint: self, prefix: prefix.to_string() };
        infer_config(&tensors, layout, num_heads.or_else(saved))
    }

    /// Returns the signs that a weight is quantised; `None` if there are none.
    pub(super) fn quantized(&self, name: &str) -> Option<QuantizationSigns> {
        let beside = QuantizationSigns::beside(name, |beside| self.entry(beside).is_some());
        let dtype = self.entry(name).and_then(StoredEntry::packed_dtype);
        let has_scale = || SCALES.iter().any(|suffix| self.entry(&format!("{name}{suffix}")).is_some());
        let signs = match (beside, dtype) {
            (Some(beside), Some(dtype)) => beside.with_dtype(dtype),
            (Some(beside), None) => beside,
            (None, Some(dtype)) if is_weight(name) && (has_scale() || ConfigMethod::of(&self.config).is_some()) => {
                QuantizationSigns::of_dtype(dtype)
            }
            (None, _) => return None,
        };
        let signs = signs.with_config(&self.config);
        match self.entry(name) {
            Some(StoredEntry::Unreadable { raw: None, problem, .. }) => Some(signs.with_problem(problem.clone())),
            _ => Some(signs),
        }
    }

    /// Returns whether a tensor has integers, or other numbers that are codes of floats.
    pub(super) fn has_integers(&self, name: &str) -> bool {
        self.entry(name).is_some_and(|entry| entry.packed_dtype().is_some())
    }

    /// Returns the end of an error about a missing tensor: the layers of the checkpoint, or the names next to the
    /// missing one, the most similar first.
    pub(super) fn hint(&self, missing: &str) -> String {
        let there = self.hint_of_names(missing);
        if self.origin.is_of_mlx { format!("{there}; {OF_MLX}") } else { there }
    }

    fn hint_of_names(&self, missing: &str) -> String {
        let mut parent = missing;
        let mut names = Vec::new();
        while names.is_empty()
            && let Some((outer, _)) = parent.rsplit_once('.')
        {
            parent = outer;
            names = self.names_below(parent);
        }
        if names.is_empty() {
            let layers = self.attention_layers();
            if layers.first().is_some_and(|layer| !layer.is_empty()) {
                return format!("attention weights are below {}", listed(&layers));
            }
            parent = "";
            names = self.names_below(parent);
        }
        let last = &missing[parent.len()..];
        names.sort_by_cached_key(|name| edits(last, &name[parent.len()..]));
        if names.is_empty() {
            return "the file has no tensors".to_string();
        }
        let own: Vec<_> = names.iter().map(|name| name[parent.len()..].trim_start_matches('.')).collect();
        match nearest_layout(&own) {
            // The names of a layout are found without a hint.
            Some(layout) if !own.contains(&layout.weight_name(Projection::Query, true).as_str()) => {
                let tensors = layout.tensors(0, true);
                let weights: Vec<_> = tensors.iter().filter(|tensor| !tensor.is_bias).map(LayoutTensor::name).collect();
                format!("there are {}; the nearest layout is `{layout}` ({})", listed(&names), weights.join(", "))
            }
            _ => format!("there are {}", listed(&names)),
        }
    }

    /// Returns the names of all tensors below a prefix, which may be empty.
    fn names_below(&self, prefix: &str) -> Vec<&str> {
        let is_below = |name: &str| name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with('.'));
        self.entries.keys().map(String::as_str).filter(|name| prefix.is_empty() || is_below(name)).collect()
    }
}

/// Returns whether a name is that of the weight of a layer.
pub(super) fn is_weight(name: &str) -> bool {
    name == "weight" || name.ends_with(".weight")
}

/// The tensors below a prefix of a checkpoint. Names and shapes come from the headers of the files.
struct LayerTensors<'a> {
    checkpoint: &'a Checkpoint,
    prefix: String,
}

impl LayerTensors<'_> {
    fn full_name(&self, name: &str) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }
}

impl TensorSource for LayerTensors<'_> {
    fn prefix(&self) -> String {
        self.prefix.clone()
    }

    fn at(&self, prefix: &str) -> Self {
        Self { checkpoint: self.checkpoint, prefix: prefix.to_string() }
    }

    fn contains(&self, name: &str) -> bool {
        self.checkpoint.stored_name(&self.full_name(name)).is_some()
    }

    fn shape(&self, name: &str) -> Result<Vec<usize>> {
        let name = self.full_name(name);
        match self.checkpoint.stored_name(&name).and_then(|stored| self.checkpoint.entry(&stored)) {
            None => bail!("[weights] {name} is missing; {}", self.checkpoint.hint(&name)),
            Some(StoredEntry::Stored(stored)) => Ok(stored.shape.clone()),
            Some(StoredEntry::Unreadable { shape: Some(shape), .. }) => Ok(shape.clone()),
            Some(StoredEntry::Unreadable { shape: None, problem, .. }) => bail!("[weights] {name}: {problem}"),
            Some(StoredEntry::Quantized { weight, .. }) => Ok(weight.shape.clone()),
        }
    }

    fn hint(&self, missing: &str) -> Result<Option<String>> {
        Ok(Some(self.checkpoint.hint(&self.full_name(missing))))
    }

    fn quantized(&self, name: &str) -> Option<QuantizationSigns> {
        let name = self.full_name(name);
        self.checkpoint.quantized(&self.checkpoint.stored_name(&name).unwrap_or(name))
    }
}

/// Returns the first few names of a list, and their number.
fn listed<S: AsRef<str>>(names: &[S]) -> String {
    let first: Vec<_> = names.iter().take(4).map(|name| format!("{:?}", name.as_ref())).collect();
    let more = if names.len() > 4 { format!(", .. ({} in all)", names.len()) } else { String::new() };
    format!("{}{more}", first.join(", "))
}

/// Returns the prefix of a stack for the prefix `heads.{i}` of one of its heads, and any other prefix unchanged.
fn without_head(prefix: &str) -> &str {
    let Some((stack, _)) = prefix.rsplit_once('.').filter(|(_, head)| head.parse::<usize>().is_ok()) else {
        return prefix;
    };
    match stack.strip_suffix("heads") {
        Some("") => "",
        Some(outer) => outer.strip_suffix('.').unwrap_or(prefix),
        None => prefix,
    }
}

/// Returns a key that sorts `layers.2` before `layers.10`.
fn natural_order(prefix: &str) -> Vec<(u64, String)> {
    prefix.split('.').map(|part| (part.parse().unwrap_or(u64::MAX), part.to_string())).collect()
}

/// Returns whether the config of a checkpoint names this layout: by `layout`, a key of this crate that was parsed as
/// `named`, or by an architecture whose packed rows are in an order that their names do not tell.
fn names_layout(config: &Value, named: Option<WeightLayout>, layout: WeightLayout) -> bool {
    // nanoGPT saves `model_args`.
    if config["model_args"]["n_head"].is_number() {
        return layout == WeightLayout::Packed(PackedNaming::CAttn, QkvOrder::ByPart);
    }
    if let Some(named) = named {
        return named == layout;
    }
    let WeightLayout::Packed(_, order) = layout else { return false };
    match config["model_type"].as_str() {
        Some("bloom" | "falcon" | "gpt_bigcode" | "gpt_neox" | "RefinedWeb" | "RefinedWebModel") => {
            order == QkvOrder::ByHead
        }
        Some("chatglm") => order == QkvOrder::ByPart,
        _ => false,
    }
}
