//! The parameters of the options of latent attention that few models have.

use candle_core::{Module, Result, Tensor};
use candle_nn::Init;

use super::MultiHeadLatentAttentionConfig;
use crate::layer::temperature::{LearnedTemperature, SCALE_NAMES};
use candle_attention_modules::base::{Heads, Parameter, ParameterReader, ParameterSpec, Share};
use candle_attention_modules::gate::{GateLayout, OutputGate};
use candle_attention_modules::linear::PackedLinear;
use candle_attention_modules::norm::{Norm, QkNormKind};

/// The names of the projection of a gate: that of transformers in Hunyuan 4, that in Dots 3, and that of published
/// checkpoints of Hunyuan 4.
const GATE_NAMES: [&str; 3] = ["gate_proj", "g_proj", "linear_gate"];
/// The name of the sinks in published checkpoints of Hunyuan 4.
const PUBLISHED_SINKS: &str = "learnable_sink_param";

/// The parameters of a layer that belong to options: a gate with its own projection, sinks, the norm of the shared key,
/// a learned temperature.
#[derive(Debug, Clone)]
pub(super) struct Additions {
    /// (H · D_v, E), or (H, E).
    gate: Option<PackedLinear>,
    /// (H,).
    sinks: Option<Parameter>,
    shared_key_norm: Option<Norm>,
    pub temperature: Option<LearnedTemperature>,
}

impl Additions {
    /// Reads the parameters that the config asks for.
    pub fn load(cfg: &MultiHeadLatentAttentionConfig, source: &ParameterReader) -> Result<Self> {
        let h = cfg.num_heads();
        let mut gate = None;
        if let Some(own) = cfg.output_gate()
            && own.layout != GateLayout::FusedWithQuery
        {
            let name = source.stored_module(&GATE_NAMES);
            let rows = Share::Heads { heads: Heads::Query, dim: 0 };
            let shape = (h.saturating_mul(own.width(cfg.value_head_dim())), cfg.embed_dim());
            gate = Some(source.linear(name, shape, false, Some(rows))?.try_into()?);
        } else {
            let names = GATE_NAMES.map(|name| format!("{name}.weight"));
            source.refuse(names, "the config says there is no gate of its own")?;
        }
        let sinks_name = if source.has(PUBLISHED_SINKS) { PUBLISHED_SINKS } else { "sinks" };
        let sinks = ParameterSpec::new(sinks_name, [h], Init::Const(0.0)).by_head(Heads::Query, 0);
        let sinks = source.read_requested(&sinks.only_if(cfg.sinks(), "the config says there are no sinks"))?;
        let norm_name = "k_rope_only_layernorm";
        let mut shared_key_norm = None;
        if cfg.shared_key_norm() {
            let (kind, width) = (QkNormKind::Rms, cfg.rope_head_dim());
            shared_key_norm = Some(Norm::load(kind, cfg.norm_eps(), width, false, &source.pp(norm_name))?);
        } else {
            source.refuse([format!("{norm_name}.weight")], "the config says there is no norm of the shared key")?;
        }
        let mut temperature = None;
        if cfg.learned_temperature() {
            temperature = Some(LearnedTemperature::load(h, true, source)?);
        } else {
            source.refuse(SCALE_NAMES, "the config says there is no learned temperature")?;
        }
        Ok(Self { gate, sinks: sinks.map(Parameter::from), shared_key_norm, temperature })
    }

    /// Returns the projection of the gate for inputs (B, T, E), if it has its own: (B, T, H · D_v), or (B, T, H).
    pub fn gate(&self, xs: &Tensor) -> Result<Option<Tensor>> {
        match &self.gate {
            Some(gate) => gate.forward(xs).map(Some),
            None => Ok(None),
        }
    }

    /// Returns the sink of each head, (H,).
    pub fn sinks(&self) -> Result<Option<Tensor>> {
        self.sinks.as_ref().map(Parameter::tensor).transpose()
    }

    /// Normalises the shared keys (B, T, 1, rope), if the layer does that.
    pub fn normalised(&self, shared_keys: Tensor) -> Result<Tensor> {
        match &self.shared_key_norm {
            Some(norm) => norm.forward(&shared_keys),
            None => Ok(shared_keys),
        }
    }

    /// Returns a copy for inference.
    pub fn freeze(&self) -> Result<Self> {
        Ok(Self {
            gate: self.gate.as_ref().map(PackedLinear::freeze).transpose()?,
            sinks: self.sinks.as_ref().map(Parameter::freeze).transpose()?,
            shared_key_norm: self.shared_key_norm.as_ref().map(Norm::freeze).transpose()?,
            temperature: self.temperature.as_ref().map(LearnedTemperature::freeze).transpose()?,
        })
    }
}

/// Multiplies the attention output (B, T, H, D_v) by a gate whose projection is (B, T, H · D_v) or (B, T, H).
pub(super) fn gated(output: &Tensor, gate: OutputGate, projected: &Tensor) -> Result<Tensor> {
    let (b, t, h, _) = output.dims4()?;
    let width = projected.dim(2)? / h;
    gate.activation.gate(output, &projected.reshape((b, t, h, width))?)
}
