//! `scaled_dot_product_attention` and what goes with it, for batches and for packed sequences, and masks.

use candle_attention::{scaled_dot_product_attention as sdpa, scaled_dot_product_attention_varlen as varlen};

use crate::words::{Fields, dtype_and_shape, lens, mask, packed, paged, tensor, with};
use crate::*;

pub const SUBJECTS: &[(&str, Subject)] = &[
    ("attention", attention),
    ("merge", |_, call| {
        let parts: Vec<[Value; 2]> = call.need("parts")?;
        let parts = parts.iter().map(|[context, lse]| Ok((tensor(context)?, tensor(lse)?)));
        merge_attention(&parts.collect::<Result<Vec<_>>>()?).map(accepted)
    }),
    ("masked softmax", |_, call| {
        masked_softmax(&call.tensor("scores")?, call.read("lens", lens)?.as_ref(), FullyMaskedRows::Zero).map(accepted)
    }),
    ("packed sequences", |_, call| packed(call).map(accepted)),
    ("paged sequences", |_, call| paged(call).map(accepted)),
    ("additive mask", |line, _| {
        let (dtype, dims) = dtype_and_shape(line).expect("a dtype and a shape");
        AttentionMask::causal()
            .to_additive(<[usize; 4]>::try_from(dims).expect("four sizes").into(), dtype, &CPU)
            .map(accepted)
    }),
];

fn attention(_: &str, call: &Fields) -> Result<String> {
    let [slopes, sinks] = call.tensors(["slopes", "sinks"])?;
    let options = SdpaOptions::default().with_scale(call.get::<f64>("scale")?);
    let options = options.with_softcap(call.get::<f64>("softcap")?);
    // And whether it is training.
    let options = with(options, call.get("dropout")?, |options, (p, train)| options.with_dropout(p, train));
    let options = options.with_alibi_slopes(slopes.as_ref());
    let options = &options.with_sinks(sinks.as_ref()).with_backend(call.backend());
    let [q, k, v] = ["q", "k", "v"].map(|name| call.tensor(name));
    let q = &q?;
    let k = &k?;
    let v = &v?;
    let mask = &call.part("mask", mask)?.unwrap_or_else(AttentionMask::none);
    if let Some(paged) = call.part("paged", paged)? {
        return match call.get::<String>("entry")?.as_deref() {
            Some("lse") => scaled_dot_product_attention_paged_with_lse(q, k, v, &paged, mask, options).map(accepted),
            Some("plan") => plan_paged(q, k, v, &paged, mask, options).map(accepted),
            _ => scaled_dot_product_attention_paged(q, k, v, &paged, mask, options).map(accepted),
        };
    }
    match (call.get::<String>("entry")?.as_deref(), call.part("packed", packed)?) {
        (None, None) => sdpa(q, k, v, mask, options).map(accepted),
        (None, Some(packed)) => varlen(q, k, v, &packed, mask, options).map(accepted),
        (Some("lse"), Some(packed)) => {
            scaled_dot_product_attention_varlen_with_lse(q, k, v, &packed, mask, options).map(accepted)
        }
        (Some("lse"), None) => scaled_dot_product_attention_with_lse(q, k, v, mask, options).map(accepted),
        (Some("weights"), _) => scaled_dot_product_attention_with_weights(q, k, v, mask, options).map(accepted),
        _ => plan(q, k, v, mask, options).map(accepted),
    }
}
