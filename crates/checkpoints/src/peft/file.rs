//! The tensors in an adapter's file, by name.

use std::collections::{BTreeMap, BTreeSet};

use candle_core::{Result, bail};

use super::OP;
use super::names::{LoraMatrix, PREFIX, StoredName, common_end, is_end, is_equal_but_for_numbers, parse};

/// The names of the tensors in an adapter's file, with their meaning.
#[derive(Debug, Clone)]
pub(super) struct FileTensors {
    all: BTreeMap<String, StoredName>,
    /// Whether the file is the state dict of a whole PEFT model, which has the model's own weights too.
    pub is_whole_model: bool,
}

/// The two names of a tensor of the file.
struct Named<'a> {
    /// The name of the tensor in the file.
    stored: &'a str,
    /// The name of its layer or parameter in the model.
    own: &'a str,
}

impl FileTensors {
    /// Reads the meaning of each name.
    ///
    /// # Errors
    /// For a tensor that is not of LoRA, and for a matrix without its other one.
    pub fn new(names: impl Iterator<Item = String>) -> Result<Self> {
        let mut all = BTreeMap::new();
        for name in names {
            let stored = parse(&name)?;
            all.insert(name, stored);
        }
        let mut file = Self { all, is_whole_model: false };
        let adapted: BTreeSet<_> = file.matrices().map(|matrix| matrix.own.to_string()).collect();
        let is_own_weight = |name: &str| {
            let module = name.strip_suffix(".base_layer.weight");
            module.is_some_and(|module| adapted.contains(module.strip_prefix(PREFIX).unwrap_or(module)))
        };
        file.is_whole_model = file.all.keys().any(|name| is_own_weight(name));
        file.check_pairs()?;
        Ok(file)
    }

    /// Checks that each matrix has its other one.
    fn check_pairs(&self) -> Result<()> {
        let found: BTreeSet<_> = self.all.values().collect();
        for (name, stored) in &self.all {
            let other = match stored.clone() {
                StoredName::Matrix { module, matrix } => StoredName::Matrix { module, matrix: other(matrix) },
                StoredName::Embedding { module, matrix } => StoredName::Embedding { module, matrix: other(matrix) },
                StoredName::Parameter { .. } | StoredName::Base => continue,
            };
            if !found.contains(&other) {
                let missing = match other {
                    StoredName::Matrix { matrix: LoraMatrix::A, .. } => name.replace(".lora_B.", ".lora_A."),
                    StoredName::Matrix { .. } => name.replace(".lora_A.", ".lora_B."),
                    StoredName::Embedding { matrix: LoraMatrix::A, .. } => name.replace("embedding_B", "embedding_A"),
                    _ => name.replace("embedding_A", "embedding_B"),
                };
                bail!("[{OP}] {missing} is missing in the file, which has {name}")
            }
        }
        Ok(())
    }

    /// Returns the names with their meaning.
    pub fn all(&self) -> impl Iterator<Item = (&str, &StoredName)> {
        self.all.iter().map(|(name, stored)| (name.as_str(), stored))
    }

    /// Returns the matrices A of linear layers, which have the name of the layer as their own name.
    fn matrices(&self) -> impl Iterator<Item = Named<'_>> {
        self.all().filter_map(|(name, stored)| match stored {
            StoredName::Matrix { module, matrix: LoraMatrix::A } => Some(Named { stored: name, own: module }),
            _ => None,
        })
    }

    /// Returns whether the file has a parameter of the model, a trained bias or one of a saved module, for whose name
    /// `is_wanted` is true.
    pub fn has_parameter(&self, is_wanted: impl Fn(&str) -> bool) -> bool {
        self.all.values().any(|stored| matches!(stored, StoredName::Parameter { name } if is_wanted(name)))
    }

    /// Returns the name of a parameter with the same end as another, if there is one.
    pub fn parameter_like(&self, wanted: &str) -> Option<&str> {
        let candidates = self.all().filter_map(|(stored_name, stored)| match stored {
            StoredName::Parameter { name } => Some(Named { stored: stored_name, own: name }),
            _ => None,
        });
        most_similar(candidates, wanted, 2)
    }

    /// Returns the name of the matrix whose layer has the most similar name, if there are matrices.
    pub fn matrix_like(&self, module: &str) -> Option<&str> {
        most_similar(self.matrices(), module, 0)
    }

    /// Returns whether the file has matrices below a module in any layer: below a name that differs in numbers alone.
    pub fn has_matrices_in_a_layer(&self, module: &str) -> bool {
        let length = module.split('.').count();
        self.matrices().any(|matrix| {
            let parts: Vec<_> = matrix.own.split('.').take(length).collect();
            is_equal_but_for_numbers(module, &parts.join("."))
        })
    }

    /// Returns whether the file has matrices of any module whose name ends with `end`.
    pub fn mentions(&self, end: &str) -> bool {
        self.matrices().any(|matrix| is_end(matrix.own, end))
    }
}

fn other(matrix: LoraMatrix) -> LoraMatrix {
    match matrix {
        LoraMatrix::A => LoraMatrix::B,
        LoraMatrix::B => LoraMatrix::A,
    }
}

/// Returns the file's name of the candidate with the longest common end, of at least `least` parts.
fn most_similar<'a>(candidates: impl Iterator<Item = Named<'a>>, wanted: &str, least: usize) -> Option<&'a str> {
    let mut best = None;
    let mut longest = None;
    for candidate in candidates {
        let length = common_end(candidate.own, wanted);
        if length >= least && longest.is_none_or(|longest| length > longest) {
            longest = Some(length);
            best = Some(candidate.stored);
        }
    }
    best
}
