//! What one call of a layer reads.

use std::fmt;
use std::ops::Range;

use candle_core::{Result, Tensor, bail};
use macro_rules_attribute::apply;

use super::{ProjectedMemory, warnings};
use crate::cache::{AttentionCache, NewTokens, Padding};
use crate::mask::AttentionMask;
use crate::position::{Positions, RopeAxes};
use crate::sdpa::{AttentionFunction, Backend, OutputLayout, PackedSequences, SdpaOptions};
use candle_attention_modules::base::options;
use candle_attention_modules::init::TorchSeed;
use candle_attention_modules::norm::AllReduce;

/// The positions of a call's tokens.
pub(super) struct CallPositions {
    pub queries: Positions,
    /// Those of the call's own keys; `None` where they are the queries'.
    pub keys: Option<Positions>,
    /// The positions by which queries and keys are rotated, where these are on several axes.
    pub axes: Option<AxisPositions>,
}

/// The positions of a call's tokens on several axes.
pub(super) struct AxisPositions {
    /// (A, T) or (A, B, T), row by row.
    pub entries: Vec<f32>,
    /// A.
    pub count: usize,
}

/// Where the keys and values of a call come from.
#[derive(Clone, Copy)]
pub(super) enum KeysFrom<'a> {
    /// The inputs of the queries.
    Own,
    /// Inputs of keys and of values.
    Cross([&'a Tensor; 2]),
    Memory(&'a ProjectedMemory),
    /// The inputs of the queries, after what a cache holds.
    Cache(&'a AttentionCache),
    EarlierLayer(&'a AttentionCache),
}

/// What one call of a layer reads besides the layer's parameters. A `&Tensor` is self-attention over it.
#[apply(options)]
#[must_use]
pub struct AttentionInput<'a> {
    pub(super) queries: &'a Tensor,
    // Inputs of keys and of values.
    pub(super) key_value: Option<[&'a Tensor; 2]>,
    /// Cross-attention to keys and values that the layer projected before
    /// ([`project_memory`](crate::MultiHeadAttention::project_memory)). A causal layer is warned about as in
    /// [`with_key_value`](Self::with_key_value).
    pub(super) memory: Option<&'a ProjectedMemory>,
    /// A mask that holds together with the layer's own. A prefix in it lifts the layer's own causal constraint too.
    pub(super) mask: Option<&'a AttentionMask>,
    /// The positions of the queries, and in self-attention of the keys, for rotary positions, relative biases and
    /// Falcon's ALiBi: integers (T,) for all sequences or (B, T) for each by itself, as ragged batches and padding on
    /// the left need. Unless given they are 0..T, and with a cache they continue from the length of each sequence; keys
    /// in a cache stay at the positions of their own call. They are read back from their device. A layer without these
    /// checks their shape and has no other use for them: masks and slopes count by the place of a key. Positions of a
    /// call with a cache that do not come after those in the cache (0 again in every step) are logged as a warning, once.
    pub(super) positions: Option<&'a Tensor>,
    /// The positions of the keys of cross-attention: integers (T_kv,) or (B, T_kv); 0..T_kv unless given.
    pub(super) key_positions: Option<&'a Tensor>,
    /// The positions of the tokens of self-attention on the axes of the layer's rotary positions
    /// ([`RopeConfig::with_axes`](crate::RopeConfig::with_axes)), (A, T) for all sequences or (A, B, T) for each by
    /// itself: time, height and width in Qwen2-VL's text, rows and columns of patches in an image. Numbers need not be
    /// whole: DINOv3's are 2π times the place of a patch's centre between -1 and 1. A token at 0 on all axes, as that
    /// of a class or a register, is not rotated.
    ///
    /// Without them, a token has one position on all axes, as text has, or it is an error where axes have series of
    /// their own. What else counts positions goes by [`with_positions`](Self::with_positions).
    pub(super) axis_positions: Option<&'a Tensor>,
    /// Whether dropout happens. In a call with a cache, whose keys were computed without gradients, dropout is logged as a
    /// warning, once, unless the cache was made [`with_detached(true)`](crate::AttentionCacheConfig::with_detached) for
    /// training.
    pub(super) train: bool,
    /// Draws dropout from PyTorch's generator, see
    /// [`SdpaOptions::with_dropout_seed`](crate::SdpaOptions::with_dropout_seed).
    pub(super) dropout_seed: Option<&'a TorchSeed>,
    /// Self-attention to the positions in the cache and those of `xs`, which are added to it. Positions are counted in
    /// each sequence by itself, from its first call on: T_kv of a mask is the length of the longest sequence with this
    /// call, and a causal constraint is aligned to the end of each.
    ///
    /// The outputs are those of one call over all tokens if no query sees a later key, as in a causal layer. In a layer
    /// that is not causal, the tokens of earlier calls have not seen those of this one; the first time, this is logged
    /// as a warning.
    ///
    /// Padding belongs into [`with_starts`](Self::with_starts) and [`with_valid_lens`](Self::with_valid_lens), which
    /// leave it out of the cache. A mask hides padding in its own call alone, and the cache stores it.
    /// [`AttentionMask::causal_upper_left`] is an error once the cache has positions.
    pub(super) cache: Option<&'a mut AttentionCache>,
    /// Attention to the keys and values in the cache of an earlier layer, whose call with the same tokens and padding
    /// came before: for layers that have none of their own ([`KvSharing::EarlierLayer`](crate::KvSharing)). The queries
    /// stand at its last positions. A sliding cache has to be made
    /// [`with_shared`](crate::AttentionCacheConfig::with_shared) for calls of more tokens than its window has.
    ///
    /// ```
    /// use candle_attention::{AttentionCache, AttentionInput, KvSharing, MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
    /// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true);
    /// let earlier = MultiHeadAttention::new(&cfg, vb.clone())?;
    /// let later = MultiHeadAttention::new(&cfg.with_kv_sharing(KvSharing::EarlierLayer), vb)?;
    /// let mut cache = AttentionCache::default();
    /// for t in [5, 1, 1] {
    ///     let xs = Tensor::randn(0f32, 1., (2, t, 64), &Device::Cpu)?;
    ///     let xs = earlier.forward_with(AttentionInput::new(&xs).with_cache(&mut cache))?;
    ///     later.forward_with(AttentionInput::new(&xs).with_shared_cache(&cache))?;
    /// }
    /// # Ok(()) }
    /// ```
    pub(super) shared_cache: Option<&'a AttentionCache>,
    /// Right padding in a call with a cache: of each sequence, the length up to which the T positions are tokens. The
    /// others are not added to the cache, see nothing, and are seen by nothing. Without a cache, and for lengths that
    /// count the positions of earlier calls too, see [`AttentionMask::with_valid_lens`].
    pub(super) valid_lens: Option<&'a [usize]>,
    /// Left padding in a call with a cache: of each sequence, the first of the T positions that is a token. Without a
    /// cache, see [`AttentionMask::with_starts`].
    ///
    /// Padding is not stored, and masks of this call and of later ones do not count it: T_kv is the length of the
    /// longest sequence without its padding. [`AttentionMask::from_attention_mask`] of a mask that has columns for
    /// padding, as transformers passes it in every step, is an error; starts above 0 and tensors with a row for each
    /// sequence in later masks are logged as a warning, once.
    pub(super) starts: Option<&'a [usize]>,
    /// Sequences of different lengths without padding, one after the other in `xs` (total_q, E): each attends to its
    /// own keys, and the output is (total_q, out_dim). Keys and values of cross-attention are (total_kv, ..) likewise.
    ///
    /// Everything else is as for a batch of them: positions count from 0 in each sequence unless [`with_positions`]
    /// gives them as (total_q,), the mask holds for each sequence by itself, and its lengths are (n,). What has no
    /// shape here is an error: a cache, weights, `keep` and `bias` tensors, layers with relative positions by content,
    /// Falcon's ALiBi or appended keys, and a memory of rotated keys.
    ///
    /// A relative bias (T5, MPNet) is one vector by distance for all sequences, and takes no positions of the caller's.
    ///
    /// ```
    /// use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, PackedSequences};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let cfg = MultiHeadAttentionConfig::new(64, 4);
    /// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let sequences = PackedSequences::from_lens(&[5, 3, 9], &[5, 3, 9])?;
    /// let xs = Tensor::randn(0f32, 1., (17, 64), &Device::Cpu)?;
    /// let ys = mha.forward_with(AttentionInput::new(&xs).with_packed(&sequences))?;
    /// assert_eq!(ys.dims(), [17, 64]);
    /// # Ok(()) }
    /// ```
    ///
    /// [`with_positions`]: Self::with_positions
    pub(super) packed: Option<&'a PackedSequences>,
    /// A residual (B, T_q, out_dim), or (T_q, out_dim), that is added to the output: in the pass of the output
    /// projection, before its sums are rounded.
    pub(super) residual: Option<&'a Tensor>,
    /// How the processes that share a layer's heads ([`load_shard`](crate::MultiHeadAttention::load_shard)) add up
    /// tensors: for norms of whole projections, of which each process has a part (OLMo 2). Two numbers of each token,
    /// in f32, are added up; a layer without such norms does not ask for it.
    pub(super) all_reduce: Option<&'a AllReduce<'a>>,
    /// Another function in the place of [`scaled_dot_product_attention`](crate::scaled_dot_product_attention), between
    /// the layer's projections: one that attends to keys of other processes, for example. Queries (B, H, T_q, D) and
    /// keys (B, H_kv, T_kv, D) come normalised and rotated, with the mask and the options of the call; it gives (B, H,
    /// T_q, D_v) in the dtype of the queries. A cache, packed sequences and weights have no such function.
    ///
    /// ```
    /// use candle_attention::{AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig, scaled_dot_product_attention};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let mha = MultiHeadAttention::new(&MultiHeadAttentionConfig::new(64, 4), VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let xs = Tensor::randn(0f32, 1., (2, 6, 64), &Device::Cpu)?;
    /// let ys = mha.forward_with(AttentionInput::new(&xs).with_function(&|q, k, v, mask, options| {
    ///     println!("{:?} queries, {:?} keys", q.dims(), k.dims());
    ///     scaled_dot_product_attention(q, k, v, mask, options)
    /// }))?;
    /// # Ok(()) }
    /// ```
    pub(super) function: Option<&'a AttentionFunction<'a>>,
    /// Which implementation of attention runs.
    pub(super) backend: Backend,
}

impl<'a> AttentionInput<'a> {
    /// Self-attention over `xs` (B, T, E), or (T, E).
    pub fn new(xs: &'a Tensor) -> Self {
        Self::unset(xs)
    }

    /// Cross-attention: keys are projected from `keys` (B, T_kv, kdim), values from `values` (B, T_kv, vdim).
    ///
    /// A layer whose config is causal or has a window applies that to the keys of the other sequence too, counted from
    /// its end. This is rarely meant, and logged as a warning, once.
    pub fn with_key_value(self, keys: &'a Tensor, values: &'a Tensor) -> Self {
        Self { key_value: Some([keys, values]), ..self }
    }

    /// The one place that the keys and values of the call come from.
    pub(super) fn keys_from(&self, op: &str) -> Result<KeysFrom<'_>> {
        let sources = [
            self.memory.map(|memory| ("a memory", KeysFrom::Memory(memory))),
            self.key_value.map(|inputs| ("keys and values", KeysFrom::Cross(inputs))),
            self.cache.as_deref().map(|cache| ("a cache", KeysFrom::Cache(cache))),
            self.shared_cache.map(|cache| ("the cache of an earlier layer", KeysFrom::EarlierLayer(cache))),
        ];
        let mut given = sources.into_iter().flatten();
        match (given.next(), given.next()) {
            (Some((one, _)), Some((other, _))) => {
                bail!("[{op}] both {one} and {other} were given, expected one of the two")
            }
            (given, _) => Ok(given.map_or(KeysFrom::Own, |(_, keys)| keys)),
        }
    }

    pub(super) fn is_cross(&self) -> bool {
        self.memory.is_some() || self.key_value.is_some()
    }

    pub(super) fn is_cached(&self) -> bool {
        self.any_cache().is_some()
    }

    /// Returns the layer's own cache, or an earlier layer's.
    pub(super) fn any_cache(&self) -> Option<&AttentionCache> {
        self.cache.as_deref().or(self.shared_cache)
    }

    /// What there is beside the call's own tokens, if anything.
    pub(super) fn others(&self) -> Option<&'static str> {
        let others = [
            ("keys of others", self.is_cross()),
            ("earlier tokens", self.is_cached()),
            ("packed sequences", self.packed.is_some()),
            ("positions", self.positions.is_some()),
            ("other functions", self.function.is_some()),
        ];
        others.into_iter().find_map(|(what, is_given)| is_given.then_some(what))
    }

    /// The layer's mask and the call's: both hold, and a prefix of the call's lifts the layer's causal constraint too.
    pub(super) fn mask_with(&self, own: &AttentionMask) -> AttentionMask {
        self.mask.map_or_else(|| own.clone(), |mask| own.with_prefixes_of(mask).and(mask))
    }

    /// What the call says of how scores become weights.
    pub(super) fn options(&self, dropout: f64) -> SdpaOptions {
        if dropout > 0.0 {
            warnings::about_dropout(self);
        }
        let options = SdpaOptions::default()
            .with_dropout(dropout, self.train)
            .with_backend(self.backend)
            .with_output_layout(OutputLayout::Bthd);
        SdpaOptions { dropout_seed: self.dropout_seed.cloned(), ..options }
    }

    /// Those of `t` queries or keys, which are `ranges` of the packed sequences where there are such.
    fn default_positions(&self, ranges: fn(&PackedSequences, usize) -> Range<usize>, t: usize) -> Result<Positions> {
        let Some(sequences) = self.packed else { return Positions::starting_at(&[0], t) };
        Positions::of_each((0..sequences.len()).flat_map(|s| 0..ranges(sequences, s).len()), t)
    }

    /// The positions of a call with `t_kv` keys, in a layer with rotary positions on these axes.
    /// `None` for a layer that does not use them; their shape is checked all the same.
    pub(super) fn positions(
        &self,
        op: &str,
        tokens: &NewTokens,
        t_kv: usize,
        axes: Option<&RopeAxes>,
        is_used: bool,
    ) -> Result<Option<CallPositions>> {
        let b = if self.queries.rank() == 3 { self.queries.dim(0)? } else { 1 };
        let keys = self.key_positions.map(|given| Positions::from_tensor("key positions", given, b, t_kv));
        let keys = keys.transpose()?;
        if keys.is_some() && !self.is_cross() {
            bail!("[{op}] key positions are given, but the keys are the queries")
        }
        let axis_positions = match (axes, self.axis_positions) {
            (None, Some(_)) => bail!("[{op}] axis positions were given, but the config's rope has no axes"),
            (Some(_), Some(_)) if self.is_cross() => {
                bail!("[{op}] axis positions were given beside keys, expected self-attention")
            }
            (Some(axes), Some(given)) => {
                Some(AxisPositions { entries: axes.positions(given, b, tokens.t)?, count: axes.sections().len() })
            }
            (Some(axes), None) if axes.is_axial() => bail!(
                "[{op}] rotary positions are on {} axes, expected a call `with_axis_positions`",
                axes.sections().len()
            ),
            (_, None) => None,
        };
        if !is_used {
            return Ok(None);
        }
        let queries = match (self.packed, &tokens.given) {
            (Some(_), None) => self.default_positions(PackedSequences::queries, tokens.t)?,
            _ => tokens.positions()?,
        };
        if let Some(cache) = self.any_cache() {
            warnings::about_positions(op, cache, tokens, &queries, axis_positions.as_ref());
        }
        let or_default = || self.default_positions(PackedSequences::keys, t_kv);
        let keys = self.is_cross().then(|| keys.map_or_else(or_default, Ok)).transpose()?;
        Ok(Some(CallPositions { queries, keys, axes: axis_positions }))
    }

    /// The tokens of a call of `dims` (B, T), behind those that a cache holds. `own` is the layer's mask.
    pub(super) fn tokens(&self, op: &str, dims: (usize, usize), own: &AttentionMask) -> Result<NewTokens> {
        if self.function.is_some() && (self.is_cached() || self.packed.is_some()) {
            bail!("[{op}] an attention function was given with a cache or packed sequences, expected one of them")
        }
        let padding = Padding { starts: self.starts, valid_lens: self.valid_lens };
        let mut tokens = match self.keys_from(op)? {
            KeysFrom::Cache(cache) => cache.new_tokens(dims, padding)?,
            KeysFrom::EarlierLayer(cache) => cache.latest_tokens(dims, padding)?,
            _ if padding != Padding::default() => bail!(
                "[{op}] valid_lens or starts of an `AttentionInput` were given to a call without a cache, expected those \
                 of an `AttentionMask`"
            ),
            // All of them, in any number of sequences.
            _ => NewTokens { t: dims.1, ..NewTokens::default() },
        };
        if let Some(cache) = self.any_cache() {
            warnings::check_mask(op, self.mask, own, &tokens, cache.earlier_padding())?;
            tokens.are_hidden = self.mask.is_some_and(|mask| mask.hides_tokens(&tokens.places()));
        }
        let given = self.positions.map(|given| Positions::from_tensor("positions", given, dims.0, dims.1));
        Ok(NewTokens { given: given.transpose()?, ..tokens })
    }
}

/// Without functions, which cannot be printed.
impl fmt::Debug for AttentionInput<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut input = f.debug_struct("AttentionInput");
        input.field("queries", self.queries).field("key_value", &self.key_value).field("memory", &self.memory);
        input.field("caches", &[self.cache.as_deref(), self.shared_cache]).field("mask", &self.mask);
        input.field("positions", &[self.positions, self.key_positions, self.axis_positions]);
        input.field("padding", &[self.starts, self.valid_lens]);
        input.field("packed", &self.packed).field("residual", &self.residual);
        input.field("train", &self.train).field("backend", &self.backend).finish_non_exhaustive()
    }
}

impl<'a> From<&'a Tensor> for AttentionInput<'a> {
    fn from(xs: &'a Tensor) -> Self {
        Self::new(xs)
    }
}
