//! `.pth` files that are no state dicts, or that a state dict never is.

use std::io::Write;
use std::path::{Path, PathBuf};

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use candle_core::{DType, Result};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::common::models;
use crate::{CPU, Case, file};

fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn valid() -> Vec<u8> {
    std::fs::read(models().join("book_mha/model.pth")).expect("models/ is there")
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

/// A file of torch.save with this pickle and one storage, `0`, of 16 bytes.
fn pickled(name: &str, pickle: &[u8]) -> Result<()> {
    open(name, &archive(&[("a/data.pkl", &[b"\x80\x02", pickle, b"."].concat()), ("a/data/0", &[0; 16])]))
}

fn open(name: &str, bytes: &[u8]) -> Result<()> {
    let checkpoint = Checkpoint::open(file(name, bytes))?;
    let vb = checkpoint.var_builder(DType::F32, &CPU)?;
    checkpoint.shapes().try_for_each(|(name, shape)| vb.get(shape, name).map(drop))
}

/// A state dict whose one tensor `t` is described by these instructions: offset, shape, strides.
fn tensor(name: &str, view: &[u8]) -> Result<()> {
    stored(name, b"ctorch\nFloatStorage\n", b"X\x01\0\0\x000", view)
}

/// The same with the class and the key of its storage.
fn stored(name: &str, class: &[u8], key: &[u8], view: &[u8]) -> Result<()> {
    let storage = [b"(X\x07\0\0\0storage", class, key, b"X\x03\0\0\0cpuK\x04tQ"].concat();
    let call = [b"ctorch._utils\n_rebuild_tensor_v2\n(", storage.as_slice(), view, b"\x89NtR"].concat();
    pickled(name, &[b"}X\x01\0\0\0t", call.as_slice(), b"s"].concat())
}

pub const ARCHIVES: &[Case] = cases! {
    "a truncated file" => open("truncated.pth", &valid()[..valid().len() / 2]),
    "a file of two letters" => open("two.pth", b"PK"),
    "a file of before PyTorch 1.6" =>
        open("before_1_6.pth", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."),
    "an archive of something else" => open("arrays.npz", &archive(&[("weight.npy", b"")])),
    "an archive of two pickles" => open("two_pickles.pth", &archive(&[("a/data.pkl", b""), ("b/data.pkl", b"")])),
    "numbers in the other byte order" =>
        open("order.pth", &archive(&[("a/data.pkl", b"\x80\x02}."), ("a/byteorder", b"big")])),
    "a whole module" => Checkpoint::open(data("module.pth")),
    "one tensor" => Checkpoint::open(data("tensor.pth")),
    "another pickle protocol" => Checkpoint::open(data("protocol_4.pth")),
    "the folder of a training loop in place of its layer" =>
        candle_attention::WeightLayout::detect(&weights::open(data("nested.pth"), DType::F32, &CPU)?),
};

pub const TENSORS: &[Case] = cases! {
    "a bias of eight-bit integers that the config denies" => odd(MultiHeadAttentionConfig::new(4, 1)),
    "a bias of eight-bit integers" => odd(MultiHeadAttentionConfig::new(4, 1).with_q_bias(true)),
    "a sparse weight" => odd_tensor("k_proj.weight"),
    "a weight in a dtype of newer PyTorch" => odd_tensor("v_proj.weight"),
    "an expanded weight" => odd_tensor("o_proj.weight"),
    "a storage that is not there" =>
        stored("no_storage.pth", b"ctorch\nFloatStorage\n", b"X\x01\0\0\x001", b"K\0K\x04\x85K\x01\x85"),
    "a storage above the archive" =>
        stored("outside.pth", b"ctorch\nFloatStorage\n", b"X\x05\0\0\0../../", b"K\0K\x04\x85K\x01\x85"),
    "more elements than the storage has" => tensor("more.pth", b"K\0K\x05\x85K\x01\x85"),
    "an offset beyond the storage" => tensor("offset.pth", b"K\x01K\x04\x85K\x01\x85"),
    "an offset before the storage" => tensor("negative.pth", b"J\xff\xff\xff\xffK\x04\x85K\x01\x85"),
    "an offset beyond counting" => tensor("largest.pth", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x04\x85K\x01\x85"),
    "strides beyond counting" => tensor("strides.pth", b"K\0K\x03\x85\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85"),
    "a shape beyond counting beside a zero" =>
        tensor("zero.pth", b"K\0K\0\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x09\x87K\0K\0K\0\x87"),
    "a shape of few elements that claims many" => tensor("claim.pth", b"K\0J\0\0\0\x40J\0\0\0\x10\x86K\0K\0\x86"),
    "fewer strides than dimensions" => tensor("ranks.pth", b"K\0K\x02K\x02\x86K\x01\x85"),
    "texts for sizes" => tensor("texts.pth", b"K\0X\x01\0\0\0a\x85K\x01\x85"),
    "no shape" => tensor("short.pth", b""),
    "a call without arguments" => pickled("bare.pth", b"}X\x01\0\0\0tctorch._utils\n_rebuild_tensor_v2\n)Rs"),
    "a call without a tuple" => pickled("untupled.pth", b"}X\x01\0\0\0tctorch._utils\n_rebuild_tensor_v2\nNRs"),
    "one name for two tensors" => {
        let call = b"ctorch._utils\n_rebuild_parameter\n)R";
        let twice = [b"}(X\x01\0\0\0t".as_slice(), call, b"X\x01\0\0\0t", call, b"u"].concat();
        pickled("same.pth", &twice)
    },
};

pub const PICKLES: &[Case] = cases! {
    "an empty pickle" => open("no_pickle.pth", &archive(&[("a/data.pkl", b"")])),
    "a pickle of nothing" => pickled("nothing.pth", b""),
    "a pickle of None" => pickled("none.pth", b"N"),
    "a text longer than the pickle" => pickled("text.pth", b"X\xff\xff\xff\xffabc"),
    "an instruction of another protocol" => pickled("frame.pth", b"\x95\0\0\0\0\0\0\0\0"),
    "a pop below the mark" => pickled("mark.pth", b"}(\x85"),
    "a tuple without a mark" => pickled("unmarked.pth", b"}t"),
    "a key without a value" => pickled("odd_items.pth", b"}(K\x01u"),
    "items of a number" => pickled("number.pth", b"K\x01K\x02K\x03s"),
    "an object before it is made" => pickled("memo.pth", b"h\x07"),
};

/// So many entries of a dict, with numbers for keys and one value.
fn entries(count: u32, value: &[u8]) -> Vec<u8> {
    (1..=count).flat_map(|key| [b"J".as_slice(), &key.to_le_bytes(), value].concat()).collect()
}

fn odd(cfg: MultiHeadAttentionConfig) -> Result<()> {
    MultiHeadAttention::new(&cfg, weights::open(data("odd.pth"), DType::F32, &CPU)?).map(drop)
}

fn odd_tensor(name: &str) -> Result<()> {
    weights::open(data("odd.pth"), DType::F32, &CPU)?.get((4, 4), name).map(drop)
}

/// What would fill the memory or the stack of a reader that builds Python's objects.
#[test]
fn pickles_that_nest_or_share_without_end_are_read_in_proportion() -> Result<()> {
    // A tuple in a tuple, a million times over; the dict on top holds it.
    pickled("nested.pth", &[b"}K\x01)".as_slice(), &vec![0x85; 1_000_000], b"s"].concat())?;
    // Each tuple holds the one before it twice.
    let doubled = b"q\0h\0\x86".repeat(10_000);
    pickled("doubled.pth", &[b"}K\x01)".as_slice(), &doubled, b"s"].concat())?;
    // Few bytes that describe long names, many times: a key of a kilobyte shared by nested dicts, and by many entries.
    let key = [b"X\x90\x01\0\0".as_slice(), &[b'k'; 400], b"q\0"].concat();
    let nested = [b"}".as_slice(), &key, b"}", &b"h\0}".repeat(100_000), &b"s".repeat(100_001)].concat();
    let error = crate::common::error_text(pickled("long_names.pth", &nested));
    assert!(error.ends_with("long_names.pth: a name of 1202 bytes, expected at most 1024"), "{error}");
    // Tensors of a hundred thousand dimensions that share one shape.
    let shape = [b"(".as_slice(), &b"K\x01".repeat(100_000), b"tq\0"].concat();
    let error = crate::common::error_text(tensor("rank.pth", &[b"K\0", shape.as_slice(), b"h\0"].concat()));
    assert!(error.ends_with("rank.pth: the tensor t is not described as torch.save does"), "{error}");
    // One long name of a class that many entries share.
    let class = [b"c".as_slice(), &[b'c'; 100_000], b"\nd\n)Rq\0"].concat();
    let error = crate::common::error_text(pickled("class.pth", &[b"}K\x01".as_slice(), &class, b"s"].concat()));
    assert!(error.ends_with("class.pth: data.pkl: a name of 100000 bytes, expected at most 1024"), "{error}");
    // A class of a long name, of which many entries are objects.
    let class = [b"c".as_slice(), &[b'c'; 1000], b"\n", &[b'd'; 1000], b"\n)Rq\0"].concat();
    let kinds = [b"}K\0", class.as_slice(), b"s(", &entries(60_000, b"h\0"), b"u"].concat();
    let error = crate::common::error_text(pickled("kinds.pth", &kinds));
    assert!(error.ends_with("kinds.pth: names of more than 67108864 bytes in all"), "{error}");
    // A parameter of a parameter, a million times over, under a hundred thousand names.
    let functions = [b"ctorch._utils\n_rebuild_parameter\nq\0".as_slice(), &b"h\0".repeat(999_999)].concat();
    let calls = [b"K\x01".as_slice(), &b"\x85R".repeat(1_000_000), b"q\x01"].concat();
    let chain = [b"}(K\0", functions.as_slice(), &calls, &entries(100_000, b"h\x01"), b"u"].concat();
    let error = crate::common::error_text(pickled("chain.pth", &chain));
    assert!(error.ends_with("chain.pth: the tensor 0 is wrapped in more than 16 calls"), "{error}");
    // A dict in itself, and two in each other.
    pickled("itself.pth", b"}q\0X\x01\0\0\0ah\0s")?;
    pickled("each_other.pth", b"}q\0X\x01\0\0\0a}q\x01X\x01\0\0\0bh\0ss")?;
    Ok(())
}
