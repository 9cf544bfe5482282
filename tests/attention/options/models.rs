//! Attention modules of whole models.

use super::numbers;
use crate::*;

#[test]
fn layers_of_hunyuan_olmo_mpt_and_falcon_match_transformers() -> Result<()> {
    let norm = QkNorm { kind: QkNormKind::Rms, scope: QkNormScope::PerHead, eps: 1e-5 };
    let llama = Config::new(24, 6).with_num_kv_heads(3).with_causal(true).with_rope(RopeConfig::new(10_000.0));
    for (name, cfg) in [
        ("hunyuan", llama.clone().with_qk_norm(norm).with_norm_after_rope(true)),
        ("olmo", llama.with_clip_qkv(0.4)),
        // Six heads, with another exponent.
        ("mpt", Config::new(24, 6).with_causal(true).with_clip_qkv(0.6).with_alibi(AlibiConfig::BiasMax(3.0))),
        // Six heads, over positions that bf16 rounds.
        ("falcon", Config::new(12, 6).with_causal(true).with_alibi(AlibiConfig::Falcon)),
    ] {
        let numbers = numbers(&format!("{name}."));
        let layer = MultiHeadAttention::new(&cfg, builder(numbers.clone()))?;
        for backend in [Backend::Auto, Backend::Reference] {
            let ys = layer.forward_with(AttentionInput::new(&numbers["in"]).with_backend(backend))?;
            assert_near(&ys, &numbers["out"], 1e-5, &format!("{name}, {backend:?}"));
        }
    }
    Ok(())
}
