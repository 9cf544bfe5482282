//! From projections to heads: normalised and rotated queries, keys and values.

use candle_core::{Result, Tensor, bail};

use super::input::{AttentionInput, KeysFrom};
use super::memory::ProjectedMemory;
use super::validate::{CheckedLayerInput, KeyValueInputs};
use super::{MultiHeadAttention, OP, warnings};
use crate::cache::KvFloats;
use crate::position::{KeyValueHeads, Positions, RopeAxes, RopeConfig, Rotation};
use candle_attention_modules::base::{reshape_linked, transpose_linked};
use candle_attention_modules::linear::{KeysAndValues, Projected};
use candle_attention_modules::norm::{AllReduce, Norm, QkNormScope};

/// The heads of a call.
pub(super) struct ProjectedHeads {
    /// (B, H, T_q, D).
    pub q: Tensor,
    /// The queries that attend to the sink tokens of a cache, if their positions differ from `q`'s.
    pub sink_queries: Option<Tensor>,
    /// The keys and values that the call projects or that a memory has; `None` for an earlier layer's.
    pub kv: Option<KeyValueHeads>,
    /// The projection of the output gate, (B, T_q, H·D_v) or (B, T_q, H).
    pub gate: Option<Tensor>,
    /// The rotation of the queries.
    pub rotation: Option<Rotation>,
}

/// The rotations of a call's queries and keys.
struct Rotations {
    queries: Option<Rotation>,
    keys: Option<Rotation>,
    /// The rotation of the queries that attend to sink tokens.
    sink_queries: Option<Rotation>,
}

impl MultiHeadAttention {
    /// Projects the inputs of a call, and normalises and rotates the heads.
    pub(super) fn project(&self, inputs: &CheckedLayerInput, input: &AttentionInput) -> Result<ProjectedHeads> {
        let all_reduce = input.all_reduce;
        let key_value = inputs.key_value.as_ref().map(|KeyValueInputs { keys, values }| [keys, values]);
        let updates = inputs.adapters.updates(input.train);
        let Projected { q, kv, gate } = self.projections.query_key_value(&inputs.queries, key_value, updates)?;
        if input.train && self.adapter.is_some() && self.projections.has_idle_update()? {
            warnings::about_idle_adapter(OP);
        }
        let rotations = self.rotations(inputs)?;
        let kv = if let Some(KeysAndValues { keys, values }) = kv {
            let keys = self.key_heads(keys, rotations.keys.as_ref().or(rotations.queries.as_ref()), all_reduce)?;
            let heads = KeyValueHeads { keys, values: self.value_heads(values)? };
            // A cache and pages store the keys of calls alone.
            let is_cached = matches!(inputs.keys_from, KeysFrom::Cache(_) | KeysFrom::Pages);
            Some(if is_cached { heads } else { self.with_appended_heads(heads)? })
        } else if let KeysFrom::Memory(memory) = inputs.keys_from {
            Some(memory.for_batch(inputs.queries.dim(0)?)?)
        } else {
            None
        };
        let sink_queries = match &rotations.sink_queries {
            Some(rotation) => {
                let heads = self.query_heads(q.clone(), Some(rotation), all_reduce)?;
                Some(self.with_temperature(heads, inputs)?)
            }
            None => None,
        };
        let q = self.query_heads(q, rotations.queries.as_ref(), all_reduce)?;
        // The output for padding is 0, and 0 · NaN of padding's gate must not reach it.
        let gate = gate.map(|gate| inputs.tokens.without_padding(gate)).transpose()?;
        Ok(ProjectedHeads { q: self.with_temperature(q, inputs)?, sink_queries, kv, gate, rotation: rotations.queries })
    }

    /// Returns the rotations at the positions of a call, if the layer has rotary positions. Keys without positions of
    /// their own have the rotation of the queries.
    fn rotations(&self, inputs: &CheckedLayerInput) -> Result<Rotations> {
        let (Some(positions), Some(rotary)) = (&inputs.positions, &self.rotary) else {
            return Ok(Rotations { queries: None, keys: None, sink_queries: None });
        };
        let queries = match &positions.axes {
            Some(axes) => rotary.on_axes(&axes.entries)?,
            None => rotary.at_length(&positions.queries, positions.length_of_sequences())?,
        };
        let keys = match &positions.keys {
            Some(keys) => Some(rotary.at(keys)?),
            None => None,
        };
        let sink_queries = match &positions.in_cache {
            Some(in_cache) => Some(rotary.at_length(in_cache, positions.length_of_sequences())?),
            None => None,
        };
        Ok(Rotations { queries: Some(queries), keys, sink_queries })
    }

    /// Multiplies queries (B, H, T, D) by the config's attention temperature at their positions.
    fn with_temperature(&self, q: Tensor, inputs: &CheckedLayerInput) -> Result<Tensor> {
        let (Some(temperature), Some(positions)) = (self.config.attention_temperature(), &inputs.positions) else {
            return Ok(q);
        };
        match temperature.factors(positions.counted(), q.dtype(), q.device())? {
            // In the order of q's memory, (B, T, H, D).
            Some(factors) => q.transpose(1, 2)?.broadcast_mul(&factors.transpose(1, 2)?)?.transpose(1, 2),
            None => Ok(q),
        }
    }

    /// Normalises a whole projection (B, T, width), if the layer's norm is over whole projections, and clips it.
    fn normalized_projection(
        &self,
        projected: Tensor,
        norm: Option<&Norm>,
        all_reduce: Option<&AllReduce>,
    ) -> Result<Tensor> {
        match norm {
            Some(norm) if self.norms_span_projections() => self.clipped(norm.forward_sharded(&projected, all_reduce)?),
            _ => self.clipped(projected),
        }
    }

    /// Returns query heads (B, H, T, D), a view of (B, T, H, D), of a projection (B, T, H · D).
    fn query_heads(
        &self,
        projected: Tensor,
        rotation: Option<&Rotation>,
        all_reduce: Option<&AllReduce>,
    ) -> Result<Tensor> {
        let xs = self.normalized_projection(projected, self.norms.queries.as_ref(), all_reduce)?;
        let heads = split_heads(&xs, self.config.num_heads())?;
        let norm = self.norms.queries.as_ref().filter(|_| !self.norms_span_projections());
        transpose_linked(&self.normalized_and_rotated(heads, norm, rotation)?, 1, 2)
    }

    /// Returns key heads (B, H_kv, T, D), a view of (B, T, H_kv, D), of a projection (B, T, H_kv · D).
    fn key_heads(
        &self,
        projected: Tensor,
        rotation: Option<&Rotation>,
        all_reduce: Option<&AllReduce>,
    ) -> Result<Tensor> {
        let xs = self.normalized_projection(projected, self.norms.keys.as_ref(), all_reduce)?;
        let heads = split_heads(&xs, self.config.num_kv_heads())?;
        let norm = self.norms.keys.as_ref().filter(|_| !self.norms_span_projections());
        transpose_linked(&self.normalized_and_rotated(heads, norm, rotation)?, 1, 2)
    }

    /// Returns value heads (B, H_kv, T, D_v), a view of (B, T, H_kv, D_v), of a projection (B, T, H_kv · D_v).
    fn value_heads(&self, projected: Tensor) -> Result<Tensor> {
        let heads = split_heads(&self.clipped(projected)?, self.config.num_kv_heads())?;
        let heads = match &self.norms.values {
            Some(norm) => norm.forward(&heads)?,
            None => heads,
        };
        transpose_linked(&heads, 1, 2)
    }

    /// Returns whether the norms of queries and keys are over whole projections, and not over each head.
    fn norms_span_projections(&self) -> bool {
        self.config.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection)
    }

    /// Clips a projection, if the config says so.
    fn clipped(&self, xs: Tensor) -> Result<Tensor> {
        match self.config.clip_qkv() {
            Some(clip) => xs.clamp(-clip, clip),
            None => Ok(xs),
        }
    }

    /// Applies a norm over each head (B, T, heads, D) and a rotation, in the order of the config.
    fn normalized_and_rotated(
        &self,
        heads: Tensor,
        norm: Option<&Norm>,
        rotation: Option<&Rotation>,
    ) -> Result<Tensor> {
        let normalized = |xs: Tensor| match norm {
            Some(norm) => norm.forward(&xs),
            None => Ok(xs),
        };
        let rotated = |xs: Tensor| match rotation {
            Some(rotation) => rotation.apply(&xs),
            None => Ok(xs),
        };
        if self.config.norm_after_rope() { normalized(rotated(heads)?) } else { rotated(normalized(heads)?) }
    }

    /// Returns the key heads (1, H_kv, n, D) and value heads (1, H_kv, n, D_v) that the layer appends to the heads of
    /// each sequence: the learned key of PyTorch, the key of zeros, and the learned keys of x-transformers. `None` if
    /// there are none.
    pub(super) fn appended_heads(&self) -> Result<Option<KvFloats>> {
        if self.config.appended_keys() == 0 {
            return Ok(None);
        }
        let k = self.appended_rows("bias_k", "mem_k", self.config.head_dim())?;
        let v = self.appended_rows("bias_v", "mem_v", self.config.value_head_dim())?;
        Ok(Some(KvFloats { k, v }))
    }

    /// Returns the appended keys, or the appended values: the parameter `learned_row` (1, 1, H_kv · width), zeros, and
    /// the parameter `learned_heads` (H_kv, n, width).
    fn appended_rows(&self, learned_row: &str, learned_heads: &str, width: usize) -> Result<Tensor> {
        let h_kv = self.config.num_kv_heads();
        let mut rows = Vec::new();
        if let Some(learned) = self.parameters.tensor(learned_row)? {
            rows.push(learned.reshape((1, h_kv, 1, width))?);
        }
        if self.config.add_zero_attn() {
            rows.push(Tensor::zeros((1, h_kv, 1, width), self.projections.dtype, &self.projections.device)?);
        }
        if let Some(learned) = self.parameters.tensor(learned_heads)? {
            rows.push(learned.unsqueeze(0)?);
        }
        Tensor::cat(&rows, 2)
    }

    /// Returns key and value heads (B, H_kv, T, ..), followed by those that the layer appends.
    fn with_appended_heads(&self, heads: KeyValueHeads) -> Result<KeyValueHeads> {
        let Some(appended) = self.appended_heads()? else { return Ok(heads) };
        let own = KvFloats { k: heads.keys.contiguous()?, v: heads.values.contiguous()? };
        let KvFloats { k: keys, v: values } = own.followed_by(&appended)?;
        Ok(KeyValueHeads { keys, values })
    }

    /// Projects the keys and values of cross-attention, from an encoder's outputs, once for all steps of a decoder:
    /// keys from `keys` (B, T_kv, kdim), values from `values` (B, T_kv, vdim), both without B for one sequence.
    ///
    /// A call with [`AttentionInput::with_memory`](crate::AttentionInput::with_memory) returns the numbers of a call
    /// with [`with_key_value`](crate::AttentionInput::with_key_value) of this layer. A memory of another layer with the
    /// same shape is not detected. Rotary positions of the keys are 0..T_kv.
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
    #[doc(alias = "encoder_hidden_states")]
    pub fn project_memory(&self, keys: &Tensor, values: &Tensor) -> Result<ProjectedMemory> {
        let batched = keys.rank() != 2;
        let what = format_args!("keys {:?} and values {:?}", keys.dims(), values.dims());
        let inputs = self.check_key_value(None, &self.expected(batched), keys, values)?;
        let (b, t_kv, _) = inputs.keys.dims3()?;
        self.check_context(t_kv)?;
        self.check_addressable(b, t_kv, what)?;
        if self.config.rope().and_then(RopeConfig::axes).is_some_and(RopeAxes::is_axial) {
            bail!("[{OP}] keys of a memory have one position each, but rotary positions are on several axes")
        }
        let rotation = match &self.rotary {
            Some(rotary) => Some(rotary.at(&Positions::starting_at(&[0], t_kv)?)?),
            None => None,
        };
        let Some(KeysAndValues { keys: k, values: v }) = self.projections.key_value(&inputs.keys, &inputs.values)?
        else {
            bail!("[{OP}] keys and values are those of an earlier layer, expected a memory that it projects")
        };
        let heads = KeyValueHeads { keys: self.key_heads(k, rotation.as_ref(), None)?, values: self.value_heads(v)? };
        let all = self.with_appended_heads(heads)?;
        // Contiguous heads, since every later call reads them.
        Ok(ProjectedMemory { k: all.keys.contiguous()?, v: all.values.contiguous()?, t_kv, batched })
    }
}

/// Returns a view (B, T, heads, width) of (B, T, heads · width), which may be columns of a wider product.
pub(super) fn split_heads(xs: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, t, columns) = xs.dims3()?;
    let split = [b, t, heads, columns / heads];
    if !xs.is_contiguous() {
        let view = xs.unfold(2, split[3], split[3])?;
        // Candle counts the heads in f32, which represents no more than 2^24 columns.
        if view.dims() == split {
            return Ok(view);
        }
    }
    reshape_linked(xs, &split)
}
