//! Keys and values of cross-attention that are projected once.

use candle_core::{Result, Tensor, bail};

use super::{AttentionInput, MultiHeadAttention, OP};
use crate::base::{Expect, check_keys_and_values};
use crate::config::KvSource;
use crate::position::{Positions, RopeAxes, RopeConfig};

/// Keys (B, H_kv, T_kv, D) and values (B, H_kv, T_kv, D_v) of cross-attention as a layer projected them
/// ([`MultiHeadAttention::project_memory`]), for as many calls as there are queries to come; or those of a whole
/// sequence, which later layers read too ([`KvSource::EarlierLayer`](crate::KvSource)).
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
    /// `keys` (B, T_kv, key_size), values from `values` (B, T_kv, value_size), both without B for one sequence.
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
        self.check_one_input(keys, values)?;
        let k_in = self.expected(cfg.key_size(), batched).check("keys", keys)?;
        let mut v_in = self.expected(cfg.value_size(), batched).check("values", values)?;
        check_keys_and_values(OP, None, &k_in, &v_in)?;
        let (b, t_kv, _) = k_in.dims3()?;
        if keys.id() == values.id() {
            v_in = k_in.clone();
        }
        self.check_lengths(b, t_kv, t_kv, || format!("keys {:?} and values {:?}", keys.dims(), values.dims()))?;
        let rotation = match &self.rotary {
            Some(_) if cfg.rope().and_then(RopeConfig::axes).is_some_and(RopeAxes::is_axial) => {
                bail!(
                    "[multi_head_attention] keys of a memory have one position each, but rotary positions are on several axes"
                )
            }
            Some(rotary) => Some(rotary.at(&Positions::starting_at(&[0], t_kv)?)?),
            None => None,
        };
        let Some([k, v]) = self.projections.key_value(&k_in, &v_in)? else {
            bail!(
                "[multi_head_attention] keys and values are those of an earlier layer, expected a memory that it \
                 projects"
            )
        };
        let [k, v] = self.key_value_heads([k, v], rotation.as_ref(), None)?;
        // Read in every call from now on: each head's positions side by side.
        Ok(ProjectedMemory { k: k.contiguous()?, v: v.contiguous()?, t_kv, batched })
    }

    /// That nothing is given for values which are the keys' projection.
    pub(super) fn check_one_input(&self, keys: &Tensor, values: &Tensor) -> Result<()> {
        if self.config.kv_source() == KvSource::KeysAsValues && keys.id() != values.id() {
            bail!("[multi_head_attention] values are the keys' projection, expected one tensor as the input of both")
        }
        Ok(())
    }

    /// That a memory is this layer's or one that it may read, and of the queries' batch.
    pub(super) fn check_memory(&self, input: &AttentionInput, memory: &ProjectedMemory, b: usize) -> Result<()> {
        let batched = input.queries.rank() == 3;
        if input.key_positions.is_some() && self.rotary.is_some() {
            bail!("[multi_head_attention] key positions were given beside a memory, whose keys stand at 0..T_kv")
        }
        let cfg = &self.config;
        let rows = memory.t_kv + cfg.appended_keys();
        if memory.batched != batched {
            let of = |batched| if batched { "a batch" } else { "one sequence without a batch" };
            bail!(
                "[multi_head_attention] the memory is of {}, expected {} as the queries",
                of(memory.batched),
                of(batched)
            )
        }
        let (dtype, device) = (self.projections.dtype(), self.projections.device());
        for (name, tensor, width) in
            [("the memory's keys", &memory.k, cfg.head_dim()), ("the memory's values", &memory.v, cfg.value_head_dim())]
        {
            let tensor = Expect::many(OP, name, tensor);
            tensor.sizes(&[b, cfg.num_kv_heads(), rows, width])?;
            tensor.dtype(dtype, "the weights'")?.beside("the weights", device)?;
        }
        Ok(())
    }
}
