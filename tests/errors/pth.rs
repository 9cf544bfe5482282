//! `.pth` files that are no state dicts, or that a state dict never is.

use std::io::Write;
use std::path::{Path, PathBuf};

use candle_attention::weights::{self, Checkpoint};
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig};
use candle_core::{DType, Result};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::common::models;
use crate::{CPU, Misuse, check, file};

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

const ARCHIVES: &[Misuse] = &[
    (
        "a truncated file",
        || open("truncated.pth", &valid()[..valid().len() / 2]),
        "[weights] cannot read DIR/truncated.pth: invalid Zip archive: Could not find EOCD",
    ),
    ("a file of two letters", || open("two.pth", b"PK"), "[weights] cannot read DIR/two.pth: invalid Zip archive: …"),
    (
        "a file of before PyTorch 1.6",
        || open("before_1_6.pth", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."),
        "[weights] DIR/before_1_6.pth is a pickle of PyTorch before 1.6; load it there and save it again",
    ),
    (
        "an archive of something else",
        || open("arrays.npz", &archive(&[("weight.npy", b"")])),
        "[weights] cannot read DIR/arrays.npz: a zip archive with 0 files named data.pkl, expected the one of torch.save",
    ),
    (
        "an archive of two pickles",
        || open("two_pickles.pth", &archive(&[("a/data.pkl", b""), ("b/data.pkl", b"")])),
        "[weights] cannot read DIR/two_pickles.pth: a zip archive with 2 files named data.pkl, expected the one of torch.save",
    ),
    (
        "numbers in the other byte order",
        || open("order.pth", &archive(&[("a/data.pkl", b"\x80\x02}."), ("a/byteorder", b"big")])),
        "[weights] cannot read DIR/order.pth: byte order \"big\", expected \"little\"",
    ),
    (
        "a whole module",
        || Checkpoint::open(data("module.pth")).map(drop),
        "[weights] cannot read …/module.pth: an object of torch.nn.modules.linear.Linear was saved, expected a state dict (`module.state_dict()`)",
    ),
    (
        "one tensor",
        || Checkpoint::open(data("tensor.pth")).map(drop),
        "[weights] cannot read …/tensor.pth: an object of torch._utils._rebuild_tensor_v2 was saved, expected a state dict (`module.state_dict()`)",
    ),
    (
        "another pickle protocol",
        || Checkpoint::open(data("protocol_4.pth")).map(drop),
        "[weights] cannot read …/protocol_4.pth: data.pkl: pickle protocol 4, expected torch.save's default, 2",
    ),
    (
        "the folder of a training loop in place of its layer",
        || candle_attention::WeightLayout::detect(&weights::open(data("nested.pth"), DType::F32, &CPU)?).map(drop),
        "[weight_layout] no attention weights at the root of the file: looked for …",
    ),
];

const TENSORS: &[Misuse] = &[
    (
        "a bias of eight-bit integers that the config denies",
        || odd(MultiHeadAttentionConfig::new(4, 1)),
        "[multi_head_attention] q_proj.bias is in the file, but the config says there is no such bias (layout canonical)",
    ),
    (
        "a bias of eight-bit integers",
        || odd(MultiHeadAttentionConfig::new(4, 1).with_q_bias(true)),
        "[multi_head_attention] q_proj.bias: …/odd.pth holds q_proj.bias as torch.CharStorage, which cannot be read (layout canonical)",
    ),
    (
        "a sparse weight",
        || odd_tensor("k_proj.weight"),
        "…/odd.pth holds k_proj.weight as torch._utils._rebuild_sparse_tensor, which cannot be read",
    ),
    (
        "a weight in a dtype of newer PyTorch",
        || odd_tensor("v_proj.weight"),
        "…/odd.pth holds v_proj.weight as torch._utils._rebuild_tensor_v3, which cannot be read",
    ),
    (
        "an expanded weight",
        || odd_tensor("o_proj.weight"),
        "shape [4, 4] repeats the 4 elements of a storage (an expanded tensor); save it after .contiguous()",
    ),
    (
        "a storage that is not there",
        || stored("no_storage.pth", b"ctorch\nFloatStorage\n", b"X\x01\0\0\x001", b"K\0K\x04\x85K\x01\x85"),
        "[weights] cannot read DIR/no_storage.pth: a/data/1: specified file not found in archive",
    ),
    (
        "a storage above the archive",
        || stored("outside.pth", b"ctorch\nFloatStorage\n", b"X\x05\0\0\0../../", b"K\0K\x04\x85K\x01\x85"),
        "[weights] cannot read DIR/outside.pth: …",
    ),
    (
        "more elements than the storage has",
        || tensor("more.pth", b"K\0K\x05\x85K\x01\x85"),
        "[weights] cannot read DIR/more.pth: the tensor t of shape [5], strides [1] and offset 0 reaches beyond its storage of 4 elements",
    ),
    (
        "an offset beyond the storage",
        || tensor("offset.pth", b"K\x01K\x04\x85K\x01\x85"),
        "[weights] cannot read DIR/offset.pth: the tensor t of shape [4], strides [1] and offset 1 reaches beyond its storage of 4 elements",
    ),
    (
        "an offset before the storage",
        || tensor("negative.pth", b"J\xff\xff\xff\xffK\x04\x85K\x01\x85"),
        "[weights] cannot read DIR/negative.pth: the tensor t is not described as torch.save does",
    ),
    (
        "an offset beyond counting",
        || tensor("largest.pth", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x04\x85K\x01\x85"),
        "[weights] cannot read DIR/largest.pth: the tensor t of shape [4], strides [1] and offset 9223372036854775807 reaches beyond its storage of 4 elements",
    ),
    (
        "strides beyond counting",
        || tensor("strides.pth", b"K\0K\x03\x85\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85"),
        "[weights] cannot read DIR/strides.pth: the tensor t of shape [3], strides [9223372036854775807] and offset 0 reaches beyond its storage of 4 elements",
    ),
    (
        "a shape beyond counting beside a zero",
        || tensor("zero.pth", b"K\0K\0\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7fK\x09\x87K\0K\0K\0\x87"),
        "[weights] cannot read DIR/zero.pth: the tensor t has shape [0, 9223372036854775807, 9], which is too large to address",
    ),
    (
        "a shape of few elements that claims many",
        || tensor("claim.pth", b"K\0J\0\0\0\x40J\0\0\0\x10\x86K\0K\0\x86"),
        "shape [1073741824, 268435456] repeats the 4 elements of a storage (an expanded tensor); save it after .contiguous()",
    ),
    (
        "fewer strides than dimensions",
        || tensor("ranks.pth", b"K\0K\x02K\x02\x86K\x01\x85"),
        "[weights] cannot read DIR/ranks.pth: the tensor t is not described as torch.save does",
    ),
    (
        "texts for sizes",
        || tensor("texts.pth", b"K\0X\x01\0\0\0a\x85K\x01\x85"),
        "[weights] cannot read DIR/texts.pth: the tensor t is not described as torch.save does",
    ),
    (
        "no shape",
        || tensor("short.pth", b""),
        "[weights] cannot read DIR/short.pth: the tensor t is not described as torch.save does",
    ),
    (
        "a call without arguments",
        || pickled("bare.pth", b"}X\x01\0\0\0tctorch._utils\n_rebuild_tensor_v2\n)Rs"),
        "[weights] cannot read DIR/bare.pth: the tensor t is not described as torch.save does",
    ),
    (
        "a call without a tuple",
        || pickled("untupled.pth", b"}X\x01\0\0\0tctorch._utils\n_rebuild_tensor_v2\nNRs"),
        "[weights] cannot read DIR/untupled.pth: the tensor t is not described as torch.save does",
    ),
    (
        "one name for two tensors",
        || {
            let call = b"ctorch._utils\n_rebuild_parameter\n)R";
            let twice = [b"}(X\x01\0\0\0t".as_slice(), call, b"X\x01\0\0\0t", call, b"u"].concat();
            pickled("same.pth", &twice)
        },
        "[weights] cannot read DIR/same.pth: the tensor t stands there twice",
    ),
];

const PICKLES: &[Misuse] = &[
    (
        "an empty pickle",
        || open("no_pickle.pth", &archive(&[("a/data.pkl", b"")])),
        "[weights] cannot read DIR/no_pickle.pth: data.pkl: the pickle ends early",
    ),
    (
        "a pickle of nothing",
        || pickled("nothing.pth", b""),
        "[weights] cannot read DIR/nothing.pth: data.pkl: an instruction finds too few objects",
    ),
    (
        "a pickle of None",
        || pickled("none.pth", b"N"),
        "[weights] cannot read DIR/none.pth: something else was saved, expected a state dict (`module.state_dict()`)",
    ),
    (
        "a text longer than the pickle",
        || pickled("text.pth", b"X\xff\xff\xff\xffabc"),
        "[weights] cannot read DIR/text.pth: data.pkl: the pickle ends early",
    ),
    (
        "an instruction of another protocol",
        || pickled("frame.pth", b"\x95\0\0\0\0\0\0\0\0"),
        "[weights] cannot read DIR/frame.pth: data.pkl: instruction 0x95, which no state dict has",
    ),
    (
        "a pop below the mark",
        || pickled("mark.pth", b"}(\x85"),
        "[weights] cannot read DIR/mark.pth: data.pkl: an instruction finds too few objects",
    ),
    (
        "a tuple without a mark",
        || pickled("unmarked.pth", b"}t"),
        "[weights] cannot read DIR/unmarked.pth: data.pkl: an instruction finds no mark",
    ),
    (
        "a key without a value",
        || pickled("odd_items.pth", b"}(K\x01u"),
        "[weights] cannot read DIR/odd_items.pth: data.pkl: items are set of something that is no dict",
    ),
    (
        "items of a number",
        || pickled("number.pth", b"K\x01K\x02K\x03s"),
        "[weights] cannot read DIR/number.pth: data.pkl: items are set of something that is no dict",
    ),
    (
        "an object before it is made",
        || pickled("memo.pth", b"h\x07"),
        "[weights] cannot read DIR/memo.pth: data.pkl: an object is used before it is made",
    ),
];

fn odd(cfg: MultiHeadAttentionConfig) -> Result<()> {
    MultiHeadAttention::new(&cfg, weights::open(data("odd.pth"), DType::F32, &CPU)?).map(drop)
}

fn odd_tensor(name: &str) -> Result<()> {
    weights::open(data("odd.pth"), DType::F32, &CPU)?.get((4, 4), name).map(drop)
}

#[test]
fn archives_that_hold_no_state_dict_are_named() {
    check(ARCHIVES);
}

#[test]
fn tensors_that_cannot_be_read_are_named() {
    check(TENSORS);
}

#[test]
fn pickles_that_do_not_add_up_are_errors() {
    check(PICKLES);
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
    // A dict in itself, and two in each other.
    pickled("itself.pth", b"}q\0X\x01\0\0\0ah\0s")?;
    pickled("each_other.pth", b"}q\0X\x01\0\0\0a}q\x01X\x01\0\0\0bh\0ss")?;
    Ok(())
}
