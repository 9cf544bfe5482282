//! The persistent `mask` of the book's modules; tests/errors has what it tells of a config.

use candle_attention::weights::Naming;
use candle_attention::{MultiHeadAttentionConfig, WeightLayout};
use candle_core::{DType, Result, Tensor};

use crate::common::assert_close;
use crate::{CPU, invented};

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
