//! From inputs to heads: projected, normalised and rotated; those of cross-attention once for several calls.

use candle_core::{Result, Tensor, bail};

use super::checks::Inputs;
use super::{AttentionInput, MultiHeadAttention, OP};
use crate::position::{Positions, RopeAxes, RopeConfig, Rotation};
use Projection::{Key, Query, Value};
use candle_attention_modules::base::Expect;
use candle_attention_modules::linear::{KeysAndValues, Projected, Projection};
use candle_attention_modules::norm::{AllReduce, QkNormScope};

impl MultiHeadAttention {
    /// Queries (B, H, T_q, D), keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v), normalised and rotated; no keys
    /// and values if the call takes them from an earlier layer's cache.
    pub(super) fn project(&self, input: &AttentionInput, inputs: &Inputs) -> Result<Projected> {
        let (mut at_queries, mut at_keys) = (None, None);
        if let (Some(positions), Some(rotary)) = (&inputs.positions, &self.rotary) {
            let on_axes = positions.axes.as_ref().map(|axes| rotary.on_axes(&axes.entries));
            at_queries = Some(on_axes.unwrap_or_else(|| rotary.at(&positions.queries))?);
            at_keys = positions.keys.as_ref().map(|keys| rotary.at(keys)).transpose()?;
        }
        let key_value = inputs.key_value.as_ref().map(|[keys, values]| [keys, values]);
        let Projected { q, kv, gate } = self.projections.query_key_value(&inputs.queries, key_value)?;
        let rotation = at_keys.as_ref().or(at_queries.as_ref());
        let kv = match kv {
            Some(KeysAndValues { keys, values }) => {
                let keys = self.heads(Key, keys, rotation, input.all_reduce)?;
                Some(KeysAndValues { keys, values: self.heads(Value, values, None, None)? })
            }
            None => input.memory.map(|memory| KeysAndValues { keys: memory.k.clone(), values: memory.v.clone() }),
        };
        let q = self.heads(Query, q, at_queries.as_ref(), input.all_reduce)?;
        let scaling = self.config.attention_temperature().zip(inputs.positions.as_ref());
        let factors = scaling.map(|(scaling, at)| scaling.factors(&at.queries, q.dtype(), q.device())).transpose()?;
        let q = match factors.flatten() {
            // In the order of q's memory, (B, T, H, D).
            Some(factors) => q.transpose(1, 2)?.broadcast_mul(&factors.transpose(1, 2)?)?.transpose(1, 2)?,
            None => q,
        };
        Ok(Projected { q, kv, gate })
    }

    /// What the projection of a place gives, (B, T, heads · width), as heads (B, heads, T, width), a view of (B, T,
    /// ..): normalised as a whole or head by head, clipped, with what the layer appends to keys and values, and
    /// rotated.
    fn heads(
        &self,
        place: Projection,
        mut xs: Tensor,
        rotation: Option<&Rotation>,
        sum: Option<&AllReduce>,
    ) -> Result<Tensor> {
        let (cfg, h_kv) = (&self.config, self.config.num_kv_heads());
        let [of_queries, of_keys, of_values, _] = &self.norms;
        let (heads, norm, appended) = match place {
            Query => (cfg.num_heads(), of_queries, None),
            Key => (h_kv, of_keys, Some("bias_k")),
            _ => (h_kv, of_values, Some("bias_v")),
        };
        let is_of_all = place != Value && cfg.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection);
        let (of_all, of_each) = if is_of_all { (norm.as_ref(), None) } else { (None, norm.as_ref()) };
        if let Some(norm) = of_all {
            xs = norm.forward_sharded(&xs, sum)?;
        }
        if let Some(clip) = cfg.clip_qkv() {
            xs = xs.clamp(-clip, clip)?;
        }
        if let Some(learned) = appended.filter(|_| cfg.appended_keys() > 0) {
            xs = self.append_rows(xs, self.parameters.tensor(learned)?)?;
        }
        xs = split_heads(&xs, heads)?;
        if let Some(norm) = of_each.filter(|_| !cfg.norm_after_rope()) {
            xs = norm.forward(&xs)?;
        }
        if let Some(rotation) = rotation {
            xs = rotation.apply(&xs)?;
        }
        if let Some(norm) = of_each.filter(|_| cfg.norm_after_rope()) {
            xs = norm.forward(&xs)?;
        }
        xs.transpose(1, 2)
    }

    /// (B, T, width) and the rows that the layer appends to each sequence: the learned one, then that of zeros.
    fn append_rows(&self, xs: Tensor, learned: Option<Tensor>) -> Result<Tensor> {
        let (b, _, width) = xs.dims3()?;
        let zeros = || Tensor::zeros((b, 1, width), xs.dtype(), xs.device());
        let zeros = self.config.add_zero_attn().then(zeros).transpose()?;
        let learned = learned.map(|row| row.broadcast_as((b, 1, width))?.contiguous()).transpose()?;
        Tensor::cat(&[Some(xs), learned, zeros].into_iter().flatten().collect::<Vec<_>>(), 1)
    }
}

/// (B, T, heads · width) to (B, T, heads, width): a view, also of columns of a wider product.
pub(super) fn split_heads(xs: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, t, columns) = xs.dims3()?;
    let split = [b, t, heads, columns / heads];
    if !xs.is_contiguous() {
        let view = xs.unfold(2, split[3], split[3])?;
        // Candle counts the heads in f32, which holds no more than 2^24 columns.
        if view.dims() == split {
            return Ok(view);
        }
    }
    xs.reshape(&split)
}

/// Keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v) of cross-attention as a layer projected them
/// ([`MultiHeadAttention::project_memory`]), for as many calls as there are queries to come; or those of a whole
/// sequence, which later layers read too ([`KvSharing::EarlierLayer`](crate::KvSharing)).
#[derive(Debug, Clone)]
pub struct ProjectedMemory {
    /// Followed by those that the layer appends.
    pub(super) k: Tensor,
    pub(super) v: Tensor,
    /// T_kv without these.
    pub(super) t_kv: usize,
    batched: bool,
}

impl MultiHeadAttention {
    /// Projects what cross-attention attends to, an encoder's outputs, once for all steps of a decoder: keys from
    /// `keys` (B, T_kv, kdim), values from `values` (B, T_kv, vdim), both without B for one sequence.
    ///
    /// [`AttentionInput::with_memory`] gives the numbers of [`with_key_value`](AttentionInput::with_key_value) in a
    /// call of this layer; another layer's memory of the same shape cannot be told from its own. Rotary positions of
    /// the keys are 0..T_kv.
    ///
    /// # Errors
    /// For inputs whose shape, dtype or device does not fit the layer or each other, and for more positions than the
    /// context length.
    ///
    /// ```
    /// use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let mha = MultiHeadAttention::new(
    ///     &MultiHeadAttentionConfig::new(64, 4),
    ///     VarBuilder::zeros(DType::F32, &Device::Cpu),
    /// )?;
    /// let encoded = Tensor::randn(0f32, 1., (2, 30, 64), &Device::Cpu)?;
    /// let memory = mha.project_memory(&encoded, &encoded)?;
    /// for _ in 0..3 {
    ///     let token = Tensor::randn(0f32, 1., (2, 1, 64), &Device::Cpu)?;
    ///     mha.forward_with(AttentionInput::new(&token).with_memory(&memory))?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn project_memory(&self, keys: &Tensor, values: &Tensor) -> Result<ProjectedMemory> {
        let cfg = &self.config;
        let batched = keys.rank() != 2;
        let [k_in, v_in] = self.check_key_value(None, &self.expected(batched), [keys, values])?;
        let (b, t_kv, _) = k_in.dims3()?;
        self.check_context(t_kv)?;
        self.check_addressable(b, t_kv, format_args!("keys {:?} and values {:?}", keys.dims(), values.dims()))?;
        let rotation = match &self.rotary {
            Some(_) if cfg.rope().and_then(RopeConfig::axes).is_some_and(RopeAxes::is_axial) => {
                bail!("[{OP}] keys of a memory have one position each, but rotary positions are on several axes")
            }
            Some(rotary) => Some(rotary.at(&Positions::starting_at(&[0], t_kv)?)?),
            None => None,
        };
        let Some(KeysAndValues { keys, values }) = self.projections.key_value(&k_in, &v_in)? else {
            bail!("[{OP}] keys and values are those of an earlier layer, expected a memory that it projects")
        };
        let k = self.heads(Key, keys, rotation.as_ref(), None)?;
        let v = self.heads(Value, values, None, None)?;
        // Read in every call from now on: each head's positions side by side.
        Ok(ProjectedMemory { k: k.contiguous()?, v: v.contiguous()?, t_kv, batched })
    }

    /// That a memory is this layer's or one that it may read, and of the queries' batch.
    pub(super) fn check_memory(&self, input: &AttentionInput, memory: &ProjectedMemory, b: usize) -> Result<()> {
        let batched = input.queries.rank() == 3;
        let others = [("key positions", input.key_positions.is_some()), ("packed sequences", input.packed.is_some())];
        if let Some((given, _)) = others.iter().find(|(_, is_given)| *is_given && self.rotary.is_some()) {
            bail!("[{OP}] {given} were given beside a memory, whose keys stand at 0..T_kv; expected keys and values")
        }
        let cfg = &self.config;
        let rows = memory.t_kv + cfg.appended_keys();
        if memory.batched != batched {
            let of = |batched| if batched { "a batch" } else { "one sequence without a batch" };
            bail!("[{OP}] the memory is of {}, expected {} as the queries", of(memory.batched), of(batched))
        }
        let (dtype, device) = (self.projections.dtype, &self.projections.device);
        for (name, tensor, width) in
            [("the memory's keys", &memory.k, cfg.head_dim()), ("the memory's values", &memory.v, cfg.value_head_dim())]
        {
            let tensor = Expect::many(OP, name, tensor);
            tensor.sizes(&[b, cfg.num_kv_heads(), rows, width])?;
            tensor.dtype(dtype, "the weights'")?.same_device("the weights", device)?;
        }
        Ok(())
    }
}
