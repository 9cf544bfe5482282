//! A layer of linear attention by the gated delta rule, and its parameters.

mod cache;
mod config;
mod conv;
mod conv_cuda;
mod drafts;
mod forward;
mod gates;
mod input;
mod layout;
mod pool;
mod projections;
mod recurrence;
mod state;
mod tree;

pub use cache::DeltaCache;
pub use config::GatedDeltaNetConfig;
pub use conv::CONVOLUTION_CASE;
pub use gates::GATES_CASE;
pub use input::DeltaInput;
pub use layout::DeltaLayout;
pub use pool::DeltaPool;

use std::path::Path;

use candle_core::{DType, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use candle_attention_modules::base::{
    FusedTensor, HeadCounts, HeadShard, Heads, Parameter, ParameterList, ParameterReader, ParameterSpec,
    QueryHeadOrder, Share, WeightAndBias, WholeTensors, frozen, has, part, save,
};
use candle_attention_modules::linear::{PackedLinear, PackedProjection};
use candle_attention_modules::norm::RmsNorm;
use config::OP;
use conv::taps_of;
use gates::{A_LOG, DT_BIAS, DecayParameters};
use projections::{ConvChannels, Projections};

/// The name of the norm's weight among the layer's parameters.
const NORM: &str = "norm.weight";

/// The names of the second projections, from compressed inputs to the gate and to decays.
const GATE_UP: &str = "g_b_proj";
const DECAY_UP: &str = "f_b_proj";

/// A layer of linear attention by the gated delta rule (Yang et al., <https://arxiv.org/abs/2412.06464>), as in
/// most layers of Qwen3-Next, Qwen3.5, Kimi Linear (<https://arxiv.org/abs/2510.26692>) and OLMo Hybrid.
///
/// Queries, keys and values pass through a short causal convolution of each channel and SiLU, and queries and keys are
/// divided by their length. [`gated_delta_rule`](crate::gated_delta_rule) runs over them with `decay = -e^A_log
/// softplus(x_a + dt_bias)` and `beta = sigmoid(x_b)`, where x_a and x_b are projections of the input. Its output is
/// normalised for each head (RMS norm), multiplied by a gate, and projected to (B, T, E).
///
/// The layer is causal. The memory of generation does not grow with the number of tokens: a [`DeltaCache`] stores the
/// state between calls, or a [`DeltaPool`] for the sequences of a [`PageTable`](candle_attention_core::PageTable), and
/// the layer itself has none.
///
/// ```
/// use candle_attention::{DeltaCache, DeltaInput, GatedDeltaNet, GatedDeltaNetConfig};
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::VarBuilder;
/// # fn main() -> candle_core::Result<()> {
/// let cfg = GatedDeltaNetConfig::new(64, 4).with_num_key_heads(2).with_key_head_dim(16).with_value_head_dim(32);
/// let net = GatedDeltaNet::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
///
/// let prompt = Tensor::randn(0f32, 1., (2, 5, 64), &Device::Cpu)?;
/// let mut cache = DeltaCache::default();
/// let ys = net.forward_with(DeltaInput::new(&prompt).with_cache(&mut cache))?;
/// assert_eq!((ys.dims(), cache.len()), ([2, 5, 64].as_slice(), 5));
/// // Two sequences, four states (16, 32), and three earlier inputs of 2 · 2 · 16 + 4 · 32 channels; f32.
/// assert_eq!(cache.memory(), 2 * (4 * 16 * 32 + 3 * 192) * 4);
/// # Ok(()) }
/// ```
///
/// Inputs are (B, T, E), or (T, E) for one sequence, in the weights' dtype. Over plain tensors on a CPU the weights of
/// all projections of the input are packed together ([`PackedLinear`]); variables are read in every call, so that the
/// layer can be trained.
#[derive(Debug, Clone)]
pub struct GatedDeltaNet {
    config: GatedDeltaNetConfig,
    projections: Projections<PackedProjection>,
    /// From the compressed input to the gate, if the gate has a rank.
    gate_up: Option<PackedLinear>,
    /// From the compressed input to decays, if decays have a rank.
    decay_up: Option<PackedLinear>,
    /// The weights (C, 1, K) of the convolutions of queries, keys and values.
    convolution: Parameter,
    /// The taps (K, C) of the convolutions, unless the weights are variables.
    taps: Option<Tensor>,
    /// The parameters of decays, unless one is a variable.
    decay_parameters: Option<DecayParameters>,
    /// `A_log` (H,) or (1, 1, H, 1), `dt_bias` (decays,), `norm.weight` (D_v,).
    parameters: ParameterList,
    norm: RmsNorm,
    out: PackedLinear,
    /// The order of the value heads in the inputs of `out`.
    out_order: QueryHeadOrder,
    /// The dtype of inputs.
    dtype: DType,
}

/// The weights of a layer that are products with its inputs, or with the rule's outputs.
#[derive(Debug, Clone)]
pub struct DeltaWeights {
    /// The projections of queries, keys, values, the gate, betas and decays, in this order.
    pub projections: Vec<PackedProjection>,
    /// The projection from compressed inputs to the gate, if the gate has a rank.
    pub gate_up: Option<PackedLinear>,
    /// The projection from compressed inputs to decays, if decays have a rank.
    pub decay_up: Option<PackedLinear>,
    /// The output projection, (E, H · D_v).
    pub out: PackedLinear,
    /// The order of the value heads in the inputs of the output projection.
    pub out_order: QueryHeadOrder,
}

/// Constructors.
impl GatedDeltaNet {
    /// Creates a layer with the names of [`DeltaLayout::Separate`] below the builder's prefix. A new `A_log` is uniform
    /// from 0 to ln 16, a new `dt_bias` 1.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn new(cfg: &GatedDeltaNetConfig, vb: VarBuilder) -> Result<Self> {
        Self::load(cfg, DeltaLayout::Separate, vb)
    }

    /// Loads a layer with the names of a layout below the builder's prefix.
    ///
    /// Plain tensors are read once, here; variables are read in every call, so that the layer can be trained.
    ///
    /// # Errors
    /// For a config that does not fit together or that the layout has no names for, and for a missing or misshapen
    /// tensor, named with both shapes.
    pub fn load(cfg: &GatedDeltaNetConfig, layout: DeltaLayout, vb: VarBuilder) -> Result<Self> {
        Self::read(cfg, layout, ParameterReader::new(OP, layout, vb)?)
    }

    /// Loads the heads of one rank from Candle's sharded builder or one of whole tensors, for tensor parallelism as in
    /// [`MultiHeadAttention::load_shard`]. The sum of the outputs of all ranks is the output of the whole layer.
    /// [`config`](Self::config) is the config of the rank's own layer.
    ///
    /// # Errors
    /// As [`load`](Self::load), and for more ranks than value heads.
    ///
    /// [`MultiHeadAttention::load_shard`]: candle_attention_core::MultiHeadAttention::load_shard
    pub fn load_shard(
        cfg: &GatedDeltaNetConfig,
        layout: DeltaLayout,
        shard: HeadShard,
        vb: &impl WholeTensors,
    ) -> Result<Self> {
        Self::read(cfg, layout, ParameterReader::sharded(OP, layout, vb, shard)?)
    }

    /// Makes a layer of the weights of a GGUF file. The builder has the other parameters, with the names of
    /// [`DeltaLayout::Separate`] or, for one convolution of all channels, of [`DeltaLayout::Qwen3_5`].
    ///
    /// # Errors
    /// As [`load`](Self::load).
    #[doc(hidden)]
    pub fn of_gguf(cfg: &GatedDeltaNetConfig, weights: DeltaWeights, vb: VarBuilder) -> Result<Self> {
        let layout = if has(&vb, "conv1d.weight") { DeltaLayout::Qwen3_5 } else { DeltaLayout::Separate };
        let reader = reader_of_heads(cfg, ParameterReader::new(OP, "gguf", vb)?)?;
        let parameters = ParameterList::load(&specs(cfg, layout.output_names().norm, &reader), &reader)?;
        let convolution = layout.read_convolutions(cfg, &reader)?;
        Self::assemble(cfg, &reader, weights, parameters, convolution)
    }

    /// Reads all heads, or the heads of a shard.
    fn read(cfg: &GatedDeltaNetConfig, layout: DeltaLayout, source: ParameterReader) -> Result<Self> {
        let reader = reader_of_heads(cfg, source)?;
        let tensors = layout.projections(OP, cfg)?;
        let convolutions = layout.convolutions(cfg);
        let biases = tensors.iter().chain(&convolutions).map(|tensor| tensor.spec.name.replace("weight", "bias"));
        reader.refuse(biases, "the layer has no biases")?;
        let mut rows = Vec::new();
        for tensor in &tensors {
            rows.extend(tensor.read(&reader)?.into_iter().map(|weight| WeightAndBias { weight, bias: None }));
        }
        let projections = PackedProjection::of_rows(&Vec::from_iter(&rows))?;
        let width = cfg.num_value_heads() * cfg.value_head_dim();
        let names = layout.output_names();
        // Ling 3 has another name.
        let is_ling = layout == DeltaLayout::Separate && reader.has("dense.weight");
        let out_name = if is_ling { "dense" } else { names.projection };
        let parameters = ParameterList::load(&specs(cfg, names.norm, &reader), &reader)?;
        let gate_up = up_projection(&reader, GATE_UP, cfg.gate_rank(), width)?;
        let decay_up = up_projection(&reader, DECAY_UP, cfg.decay_rank(), cfg.num_decays())?;
        let convolution = layout.read_convolutions(cfg, &reader)?;
        let out_share = Some(Share::Heads { heads: Heads::Query, dim: 1 });
        let out = reader.linear(out_name, (cfg.embed_dim(), width), false, out_share)?.try_into()?;
        let weights = DeltaWeights { projections, gate_up, decay_up, out, out_order: QueryHeadOrder::Grouped };
        Self::assemble(cfg, &reader, weights, parameters, convolution)
    }

    /// Builds a layer from its loaded weights and parameters.
    fn assemble(
        cfg: &GatedDeltaNetConfig,
        reader: &ParameterReader,
        weights: DeltaWeights,
        parameters: ParameterList,
        convolution: Parameter,
    ) -> Result<Self> {
        let value_heads = reader.own_range(Heads::Query, cfg.num_value_heads()).len();
        let key_heads = reader.own_range(Heads::Key, cfg.num_key_heads()).len();
        let decay_parameters = Some(DecayParameters::new(&parameters)?).filter(|decays| !decays.is_tracked());
        Ok(Self {
            projections: Projections::from_vec(weights.projections)?,
            gate_up: weights.gate_up,
            decay_up: weights.decay_up,
            taps: if convolution.is_tracked() { None } else { Some(taps_of(&convolution)?) },
            convolution,
            norm: RmsNorm::new(parameters.expect(NORM)?, cfg.norm_eps())?,
            decay_parameters,
            parameters,
            out: weights.out,
            out_order: weights.out_order,
            dtype: reader.vb.dtype(),
            config: cfg.with_heads(value_heads, key_heads),
        })
    }

    /// Returns a copy of the layer for inference after training: the present values of its variables as plain packed
    /// weights, which are not tracked for gradients.
    ///
    /// # Errors
    /// If memory is short.
    pub fn freeze(&self) -> Result<Self> {
        let layout = DeltaLayout::Separate;
        let freeze = |(name, tensor): (String, Tensor)| Ok((name, frozen(&tensor)?));
        let tensors = self.state_dict(layout)?.into_iter().map(freeze).collect::<Result<_>>()?;
        Self::load(&self.config, layout, VarBuilder::from_tensors(tensors, self.dtype, self.out.device()))
    }
}

/// Config and parameters.
impl GatedDeltaNet {
    /// Returns the config of the layer.
    pub fn config(&self) -> &GatedDeltaNetConfig {
        &self.config
    }

    /// Returns the layer's parameters under the names and in the shapes of a layout, as a state dict that PyTorch
    /// reads.
    ///
    /// # Errors
    /// If the layout has no names for the layer's options, and if memory is short.
    pub fn state_dict(&self, layout: DeltaLayout) -> Result<Vec<(String, Tensor)>> {
        let names = layout.output_names();
        let linears = PackedProjection::to_linears(&self.projections.all())?;
        let projected: Vec<_> = linears.iter().map(|linear| linear.weight().clone()).collect();
        let convolution = self.convolution.tensor()?;
        let ConvChannels { q, k, v } = self.config.conv_channels();
        let convolved = [part(&convolution, 0, q)?, part(&convolution, 0, k)?, part(&convolution, 0, v)?];
        let mut named = Vec::new();
        named.extend(join_rows(&layout.projections("state_dict", &self.config)?, &projected)?);
        named.extend(join_rows(&layout.convolutions(&self.config), &convolved)?);
        let linear = |name: &str, linear: &PackedLinear| -> Result<(String, Tensor)> {
            Ok((format!("{name}.weight"), linear.to_linear()?.weight().clone()))
        };
        if let Some(gate_up) = &self.gate_up {
            named.push(linear(GATE_UP, gate_up)?);
        }
        if let Some(decay_up) = &self.decay_up {
            named.push(linear(DECAY_UP, decay_up)?);
        }
        let (out_name, out) = linear(names.projection, &self.out)?;
        named.push((out_name, self.out_order.reorder_to_grouped(&out, 1)?));
        for (name, tensor) in self.parameters.named()? {
            named.push((if name == NORM { format!("{}.weight", names.norm) } else { name }, tensor));
        }
        Ok(named)
    }

    /// Writes [`state_dict`](Self::state_dict) as a safetensors file.
    ///
    /// # Errors
    /// As [`state_dict`](Self::state_dict), and if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>, layout: DeltaLayout) -> Result<()> {
        save(self.state_dict(layout)?, path.as_ref())
    }
}

/// Joins the rows of projections, in their order, to the tensors of a layout, by name.
fn join_rows(tensors: &[FusedTensor], rows: &[Tensor]) -> Result<Vec<(String, Tensor)>> {
    let mut first = 0;
    let mut named = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        let end = first + tensor.parts.len();
        named.push((tensor.spec.name.clone(), tensor.join(&rows[first..end])?));
        first = end;
    }
    Ok(named)
}

/// Checks a config, and returns a reader that knows its heads.
fn reader_of_heads<'a>(cfg: &GatedDeltaNetConfig, source: ParameterReader<'a>) -> Result<ParameterReader<'a>> {
    cfg.validate()?;
    source.with_heads(HeadCounts { query: cfg.num_value_heads(), key: cfg.num_key_heads() })
}

/// Loads the projection from a compressed input of width `rank`, if there is a rank.
fn up_projection(
    reader: &ParameterReader,
    name: &str,
    rank: Option<usize>,
    width: usize,
) -> Result<Option<PackedLinear>> {
    let Some(rank) = rank else { return Ok(None) };
    let share = Some(Share::Heads { heads: Heads::Query, dim: 0 });
    reader.linear(name, (width, rank), false, share)?.try_into().map(Some)
}

/// Returns the parameters other than projections and convolutions. The file's norm has the name `norm`.
fn specs(cfg: &GatedDeltaNetConfig, norm: &str, reader: &ParameterReader) -> [ParameterSpec; 3] {
    let h = cfg.num_value_heads();
    let init = Init::Uniform { lo: 0.0, up: 16f64.ln() };
    // Kimi Linear's is (1, 1, H, 1).
    let is_wide =
        reader.has(A_LOG) && reader.get(h, A_LOG, init).is_err() && reader.get((1, 1, h, 1), A_LOG, init).is_ok();
    let (shape, dim) = if is_wide { (vec![1, 1, h, 1], 2) } else { (vec![h], 0) };
    [
        ParameterSpec::new(A_LOG, shape, init).by_head(Heads::Query, dim),
        ParameterSpec::new(DT_BIAS, [cfg.num_decays()], Init::Const(1.0)).by_head(Heads::Query, 0),
        ParameterSpec::new(NORM, [cfg.value_head_dim()], Init::Const(1.0)).stored(format!("{norm}.weight")),
    ]
}
