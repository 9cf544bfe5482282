//! Attention to latents in pages. Sequences whose queries absorb the matrix of keys attend to the pages in place, all
//! in one call. For each of the others, keys and values are computed from a copy of its latents.

use candle_attention_call::RequestedResults;
use candle_core::{Result, Tensor, bail};

use super::choice::PagedChoice;
use super::{MultiHeadLatentAttention, MultiHeadLatentAttentionConfig, OP};
use crate::cache::KvFloats;
use crate::layer::indexer::ChoiceRecord;
use crate::mask::AttentionMask;
use crate::pages::{KvPoolConfig, PageTable, PagedKeys};
use crate::sdpa::{Attended, Call, PagedSequences, Plan, Qkv, SdpaOptions, attend, plan_of_call};
use candle_attention_modules::base::{joined_in_order, rows_of, transpose_linked};

impl KvPoolConfig {
    /// Returns the config of the pool of a layer of latent attention. It stores what an
    /// [`AttentionCache`](crate::AttentionCache) of the layer does for each token: the latent, the shared key, and the
    /// key of an indexer if there is one.
    ///
    /// ```
    /// use candle_attention::{AttentionInput, KvPool, KvPoolConfig, PageTable};
    /// use candle_attention::{MultiHeadLatentAttention, MultiHeadLatentAttentionConfig};
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::VarBuilder;
    /// # fn main() -> candle_core::Result<()> {
    /// let cfg = MultiHeadLatentAttentionConfig::new(64, 4).with_kv_lora_rank(32).with_rope_head_dim(8);
    /// let layer = MultiHeadLatentAttention::new(&cfg, VarBuilder::zeros(DType::F32, &Device::Cpu))?;
    /// let mut table = PageTable::new(10, 16)?;
    /// let pool = KvPool::new(&KvPoolConfig::for_latent_layer(&cfg, &table), &Device::Cpu)?;
    /// assert_eq!(pool.memory(), 10 * 16 * (32 + 8) * 4);
    /// let sequence = table.add();
    /// let step = table.step(&[sequence.tokens(20)])?;
    /// let xs = Tensor::randn(0f32, 1., (20, 64), &Device::Cpu)?;
    /// let ys = layer.forward_with(AttentionInput::new(&xs).with_pages(&pool, &step))?;
    /// assert_eq!(ys.dims(), [20, 64]);
    /// step.commit();
    /// # Ok(()) }
    /// ```
    pub fn for_latent_layer(cfg: &MultiHeadLatentAttentionConfig, table: &PageTable) -> Self {
        Self::for_latents(cfg.row_width(), cfg.kv_lora_rank(), table)
    }
}

/// The latents in pages that a call of a layer attends to.
pub(in crate::layer) struct LatentPages<'a> {
    pub layer: &'a MultiHeadLatentAttention,
    pub pages: PagedKeys<'a>,
    /// Whether queries absorb the matrix of keys; by default, the form with fewer multiplications for each sequence.
    pub absorbs: Option<bool>,
    /// The choice of the keys of each sequence, if queries do not attend to all of them.
    pub choice: Option<PagedChoice>,
    /// The most keys that a query attends to, if they are chosen.
    pub most_keys: Option<usize>,
    /// The keys that are chosen, for later layers.
    pub record: ChoiceRecord,
}

/// Sequences of a step that are attended to in one call.
struct LatentPart {
    sequences: Vec<usize>,
    /// The indices of the queries of the sequences in the step.
    queries: Vec<u32>,
    /// Whether queries absorb the matrix of keys.
    absorbs: bool,
    /// Whether the pages are read in place; otherwise there is one sequence.
    in_place: bool,
}

impl LatentPages<'_> {
    /// Attends from queries (1, H, total, nope + rope) to (1, H, total, D_v), a view of (1, total, H, D_v).
    pub fn attend(
        &self,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: RequestedResults,
    ) -> Result<Attended> {
        let mut order: Vec<u32> = Vec::new();
        let mut values = Vec::new();
        let parts = self.parts(mask, options, wanted)?;
        if parts.is_empty() {
            let cfg = &self.layer.config;
            let shape = (1, 0, cfg.num_heads(), cfg.value_head_dim());
            return Ok(Tensor::zeros(shape, q.dtype(), q.device())?.transpose(1, 2)?.into());
        }
        for part in &parts {
            let found = self.attend_part(part, q, mask, options, wanted)?;
            let heads = transpose_linked(&found.output, 1, 2)?;
            let of_part = if part.absorbs { self.layer.values_of(&heads)? } else { heads };
            if parts.len() == 1 {
                return Ok(Attended { output: of_part.transpose(1, 2)?, ..found });
            }
            order.extend(&part.queries);
            values.push(of_part);
        }
        Ok(joined_in_order(&values, 1, &order)?.transpose(1, 2)?.into())
    }

    /// Returns the path of attention for its output.
    pub fn plan(&self, q: &Tensor, mask: &AttentionMask, options: &SdpaOptions) -> Result<Plan> {
        let parts = self.parts(mask, options, RequestedResults::default())?;
        let Some(part) = parts.iter().find(|part| part.in_place).or(parts.first()) else {
            bail!("[{OP}] the step has no tokens, expected some for a plan")
        };
        let q = self.queries_of(part, q)?;
        if part.in_place {
            return self.pages.plan_from(&q, &self.sequences_of(part)?, &mask.of_sequences(&part.sequences), options);
        }
        let mut plan = plan_of_call(self.call_of_sequence(part, &q, mask, options)?)?;
        plan.reason.push_str(", over a copy of the latents in the pages");
        Ok(plan)
    }

    /// Returns the sequences with queries, those that read pages in place first.
    fn parts(&self, mask: &AttentionMask, options: &SdpaOptions, wanted: RequestedResults) -> Result<Vec<LatentPart>> {
        let sequences = self.pages.step.sequences();
        mask.check_without_tensors(OP)?;
        mask.ranges_of_packed(OP, sequences.packed().rows().collect())?;
        let part = |chosen: Vec<usize>, absorbs: bool, in_place: bool| {
            let queries = chosen.iter().flat_map(|&s| sequences.queries(s)).map(|query| query as u32).collect();
            LatentPart { sequences: chosen, queries, absorbs, in_place }
        };
        // Results besides the output, and dropout, are for one call. Lists of keys are for all queries.
        let is_one_call = wanted != RequestedResults::default() || options.drops() || mask.has_key_lists();
        let chooses_keys = self.choice.is_some();
        if chooses_keys && is_one_call {
            bail!(
                "[{OP}] a call with pages of a layer whose keys are chosen has weights, statistics, dropout or key lists, \
                 expected none of them"
            )
        }
        let mut in_place = Vec::new();
        let mut alone = Vec::new();
        for s in 0..sequences.len() {
            let t_q = sequences.queries(s).len();
            let keys = sequences.keys(s);
            let absorbs = self.absorbs.unwrap_or_else(|| self.layer.config.absorbs(t_q, keys.end, self.most_keys));
            if t_q == 0 {
                continue;
            }
            if !chooses_keys && (absorbs || keys.start > 0 || is_one_call) {
                in_place.push(s);
            } else {
                alone.push(part(vec![s], absorbs, false));
            }
        }
        let first = if in_place.is_empty() { None } else { Some(part(in_place, true, true)) };
        Ok(first.into_iter().chain(alone).collect())
    }

    fn sequences_of(&self, part: &LatentPart) -> Result<PagedSequences> {
        self.pages.step.sequences().of_sequences(&part.sequences)
    }

    /// Returns the queries of a part as they attend: (1, H, n, nope + rope), or (1, H, n, rank + rope).
    fn queries_of(&self, part: &LatentPart, q: &Tensor) -> Result<Tensor> {
        let rows = rows_of(&q.transpose(1, 2)?, 1, &part.queries)?;
        if !part.absorbs {
            return rows.transpose(1, 2);
        }
        self.layer.absorbing_queries(&rows)?.transpose(1, 2)
    }

    fn attend_part(
        &self,
        part: &LatentPart,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
        wanted: RequestedResults,
    ) -> Result<Attended> {
        let own = self.queries_of(part, q)?;
        if part.in_place {
            let of_part = mask.of_sequences(&part.sequences);
            return self.pages.attend_from(&own, &self.sequences_of(part)?, &of_part, options, wanted);
        }
        attend(self.call_of_sequence(part, &own, mask, options)?, wanted)?.into_dtype(q.dtype())
    }

    /// Returns the call of the queries (1, H, n, ..) of one sequence, to keys and values that are computed from a copy
    /// of its latents.
    fn call_of_sequence(
        &self,
        part: &LatentPart,
        q: &Tensor,
        mask: &AttentionMask,
        options: &SdpaOptions,
    ) -> Result<Call> {
        let dtype = self.pages.float_dtype(q.dtype());
        let layer = self.layer;
        let mut of_sequence = mask.of_sequences(&part.sequences);
        let mut latents = Vec::new();
        for &s in &part.sequences {
            latents.push(self.pages.keys_of(s, dtype)?);
        }
        let latents = Tensor::cat(&latents, 0)?;
        if let (Some(choice), &[s]) = (&self.choice, part.sequences.as_slice())
            && let Some(own) = choice.of_sequence(s, &part.queries)?
        {
            let record = ChoiceRecord::default();
            of_sequence = layer.with_chosen_keys(of_sequence, &own, &layer.index_keys_of(&latents)?, &record)?;
            self.record.set_of_sequence(s, record.get().lists.as_ref());
        }
        let KvFloats { k, v } =
            if part.absorbs { layer.without_index_keys(&latents)? } else { layer.expand(&latents)? };
        let attached = |tensor: &Tensor| self.pages.attached(tensor);
        let q = attached(&q.to_dtype(dtype)?);
        let qkv = Qkv { q: &q, k: &attached(&k), v: &attached(&v) };
        Call::with_all_dims(OP, qkv, None, None, &of_sequence, options)
    }
}
