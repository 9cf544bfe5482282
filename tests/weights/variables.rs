//! Layers over fresh variables: PyTorch's bounds at the start, and training.

use candle_attention::{
    GateActivation, GateLayout, GateScope, MultiHeadAttention, MultiHeadAttentionConfig, OutputGate, QkNorm,
    QkNormKind, QkNormScope, WeightLayout,
};
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, Optimizer, SGD, VarBuilder};

use crate::common::{assert_close, assert_near, max_error, values};
use crate::{DEVICE, Invented, bits, fresh, invented, load, projections, wave};

const E: usize = 64;

/// Asserts that numbers are within the bounds, and near to both of them.
#[track_caller]
fn assert_uniform(tensor: &Tensor, lo: f64, up: f64, what: &str) {
    let values = values(tensor);
    let least = values.iter().copied().fold(f64::MAX, f64::min);
    let most = values.iter().copied().fold(f64::MIN, f64::max);
    let margin = (up - lo) * 0.2;
    assert!(lo <= least && least < lo + margin && up - margin < most && most <= up, "{what}: from {least} to {most}");
}

/// Compares initial bounds. `tests/golden` compares the other layouts to the bit.
#[test]
fn new_variables_have_initial_bounds_of_their_modules() -> Result<()> {
    // A linear layer: within one over the root of its inputs. nn.Parameter(torch.rand(d_in, d_out)): from 0 to 1.
    let bound = 1.0 / (E as f64).sqrt();
    for (layout, [lo, up], bias) in [
        ("bert", [-bound, bound], true),
        ("packed:Wqkv", [-bound, bound], true),
        ("packed:query_key_value:by-head", [-bound, bound], true),
        ("raw-transposed:d2l", [0.0, 1.0], false),
    ] {
        let (_, layer) = fresh(layout.parse()?, bias, MultiHeadAttentionConfig::new(E, 4))?;
        for own in projections(&layer) {
            assert_uniform(own.weight(), lo, up, layout);
            assert_eq!(own.bias().is_some(), bias, "{layout}");
            own.bias().into_iter().for_each(|own| assert_uniform(own, lo, up, layout));
        }
    }
    // GPT-2: normal with a deviation of 0.02, biases of zero.
    let (_, layer) = fresh(WeightLayout::Conv1d, true, MultiHeadAttentionConfig::new(E, 4))?;
    for linear in projections(&layer) {
        let numbers = values(linear.weight());
        let deviation = (numbers.iter().map(|x| x * x).sum::<f64>() / numbers.len() as f64).sqrt();
        assert!((0.019..0.021).contains(&deviation), "c_attn: {deviation}");
        assert!(values(linear.bias().expect("a bias")).iter().all(|&x| x == 0.0), "c_attn.bias");
    }
    Ok(())
}

/// Trains self-attention to copy its input. Each variable gets a gradient, a step lowers the loss, and a frozen layer
/// keeps its output.
#[test]
fn gradient_descent_lowers_loss_in_every_layout() -> Result<()> {
    let xs = wave(0.61, (1, 5, 16))?;
    let norm = QkNorm { kind: QkNormKind::Layer, scope: QkNormScope::PerHead, eps: 1e-5 };
    let gate = |place| OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::Elementwise, layout: place };
    for layout in WeightLayout::all() {
        let spelling = layout.to_string();
        let cfg = MultiHeadAttentionConfig::new(16, 4).with_qk_norm(norm).with_sinks(true);
        let cfg = match spelling.as_str() {
            "canonical" => cfg.with_output_gate(gate(GateLayout::FusedWithQuery)),
            "packed:Wqkv" => cfg.with_output_gate(gate(GateLayout::Separate { bias: true })),
            _ => cfg,
        };
        let (vars, layer) = fresh(layout, !spelling.contains("raw"), cfg)?;
        // The same numbers in each run: scores of weights between 0 and 1 may be so large that rounding shows.
        for (name, var) in vars.data().lock().expect("the variables").iter().filter(|(name, _)| !name.contains("norm"))
        {
            let numbers = Invented.get(var.shape().clone(), name, Init::Const(0.0), DType::F32, &DEVICE)?;
            var.set(&(numbers * 0.25)?)?;
        }
        let loss = || -> Result<Tensor> { (layer.forward(&xs)? - &xs)?.sqr()?.mean_all() };
        let before = loss()?;
        let gradients = before.backward()?;
        let mut steepness = 0.0;
        for (name, var) in vars.data().lock().expect("the variables").iter() {
            let gradient = gradients.get(var).unwrap_or_else(|| panic!("{layout}: {name} has no gradient"));
            let squared: f64 = values(gradient).iter().map(|x| x * x).sum();
            // A bias of the keys shifts all scores of a query alike: its gradient is zero but for rounding.
            assert!(squared > 0.0 || name.contains("bias"), "{layout}: the gradient of {name} is zero");
            steepness += squared;
        }
        let frozen = layer.freeze()?;
        let left = frozen.forward(&xs)?;
        assert!(before.track_op() && !left.track_op(), "{layout}");
        assert_near(&left, &layer.forward(&xs)?, 1e-5, &spelling);
        assert!(frozen.state_dict(layout)?.iter().all(|(_, tensor)| !tensor.track_op()), "{layout}");

        // Downhill by a hundredth of the loss, as far as the slope tells.
        let rate = 0.01 * f64::from(before.to_scalar::<f32>()?) / steepness;
        SGD::new(vars.all_vars(), rate)?.step(&gradients)?;
        let before = before.to_scalar::<f32>()?;
        let after = loss()?.to_scalar::<f32>()?;
        assert!(after < 0.999 * before, "{layout}: {before} became {after}");
        assert_close(&frozen.forward(&xs)?, &left, 0.0, &spelling);

        // The layer reads the current values of its variables, like a new layer over them.
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
        let anew = MultiHeadAttention::load(layer.config(), layout, vb)?;
        assert_close(&layer.forward(&xs)?, &anew.forward(&xs)?, 0.0, &spelling);
        assert_eq!(bits(&layer)?, bits(&anew)?, "{layout}");
        // So does what is saved; the rounding is that of a packed weight.
        let saved = layer.state_dict(layout)?.into_iter().map(|(name, tensor)| (name, tensor.detach()));
        let saved = load(layer.config(), layout, &saved.collect::<Vec<_>>())?;
        assert_near(&saved.forward(&xs)?, &layer.forward(&xs)?, 1e-5, &spelling);
    }
    Ok(())
}

/// Trains biases while weights are not variables (BitFit), in layouts whose rows are views and in layouts whose rows
/// are joined.
#[test]
fn biases_trained_alone_are_followed_by_layer() -> Result<()> {
    let xs = wave(0.61, (1, 5, 8))?;
    for layout in ["canonical", "torch", "packed:Wqkv", "packed:query_key_value:by-head", "stacked:book"] {
        let stack = layout.starts_with("stacked");
        let cfg = MultiHeadAttentionConfig::new(8, 4).with_qkv_bias(true).with_out_bias(!stack).with_out_proj(!stack);
        let layout: WeightLayout = layout.parse()?;
        let mut tensors = invented(&cfg, layout)?.state_dict(layout)?;
        let mut biases = Vec::new();
        for (name, tensor) in tensors.iter_mut().filter(|(name, _)| name.ends_with("bias")) {
            let bias = Var::from_tensor(tensor)?;
            *tensor = bias.as_tensor().clone();
            biases.push((name.clone(), bias));
        }
        let layer = load(&cfg, layout, &tensors)?;
        let before = layer.forward(&xs)?;
        let gradients = before.sqr()?.sum_all()?.backward()?;
        for (name, bias) in &biases {
            assert!(gradients.get(bias).is_some(), "{layout}: {name} has no gradient");
            bias.set(&(bias.as_tensor() * -1.5)?.detach())?;
        }
        let after = layer.forward(&xs)?;
        assert!(max_error(&after, &before) > 1e-2, "{layout}: the layer does not follow its biases");
        assert_close(&after, &load(&cfg, layout, &tensors)?.forward(&xs)?, 0.0, &layout.to_string());
    }
    Ok(())
}
