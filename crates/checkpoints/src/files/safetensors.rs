//! Safetensors: the header of a file, with the names, types, shapes and offsets of its tensors, and the index of shards
//! (`model.safetensors.index.json`), which names the file of each tensor.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Result, bail};
use safetensors::SafeTensorError;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use super::raw::RawTensor;
use super::stored::{StoredEntry, TensorLocation};
use candle_attention_modules::base::is_addressable;

/// The largest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;

#[derive(Deserialize)]
struct SafetensorsHeader {
    #[serde(rename = "__metadata__")]
    metadata: Option<HashMap<String, String>>,
    #[serde(flatten)]
    tensors: HashMap<String, TensorInfo>,
}

/// The tensors of a safetensors file, and what its header says of all of them.
pub(super) struct Contents {
    pub entries: BTreeMap<String, StoredEntry>,
    /// Whether MLX wrote the file.
    pub is_of_mlx: bool,
    /// The texts of the header. torchao has one for each weight.
    pub metadata: HashMap<String, String>,
}

/// Reads the names, shapes and offsets of the tensors of a safetensors file, from its header.
///
/// # Errors
/// If the header is invalid, or its tensors do not fill the rest of the file.
pub(super) fn contents(path: &Path) -> Result<Contents> {
    let mut file = File::open(path)?;
    let file_len = file.metadata()?.len();
    let mut len = [0; 8];
    file.read_exact(&mut len).map_err(|_| SafeTensorError::HeaderTooSmall)?;
    let len = u64::from_le_bytes(len);
    if len > MAX_HEADER {
        return Err(SafeTensorError::HeaderTooLarge.into());
    }
    let data_start = len + 8;
    let Some(data_len) = file_len.checked_sub(data_start) else {
        return Err(SafeTensorError::InvalidHeaderLength.into());
    };
    let mut text = Vec::new();
    file.take(len).read_to_end(&mut text)?;
    let header: SafetensorsHeader =
        serde_json::from_slice(&text).map_err(SafeTensorError::InvalidHeaderDeserialization)?;
    let metadata = header.metadata.unwrap_or_default();
    let is_of_mlx = metadata.get("format").is_some_and(|format| format == "mlx");
    let mut tensors: Vec<_> = header.tensors.into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let end = tensors.last().map_or(0, |(_, info)| info.data_offsets.1);
    // Checks that the tensors follow each other, each as long as its shape says.
    Metadata::new(None, tensors.clone())?;
    if end as u64 != data_len {
        return Err(SafeTensorError::MetadataIncompleteBuffer.into());
    }
    let shared_path: Arc<Path> = path.into();
    let mut entries = BTreeMap::new();
    for (name, TensorInfo { dtype, shape, data_offsets, .. }) in tensors {
        if !is_addressable(&shape) {
            bail!("{name} has shape {shape:?}, which is too large to address")
        }
        let entry = match DType::try_from(dtype) {
            Ok(DType::F4 | DType::F6E2M3 | DType::F6E3M2 | DType::F8E8M0) | Err(_) => StoredEntry::Unreadable {
                dtype: Some(format!("{dtype:?}")),
                shape: Some(shape.clone()),
                problem: format!("unsupported safetensors dtype {dtype:?}"),
                raw: Some(RawTensor {
                    file: shared_path.clone(),
                    dtype,
                    shape,
                    start: data_start + data_offsets.0 as u64,
                    len: data_offsets.1 - data_offsets.0,
                }),
            },
            Ok(dtype) => StoredEntry::Stored(TensorLocation {
                file: shared_path.clone(),
                dtype,
                storage_len: shape.iter().product(),
                shape,
                strides: None,
                start: data_start + data_offsets.0 as u64,
                is_one_more: false,
            }),
        };
        entries.insert(name, entry);
    }
    Ok(Contents { entries, is_of_mlx, metadata })
}

/// The index of a checkpoint: the shard of each tensor.
#[derive(Deserialize)]
pub(crate) struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Reads an index whose shards have the given extension.
    ///
    /// # Errors
    /// If the file cannot be read, is no index, names no tensors, or names a shard outside its own folder. The text is
    /// the end of a sentence.
    pub(crate) fn read(file: &Path, extension: &str) -> std::result::Result<Self, String> {
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

    /// Returns the shards in the order of their names; with a `prefix`, only shards with tensors of that name or below
    /// it.
    ///
    /// # Errors
    /// If no tensor is there.
    pub(crate) fn shards(&self, prefix: Option<&str>) -> std::result::Result<BTreeSet<&str>, String> {
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

/// Returns whether a tensor is `prefix` or below it in the sense of a `VarBuilder`, which compares whole parts between
/// dots.
fn is_below(tensor: &str, prefix: &str) -> bool {
    match tensor.strip_prefix(prefix) {
        Some(rest) => rest.is_empty() || rest.starts_with('.') || prefix.is_empty() || prefix.ends_with('.'),
        None => false,
    }
}

/// Returns the fault in the name of a shard, which has to be a file below the folder of the index.
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
    fn shard_names_outside_the_folder_are_refused() {
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
            assert!(fault(name).is_some(), "{name:?} was accepted");
        }
    }
}
