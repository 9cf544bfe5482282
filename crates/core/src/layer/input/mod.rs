//! The inputs and options of one call of a layer.

mod resolved;

use std::fmt;

use candle_core::Tensor;

use super::indexer::ChosenKeys;
use super::memory::ProjectedMemory;
use crate::cache::AttentionCache;
use crate::mask::{AttentionMask, TokenTree};
use crate::pages::{KvPool, PagedKeys, PagedTokens};
use crate::sdpa::{AttentionFunction, Backend, PackedSequences};
use candle_attention_modules::base::OptionalRef;
use candle_attention_modules::init::TorchSeed;
use candle_attention_modules::norm::AllReduce;
pub(super) use resolved::KeysFrom;

/// The inputs and options of one forward call. A `&Tensor` converts into self-attention over it.
///
/// Masks, lengths, positions, memories and other shared references are taken as such or as an `Option`. Caches are not,
/// so that a `&mut AttentionCache` stays usable after the call.
#[must_use]
pub struct AttentionInput<'a> {
    pub(in crate::layer) queries: &'a Tensor,
    key_value: Option<KeyValueTensors<'a>>,
    pub(in crate::layer) memory: Option<&'a ProjectedMemory>,
    mask: Option<&'a AttentionMask>,
    pub(in crate::layer) positions: Option<&'a Tensor>,
    pub(in crate::layer) key_positions: Option<&'a Tensor>,
    pub(in crate::layer) axis_positions: Option<&'a Tensor>,
    pub(in crate::layer) train: bool,
    dropout_seed: Option<&'a TorchSeed>,
    pub(in crate::layer) cache: Option<&'a mut AttentionCache>,
    shared_cache: Option<&'a AttentionCache>,
    pub(in crate::layer) pages: Option<PagedKeys<'a>>,
    /// The pages of an earlier layer.
    pub(in crate::layer) shared_pages: Option<PagedKeys<'a>>,
    pub(in crate::layer) valid_lens: Option<&'a [usize]>,
    pub(in crate::layer) starts: Option<&'a [usize]>,
    /// One tree for all sequences, or one for each.
    trees: Option<&'a [TokenTree]>,
    new_token_mask: Option<&'a Tensor>,
    pub(in crate::layer) packed: Option<&'a PackedSequences>,
    /// The name of the adapter of each sequence.
    pub(in crate::layer) adapters: Option<&'a [Option<&'a str>]>,
    pub(in crate::layer) residual: Option<&'a Tensor>,
    /// The keys that an earlier layer's indexer chose.
    pub(in crate::layer) chosen_keys: Option<&'a ChosenKeys>,
    pub(in crate::layer) all_reduce: Option<&'a AllReduce<'a>>,
    pub(in crate::layer) function: Option<&'a AttentionFunction<'a>>,
    backend: Backend,
}

/// The inputs of the keys and of the values of cross-attention.
#[derive(Debug, Clone, Copy)]
struct KeyValueTensors<'a> {
    keys: &'a Tensor,
    values: &'a Tensor,
}

impl<'a> AttentionInput<'a> {
    /// Makes an input of self-attention over `xs` (B, T, E), or (T, E).
    pub fn new(xs: &'a Tensor) -> Self {
        Self {
            queries: xs,
            key_value: None,
            memory: None,
            mask: None,
            positions: None,
            key_positions: None,
            axis_positions: None,
            train: false,
            dropout_seed: None,
            cache: None,
            shared_cache: None,
            pages: None,
            shared_pages: None,
            valid_lens: None,
            starts: None,
            trees: None,
            new_token_mask: None,
            packed: None,
            adapters: None,
            residual: None,
            chosen_keys: None,
            all_reduce: None,
            function: None,
            backend: Backend::Auto,
        }
    }

    /// Attends to other inputs (cross-attention): keys are projected from `keys` (B, T_kv, kdim), values from `values`
    /// (B, T_kv, vdim).
    ///
    /// A layer whose config is causal or has a window applies that to the keys of the other sequence too, counted from
    /// the end of that sequence. This is rarely meant, and a warning is logged once.
    #[doc(alias("encoder_hidden_states", "cross_attention"))]
    pub fn with_key_value(mut self, keys: &'a Tensor, values: &'a Tensor) -> Self {
        self.key_value = Some(KeyValueTensors { keys, values });
        self
    }

    /// Attends to keys and values that the layer projected before
    /// ([`project_memory`](crate::MultiHeadAttention::project_memory)). A causal layer logs the warning of
    /// [`with_key_value`](Self::with_key_value).
    #[doc(alias = "cross_attention")]
    pub fn with_memory(mut self, memory: impl OptionalRef<'a, ProjectedMemory>) -> Self {
        self.memory = memory.into_option();
        self
    }

    /// Adds a mask, which is combined (AND) with the layer's own. A prefix in it also lifts the layer's causal
    /// constraint for the keys of the prefix.
    #[doc(alias("attn_mask", "attention_mask", "key_padding_mask"))]
    pub fn with_mask(mut self, mask: impl OptionalRef<'a, AttentionMask>) -> Self {
        self.mask = mask.into_option();
        self
    }

    /// Sets the positions of the queries, and in self-attention of the keys: integers (T,) for all sequences, or (B, T)
    /// for each sequence, as ragged batches and padding on the left need. Rotary positions, relative biases and
    /// Falcon's ALiBi use them.
    ///
    /// The default is 0..T. With a cache, positions continue from the length of each sequence, and cached keys keep the
    /// positions of their own call. The tensor is copied to the CPU. Layers without positional encodings check its
    /// shape and ignore it otherwise; masks and other ALiBi slopes use key indices, not positions.
    ///
    /// [Chunks](crate::AttentionMask::with_chunk) are the exception: a query attends to the keys next to its own whose
    /// positions are in the same chunk, up to a position that is smaller than the one before, where another sequence
    /// begins. Positions are an error where chunks count from other keys than the queries' own: in cross-attention, and
    /// in a mask with an offset. A caller's function receives the mask with chunks as they are.
    ///
    /// If the positions of a call with a cache do not come after those in the cache, as with 0 again in every step, a
    /// warning is logged once.
    #[doc(alias("position_ids", "input_pos"))]
    pub fn with_positions(mut self, positions: impl OptionalRef<'a, Tensor>) -> Self {
        self.positions = positions.into_option();
        self
    }

    /// Sets the positions of the keys of cross-attention: integers (T_kv,) or (B, T_kv). The default is 0..T_kv.
    pub fn with_key_positions(mut self, key_positions: impl OptionalRef<'a, Tensor>) -> Self {
        self.key_positions = key_positions.into_option();
        self
    }

    /// Sets the positions of the tokens of self-attention on the axes of the layer's rotary positions
    /// ([`RopeConfig::with_axes`](crate::RopeConfig::with_axes)): (A, T) for all sequences, or (A, B, T) for each. The
    /// axes are time, height and width in Qwen2-VL's text, and rows and columns of patches in an image. Numbers need
    /// not be integers: DINOv3's are 2π times a coordinate of a patch's centre between -1 and 1. A token at 0 on all
    /// axes, such as a class token or a register, is not rotated.
    ///
    /// Without them, a token has one position on all axes, as in text; this is an error for axes with series of
    /// frequencies for each axis. Other uses of positions read [`with_positions`](Self::with_positions).
    pub fn with_axis_positions(mut self, axis_positions: impl OptionalRef<'a, Tensor>) -> Self {
        self.axis_positions = axis_positions.into_option();
        self
    }

    /// Sets whether dropout happens. The default is false.
    ///
    /// Dropout in a call with a cache, whose keys carry no gradients, logs a warning once, unless the cache was made
    /// [`with_detached(true)`](crate::AttentionCacheConfig::with_detached) for training.
    pub fn with_train(mut self, train: bool) -> Self {
        self.train = train;
        self
    }

    /// Draws dropout from PyTorch's generator, see
    /// [`SdpaOptions::with_dropout_seed`](crate::SdpaOptions::with_dropout_seed).
    pub fn with_dropout_seed(mut self, seed: impl OptionalRef<'a, TorchSeed>) -> Self {
        self.dropout_seed = seed.into_option();
        self
    }

    /// Attends to the positions in a cache and to those of `xs`, which are added to the cache.
    ///
    /// Positions count within each sequence from its first call on. T_kv of a mask is the length of the longest
    /// sequence with this call, and a causal mask is aligned to the end of each sequence.
    /// [`AttentionMask::causal_upper_left`] is an error once the cache has positions.
    ///
    /// The outputs equal those of one call over all tokens if no query attends to a later key, as in a causal layer. In
    /// other layers, the tokens of earlier calls have not attended to those of this call; a warning is logged once.
    ///
    /// Pass padding with [`with_starts`](Self::with_starts) and [`with_valid_lens`](Self::with_valid_lens), which do
    /// not store it in the cache. A mask masks padding in its own call only: the cache stores the padding, and later
    /// calls attend to it unless their masks mask it again. A warning is logged once if they do not.
    #[doc(alias("past_key_values", "past_key_value", "use_cache", "kv_cache"))]
    pub fn with_cache(mut self, cache: &'a mut AttentionCache) -> Self {
        self.cache = Some(cache);
        self
    }

    /// Attends to the keys and values in the cache of an earlier layer, for layers without key and value projections
    /// ([`KvSharing::EarlierLayer`](crate::KvSharing)).
    ///
    /// The earlier layer's call with the same tokens and padding has to come first; the queries have its last
    /// positions. A sliding cache has to be made [`with_shared`](crate::AttentionCacheConfig::with_shared) for calls of
    /// more tokens than its window.
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
    pub fn with_shared_cache(mut self, cache: &'a AttentionCache) -> Self {
        self.shared_cache = Some(cache);
        self
    }

    /// Reads `xs` (total, E) as the new tokens of a step of a [`PageTable`](crate::PageTable), one sequence after the
    /// other: stores their keys and values in the layer's pool, and attends to all positions of their sequences. Some
    /// sequences may bring a chunk of a prompt, others one token. The output is (total, out_dim).
    ///
    /// Each sequence has the numbers that it has alone in a cache. Positions continue from its length unless
    /// [`with_positions`](Self::with_positions) sets them as (total,). The mask applies to each sequence by itself,
    /// with T_kv its length with the new tokens. [`PageTable`](crate::PageTable) has an example.
    ///
    /// The pool of a layer of latent attention is made by
    /// [`KvPoolConfig::for_latent_layer`](crate::KvPoolConfig::for_latent_layer).
    ///
    /// Calls with trees, masks of new tokens or mask tensors, and calls of layers with relative biases, Falcon's ALiBi
    /// or appended keys, run as a padded batch over a copy of the keys and values, which
    /// [`plan`](crate::MultiHeadAttention::plan) says. Mask tensors are (B, H, T_q, T_kv) for a batch of the step's
    /// sequences, padded on the right. [`PageTable::keep`](crate::PageTable::keep) keeps the path of a tree.
    ///
    /// Not supported with pages: returned weights, padding, layers with content-based relative positions, and positions
    /// for a mask that has chunks or for biases that follow from the positions of keys.
    #[doc(alias("paged_attention", "block_table"))]
    pub fn with_pages(mut self, pool: &'a KvPool, step: &'a PagedTokens) -> Self {
        self.pages = Some(PagedKeys { pool, step });
        self
    }

    /// Attends to the keys and values in the pool of an earlier layer, for layers without key and value projections
    /// ([`KvSharing::EarlierLayer`](crate::KvSharing)). The earlier layer's call with the same step has to come first.
    pub fn with_shared_pages(mut self, pool: &'a KvPool, step: &'a PagedTokens) -> Self {
        self.shared_pages = Some(PagedKeys { pool, step });
        self
    }

    /// Returns the tokens of the call in pages, of this layer's pool or of an earlier layer's.
    pub(in crate::layer) fn any_pages(&self) -> Option<&'a PagedTokens> {
        self.pages.or(self.shared_pages).map(|keys| keys.step)
    }

    /// Sets the right padding in a call with a cache: for each sequence, the length up to which the T positions are
    /// tokens.
    ///
    /// Padding is not added to the cache, attends to nothing and is attended to by nothing. Without a cache, and for
    /// lengths that count the positions of earlier calls too, see [`AttentionMask::with_valid_lens`].
    pub fn with_valid_lens(mut self, valid_lens: impl OptionalRef<'a, [usize]>) -> Self {
        self.valid_lens = valid_lens.into_option();
        self
    }

    /// Sets the left padding in a call with a cache: for each sequence, the first of the T positions that is a token.
    /// Without a cache, see [`AttentionMask::with_starts`].
    ///
    /// Padding is not added to the cache, and masks of this call and of later ones do not count it: T_kv is the length
    /// of the longest sequence without its padding. [`AttentionMask::from_attention_mask`] of a mask that has columns
    /// for padding, as transformers passes it in every step, is an error. Starts above 0, and tensors with a row for
    /// each sequence, in later masks log a warning once.
    pub fn with_starts(mut self, starts: impl OptionalRef<'a, [usize]>) -> Self {
        self.starts = starts.into_option();
        self
    }

    /// Sets that the tokens of the call are the nodes of a tree, in every sequence: drafts, of which a model accepts
    /// one path. A node attends to the tokens in the cache, to its ancestors and to itself. [`TokenTree`] has an
    /// example.
    ///
    /// The position of a node is its depth after the tokens in the cache: for windows and chunks, and also for rotary
    /// positions and biases, unless [`with_positions`](Self::with_positions) sets other ones.
    ///
    /// The layer's causal mask, and one of the call that is aligned to the end, do not apply among the new tokens.
    /// Other masks of the call apply too, with a column for each token of the cache and each node. Attention has a
    /// boolean mask (T_q, T_kv) then, which the fused kernel of CPUs and that of CUDA read.
    #[doc(alias("tree_attention", "tree_mask"))]
    pub fn with_tree(mut self, tree: impl OptionalRef<'a, TokenTree>) -> Self {
        self.trees = tree.into_option().map(std::slice::from_ref);
        self
    }

    /// Sets a [tree](Self::with_tree) for each sequence. Trees of different sizes need padding
    /// ([`with_valid_lens`](Self::with_valid_lens)): the nodes are the tokens of a sequence.
    pub fn with_trees(mut self, trees: impl OptionalRef<'a, [TokenTree]>) -> Self {
        self.trees = trees.into_option();
        self
    }

    /// Sets which new tokens each new token attends to: u8 entries of 1 (attend) and 0, (T_q, T_q) for all sequences or
    /// (B, T_q, T_q). All tokens in the cache are attended to. The layer's causal mask, and one of the call that is
    /// aligned to the end, do not apply among the new tokens; all other masks do.
    ///
    /// Windows, chunks and rotary positions count tokens in their order, unless
    /// [`with_positions`](Self::with_positions) sets other rotary positions and temperatures;
    /// [`with_tree`](Self::with_tree) counts by depth. The entries are copied to the CPU.
    ///
    /// ```
    /// use candle_attention::{AttentionCache, AttentionInput, MultiHeadAttention, MultiHeadAttentionConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let cfg = MultiHeadAttentionConfig::new(64, 4).with_causal(true);
    /// let mha = MultiHeadAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let mut cache = AttentionCache::default();
    /// let prompt = Tensor::randn(0f32, 1., (2, 9, 64), &Device::Cpu)?;
    /// mha.forward_with(AttentionInput::new(&prompt).with_cache(&mut cache))?;
    /// // A block of four tokens that all attend to each other.
    /// let block = Tensor::randn(0f32, 1., (2, 4, 64), &Device::Cpu)?;
    /// let mask = Tensor::ones((4, 4), DType::U8, &Device::Cpu)?;
    /// mha.forward_with(AttentionInput::new(&block).with_cache(&mut cache).with_new_token_mask(&mask))?;
    /// # Ok(()) }
    /// ```
    pub fn with_new_token_mask(mut self, mask: impl OptionalRef<'a, Tensor>) -> Self {
        self.new_token_mask = mask.into_option();
        self
    }

    /// Reads `xs` (total_q, E) as packed sequences: sequences of different lengths, one after the other, without
    /// padding. Each attends to its own keys, and the output is (total_q, out_dim). Keys and values of cross-attention
    /// are (total_kv, ..).
    ///
    /// Positions count from 0 in each sequence unless [`with_positions`](Self::with_positions) sets them as (total_q,).
    /// The mask applies to each sequence by itself, and its lengths are (n,). A relative bias (T5, MPNet) is one vector
    /// by distance for all sequences, and does not support [`with_positions`](Self::with_positions).
    ///
    /// Not supported with packed sequences: a cache, returned weights, boolean mask and bias tensors, layers with
    /// content-based relative positions, Falcon's ALiBi or appended keys, and a memory of rotated keys.
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
    #[doc(alias = "cu_seqlens")]
    pub fn with_packed(mut self, sequences: impl OptionalRef<'a, PackedSequences>) -> Self {
        self.packed = sequences.into_option();
        self
    }

    /// Sets the adapter of each sequence by its name, or `None` for the layer without one: low-rank adapters that
    /// `candle_attention::peft::Adapters` loaded onto the layer. A batch has an entry for each of its B sequences, an
    /// input (T, E) has one; packed sequences and the sequences of a step of pages have one each.
    ///
    /// The projections of the layer are computed once for all sequences, and the products with the matrices of an
    /// adapter for its own sequences. In a call without this method, no sequence has an adapter of a name. Keys and
    /// values of a memory are projected before, so that a memory is an error.
    #[doc(alias("lora", "adapter_names"))]
    pub fn with_adapters(mut self, names: impl OptionalRef<'a, [Option<&'a str>]>) -> Self {
        self.adapters = names.into_option();
        self
    }

    /// Adds a residual (B, T_q, out_dim), or (T_q, out_dim), to the output: in the pass of the output projection,
    /// before its sums are rounded.
    pub fn with_residual(mut self, residual: impl OptionalRef<'a, Tensor>) -> Self {
        self.residual = residual.into_option();
        self
    }

    /// Attends to the keys that an earlier layer's indexer chose for the same tokens, as
    /// [`forward_with_choice`](crate::MultiHeadLatentAttention::forward_with_choice) of that layer returned them. The
    /// config of the layer has to [ask for them](crate::MultiHeadLatentAttentionConfig::with_shared_choice).
    #[doc(alias = "prev_topk_indices")]
    pub fn with_chosen_keys(mut self, chosen_keys: impl OptionalRef<'a, ChosenKeys>) -> Self {
        self.chosen_keys = chosen_keys.into_option();
        self
    }

    /// Sets the all-reduce of the ranks among which the layer's heads are sharded
    /// ([`load_shard`](crate::MultiHeadAttention::load_shard)), for norms of whole projections, which span all ranks
    /// (OLMo 2). Two numbers for each token are summed in f32. Layers without such norms do not use it.
    pub fn with_all_reduce(mut self, all_reduce: &'a AllReduce<'a>) -> Self {
        self.all_reduce = Some(all_reduce);
        self
    }

    /// Replaces [`scaled_dot_product_attention`](crate::scaled_dot_product_attention) by another function between the
    /// layer's projections, for example one that attends to the keys of other ranks.
    ///
    /// The function is called with queries (B, H, T_q, D) and keys (B, H_kv, T_kv, D), normalised and rotated, and with
    /// the mask and the options of the call. It returns the attention output (B, H, T_q, D_v) in the dtype of the
    /// queries. It cannot be combined with a cache, packed sequences or returned weights.
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
    pub fn with_function(mut self, function: &'a AttentionFunction<'a>) -> Self {
        self.function = Some(function);
        self
    }

    /// Sets the implementation of attention. The default is [`Backend::Auto`].
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }
}

/// Prints everything but functions.
impl fmt::Debug for AttentionInput<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut input = f.debug_struct("AttentionInput");
        input.field("queries", self.queries).field("key_value", &self.key_value).field("memory", &self.memory);
        input.field("caches", &[self.cache.as_deref(), self.shared_cache]).field("mask", &self.mask);
        input.field("positions", &[self.positions, self.key_positions, self.axis_positions]);
        input.field("padding", &[self.starts, self.valid_lens]);
        input.field("trees", &self.trees).field("new_token_mask", &self.new_token_mask);
        input.field("packed", &self.packed).field("pages", &self.any_pages()).field("residual", &self.residual);
        input.field("adapters", &self.adapters);
        input.field("train", &self.train).field("backend", &self.backend).finish_non_exhaustive()
    }
}

impl<'a> From<&'a Tensor> for AttentionInput<'a> {
    fn from(xs: &'a Tensor) -> Self {
        Self::new(xs)
    }
}
