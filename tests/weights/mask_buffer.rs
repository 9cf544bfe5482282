//! The persistent `mask` of the book's modules.

use candle_attention::weights::{Checkpoint, Naming, Storage};
use candle_attention::{MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result, Tensor};

use crate::common::{assert_close, error_text};
use crate::{CPU, invented, load};

const STACK: WeightLayout = WeightLayout::StackedHeads(Naming::Short, Storage::Linear);

fn bare() -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(4, 2).with_out_proj(false)
}

fn causal() -> MultiHeadAttentionConfig {
    bare().with_causal(true).with_context_length(3)
}

/// Causal layers have one in the layouts whose modules register one, and only with a length.
#[test]
fn a_mask_is_written_where_the_module_has_one() -> Result<()> {
    let triangle = Tensor::new(&[[0f32, 1., 1.], [0., 0., 1.], [0., 0., 0.]], &CPU)?;
    for cfg in [causal(), bare(), bare().with_causal(true), bare().with_context_length(3)] {
        for layout in WeightLayout::all() {
            let expected: &[&str] = match layout {
                // It has an output projection, and no such buffer.
                WeightLayout::Torch => continue,
                _ if cfg != causal() => &[],
                WeightLayout::Book | WeightLayout::Short => &["mask"],
                WeightLayout::StackedHeads(Naming::Book | Naming::Short, _) => &["heads.0.mask", "heads.1.mask"],
                _ => &[],
            };
            let mut tensors = invented(&cfg, layout)?.state_dict(layout)?;
            tensors.retain(|(name, _)| name.contains("mask"));
            assert_eq!(tensors.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), expected, "{layout}");
            for (_, mask) in &tensors {
                assert_eq!(mask.dtype(), DType::F32);
                assert_close(mask, &triangle, 0.0, &layout.to_string());
            }
        }
    }
    Ok(())
}

#[test]
fn a_mask_in_the_file_is_passed_over_and_tells_the_context_length() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("model.safetensors");
    for layout in [WeightLayout::Book, STACK] {
        // A config without the length loads the same file.
        let layer = invented(&causal(), layout)?;
        assert_eq!(load(&bare(), layout, &layer.state_dict(layout)?)?.config().context_length(), None);
        layer.save(&path, layout)?;
        let inferred = Checkpoint::open(&path)?.infer_config("", layout, Some(2))?;
        assert_eq!((inferred.causal(), inferred.context_length()), (true, Some(3)), "{layout}");
    }
    // Elsewhere a tensor of this name is something else.
    let mut tensors = invented(&bare(), WeightLayout::Canonical)?.state_dict(WeightLayout::Canonical)?;
    tensors.push(("mask".into(), Tensor::zeros((3, 3), DType::F32, &CPU)?));
    candle_core::safetensors::save(&tensors.into_iter().collect(), &path)?;
    let inferred = Checkpoint::open(&path)?.infer_config("", WeightLayout::Canonical, Some(2))?;
    assert_eq!((inferred.causal(), inferred.context_length()), (false, None));
    Ok(())
}

#[test]
fn a_mask_that_is_too_large_is_an_error() -> Result<()> {
    let cfg = causal().with_context_length(u32::MAX as usize);
    for layout in [WeightLayout::Book, STACK] {
        let expected = format!(
            "[state_dict] the mask buffer of a context length of {} does not fit in memory (layout {layout})",
            u32::MAX
        );
        assert_eq!(error_text(invented(&cfg, layout)?.state_dict(layout)), expected);
    }
    Ok(())
}
