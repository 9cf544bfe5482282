//! The header of a safetensors file: names, types, shapes and places of its tensors.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use candle_core::{DType, Result, bail};
use safetensors::SafeTensorError;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;

use super::stored::{Entry, Stored};
use crate::size::is_addressable;

/// The format's own limit.
const MAX_HEADER: u64 = 100_000_000;

#[derive(Deserialize)]
struct Header {
    #[serde(rename = "__metadata__")]
    _metadata: Option<HashMap<String, String>>,
    #[serde(flatten)]
    tensors: HashMap<String, TensorInfo>,
}

/// The tensors of a safetensors file. Only the header is read.
///
/// # Errors
/// If the header is no such header, or its tensors do not fill the rest of the file.
pub(super) fn entries(path: &Path) -> Result<BTreeMap<String, Entry>> {
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
    let header: Header = serde_json::from_slice(&text).map_err(SafeTensorError::InvalidHeaderDeserialization)?;
    let mut tensors: Vec<_> = header.tensors.into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let end = tensors.last().map_or(0, |(_, info)| info.data_offsets.1);
    // Checks that the tensors follow each other, each as long as its shape says.
    Metadata::new(None, tensors.clone())?;
    if end as u64 != data_len {
        return Err(SafeTensorError::MetadataIncompleteBuffer.into());
    }
    let file: Arc<Path> = path.into();
    let mut entries = BTreeMap::new();
    for (name, TensorInfo { dtype, shape, data_offsets, .. }) in tensors {
        if !is_addressable(&shape) {
            bail!("{name} has shape {shape:?}, which is too large to address")
        }
        let entry = match DType::try_from(dtype) {
            Ok(DType::F4 | DType::F6E2M3 | DType::F6E3M2 | DType::F8E8M0) | Err(_) => {
                Entry::Unreadable { shape: Some(shape), what: format!("unsupported safetensors dtype {dtype:?}") }
            }
            Ok(dtype) => Entry::Stored(Stored {
                file: file.clone(),
                dtype,
                storage_len: shape.iter().product(),
                shape,
                strides: None,
                start: data_start + data_offsets.0 as u64,
            }),
        };
        entries.insert(name, entry);
    }
    Ok(entries)
}
