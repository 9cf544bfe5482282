//! Files that are not what they should be.

use candle_attention::weights::Checkpoint;

use crate::common::models;
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    // The first bytes of a file of `models/`, or all of them and more, or bytes.
    ("file", |_, call| {
        let whole = call.get::<String>("of")?.map_or(Ok(Vec::new()), |path| std::fs::read(models().join(path)))?;
        let first = call.get("first")?.unwrap_or(whole.len());
        let more = call.get::<String>("more")?;
        read(&call.need::<String>("name")?, &[&whole[..first], &bytes(&more.unwrap_or_default())].concat())
    }),
    ("safetensors header", |line, _| {
        let (bytes, header) = line.split_once(' ').expect("how many bytes stand behind it");
        read("damaged.safetensors", &safetensors(header, bytes.parse().expect("a number")))
    }),
    ("index", |line, _| {
        file("sharded/one.safetensors", &valid());
        file("sharded/one.bin", &valid());
        file("sharded/model.safetensors.index.json", line.as_bytes());
        Checkpoint::open(in_folder("sharded")).map(accepted)
    }),
    ("file calls", |line, _| named(CALLS, line)),
];

/// Returns a safetensors file with this header and this number of bytes after it.
pub fn safetensors(header: &str, bytes: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.resize(file.len() + bytes, 0);
    file
}

/// Returns the small layer of the book.
pub fn valid() -> Vec<u8> {
    std::fs::read(models().join("book_mha/model.safetensors")).expect("models/ is there")
}

/// Writes a file with this name and these bytes, and reads all of its tensors.
pub fn read(name: &str, bytes: &[u8]) -> Result<String> {
    let checkpoint = Checkpoint::open(file(name, bytes))?;
    let vb = checkpoint.var_builder(DType::F32, &CPU)?;
    checkpoint.shapes().try_for_each(|(tensor, shape)| vb.get(shape, tensor).map(drop)).map(accepted)
}

/// Returns one byte for each letter.
pub fn bytes(text: &str) -> Vec<u8> {
    text.chars().map(|letter| u8::try_from(u32::from(letter)).expect("a byte")).collect()
}

/// Loads a layer whose query weight has a dtype that layers do not support.
fn odd(query: &str, dtype: &str, bytes: usize, layout: WeightLayout) -> Result<MultiHeadAttention> {
    let header = format!(r#"{{"{query}":{{"dtype":"{dtype}","shape":[2,2],"data_offsets":[0,{bytes}]}}}}"#);
    let vb = weights::open(file(dtype, &safetensors(&header, bytes)), DType::F32, &CPU)?;
    MultiHeadAttention::load(&Config::new(2, 1), layout, vb)
}

fn one(name: &str) -> PathBuf {
    file(name, &safetensors(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, 4))
}

const CALLS: &[Named] = calls! {
    "a file that is not there" => weights::open(in_folder("nothing.safetensors"), DType::F32, &CPU),
    "no files" => Checkpoint::from_files::<&str>(&[]),
    "a folder without weights" => Checkpoint::open(file("folder/README.md", b"").parent().expect("a folder")),
    "the same file twice" => Checkpoint::from_files(&[one("once.safetensors"), one("twice.safetensors")]),
    "a part of Meta's Llama" => {
        let part = std::fs::read(models().join("book_mha/model.pth"))?;
        file("parts/consolidated.00.pth", &part);
        file("parts/consolidated.01.pth", &part);
        Checkpoint::open(in_folder("parts"))
    },
    "a .pth file among shards" =>
        Checkpoint::from_files(&[file("first.safetensors", &valid()), models().join("book_mha/model.pth")]),
    "weights as truth values" => odd("q_proj.weight", "BOOL", 4, WeightLayout::Canonical),
    "weights of four bits" => odd("Wq.weight", "F4", 2, WeightLayout::Short),
};
