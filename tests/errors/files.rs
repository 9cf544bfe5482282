//! Files that are not what they should be.

use candle_attention::weights::Checkpoint;
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout, weights};
use candle_core::{DType, Result};

use crate::common::models;
use crate::{CPU, Case, file};

/// A safetensors file with this header and so many bytes behind it.
pub fn safetensors(header: &str, bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + bytes, 0);
    file
}

/// The book's small layer.
pub fn valid() -> Vec<u8> {
    std::fs::read(models().join("book_mha/model.safetensors")).expect("models/ is there")
}

fn open(name: &str, bytes: &[u8]) -> Result<()> {
    Checkpoint::open(file(name, bytes)).map(drop)
}

fn headed(name: &str, header: &str, bytes: usize) -> Result<()> {
    open(name, &safetensors(header, bytes))
}

/// A folder with this index and, where a name is given, one shard.
fn sharded(folder: &str, index: &str, shard: Option<&str>) -> Result<()> {
    let index = file(&format!("{folder}/model.safetensors.index.json"), index.as_bytes());
    if let Some(shard) = shard {
        file(&format!("{folder}/{shard}"), &valid());
    }
    Checkpoint::open(index.parent().expect("a file has a folder")).map(drop)
}

pub const FILES: &[Case] = cases! {
    "a file that is not there" => weights::open(crate::DIR.path().join("nothing.safetensors"), DType::F32, &CPU),
    "no files" => Checkpoint::from_files::<&str>(&[]),
    "an empty file" => open("empty", b""),
    "a text" => open("text", b"Hello, how are you?"),
    "a page of a web site" => open("page", b"<!DOCTYPE html><html><body>Not found</body></html>"),
    "a pointer of Git LFS" => {
        open("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n")
    },
    "a folder without weights" =>
        open("folder/README.md", b"").or_else(|_| Checkpoint::open(crate::DIR.path().join("folder")).map(drop)),
    "the same file twice" =>
        Checkpoint::from_files(&[file("once.safetensors", &valid()), file("twice.safetensors", &valid())]),
    "a part of Meta's Llama" => {
        for part in ["parts/consolidated.00.pth", "parts/consolidated.01.pth"] {
            file(part, &std::fs::read(models().join("book_mha/model.pth"))?);
        }
        Checkpoint::open(crate::DIR.path().join("parts"))
    },
    "a .pth file among shards" =>
        Checkpoint::from_files(&[file("first.safetensors", &valid()), models().join("book_mha/model.pth")]),
};

pub const SAFETENSORS: &[Case] = cases! {
    "a truncated file" => open("truncated", &valid()[..valid().len() - 1]),
    "a truncated header" => open("truncated_header", &valid()[..40]),
    "bytes behind the last tensor" => open("longer", &[valid(), vec![0]].concat()),
    "a header longer than the file" => open("long", b"\xe8\x03\0\0\0\0\0\0{}"),
    "a header longer than any" => open("longest", b"\xff\xff\xff\xff\xff\xff\xff\xff{}"),
    "a header that is no JSON" => headed("no_json", r#"{"a": }"#, 0),
    "a header that is other JSON" => headed("other_json", r#"{"a": [1, 2]}"#, 0),
    "an unknown dtype" => headed("dtype", r#"{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}"#, 4),
    "a tensor beyond the file" => headed("beyond", r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 4),
    "tensors that overlap" => {
        let (a, b) = (r#""a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#, r#""data_offsets":[2,6]"#);
        headed("overlap", &format!(r#"{{{a},"b":{{"dtype":"F32","shape":[1],{b}}}}}"#), 6)
    },
    "a tensor that ends before it starts" =>
        headed("backwards", r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, 4),
    "a shape that its bytes do not fill" =>
        headed("unfilled", r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, 8),
    "a shape beyond counting" =>
        headed("countless", r#"{"a":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,8]}}"#, 8),
    "a shape beyond counting beside a zero" =>
        headed("zero", r#"{"a":{"dtype":"F32","shape":[0,18446744073709551615,2],"data_offsets":[0,0]}}"#, 0),
    "one name for two tensors" => {
        let a = |from, to| format!(r#""a":{{"dtype":"F32","shape":[1],"data_offsets":[{from},{to}]}}"#);
        headed("twice", &format!("{{{},{}}}", a(0, 4), a(4, 8)), 8)
    },
    "weights as truth values" => {
        let header = r#"{"q_proj.weight":{"dtype":"BOOL","shape":[2,2],"data_offsets":[0,4]}}"#;
        let vb = weights::open(file("bool", &safetensors(header, 4)), DType::F32, &CPU)?;
        MultiHeadAttention::new(&MultiHeadAttentionConfig::new(2, 1), vb)
    },
    "weights of four bits" => {
        let header = r#"{"Wq.weight":{"dtype":"F4","shape":[2,2],"data_offsets":[0,2]}}"#;
        let vb = weights::open(file("four_bits", &safetensors(header, 2)), DType::F32, &CPU)?;
        MultiHeadAttention::load(&MultiHeadAttentionConfig::new(2, 1), WeightLayout::Short, vb)
    },
};

pub const SHARDS: &[Case] = cases! {
    "an index that is no JSON" => sharded("no_index", "weights", None),
    "an index without a map" => sharded("no_map", "{}", None),
    "an index without shards" => sharded("no_shards", r#"{"weight_map": {}}"#, None),
    "a shard that is not there" => {
        sharded(
            "no_shard",
            r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#,
            Some("one.safetensors"),
        )
    },
    "a shard above the folder" => sharded("above", r#"{"weight_map": {"a": "../one.safetensors"}}"#, None),
    "a shard at the root of the machine" => sharded("root", r#"{"weight_map": {"a": "/etc/passwd"}}"#, None),
    "a shard of another format" => sharded("other", r#"{"weight_map": {"a": "one.bin"}}"#, Some("one.bin")),
    "a shard without a name" => sharded("nameless", r#"{"weight_map": {"a": ""}}"#, None),
    "the folder above as a shard" => sharded("dots", r#"{"weight_map": {"a": ".."}}"#, None),
};
