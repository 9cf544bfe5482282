//! Rotary positions that continue from the cached positions of each sequence. `make.py` writes the numbers of
//! transformers.

use crate::*;

/// As in `make.py`.
const ORIGINAL: usize = 6;
const CALLS: [(usize, [usize; 2]); 5] = [(5, [0, 2]), (1, [0, 0]), (1, [0, 0]), (3, [1, 0]), (1, [0, 0])];

/// Checks frequencies that follow the length of a call: cached keys stay as they were rotated, and the longest sequence
/// of a batch decides for all.
#[test]
fn rope_scaling_by_length_with_cache_matches_transformers() -> Result<()> {
    let tensors = recorded_tensors("cache/numbers.safetensors")?;
    let factors = |step: f64| (0..4).map(|i| 1.0 + step * f64::from(i)).collect();
    let long = RopeScaling::LongRope {
        short_factor: factors(0.1),
        long_factor: factors(1.7),
        original_context: ORIGINAL,
        factor: Some(4.0),
        attention_factor: None,
    };
    for (name, scaling) in
        [("dynamic", RopeScaling::Dynamic { factor: 2.5, original_context: ORIGINAL }), ("longrope", long)]
    {
        let rope = RopeConfig::new(100.0).with_scaling(scaling);
        let cfg = Config::new(16, 2).with_num_kv_heads(1).with_head_dim(8).with_causal(true).with_rope(rope);
        let layer = MultiHeadAttention::new(&cfg, VarBuilder::from_tensors(tensors.clone(), DType::F32, &DEVICE))?;
        let mut cache = AttentionCache::default();
        let mut at = 0;
        let mut found = Vec::new();
        for (t, padding) in CALLS {
            let xs = tensors["xs"].narrow(1, at, t)?;
            let ys = layer.forward_with(AttentionInput::new(&xs).with_cache(&mut cache).with_starts(&padding))?;
            // The numbers have zeros at padding.
            let own: Vec<f32> =
                padding.iter().flat_map(|&padding| (0..t).map(move |i| f32::from(u8::from(i >= padding)))).collect();
            found.push(ys.broadcast_mul(&Tensor::from_vec(own, (2, t, 1), &DEVICE)?)?);
            at += t;
        }
        assert_eq!(cache.lens(), [10, 9]);
        let expected = &tensors[&format!("{name}.ys")];
        let largest = values(expected).into_iter().map(f64::abs).fold(0.0, f64::max);
        assert_close(&Tensor::cat(&found, 1)?, expected, 1e-6 * largest, name);
        let whole = layer.forward(&tensors["xs"].narrow(0, 0, 1)?)?;
        let last = Tensor::cat(&found, 1)?.narrow(0, 0, 1)?.narrow(1, 10, 1)?;
        let difference = values(&(whole.narrow(1, 10, 1)? - last)?);
        assert!(difference.iter().any(|difference| difference.abs() > 1e-3), "{name} does not follow the length");
    }
    Ok(())
}

fn config() -> Config {
    Config::new(8, 2).with_causal(true).with_rope(RopeConfig::new(100.0))
}

/// Checks a sequence that has ended and waits for the others of its batch, with padding.
#[test]
fn rope_positions_do_not_advance_for_sequence_without_tokens() -> Result<()> {
    let scaling = RopeScaling::Dynamic { factor: 2.0, original_context: 4 };
    let short = config().with_context_length(4);
    for cfg in [&short, &config().with_rope(RopeConfig::new(100.0).with_scaling(scaling))] {
        let layer = layer(cfg)?;
        let mut cache = AttentionCache::default();
        let prompt = wave(2, 4, 8, 0.0)?;
        let token = wave(2, 1, 8, 9.0)?;
        layer.forward_with(AttentionInput::new(&prompt).with_cache(&mut cache).with_valid_lens(&[4, 2]))?;
        let ys = layer.forward_with(AttentionInput::new(&token).with_cache(&mut cache).with_valid_lens(&[0, 1]))?;
        let alone = Tensor::cat(&[&prompt.narrow(0, 1, 1)?.narrow(1, 0, 2)?, &token.narrow(0, 1, 1)?], 1)?;
        let expected = layer.forward(&alone)?.narrow(1, 2, 1)?;
        assert_close(&ys.narrow(0, 1, 1)?, &expected, 1e-5, "the other sequence");
        assert_eq!(cache.lens(), [4, 3]);
    }
    Ok(())
}
