//! Modules, norms and relative biases that do not fit a layer.

use std::collections::HashMap;

use candle_attention::{
    GateActivation, GatePlace, GateScope, MultiHeadAttention, MultiHeadAttentionConfig as Config, OutputGate,
    ProjectionModules, ProjectionPlace, QkNorm, QkNormKind, QkNormScope, RelativeBias, RelativeBiasConfig,
};
use candle_core::{DType, Error, Result, Tensor};
use candle_nn::{Linear, VarBuilder};

use crate::{CPU, Case, zeros};

fn builder(tensors: &[(&str, &[usize])]) -> VarBuilder<'static> {
    let tensors: HashMap<_, _> = tensors.iter().map(|(name, shape)| (name.to_string(), zeros(*shape))).collect();
    VarBuilder::from_tensors(tensors, DType::F32, &CPU)
}

fn linear(out: usize) -> Linear {
    Linear::new(zeros((out, 8)), None)
}

fn three() -> ProjectionModules {
    ProjectionModules::new(linear(8), linear(8), linear(8))
}

fn from(out_proj: bool, modules: ProjectionModules) -> Result<MultiHeadAttention> {
    let cfg = Config::new(8, 2).with_out_proj(out_proj);
    MultiHeadAttention::from_modules(&cfg, modules, VarBuilder::zeros(DType::F32, &CPU))
}

fn gated() -> Config {
    let place = GatePlace::Own { bias: false };
    let gate = OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::PerEntry, place };
    Config::new(8, 2).with_out_proj(false).with_output_gate(gate)
}

pub const MODULES: &[Case] = cases! {
    "no gate module" => MultiHeadAttention::from_modules(&gated(), three(), VarBuilder::zeros(DType::F32, &CPU)),
    "a gate module that the config denies" => from(false, three().with_gate(linear(8))),
    "a gate to change where there is none" => from(false, three())?.map_projection(ProjectionPlace::Gate, Ok),
    "a gate of another width" => {
        let modules = three().with_gate(linear(2));
        MultiHeadAttention::from_modules(&gated(), modules, VarBuilder::zeros(DType::F32, &CPU))?
            .forward(&zeros((1, 3, 8)))
    },
    "no output module" => from(true, three()),
    "an output module that the config denies" => from(false, three().with_output(linear(8))),
    "an output module to change where there is none" =>
        from(false, three())?.map_projection(ProjectionPlace::Output, Ok),
    "a change that fails" =>
        from(false, three())?.map_projection(ProjectionPlace::Key, |_| Err(Error::msg("no adapter"))),
    "a module of another width" => {
        let modules = ProjectionModules::new(linear(8), linear(6), linear(8)).with_output(linear(8));
        from(true, modules)?.forward(&zeros((1, 3, 8)))
    },
    "a module of another dtype" =>
        from(true, three().with_output(|xs: &Tensor| xs.to_dtype(DType::F64)))?.forward(&zeros((1, 3, 8))),
    "sinks that the config denies" =>
        MultiHeadAttention::from_modules(&Config::new(8, 2).with_out_proj(false), three(), builder(&[("sinks", &[8])])),
};

/// A layer of 4 heads over 2, with the lists of norms that some checkpoints have, changed.
fn normed(scope: Option<QkNormScope>, change: impl Fn(&mut HashMap<String, Tensor>)) -> Result<()> {
    let mut tensors = HashMap::new();
    for (name, rows) in [("q", 12), ("k", 6), ("v", 6), ("o", 12)] {
        tensors.insert(format!("{name}_proj.weight"), zeros((rows, 12)));
    }
    for (name, heads) in [("q", 4), ("k", 2)] {
        (0..heads).for_each(|n| drop(tensors.insert(format!("{name}_layernorm.norms.{n}.weight"), zeros(3))));
    }
    change(&mut tensors);
    let mut cfg = Config::new(12, 4).with_num_kv_heads(2);
    if let Some(scope) = scope {
        cfg = cfg.with_qk_norm(QkNorm { kind: QkNormKind::LayerNoBias, scope, eps: 1e-5 });
    }
    MultiHeadAttention::new(&cfg, VarBuilder::from_tensors(tensors, DType::F32, &CPU)).map(drop)
}

const PER_HEAD: Option<QkNormScope> = Some(QkNormScope::PerHeadWeights);

pub const NORMS: &[Case] = cases! {
    "more norms than heads" =>
        normed(PER_HEAD, |list| drop(list.insert("q_layernorm.norms.4.weight".into(), zeros(3)))),
    "fewer norms than heads" => normed(PER_HEAD, |list| drop(list.remove("k_layernorm.norms.1.weight"))),
    "a bias that the config denies" =>
        normed(PER_HEAD, |list| drop(list.insert("k_layernorm.norms.1.bias".into(), zeros(3)))),
    "a list where the config has one norm" => normed(Some(QkNormScope::PerHead), |_| {}),
    "a list where the config has none" => normed(None, |_| {}),
};

fn few(bidirectional: bool) -> RelativeBiasConfig {
    RelativeBiasConfig::new(bidirectional).with_num_buckets(8).with_max_distance(6)
}

fn bias(bidirectional: bool, heads: usize, dtype: DType) -> Result<RelativeBias> {
    RelativeBias::new(&few(bidirectional), heads, VarBuilder::zeros(dtype, &CPU))
}

fn biased() -> Result<MultiHeadAttention> {
    MultiHeadAttention::new(&Config::new(12, 4).with_relative_bias(few(true)), VarBuilder::zeros(DType::F32, &CPU))
}

pub const RELATIVE: &[Case] = cases! {
    "biases beyond memory" => bias(true, 3, DType::F32)?.forward(1 << 24, 1 << 24, 0),
    "keys beyond counting" => bias(true, 3, DType::F32)?.forward(1, usize::MAX, 0),
    "no bias" => biased()?.forward(&zeros((1, 3, 12))),
    "a bias that the config denies" => {
        let plain = MultiHeadAttention::new(&Config::new(12, 4), VarBuilder::zeros(DType::F32, &CPU))?;
        plain.with_relative_bias(bias(true, 4, DType::F32)?)
    },
    "another bias" => biased()?.with_relative_bias(bias(false, 4, DType::F32)?),
    "a bias of more heads" => biased()?.with_relative_bias(bias(true, 5, DType::F32)?),
    "a bias in another dtype" => biased()?.with_relative_bias(bias(true, 4, DType::F64)?),
    "a bias of no heads" => bias(true, 0, DType::F32),
    "a bias that is not in the file" => RelativeBias::new(&few(true), 4, builder(&[])),
};
