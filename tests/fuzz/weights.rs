//! A whole file of weights, and the layers that are found in it.

use candle_attention::weights::Checkpoint;
use candle_attention::{MultiHeadAttention, MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Device, Result};

/// Returns whether the file can be read. Where it cannot, the error names the file.
pub fn run(bytes: &[u8]) -> bool {
    // A new file each time: file systems wait for the disk where one is written over.
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), bytes).expect("its bytes");
    let Err(error) = Checkpoint::open(file.path()).and_then(|checkpoint| read(&checkpoint)) else { return true };
    let text = error.to_string();
    let path = file.path().display().to_string();
    assert!(text.starts_with("[weights] ") && text.contains(&path), "{text}");
    false
}

/// Calls every function that reads a file.
fn read(checkpoint: &Checkpoint) -> Result<()> {
    let vb = checkpoint.var_builder(DType::F32, &Device::Cpu)?;
    for (name, shape) in checkpoint.shapes() {
        drop(vb.get(shape, name));
        drop(vb.get_unchecked(name));
    }
    let book = MultiHeadAttentionConfig::new(3, 2).with_out_dim(2).with_out_bias(true);
    for prefix in checkpoint.attention_layers() {
        let vb = if prefix.is_empty() { vb.clone() } else { vb.pp(&prefix) };
        let Ok(layout) = WeightLayout::detect(&vb).and(checkpoint.detect(&prefix)) else { continue };
        drop(MultiHeadAttention::load(&book, layout, vb.clone()));
        if let Ok(cfg) = checkpoint.infer_config(&prefix, layout, Some(2)) {
            drop(MultiHeadAttention::load(&cfg, layout, vb));
        }
    }
    Ok(())
}
