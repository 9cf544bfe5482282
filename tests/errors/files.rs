//! Files that are not what they should be.

use candle_attention::weights::Checkpoint;
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout, weights};
use candle_core::{DType, Result};

use crate::common::models;
use crate::{CPU, Misuse, check, file};

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

const FILES: &[Misuse] = &[
    (
        "a file that is not there",
        || weights::open(crate::DIR.path().join("nothing.safetensors"), DType::F32, &CPU).map(drop),
        "[weights] cannot read DIR/nothing.safetensors: …(os error 2)",
    ),
    ("no files", || Checkpoint::from_files::<&str>(&[]).map(drop), "[weights] expected at least one file, found none"),
    (
        "an empty file",
        || open("empty", b""),
        "[weights] DIR/empty is neither a safetensors file nor a .pth file of torch.save",
    ),
    (
        "a text",
        || open("text", b"Hello, how are you?"),
        "[weights] DIR/text is neither a safetensors file nor a .pth file of torch.save",
    ),
    (
        "a page of a web site",
        || open("page", b"<!DOCTYPE html><html><body>Not found</body></html>"),
        "[weights] DIR/page is neither a safetensors file nor a .pth file of torch.save",
    ),
    (
        "a pointer of Git LFS",
        || open("pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"),
        "[weights] DIR/pointer is neither a safetensors file nor a .pth file of torch.save",
    ),
    (
        "a folder without weights",
        || open("folder/README.md", b"").or_else(|_| Checkpoint::open(crate::DIR.path().join("folder")).map(drop)),
        "[weights] DIR/folder holds none of model.safetensors, model.safetensors.index.json, pytorch_model.bin, pytorch_model.bin.index.json, model.pth, diffusion_pytorch_model.safetensors, diffusion_pytorch_model.safetensors.index.json, diffusion_pytorch_model.bin",
    ),
    (
        "the same file twice",
        || {
            let (once, twice) = (file("once.safetensors", &valid()), file("twice.safetensors", &valid()));
            Checkpoint::from_files(&[once, twice]).map(drop)
        },
        "[weights] … is in DIR/twice.safetensors and in another file before it",
    ),
    (
        "a .pth file among shards",
        || {
            let pth = models().join("book_mha/model.pth");
            Checkpoint::from_files(&[file("first.safetensors", &valid()), pth]).map(drop)
        },
        "[weights] W_key.weight is in …models/book_mha/model.pth and in another file before it",
    ),
];

const SAFETENSORS: &[Misuse] = &[
    (
        "a truncated file",
        || open("truncated", &valid()[..valid().len() - 1]),
        "[weights] cannot read DIR/truncated: incomplete metadata, file not fully covered",
    ),
    (
        "a truncated header",
        || open("truncated_header", &valid()[..40]),
        "[weights] cannot read DIR/truncated_header: invalid header length",
    ),
    (
        "bytes behind the last tensor",
        || open("longer", &[valid(), vec![0]].concat()),
        "[weights] cannot read DIR/longer: incomplete metadata, file not fully covered",
    ),
    (
        "a header longer than the file",
        || open("long", b"\xe8\x03\0\0\0\0\0\0{}"),
        "[weights] cannot read DIR/long: invalid header length",
    ),
    (
        "a header longer than any",
        || open("longest", b"\xff\xff\xff\xff\xff\xff\xff\xff{}"),
        "[weights] cannot read DIR/longest: header too large",
    ),
    (
        "a header that is no JSON",
        || headed("no_json", r#"{"a": }"#, 0),
        "[weights] cannot read DIR/no_json: invalid JSON in header: expected value at line 1 column 7",
    ),
    (
        "a header that is other JSON",
        || headed("other_json", r#"{"a": [1, 2]}"#, 0),
        "[weights] cannot read DIR/other_json: invalid JSON in header: …",
    ),
    (
        "an unknown dtype",
        || headed("dtype", r#"{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}"#, 4),
        "[weights] cannot read DIR/dtype: invalid JSON in header: unknown variant `F31`, …",
    ),
    (
        "a tensor beyond the file",
        || headed("beyond", r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 4),
        "[weights] cannot read DIR/beyond: incomplete metadata, file not fully covered",
    ),
    (
        "tensors that overlap",
        || {
            let (a, b) = (r#""a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#, r#""data_offsets":[2,6]"#);
            headed("overlap", &format!(r#"{{{a},"b":{{"dtype":"F32","shape":[1],{b}}}}}"#), 6)
        },
        "[weights] cannot read DIR/overlap: invalid offset for tensor `b`",
    ),
    (
        "a tensor that ends before it starts",
        || headed("backwards", r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#, 4),
        "[weights] cannot read DIR/backwards: invalid offset for tensor `a`",
    ),
    (
        "a shape that its bytes do not fill",
        || headed("unfilled", r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#, 8),
        "[weights] cannot read DIR/unfilled: invalid shape, data type, or offset for tensor",
    ),
    (
        "a shape beyond counting",
        || headed("countless", r#"{"a":{"dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,8]}}"#, 8),
        "[weights] cannot read DIR/countless: overflow computing buffer size from shape and/or element type",
    ),
    (
        "a shape beyond counting beside a zero",
        || headed("zero", r#"{"a":{"dtype":"F32","shape":[0,18446744073709551615,2],"data_offsets":[0,0]}}"#, 0),
        "[weights] cannot read DIR/zero: a has shape [0, 18446744073709551615, 2], which is too large to address",
    ),
    (
        "one name for two tensors",
        || {
            let a = |from, to| format!(r#""a":{{"dtype":"F32","shape":[1],"data_offsets":[{from},{to}]}}"#);
            headed("twice", &format!("{{{},{}}}", a(0, 4), a(4, 8)), 8)
        },
        "[weights] cannot read DIR/twice: invalid offset for tensor `a`",
    ),
    (
        "weights as truth values",
        || {
            let header = r#"{"q_proj.weight":{"dtype":"BOOL","shape":[2,2],"data_offsets":[0,4]}}"#;
            let vb = weights::open(file("bool", &safetensors(header, 4)), DType::F32, &CPU)?;
            MultiHeadAttention::new(&MultiHeadAttentionConfig::new(2, 1), vb).map(drop)
        },
        "[multi_head_attention] q_proj.weight: unsupported safetensors dtype BOOL (layout canonical)",
    ),
    (
        "weights of four bits",
        || {
            let header = r#"{"Wq.weight":{"dtype":"F4","shape":[2,2],"data_offsets":[0,2]}}"#;
            let vb = weights::open(file("four_bits", &safetensors(header, 2)), DType::F32, &CPU)?;
            MultiHeadAttention::load(&MultiHeadAttentionConfig::new(2, 1), WeightLayout::Short, vb).map(drop)
        },
        "[multi_head_attention] Wq.weight: unsupported safetensors dtype F4 (layout short)",
    ),
];

const SHARDS: &[Misuse] = &[
    (
        "an index that is no JSON",
        || sharded("no_index", "weights", None),
        "[weights] DIR/no_index/model.safetensors.index.json is not an index of shards: expected value at line 1 column 1",
    ),
    (
        "an index without a map",
        || sharded("no_map", "{}", None),
        "[weights] DIR/no_map/model.safetensors.index.json is not an index of shards: missing field `weight_map` at line 1 column 2",
    ),
    (
        "an index without shards",
        || sharded("no_shards", r#"{"weight_map": {}}"#, None),
        "[weights] DIR/no_shards/model.safetensors.index.json names no tensors",
    ),
    (
        "a shard that is not there",
        || {
            sharded(
                "no_shard",
                r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}"#,
                Some("one.safetensors"),
            )
        },
        "[weights] cannot read DIR/no_shard/two.safetensors: …(os error 2)",
    ),
    (
        "a shard above the folder",
        || sharded("above", r#"{"weight_map": {"a": "../one.safetensors"}}"#, None),
        "[weights] DIR/above/model.safetensors.index.json names the shard \"../one.safetensors\" of \"a\", which does not stay in the model's own folder",
    ),
    (
        "a shard at the root of the machine",
        || sharded("root", r#"{"weight_map": {"a": "/etc/passwd"}}"#, None),
        "[weights] DIR/root/model.safetensors.index.json names the shard \"/etc/passwd\" of \"a\", which does not stay in the model's own folder",
    ),
    (
        "a shard of another format",
        || sharded("other", r#"{"weight_map": {"a": "one.bin"}}"#, Some("one.bin")),
        "[weights] DIR/other/model.safetensors.index.json names the shard \"one.bin\" of \"a\", which does not end with `.safetensors`",
    ),
    (
        "a shard without a name",
        || sharded("nameless", r#"{"weight_map": {"a": ""}}"#, None),
        "[weights] DIR/nameless/model.safetensors.index.json names the shard \"\" of \"a\", which does not stay in the model's own folder",
    ),
    (
        "the folder above as a shard",
        || sharded("dots", r#"{"weight_map": {"a": ".."}}"#, None),
        "[weights] DIR/dots/model.safetensors.index.json names the shard \"..\" of \"a\", which does not stay in the model's own folder",
    ),
];

#[test]
fn files_that_hold_no_weights_are_named() {
    check(FILES);
}

#[test]
fn safetensors_files_that_lie_are_named() {
    check(SAFETENSORS);
}

#[test]
fn shards_that_do_not_fit_their_index_are_named() {
    check(SHARDS);
}
