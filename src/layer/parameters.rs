//! The parameters of a layer that belong to no projection.

use candle_core::{Result, Tensor};
use candle_nn::Init;

use crate::MultiHeadAttentionConfig;
use crate::norm::{NormDims, QkNorms};
use crate::position::Alibi;
use crate::shard::HeadShard;
use crate::weights::Source;

/// Norms of queries and keys, a learned key and value, sinks, and what ALiBi adds: what the config wants of them.
pub(super) struct Parameters {
    pub qk_norm: Option<QkNorms>,
    /// (1, 1, H_kv·D) and (1, 1, H_kv·D_v).
    pub bias_kv: Option<(Tensor, Tensor)>,
    /// (H,).
    pub sinks: Option<Tensor>,
    pub alibi: Option<Alibi>,
}

impl Parameters {
    pub fn load(cfg: &MultiHeadAttentionConfig, source: &Source) -> Result<Self> {
        let (h, h_kv, d) = (cfg.num_heads(), cfg.num_kv_heads(), cfg.head_dim());
        let qk_norm = match cfg.qk_norm() {
            None => {
                QkNorms::refuse(source)?;
                None
            }
            Some(norm) => Some(QkNorms::load(norm, NormDims { h, h_kv, d }, source)?),
        };
        let bias_kv = if cfg.bias_kv() {
            // `xavier_normal_` of a (1, 1, width) parameter.
            let learned = |name, width: usize| {
                source.get((1, 1, width), name, Init::Randn { mean: 0.0, stdev: (width as f64).recip().sqrt() })
            };
            Some((learned("bias_k", h_kv * d)?, learned("bias_v", h_kv * cfg.value_head_dim())?))
        } else {
            for name in ["bias_k", "bias_v"] {
                source.refuse(name, "the config says there is no bias_kv")?;
            }
            None
        };
        let sinks = if cfg.sinks() {
            Some(source.get(h, "sinks", Init::Const(0.0))?)
        } else {
            source.refuse("sinks", "the config says there are no sinks")?;
            None
        };
        let alibi = cfg.alibi().map(|alibi| Alibi::new(alibi, h, cfg.score_scale(), source.device())).transpose()?;
        Ok(Self { qk_norm, bias_kv, sinks, alibi })
    }

    /// Those of one process's heads; the config is the whole layer's.
    pub fn shard(self, cfg: &MultiHeadAttentionConfig, shard: HeadShard) -> Result<Self> {
        let (queries, keys) = (shard.query_share(), shard.key_share(cfg.num_kv_heads()));
        let bias_kv = match &self.bias_kv {
            Some((k, v)) => Some((keys.copy(k, 2)?, keys.copy(v, 2)?)),
            None => None,
        };
        Ok(Self {
            qk_norm: self.qk_norm.map(|norms| norms.shard(queries, keys)).transpose()?,
            bias_kv,
            sinks: self.sinks.map(|sinks| queries.copy(&sinks, 0)).transpose()?,
            alibi: self.alibi.map(|alibi| alibi.heads(queries.range(cfg.num_heads()))).transpose()?,
        })
    }
}
