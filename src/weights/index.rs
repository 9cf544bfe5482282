//! `model.safetensors.index.json`: which file of a checkpoint holds which tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

/// The shards of a checkpoint, by the tensors they hold.
#[derive(Deserialize)]
pub(crate) struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Reads an index whose shards have the given extension.
    ///
    /// # Errors
    /// What is wrong with the file, as the end of a sentence: unreadable, no index, without tensors, or with a shard that
    /// is outside the index's own folder, in which case none of it is to be trusted.
    pub(crate) fn read(file: &Path, extension: &str) -> Result<Self, String> {
        let text = std::fs::read_to_string(file).map_err(|error| format!("could not be read: {error}"))?;
        let index: Self = serde_json::from_str(&text).map_err(|error| format!("is not an index of shards: {error}"))?;
        if index.weight_map.is_empty() {
            return Err("names no tensors".to_string());
        }
        for (tensor, shard) in &index.weight_map {
            if let Some(fault) = shard_fault(shard, extension) {
                return Err(format!("names the shard {shard:?} of {tensor:?}, which {fault}"));
            }
        }
        Ok(index)
    }

    /// The shards, in the order of their names; of a `prefix`, only those with tensors of that name or below it.
    ///
    /// # Errors
    /// If no tensor is there.
    pub(crate) fn shards(&self, prefix: Option<&str>) -> Result<BTreeSet<&str>, String> {
        let wanted = |tensor: &str| prefix.is_none_or(|prefix| is_below(tensor, prefix));
        let shards: BTreeSet<_> =
            self.weight_map.iter().filter(|(tensor, _)| wanted(tensor)).map(|(_, shard)| shard.as_str()).collect();
        match (prefix, self.weight_map.keys().next()) {
            (Some(prefix), Some(first)) if shards.is_empty() => Err(format!(
                "has {} tensors, none of which is {prefix:?} or below it; the first is {first:?}",
                self.weight_map.len()
            )),
            _ => Ok(shards),
        }
    }
}

/// Whether a tensor is `prefix` or below it, as a `VarBuilder` counts: the parts between dots are whole.
fn is_below(tensor: &str, prefix: &str) -> bool {
    match tensor.strip_prefix(prefix) {
        Some(rest) => rest.is_empty() || rest.starts_with('.') || prefix.is_empty() || prefix.ends_with('.'),
        None => false,
    }
}

/// What is wrong with the name of a shard, which has to be a file below the index's own folder.
fn shard_fault(name: &str, extension: &str) -> Option<String> {
    if name.contains(['\\', ':']) || name.chars().any(char::is_control) {
        return Some("has a character that no file of a model has".to_string());
    }
    if name.split('/').any(|part| matches!(part, "" | "." | "..")) {
        return Some("does not stay in the model's own folder".to_string());
    }
    (!name.ends_with(extension)).then(|| format!("does not end with `{extension}`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_names_stay_in_the_folder() {
        let fault = |name| shard_fault(name, ".safetensors");
        assert_eq!(fault("model-00001-of-00002.safetensors"), None);
        assert_eq!(fault("parts/model-00001-of-00002.safetensors"), None);
        for name in [
            "../evil.safetensors",
            "/etc/evil.safetensors",
            "a/../../evil.safetensors",
            "a//b.safetensors",
            "./a.safetensors",
            "..\\evil.safetensors",
            "C:evil.safetensors",
            "a\n.safetensors",
            "model.bin",
            "",
        ] {
            assert!(fault(name).is_some(), "{name:?} was let through");
        }
    }
}
