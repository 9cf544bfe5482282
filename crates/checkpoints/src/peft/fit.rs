//! Checks that an adapter's tensors and a layer fit together.

use candle_core::{Result, bail};

use super::OP;
use super::adapter::Adapter;
use super::names::{LoraMatrix, PREFIX, StoredName, is_below, join};
use candle_attention_core::WeightLayout;
use candle_attention_core::internal::AdaptableModule;

/// The numbers of layers in which matrices are looked for where the names are not known.
const LAYERS: usize = 256;

/// The prefixes that the names of one model have in files of different classes of transformers, and in other libraries.
const MODEL_PREFIXES: [&str; 16] = [
    "",
    "model.",
    "transformer.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.text_model.",
    "text_model.",
    "model.decoder.",
    "model.encoder.",
    "decoder.",
    "encoder.",
    "bert.",
    "roberta.",
    "gpt_neox.",
    "backbone.",
];

/// T5's name of the bias that the layers of a stack share, which is not a parameter of a layer.
const RELATIVE_BIAS: &str = "relative_attention_bias.";

/// The name of the module of a layer that chooses keys, which `load_onto` does not change.
const INDEXER: &str = "indexer";

/// An attention module that an adapter is loaded onto.
pub(super) struct Target<'a> {
    /// The full name in the model.
    pub module: &'a str,
    pub layout: WeightLayout,
    /// The modules in it that an adapter may change.
    pub own: &'a [AdaptableModule],
}

impl Target<'_> {
    /// Returns the full names of the modules that an adapter may change.
    pub fn full_names(&self) -> impl Iterator<Item = String> {
        self.own.iter().map(|own| join(self.module, &own.name))
    }
}

impl std::fmt::Display for Target<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<_> = self.own.iter().map(|own| own.name.as_str()).collect();
        write!(f, "{:?} with {} (layout {})", self.module, names.join(", "), self.layout)
    }
}

impl Adapter {
    /// Checks that a file has the matrices of a layer. A missing matrix of an adapter that is not
    /// trained is an error when it is read, and a new adapter has none yet.
    pub(super) fn check_matrices(&self, target: &Target) -> Result<()> {
        let Some(file) = &self.tensors.file else { return Ok(()) };
        let mut is_any_found = false;
        let mut missing = Vec::new();
        for own in target.own {
            let full = join(target.module, &own.name);
            if self.tensors.matrix_names(&full).any().is_some() {
                is_any_found = true;
            } else if self.is_adapted(&full)? {
                missing.push(own);
            }
        }
        for own in missing {
            let full = join(target.module, &own.name);
            let may_be_new = self.tensors.are_variables()
                && !file.mentions(&own.name)
                && (is_any_found || file.matrix_like(&full).is_none());
            if !may_be_new {
                let like = file.matrix_like(&full).map(|like| format!("; the file has {like}")).unwrap_or_default();
                let shape = [self.config.rank(&full)?, own.inputs];
                bail!(
                    "[{OP}] {PREFIX}{full}.{}.weight is missing, expected shape {shape:?} (layout PEFT){like}",
                    LoraMatrix::A.name()
                )
            }
            log::warn!("[{OP}] no tensor of the file is of {full}, which the options target: its matrices are new");
        }
        Ok(())
    }

    /// Checks that an adapter without matrices for a layer excludes the layer by its options. Then it changes the same
    /// modules of another layer; otherwise the names of the layer are wrong.
    pub(super) fn check_excluded(&self, target: &Target) -> Result<()> {
        if let Some(file) = &self.tensors.file
            && file.has_matrices_in_a_layer(target.module)
        {
            return Ok(());
        }
        if self.config.plain_names().is_some() {
            bail!("[{OP}] target_modules is {}, none of which is in {target}", self.config.targets())
        }
        for full in target.full_names() {
            if self.tensors.file.is_none() && self.changes_another_layer(&full)? {
                return Ok(());
            }
        }
        let like = target.full_names().find_map(|full| self.matrix_elsewhere(&full));
        let hint = like.map(|like| format!("; the file has {like}")).unwrap_or_default();
        bail!("[{OP}] target_modules is {}, and the adapter changes nothing in {target}{hint}", self.config.targets())
    }

    /// Returns whether an adapter whose names are not known changes a module in a layer of another number.
    fn changes_another_layer(&self, module: &str) -> Result<bool> {
        let parts: Vec<_> = module.split('.').map(str::to_string).collect();
        for (place, part) in parts.iter().enumerate() {
            if part.parse::<usize>().is_err() {
                continue;
            }
            for number in 0..LAYERS {
                let mut other = parts.clone();
                other[place] = number.to_string();
                let other = other.join(".");
                let is_changed = match self.tensors.is_new() {
                    true => self.config.is_target(&other)?,
                    false => self.tensors.matrix_names(&other).any().is_some(),
                };
                if is_changed {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Returns the name of a matrix of the same module under another prefix, if there is one.
    pub(super) fn matrix_elsewhere(&self, module: &str) -> Option<String> {
        if let Some(file) = &self.tensors.file {
            return file.matrix_like(module).map(str::to_string);
        }
        let parts: Vec<_> = module.split('.').collect();
        for start in 0..parts.len() {
            let end = parts[start..].join(".");
            for prefix in MODEL_PREFIXES {
                let other = format!("{prefix}{end}");
                if other != module
                    && let Some(found) = self.tensors.matrix_names(&other).any()
                {
                    return Some(found.clone());
                }
            }
        }
        None
    }

    /// Checks that the tensors of a file below an attention module were used: all matrices, and other values of the
    /// parameters of its projections. Other parameters may be of modules that the layer does not compute, such as a
    /// norm after the attention.
    pub(super) fn check_names_below(&self, target: &Target) -> Result<()> {
        let Some(file) = self.tensors.file.as_ref().filter(|file| !file.is_whole_model) else { return Ok(()) };
        for (name, stored) in file.all().filter(|(name, _)| !self.tensors.is_used(name)) {
            match stored {
                StoredName::Matrix { module, .. } | StoredName::Embedding { module, .. }
                    if is_below(module, target.module) =>
                {
                    bail!("[{OP}] {name} is in the file, but its module is none of {target}")
                }
                StoredName::Parameter { name: parameter }
                    if target.full_names().any(|full| is_below(parameter, &full)) =>
                {
                    bail!(
                        "[{OP}] {name} is in the file, but the layer has no such parameter (layout {})",
                        target.layout
                    )
                }
                StoredName::Parameter { name: parameter } if is_below(parameter, target.module) => {
                    let owner = if is_below(parameter, &join(target.module, INDEXER)) {
                        " and of the layer's indexer"
                    } else if parameter.contains(RELATIVE_BIAS) {
                        ", which layers of a stack share"
                    } else {
                        continue;
                    };
                    bail!(
                        "[{OP}] {name} is in the file{owner}, expected a layer of `merged_builder` instead of \
                         `load_onto`"
                    )
                }
                _ => {}
            }
        }
        Ok(())
    }
}
