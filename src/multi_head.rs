//! The layer: project, split into heads, attend, merge, project.

use candle_core::{D, Error, Module, ModuleT, Result, Tensor, bail};
use candle_nn::{Init, Linear, VarBuilder};

use crate::init::TorchSeed;
use crate::qk_norm::{Norm, QkNormScope};
use crate::sdpa::accumulation_dtype;
use crate::size::is_addressable;
use crate::weights::{Parts, Projections, Source, load_projections, root, state_dict};
use crate::{
    AttentionMask, AttentionOutput, Backend, MultiHeadAttentionConfig, SdpaOptions, WeightLayout,
    scaled_dot_product_attention, scaled_dot_product_attention_with_weights,
};

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
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    out_proj: Option<Linear>,
    parts: Option<Parts>,
    qk_norm: Option<(Norm, Norm)>,
    sinks: Option<Tensor>,
    bias_kv: Option<(Tensor, Tensor)>,
    mask: AttentionMask,
}

/// What one call of a layer reads, apart from the layer itself. A `&Tensor` is self-attention over it.
#[derive(Debug, Clone)]
pub struct AttentionInput<'a> {
    pub(crate) queries: &'a Tensor,
    pub(crate) key_value: Option<(&'a Tensor, &'a Tensor)>,
    pub(crate) mask: Option<&'a AttentionMask>,
    pub(crate) train: bool,
    pub(crate) dropout_seed: Option<&'a TorchSeed>,
    pub(crate) backend: Backend,
}

impl<'a> AttentionInput<'a> {
    /// Self-attention over `xs` (B, T, E), or (T, E).
    pub fn new(xs: &'a Tensor) -> Self {
        Self { queries: xs, key_value: None, mask: None, train: false, dropout_seed: None, backend: Backend::Auto }
    }

    /// Cross-attention: keys are projected from `keys` (B, T_kv, key_size), values from `values` (B, T_kv, value_size).
    pub fn with_key_value(mut self, keys: &'a Tensor, values: &'a Tensor) -> Self {
        self.key_value = Some((keys, values));
        self
    }

    /// A mask that holds beside the layer's own. A prefix in it lifts the layer's own causal constraint too.
    pub fn with_mask(mut self, mask: &'a AttentionMask) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Whether dropout happens.
    pub fn with_train(mut self, train: bool) -> Self {
        self.train = train;
        self
    }

    /// Draws dropout from PyTorch's generator, see
    /// [`SdpaOptions::with_dropout_seed`].
    pub fn with_dropout_seed(mut self, seed: &'a TorchSeed) -> Self {
        self.dropout_seed = Some(seed);
        self
    }

    /// Which implementation of attention runs.
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }
}

impl<'a> From<&'a Tensor> for AttentionInput<'a> {
    fn from(xs: &'a Tensor) -> Self {
        Self::new(xs)
    }
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
    /// # Errors
    /// As [`new`](Self::new), and for a config that the layout cannot hold.
    pub fn load(cfg: &MultiHeadAttentionConfig, layout: WeightLayout, vb: VarBuilder) -> Result<Self> {
        cfg.validate()?;
        let source = Source::new("multi_head_attention", layout, vb.clone());
        source.check_dtype()?;
        let Projections { q, k, v, o, parts } = load_projections(cfg, layout, vb)?;
        let (h, h_kv, d) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim());
        let qk_norm = match cfg.qk_norm() {
            None => {
                for name in ["q_norm.weight", "k_norm.weight"] {
                    source.refuse(name, "the config says there is no qk_norm")?;
                }
                None
            }
            Some(norm) => {
                let (q, k) = match norm.scope {
                    QkNormScope::PerHead => (d, d),
                    QkNormScope::Projection => (h * d, h_kv * d),
                };
                Some((Norm::load(norm, "q_norm", q, &source)?, Norm::load(norm, "k_norm", k, &source)?))
            }
        };
        let bias_kv = if cfg.bias_kv() {
            // `xavier_normal_` of a (1, 1, width) parameter.
            let learned = |name, width: usize| {
                source.get((1, 1, width), name, Init::Randn { mean: 0.0, stdev: (width as f64).recip().sqrt() })
            };
            Some((learned("bias_k", h_kv * d)?, learned("bias_v", h_kv * cfg.value_head_dim())?))
        } else {
            for name in ["bias_k", "bias_v"] {
                source.refuse(name, "the config says there is no bias_kv")?;
            }
            None
        };
        let sinks = if cfg.sinks() {
            Some(source.get(h, "sinks", Init::Const(0.0))?)
        } else {
            source.refuse("sinks", "the config says there are no sinks")?;
            None
        };
        let mut mask = if cfg.causal() { AttentionMask::causal() } else { AttentionMask::none() };
        if let Some(window) = cfg.window() {
            mask = mask.with_window(window);
        }
        Ok(Self {
            config: cfg.clone(),
            q_proj: q,
            k_proj: k,
            v_proj: v,
            out_proj: o,
            parts,
            qk_norm,
            sinks,
            bias_kv,
            mask,
        })
    }

    /// What the layer was built from.
    pub fn config(&self) -> &MultiHeadAttentionConfig {
        &self.config
    }

    /// The query, key, value and output projections, as they were loaded. Over variables in a layout that copies them (a
    /// stack of heads, packed rows), training is seen in [`state_dict`](Self::state_dict) and in the next call only.
    pub fn projections(&self) -> (&Linear, &Linear, &Linear, Option<&Linear>) {
        (&self.q_proj, &self.k_proj, &self.v_proj, self.out_proj.as_ref())
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
    /// length, and a mask that does not fit.
    pub fn forward_with<'a>(&self, input: impl Into<AttentionInput<'a>>) -> Result<Tensor> {
        let call = Projected::new(self, &input.into())?;
        let context = scaled_dot_product_attention(&call.q, &call.k, &call.v, &call.mask, &call.options)?;
        self.merge(&context, call.batched)
    }

    /// [`forward_with`](Self::forward_with) that also returns the weights (B, H, T_q, T_kv), after dropout; (H, T_q, T_kv)
    /// for an input (T, E).
    ///
    /// # Errors
    /// As [`forward_with`](Self::forward_with).
    pub fn forward_with_weights<'a>(&self, input: impl Into<AttentionInput<'a>>) -> Result<AttentionOutput> {
        let call = Projected::new(self, &input.into())?;
        let output = scaled_dot_product_attention_with_weights(&call.q, &call.k, &call.v, &call.mask, &call.options)?;
        let weights = if call.batched { output.weights } else { output.weights.squeeze(0)? };
        Ok(AttentionOutput { context: self.merge(&output.context, call.batched)?, weights })
    }

    /// The layer's parameters under the names and in the shapes of a layout, as a state dict that PyTorch reads.
    ///
    /// A causal layer with a context length gets the persistent `mask` buffer in the layouts whose modules register one
    /// (`book`, `short` and their stacks), so that a strict `load_state_dict` succeeds.
    ///
    /// # Errors
    /// If the layout cannot hold the layer, and why.
    pub fn state_dict(&self, layout: WeightLayout) -> Result<Vec<(String, Tensor)>> {
        let [q, k, v] = self.current_projections()?;
        let projections = Projections { q, k, v, o: self.out_proj.clone(), parts: None };
        let mut tensors = state_dict(&self.config, layout, &projections)?;
        if let Some((q_norm, k_norm)) = &self.qk_norm {
            tensors.extend(q_norm.parameters("q_norm"));
            tensors.extend(k_norm.parameters("k_norm"));
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

    /// Query, key and value projections with what their variables hold now.
    fn current_projections(&self) -> Result<[Linear; 3]> {
        match &self.parts {
            Some(parts) => parts.assemble(),
            None => Ok([self.q_proj.clone(), self.k_proj.clone(), self.v_proj.clone()]),
        }
    }

    /// (B, H, T, D_v) to (B, T, out_dim).
    fn merge(&self, context: &Tensor, batched: bool) -> Result<Tensor> {
        let (b, h, t, d_v) = context.dims4()?;
        let merged = context.transpose(1, 2)?.reshape((b, t, h * d_v))?;
        let ys = match &self.out_proj {
            Some(out_proj) => project(out_proj, &merged)?,
            None => merged,
        };
        if batched { Ok(ys) } else { ys.squeeze(0) }
    }
}

/// Not `Module`: Candle gives every `Module` a `forward_t` that ignores `train`, and dropout would be lost in silence.
impl ModuleT for MultiHeadAttention {
    fn forward_t(&self, xs: &Tensor, train: bool) -> Result<Tensor> {
        self.forward_with(AttentionInput::new(xs).with_train(train))
    }
}

/// Queries, keys and values of one call, ready to attend.
struct Projected {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    options: SdpaOptions,
    batched: bool,
}

impl Projected {
    fn new(layer: &MultiHeadAttention, input: &AttentionInput) -> Result<Self> {
        let cfg = &layer.config;
        let (keys, values) = input.key_value.unwrap_or((input.queries, input.queries));
        let batched = input.queries.rank() == 3;
        let q_in = layer.checked("queries", input.queries, cfg.embed_dim(), batched)?;
        let k_in = layer.checked("keys", keys, cfg.key_size(), batched)?;
        let v_in = layer.checked("values", values, cfg.value_size(), batched)?;
        let ((b, t_q, _), (b_k, t_kv, _), (b_v, t_v, _)) = (q_in.dims3()?, k_in.dims3()?, v_in.dims3()?);
        if b_k != b || b_v != b || t_v != t_kv {
            bail!(
                "[multi_head_attention] queries {:?}, keys {:?} and values {:?} differ in batch size, or keys and values in length",
                input.queries.dims(),
                keys.dims(),
                values.dims()
            )
        }
        if let Some(context_length) = cfg.context_length().filter(|&most| t_q > most || t_kv > most) {
            bail!(
                "[multi_head_attention] {} positions are more than the context length {context_length}",
                t_q.max(t_kv)
            )
        }

        let (h, h_kv, d, d_v) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim(), cfg.value_head_dim());
        if !is_addressable(&[b, t_q.max(t_kv), h, d.max(d_v)]) {
            bail!(
                "[multi_head_attention] queries {:?} and keys {:?} are more than any memory holds",
                input.queries.dims(),
                keys.dims()
            )
        }
        let [q_proj, k_proj, v_proj] = layer.current_projections()?;
        let (mut q, mut k) = (project(&q_proj, &q_in)?, project(&k_proj, &k_in)?);
        let mut v = project(&v_proj, &v_in)?;
        let mut mask = match input.mask {
            Some(mask) => layer.mask.lifted_by(mask).and(mask),
            None => layer.mask.clone(),
        };
        if let Some((bias_k, bias_v)) = &layer.bias_kv {
            mask = mask.with_appended_keys(1, (b, h, t_q, t_kv), accumulation_dtype(q.dtype()), q.device())?;
            k = Tensor::cat(&[&k, &bias_k.broadcast_as((b, 1, h_kv * d))?.contiguous()?], 1)?;
            v = Tensor::cat(&[&v, &bias_v.broadcast_as((b, 1, h_kv * d_v))?.contiguous()?], 1)?;
        }
        let norm = cfg.qk_norm().zip(layer.qk_norm.as_ref());
        if let Some((_, (q_norm, k_norm))) = norm.filter(|(norm, _)| norm.scope == QkNormScope::Projection) {
            (q, k) = (q_norm.forward(&q)?, k_norm.forward(&k)?);
        }
        (q, k, v) = (split(&q, h)?, split(&k, h_kv)?, split(&v, h_kv)?);
        if let Some((_, (q_norm, k_norm))) = norm.filter(|(norm, _)| norm.scope == QkNormScope::PerHead) {
            (q, k) = (q_norm.forward(&q)?, k_norm.forward(&k)?);
        }

        let mut options = SdpaOptions::default().with_dropout(cfg.dropout(), input.train).with_backend(input.backend);
        options.scale = cfg.scale();
        options.softcap = cfg.softcap();
        options.sinks = layer.sinks.clone();
        options.dropout_seed = input.dropout_seed.cloned();
        let heads_first = |tensor: Tensor| tensor.transpose(1, 2);
        Ok(Self { q: heads_first(q)?, k: heads_first(k)?, v: heads_first(v)?, mask, options, batched })
    }
}

impl MultiHeadAttention {
    /// An input as (B, T, width), after its shape, dtype and device were checked.
    fn checked(&self, what: &str, xs: &Tensor, width: usize, batched: bool) -> Result<Tensor> {
        let rank = if batched { 3 } else { 2 };
        if xs.rank() != rank || xs.dim(D::Minus1)? != width {
            let expected = match (batched, what) {
                (true, _) => format!("(B, T, {width})"),
                (false, "queries") => format!("(B, T, {width}) or (T, {width})"),
                (false, _) => format!("(T, {width}) beside queries without a batch"),
            };
            bail!("[multi_head_attention] {what} have shape {:?}, expected {expected}", xs.dims())
        }
        let weight = self.q_proj.weight();
        if xs.dtype() != weight.dtype() {
            bail!(
                "[multi_head_attention] {what} have dtype {:?}, expected the weights' {:?}",
                xs.dtype(),
                weight.dtype()
            )
        }
        if !xs.device().same_device(weight.device()) {
            bail!(
                "[multi_head_attention] {what} are on {:?}, expected them beside the weights on {:?}",
                xs.device().location(),
                weight.device().location()
            )
        }
        if batched { Ok(xs.clone()) } else { xs.unsqueeze(0) }
    }
}

/// A projection of (B, T, in) to (B, T, out). Candle multiplies no empty matrices on some devices.
fn project(linear: &Linear, xs: &Tensor) -> Result<Tensor> {
    let (b, t, _) = xs.dims3()?;
    if b * t == 0 {
        return Tensor::zeros((b, t, linear.weight().dim(0)?), xs.dtype(), xs.device());
    }
    linear.forward(&xs.contiguous()?)
}

/// (B, T, heads · width) to (B, T, heads, width).
fn split(xs: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, t, width) = xs.dims3()?;
    xs.reshape((b, t, heads, width / heads))
}
