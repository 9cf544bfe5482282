//! Files that are not what they should be.

use candle_attention::weights::{self, Checkpoint};

use crate::common::models;
use crate::*;

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

fn open(bytes: &[u8]) -> Result<Checkpoint> {
    Checkpoint::open(file("damaged.safetensors", bytes))
}

#[test]
fn files_of_other_kinds() {
    let bytes: [&[u8]; 4] = [
        b"",
        b"Hello, how are you?",
        b"<!DOCTYPE html><html><body>Not found</body></html>",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
    ];
    let kinds = bytes.map(|bytes| {
        case(String::from_utf8_lossy(bytes).replace('\n', " "), || Checkpoint::open(file("kind", bytes)).map(drop))
    });
    let one = safetensors(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, 4);
    let files = cases! {
        "a file that is not there" => weights::open(DIR.path().join("nothing.safetensors"), DType::F32, &CPU),
        "no files" => Checkpoint::from_files::<&str>(&[]),
        "a folder without weights" => {
            let readme = file("folder/README.md", b"");
            Checkpoint::open(readme.parent().expect("a folder"))
        },
        "the same file twice" => Checkpoint::from_files(&[file("once.safetensors", &one), file("twice.safetensors", &one)]),
        "a part of Meta's Llama" => {
            let part = std::fs::read(models().join("book_mha/model.pth"))?;
            file("parts/consolidated.00.pth", &part);
            file("parts/consolidated.01.pth", &part);
            Checkpoint::open(DIR.path().join("parts"))
        },
        "a .pth file among shards" =>
            Checkpoint::from_files(&[file("first.safetensors", &valid()), models().join("book_mha/model.pth")]),
    };
    assert_reviewed("files", &[kinds.into(), files]);
}

#[test]
fn safetensors_files() {
    let valid = valid();
    let damaged = cases! {
        "a truncated file" => open(&valid[..valid.len() - 1]),
        "a truncated header" => open(&valid[..40]),
        "bytes behind the last tensor" => open(&[valid.as_slice(), &[0]].concat()),
        "a header longer than the file" => open(b"\xe8\x03\0\0\0\0\0\0{}"),
        "a header longer than any" => open(b"\xff\xff\xff\xff\xff\xff\xff\xff{}"),
        "weights as truth values" => {
            let header = r#"{"q_proj.weight":{"dtype":"BOOL","shape":[2,2],"data_offsets":[0,4]}}"#;
            let vb = weights::open(file("bool", &safetensors(header, 4)), DType::F32, &CPU)?;
            MultiHeadAttention::new(&Config::new(2, 1), vb)
        },
        "weights of four bits" => {
            let header = r#"{"Wq.weight":{"dtype":"F4","shape":[2,2],"data_offsets":[0,2]}}"#;
            let vb = weights::open(file("four_bits", &safetensors(header, 2)), DType::F32, &CPU)?;
            MultiHeadAttention::load(&Config::new(2, 1), WeightLayout::Short, vb)
        },
    };
    let headers = [
        (0, r#"{"a": }"#),
        (0, r#"{"a": [1, 2]}"#),
        (4, r#"{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}"#),
        (4, r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#),
        (
            6,
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#,
        ),
        (
            8,
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
        ),
        (4, r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#),
        (8, r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#),
        (8, r#"{"a":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,8]}}"#),
        (0, r#"{"a":{"dtype":"F32","shape":[0,18446744073709551615,2],"data_offsets":[0,0]}}"#),
    ];
    let headers = headers.map(|(bytes, header)| case(header, || open(&safetensors(header, bytes)).map(drop)));
    assert_reviewed("safetensors", &[damaged, headers.into()]);
}

#[test]
fn indices_of_shards() {
    let indices = [
        "weights",
        "{}",
        r#"{"weight_map": {}}"#,
        r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#,
    ];
    // Above the folder, at the root of the machine, of another format, without a name, the folder above.
    let shards = ["../one.safetensors", "/etc/passwd", "one.bin", "", ".."];
    let sharded = |index: &str| {
        file("sharded/one.safetensors", &valid());
        file("sharded/one.bin", &valid());
        file("sharded/model.safetensors.index.json", index.as_bytes());
        Checkpoint::open(DIR.path().join("sharded"))
    };
    assert_reviewed(
        "shards",
        &[
            indices.map(|index| case(index, || sharded(index).map(drop))).into(),
            each("the shard", shards, |shard| sharded(&format!(r#"{{"weight_map": {{"a": "{shard}"}}}}"#))),
        ],
    );
}
