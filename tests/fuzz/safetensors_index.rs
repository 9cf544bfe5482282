//! A folder with any index of shards, and any header of the shard that it may name.

use candle_attention::weights;
use candle_core::{DType, Device};

/// Splits the index and the header at the first newline, so that people can read and write seeds.
pub fn run(bytes: &[u8]) {
    let newline = bytes.iter().position(|&byte| byte == b'\n').unwrap_or(bytes.len());
    let index = &bytes[..newline];
    let header = bytes.get(newline + 1..).unwrap_or_default();
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut shard = (header.len() as u64).to_le_bytes().to_vec();
    shard.extend(header);
    shard.extend([0; 256]);
    std::fs::write(place.path().join("model.safetensors.index.json"), index).expect("an index");
    std::fs::write(place.path().join("model-00001-of-00001.safetensors"), shard).expect("a shard");
    let Ok(checkpoint) = weights::Checkpoint::open(place.path()) else { return };
    let _ = checkpoint.attention_layers();
    let _ = checkpoint.detect("");
    let Ok(vb) = checkpoint.var_builder(DType::F32, &Device::Cpu) else { return };
    for (name, shape) in checkpoint.shapes() {
        let _ = vb.get(shape, name);
    }
}
