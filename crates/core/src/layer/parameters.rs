//! The parameters of a layer that belong to no projection: norms, a learned key and value, sinks.

use candle_core::Result;
use candle_nn::Init;

use super::MultiHeadAttention;
use crate::base::{Heads, ParameterList, Source, Spec};
use crate::config::{KvSource, MultiHeadAttentionConfig};
use crate::norm::{NormPlace, QkNorms, refuse_norms};

/// The norms of queries and of keys, if the config wants them; no norm of keys where these are an earlier layer's.
fn qk_norms(cfg: &MultiHeadAttentionConfig) -> Option<(NormPlace, Option<NormPlace>)> {
    let (norm, d) = (cfg.qk_norm()?, cfg.head_dim());
    let has_keys = cfg.kv_source() != KvSource::EarlierLayer;
    let of_keys = has_keys.then(|| NormPlace::of_keys(norm, cfg.num_kv_heads(), d));
    Some((NormPlace::of_queries(norm, cfg.num_heads(), d), of_keys))
}

fn context_norm(cfg: &MultiHeadAttentionConfig) -> Option<NormPlace> {
    cfg.context_norm().map(|norm| NormPlace::of_context(norm, cfg.num_heads(), cfg.value_head_dim()))
}

/// What the config wants, in the order in which it is read and written.
///
/// # Errors
/// If the file has what the config does not mention.
pub(super) fn specs(cfg: &MultiHeadAttentionConfig, source: &Source) -> Result<Vec<Spec>> {
    refuse_norms(cfg.qk_norm(), cfg.context_norm(), source)?;
    let (q, k) = qk_norms(cfg).unzip();
    let mut specs = Vec::new();
    for norm in [q, k.flatten(), context_norm(cfg)].into_iter().flatten() {
        specs.extend(norm.specs(source)?);
    }
    if cfg.bias_kv() {
        for (name, width) in [("bias_k", cfg.head_dim()), ("bias_v", cfg.value_head_dim())] {
            let width = cfg.num_kv_heads() * width;
            // `xavier_normal_` of a (1, 1, width) parameter.
            let init = Init::Randn { mean: 0.0, stdev: (width as f64).recip().sqrt() };
            specs.push(Spec::new(name, [1, 1, width], init).by_head(Heads::Key, 2));
        }
    } else {
        let positions = cfg.content_positions();
        let is_other = |name: &&str| positions.is_some_and(|positions| positions.has_parameter(name, source));
        let mut names = ["bias_k", "bias_v"].into_iter().filter(|name| !is_other(name));
        names.try_for_each(|name| source.refuse(name, "the config says there is no bias_kv"))?;
    }
    if cfg.sinks() {
        specs.push(Spec::new("sinks", [cfg.num_heads()], Init::Const(0.0)).by_head(Heads::Query, 0));
    } else {
        source.refuse("sinks", "the config says there are no sinks")?;
    }
    Ok(specs)
}

impl MultiHeadAttention {
    /// The same layer with what computes made of other parameters under the same names.
    pub(super) fn with_parameters(mut self, parameters: ParameterList) -> Result<Self> {
        let (dtype, device) = (self.projections.dtype(), self.projections.device());
        let norm = |place: NormPlace| place.norm(&parameters, dtype, device);
        if let (Some((q, k)), Some(norms)) = (qk_norms(&self.config), self.config.qk_norm()) {
            let [of_q, of_k] = self.norm_spans;
            let k = k.map(|k| Ok::<_, candle_core::Error>(norm(k)?.over(of_k))).transpose()?;
            self.qk_norm = Some(QkNorms { scope: norms.scope, q: norm(q)?.over(of_q), k });
        }
        self.context_norm = context_norm(&self.config).map(norm).transpose()?;
        self.bias_kv = parameters.tensor("bias_k")?.zip(parameters.tensor("bias_v")?);
        self.sinks = parameters.tensor("sinks")?;
        Ok(Self { parameters, ..self })
    }
}
