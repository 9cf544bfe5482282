//! The options of masks, scores and positions.

use candle_core::{Result, bail};

use super::{BlockIndexerConfig, LocalWindow, MultiHeadAttentionConfig, OP};
use crate::position::{AlibiConfig, AttentionTemperature, ContentPositions, RelativeBiasConfig, RopeConfig};
use crate::sdpa::SdpaOptions;
use candle_attention_modules::base::{Synonym, number};

/// Other names of the options of masks, scores and positions.
pub(super) const SYNONYMS_OF_ATTENTION: &[Synonym] = &[
    Synonym::of("causal", &["is_causal", "use_causal_mask", "is_decoder"], "`causal`"),
    Synonym::of(
        "context_length",
        &["max_position_embeddings", "max_seq_len", "max_seq_length", "block_size", "n_positions", "n_ctx"],
        "`context_length`",
    ),
    Synonym::of("window", &["sliding_window", "window_size", "attention_window", "local_attention"], "`window`"),
    Synonym::of("local_window", &["band", "local_window_size"], "`local_window`, as {\"left\": .., \"right\": ..}"),
    Synonym::of("chunk", &["attention_chunk_size", "chunk_size"], "`chunk`"),
    Synonym::of("softcap", &["attn_logit_softcapping", "logit_softcap", "logits_soft_cap", "soft_cap"], "`softcap`"),
    Synonym::of("scale", &["softmax_scale", "scaling", "attention_multiplier", "sm_scale"], "`scale`"),
    Synonym::of("scale", &["query_pre_attn_scalar"], "`scale`, one over its square root"),
    Synonym::of("sinks", &["attention_sinks", "attn_sinks", "use_sinks", "sink"], "`sinks`"),
    Synonym::of("rope", &["rope_theta", "rotary_emb_base", "rope_base", "rope_freq_base"], "`rope`, as {\"base\": ..}"),
    Synonym::of("rope", &["rope_scaling", "rope_parameters"], "`scaling` of `rope`"),
    Synonym::of("rope", &["rotary_dim", "partial_rotary_factor", "rotary_pct"], "`rotary_dim` of `rope`"),
    Synonym::of("rope", &["rotary", "rotary_emb", "rope_config"], "`rope`"),
    Synonym::of("attention_temperature", &["query_scaling", "attn_temperature_tuning"], "`attention_temperature`"),
    Synonym::of("alibi", &["use_alibi", "alibi_slopes"], "`alibi`"),
    Synonym::of("relative_bias", &["distance_bias", "relative_attention_bias"], "`relative_bias`"),
    Synonym::of(
        "dropout",
        &["attention_dropout", "attn_pdrop", "dropout_p", "dropout_rate", "attn_dropout"],
        "`dropout`",
    ),
];

/// The keys that a query attends to. These options are combined with AND, with each other and with the mask of a call.
impl MultiHeadAttentionConfig {
    /// Sets whether later keys are masked. The mask is aligned to the end, as a cache needs it: the last query is at
    /// the last key, see [`AttentionMask::causal`](crate::AttentionMask::causal). The default is no.
    #[doc(alias = "is_causal")]
    pub fn with_causal(mut self, causal: bool) -> Self {
        self.causal = causal;
        self
    }

    /// Sets the most positions that a sequence may have, with those in a cache. More are an error. There is no limit by
    /// default.
    #[doc(alias("max_position_embeddings", "block_size", "max_seq_len"))]
    pub fn with_context_length(mut self, context_length: impl Into<Option<usize>>) -> Self {
        self.context_length = context_length.into();
        self
    }

    /// Sets a sliding window: a query attends to its own key and the `window - 1` keys before it, as with
    /// `sliding_window` of Hugging Face, see [`AttentionMask::with_window`](crate::AttentionMask::with_window). Later
    /// keys are masked by [`with_causal`](Self::with_causal) only.
    #[doc(alias = "sliding_window")]
    pub fn with_window(mut self, window: impl Into<Option<usize>>) -> Self {
        self.window = window.into();
        self
    }

    /// Sets a window on both sides: a query attends to the keys from `left` before its own to `right` after it, as in
    /// the local layers of encoders (ModernBERT). See
    /// [`AttentionMask::with_local_window`](crate::AttentionMask::with_local_window).
    pub fn with_local_window(mut self, left: usize, right: usize) -> Self {
        self.local_window = Some(LocalWindow { left, right });
        self
    }

    /// Sets the length of chunks (`attention_chunk_size` of Llama 4): positions 0 to `chunk - 1` are the first chunk,
    /// and so on, and a query attends to keys of the same chunk only. Positions count within each sequence, without
    /// padding on the left, see [`AttentionMask::with_chunk`](crate::AttentionMask::with_chunk), unless the call
    /// [sets them](crate::AttentionInput::with_positions).
    #[doc(alias = "attention_chunk_size")]
    pub fn with_chunk(mut self, chunk: impl Into<Option<usize>>) -> Self {
        self.chunk = chunk.into();
        self
    }

    /// Returns whether later keys are masked.
    pub fn causal(&self) -> bool {
        self.causal
    }

    /// Returns the most positions that a sequence may have.
    pub fn context_length(&self) -> Option<usize> {
        self.context_length
    }

    /// Returns the number of keys of a sliding window, with the query's own.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Returns the window on both sides of a query.
    pub fn local_window(&self) -> Option<LocalWindow> {
        self.local_window
    }

    /// Returns the length of chunks.
    pub fn chunk(&self) -> Option<usize> {
        self.chunk
    }
}

/// Scores and weights.
impl MultiHeadAttentionConfig {
    /// Sets the factor on q kᵀ. The default is `1 / sqrt(head_dim)`.
    #[doc(alias("softmax_scale", "query_pre_attn_scalar"))]
    pub fn with_scale(mut self, scale: impl Into<Option<f64>>) -> Self {
        self.scale = scale.into();
        self
    }

    /// Sets a bound of the scores: they become `softcap · tanh(score / softcap)`, as in Gemma 2, after the scale and
    /// before biases are added. There is none by default.
    #[doc(alias = "attn_logit_softcapping")]
    pub fn with_softcap(mut self, softcap: impl Into<Option<f64>>) -> Self {
        self.softcap = softcap.into();
        self
    }

    /// Sets whether there are learned attention sinks, one logit for each query head (parameter `sinks`), see
    /// [`SdpaOptions::with_sinks`](crate::SdpaOptions::with_sinks). The default is no.
    pub fn with_sinks(mut self, sinks: bool) -> Self {
        self.sinks = sinks;
        self
    }

    /// Sets the probability with which an attention weight is dropped in training. The default is 0.
    #[doc(alias("attention_dropout", "attn_pdrop"))]
    pub fn with_dropout(mut self, dropout: f64) -> Self {
        self.dropout = dropout;
        self
    }

    /// Sets the factor on queries that grows with their position, after norms and rotation (Llama 4, Ministral 3).
    /// Positions count as for [`with_chunk`](Self::with_chunk). There is none by default.
    pub fn with_attention_temperature(
        mut self,
        attention_temperature: impl Into<Option<AttentionTemperature>>,
    ) -> Self {
        self.attention_temperature = attention_temperature.into();
        self
    }

    /// Sets the indexer that chooses blocks of keys for each query (MiniMax M3), among the keys that the mask allows.
    /// There is none by default.
    #[doc(alias("block_sparse", "index_topk_blocks"))]
    pub fn with_indexer(mut self, indexer: impl Into<Option<BlockIndexerConfig>>) -> Self {
        self.indexer = indexer.into();
        self
    }

    /// Returns the indexer that chooses blocks of keys, if there is one.
    pub fn indexer(&self) -> Option<BlockIndexerConfig> {
        self.indexer
    }

    /// Returns the number of entries of each head that rotate.
    pub(crate) fn rotary_dim(&self) -> usize {
        self.rope().map_or(0, |rope| rope.rotary_dim(self.head_dim()))
    }

    /// Returns the number of entries of the indexer's keys that a cache or a pool stores after each key.
    pub(crate) fn index_columns(&self) -> usize {
        let width = self.indexer.map_or(0, |indexer| indexer.stored_width(self.rotary_dim()));
        width.div_ceil(self.num_kv_heads())
    }

    /// Returns the factor on q kᵀ that was set. Without one, it is `1 / sqrt(head_dim)`.
    pub fn scale(&self) -> Option<f64> {
        self.scale
    }

    /// Returns the bound of the scores.
    pub fn softcap(&self) -> Option<f64> {
        self.softcap
    }

    /// Returns whether there are learned attention sinks.
    pub fn sinks(&self) -> bool {
        self.sinks
    }

    /// Returns the probability with which an attention weight is dropped in training.
    pub fn dropout(&self) -> f64 {
        self.dropout
    }

    /// Returns the factor on queries that grows with their position.
    pub fn attention_temperature(&self) -> Option<AttentionTemperature> {
        self.attention_temperature
    }

    /// Returns the factor on q kᵀ.
    pub(crate) fn score_scale(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.head_dim() as f64).sqrt())
    }

    /// Returns the options of a call with the numbers that the layer sets for scores.
    pub(crate) fn with_score_numbers(&self, options: SdpaOptions) -> SdpaOptions {
        options.with_scale(self.score_scale()).with_softcap(self.softcap)
    }

    /// Checks the numbers of the options of masks and scores, each by itself.
    pub(super) fn validate_attention_numbers(&self) -> Result<()> {
        number::size(OP, "context_length", self.context_length)?;
        number::size(OP, "window", self.window)?;
        number::size(OP, "chunk", self.chunk)?;
        number::above_zero(OP, "softcap", self.softcap)?;
        number::finite(OP, "scale", self.scale)?;
        number::probability(OP, "dropout", self.dropout)
    }

    /// Checks the options of scores of a layer with relative positions of a grid, which become part of the queries.
    pub(super) fn validate_scores_beside_grid(&self, op: &str) -> Result<()> {
        if self.softcap.is_some() {
            bail!("[{op}] softcap is set, which bounds scores before relative positions of a grid are added")
        }
        if self.scale.is_some_and(|scale| scale as f32 == 0.0) {
            bail!("[{op}] scale is 0, expected another beside relative positions of a grid")
        }
        Ok(())
    }
}

/// Positions. There are none by default.
impl MultiHeadAttentionConfig {
    /// Sets rotary positions: queries and keys are rotated by their positions, after their norms.
    #[doc(alias("rotary", "rope_theta"))]
    pub fn with_rope(mut self, rope: impl Into<Option<RopeConfig>>) -> Self {
        self.rope = rope.into();
        self
    }

    /// Sets ALiBi's biases, which are added to the scores by the distance of query and key.
    pub fn with_alibi(mut self, alibi: impl Into<Option<AlibiConfig>>) -> Self {
        self.alibi = alibi.into();
        self
    }

    /// Sets T5's biases by distance, which are added to the scores. The layers of a stack share one table: give each
    /// layer [the table](crate::MultiHeadAttention::with_relative_bias) after it was built.
    pub fn with_relative_bias(mut self, relative_bias: impl Into<Option<RelativeBiasConfig>>) -> Self {
        self.relative_bias = relative_bias.into();
        self
    }

    /// Sets relative positions that depend on the content of queries or keys, or on positions in an image.
    pub fn with_content_positions(mut self, content_positions: impl Into<Option<ContentPositions>>) -> Self {
        self.content_positions = content_positions.into();
        self
    }

    /// Returns the rotary positions.
    pub fn rope(&self) -> Option<&RopeConfig> {
        self.rope.as_ref()
    }

    /// Returns ALiBi's biases.
    pub fn alibi(&self) -> Option<&AlibiConfig> {
        self.alibi.as_ref()
    }

    /// Returns T5's biases by distance.
    pub fn relative_bias(&self) -> Option<&RelativeBiasConfig> {
        self.relative_bias.as_ref()
    }

    /// Returns the relative positions that depend on content.
    pub fn content_positions(&self) -> Option<&ContentPositions> {
        self.content_positions.as_ref()
    }
}
