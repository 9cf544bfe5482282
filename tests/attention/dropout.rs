//! Dropout on the weights: when, how much, and from which source.

use candle_attention::init::TorchSeed;
use candle_attention::{
    AttentionMask, AttentionOutput, SdpaOptions, scaled_dot_product_attention,
    scaled_dot_product_attention_with_lse as with_lse, scaled_dot_product_attention_with_weights as with_weights,
};
use candle_core::{DType, Device, Result, Tensor, Var};

use crate::call::reference;
use crate::common::{assert_close, values};
use crate::recipe::dtypes;

crate::on_each_device!(
    without_training_nothing_is_dropped,
    training_drops_a_share_and_scales_the_rest,
    probabilities_of_0_and_1_drop_none_and_all,
    probabilities_next_to_0_and_1_drop_nearly_none_and_all,
    the_context_mixes_the_weights_after_dropout,
    the_log_sum_exp_is_that_before_dropout,
    without_a_seed_every_call_draws_anew,
    a_seed_draws_the_same_again,
    a_seed_draws_pytorchs_mask_for_the_weights,
    dropped_weights_pass_no_gradient,
);

struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
}

impl Inputs {
    fn new(dtype: DType, device: &Device) -> Result<Self> {
        let random = |shape: [usize; 4]| TorchSeed::new(5).randn(&shape[..])?.to_dtype(dtype)?.to_device(device);
        let (q, k, v) = (random([2, 4, 40, 8])?, random([2, 2, 50, 8])?, random([2, 2, 50, 6])?);
        Ok(Self { q, k, v, mask: AttentionMask::causal() })
    }

    fn attend(&self, options: &SdpaOptions) -> Result<AttentionOutput> {
        with_weights(&self.q, &self.k, &self.v, &self.mask, options)
    }

    fn context(&self, options: &SdpaOptions) -> Result<Tensor> {
        scaled_dot_product_attention(&self.q, &self.k, &self.v, &self.mask, options)
    }
}

/// Runs a test for each dtype of the device.
#[track_caller]
fn each(device: &Device, test: impl Fn(&Inputs, DType) -> Result<()>) {
    for &dtype in dtypes(device) {
        Inputs::new(dtype, device).and_then(|inputs| test(&inputs, dtype)).expect("the calls run");
    }
}

fn training(p: f64) -> SdpaOptions {
    reference().with_dropout(p, true)
}

/// One rounding of the result and one of the f32 arithmetic before it.
fn rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-14,
        DType::F32 => 3e-7,
        DType::F16 => 2e-3,
        _ => 1e-2,
    }
}

fn without_training_nothing_is_dropped(device: &Device) {
    each(device, |inputs, _| {
        let plain = inputs.attend(&reference())?;
        for options in [reference().with_dropout(0.7, false), reference().with_dropout(1.0, false)] {
            let output = inputs.attend(&options.with_dropout_seed(&TorchSeed::new(1)))?;
            assert_close(&output.context, &plain.context, 0.0, "context");
            assert_close(&output.weights, &plain.weights, 0.0, "weights");
        }
        Ok(())
    });
}

/// The share that is kept of the weights above zero is 1 - p to within five standard deviations, and a kept weight is
/// the weight over 1 - p.
#[track_caller]
fn assert_dropped(dropped: &Tensor, plain: &Tensor, p: f64, dtype: DType) {
    let (mut kept, mut all) = (0usize, 0usize);
    for (after, before) in values(dropped).into_iter().zip(values(plain)) {
        // A weight of half precision may have been rounded to nothing.
        if before < 1e-3 {
            continue;
        }
        all += 1;
        if after != 0.0 {
            kept += 1;
            let ratio = after * (1.0 - p) / before;
            assert!((ratio - 1.0).abs() < rounding(dtype), "{before} became {after} for p = {p} in {dtype:?}");
        }
    }
    let deviation = (all as f64 * p * (1.0 - p)).sqrt();
    let expected = all as f64 * (1.0 - p);
    assert!(all > 2000, "{all} weights are enough to count");
    assert!((kept as f64 - expected).abs() <= 5.0 * deviation, "{kept} of {all} kept for p = {p}");
}

fn training_drops_a_share_and_scales_the_rest(device: &Device) {
    each(device, |inputs, dtype| {
        let plain = inputs.attend(&reference())?;
        for p in [0.1, 0.5, 0.9] {
            assert_dropped(&inputs.attend(&training(p))?.weights, &plain.weights, p, dtype);
            let seeded = inputs.attend(&training(p).with_dropout_seed(&TorchSeed::new(3)))?;
            assert_dropped(&seeded.weights, &plain.weights, p, dtype);
        }
        Ok(())
    });
}

fn probabilities_of_0_and_1_drop_none_and_all(device: &Device) {
    each(device, |inputs, _| {
        let plain = inputs.attend(&reference())?;
        for seeded in [false, true] {
            let options = |p| if seeded { training(p).with_dropout_seed(&TorchSeed::new(3)) } else { training(p) };
            let none = inputs.attend(&options(0.0))?;
            assert_close(&none.weights, &plain.weights, 0.0, "p = 0");
            assert_close(&none.context, &plain.context, 0.0, "p = 0");
            let all = inputs.attend(&options(1.0))?;
            assert_close(&all.weights, &plain.weights.zeros_like()?, 0.0, "p = 1");
            assert_close(&all.context, &plain.context.zeros_like()?, 0.0, "p = 1");
        }
        Ok(())
    });
}

/// As f32, which generators draw, these are 0 and 1; the call runs all the same.
fn probabilities_next_to_0_and_1_drop_nearly_none_and_all(device: &Device) {
    each(device, |inputs, _| {
        let count = |tensor: &Tensor| values(tensor).into_iter().filter(|&weight| weight != 0.0).count();
        let all = count(&inputs.attend(&reference())?.weights);
        for (p, expected) in [(1e-60, all), (1.0 - 1e-9, 0), (1.0 - f64::EPSILON / 2.0, 0)] {
            for options in [training(p), training(p).with_dropout_seed(&TorchSeed::new(3))] {
                let kept = count(&inputs.attend(&options)?.weights);
                assert!(kept.abs_diff(expected) < 5, "{kept} of {all} kept for p = {p:?}");
            }
        }
        Ok(())
    });
}

fn the_context_mixes_the_weights_after_dropout(device: &Device) {
    each(device, |inputs, dtype| {
        let output = inputs.attend(&training(0.5))?;
        let (weights, v) = (values(&output.weights), values(&inputs.v));
        for (n, context) in values(&output.context).into_iter().enumerate() {
            let (row, d) = (n / 6, n % 6);
            let (b, h) = (row / (4 * 40), row / 40 % 4);
            let value = |j: usize| v[((b * 2 + h / 2) * 50 + j) * 6 + d];
            let terms = (0..50).map(|j| weights[row * 50 + j] * value(j));
            let magnitude: f64 = terms.clone().map(f64::abs).sum();
            let most = magnitude * (50.0 * rounding(dtype)).min(4.0 * rounding(dtype).max(1e-5)) + 1e-6;
            assert!((context - terms.sum::<f64>()).abs() <= most, "entry {n} in {dtype:?}");
        }
        Ok(())
    });
}

fn the_log_sum_exp_is_that_before_dropout(device: &Device) {
    each(device, |inputs, _| {
        let run = |options: &SdpaOptions| with_lse(&inputs.q, &inputs.k, &inputs.v, &inputs.mask, options);
        let (plain, dropped) = (run(&reference())?, run(&training(0.5))?);
        assert_close(&dropped.1, &plain.1, 0.0, "lse");
        assert!(values(&dropped.0) != values(&plain.0), "the context is that after dropout");
        Ok(())
    });
}

fn without_a_seed_every_call_draws_anew(device: &Device) {
    each(device, |inputs, _| {
        let run = || inputs.attend(&training(0.5)).map(|output| values(&output.weights));
        assert!(run()? != run()?);
        Ok(())
    });
}

fn a_seed_draws_the_same_again(device: &Device) {
    each(device, |inputs, _| {
        let seed = TorchSeed::new(7);
        let options = training(0.5).with_dropout_seed(&seed);
        let first = inputs.attend(&options)?;
        let second = inputs.attend(&options)?;
        assert!(values(&first.weights) != values(&second.weights), "one stream, drawn from in turn");
        seed.manual_seed(7);
        assert_close(&inputs.attend(&options)?.weights, &first.weights, 0.0, "the stream started again");
        assert_close(&inputs.context(&options)?, &second.context, 0.0, "the context alone draws the same");
        let fresh = training(0.5).with_dropout_seed(&TorchSeed::new(7));
        assert_close(&inputs.attend(&fresh)?.weights, &first.weights, 0.0, "another generator of that seed");
        Ok(())
    });
}

fn a_seed_draws_pytorchs_mask_for_the_weights(device: &Device) {
    each(device, |inputs, _| {
        let keep = TorchSeed::new(11).dropout_keep((2, 4, 40, 50), 0.3)?;
        let output = inputs.attend(&training(0.3).with_dropout_seed(&TorchSeed::new(11)))?;
        let plain = inputs.attend(&reference())?;
        for ((keep, after), before) in
            values(&keep).into_iter().zip(values(&output.weights)).zip(values(&plain.weights))
        {
            assert_eq!(after != 0.0, keep != 0.0 && before != 0.0);
        }
        Ok(())
    });
}

/// With one key for each query the weight is 1, so the gradient of its value is what dropout left of it.
fn dropped_weights_pass_no_gradient(device: &Device) -> Result<()> {
    let x = Tensor::ones((1, 1, 400, 1), DType::F32, device)?;
    let v = Var::from_tensor(&x)?;
    let diagonal = AttentionMask::none().with_band(0, 0);
    let output = with_weights(&x, &x, &v, &diagonal, &training(0.25))?;
    let gradients = output.context.sum_all()?.backward()?;
    let gradient = gradients.get(&v).expect("the value has a gradient").flatten_all()?;
    let weights = output.weights.squeeze(0)?.squeeze(0)?.sum(0)?;
    assert_close(&gradient, &weights, 1e-6, "gradient");
    let kept = values(&weights).into_iter().filter(|&weight| weight != 0.0).count();
    assert!((230..370).contains(&kept), "{kept} of 400 are kept, expected about 300");
    Ok(())
}
