//! Modules, norms and relative biases that do not fit a layer.

use candle_core::Error;
use candle_nn::Linear;

use crate::wrong::Shapes;
use crate::*;

fn linear(out: usize) -> Linear {
    Linear::new(zeros((out, 8)), None)
}

fn three() -> ProjectionModules {
    ProjectionModules::new(linear(8), linear(8), linear(8))
}

fn from(cfg: Config, modules: ProjectionModules) -> Result<MultiHeadAttention> {
    MultiHeadAttention::from_modules(&cfg, modules, any_weights())
}

#[test]
fn projections() {
    let xs = zeros((1, 3, 8));
    let (whole, bare) = (|| Config::new(8, 2), || Config::new(8, 2).with_out_proj(false));
    let place = GatePlace::Own { bias: false };
    let gate = OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::PerEntry, place };
    let gated = || bare().with_output_gate(gate);
    let to_f64 = |xs: &Tensor| xs.to_dtype(DType::F64);
    let cases = cases! {
        "no gate module" => from(gated(), three()),
        "a gate module that the config denies" => from(bare(), three().with_gate(linear(8))),
        "a gate to change where there is none" => from(bare(), three())?.map_projection(ProjectionPlace::Gate, Ok),
        "a gate of another width" => from(gated(), three().with_gate(linear(2)))?.forward(&xs),
        "no output module" => from(whole(), three()),
        "an output module that the config denies" => from(bare(), three().with_output(linear(8))),
        "an output module to change where there is none" =>
            from(bare(), three())?.map_projection(ProjectionPlace::Output, Ok),
        "a change that fails" =>
            from(bare(), three())?.map_projection(ProjectionPlace::Key, |_| Err(Error::msg("no adapter"))),
        "a module of another width" =>
            from(bare(), ProjectionModules::new(linear(8), linear(6), linear(8)))?.forward(&xs),
        "a module of another dtype" => from(whole(), three().with_output(to_f64))?.forward(&xs),
        "sinks that the config denies" =>
            MultiHeadAttention::from_modules(&bare(), three(), weights_of(&[("sinks", &[8])])),
    };
    assert_reviewed("modules", &[cases]);
}

/// A layer of 4 heads over 2, with the lists of norms that some checkpoints have.
#[test]
fn norms_of_each_head() {
    let norms = [("q", 0), ("q", 1), ("q", 2), ("q", 3), ("k", 0), ("k", 1)];
    let mut shapes = wrong::shapes(&[
        ("q_proj.weight", &[12, 12]),
        ("k_proj.weight", &[6, 12]),
        ("v_proj.weight", &[6, 12]),
        ("o_proj.weight", &[12, 12]),
    ]);
    shapes.extend(norms.map(|(name, head)| (format!("{name}_layernorm.norms.{head}.weight"), vec![3])));
    let load = |scope: Option<QkNormScope>, shapes: &Shapes| {
        let cfg = Config::new(12, 4).with_num_kv_heads(2);
        let norm = |scope| QkNorm { kind: QkNormKind::LayerNoBias, scope, eps: 1e-5 };
        let cfg = scope.map_or(cfg.clone(), |scope| cfg.with_qk_norm(norm(scope)));
        MultiHeadAttention::new(&cfg, wrong::builder(shapes))
    };
    let listed = |shapes: &Shapes| load(Some(QkNormScope::PerHeadWeights), shapes);
    let more = wrong::shapes(&[("q_layernorm.norms.4.weight", &[3]), ("k_layernorm.norms.1.bias", &[3])]);
    let cases = cases! {
        "a list where the config has one norm" => load(Some(QkNormScope::PerHead), &shapes),
        "a list where the config has none" => load(None, &shapes),
    };
    assert_reviewed("head_norms", &[wrong::weights(&shapes, listed), wrong::surplus(&shapes, &more, listed), cases]);
}

#[test]
fn relative_biases() {
    let few = |bidirectional| RelativeBiasConfig::new(bidirectional).with_num_buckets(8).with_max_distance(6);
    let bias =
        |bidirectional, heads, dtype| RelativeBias::new(&few(bidirectional), heads, VarBuilder::zeros(dtype, &CPU));
    let both = |heads| bias(true, heads, DType::F32);
    let biased = || layer(Config::new(12, 4).with_relative_bias(few(true)));
    let cases = cases! {
        "biases beyond memory" => both(3)?.forward(1 << 24, 1 << 24, 0),
        "keys beyond counting" => both(3)?.forward(1, usize::MAX, 0),
        "no bias" => biased()?.forward(&zeros((1, 3, 12))),
        "a bias that the config denies" => layer(Config::new(12, 4))?.with_relative_bias(both(4)?),
        "another bias" => biased()?.with_relative_bias(bias(false, 4, DType::F32)?),
        "a bias of more heads" => biased()?.with_relative_bias(both(5)?),
        "a bias in another dtype" => biased()?.with_relative_bias(bias(true, 4, DType::F64)?),
        "a bias of no heads" => both(0),
        "a bias that is not in the file" => RelativeBias::new(&few(true), 4, weights_of(&[])),
    };
    assert_reviewed("relative_biases", &[cases]);
}
