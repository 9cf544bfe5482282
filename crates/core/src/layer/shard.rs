//! The layer of one process of several.

use candle_core::{Result, bail};

use crate::base::HeadShard;
use crate::config::MultiHeadAttentionConfig;
use crate::norm::{QkNorm, QkNormKind, QkNormScope, Span};
use crate::position::AlibiConfig;

impl HeadShard {
    /// The config of a process's own layer.
    ///
    /// # Errors
    /// For more processes than query heads, for layer norms and norms of the context, which span all heads, and for
    /// unequal shares of a relative bias, whose heads are divided without the key heads.
    #[doc(hidden)]
    pub fn config(&self, cfg: &MultiHeadAttentionConfig) -> Result<MultiHeadAttentionConfig> {
        let (h, h_kv, n) = (cfg.num_heads(), cfg.num_kv_heads(), self.world_size());
        if n > h {
            bail!("[multi_head_attention] a world size of {n} is more than the {h} query heads")
        }
        if cfg.context_norm().is_some() && n > 1 {
            bail!("[multi_head_attention] a norm of the context spans the heads of all processes")
        }
        let subtracts_mean = |norm: QkNorm| matches!(norm.kind, QkNormKind::Layer | QkNormKind::LayerNoBias);
        if cfg.qk_norm().is_some_and(|norm| norm.scope == QkNormScope::Projection && subtracts_mean(norm)) && n > 1 {
            bail!(
                "[multi_head_attention] layer norms of whole projections span the heads of all processes, expected a root \
                 mean square"
            )
        }
        if cfg.relative_bias().is_some() && self.all().any(|shard| shard.shares(h, h_kv).0.range(h).len() * n != h) {
            bail!(
                "[multi_head_attention] a world size of {n} does not divide the {h} heads of a relative bias equally, \
                 with {h_kv} key heads"
            )
        }
        let (queries, keys) = self.shares(h, h_kv);
        let (queries, keys) = (queries.range(h), keys.range(h_kv));
        // What follows from the number of heads is as in the whole layer.
        let mut own = cfg
            .clone()
            .with_head_dim(cfg.head_dim())
            .with_value_head_dim(cfg.value_head_dim())
            .with_out_dim(if cfg.out_proj() { cfg.out_dim() } else { cfg.out_dim() / h * queries.len() })
            .with_key_size(cfg.key_size())
            .with_value_size(cfg.value_size());
        if let Some(alibi) = cfg.alibi().filter(|&alibi| *alibi != AlibiConfig::Falcon) {
            own = own.with_alibi(AlibiConfig::Slopes(alibi.slopes(h)?[queries.clone()].to_vec()));
        }
        Ok(own.with_heads(queries.len(), keys.len()))
    }

    /// What norms of whole queries and keys span, where the config has such.
    pub(super) fn norm_spans(self, cfg: &MultiHeadAttentionConfig) -> [Option<Span>; 2] {
        if cfg.qk_norm().is_none_or(|norm| norm.scope != QkNormScope::Projection) {
            return [None; 2];
        }
        let (h, h_kv, d) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim());
        let of_keys = Span { width: h_kv * d, counts: self.is_first_of_keys(h_kv) };
        [Some(Span { width: h * d, counts: true }), Some(of_keys)]
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
                    let (queries, keys) = shard.shares(h, h_kv);
                    let (queries, keys) = (queries.range(h), keys.range(h_kv));
                    let own = shard.config(&MultiHeadAttentionConfig::new(h * 2, h).with_num_kv_heads(h_kv))?;
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
