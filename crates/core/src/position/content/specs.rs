//! The parameters of relative positions by content.

use candle_nn::Init;

use candle_attention_modules::base::{Heads, ParameterReader, ParameterSpec};

/// The names of parameters in files begin with one of these; the crate writes the first.
const PREFIXES: [&str; 3] = ["", "self.", "relative_position_bias."];

/// The sizes of the layer that has the parameters, and the source that they are loaded from.
#[derive(Clone, Copy)]
pub(crate) struct LayerSpecs<'a> {
    /// E.
    pub embed_dim: usize,
    /// H.
    pub num_heads: usize,
    /// D.
    pub head_dim: usize,
    pub source: &'a ParameterReader<'a>,
}

impl LayerSpecs<'_> {
    /// Returns a parameter that all heads share.
    pub fn shared(&self, name: &str, shape: &[usize], init: Init) -> ParameterSpec {
        let names = PREFIXES.map(|prefix| format!("{prefix}{name}"));
        let stored = names.iter().find(|stored| self.source.has(stored)).unwrap_or(&names[0]);
        ParameterSpec::new(name, shape, init).stored(stored)
    }

    /// Returns a parameter whose first dimension is divided among the query heads.
    pub fn by_head(&self, name: &str, shape: &[usize], init: Init) -> ParameterSpec {
        self.shared(name, shape, init).by_head(Heads::Query, 0)
    }
}

/// Returns zeros as the values of a new parameter.
pub(super) const fn zeros() -> Init {
    Init::Const(0.0)
}

/// Returns a normal distribution of the values of a new parameter.
pub(super) const fn normal(stdev: f64) -> Init {
    Init::Randn { mean: 0.0, stdev }
}
