//! The gated delta rule and `GatedDeltaNet`: its config, its tensors, its inputs and its cache.

use serde::Deserialize;

use crate::cache::{Edit, numbers};
use crate::common::values;
use crate::words::{Of, Packed, Tensors, backend, builder, dtype, with};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[("delta rule", run::<Rule>), ("delta net", run::<NetCall>)];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    q: Tensors,
    k: Tensors,
    v: Tensors,
    decay: Option<Tensors>,
    beta: Option<Tensors>,
    state: Option<Tensors>,
    packed: Option<Packed>,
    scale: Option<Of<f64>>,
    qk_norm: Option<Of<f64>>,
    backend: Option<String>,
}

impl Call for Rule {
    fn call(self) -> Result<String> {
        let options = with(DeltaOptions::default(), self.scale, |options, Of(scale)| options.with_scale(scale));
        let options = with(options, self.qk_norm, |options, Of(eps)| options.with_qk_norm(eps));
        let options = options.with_backend(backend(&self.backend));
        let (q, k, v) = (&self.q, &self.k, &self.v);
        let [decay, beta, state] = [&self.decay, &self.beta, &self.state].map(Option::as_deref);
        match self.packed {
            Some(packed) => gated_delta_rule_varlen(q, k, v, decay, beta, state, &packed.build()?, &options),
            None => gated_delta_rule(q, k, v, decay, beta, state, &options),
        }
        .map(accepted)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NetCall {
    config: Of<GatedDeltaNetConfig>,
    layout: Option<Of<DeltaLayout>>,
    dtype: Option<String>,
    /// Those of a seed unless said.
    weights: Option<Value>,
    xs: Tensors,
    residual: Option<Tensors>,
    attention_mask: Option<Tensors>,
    valid_lens: Option<Vec<usize>>,
    packed: Option<Packed>,
    /// The calls that came before; of the first there is a snapshot.
    cache: Option<Vec<NetCall>>,
    /// What is done to the cache in the place of a call.
    edit: Option<Edit>,
    /// The layout that the weights are saved in.
    saved: Option<Of<DeltaLayout>>,
}

impl NetCall {
    fn run(&self, xs: &Tensor, cache: Option<&mut DeltaCache>) -> Result<Tensor> {
        let weights = self.weights.as_ref().unwrap_or(&"seed".into()).clone();
        let (Of(config), vb) = (&self.config, builder(&weights, dtype(&self.dtype))?);
        let net = match self.layout {
            Some(Of(layout)) => GatedDeltaNet::load(config, layout, vb)?,
            None => GatedDeltaNet::new(config, vb)?,
        };
        if let Some(Of(layout)) = self.saved {
            return net.state_dict(layout).map(|_| xs.clone());
        }
        let packed = self.packed.as_ref().map(Packed::build).transpose()?;
        let input = with(DeltaInput::new(xs), self.residual.as_deref(), DeltaInput::with_residual);
        let input = with(input, self.attention_mask.as_deref(), DeltaInput::with_attention_mask);
        let input = with(input, self.valid_lens.as_deref(), DeltaInput::with_valid_lens);
        let input = with(input, packed.as_ref(), DeltaInput::with_packed);
        net.forward_with(with(input, cache, DeltaInput::with_cache))
    }

    /// Of distinct numbers.
    fn step(&self, cache: &mut DeltaCache) -> Result<Tensor> {
        self.run(&numbers(self.xs.shape().clone()).to_dtype(self.xs.dtype())?, Some(cache))
    }
}

impl Call for NetCall {
    /// Where a call with a cache is an error, it leaves no trace.
    fn call(self) -> Result<String> {
        let Some(before) = &self.cache else { return self.run(&self.xs, None).map(accepted) };
        let mut cache = DeltaCache::default();
        for (n, call) in before.iter().enumerate() {
            call.step(&mut cache)?;
            if n == 0 {
                cache.snapshot();
            }
        }
        let mut untouched = cache.fork()?;
        let outcome = match &self.edit {
            Some(Edit::Truncate(len)) => cache.truncate(*len),
            Some(Edit::Reorder(sequences)) => cache.reorder(sequences),
            Some(Edit::TruncateTo(_)) => panic!("a state has one length to be truncated to"),
            None => self.run(&self.xs, Some(&mut cache)).map(drop),
        };
        if let (Err(_), Some(call)) = (&outcome, before.first()) {
            assert_eq!(cache.lens(), untouched.lens());
            let [own, other] = [&mut cache, &mut untouched].map(|cache| call.step(cache));
            assert_eq!(values(&own?), values(&other?));
        }
        outcome.map(accepted)
    }
}
