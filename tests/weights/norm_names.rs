//! Norms of queries and keys under the names of other libraries.

use candle_attention::{MultiHeadAttentionConfig, QkNorm, QkNormKind, QkNormScope, WeightLayout};
use candle_core::Result;

use crate::{bits, invented, load};

/// Checks that the other names of modules and weights are read and saved.
#[test]
fn norms_of_flax_and_torchtune_are_read_under_their_names() -> Result<()> {
    for (layout, names) in [
        (WeightLayout::Flax, ["query_ln.scale", "key_ln.scale"]),
        (WeightLayout::Torchtune, ["q_norm.scale", "k_norm.scale"]),
    ] {
        for kind in [QkNormKind::Rms, QkNormKind::RmsPlusOne, QkNormKind::Layer, QkNormKind::LayerNoBias] {
            for scope in [QkNormScope::PerHead, QkNormScope::PerHeadWeights, QkNormScope::Projection] {
                let norm = QkNorm { kind, scope, eps: 1e-6 };
                let cfg = MultiHeadAttentionConfig::new(8, 2).with_qk_norm(norm);
                let layer = invented(&cfg, layout)?;
                let saved = layer.state_dict(layout)?;
                for name in names {
                    assert!(saved.iter().any(|(own, _)| own == name), "{layout}: {name}");
                }
                assert_eq!(bits(&load(&cfg, layout, &saved)?)?, bits(&layer)?, "{layout}, {norm:?}");
                // In another layout, and refused without the option.
                let canonical: Vec<_> = layer
                    .state_dict(WeightLayout::Canonical)?
                    .into_iter()
                    .map(|(own, tensor)| (own.replace("_norm.weight", "_norm.scale"), tensor))
                    .collect();
                assert_eq!(bits(&load(&cfg, WeightLayout::Canonical, &canonical)?)?, bits(&layer)?, "{norm:?}");
                let text = match load(&cfg.clone().with_qk_norm(None), layout, &saved) {
                    Ok(_) => panic!("{layout}: the norm was passed over"),
                    Err(error) => error.to_string(),
                };
                assert!(text.contains(" is in the file, but the config says there is no qk_norm"), "{text}");
            }
        }
    }
    Ok(())
}
