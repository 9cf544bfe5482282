//! The parameters of a layer that belong to no projection (norms, a learned key and value, sinks), and the config of
//! one rank's shard of a layer.

use candle_core::{Result, bail};
use candle_nn::Init;

use super::{MultiHeadAttention, OP};
use crate::config::{KvSharing, MultiHeadAttentionConfig};
use crate::position::{AlibiConfig, LayerSpecs, content_specs};
use candle_attention_modules::base::{HeadCounts, HeadShard, Heads, ParameterList, ParameterReader, ParameterSpec};
use candle_attention_modules::norm::{
    KEY_NORM_NAMES, Norm, NormSpec, OUTPUT_NORM_NAMES, QUERY_NORM_NAMES, QkNorm, QkNormKind, QkNormScope,
    ShardedDimension, VALUE_NORM_NAMES, refuse_norms,
};

impl MultiHeadAttentionConfig {
    /// Returns the config of one rank's shard of the layer.
    ///
    /// # Errors
    /// For more ranks than query heads, for layer norms of whole projections and norms of the output, which span all
    /// heads, and for unequal shards of a relative bias, whose heads are divided without the key heads.
    #[doc(hidden)]
    pub fn for_shard(&self, shard: HeadShard) -> Result<Self> {
        let h = self.num_heads();
        let h_kv = self.num_kv_heads();
        let n = shard.world_size();
        let heads = HeadCounts { query: h, key: h_kv };
        if n == 1 {
            return Ok(self.clone());
        }
        if n > h {
            bail!("[{OP}] a world size of {n} is more than the {h} query heads")
        }
        if self.output_norm().is_some() {
            bail!("[{OP}] a norm of the attention output spans the heads of all ranks")
        }
        let subtracts_mean = |norm: QkNorm| matches!(norm.kind, QkNormKind::Layer | QkNormKind::LayerNoBias);
        if self.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection && subtracts_mean(norm)) {
            bail!("[{OP}] layer norms of whole projections span the heads of all ranks, expected a root mean square")
        }
        if self.relative_bias().is_some() && shard.all().any(|one| one.range(Heads::Query, heads, h).len() * n != h) {
            bail!(
                "[{OP}] a world size of {n} does not divide the {h} heads of a relative bias equally, \
                 with {h_kv} key heads"
            )
        }
        let queries = shard.range(Heads::Query, heads, h);
        let keys = shard.range(Heads::Key, heads, h_kv);
        // Options whose default depends on the number of heads are those of the whole layer.
        let mut config = self
            .clone()
            .with_head_dim(self.head_dim())
            .with_value_head_dim(self.value_head_dim())
            .with_out_dim(if self.out_proj() { self.out_dim() } else { self.out_dim() / h * queries.len() })
            .with_kdim(self.kdim())
            .with_vdim(self.vdim());
        if let Some(alibi) = self.alibi().filter(|&alibi| *alibi != AlibiConfig::Falcon) {
            config = config.with_alibi(AlibiConfig::Slopes(alibi.slopes(h)?[queries.clone()].to_vec()));
        }
        Ok(config.with_heads(queries.len(), keys.len()))
    }

    /// Returns the dimensions that norms of whole projections span, if these are sharded.
    pub(super) fn norm_spans(&self, shard: HeadShard) -> NormSpans {
        if shard.world_size() == 1 || self.qk_norm().is_none_or(|norm| norm.scope != QkNormScope::Projection) {
            return NormSpans::default();
        }
        let h = self.num_heads();
        let h_kv = self.num_kv_heads();
        let d = self.head_dim();
        NormSpans {
            queries: Some(ShardedDimension { width: h * d, counts: true }),
            keys: Some(ShardedDimension { width: h_kv * d, counts: shard.is_first_of_keys(h_kv) }),
        }
    }
}

/// The dimensions that norms of whole queries and keys span, if their heads are sharded among ranks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct NormSpans {
    queries: Option<ShardedDimension>,
    keys: Option<ShardedDimension>,
}

/// The norms of a layer.
#[derive(Debug, Clone, Default)]
pub(super) struct LayerNorms {
    pub queries: Option<Norm>,
    pub keys: Option<Norm>,
    pub values: Option<Norm>,
    /// The norm of the attention output.
    pub output: Option<Norm>,
}

/// The parameters of the norms that a config has.
struct NormSpecs {
    queries: Option<NormSpec>,
    /// `None` if the keys are an earlier layer's.
    keys: Option<NormSpec>,
    values: Option<NormSpec>,
    output: Option<NormSpec>,
}

impl NormSpecs {
    fn new(cfg: &MultiHeadAttentionConfig) -> Self {
        let h = cfg.num_heads();
        let h_kv = cfg.num_kv_heads();
        let d = cfg.head_dim();
        let d_v = cfg.value_head_dim();
        let projects_keys = cfg.kv_sharing() != KvSharing::EarlierLayer;
        let without_weight = |eps| QkNorm { kind: QkNormKind::RmsNoWeight, scope: QkNormScope::PerHead, eps };
        Self {
            queries: cfg.qk_norm().map(|norm| NormSpec {
                norm,
                names: QUERY_NORM_NAMES,
                heads: Heads::Query,
                count: h,
                width: d,
            }),
            keys: cfg.qk_norm().filter(|_| projects_keys).map(|norm| NormSpec {
                norm,
                names: KEY_NORM_NAMES,
                heads: Heads::Key,
                count: h_kv,
                width: d,
            }),
            values: cfg.value_norm().map(|eps| NormSpec {
                norm: without_weight(eps),
                names: VALUE_NORM_NAMES,
                heads: Heads::Key,
                count: h_kv,
                width: d_v,
            }),
            output: cfg.output_norm().map(|norm| NormSpec {
                norm: norm.into(),
                names: OUTPUT_NORM_NAMES,
                heads: Heads::Query,
                count: h,
                width: d_v,
            }),
        }
    }
}

/// Returns the parameters of a config that belong to no projection, in the order in which they are loaded and saved.
///
/// # Errors
/// If the checkpoint has parameters that the config does not use.
pub(super) fn specs(cfg: &MultiHeadAttentionConfig, source: &ParameterReader) -> Result<Vec<ParameterSpec>> {
    refuse_norms(cfg.qk_norm(), cfg.output_norm(), source)?;
    let embed_dim = cfg.embed_dim();
    let num_heads = cfg.num_heads();
    let head_dim = cfg.head_dim();
    let content = content_specs(cfg.content_positions(), &LayerSpecs { embed_dim, num_heads, head_dim, source })?;
    let mut specs = Vec::new();
    let NormSpecs { queries, keys, values, output } = NormSpecs::new(cfg);
    for norm in [queries, keys, values, output].into_iter().flatten() {
        specs.extend(norm.specs(source)?);
    }
    for (name, width) in [("bias_k", cfg.head_dim()), ("bias_v", cfg.value_head_dim())] {
        let width = cfg.num_kv_heads() * width;
        // `xavier_normal_` of a (1, 1, width) parameter.
        let init = Init::Randn { mean: 0.0, stdev: (width as f64).recip().sqrt() };
        // NeMo's Transformer-XL has one of these names for another parameter.
        if !content.iter().any(|spec| spec.stored == name) {
            let spec = ParameterSpec::new(name, [1, 1, width], init).by_head(Heads::Key, 2);
            specs.push(spec.only_if(cfg.bias_kv(), "the config says there is no bias_kv"));
        }
    }
    for (name, width) in [("mem_k", cfg.head_dim()), ("mem_v", cfg.value_head_dim())] {
        let init = Init::Randn { mean: 0.0, stdev: 1.0 };
        let spec = ParameterSpec::new(name, [cfg.num_kv_heads(), cfg.num_mem_kv(), width], init);
        let is_requested = cfg.num_mem_kv() > 0;
        specs.push(spec.by_head(Heads::Key, 0).only_if(is_requested, "the config says num_mem_kv is 0"));
    }
    let sinks = ParameterSpec::new("sinks", [cfg.num_heads()], Init::Const(0.0)).by_head(Heads::Query, 0);
    specs.push(sinks.only_if(cfg.sinks(), "the config says there are no sinks"));
    specs.extend(content);
    Ok(specs)
}

impl MultiHeadAttention {
    /// Returns the layer with norms and content-based positions built from other parameters under the same names.
    pub(super) fn with_parameters(mut self, parameters: ParameterList) -> Result<Self> {
        let dtype = self.projections.dtype;
        let device = &self.projections.device;
        let build = |spec: Option<NormSpec>| spec.map(|spec| spec.build(&parameters, dtype, device)).transpose();
        let specs = NormSpecs::new(&self.config);
        let spans = self.norm_spans;
        self.norms = LayerNorms {
            queries: build(specs.queries)?.map(|norm| norm.with_sharded(spans.queries)),
            keys: build(specs.keys)?.map(|norm| norm.with_sharded(spans.keys)),
            values: build(specs.values)?,
            output: build(specs.output)?,
        };
        self.content = match self.config.content_positions() {
            Some(positions) => Some(positions.modifier(parameters.clone(), self.relative_embeddings.clone())),
            None => None,
        };
        self.parameters = parameters;
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_of_gqa_have_the_key_heads_of_their_query_heads() -> Result<()> {
        for (h, h_kv) in [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (12, 4), (9, 3), (5, 5), (7, 1)] {
            for world_size in 1..=h {
                let mut next = 0;
                for rank in 0..world_size {
                    let shard = HeadShard::new(rank, world_size)?;
                    let counts = HeadCounts { query: h, key: h_kv };
                    let queries = shard.range(Heads::Query, counts, h);
                    let keys = shard.range(Heads::Key, counts, h_kv);
                    let config = MultiHeadAttentionConfig::new(h * 2, h).with_num_kv_heads(h_kv).for_shard(shard)?;
                    assert_eq!((config.num_heads(), config.num_kv_heads()), (queries.len(), keys.len()));
                    assert!(queries.start == next && !queries.is_empty(), "{h}, {h_kv}, {rank} of {world_size}");
                    next = queries.end;
                    config.validate()?;
                    for (n, query) in queries.clone().enumerate() {
                        let local = n * keys.len() / queries.len();
                        assert_eq!(keys.start + local, query * h_kv / h, "query head {query}");
                    }
                    assert_eq!(keys.end - 1, (queries.end - 1) * h_kv / h);
                }
                assert_eq!(next, h);
            }
        }
        Ok(())
    }
}
