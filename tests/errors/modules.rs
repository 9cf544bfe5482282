//! Modules in the places of projections that do not fit a layer.

use candle_nn::Linear;

use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[("module calls", |line, _| named(CALLS, line))];

fn linear(out: usize) -> Linear {
    Linear::new(zeros((out, 8)), None)
}

fn three() -> ProjectionModules {
    ProjectionModules::new(linear(8), linear(8), linear(8))
}

fn from(cfg: Config, modules: ProjectionModules) -> Result<MultiHeadAttention> {
    MultiHeadAttention::from_modules(&cfg, modules, any_weights())
}

fn whole() -> Config {
    Config::new(8, 2)
}

fn bare() -> Config {
    whole().with_out_proj(false)
}

fn gated() -> Config {
    let place = GatePlace::Own { bias: false };
    bare().with_output_gate(OutputGate { activation: GateActivation::Sigmoid, scope: GateScope::PerEntry, place })
}

fn to_f64(xs: &Tensor) -> Result<Tensor> {
    xs.to_dtype(DType::F64)
}

fn xs() -> Tensor {
    zeros((1, 3, 8))
}

const CALLS: &[Named] = calls! {
    "no gate module" => from(gated(), three()),
    "a gate module that the config denies" => from(bare(), three().with_gate(linear(8))),
    "a gate to change where there is none" => from(bare(), three())?.map_projection(ProjectionPlace::Gate, Ok),
    "a gate of another width" => from(gated(), three().with_gate(linear(2)))?.forward(&xs()),
    "no output module" => from(whole(), three()),
    "an output module that the config denies" => from(bare(), three().with_output(linear(8))),
    "an output module to change where there is none" =>
        from(bare(), three())?.map_projection(ProjectionPlace::Output, Ok),
    "a change that fails" =>
        from(bare(), three())?.map_projection(ProjectionPlace::Key, |_| Err(Error::msg("no adapter"))),
    "a module of another width" =>
        from(bare(), ProjectionModules::new(linear(8), linear(6), linear(8)))?.forward(&xs()),
    "a module of another dtype" => from(whole(), three().with_output(to_f64))?.forward(&xs()),
    "sinks that the config denies" =>
        MultiHeadAttention::from_modules(&bare(), three(), weights_of(&[("sinks", &[8])])),
};
