//! Norms as modules: candle-nn's constructors and names, and variables.

use candle_nn::{AdamW, LayerNormConfig, Optimizer, ParamsAdamW, linear_no_bias};

use crate::tensors;
use crate::*;

const WIDTH: usize = 12;

fn builder(names: &[&str]) -> Result<VarBuilder<'static>> {
    let tensors = names.iter().map(|name| Ok((name.to_string(), random(WIDTH)?))).collect::<Result<_>>()?;
    Ok(tensors::builder(tensors))
}

fn inputs() -> Result<Tensor> {
    random((2, 3, WIDTH))
}

/// Compares calls in which candle-nn is right.
#[test]
fn norm_constructors_match_candle_nn() -> Result<()> {
    let xs = inputs()?;
    let plain = LayerNormConfig { eps: 1e-3, remove_mean: false, affine: false };
    let affine = |remove_mean| LayerNormConfig { eps: 1e-3, remove_mean, affine: true };
    let same = |ours: &dyn Module, theirs: &dyn Module, what: &str| -> Result<()> {
        assert_close(&ours.forward(&xs)?, &theirs.forward(&xs)?, 1e-5, what);
        Ok(())
    };
    for weight in ["norm.weight", "norm.gamma"] {
        let vb = || Ok::<_, candle_core::Error>(builder(&[weight])?.pp("norm"));
        let of_rms = vb()?;
        let of_layer = vb()?;
        let of_config = vb()?;
        same(&rms_norm(WIDTH, 1e-3, of_rms.clone())?, &candle_nn::rms_norm(WIDTH, 1e-3, of_rms)?, weight)?;
        let theirs = candle_nn::layer_norm_no_bias(WIDTH, 1e-3, of_layer.clone())?;
        same(&layer_norm_no_bias(WIDTH, 1e-3, of_layer)?, &theirs, weight)?;
        let configured = candle_nn::layer_norm(WIDTH, plain, of_config.clone())?;
        same(&layer_norm(WIDTH, plain, of_config)?, &configured, weight)?;
    }
    for names in [["weight", "bias"], ["gamma", "beta"]] {
        for config in [affine(true), affine(false), 1e-3.into()] {
            let vb = builder(&names)?;
            let ours = layer_norm(WIDTH, config, vb.clone())?;
            same(&ours, &candle_nn::layer_norm(WIDTH, config, vb)?, names[0])?;
            let shapes = (ours.weight().dims(), ours.bias().map(Tensor::dims));
            assert_eq!((ours.eps(), shapes), (1e-3, (&[WIDTH][..], Some(&[WIDTH][..]))));
        }
    }
    Ok(())
}

#[test]
fn norm_with_new_variables_scales_by_one() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &CPU);
    let xs = inputs()?;
    let plus_one = rms_norm_plus_one(WIDTH, 1e-6, vb.pp("plus_one"))?;
    let rms = rms_norm(WIDTH, 1e-6, vb.pp("rms"))?.forward(&xs)?;
    assert_close(&plus_one.forward(&xs)?, &rms, 0.0, "1 and 1 + 0");
    assert_close(&rms, &xs.broadcast_div(&(xs.sqr()?.mean_keepdim(2)? + 1e-6)?.sqrt()?)?, 1e-6, "rms");
    let layer = layer_norm(WIDTH, 1e-6, vb.pp("layer"))?.forward(&xs)?;
    assert_close(&layer, &layer_norm_no_bias(WIDTH, 1e-6, vb.pp("bare"))?.forward(&xs)?, 0.0, "a bias of 0");
    let mut names: Vec<_> = named(&vars).into_keys().collect();
    names.sort();
    assert_eq!(names, ["bare.weight", "layer.bias", "layer.weight", "plus_one.weight", "rms.weight"]);
    Ok(())
}

/// Trains variables in place. A frozen norm keeps their former values.
#[test]
fn norm_reads_variables_in_every_call_until_frozen() -> Result<()> {
    let vars = VarMap::new();
    let xs = inputs()?;
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &CPU);
    let below = linear_no_bias(WIDTH, WIDTH, vb.pp("below"))?;
    let norms = [rms_norm(WIDTH, 1e-6, vb.pp("rms"))?, rms_norm_plus_one(WIDTH, 1e-6, vb.pp("plus_one"))?];
    let layer = layer_norm(WIDTH, 1e-6, vb.pp("layer"))?;
    let forward = |input: &Tensor| layer.forward(&norms[1].forward(&norms[0].forward(&below.forward(input)?)?)?);
    let frozen = (norms[0].freeze()?, norms[1].freeze()?, layer.freeze()?);
    let frozen =
        |input: &Tensor| frozen.2.forward(&frozen.1.forward(&frozen.0.forward(&below.forward(input)?.detach())?)?);

    let before = forward(&xs)?;
    let gradients = before.powf(3.0)?.sum_all()?.backward()?;
    assert_eq!(variables_without_gradient(&gradients, &vars), [""; 0]);
    assert_close(&frozen(&xs)?, &before, 0.0, "frozen");
    assert!(!frozen(&xs)?.track_op());
    let norms_alone = named(&vars).into_iter().filter(|(name, _)| !name.starts_with("below"));
    let params = ParamsAdamW { lr: 0.1, ..Default::default() };
    AdamW::new(norms_alone.map(|(_, var)| var).collect(), params)?.step(&gradients)?;
    assert!(max_error(&forward(&xs)?, &before) > 1e-2);
    assert_close(&frozen(&xs)?, &before, 0.0, "frozen before the step");
    Ok(())
}

/// Lists variables that an optimizer would not change.
#[test]
fn variables_without_gradient_are_listed() -> Result<()> {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &CPU);
    let [used, unused] = ["used", "unused"].map(|name| linear_no_bias(WIDTH, WIDTH, vb.pp(name)));
    let ys = used?.forward(&inputs()?.flatten_to(1)?)?;
    let _ = unused?;
    let lost = candle_nn::ops::softmax_last_dim(&ys)?;
    assert_eq!(variables_without_gradient(&lost.sum_all()?.backward()?, &vars), ["unused.weight", "used.weight"]);
    let kept = candle_nn::ops::softmax(&ys, 1)?;
    assert_eq!(variables_without_gradient(&kept.sum_all()?.backward()?, &vars), ["unused.weight"]);
    Ok(())
}
