//! The parameters of a layer that belong to no projection: norms, a learned key and value, sinks; and what of a layer
//! one process of several has.

use candle_core::{Result, bail};
use candle_nn::Init;

use super::{MultiHeadAttention, OP};
use crate::config::{KvSharing, MultiHeadAttentionConfig};
use crate::position::{AlibiConfig, LayerSpecs, content_specs};
use candle_attention_modules::base::{HeadShard, Heads, ParameterList, ParameterReader, ParameterSpec};
use candle_attention_modules::norm::{
    KEY_NORM_NAMES, NormSpec, OUTPUT_NORM_NAMES, QUERY_NORM_NAMES, QkNorm, QkNormKind, QkNormScope, ShardedDimension,
    refuse_norms,
};

impl MultiHeadAttentionConfig {
    /// The config of one process's own layer.
    ///
    /// # Errors
    /// For more processes than query heads, for layer norms and norms of the context, which span all heads, and for
    /// unequal shares of a relative bias, whose heads are divided without the key heads.
    #[doc(hidden)]
    pub fn for_shard(&self, shard: HeadShard) -> Result<Self> {
        let (heads @ [h, h_kv], n) = ([self.num_heads(), self.num_kv_heads()], shard.world_size());
        if n == 1 {
            return Ok(self.clone());
        }
        if n > h {
            bail!("[{OP}] a world size of {n} is more than the {h} query heads")
        }
        if self.output_norm().is_some() {
            bail!("[{OP}] a norm of the context spans the heads of all processes")
        }
        let subtracts_mean = |norm: QkNorm| matches!(norm.kind, QkNormKind::Layer | QkNormKind::LayerNoBias);
        if self.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection && subtracts_mean(norm)) {
            bail!(
                "[{OP}] layer norms of whole projections span the heads of all processes, expected a root mean square"
            )
        }
        if self.relative_bias().is_some() && shard.all().any(|one| one.range(Heads::Query, heads, h).len() * n != h) {
            bail!(
                "[{OP}] a world size of {n} does not divide the {h} heads of a relative bias equally, \
                 with {h_kv} key heads"
            )
        }
        let (queries, keys) = (shard.range(Heads::Query, heads, h), shard.range(Heads::Key, heads, h_kv));
        // What follows from the number of heads is as in the whole layer.
        let mut own = self
            .clone()
            .with_head_dim(self.head_dim())
            .with_value_head_dim(self.value_head_dim())
            .with_out_dim(if self.out_proj() { self.out_dim() } else { self.out_dim() / h * queries.len() })
            .with_kdim(self.kdim())
            .with_vdim(self.vdim());
        if let Some(alibi) = self.alibi().filter(|&alibi| *alibi != AlibiConfig::Falcon) {
            own = own.with_alibi(AlibiConfig::Slopes(alibi.slopes(h)?[queries.clone()].to_vec()));
        }
        Ok(own.with_heads(queries.len(), keys.len()))
    }

    /// What norms of whole queries and keys span, where the config has such.
    pub(super) fn norm_spans(&self, shard: HeadShard) -> [Option<ShardedDimension>; 2] {
        if shard.world_size() == 1 || self.qk_norm().is_none_or(|norm| norm.scope != QkNormScope::Projection) {
            return [None; 2];
        }
        let (h, h_kv, d) = (self.num_heads(), self.num_kv_heads(), self.head_dim());
        let of_keys = ShardedDimension { width: h_kv * d, counts: shard.is_first_of_keys(h_kv) };
        [Some(ShardedDimension { width: h * d, counts: true }), Some(of_keys)]
    }
}

/// The norms of queries, keys, values and the context that the config wants; none of keys where these are an earlier
/// layer's.
fn norms(cfg: &MultiHeadAttentionConfig) -> [Option<NormSpec>; 4] {
    let (h, d, qk_norm) = (cfg.num_heads(), cfg.head_dim(), cfg.qk_norm());
    let k_norm = qk_norm.filter(|_| cfg.kv_sharing() != KvSharing::EarlierLayer);
    let without_weight = |eps| QkNorm { kind: QkNormKind::RmsNoWeight, scope: QkNormScope::PerHead, eps };
    let (value_norm, output_norm) = (cfg.value_norm().map(without_weight), cfg.output_norm().map(QkNorm::from));
    let (h_kv, d_v) = (cfg.num_kv_heads(), cfg.value_head_dim());
    let all = [
        (qk_norm, QUERY_NORM_NAMES, Heads::Query, h, d),
        (k_norm, KEY_NORM_NAMES, Heads::Key, h_kv, d),
        (value_norm, ["v_norm"; 3], Heads::Key, h_kv, d_v),
        (output_norm, OUTPUT_NORM_NAMES, Heads::Query, h, d_v),
    ];
    all.map(|(norm, names, heads, count, width)| norm.map(|norm| NormSpec { norm, names, heads, count, width }))
}

/// What the config wants, in the order in which it is read and written.
///
/// # Errors
/// If the file has what the config does not mention.
pub(super) fn specs(cfg: &MultiHeadAttentionConfig, source: &ParameterReader) -> Result<Vec<ParameterSpec>> {
    refuse_norms(cfg.qk_norm(), cfg.output_norm(), source)?;
    let (embed_dim, num_heads, head_dim) = (cfg.embed_dim(), cfg.num_heads(), cfg.head_dim());
    let content = content_specs(cfg.content_positions(), &LayerSpecs { embed_dim, num_heads, head_dim, source })?;
    let mut specs = Vec::new();
    for norm in norms(cfg).into_iter().flatten() {
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
    let sinks = ParameterSpec::new("sinks", [cfg.num_heads()], Init::Const(0.0)).by_head(Heads::Query, 0);
    specs.push(sinks.only_if(cfg.sinks(), "the config says there are no sinks"));
    specs.extend(content);
    Ok(specs)
}

impl MultiHeadAttention {
    /// The same layer with what computes made of other parameters under the same names.
    pub(super) fn with_parameters(mut self, parameters: ParameterList) -> Result<Self> {
        let (dtype, device) = (self.projections.dtype, &self.projections.device);
        let norm = |place: Option<NormSpec>| place.map(|place| place.build(&parameters, dtype, device)).transpose();
        let ([q, k, v, context], [of_q, of_k]) = (norms(&self.config).map(norm), self.norm_spans);
        self.norms = [q?.map(|norm| norm.with_sharded(of_q)), k?.map(|norm| norm.with_sharded(of_k)), v?, context?];
        let positions = self.config.content_positions();
        self.content = positions.map(|own| own.term(parameters.clone(), self.relative_embeddings.clone()));
        Ok(Self { parameters, ..self })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_heads_stay_with_their_queries() -> Result<()> {
        for (h, h_kv) in [(8, 8), (8, 4), (8, 2), (8, 1), (6, 3), (12, 4), (9, 3), (5, 5), (7, 1)] {
            for world_size in 1..=h {
                let mut next = 0;
                for rank in 0..world_size {
                    let shard = HeadShard::new(rank, world_size)?;
                    let own = |heads, len| shard.range(heads, [h, h_kv], len);
                    let (queries, keys) = (own(Heads::Query, h), own(Heads::Key, h_kv));
                    let own = MultiHeadAttentionConfig::new(h * 2, h).with_num_kv_heads(h_kv).for_shard(shard)?;
                    assert_eq!((own.num_heads(), own.num_kv_heads()), (queries.len(), keys.len()));
                    assert!(queries.start == next && !queries.is_empty(), "{h}, {h_kv}, {rank} of {world_size}");
                    next = queries.end;
                    own.validate()?;
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
