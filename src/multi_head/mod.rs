//! The layer: project, split into heads, attend, merge, project.

mod call;
mod heads;
mod input;
mod memory;
mod modules;
mod packed;
mod parts;
mod positions;
mod project;
mod shard;

pub use input::AttentionInput;
pub(crate) use input::Expected;
pub use memory::ProjectedMemory;
pub use modules::{ProjectionModule, ProjectionModules, ProjectionPlace};

use candle_core::{Error, ModuleT, Result, Tensor, bail};
use candle_nn::{Linear, VarBuilder};

use crate::position::Alibi;
use crate::qk_norm::QkNorms;
use crate::weights::{Projections, Source, load_projections, root, state_dict};
use crate::{AttentionMask, AttentionOutput, MultiHeadAttentionConfig, RelativeBias, RotaryEmbedding, WeightLayout};
use call::Call;
use modules::Modules;
use parts::Parts;
use project::Projector;

/// Multi-head attention: self or cross, of any head count down to one.
///
/// ```
/// use candle_attention::{AttentionInput, AttentionMask, MultiHeadAttention, MultiHeadAttentionConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// # fn main() -> candle_core::Result<()> {
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true);
/// let mha = MultiHeadAttention::new(&cfg, vb.pp("self_attn"))?;
///
/// let xs = Tensor::randn(0f32, 1., (2, 6, 64), &Device::Cpu)?;
/// let ys = mha.forward(&xs)?;
/// assert_eq!(ys.dims(), [2, 6, 64]);
///
/// let padding = AttentionMask::none().with_valid_lens(vec![6, 4]);
/// let seen = mha.forward_with_weights(AttentionInput::new(&xs).with_mask(&padding))?;
/// assert_eq!(seen.weights.dims(), [2, 4, 6, 6]);
/// # Ok(()) }
/// ```
///
/// A layer is a value without state. Inputs are (B, T, E), or (T, E) for one sequence, which then gives (T, out_dim).
#[derive(Debug, Clone)]
pub struct MultiHeadAttention {
    config: MultiHeadAttentionConfig,
    projections: Projector,
    qk_norm: Option<QkNorms>,
    rotary: Option<RotaryEmbedding>,
    alibi: Option<Alibi>,
    relative_bias: Option<RelativeBias>,
    sinks: Option<Tensor>,
    bias_kv: Option<(Tensor, Tensor)>,
    mask: AttentionMask,
}

impl MultiHeadAttention {
    /// A layer with the canonical names `q_proj`, `k_proj`, `v_proj` and `o_proj` below the builder's prefix.
    ///
    /// # Errors
    /// For a config that does not fit together, and for a missing or misshapen tensor, named with both shapes.
    pub fn new(cfg: &MultiHeadAttentionConfig, vb: VarBuilder) -> Result<Self> {
        Self::load(cfg, WeightLayout::Canonical, vb)
    }

    /// A layer from weights in any layout; see [`WeightLayout::detect`]. Parameters that belong to no projection
    /// (`q_norm`, `k_norm`, `sinks`, `bias_k`, `bias_v`) have the same names in every layout.
    ///
    /// Plain tensors are read now, variables in every call, so that the layer learns with them.
    ///
    /// # Errors
    /// As [`new`](Self::new), and for a config that the layout cannot hold.
    pub fn load(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let source = Source::new("multi_head_attention", layout, vb.clone());
        source.check_dtype()?;
        Self::around(cfg, Projector::new(load_projections(cfg, layout, vb)?)?, Parts::load(cfg, &source)?)
    }

    /// A layer whose projections are modules of any kind, such as Candle's `QMatMul` over a quantised checkpoint, or one
    /// module in the place of several. Their biases are their own, and the config's are not looked at.
    ///
    /// Parameters that belong to no projection (`q_norm`, `k_norm`, `sinks`, `bias_k`, `bias_v`) are read from the builder,
    /// and its dtype and device are those of the layer's inputs: each module gets contiguous inputs in that dtype and gives
    /// the shape of its [`ProjectionPlace`] in the same dtype.
    ///
    /// [`state_dict`](Self::state_dict), [`projections`](Self::projections) and [`save`](Self::save) of such a layer are
    /// errors.
    ///
    /// # Errors
    /// As [`new`](Self::new), and for an output projection that the config does not want, or a missing one.
    pub fn from_modules(cfg: &MultiHeadAttentionConfig, modules: ProjectionModules, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let source = Source::new("multi_head_attention", "of modules", vb.clone());
        source.check_dtype()?;
        let modules = Modules::new(cfg, modules, (vb.dtype(), vb.device()))?;
        Self::around(cfg, Projector::Modules(modules), Parts::load(cfg, &source)?)
    }

    /// The rest of a layer around its projections.
    fn around(cfg: &MultiHeadAttentionConfig, projections: Projector, parts: Parts) -> Result<Self> {
        let Parts { qk_norm, bias_kv, sinks, alibi } = parts;
        let rotary = cfg.rope().map(|rope| RotaryEmbedding::new(rope, cfg.head_dim())).transpose()?;
        let mut mask = if cfg.causal() { AttentionMask::causal() } else { AttentionMask::none() };
        if let Some(window) = cfg.window() {
            mask = mask.with_window(window);
        }
        if let Some((left, right)) = cfg.band() {
            mask = mask.with_band(left, right);
        }
        Ok(Self { config: cfg.clone(), projections, qk_norm, rotary, alibi, relative_bias: None, sinks, bias_kv, mask })
    }

    /// The same layer with tables of cosines and sines that it shares with others, in the place of its own.
    ///
    /// # Errors
    /// If the tables are not those of the layer's config.
    pub fn with_rotary(mut self, rotary: RotaryEmbedding) -> Result<Self> {
        let d = self.config.head_dim();
        match self.config.rope() {
            None => bail!("[multi_head_attention] rotary tables are given, but the config has no rope"),
            Some(rope) if rope != rotary.config() || d != rotary.head_dim() => bail!(
                "[multi_head_attention] rotary tables are of {:?} and heads of {}, expected {rope:?} and heads of {d}",
                rotary.config(),
                rotary.head_dim()
            ),
            Some(_) => self.rotary = Some(rotary),
        }
        Ok(self)
    }

    /// The same layer with the relative bias that it shares with the other layers of its stack. A layer whose config has
    /// one cannot be called without it.
    ///
    /// # Errors
    /// If the bias is not that of the layer's config, or is for another number of heads, dtype or device.
    pub fn with_relative_bias(mut self, bias: RelativeBias) -> Result<Self> {
        let h = self.config.num_heads();
        match self.config.relative_bias() {
            None => bail!("[multi_head_attention] a relative bias is given, but the config has none"),
            Some(buckets) if buckets != bias.config() || h != bias.num_heads() => bail!(
                "[multi_head_attention] the relative bias is of {:?} and {} heads, expected {buckets:?} and {h} heads",
                bias.config(),
                bias.num_heads()
            ),
            Some(_) => {}
        }
        let (dtype, device) = (self.projections.dtype(), self.projections.device());
        if bias.weight().dtype() != dtype || !bias.weight().device().same_device(device) {
            bail!(
                "[multi_head_attention] the relative bias is {:?} on {:?}, expected the weights' {dtype:?} on {:?}",
                bias.weight().dtype(),
                bias.weight().device().location(),
                device.location()
            )
        }
        self.relative_bias = Some(bias);
        Ok(self)
    }

    /// What the layer was built from.
    pub fn config(&self) -> &MultiHeadAttentionConfig {
        &self.config
    }

    /// The query, key, value and output projections, as they were loaded, with what variables hold now.
    ///
    /// A layer over plain tensors on a CPU holds packed weights ([`PackedLinear`](crate::PackedLinear)), which this copies
    /// back; those of q, k and v that read inputs of one width are views of one weight.
    ///
    /// # Errors
    /// If a projection is a module of the caller's, and if memory is short.
    pub fn projections(&self) -> Result<(Linear, Linear, Linear, Option<Linear>)> {
        let Projections { q, k, v, o, .. } = self.projections.linears()?;
        Ok((q, k, v, o))
    }

    /// Self-attention under the layer's own mask: (B, T, E) gives (B, T, out_dim). Training is
    /// [`forward_t`](ModuleT::forward_t).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        self.forward_with(xs)
    }

    /// The layer over any input: with a mask, cross-attention, training. (B, T_q, E) gives (B, T_q, out_dim).
    ///
    /// # Errors
    /// For inputs whose shape, dtype or device does not fit the layer or each other, more positions than the context
    /// length, a mask that does not fit, and a cache that does not take what the call brings.
    pub fn forward_with<'a>(&self, input: impl Into<AttentionInput<'a>>) -> Result<Tensor> {
        let call = Call::new(self, input.into())?;
        let ys = self.merge(&call.attend()?, call.batched)?;
        call.commit()?;
        Ok(ys)
    }

    /// [`forward_with`](Self::forward_with) that also returns the weights (B, H, T_q, T_kv), after dropout; (H, T_q, T_kv)
    /// for an input (T, E).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward_with_weights<'a>(&self, input: impl Into<AttentionInput<'a>>) -> Result<AttentionOutput> {
        let call = Call::new(self, input.into())?;
        let output = call.attend_with_weights()?;
        let weights = if call.batched { output.weights } else { output.weights.squeeze(0)? };
        let context = self.merge(&output.context, call.batched)?;
        call.commit()?;
        Ok(AttentionOutput { context, weights })
    }

    /// The layer's parameters under the names and in the shapes of a layout, as a state dict that PyTorch reads.
    ///
    /// A relative bias is not among them: it belongs to the stack of layers.
    ///
    /// A causal layer with a context length gets the persistent `mask` buffer in the layouts whose modules register one
    /// (`book`, `short` and their stacks), so that a strict `load_state_dict` succeeds.
    ///
    /// # Errors
    /// If the layout cannot hold the layer, and why; and if a projection is a module of the caller's.
    pub fn state_dict(&self, layout: WeightLayout) -> Result<Vec<(String, Tensor)>> {
        let mut tensors = state_dict(&self.config, layout, &self.projections.linears()?)?;
        if let Some(norms) = &self.qk_norm {
            tensors.extend(norms.parameters()?);
        }
        if let Some((bias_k, bias_v)) = &self.bias_kv {
            tensors.push(("bias_k".into(), bias_k.clone()));
            tensors.push(("bias_v".into(), bias_v.clone()));
        }
        tensors.extend(self.sinks.iter().map(|sinks| ("sinks".into(), sinks.clone())));
        Ok(tensors)
    }

    /// Writes [`state_dict`](Self::state_dict) as a safetensors file.
    ///
    /// # Errors
    /// As that, and if the file cannot be written.
    pub fn save(&self, path: impl AsRef<std::path::Path>, layout: WeightLayout) -> Result<()> {
        let tensors: std::collections::HashMap<_, _> = self.state_dict(layout)?.into_iter().collect();
        let path = path.as_ref();
        candle_core::safetensors::save(&tensors, path)
            .map_err(|error| Error::msg(format!("[save] cannot write {}: {}", path.display(), root(&error))))
    }

    /// (B, H, T, D_v), a view of (B, T, H, D_v), to (B, T, out_dim).
    fn merge(&self, context: &Tensor, batched: bool) -> Result<Tensor> {
        let (b, h, t, d_v) = context.dims4()?;
        let merged = context.transpose(1, 2)?.reshape((b, t, h * d_v))?;
        let ys = self.projections.project_output(merged)?;
        if batched { Ok(ys) } else { ys.squeeze(0) }
    }
}

/// Not `Module`: Candle gives every `Module` a `forward_t` that ignores `train`, and dropout would be lost in silence.
impl ModuleT for MultiHeadAttention {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward_with(AttentionInput::new(xs).with_train(train))
    }
}
