//! GGUF files of all types, and in parts, with changed headers: each is read, or is an error, without a panic and
//! without memory that its file does not explain.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use attention_oracle::array::Random;
use candle_attention::gguf::{self, GgufFile, LinearShard};
use candle_core::{DType, Result};

use crate::DEVICE;
use crate::common::{allocations, recorded};

/// The changed copies.
const ROUNDS: u64 = 120;
/// The bytes that a request may have for each byte of a file: 1.5 bits become a number in f32, next to scales.
const BYTES: usize = 64;
/// The bytes that reading any file may ask for at once.
const BASE: usize = 1 << 17;

/// The description of a tensor or a setting in a header.
struct Description {
    /// The first byte after the name.
    start: usize,
    is_tensor: bool,
}

/// Returns where the header describes each tensor and setting.
fn descriptions(file: &[u8]) -> Result<Vec<Description>> {
    let content = gguf::read(&mut std::io::Cursor::new(file))?;
    let tensors = gguf::tensor_names(&content).map(|name| (name.to_string(), true));
    let settings = content.metadata.keys().map(|key| (key.clone(), false));
    let mut names: Vec<_> = tensors.chain(settings).collect();
    names.sort();
    let mut all = Vec::new();
    for (name, is_tensor) in names {
        let stored = [&(name.len() as u64).to_le_bytes()[..], name.as_bytes()].concat();
        // The reader adds settings for types that Candle does not know.
        if let Some(at) = file.windows(stored.len()).position(|own| own == stored) {
            all.push(Description { start: at + stored.len(), is_tensor });
        }
    }
    Ok(all)
}

/// Writes a number of 4 or 8 bytes.
fn write(file: &mut [u8], at: usize, number: u64, size: usize) {
    if let Some(to) = file.get_mut(at..at + size) {
        to.copy_from_slice(&number.to_le_bytes()[..size]);
    }
}

/// Changes the dimensions, the type or the offset of a tensor, the type or the value of a setting, or any byte.
fn change(file: &mut Vec<u8>, described: &[Description], draws: &mut Random) {
    const NUMBERS: [u64; 14] = [0, 1, 2, 16, 31, 32, 33, 255, 256, 512, 4096, 1 << 31, 1 << 62, u64::MAX];
    let number = NUMBERS[draws.up_to(NUMBERS.len() - 1)];
    let Description { start, is_tensor } = described[draws.up_to(described.len() - 1)];
    match (draws.up_to(7), is_tensor) {
        // The number of dimensions, two of them, the type, and the offset.
        (0, true) => write(file, start, number, 4),
        (1, true) => write(file, start + 4, number, 8),
        (2, true) => write(file, start + 12, number, 8),
        (3 | 4, true) => write(file, start + 20, draws.up_to(48) as u64, 4),
        (5, true) => write(file, start + 24, number, 8),
        // The type of a value, and what a number or the length of a text or list is.
        (0 | 1, false) => write(file, start, draws.up_to(13) as u64, 4),
        (2 | 3, false) => write(file, start + 4, number, 4),
        (4 | 5, false) => write(file, start + 4, number, 8),
        (6, _) => {
            let end = described.iter().map(|own| own.start).max().unwrap_or(0) + 32;
            let at = draws.up_to(end.min(file.len()) - 1);
            file[at] = draws.bits() as u8;
        }
        _ => file.truncate(draws.up_to(file.len() - 1)),
    }
}

/// Opens a file, reads all of its tensors in every way, and returns the number of linear layers that can be read.
fn read(path: &Path) -> Result<usize> {
    let GgufFile { content, mut reader, .. } = gguf::open(path)?;
    let device = &DEVICE;
    drop(gguf::hf_config(&content));
    for layer in [0, 1] {
        drop(gguf::load_attention(&content, &mut reader, layer, device));
    }
    let mut were_read = 0;
    for name in gguf::tensor_names(&content).filter_map(|name| name.strip_suffix(".weight")) {
        were_read += usize::from(gguf::load_linear(&content, &mut reader, name, device).is_ok());
        drop(gguf::load_expert(&content, &mut reader, name, 1, device));
        for part in [LinearShard::Outputs(vec![1..2, 0..1]), LinearShard::Inputs { range: 0..32, has_bias: false }] {
            drop(gguf::load_linear_part(&content, &mut reader, name, &part, device));
        }
    }
    let names: Vec<_> = gguf::tensor_names(&content).map(String::from).collect();
    let dims = |name: &String| Some(gguf::tensor_info(&content, name)?.dims);
    let shapes: Vec<_> = names.iter().map(dims).collect();
    let vb = gguf::var_builder(Arc::new(content), reader, DType::F32, device);
    for (name, shape) in names.iter().zip(shapes) {
        if let Some(shape) = shape {
            drop(vb.get(shape, name));
        }
    }
    Ok(were_read)
}

/// Changes one of some files that one folder has, and returns how many of the changed copies can be opened.
fn changed(files: &[&str]) -> Result<u64> {
    let mut stored = Vec::new();
    let mut described = Vec::new();
    for file in files {
        let bytes = fs::read(recorded(&format!("hf/{file}")))?;
        described.push(descriptions(&bytes)?);
        stored.push(bytes);
    }
    let bytes: usize = stored.iter().map(Vec::len).sum();
    let mut opened = 0;
    for round in 0..ROUNDS {
        let mut draws = Random::new(round);
        let folder = tempfile::tempdir()?;
        let which = draws.up_to(files.len() - 1);
        for (index, file) in stored.iter().enumerate() {
            let mut file = file.clone();
            if index == which {
                for _ in 0..=draws.up_to(1) {
                    if !file.is_empty() {
                        change(&mut file, &described[index], &mut draws);
                    }
                }
            }
            fs::write(folder.path().join(format!("model-{:05}-of-{:05}.gguf", index + 1, files.len())), file)?;
        }
        // A panic is found by what was printed last.
        println!("{files:?}, round {round}");
        allocations::reset();
        let result = read(&folder.path().join(format!("model-00001-of-{:05}.gguf", files.len())));
        let largest = allocations::asked().largest;
        assert!(largest <= BASE + BYTES * bytes, "{largest} bytes at once for {bytes}");
        opened += u64::from(result.is_ok_and(|were_read| were_read > 0));
    }
    Ok(opened)
}

#[test]
fn changed_gguf_files_of_every_type_are_read_or_errors_within_the_memory_of_their_files() -> Result<()> {
    let opened = changed(&["gguf_types.gguf"])?;
    // Neither all nor none, or the changes would be of no use.
    assert!((ROUNDS / 10..ROUNDS * 9 / 10).contains(&opened), "{opened} of {ROUNDS} were opened");
    Ok(())
}

#[test]
fn changed_gguf_parts_are_read_or_errors_within_the_memory_of_their_files() -> Result<()> {
    let opened = changed(&["gguf_parts/model-00001-of-00002.gguf", "gguf_parts/model-00002-of-00002.gguf"])?;
    assert!((ROUNDS / 10..ROUNDS * 9 / 10).contains(&opened), "{opened} of {ROUNDS} were opened");
    Ok(())
}
