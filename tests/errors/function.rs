//! `scaled_dot_product_attention` and what goes with it, for batches and for packed sequences, and masks.

use candle_attention::{scaled_dot_product_attention as sdpa, scaled_dot_product_attention_varlen as varlen};
use serde::Deserialize;

use crate::words::{Lens, Mask, Of, Packed, Tensors, backend, dtype_and_shape, with};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("attention", run::<Attention>),
    ("merge", run::<Parts>),
    ("masked softmax", run::<Scores>),
    ("packed sequences", |_, json| {
        serde_json::from_value::<Packed>(json.clone()).map_err(Error::wrap)?.build().map(accepted)
    }),
    ("additive mask", |line, _| {
        let (dtype, dims) = dtype_and_shape(line).expect("a dtype and a shape");
        AttentionMask::causal()
            .to_additive(<[usize; 4]>::try_from(dims).expect("four sizes").into(), dtype, &CPU)
            .map(accepted)
    }),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Attention {
    q: Tensors,
    k: Tensors,
    v: Tensors,
    packed: Option<Packed>,
    #[serde(default)]
    mask: Mask,
    scale: Option<Of<f64>>,
    softcap: Option<Of<f64>>,
    /// And whether it is training.
    dropout: Option<(Of<f64>, bool)>,
    slopes: Option<Tensors>,
    sinks: Option<Tensors>,
    backend: Option<String>,
    entry: Option<String>,
}

impl Call for Attention {
    fn call(self) -> Result<String> {
        let options = SdpaOptions::default();
        let options = with(options, self.scale, |options, Of(scale)| options.with_scale(scale));
        let options = with(options, self.softcap, |options, Of(softcap)| options.with_softcap(softcap));
        let options = with(options, self.dropout, |options, (Of(p), train)| options.with_dropout(p, train));
        let options = with(options, self.slopes.as_deref(), SdpaOptions::with_alibi_slopes);
        let options = with(options, self.sinks.as_deref(), SdpaOptions::with_sinks);
        let options = &options.with_backend(backend(&self.backend));
        let (q, k, v, mask) = (&self.q, &self.k, &self.v, &self.mask.build()?);
        match (self.entry.as_deref(), self.packed) {
            (None, None) => sdpa(q, k, v, mask, options).map(accepted),
            (None, Some(packed)) => varlen(q, k, v, &packed.build()?, mask, options).map(accepted),
            (Some("lse"), Some(packed)) => {
                scaled_dot_product_attention_varlen_with_lse(q, k, v, &packed.build()?, mask, options).map(accepted)
            }
            (Some("lse"), None) => scaled_dot_product_attention_with_lse(q, k, v, mask, options).map(accepted),
            (Some("weights"), _) => scaled_dot_product_attention_with_weights(q, k, v, mask, options).map(accepted),
            _ => plan(q, k, v, mask, options).map(accepted),
        }
    }
}

/// Contexts and their log-sum-exps.
#[derive(Deserialize)]
struct Parts {
    parts: Vec<(Tensors, Tensors)>,
}

impl Call for Parts {
    fn call(self) -> Result<String> {
        let parts = self.parts.iter().map(|(context, lse)| ((**context).clone(), (**lse).clone()));
        merge_attention(&parts.collect::<Vec<_>>()).map(accepted)
    }
}

#[derive(Deserialize)]
struct Scores {
    scores: Tensors,
    lens: Lens,
}

impl Call for Scores {
    fn call(self) -> Result<String> {
        masked_softmax(&self.scores, Some(&self.lens.get()?), EmptyRows::Zero).map(accepted)
    }
}
