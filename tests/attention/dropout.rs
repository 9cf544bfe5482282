//! Dropout on the weights: when, how much, and from which source.

use crate::*;

crate::on_each_device!(
    dropout_in_training_drops_fraction_p_and_rescales_kept_weights,
    dropout_outside_training_or_with_p_0_or_1_drops_nothing_or_all,
    dropout_applies_to_output_and_not_to_lse,
    dropout_with_equal_seed_draws_equal_mask,
);

/// Returns one call for each dtype of the device.
fn calls(device: &Device) -> Result<Vec<Call>> {
    let dims = Dims { b: 2, h: 4, h_kv: 2, t_q: 40, t_kv: 50, d: 8, d_v: 6 };
    let call = |&dtype| Call::new(&Recipe::plain(dims, vec![vec![Kind::Causal]], dtype).case(), dtype, device);
    dtypes(device).iter().map(call).collect()
}

fn with(call: &Call, options: SdpaOptions) -> Result<AttentionOutput> {
    Call { options, ..call.clone() }.with_weights()
}

fn training(p: f64) -> SdpaOptions {
    reference().with_dropout(p, true)
}

fn seeded(p: f64, seed: u64) -> SdpaOptions {
    training(p).with_dropout_seed(&TorchSeed::new(seed))
}

/// Returns the sum of one rounding of the result and one of the f32 arithmetic before it.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 3e-7,
        DType::F16 => 2e-3,
        _ => 1e-2,
    }
}

/// Checks that the fraction of weights above zero that is kept is 1 - p to within five standard deviations, and that a
/// kept weight is the weight over 1 - p. With a seed, the weights that are kept are those that PyTorch keeps.
fn dropout_in_training_drops_fraction_p_and_rescales_kept_weights(device: &Device) -> Result<()> {
    for call in calls(device)? {
        let plain = values(&call.with_weights()?.weights);
        let dtype = call.q.dtype();
        for p in [0.1, 0.5, 0.9] {
            let drawn = values(&TorchSeed::new(11).dropout_keep((2, 4, 40, 50), p)?);
            for (options, pytorchs) in [(training(p), None), (seeded(p, 11), Some(drawn))] {
                let mut kept = 0.0;
                let mut all = 0.0;
                for (n, after) in values(&with(&call, options)?.weights).into_iter().enumerate() {
                    let before = plain[n];
                    let is_kept = after != 0.0;
                    assert!(pytorchs.as_ref().is_none_or(|keep| is_kept == (keep[n] != 0.0 && before != 0.0)), "{n}");
                    // A weight of half precision may have been rounded to nothing.
                    if before < 1e-3 {
                        continue;
                    }
                    kept += f64::from(u8::from(is_kept));
                    all += 1.0;
                    let ratio = after * (1.0 - p) / before;
                    assert!(!is_kept || (ratio - 1.0).abs() < rounding(dtype), "{before} became {after}, p = {p}");
                }
                let deviation = (all * p * (1.0 - p)).sqrt();
                let near = (kept - all * (1.0 - p)).abs() <= 5.0 * deviation;
                assert!(all > 2000.0 && near, "{kept} of {all} kept for p = {p} in {dtype:?}");
            }
        }
    }
    Ok(())
}

/// Checks probabilities next to 0 and 1 too, which are 0 and 1 in f32, the type in which random numbers are drawn.
fn dropout_outside_training_or_with_p_0_or_1_drops_nothing_or_all(device: &Device) -> Result<()> {
    for call in calls(device)? {
        let plain = call.with_weights()?;
        let nothing = AttentionOutput { output: plain.output.zeros_like()?, weights: plain.weights.zeros_like()? };
        for (options, expected) in [
            (reference().with_dropout(0.7, false), &plain),
            (reference().with_dropout(1.0, false).with_dropout_seed(&TorchSeed::new(1)), &plain),
            (training(0.0), &plain),
            (seeded(0.0, 3), &plain),
            (training(1.0), &nothing),
            (seeded(1.0, 3), &nothing),
        ] {
            let output = with(&call, options)?;
            assert_close(&output.output, &expected.output, 0.0, "context");
            assert_close(&output.weights, &expected.weights, 0.0, "weights");
        }
        let count = |tensor: &Tensor| values(tensor).into_iter().filter(|&weight| weight != 0.0).count();
        let all = count(&plain.weights);
        for (p, expected) in [(1e-60, all), (1.0 - 1e-9, 0), (1.0 - f64::EPSILON / 2.0, 0)] {
            for options in [training(p), seeded(p, 3)] {
                let kept = count(&with(&call, options)?.weights);
                assert!(kept.abs_diff(expected) < 5, "{kept} of {all} kept for p = {p:?}");
            }
        }
    }
    Ok(())
}

fn dropout_applies_to_output_and_not_to_lse(device: &Device) -> Result<()> {
    for call in calls(device)? {
        let output = with(&call, training(0.5))?;
        let rounding = rounding(call.q.dtype());
        let wide = |x: &Tensor| x.to_device(&CPU)?.to_dtype(DType::F64);
        let v = wide(&call.v)?.unsqueeze(2)?.broadcast_as((2, 2, 2, 50, 6))?.reshape((2, 4, 50, 6))?;
        let expected = wide(&output.weights)?.matmul(&v)?;
        // Weights that are kept are twice as large, and values are up to 2.
        let most = 4.0 * (50.0 * rounding).min(4.0 * rounding.max(1e-5)) + 1e-6;
        assert_close(&wide(&output.output)?, &expected, most, &format!("{:?}", call.q.dtype()));
        let plain = call.with_lse()?;
        let dropped = Call { options: training(0.5), ..call }.with_lse()?;
        assert_close(&dropped.1, &plain.1, 0.0, "lse");
        assert!(values(&dropped.0) != values(&plain.0), "the context is that after dropout");
    }
    Ok(())
}

/// Checks that without a seed, every call draws another mask.
fn dropout_with_equal_seed_draws_equal_mask(device: &Device) -> Result<()> {
    for call in calls(device)? {
        let run = |options: &SdpaOptions| with(&call, options.clone());
        assert!(values(&run(&training(0.5))?.weights) != values(&run(&training(0.5))?.weights));
        let seed = TorchSeed::new(7);
        let options = training(0.5).with_dropout_seed(&seed);
        let first = run(&options)?;
        let second = run(&options)?;
        assert!(values(&first.weights) != values(&second.weights), "one stream, drawn from in turn");
        seed.manual_seed(7);
        assert_close(&run(&options)?.weights, &first.weights, 0.0, "the stream started again");
        let alone = Call { options, ..call.clone() }.context()?;
        assert_close(&alone, &second.output, 0.0, "the context alone draws the same");
        assert_close(&run(&seeded(0.5, 7))?.weights, &first.weights, 0.0, "another generator of that seed");
    }
    Ok(())
}
