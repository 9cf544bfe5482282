//! Damaged files: random changes to small valid ones are errors or weights, never a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use attention_oracle::array::Random;
use candle_attention::weights::Checkpoint;

use crate::common::models;
use crate::*;

const ROUNDS: u64 = 3_000;

fn files() -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data");
    let of_models = ["book_mha/model.safetensors", "book_stack/model.safetensors", "torch_mha/model.safetensors"]
        .into_iter()
        .chain(["gpt2_conv1d/model.safetensors", "packed_by_head/model.safetensors", "book_mha/model.pth"]);
    let of_data = ["views.pth", "kinds.pth", "nested.pth", "odd.pth"].map(|name| data.join(name));
    of_models.map(|name| models().join(name)).chain(of_data).collect()
}

/// One to four changes, most of them where the names and sizes stand.
fn damage(bytes: &mut Vec<u8>, draws: &mut Random) {
    for _ in 0..=draws.up_to(3) {
        if bytes.is_empty() {
            return;
        }
        let zip = bytes.starts_with(b"PK");
        let at = match draws.up_to(3) {
            0 => draws.up_to(bytes.len() - 1),
            // A zip archive has its directory at the end.
            1 if zip => bytes.len() - 1 - draws.up_to(bytes.len().min(900) - 1),
            _ => draws.up_to(bytes.len().min(900) - 1),
        };
        match draws.up_to(6) {
            0 => bytes[at] ^= 1 << draws.up_to(7),
            1 => bytes[at] = draws.bits() as u8,
            2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][draws.up_to(4)],
            3 => bytes[at] = b"0123456789()tRQ.[]{}\",:"[draws.up_to(22)],
            4 => {
                let end = bytes.len().min(at + 1 + draws.up_to(7));
                bytes[at..end].fill(0xff);
            }
            5 => drop(bytes.remove(at)),
            _ => bytes.truncate(at),
        }
    }
}

/// Everything that reads a file.
fn read(path: &Path, book: &MultiHeadAttentionConfig) -> Result<()> {
    let checkpoint = Checkpoint::open(path)?;
    let vb = checkpoint.var_builder(DType::F32, &CPU)?;
    for (name, shape) in checkpoint.shapes() {
        drop(vb.get(shape, name));
        drop(vb.get_unchecked(name));
    }
    for prefix in checkpoint.attention_layers() {
        let vb = if prefix.is_empty() { vb.clone() } else { vb.pp(&prefix) };
        let Ok(layout) = WeightLayout::detect(&vb).and(checkpoint.detect(&prefix)) else { continue };
        drop(MultiHeadAttention::load(book, layout, vb.clone()));
        if let Ok(cfg) = checkpoint.infer_config(&prefix, layout, Some(2)) {
            drop(MultiHeadAttention::load(&cfg, layout, vb));
        }
    }
    Ok(())
}

#[test]
fn damaged_files_never_panic() -> Result<()> {
    let book = MultiHeadAttentionConfig::new(3, 2).with_out_dim(2).with_out_bias(true);
    let originals: Vec<_> = files().into_iter().map(std::fs::read).collect::<std::io::Result<_>>()?;
    let path = DIR.path().join("damaged");
    let mut readable = 0;
    for seed in 0..ROUNDS {
        let mut draws = Random::new(seed);
        let mut bytes = originals[seed as usize % originals.len()].clone();
        damage(&mut bytes, &mut draws);
        // A new file each time: file systems wait for the disk where one is written over.
        if path.exists() {
            std::fs::remove_file(&path)?;
        }
        std::fs::write(&path, &bytes)?;
        match catch_unwind(AssertUnwindSafe(|| read(&path, &book))) {
            Err(_) => panic!("seed {seed} panics"),
            Ok(Ok(())) => readable += 1,
            Ok(Err(error)) => {
                let text = error.to_string();
                assert!(text.starts_with("[weights] ") && text.contains("damaged"), "seed {seed}: {text}");
            }
        }
    }
    // Neither all nor none, or the damage would be of no use.
    assert!((ROUNDS / 50..ROUNDS * 49 / 50).contains(&readable), "{readable} of {ROUNDS} can be read");
    Ok(())
}
