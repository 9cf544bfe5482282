//! The persistent `mask` of the book's modules.

use candle_attention::weights::{Checkpoint, Naming, Orientation, Storage};
use candle_attention::{MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result, Tensor};

use crate::common::assert_close;
use crate::{CPU, invented, load};

fn causal(heads: usize) -> MultiHeadAttentionConfig {
    MultiHeadAttentionConfig::new(4, heads).with_out_proj(false).with_causal(true).with_context_length(3)
}

/// torch.triu(torch.ones(3, 3), diagonal=1)
fn triangle() -> Result<Tensor> {
    Tensor::new(&[[0f32, 1., 1.], [0., 0., 1.], [0., 0., 0.]], &CPU)
}

fn masks(cfg: &MultiHeadAttentionConfig, layout: WeightLayout) -> Result<Vec<(String, Tensor)>> {
    let tensors = invented(cfg, layout)?.state_dict(layout)?;
    Ok(tensors.into_iter().filter(|(name, _)| name.contains("mask")).collect())
}

#[test]
fn causal_layers_get_their_mask_in_the_layouts_whose_modules_register_one() -> Result<()> {
    for layout in WeightLayout::all() {
        let expected: &[&str] = match layout {
            WeightLayout::Book | WeightLayout::Short => &["mask"],
            WeightLayout::StackedHeads(Naming::Book | Naming::Short, _) => &["heads.0.mask", "heads.1.mask"],
            // It has an output projection, and no such buffer.
            WeightLayout::Torch => continue,
            _ => &[],
        };
        let masks = masks(&causal(2), layout)?;
        assert_eq!(masks.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), expected, "{layout}");
        for (_, mask) in &masks {
            assert_eq!(mask.dtype(), DType::F32);
            assert_close(mask, &triangle()?, 0.0, &layout.to_string());
        }
    }
    Ok(())
}

#[test]
fn layers_without_causality_or_length_get_none() -> Result<()> {
    let bare = MultiHeadAttentionConfig::new(4, 2).with_out_proj(false);
    for cfg in [bare.clone(), bare.clone().with_causal(true), bare.with_context_length(3)] {
        for layout in [WeightLayout::Book, WeightLayout::StackedHeads(Naming::Short, Storage::Raw(Orientation::InOut))]
        {
            assert!(masks(&cfg, layout)?.is_empty(), "{layout}");
        }
    }
    Ok(())
}

#[test]
fn a_mask_in_the_file_is_passed_over_and_tells_the_context_length() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for layout in [WeightLayout::Book, WeightLayout::StackedHeads(Naming::Book, Storage::Linear)] {
        let layer = invented(&causal(2), layout)?;
        // A config without the length loads the same file.
        let written = layer.state_dict(layout)?;
        let read = load(&MultiHeadAttentionConfig::new(4, 2).with_out_proj(false), layout, &written)?;
        assert_eq!(read.config().context_length(), None);
        let path = folder.path().join("model.safetensors");
        layer.save(&path, layout)?;
        let inferred = Checkpoint::open(&path)?.infer_config("", layout, Some(2))?;
        assert_eq!((inferred.causal(), inferred.context_length()), (true, Some(3)), "{layout}");
    }
    Ok(())
}

#[test]
fn a_mask_that_no_memory_holds_is_an_error() -> Result<()> {
    let cfg = causal(2).with_context_length(u32::MAX as usize);
    for (layout, spelling) in
        [(WeightLayout::Book, "book"), (WeightLayout::StackedHeads(Naming::Short, Storage::Linear), "stacked:short")]
    {
        let error = invented(&cfg, layout)?.state_dict(layout).expect_err("64 EiB").to_string();
        let expected = format!(
            "[state_dict] the mask buffer of a context length of {} does not fit in memory (layout {spelling})",
            u32::MAX
        );
        assert!(error.starts_with(&expected), "{error}");
    }
    Ok(())
}

#[test]
fn a_square_mask_of_another_layout_says_nothing_about_causality() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let cfg = MultiHeadAttentionConfig::new(4, 2);
    let mut tensors = invented(&cfg, WeightLayout::Canonical)?.state_dict(WeightLayout::Canonical)?;
    tensors.push(("mask".into(), Tensor::zeros((3, 3), DType::F32, &CPU)?));
    let path = folder.path().join("model.safetensors");
    candle_core::safetensors::save(&tensors.into_iter().collect(), &path)?;
    let inferred = Checkpoint::open(&path)?.infer_config("", WeightLayout::Canonical, Some(2))?;
    assert_eq!((inferred.causal(), inferred.context_length()), (false, None));
    Ok(())
}
