//! `.pth` files that are no state dicts, or that a state dict never is.

use std::io::Write;
use std::path::{Path, PathBuf};

use candle_attention::weights::{self, Checkpoint};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::common::models;
use crate::*;

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// An archive of these files, uncompressed.
fn archive(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut zip = ZipWriter::new(std::io::Cursor::new(Vec::new()));
    for (name, bytes) in files {
        let options = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
        zip.start_file(*name, options).expect("a file can be started");
        zip.write_all(bytes).expect("memory can be written");
    }
    zip.finish().expect("the archive can be finished").into_inner()
}

fn open(name: &str, bytes: &[u8]) -> Result<()> {
    let checkpoint = Checkpoint::open(file(name, bytes))?;
    let vb = checkpoint.var_builder(DType::F32, &CPU)?;
    checkpoint.shapes().try_for_each(|(name, shape)| vb.get(shape, name).map(drop))
}

/// A file of torch.save with this pickle and one storage, `0`, of 16 bytes.
fn pickled(name: &str, pickle: &[u8]) -> Result<()> {
    open(name, &archive(&[("a/data.pkl", &[b"\x80\x02", pickle, b"."].concat()), ("a/data/0", &[0; 16])]))
}

/// A state dict whose one tensor `t` has a storage of this key, and is described by these instructions: offset, shape,
/// strides.
fn tensor(name: &str, key: &[u8], view: &[u8]) -> Result<()> {
    let storage = [b"(X\x07\0\0\0storagectorch\nFloatStorage\n", key, b"X\x03\0\0\0cpuK\x04tQ"].concat();
    let call = [b"ctorch._utils\n_rebuild_tensor_v2\n(", storage.as_slice(), view, b"\x89NtR"].concat();
    pickled(name, &[b"}X\x01\0\0\0t", call.as_slice(), b"s"].concat())
}

/// The key of the storage that is there.
const KEY: &[u8] = b"X\x01\0\0\x000";

#[test]
fn archives() {
    let valid = std::fs::read(models().join("book_mha/model.pth")).expect("models/ is there");
    let old = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.";
    let cases = cases! {
        "a truncated file" => open("archive.pth", &valid[..valid.len() / 2]),
        "a file of two letters" => open("archive.pth", b"PK"),
        "a file of before PyTorch 1.6" => open("archive.pth", old),
        "an archive of something else" => open("arrays.npz", &archive(&[("weight.npy", b"")])),
        "an archive of two pickles" => open("archive.pth", &archive(&[("a/data.pkl", b""), ("b/data.pkl", b"")])),
        "numbers in the other byte order" =>
            open("archive.pth", &archive(&[("a/data.pkl", b"\x80\x02}."), ("a/byteorder", b"big")])),
        "an empty pickle" => open("archive.pth", &archive(&[("a/data.pkl", b"")])),
        "the folder of a training loop in place of its layer" =>
            WeightLayout::detect(&weights::open(data("nested.pth"), DType::F32, &CPU)?),
    };
    let saved = ["module.pth", "tensor.pth", "protocol_4.pth"];
    assert_reviewed("pth_archives", &[cases, each("", saved, |name| Checkpoint::open(data(name)))]);
}

#[test]
fn tensors() {
    let odd = |cfg: Config| MultiHeadAttention::new(&cfg, weights::open(data("odd.pth"), DType::F32, &CPU)?);
    let biases = cases! {
        "a bias of eight-bit integers that the config denies" => odd(Config::new(4, 1)),
        "a bias of eight-bit integers" => odd(Config::new(4, 1).with_q_bias(true)),
    };
    // Sparse, in a dtype of newer PyTorch, expanded.
    let names = ["k_proj.weight", "v_proj.weight", "o_proj.weight"];
    let odd_tensor = |name| -> Result<Tensor> { weights::open(data("odd.pth"), DType::F32, &CPU)?.get((4, 4), name) };
    let vector = b"K\0K\x04\x85K\x01\x85";
    let rebuild = b"ctorch._utils\n_rebuild_parameter\n)R";
    let twice = [b"}(X\x01\0\0\0t".as_slice(), rebuild, b"X\x01\0\0\0t", rebuild, b"u"].concat();
    let stored = cases! {
        "a storage that is not there" => tensor("tensor.pth", b"X\x01\0\0\x001", vector),
        "a storage above the archive" => tensor("tensor.pth", b"X\x05\0\0\0../../", vector),
        "a call without arguments" => pickled("tensor.pth", b"}X\x01\0\0\0tctorch._utils\n_rebuild_tensor_v2\n)Rs"),
        "a call without a tuple" => pickled("tensor.pth", b"}X\x01\0\0\0tctorch._utils\n_rebuild_tensor_v2\nNRs"),
        "one name for two tensors" => pickled("tensor.pth", &twice),
    };
    let views: [(&str, &[u8]); 11] = [
        ("more elements than the storage has", b"K\0K\x05\x85K\x01\x85"),
        ("an offset beyond the storage", b"K\x01K\x04\x85K\x01\x85"),
        ("an offset before the storage", b"J\xff\xff\xff\xffK\x04\x85K\x01\x85"),
        ("an offset beyond counting", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x04\x85K\x01\x85"),
        ("strides beyond counting", b"K\0K\x03\x85\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85"),
        (
            "a shape beyond counting beside a zero",
            b"K\0K\0\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x09\x87K\0K\0K\0\x87",
        ),
        ("a shape of few elements that claims many", b"K\0J\0\0\0\x40J\0\0\0\x10\x86K\0K\0\x86"),
        ("fewer strides than dimensions", b"K\0K\x02K\x02\x86K\x01\x85"),
        ("texts for sizes", b"K\0X\x01\0\0\0a\x85K\x01\x85"),
        ("no shape", b""),
        ("a shape alone", b"K\0K\x04\x85"),
    ];
    let views = views.map(|(what, view)| case(what, || tensor("tensor.pth", KEY, view)));
    assert_reviewed("pth_tensors", &[biases, each("", names, odd_tensor), stored, views.into()]);
}

#[test]
fn pickles() {
    let pickles: [(&str, &[u8]); 9] = [
        ("a pickle of nothing", b""),
        ("a pickle of None", b"N"),
        ("a text longer than the pickle", b"X\xff\xff\xff\xffabc"),
        ("an instruction of another protocol", b"\x95\0\0\0\0\0\0\0\0"),
        ("a pop below the mark", b"}(\x85"),
        ("a tuple without a mark", b"}t"),
        ("a key without a value", b"}(K\x01u"),
        ("items of a number", b"K\x01K\x02K\x03s"),
        ("an object before it is made", b"h\x07"),
    ];
    let pickles = pickles.map(|(what, pickle)| case(what, || pickled("pickle.pth", pickle)));
    assert_reviewed("pickles", &[pickles.into()]);
}

/// What would fill the memory or the stack of a reader that builds Python's objects.
#[test]
fn pickles_that_nest_or_share_without_end_are_read_in_proportion() -> Result<()> {
    // A dict with a tuple in a tuple, a million times over, and with tuples that hold the one before them twice.
    let nested = [b"}K\x01)".as_slice(), &vec![0x85; 1_000_000], b"s"].concat();
    let doubled = [b"}K\x01)".as_slice(), &b"q\0h\0\x86".repeat(10_000), b"s"].concat();
    // A dict in itself, and two in each other.
    let itself = b"}q\0X\x01\0\0\0ah\0s".to_vec();
    let each_other = b"}q\0X\x01\0\0\0a}q\x01X\x01\0\0\0bh\0ss".to_vec();
    for pickle in [nested, doubled, itself, each_other] {
        pickled("endless.pth", &pickle)?;
    }

    // So many entries of a dict, with numbers for keys and one value.
    let entries = |count: u32, value: &[u8]| -> Vec<u8> {
        (1..=count).flat_map(|key| [b"J".as_slice(), &key.to_le_bytes(), value].concat()).collect()
    };
    let key = [b"X\x90\x01\0\0".as_slice(), &[b'k'; 400], b"q\0"].concat();
    let shape = [b"K\0(".as_slice(), &b"K\x01".repeat(100_000), b"tq\0h\0"].concat();
    let class = [b"c".as_slice(), &[b'c'; 1000], b"\n", &[b'd'; 1000], b"\n)Rq\0"].concat();
    let functions = [b"ctorch._utils\n_rebuild_parameter\nq\0".as_slice(), &b"h\0".repeat(999_999)].concat();
    let calls = [b"K\x01".as_slice(), &b"\x85R".repeat(1_000_000), b"q\x01"].concat();
    let cases = cases! {
        "one long key that nested dicts share" => {
            let dicts = [b"h\0}".repeat(100_000), b"s".repeat(100_001)].concat();
            pickled("endless.pth", &[b"}".as_slice(), &key, b"}", &dicts].concat())
        },
        "one shape of a hundred thousand dimensions" => tensor("endless.pth", KEY, &shape),
        "one long name of a class" =>
            pickled("endless.pth", &[b"}K\x01c".as_slice(), &[b'c'; 100_000], b"\nd\n)Rq\0s"].concat()),
        "a long name of a class that many entries share" =>
            pickled("endless.pth", &[b"}K\0", class.as_slice(), b"s(", &entries(60_000, b"h\0"), b"u"].concat()),
        "a parameter of a parameter, a million times over, under a hundred thousand names" =>
            pickled("endless.pth", &[b"}(K\0", functions.as_slice(), &calls, &entries(100_000, b"h\x01"), b"u"].concat()),
    };
    assert_reviewed("endless_pickles", &[cases]);
    Ok(())
}
