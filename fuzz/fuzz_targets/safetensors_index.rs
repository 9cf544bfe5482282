//! A folder with any index of shards, and any header of the shard that it may name.
#![no_main]

use candle_attention::weights;
use candle_core::{DType, Device};
use libfuzzer_sys::arbitrary::{self, Arbitrary};
use libfuzzer_sys::fuzz_target;

/// The two texts are split at the first newline, so that seeds can be read and written.
#[derive(Debug)]
struct Folder {
    index: Vec<u8>,
    header: Vec<u8>,
}

impl<'a> Arbitrary<'a> for Folder {
    fn arbitrary(bytes: &mut arbitrary::Unstructured<'a>) -> arbitrary::Result<Self> {
        let bytes = bytes.bytes(bytes.len())?;
        let newline = bytes.iter().position(|&byte| byte == b'\n').unwrap_or(bytes.len());
        let header = bytes.get(newline + 1..).unwrap_or_default();
        Ok(Self { index: bytes[..newline].to_vec(), header: header.to_vec() })
    }

    fn arbitrary_take_rest(mut bytes: arbitrary::Unstructured<'a>) -> arbitrary::Result<Self> {
        Self::arbitrary(&mut bytes)
    }
}

fuzz_target!(|folder: Folder| {
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut shard = (folder.header.len() as u64).to_le_bytes().to_vec();
    shard.extend(&folder.header);
    shard.extend([0; 256]);
    std::fs::write(place.path().join("model.safetensors.index.json"), &folder.index).expect("an index");
    std::fs::write(place.path().join("model-00001-of-00001.safetensors"), shard).expect("a shard");
    let Ok(checkpoint) = weights::Checkpoint::open(place.path()) else { return };
    let _ = checkpoint.attention_layers();
    let _ = checkpoint.detect("");
    let Ok(vb) = checkpoint.var_builder(DType::F32, &Device::Cpu) else { return };
    for (name, shape) in checkpoint.shapes() {
        let _ = vb.get(shape, name);
    }
});
