//! `.pth` files that are no state dicts, or that a state dict never is.

use std::io::Write;

use candle_attention::weights::Checkpoint;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::common::recorded;
use crate::files::{bytes, read};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("archive", |line, _| {
        let files: Vec<(String, String)> = serde_json::from_str(line).map_err(Error::wrap)?;
        let files: Vec<_> = files.iter().map(|(name, text)| (name.as_str(), bytes(text))).collect();
        read("archive.pth", &archive(&files))
    }),
    ("saved", |line, _| Checkpoint::open(data(line)).map(accepted)),
    ("stored tensor", |_, call| {
        let [key, view] = ["key", "view"].map(|name| call.need::<String>(name));
        tensor("tensor.pth", &bytes(&key?), &bytes(&view?))
    }),
    ("pickle", |line, _| {
        let (_, pickle) = line.split_once(": ").expect("what is wrong, and the pickle");
        pickled("pickle.pth", &bytes(&serde_json::from_str::<String>(pickle).map_err(Error::wrap)?))
    }),
    ("pth calls", |line, _| named(CALLS, line)),
];

fn data(name: &str) -> PathBuf {
    recorded("data").join(name)
}

/// Returns an uncompressed archive of these files.
fn archive(files: &[(&str, Vec<u8>)]) -> Vec<u8> {
    let mut zip = ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, bytes) in files {
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        zip.start_file(*name, options).expect("a file can be started");
        zip.write_all(bytes).expect("memory can be written");
    }
    zip.finish().expect("the archive can be finished").into_inner()
}

/// Writes and reads a file of torch.save with this pickle and one storage, `0`, of 16 bytes.
fn pickled(name: &str, pickle: &[u8]) -> Result<String> {
    read(name, &archive(&[("a/data.pkl", [b"\x80\x02", pickle, b"."].concat()), ("a/data/0", vec![0; 16])]))
}

/// Writes and reads a state dict whose one tensor `t` has a storage of this key and a view of these instructions:
/// offset, shape, strides.
fn tensor(name: &str, key: &[u8], view: &[u8]) -> Result<String> {
    let storage = [b"(X\x07\0\0\0storagectorch\nFloatStorage\n", key, b"X\x03\0\0\0cpuK\x04tQ"].concat();
    let call = [b"ctorch._utils\n_rebuild_tensor_v2\n(", storage.as_slice(), view, b"\x89NtR"].concat();
    pickled(name, &[b"}X\x01\0\0\0t", call.as_slice(), b"s"].concat())
}

/// Reads pickles that would fill the memory or the stack of a reader that builds Python's objects.
#[test]
fn pth_with_deep_or_shared_objects_is_read_in_bounded_memory() -> Result<()> {
    // A dict with a tuple in a tuple, a million times over, and with tuples that contain the previous one twice.
    let nested = [b"}K\x01)".as_slice(), &vec![0x85; 1_000_000], b"s"].concat();
    let doubled = [b"}K\x01)".as_slice(), &b"q\0h\0\x86".repeat(10_000), b"s"].concat();
    // A dict in itself, and two in each other.
    let itself = b"}q\0X\x01\0\0\0ah\0s".to_vec();
    let each_other = b"}q\0X\x01\0\0\0a}q\x01X\x01\0\0\0bh\0ss".to_vec();
    for pickle in [nested, doubled, itself, each_other] {
        pickled("endless.pth", &pickle)?;
    }
    Ok(())
}

/// Returns entries of a dict, with numbers for keys and one value.
fn entries(count: u32, value: &[u8]) -> Vec<u8> {
    (1..=count).flat_map(|key| [b"J".as_slice(), &key.to_le_bytes(), value].concat()).collect()
}

fn endless(parts: &[&[u8]]) -> Result<String> {
    pickled("endless.pth", &parts.concat())
}

fn odd(cfg: Config) -> Result<MultiHeadAttention> {
    MultiHeadAttention::new(&cfg, weights::open(data("odd.pth"), DType::F32, &CPU)?)
}

fn odd_tensor(name: &str) -> Result<Tensor> {
    weights::open(data("odd.pth"), DType::F32, &CPU)?.get((4, 4), name)
}

const CALLS: &[Named] = calls! {
    "an archive of something else" => read("arrays.npz", &archive(&[("weight.npy", vec![])])),
    "the folder of a training loop in place of its layer" =>
        WeightLayout::detect(&weights::open(data("nested.pth"), DType::F32, &CPU)?),
    "a bias of eight-bit integers that the config denies" => odd(Config::new(4, 1)),
    "a bias of eight-bit integers" => odd(Config::new(4, 1).with_q_bias(true)),
    "a sparse tensor" => odd_tensor("k_proj.weight"),
    "a dtype of newer PyTorch" => odd_tensor("v_proj.weight"),
    "an expanded tensor of another shape" => odd_tensor("o_proj.weight"),
    "one long key that nested dicts share" => endless(&[
        b"}X\x90\x01\0\0", &[b'k'; 400], b"q\0}", &b"h\0}".repeat(100_000), &b"s".repeat(100_001),
    ]),
    "one shape of a hundred thousand dimensions" => {
        let shape = [b"K\0(".as_slice(), &b"K\x01".repeat(100_000), b"tq\0h\0"].concat();
        tensor("endless.pth", b"X\x01\0\0\x000", &shape)
    },
    "one long name of a class" => endless(&[b"}K\x01c", &[b'c'; 100_000], b"\nd\n)Rq\0s"]),
    "a long name of a class that many entries share" => endless(&[
        b"}K\0c", &[b'c'; 1000], b"\n", &[b'd'; 1000], b"\n)Rq\0s(", &entries(60_000, b"h\0"), b"u",
    ]),
    "a parameter of a parameter, a million times over, under a hundred thousand names" => endless(&[
        b"}(K\0ctorch._utils\n_rebuild_parameter\nq\0", &b"h\0".repeat(999_999), b"K\x01",
        &b"\x85R".repeat(1_000_000), b"q\x01", &entries(100_000, b"h\x01"), b"u",
    ]),
};
